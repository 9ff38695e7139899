"""The agent in a container of the kind that AWS Batch gives it: everything that it needs is in the bundle, nothing in the image.

An outer container of runc stands for Docker's; there is no Docker here. It is privileged, as Batch's has to be.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from savedworker.fleet.base import Launched, LaunchRequest
from savedworker.fleet.local import LocalFleet
from savedworker.model.record import State
from tests.bed.bundle import PYTHON
from tests.bed.outer import Job
from tests.runtime.conftest import gone
from tests.runtime.world import World

COUNTER = """
import os, secrets, sys, time
nonce = secrets.token_hex(8)
with open("/counted", "w") as file:
    for number in range(int(sys.argv[1])):
        print(nonce, number, flush=True)
        print(number, file=file, flush=True)
        time.sleep(0.03)
print(nonce, "lines", len(open("/counted").readlines()))
"""


class InContainers(LocalFleet):
    """Hosts of this machine on which the agent is the main program of a container with the image ``image``."""

    def __init__(self, folder: Path, image: Path, store: Path) -> None:
        super().__init__(agent=("to be set",))
        self._jobs, self._image, self._store = folder, image, store

    def launch(self, request: LaunchRequest) -> Launched:
        words = [
            *("/opt/savedworker/bin/savedworker", "agent", "--supervise"),
            *("--store", request.store_url, "--worker", request.worker, "--launch", request.launch, "--fleet", "local"),
            *("--instance", request.launch, "--zone", "zone-1", "--state-dir", f"/var/lib/savedworker/{request.launch}"),
            *("--cgroup-parent", f"/savedworker/{request.launch}"),
        ]  # fmt: skip
        job = Job(
            str(self._image), tuple(words), {"PATH": "/usr/bin:/bin"}, {str(self._store): str(self._store)}
        )
        file = job.write(self._jobs / f"{request.launch}.json")
        # The host's own agent is what starts the container; it is not started again when that ends with an error.
        self._agent = (sys.executable, "-m", "tests.bed.outer", str(file))
        self._restart_limit = 0
        return super().launch(request)


@pytest.fixture
def world(tmp_path: Path, bare_root: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[World]:
    with tempfile.TemporaryDirectory(prefix="sw-", dir="/var/tmp") as local:
        monkeypatch.setenv("SAVEDWORKER_LOCAL_DIR", local)
        (tmp_path / "store").mkdir()
        made = World(tmp_path)
        made.fleet = InContainers(tmp_path, bare_root, tmp_path / "store")
        try:
            yield made
        finally:
            made.close()
        assert gone(local) == []


@pytest.mark.parametrize("notice", [20.0, pytest.param(None, marks=pytest.mark.sweep)])
def test_a_worker_starts_is_checkpointed_and_goes_on_in_another_container(
    world: World, notice: float | None
) -> None:
    worker = world.submit(PYTHON, "-u", "-c", COUNTER, "400")
    world.until_output(worker, " 5\n")
    world.checkpoint(worker)
    world.preempt(worker, notice)
    is_the_same(world, worker)


def is_the_same(world: World, worker: str, numbers: int = 400) -> None:
    """One process from beginning to end, with its file."""
    record = world.until_settled(worker)
    assert record.state is State.SUCCEEDED, world.story(worker)
    assert (record.migrations, record.cold_starts) == (1, 0), world.story(worker)
    *lines, last = (line.split() for line in world.output(worker).splitlines())
    assert len({line[0] for line in (*lines, last)}) == 1
    seen = [int(line[1]) for line in lines]
    if record.incarnations[0].end_reason == "no_notice":  # what was done since the checkpoint is done again
        assert sorted(set(seen)) == list(range(numbers))
    else:
        assert seen == list(range(numbers))
    assert last[1:] == ["lines", str(numbers)]


def test_the_doctor_says_what_a_container_without_privileges_lacks(bare_root: Path, tmp_path: Path) -> None:
    words = ("/opt/savedworker/bin/savedworker", "doctor", "--store", "/tmp/store", "--json")
    found = {}
    for privileged in (True, False):
        job = Job(str(bare_root), words, {"PATH": "/usr/bin"}, privileged=privileged)
        file = job.write(tmp_path / f"{privileged}.json")
        done = subprocess.run(
            [sys.executable, "-m", "tests.bed.outer", str(file)],
            cwd=tmp_path,
            capture_output=True,
            text=True,
            timeout=120,
        )
        found[privileged] = {x["check"]: x for x in json.loads(done.stdout)}
    assert {x["check"] for x in found[True].values() if not x["ok"]} == set(), found[True]
    rights = found[False]["rights"]
    assert rights["level"] == "FAIL"
    assert "CAP_SYS_ADMIN" in rights["detail"]
