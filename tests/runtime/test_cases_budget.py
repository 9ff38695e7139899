"""Preemptions and failures are counted apart (case C12): neither uses up the other's budget, and none goes on for ever."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from savedworker.model import defaults
from savedworker.model.record import Reason, State
from savedworker.model.spec import CheckpointPolicy
from tests.runtime.counter import Counter
from tests.runtime.gate import PRELUDE, Gate
from tests.runtime.stories import Program, steps_are_once
from tests.runtime.world import BRIDGE, World

NOTICE = 25.0

TICKS = (
    PRELUDE
    + """
for i in range(60):
    say(i)
    time.sleep(0.02)
wait_for("end")
sys.exit(1)
"""
)

ENDS_AFTER_EVERY_RESTORE = f"""
import socket, sys, time
with socket.create_connection(("{BRIDGE}", int(sys.argv[1].rpartition(":")[2]))) as outside:
    print("ready", flush=True)
    try:
        outside.recv(1)
    except OSError as error:
        print("restored:", error, flush=True)
time.sleep(0.5)
sys.exit(1)
"""


def moves(world: World, worker: str) -> list[str | None]:
    """What each incarnation was restored from."""
    return [x.restored_from for x in world.report(worker).incarnations]


def test_preemptions_and_the_users_own_error_have_budgets_of_their_own(
    world: World, counter: Counter, tmp_path: Path
) -> None:
    """C12. An engine with retries=1: try 1 is preempted and then fails by itself, try 2 is preempted and succeeds."""
    counter.hold_at(25)
    gate = Gate(tmp_path / "gate")
    first = world.python(TICKS, volumes=(gate.volume,), max_migrations=1)
    world.until_output(first, "\n10\n")
    world.preempt(first, NOTICE)
    gate.open("end")
    record = world.until_settled(first)
    assert (record.state, record.reason, record.exit_code) == (State.FAILED, Reason.EXIT, 1), world.story(
        first
    )
    assert (record.migrations, record.cold_starts) == (1, 0)
    program = Program("random_walk.py", 60)
    second = program.submit(world, counter, max_migrations=1)
    counter.until(10)
    world.preempt(second, NOTICE)
    counter.hold_at(60)
    record = world.until_settled(second)
    assert (record.state, record.migrations) == (State.SUCCEEDED, 1), world.story(second)
    steps_are_once(counter, program, in_flight=1)


@pytest.mark.sweep
def test_a_budget_of_five_migrations_takes_five_and_a_sixth_is_refused(
    world: World, counter: Counter
) -> None:
    """C12, in full: five preemptions are survived, and what comes after the budget is named as that."""
    program = Program("random_walk.py", 400)
    worker = program.submit(world, counter, max_migrations=5)
    for move in range(5):
        counter.until(20 * (move + 1))
        world.preempt(worker, NOTICE)
    counter.until_arrivals(len(counter.arrivals) + 5)
    world.client.preempt(worker, None)
    record = world.until_settled(worker)
    assert (record.state, record.reason, record.migrations) == (State.FAILED, Reason.MIGRATION_BUDGET, 5)


def test_a_program_that_exits_after_its_restore_has_ended_and_is_not_restored_again(
    world: World, counter: Counter
) -> None:
    """C12. The user's own exit is final, and marked as being soon after a restore."""
    worker = world.python(ENDS_AFTER_EVERY_RESTORE, counter.address)
    world.until_output(worker, "ready")
    world.preempt(worker, NOTICE)
    record = world.until_settled(worker)
    assert (record.state, record.reason, record.exit_code) == (State.FAILED, Reason.EXIT, 1), world.story(
        worker
    )
    assert record.after_restore
    assert len(record.incarnations) == 2
    assert world.output(worker).count("restored:") == 1
    assert [x.end_reason for x in world.report(worker).incarnations] == ["notice", "failed"]


def test_restores_that_lose_their_instance_before_progress_are_bounded_and_then_the_older_one_is_used(
    world: World, counter: Counter
) -> None:
    """C12. The stated number of restores of one checkpoint, then the one before, never an endless loop."""
    program = Program("random_walk.py", 1000)
    worker = program.submit(world, counter)
    counter.until(5)
    older = world.checkpoint(worker)
    counter.until(counter.steps[-1] + 5)
    newer = world.checkpoint(worker)
    for _ in range(defaults.RESTORES_WITHOUT_PROGRESS + 1):
        world.preempt(worker, notice=None)
    assert moves(world, worker) == [None, *[newer] * defaults.RESTORES_WITHOUT_PROGRESS, older], world.story(
        worker
    )
    assert len(counter.nonces) == 1
    record = world.record(worker)
    assert (record.state.terminal, record.cold_starts) == (False, 0)


def test_progress_after_a_restore_gives_the_checkpoint_its_tries_back(world: World, counter: Counter) -> None:
    """C12. Only restores without progress count: one that commits a checkpoint of its own was a good one."""
    program = Program("random_walk.py", 1000)
    worker = program.submit(
        world, counter, checkpoint=CheckpointPolicy(interval=None, restores_without_progress=1)
    )
    counter.until(5)
    number = world.checkpoint(worker)
    world.preempt(worker, notice=None)
    assert world.record(worker).checkpoints[0].failed_restores == 1
    newer = world.checkpoint(worker)
    entries = {c.number: c.failed_restores for c in world.record(worker).checkpoints}
    assert entries == {number: 0, newer: 0}


@pytest.mark.parametrize("policy", ["fail", "cold_start"])
def test_when_no_checkpoint_is_left_to_try_policy_decides(
    world: World, counter: Counter, policy: str
) -> None:
    """C12. Out of tries: ``fail`` names a crash loop, ``cold_start`` begins again and says so."""
    rules = CheckpointPolicy.model_validate(
        {"interval": None, "restores_without_progress": 1, "when_unrestorable": policy}
    )
    worker = Program("random_walk.py", 1000).submit(world, counter, checkpoint=rules)
    counter.until(5)
    world.checkpoint(worker)
    world.preempt(worker, notice=None)
    world.preempt(worker, notice=None)
    if policy == "fail":
        record = world.until_settled(worker)
        assert (record.state, record.reason) == (State.FAILED, Reason.CRASH_LOOP), world.story(worker)
        assert (record.migrations, record.cold_starts) == (1, 0)
        return
    record = world.record(worker)
    assert (record.migrations, record.cold_starts) == (1, 1), world.story(worker)
    counter.wait(lambda arrivals: len({a.nonce for a in arrivals}) == 2, "a second process", 60)


@pytest.mark.parametrize("budget", [0, 1])
def test_max_migrations_means_what_it_says_and_zero_means_none(
    world: World, counter: Counter, budget: int
) -> None:
    """C12. ``max_migrations``: so many moves are made, and the next reclaim ends the worker with that reason."""
    worker = Program("random_walk.py", 1000).submit(world, counter, max_migrations=budget)
    for _ in range(budget):
        counter.until_arrivals(len(counter.arrivals) + 5)
        world.preempt(worker, NOTICE)
    counter.until_arrivals(len(counter.arrivals) + 5)
    world.client.preempt(worker, NOTICE)
    record = world.until_settled(worker)
    assert (record.state, record.reason) == (State.FAILED, Reason.MIGRATION_BUDGET), world.story(worker)
    assert (record.exit_code, record.migrations, record.cold_starts) == (None, budget, 0)
    assert len(record.incarnations) == budget + 1
    assert f"max_migrations={budget}" in record.detail


def test_a_checkpoint_with_a_damaged_chunk_is_left_out_and_the_one_before_is_restored(
    world: World, counter: Counter
) -> None:
    """C12. A restore that cannot be used costs no instance: the same one goes on with the older checkpoint."""
    worker = Program("random_walk.py", 1000, extra=("1",)).submit(world, counter)
    counter.until(5)
    older = world.checkpoint(worker)
    counter.until(counter.steps[-1] + 5)
    newer = world.checkpoint(worker)
    root = world.folder / "store" / "workers" / worker
    (only_newer := _chunks(root, newer) - _chunks(root, older)) or pytest.fail(
        "the checkpoints share everything"
    )
    for key in only_newer:
        (root / "chunks" / key).write_bytes(b"not a chunk")
    world.preempt(worker, notice=None)
    assert moves(world, worker) == [None, older], world.story(worker)
    record = world.record(worker)
    assert (record.migrations, record.cold_starts, len(record.incarnations)) == (1, 0, 2)
    assert [c.number for c in record.checkpoints if c.damage_seen] == [newer]


def _chunks(root: Path, number: str) -> set[str]:
    manifest = json.loads((root / "checkpoints" / number / "manifest.json").read_text())
    return {group["key"] for space in manifest["memory"] for group in (*space["groups"], *space["deltas"])}
