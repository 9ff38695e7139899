"""An agent that is killed in the middle of a restore: the worker goes on all the same, and none of its images stays in memory."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest

from savedworker.model.record import State
from tests.runtime.gate import PRELUDE, Gate
from tests.runtime.world import World

TICKER = (
    PRELUDE
    + """
import random
block = [random.Random(n).randbytes(1 << 20) for n in range(8)]
say("begun")
while closed("end"):
    time.sleep(0.05)
say("right" if block == [random.Random(n).randbytes(1 << 20) for n in range(8)] else "wrong")
"""
)
POINTS = ["restore.images.small", "restore.images.after", "restore.layer.after", "restore.runc.before", "restore.runc.after", "agent.runc.after"]  # fmt: skip
IN_CI = {"restore.images.after", "restore.runc.after"}


def image_mounts(folder: Path) -> list[str]:
    """The images that are mounted anywhere on this machine below ``folder``."""
    found = []
    for file in Path("/proc").glob("[0-9]*/mountinfo"):
        try:
            lines = file.read_text().splitlines()
        except OSError:
            continue  # it ended meanwhile
        points = [line.split(" ")[4] for line in lines]
        found += [f"{file}: {x}" for x in points if x.startswith(f"{folder}/") and x.endswith("/images")]
    return found


@pytest.mark.parametrize(
    "point", [x if x in IN_CI else pytest.param(x, marks=pytest.mark.sweep) for x in POINTS]
)
def test_no_image_stays_in_memory(
    world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, point: str
) -> None:
    gate, crash = Gate(tmp_path / "gate"), tmp_path / "crash"
    (crash / "seen").mkdir(parents=True)
    monkeypatch.setenv("SAVEDWORKER_CRASH", str(crash))
    worker = world.python(TICKER, volumes=(gate.volume,))
    world.until_output(worker, "begun")
    number = world.checkpoint(worker)
    hosts = world.host(worker).directory.parent
    (crash / point).write_text("=stop")
    world.client.preempt(worker, None)
    world.until(worker, lambda _: (crash / f"{point}.hit").exists(), f"get to {point}")
    assert image_mounts(hosts)
    agent = world.host(worker).agent_pid
    assert agent is not None
    os.kill(agent, signal.SIGKILL)
    world.until(worker, lambda r: r.migrations == 1 and r.state is State.RUNNING, "run on")
    world.until(worker, lambda _: not image_mounts(hosts), "have no images mounted")
    if world.record(worker).incarnations[-1].number == 2:  # the next agent re-attached
        assert not (world.layer(worker).parent / "images").exists()
    record = world.record(worker)
    assert record.incarnations[-1].restored_from == number, world.story(worker)
    assert record.cold_starts == 0
    gate.open("end")
    assert world.until_settled(worker).state is State.SUCCEEDED, world.story(worker)
    assert "right\n" in world.output(worker)
