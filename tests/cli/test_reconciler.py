"""The background rounds: one worker's trouble is not another's, and a store that is away for a while ends nothing."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from datetime import UTC, datetime

import pytest

from savedworker.cli import reconciler
from savedworker.cli.reconciler import Reconciler, Watched
from savedworker.model.errors import Corrupt, NotFound, Unreachable
from savedworker.model.record import State, WorkerRecord

NOW = datetime.now(UTC)


class Rounds:
    """A client whose rounds go as told."""

    def __init__(self, **how: Callable[[int], WorkerRecord]) -> None:
        self.how, self.calls = how, dict.fromkeys(how, 0)

    def reconcile(self, worker: str) -> WorkerRecord:
        self.calls[worker] += 1
        return self.how[worker](self.calls[worker])


def record(worker: str, state: State) -> WorkerRecord:
    return WorkerRecord(id=worker, created_at=NOW, state=state)


def until(true: Callable[[], bool], timeout: float = 60) -> None:
    end = time.monotonic() + timeout
    while not true():
        assert time.monotonic() < end
        time.sleep(0.02)


@pytest.fixture(autouse=True)
def fast(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reconciler, "FASTEST", 0.02)


def test_a_worker_is_brought_on_until_it_is_settled_and_then_left_alone():
    rounds = Rounds(w=lambda n: record("w", State.RUNNING if n < 5 else State.SUCCEEDED))
    with Reconciler(rounds, slowest=0.05) as running:  # type: ignore[arg-type]
        running.add("w")
        running.add("w")
        until(lambda: running.watched["w"].settled)
        time.sleep(0.2)
    assert rounds.calls == {"w": 5}


@pytest.mark.parametrize("how", ["forget", "drop"])
def test_a_worker_that_is_let_go_during_its_round_has_no_other_and_ends_no_thread(how: str):
    def let_go(n: int) -> WorkerRecord:
        getattr(running, how)("gone")
        return record("gone", State.RUNNING)

    rounds = Rounds(gone=let_go, good=lambda n: record("good", State.RUNNING))
    with Reconciler(rounds, slowest=0.02) as running:  # type: ignore[arg-type]
        running.add("gone")
        until(lambda: rounds.calls["gone"] > 0)
        running.add("good")
        until(lambda: rounds.calls["good"] > 5)
    assert rounds.calls["gone"] == 1


def test_an_error_of_one_worker_or_a_slow_fleet_holds_no_other_up():
    def broken(n: int) -> WorkerRecord:
        raise Corrupt("damaged")

    over = threading.Event()

    def slow(n: int) -> WorkerRecord:
        over.wait(120)
        return record("slow", State.SUCCEEDED)

    rounds = Rounds(
        broken=broken, slow=slow, good=lambda n: record("good", State.RUNNING if n < 5 else State.SUCCEEDED)
    )
    with Reconciler(rounds, slowest=0.05, threads=2) as running:  # type: ignore[arg-type]
        for worker in rounds.how:
            running.add(worker)
        until(lambda: running.watched["good"].settled)
        until(lambda: running.watched["broken"].failures > 1)
    assert not running.watched["slow"].settled, "leaving waits for nobody"
    over.set()


def test_a_store_that_does_not_answer_is_waited_for_and_a_worker_that_is_gone_is_not():
    seen = Watched("w", error=Unreachable("away"), failing_since=time.monotonic() - reconciler.PATIENCE / 2)
    assert seen.lasting_error() is None
    seen.failing_since = time.monotonic() - reconciler.PATIENCE - 1
    assert seen.lasting_error() is seen.error
    seen = Watched("w", error=NotFound("gone"), failing_since=time.monotonic())
    assert seen.lasting_error() is seen.error
    seen = Watched("w", error=Corrupt("damaged"), failing_since=time.monotonic() - 1)
    assert seen.lasting_error() is None


def test_failures_slow_down_and_a_success_forgets_them():
    def sometimes(n: int) -> WorkerRecord:
        if n <= 3:
            raise Unreachable("away")
        return record("w", State.RUNNING)

    rounds = Rounds(w=sometimes)
    pauses = []
    with Reconciler(rounds, slowest=0.05, on_round=lambda seen: pauses.append(seen.pause)) as running:  # type: ignore[arg-type]
        running.add("w")
        until(lambda: len(pauses) >= 4)
    assert pauses[:4] == [0.04, 0.08, 0.16, 0.02]
    assert running.watched["w"].error is None


def test_a_thousand_quiet_workers_cost_little():
    rounds = Rounds(**{f"w{n}": lambda n, w=f"w{n}": record(w, State.RUNNING) for n in range(1000)})  # type: ignore[misc]
    cpu = time.process_time()
    with Reconciler(rounds, slowest=2.5, threads=8) as running:  # type: ignore[arg-type]
        for worker in rounds.how:
            running.add(worker)
        time.sleep(3)
        until(lambda: all(calls >= 3 for calls in rounds.calls.values()))
    assert time.process_time() - cpu < 2.5
