"""Saves that are cut off, refused or too slow (cases C28, C32, C33, C34): the last complete checkpoint stands, and people are told."""

from __future__ import annotations

import contextlib
import logging
import os
import random
import signal
import time
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path

import boto3
import pytest
from moto.server import ThreadedMotoServer

from savedworker.cli.fit import fit_finding
from savedworker.fleet.local import HostInfo, network
from savedworker.model.errors import SavedWorkerError
from savedworker.model.record import State
from tests.faults.proxy import Proxy, Rule, Trouble
from tests.runtime.conftest import Pace
from tests.runtime.gate import PRELUDE, Gate
from tests.runtime.test_cases_owner import kill_agent, until_restarted
from tests.runtime.world import BRIDGE, World

CHANGES = (
    PRELUDE
    + """
import hashlib
data = bytearray(os.urandom(24 << 20))
seen = {}
def change(n):
    at = n * 4096 * 37 % len(data)
    data[at : at + 4096] = hashlib.sha512(str(n).encode()).digest() * 64
    seen[at] = n
def whole():
    return all(data[at : at + 4096] == hashlib.sha512(str(n).encode()).digest() * 64 for at, n in seen.items())
n = 0
while closed("end"):
    n += 1
    change(n)
    say("tick", n, whole())
    time.sleep(0.05)
say("ended", whole())
"""
)


@pytest.fixture
def gate(tmp_path: Path) -> Gate:
    return Gate(tmp_path / "gate")


def ticks(world: World, worker: str) -> int:
    return world.output(worker).count("tick ")


def runs_on(world: World, worker: str) -> None:
    before = ticks(world, worker)
    world.until(worker, lambda _: ticks(world, worker) > before, "go on")


def ends_well(world: World, worker: str, gate: Gate) -> None:
    gate.open("end")
    record = world.until_settled(worker)
    assert record.state is State.SUCCEEDED, world.story(worker)
    assert record.cold_starts == 0, world.story(worker)
    output = world.output(worker)
    assert "ended True\n" in output
    assert "False" not in output


def in_the_store(world: World, worker: str) -> set[str]:
    """Numbers of the checkpoints that are visible; each of them has to be whole."""
    from savedworker.checkpoint.keys import stored_chunk_keys
    from savedworker.store.worker import WorkerStore

    documents = WorkerStore(world.client.store, worker)
    numbers = set(documents.list_checkpoints())
    for number in numbers:
        for key in stored_chunk_keys(documents.load_manifest(number), documents.chunks):
            documents.chunks.get(key)
    return numbers


@pytest.mark.timeout(1800)
@pytest.mark.parametrize("kills", [2, pytest.param(30, marks=pytest.mark.sweep)])
def test_an_agent_killed_at_any_moment_of_a_save_leaves_the_newest_complete_checkpoint(
    world: World, gate: Gate, kills: int
) -> None:
    """C32, C33. Killed with -9 at random moments of dump and upload; then it is saved again, within its normal time."""
    chance = random.Random(kills)
    worker = world.python(CHANGES, volumes=(gate.volume,))
    world.until_output(worker, "tick 3 ")
    world.checkpoint(worker)
    began = time.monotonic()
    newest = world.checkpoint(worker)
    normal = time.monotonic() - began
    fits = fit_finding(world.record(worker), "local", datetime.now(UTC))
    assert (fits.check, fits.level) == ("notice", "OK"), fits
    assert "a last checkpoint would take about" in fits.detail
    for kill in range(kills):
        known = {c.number for c in world.record(worker).checkpoints}
        world.client.request_checkpoint(worker)
        time.sleep(chance.uniform(0.0, 1.2 * normal))  # the moment is what is random
        before = kill_agent(world, worker)
        until_restarted(world, worker, before)
        runs_on(world, worker)
        assert known <= in_the_store(world, worker), "a complete one is gone"
        world.until(
            worker,
            lambda r: r.checkpoint_answered >= r.checkpoint_requests,
            "take the one that was asked for",
        )
        if kill % 5 == 1:
            newest = world.record(worker).checkpoints[-1].number
            world.preempt(worker, notice=None)
            assert world.record(worker).incarnations[-1].restored_from == newest, world.story(worker)
            runs_on(world, worker)
        else:
            began = time.monotonic()
            newest = world.checkpoint(worker)
            assert time.monotonic() - began < 3 * normal + 6
        home = world.layer(worker).parent
        assert not list(home.glob("images-*")), "leftovers of killed saves fill the disk"
    ends_well(world, worker, gate)


@pytest.mark.timeout(1800)
@pytest.mark.parametrize("kills", [2, pytest.param(30, marks=pytest.mark.sweep)])
def test_an_agent_killed_at_any_moment_of_a_restore_is_followed_by_one_that_restores(
    world: World, gate: Gate, kills: int
) -> None:
    """C32. The same moments on the other side: what is restored is complete, and an older one is no reason to begin anew."""
    chance = random.Random(kills)
    worker = world.python(CHANGES, volumes=(gate.volume,))
    world.until_output(worker, "tick 3 ")
    world.checkpoint(worker)
    for _ in range(kills):
        before = world.host(worker).launch
        world.client.preempt(worker, 20.0)

        def next_host(before: str = before) -> HostInfo | None:
            lease = world.record(worker).lease
            if lease is None or lease.released or lease.launch == before:
                return None
            with contextlib.suppress(SavedWorkerError):
                return world.fleet.host(lease.launch)
            return None

        world.until(worker, lambda _: next_host(), "have another host")
        time.sleep(chance.uniform(0.0, 1.2))  # the moment is what is random
        host = next_host()
        if host is not None and host.agent_pid is not None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(host.agent_pid, signal.SIGKILL)
        world.until_running(worker)
        runs_on(world, worker)
        world.checkpoint(worker)
    ends_well(world, worker, gate)


@pytest.fixture
def refusing(monkeypatch: pytest.MonkeyPatch) -> Iterator[Proxy]:
    """moto's S3 behind a proxy, both where every host can reach them."""
    network.ensure_bridge()
    logging.getLogger("werkzeug").setLevel(logging.ERROR)
    server = ThreadedMotoServer(ip_address=BRIDGE, port=0, verbose=False)
    server.start()
    proxy = Proxy(BRIDGE, server.get_host_and_port())
    for name, value in {
        "AWS_ENDPOINT_URL": proxy.url,
        "AWS_ACCESS_KEY_ID": "test",
        "AWS_SECRET_ACCESS_KEY": "test",
        "AWS_REGION": "us-east-1",
    }.items():
        monkeypatch.setenv(name, value)
    client = boto3.client("s3", endpoint_url=proxy.url)
    client.create_bucket(Bucket="workers")
    client.close()
    yield proxy
    proxy.close()
    server.stop()


class TestOverObjectStore:
    """C34. S3 (moto) takes no data any more after some checkpoints, while records still get through."""

    @pytest.fixture
    def store_url(self, refusing: Proxy) -> str:
        return "s3://workers/tests"

    @pytest.mark.parametrize("trouble", ["503", pytest.param("denied", marks=pytest.mark.sweep)])
    def test_uploads_that_stop_are_seen_at_once_and_go_on_by_themselves(
        self, world: World, refusing: Proxy, gate: Gate, trouble: Trouble
    ) -> None:
        worker = world.python(CHANGES, volumes=(gate.volume,), interval=1.0)
        world.until(
            worker,
            lambda r: r.checkpoints and int(r.checkpoints[-1].number.partition("-")[2]) >= 3,
            "save three times",
        )
        refusing.add(Rule(trouble, "PUT", r"/chunks/|/manifest\.json", times=10**6))
        record = world.until(worker, lambda r: not r.protected, "say that it is not protected")
        assert "the last checkpoint failed" in str(record.unprotected_reasons)
        good = record.checkpoints[-1]
        age = world.report(worker).last_checkpoint
        assert age is not None
        world.until(
            worker,
            lambda r: (
                r.checkpoints[-1] == good
                and (now := world.report(worker).last_checkpoint) is not None
                and now.age_seconds > age.age_seconds + 1
            ),
            "show that its last good checkpoint grows old",
        )
        runs_on(world, worker)
        refusing.clear()
        world.until(worker, lambda r: r.protected and r.checkpoints[-1] != good, "save by itself again")
        refusing.add(Rule(trouble, "PUT", r"/chunks/|/manifest\.json", times=10**6))
        world.until(worker, lambda r: not r.protected, "say that it is not protected again")
        good = world.record(worker).checkpoints[-1]
        world.preempt(worker, notice=None)
        refusing.clear()
        report = world.report(worker)
        assert report.incarnations[-1].restored_from == good.number
        assert report.lost_seconds > 0
        ends_well(world, worker, gate)


GROWS = (
    PRELUDE
    + """
data = [os.urandom(80 << 20)]
say("ready")
wait_for("grow")
for _ in range(12):
    data.append(os.urandom(64 << 20))
say("grown")
while closed("end"):
    say("tick", 1, all(len(x) >= 64 << 20 for x in data))
    time.sleep(0.05)
say("ended", True)
"""
)


@pytest.mark.sweep
def test_a_worker_that_would_not_fit_its_notice_is_said_to_be_unprotected_and_goes_back_to_what_is_complete(
    world: World, gate: Gate, pace: Pace
) -> None:
    """C28. A slow store: what has come since the last checkpoint takes longer than the notice, and that is known beforehand."""
    pace(2.0)
    worker = world.python(GROWS, volumes=(gate.volume,))
    world.until_output(worker, "ready\n")
    good = world.checkpoint(worker)
    world.until(worker, lambda r: r.protected, "be protected")
    gate.open("grow")
    record = world.until(worker, lambda r: not r.protected, "say that it is not protected", 40)
    assert "a checkpoint would take about" in str(record.unprotected_reasons)
    assert "a notice gives 30s" in str(record.unprotected_reasons)
    world.until_output(worker, "grown\n")
    world.client.preempt(worker, 8.0)
    world.until(worker, lambda r: r.incarnation is not None and r.incarnation.number == 2, "move", 60)
    pace(0.0)
    world.until_running(worker)
    report = world.report(worker)
    assert report.incarnations[1].restored_from == good, world.story(worker)
    assert report.lost_seconds > 0
    assert in_the_store(world, worker) == {good}, "nothing half-written is visible"
    failed = [e.detail for e in report.timeline if e.event == "checkpoint_failed"]
    assert failed, "why there is no newer one"
    world.until_output(worker, "tick ")
    ends_well(world, worker, gate)
