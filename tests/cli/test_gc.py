"""``savedworker gc``, and the collections of a controller that runs for itself."""

from __future__ import annotations

import json
import os
import threading
import time
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest

from savedworker.cli import controller
from savedworker.cli.collector import Collector, next_pause
from savedworker.cli.reconciler import Reconciler
from savedworker.model import defaults
from savedworker.model.errors import Corrupt, NotFound
from savedworker.model.record import State, WorkerRecord
from savedworker.model.spec import WorkerSpec
from savedworker.store import WorkerStore
from savedworker.store.collect import Collected
from tests.cli.conftest import Shell

NOW = datetime.now(UTC)
DAY = 24 * 3600.0


def put(shell: Shell, name: str, state: State) -> WorkerStore:
    shell.put(WorkerRecord(id=name, created_at=NOW, state=state, fleet="fake"))
    return WorkerStore(shell.client.store, name)


def age(shell: Shell, seconds: float) -> None:
    """All that is in the store now was written so much earlier."""
    for folder, _, names in os.walk(shell.store):
        for name in names:
            path = Path(folder, name)
            then = path.stat().st_mtime - seconds
            os.utime(path, (then, then))


@pytest.fixture
def aged(shell: Shell) -> Shell:
    """One worker that ended long ago, and one that runs, with an old chunk that no checkpoint names."""
    put(shell, "ended", State.SUCCEEDED)
    running = put(shell, "running", State.RUNNING)
    running.chunks.put(b"x" * 1000)
    age(shell, 8 * DAY)
    return shell


def workers(shell: Shell) -> list[str]:
    return [document["id"] for document in shell.json("list")]


def test_a_dry_run_says_what_would_be_deleted_and_deletes_nothing(aged: Shell):
    result = aged("gc", "--dry-run")
    assert result.exit_code == 0
    ended, running, total = result.stdout.splitlines()
    assert ended.startswith("ended: would delete 2 objects, ")
    assert ended.endswith(", all of it: its retention is over")
    assert running.startswith("running: would delete 1 object, ")
    assert total.startswith("2 workers: would delete 3 objects, ")
    assert workers(aged) == ["ended", "running"]
    assert aged("gc", "--dry-run").stdout == result.stdout


def test_it_deletes_what_it_said_and_then_nothing_more(aged: Shell):
    planned = aged.json("gc", "--dry-run")
    done = aged.json("gc")
    assert planned == {**done, "dry_run": True}
    assert [(w["id"], w["whole"], w["checkpoints"], w["objects"], w["error"]) for w in done["workers"]] == [
        ("ended", True, 0, 2, None),
        ("running", False, 0, 1, None),
    ]
    assert done["objects"] == 3
    assert done["bytes"] == sum(w["bytes"] for w in done["workers"]) > 0
    assert done["leftovers"] == {"objects": 0, "bytes": 0}
    assert workers(aged) == ["running"]
    assert aged("gc").stdout == "running: nothing to delete\n1 worker: nothing to delete\n"


def test_only_the_workers_that_are_named_are_collected(aged: Shell):
    assert aged.json("gc", "running")["objects"] == 1
    assert workers(aged) == ["ended", "running"]


def test_a_worker_that_cannot_be_collected_is_told_and_the_others_are_collected(aged: Shell):
    (aged.store / "workers/ended/spec.json").write_text("{}")
    result = aged("gc", "ended", "running", "nobody")
    assert result.exit_code == 1
    assert result.stdout.splitlines()[0].startswith("running: deleted 1 object, ")
    broken, missing = result.stderr.splitlines()
    assert broken.startswith("savedworker: ended: workers/ended/spec.json has no format version")
    assert missing.startswith("savedworker: nobody: there is no worker nobody in ")
    result = aged("gc", "--json")
    assert result.exit_code == 1
    first, second = json.loads(result.stdout)["workers"]
    assert (first["error"]["code"], first["objects"]) == ("corrupt", 0)
    assert second["error"] is None
    assert workers(aged) == ["ended", "running"]


def test_an_empty_store_has_nothing_to_delete(shell: Shell):
    assert shell("gc").stdout == "0 workers: nothing to delete\n"
    assert shell.nothing_created()


def until(true: Callable[[], bool], timeout: float = 60) -> None:
    end = time.monotonic() + timeout
    while not true():
        assert time.monotonic() < end
        time.sleep(0.01)


class Bell:
    """In place of the signals, which only a main thread gets."""

    def __init__(self, stop: threading.Event) -> None:
        self.stop = stop

    def __enter__(self) -> Bell:
        return self

    def __exit__(self, *_: object) -> None:
        return

    def take(self) -> bool:
        return self.stop.is_set()

    def wake(self) -> None:
        return

    def wait(self, seconds: float) -> None:
        self.stop.wait(seconds)


def test_a_collector_collects_each_worker_again_and_again_whatever_goes_wrong_with_one() -> None:
    calls: dict[str, int] = {}

    def collect(worker: str) -> Collected:
        calls[worker] = calls.get(worker, 0) + 1
        if worker == "broken":
            raise Corrupt("damaged")
        if worker == "worse":
            raise RuntimeError("a mistake of ours")
        if worker == "gone":
            raise NotFound("no such worker")
        return Collected(worker, whole=worker == "ended")

    with Collector(collect, every=0.02, draw=lambda: 1.0) as collector:
        for worker in ("good", "broken", "worse", "gone", "ended"):
            collector.add(worker)
            collector.add(worker)
        until(lambda: all(calls.get(worker, 0) > 2 for worker in ("good", "broken", "worse")))
        assert (calls["gone"], calls["ended"]) == (1, 1)


def test_a_worker_that_has_ended_is_looked_at_rarely_and_when_its_retention_is_over():
    hour, day = defaults.COLLECT_EVERY, defaults.COLLECTION_GRACE
    assert next_pause(Collected("w"), hour) == hour
    assert next_pause(Collected("w", retained_for=7 * day), hour) == day
    assert next_pause(Collected("w", retained_for=10.0), hour) == 11.0
    assert next_pause(Collected("w", whole=True), hour) is None


def test_a_controller_collects_and_brings_on_a_worker_that_is_made_again_under_a_name_that_went(
    aged: Shell, monkeypatch: pytest.MonkeyPatch
):
    class Quick(Collector):
        def __init__(self, collect: Callable[[str], Collected]) -> None:
            super().__init__(collect, every=0.1, draw=lambda: 0.0)

    made: list[Reconciler] = []

    class Kept(Reconciler):
        def __init__(self, *args: Any, **options: Any) -> None:
            super().__init__(*args, **options)
            made.append(self)

    monkeypatch.setattr(controller, "Collector", Quick)
    monkeypatch.setattr(controller, "Reconciler", Kept)
    monkeypatch.setattr(controller, "DISCOVER", 0.05)
    stop = threading.Event()
    monkeypatch.setattr(controller, "Signals", lambda _: Bell(stop))
    running = threading.Thread(target=controller._control, args=(aged.client, (), False))
    running.start()
    try:
        until(lambda: workers(aged) == ["running"])
        until(lambda: "ended" not in made[0].watched)
        aged.client.submit(WorkerSpec(id="ended", command=("true",), fleet="fake"))
        until(lambda: aged.record("ended").state is State.SUCCEEDED, 60)
    finally:
        stop.set()
        running.join()
