"""A worker that no engine looks after is checkpointed, ends its instance and can be resumed (promise 7)."""

from __future__ import annotations

from pathlib import Path

import pytest

from savedworker.model.record import State, WorkerRecord
from savedworker.model.spec import Volume
from tests.runtime.counter import Counter
from tests.runtime.gate import PRELUDE, Gate
from tests.runtime.stories import Program, steps_are_once
from tests.runtime.world import World


def ended(world: World, launch: str) -> bool:
    return world.fleet.describe([launch])[launch].state == "ended"


def test_a_worker_without_an_engine_ends_its_instance_and_goes_on_when_one_comes_back(
    world: World, counter: Counter
) -> None:
    program = Program("random_walk.py", 60)
    counter.hold_at(20)
    worker = program.submit(world, counter, orphan_after=8.0)
    counter.until(10)
    world.until(worker, lambda r: r.engine_heard_at, "be heard of")
    world.pause_controller(worker)
    record = world.until(worker, lambda r: not r.lease_held, "leave its instance")
    end = record.incarnations[0]
    assert (record.state, end.end_reason, end.lost_seconds) == (State.MIGRATING, "orphaned", 0)
    world.until(worker, lambda _: ended(world, end.launch), "have its instance ended, by that itself")

    world.resume_controller(worker)
    counter.hold_at(60)
    record = world.until_settled(worker)
    assert (record.state, record.migrations, record.cold_starts) == (State.SUCCEEDED, 1, 0), world.story(
        worker
    )
    steps_are_once(counter, program, in_flight=1)


DEVICE = Volume(source="/dev/loop-control", target="/dev/loop-control")
HOLDS_A_DEVICE = (
    PRELUDE
    + """
file = os.open("/dev/loop-control", os.O_RDWR)
say("ready")
wait_for("end")
"""
)


@pytest.fixture
def gate(tmp_path: Path) -> Gate:
    return Gate(tmp_path / "gate")


def test_what_cannot_be_checkpointed_is_not_given_up_for_want_of_an_engine(world: World, gate: Gate) -> None:
    """It says so, runs on to its end, and then its instance ends."""
    worker = world.python(HOLDS_A_DEVICE, volumes=(DEVICE, gate.volume), orphan_after=4.0)
    world.until_output(worker, "ready")
    launch = world.record(worker).launches[-1].id
    world.pause_controller(worker)

    def said(record: WorkerRecord) -> bool:
        return any(x.event == "checkpoint_failed" and "device" in x.detail for x in record.recent)

    assert world.until(worker, said, "say why it stays").lease_held
    gate.open("end")
    assert world.until(worker, lambda r: r.state.terminal, "end").state is State.SUCCEEDED
    world.until(worker, lambda _: ended(world, launch), "have its instance ended")


def test_an_instance_that_waits_for_the_lease_does_not_wait_without_an_engine(
    world: World, gate: Gate
) -> None:
    """A replacement that was launched on notice, of a worker that cannot leave."""
    worker = world.python(HOLDS_A_DEVICE, volumes=(DEVICE, gate.volume), orphan_after=6.0)
    world.until_output(worker, "ready")
    world.client.preempt(worker, 300.0)
    record = world.until(worker, lambda r: len(r.launches) == 2, "have a replacement launched")
    spare = record.launches[-1].id
    world.pause_controller(worker)
    record = world.until(worker, lambda _: ended(world, spare), "have the replacement ended")
    assert record.lease_held
