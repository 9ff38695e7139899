"""Long: tasks of a real Airflow, on SQLite and on PostgreSQL, that move at random moments, and faults in the middle of moves.

./scripts/test -m sweep tests/airflow/test_executor_sweep.py
"""

from __future__ import annotations

import contextlib
import os
import random
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from urllib.parse import quote

import pytest

from tests.airflow.engine import eventually
from tests.airflow.executor_bed import Bed, Run, executor_bed, in_the_meantime, oracle
from tests.airflow.postgres import postgres

pytestmark = [pytest.mark.sweep, pytest.mark.engine, pytest.mark.criu, pytest.mark.timeout(1800)]

SUITE = ("python", "mapped", "deferred", "poke", "reschedule", "retried", "failed", "branches", "server")
SEED = int(os.environ.get("SAVEDWORKER_SWEEP_SEED", "1"))
ROUNDS = int(os.environ.get("SAVEDWORKER_SWEEP_ROUNDS", "1"))
"""Each round moves every task of the suite twice."""


@pytest.fixture(scope="module", params=["sqlite", "postgresql"])
def bed(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Bed]:
    with contextlib.ExitStack() as stack:
        settings = stack.enter_context(postgres()) if request.param == "postgresql" else {}
        yield stack.enter_context(executor_bed(tmp_path_factory.mktemp(request.param), settings))


@pytest.fixture(scope="module")
def local(bed: Bed) -> dict[str, Run]:
    """The suite under LocalExecutor."""
    return oracle(bed, SUITE, dict.fromkeys(SUITE, 12), 300)


def _said(bed: Bed, worker: str, text: str) -> bool:
    return text in bed.output(worker)


def _ended(bed: Bed, worker: str) -> bool:
    return bed.client.record(worker).state.terminal


class Mover:
    """Takes hosts away at random moments, each worker's at most twice."""

    def __init__(self, bed: Bed, run: Run, seed: str) -> None:
        self.bed, self.run = bed, run
        self.chance = random.Random(seed)
        self.next: dict[str, float] = {}
        self.moved: dict[str, int] = {}

    def act(self) -> None:
        for record in self.run.workers():
            due = self.next.setdefault(record.id, time.monotonic() + self.chance.uniform(0.0, 12.0))
            if record.state == "running" and time.monotonic() >= due and self.moved.get(record.id, 0) < 2:
                self.moved[record.id] = self.moved.get(record.id, 0) + 1
                self.next[record.id] = time.monotonic() + self.chance.uniform(2.0, 10.0)
                self.run.move(record.id, self.chance.choice([10.0, 20.0, 30.0]), wait=False)


def _disagreements(run: Run, local: Run) -> list[str]:
    """In what the run, whose tasks were moved, differs from what it is under LocalExecutor."""
    with contextlib.suppress(AssertionError):  # it takes a moment until all lines are in the log, of either
        eventually(lambda: run.facts() == local.facts(), 30, "they agree", every=2.0)
    workers = run.workers()
    found = {
        "facts": (run.facts(), local.facts()),
        "callbacks": (run.callbacks(), local.callbacks()),
        "cold starts": (sum(x.cold_starts for x in workers), 0),
        "seconds lost": (sum(x.lost_seconds for w in workers for x in w.incarnations), 0),
    }
    wrong = [
        f"{run.dag}: {what}: {is_} is not {should}" for what, (is_, should) in found.items() if is_ != should
    ]
    return [*wrong, run.told()] if wrong else []


@pytest.mark.parametrize("round_", range(ROUNDS))
def test_two_moves_of_each_task_at_random_moments(bed: Bed, local: dict[str, Run], round_: int) -> None:
    """The whole suite at once."""
    runs = {name: bed.run(f"saved_{name}", 12) for name in SUITE}
    movers = [Mover(bed, run, f"{SEED} {name} {round_}") for name, run in runs.items()]

    def act() -> None:
        for mover in movers:
            mover.act()

    in_the_meantime(runs.values(), act, 900)
    moves = {name: sum(x.migrations for x in run.workers()) for name, run in runs.items()}
    with (Path(os.environ.get("SAVEDWORKER_SWEEP_LOG", "/dev/null"))).open("a") as log:
        log.write(f"{SEED} {round_}: {sum(moves.values())} moves: {moves}\n")
    wrong = [x for name, run in runs.items() for x in _disagreements(run, local[name])]
    assert not wrong, "\n".join(wrong)
    assert all(moves.values()), moves
    assert bed.refused_heartbeats() == []


def test_three_moves_and_no_retries(bed: Bed) -> None:
    """C09, C54, C64."""
    run = bed.run("saved_python", 40)
    worker = run.running(said="traffic step 1")
    for _ in range(3):
        run.move(worker)
    assert run.ended() == "success"
    (task,) = run.tasks()
    assert (task["try_number"], run.callbacks()) == (1, [])
    (record,) = run.workers()
    assert (record.migrations, record.cold_starts) == (3, 0)
    assert sum("moved from" in x for x in run.marks()) == 3
    assert bed.refused_heartbeats() == []


def test_five_moves_and_one_real_error_use_one_retry(bed: Bed) -> None:
    """C12."""
    run = bed.run("saved_retried", 30)
    for moves in (3, 2):
        worker = run.running()
        eventually(partial(_said, bed, worker, "step 1"), 120, "it has begun")
        for _ in range(moves):
            run.move(worker)
        eventually(partial(_ended, bed, worker), 120, "it has ended")
    assert run.ended() == "success"
    (task,) = run.tasks()
    assert task["try_number"] == 2
    assert [x.migrations for x in run.workers()] == [3, 2]
    assert run.callbacks() == ["work 1"]


def test_the_scheduler_is_killed_during_a_move(bed: Bed) -> None:
    """C15: one copy at any moment, and the same try."""
    run = bed.run("saved_python", 50)
    worker = run.running(said="traffic step 3")
    run.move(worker, 20.0, wait=False)
    bed.airflow.kill_component("scheduler")
    time.sleep(3.0)
    bed.airflow.start_component("scheduler")
    assert run.ended() == "success"
    (task,) = run.tasks()
    assert (task["try_number"], run.callbacks()) == (1, [])
    record = bed.client.record(worker)
    assert (record.migrations, record.cold_starts) == (1, 0)
    for before, after in zip(record.incarnations, record.incarnations[1:], strict=False):
        assert before.ended_at is not None
        assert before.ended_at <= after.taken_at
    assert [x for x in run.log() if x.startswith("traffic step")] == [f"traffic step {i}" for i in range(50)]


def test_a_move_without_a_scheduler_for_three_minutes_outlives_tokens_and_heartbeats(bed: Bed) -> None:
    """C55: away for 180 s with tokens of 60 s and a heartbeat limit of 40 s."""
    run = bed.run("saved_python", 30)
    worker = run.running(said="traffic step 3")
    bed.airflow.kill_component("scheduler")
    run.move(worker, 20.0, wait=False)
    eventually(lambda: not bed.client.record(worker).lease_held, 60, "it has left its host")
    time.sleep(180)
    bed.airflow.start_component("scheduler")
    assert run.ended() == "success"
    (task,) = run.tasks()
    assert (task["try_number"], run.callbacks()) == (1, [])
    record = bed.client.record(worker)
    assert (record.migrations, record.cold_starts) == (1, 0)
    assert record.incarnations[-1].away_seconds > 175


def test_the_api_server_is_away_for_three_minutes_during_a_move(bed: Bed) -> None:
    run = bed.run("saved_python", 60)
    worker = run.running(said="traffic step 3")
    run.move(worker, 20.0, wait=False)
    bed.airflow.kill_component("api-server")
    eventually(lambda: bed.client.record(worker).migrations == 1, 90, "it moves while the API server is away")
    time.sleep(180)
    bed.airflow.start_component("api-server")
    assert run.ended() == "success"
    (task,) = run.tasks()
    assert (task["try_number"], run.callbacks()) == (1, [])
    assert [x for x in run.log() if x.startswith("traffic step")] == [f"traffic step {i}" for i in range(60)]


def test_execution_timeout_counts_the_time_in_which_the_task_runs(bed: Bed) -> None:
    """30 s: 20 s of work and half a minute on the way is in time; 40 s of work is not, however it moves."""
    run = bed.run("saved_timed", 40)
    worker = run.running(said="timed step 4")
    bed.airflow.kill_component("scheduler")
    run.move(worker, 20.0, wait=False)
    eventually(lambda: not bed.client.record(worker).lease_held, 60, "it has left its host")
    time.sleep(30)
    bed.airflow.start_component("scheduler")
    assert run.ended() == "success"
    assert bed.client.record(worker).incarnations[-1].away_seconds > 25
    slow = bed.run("saved_timed", 80)
    slow.move(slow.running(said="timed step 4"))
    assert slow.ended() == "failed"
    said = slow.log()
    assert "timed step 40" in said, "the time on the way did not count"
    assert "timed step 79" not in said


@pytest.mark.parametrize("bed", ["postgresql"], indirect=True)
def test_two_schedulers_of_which_one_is_killed_during_moves(bed: Bed) -> None:
    """On SQLite Airflow itself runs one only."""
    bed.airflow.start_component("scheduler-2")
    try:
        runs = [bed.run("saved_python", 40) for _ in range(3)]
        workers = [run.running(said="traffic step 3") for run in runs]
        for run, worker in zip(runs, workers, strict=True):
            run.move(worker, 20.0, wait=False)
        bed.airflow.kill_component("scheduler")
        for run in runs:
            assert run.ended() == "success"
            (task,) = run.tasks()
            assert (task["try_number"], run.callbacks()) == (1, [])
            assert len(run.workers()) == 1
        assert [bed.client.record(x).migrations for x in workers] == [1, 1, 1]
    finally:
        bed.airflow.kill_component("scheduler-2")
        bed.airflow.start_component("scheduler")


@pytest.mark.parametrize("what", ["clear", "success", "failed"])
def test_what_a_user_does_during_a_move(bed: Bed, what: str) -> None:
    """C18, for tasks of the executor."""
    run = bed.run("saved_python", 60)
    worker = run.running(said="traffic step 3")
    run.move(worker, 20.0, wait=False)
    eventually(
        lambda: bed.client.record(worker).state in ("checkpointing", "migrating", "restoring"), 60, "it moves"
    )
    if what == "clear":
        body = {"dag_run_id": run.id, "task_ids": ["work"], "dry_run": False, "only_failed": False}
        bed.airflow.call("POST", f"/api/v2/dags/{run.dag}/clearTaskInstances", body)
    else:
        path = f"/api/v2/dags/{run.dag}/dagRuns/{quote(run.id)}/taskInstances/work"
        bed.airflow.call("PATCH", path, {"new_state": what})
    eventually(partial(_ended, bed, worker), 60, "its worker is dropped")
    if bed.client.record(worker).state != "cancelled":
        # The move was over in no time: Airflow told the task itself, at its next heartbeat.
        assert "shouldn't be running anymore" in bed.output(worker)
    eventually(lambda: not bed.client.record(worker).lease_held, 30, "nothing of it executes")
    if what != "clear":
        assert run.ended() == what
        assert len(run.workers()) == 1
        return
    fresh = run.running(said="traffic step 3", seconds=180)
    assert fresh != worker
    first, second = run.workers()
    assert first.incarnations[-1].ended_at is not None
    assert first.incarnations[-1].ended_at <= second.created_at, "never two at once"
    assert run.ended() == "success"


@pytest.mark.parametrize("name", ["python", "deferred", "reschedule"])
def test_the_host_is_lost_right_after_the_task_told_airflow(bed: Bed, name: str) -> None:
    run = bed.run(f"saved_{name}", 4)
    worker = run.running()
    eventually(lambda: bed.client.record(worker).concluded, 120, "it has told Airflow", every=0.02)
    run.move(worker, None, wait=False)
    assert run.ended() == "success"
    (task,) = run.tasks()
    assert (task["try_number"], run.callbacks()) == (1, [])
    record = bed.client.record(worker)
    assert len(record.incarnations) == 1, "it is never restored"


def test_the_host_is_lost_after_the_record_and_before_the_api_server(bed: Bed) -> None:
    """The executor delivers what the worker could not."""
    run = bed.run("saved_quiet", 8)
    worker = run.running(said="quiet step 2")
    bed.airflow.kill_component("api-server")
    eventually(lambda: bed.client.record(worker).concluded, 60, "how it ends stands in its record")
    assert not bed.client.record(worker).state.terminal
    run.move(worker, None, wait=False)
    eventually(lambda: bed.client.record(worker).state.terminal, 60, "it is lost")
    bed.airflow.start_component("api-server")
    assert run.ended() == "success"
    (task,) = run.tasks()
    assert (task["state"], task["try_number"], run.callbacks()) == ("success", 1, [])
    assert len(bed.client.record(worker).incarnations) == 1


def test_a_task_that_is_lost_again_and_again_ends_as_what_it_is(bed: Bed) -> None:
    """Without any checkpoint it begins again from nothing, in the same try, as often as it may; then it fails, with the reason."""
    run = bed.run("saved_python", 60)
    worker = run.running(said="traffic step 1")
    for _ in range(3):
        run.move(worker, None)
        eventually(
            lambda: bed.client.record(worker).state == "running" or bed.client.record(worker).state.terminal,
            120,
            "it begins again",
        )
    record = bed.client.record(worker)
    assert record.cold_starts == 3
    (task,) = run.tasks()
    assert (task["state"], task["try_number"]) == ("running", 1)
    run.move(worker, None, wait=False)
    assert run.ended() == "failed"
    record = bed.client.record(worker)
    assert (record.state, record.reason) == ("failed", "lost")
    assert any("lost" in x for x in run.marks())
