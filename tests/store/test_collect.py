"""What a collection deletes and what it keeps, on a directory and on S3, and killed at every point."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest

from savedworker.checkpoint.keys import stored_chunk_keys
from savedworker.crashpoints import POINTS, VARIABLE
from savedworker.model import defaults
from savedworker.model.errors import Corrupt, NotFound
from savedworker.model.manifest import Manifest
from savedworker.model.record import Launch, Lease, State, WorkerRecord
from savedworker.model.spec import WorkerSpec
from savedworker.store import Store, WorkerStore, open_store
from savedworker.store import collect as collecting
from savedworker.store.ages import store_time
from savedworker.store.collect import Collected, collect
from tests.store.memory import memory_store
from tests.store.test_collect_races import Agent, check

NOW = datetime(2030, 1, 1, tzinfo=UTC)
DAY = 24 * 3600.0
A, B, C = b"a" * 100, b"b" * 200, b"c" * 300
Later = Callable[[float], None]


def create(store: Store, name: str = "w", **fields: object) -> WorkerStore:
    worker = WorkerStore(store, name)
    worker.create_spec(WorkerSpec(id=name, command=("true",)))
    worker.create_record(WorkerRecord(id=name, created_at=NOW, **fields))  # type: ignore[arg-type]
    return worker


class SavingAgent(Agent):
    """On a real store, with the clock of the machine."""

    def __init__(self, store: Store, keep: int = 0) -> None:
        super().__init__(store, memory_store()[1], keep)


@pytest.fixture
def later(monkeypatch: pytest.MonkeyPatch) -> Later:
    """From now on collections find everything so many seconds older."""

    def turn(seconds: float) -> None:
        monkeypatch.setattr(
            collecting, "store_time", lambda store, key: store_time(store, key) + timedelta(seconds=seconds)
        )

    return turn


def keys(store: Store) -> set[str]:
    return {info.key for info in store.list() if info.key != "clock" and "/doomed/" not in info.key}


def run(store: Store, name: str = "w", *, dry_run: bool = False) -> Collected:
    return collect(WorkerStore(store, name), stored_chunk_keys, dry_run=dry_run)


def test_what_the_record_stopped_keeping_goes_after_the_grace_and_the_rest_stays(
    store: Store, later: Later
) -> None:
    create(store)
    agent = SavingAgent(store)
    agent.save([A, B], [C])
    only_first = keys(store)
    agent.save([B], [C])
    before = keys(store)
    agent.worker.chunks.put(b"of a save that was killed")
    assert run(store).objects == 0
    later(2 * DAY)
    everything = keys(store)
    planned = run(store, dry_run=True)
    assert keys(store) == everything
    done = run(store)
    gone = everything - keys(store)
    assert planned == done == Collected("w", checkpoints=1, objects=len(gone), bytes=done.bytes)
    assert done.bytes > 0
    assert {key for key in gone if "/chunks/" not in key} == {"workers/w/checkpoints/1-1/manifest.json"}
    assert len(gone) == 3, (
        "its manifest, the chunk A, and what the killed save left; the layer is the same in both"
    )
    assert len(only_first) == len(before) - 1
    check(store)
    assert run(store).objects == 0


def test_a_manifest_whose_commit_may_be_on_its_way_is_kept_with_its_chunks(
    store: Store, later: Later
) -> None:
    create(store)
    agent = SavingAgent(store)
    agent.commit = lambda manifest: None  # type: ignore[method-assign]
    agent.save([A], [])
    later(9 * DAY)
    assert run(store).objects == 0
    del agent.commit
    agent.save([B], [])
    assert run(store).checkpoints == 1, "a later one was committed, so this one never will be"
    check(store)
    with pytest.raises(NotFound):
        agent.worker.load_manifest("1-1")


@pytest.mark.parametrize("damage", ["manifest altered", "manifest missing", "index missing", "index altered"])
def test_where_a_kept_checkpoint_cannot_be_read_nothing_is_deleted(
    store: Store, later: Later, damage: str
) -> None:
    create(store)
    agent = SavingAgent(store)
    agent.save([A], [])
    agent.save([B], [C])
    manifest = agent.worker.load_manifest("1-2")
    index = f"workers/w/chunks/{manifest.layer.chunks[0]}"
    match damage.split():
        case "manifest", "altered":
            store.put("workers/w/checkpoints/1-2/manifest.json", b"{}")
        case "manifest", _:
            store.delete(["workers/w/checkpoints/1-2/manifest.json"])
        case _, "missing":
            store.delete([index])
        case _:
            store.put(index, b"nonsense" * 10)
    later(2 * DAY)
    before = keys(store)
    with pytest.raises(Corrupt):
        run(store)
    assert keys(store) == before


LEASE = Lease(incarnation=1, holder="h", launch="l-1", renewed_at=NOW)
ENDED = Launch(id="l-1", requested_at=NOW, state="ended")


def test_a_worker_goes_when_it_ended_longer_ago_than_its_retention_and_no_other_one_does(
    store: Store, later: Later
) -> None:
    released = LEASE.model_copy(update={"released": True})
    create(store, "w", state=State.SUCCEEDED, lease=released, launches=(ENDED,))
    create(store, "w2", state=State.RUNNING)
    create(store, "held", state=State.CANCELLED, lease=LEASE, launches=(ENDED,))
    create(store, "bills", state=State.FAILED, launches=(ENDED.model_copy(update={"state": "ending"}),))
    SavingAgent(store).save([A], [B])
    store.create("workers/w/logs/stdout/1/begin-00000000000000000000", b"")
    before = keys(store)
    for name in ("w", "w2", "held", "bills"):
        assert run(store, name).objects == 0
    assert run(store).retained_for == pytest.approx(defaults.RETENTION, abs=60)
    later(defaults.RETENTION - 60)
    assert not run(store).whole
    later(defaults.RETENTION + 60)
    own = {key for key in before if key.startswith("workers/w/")}
    assert run(store, dry_run=True).objects == len(own) + len(list(store.list("workers/w/doomed")))
    assert keys(store) == before
    assert run(store).whole
    assert keys(store) == before - own
    for name in ("w2", "held", "bills"):
        assert run(store, name).objects == 0
    with pytest.raises(NotFound, match="there is no worker w"):
        run(store)


def test_what_somebody_wrote_for_a_worker_that_is_gone_goes_and_a_worker_in_the_making_stays(
    store: Store, later: Later
) -> None:
    store.put("workers/ghost/chunks/" + "0" * 64, b"x")
    WorkerStore(store, "new").create_spec(WorkerSpec(id="new", command=("true",)))
    assert run(store, "ghost").objects == 0
    later(2 * DAY)
    assert run(store, "ghost").objects == 1
    assert run(store, "new").objects == 0
    assert keys(store) == {"workers/new/spec.json"}


def test_objects_that_are_none_of_ours_stay(store: Store, later: Later) -> None:
    create(store)
    SavingAgent(store).save([A], [])
    foreign = {
        "workers/w/chunks/readme",
        "workers/w/checkpoints/1-1/notes",
        "workers/w/chunks/" + "0" * 64 + ".bak",
    }
    for key in foreign:
        store.put(key, b"x")
    later(2 * DAY)
    run(store)
    assert foreign <= keys(store)


PROGRAM = """
import sys
from savedworker.checkpoint.keys import stored_chunk_keys
from savedworker.store import WorkerStore, open_store
from savedworker.store.collect import collect
collect(WorkerStore(open_store(sys.argv[1]), "w"), stored_chunk_keys)
"""
COLLECTION = sorted(point for point in POINTS if point.startswith("collect."))


def age(root: Path, seconds: float) -> None:
    for folder, _, names in os.walk(root):
        for name in names:
            path = Path(folder, name)
            then = path.stat().st_mtime - seconds
            os.utime(path, (then, then))


@pytest.mark.parametrize("point", COLLECTION)
def test_a_collection_that_is_killed_anywhere_breaks_nothing_and_can_be_repeated(
    tmp_path: Path, point: str
) -> None:
    root = tmp_path / "store"
    store = open_store(str(root))
    ended = ".worker." in point
    worker = create(store)
    agent = SavingAgent(store)
    agent.save([A], [])
    agent.save([B], [])
    if ended:
        worker.update_record(lambda record: record.model_copy(update={"state": State.SUCCEEDED}))
    age(root, 30 * DAY)
    environment = {
        VARIABLE: point,
        "PYTHONPATH": str(Path(collecting.__file__).parents[2]),
        "PATH": "/usr/bin:/bin",
    }
    killed = subprocess.run(
        [sys.executable, "-c", PROGRAM, str(root)],
        env=environment,
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert killed.returncode == -9, killed.stderr
    if ended:
        assert WorkerStore(store, "w").load_record().record.state is State.SUCCEEDED
        assert run(store).whole
        assert keys(store) == set()
    else:
        check(store)
        agent.restart()  # it had been told of no day that passed
        agent.save([A, B], [C])
        check(store)
        run(store)
        check(store)
        assert agent.worker.list_checkpoints() == ["1-3"]


def test_leftovers_of_killed_writes_in_a_directory_are_counted_and_removed(tmp_path: Path) -> None:
    store = open_store(str(tmp_path))
    assert store.leftovers(remove=True) == (0, 0)
    store.put("a", b"x")
    scratch = tmp_path / ".tmp"
    (scratch / "young").write_bytes(b"123")
    (scratch / "old").write_bytes(b"12345")
    (scratch / "old.gone").mkdir()
    (scratch / "old.gone" / "cur").write_bytes(b"1")
    for path in (scratch / "old", scratch / "old.gone"):
        os.utime(path, (1, 1))
    assert store.leftovers(remove=False) == (2, 6)
    assert store.leftovers(remove=True) == (2, 6)
    assert store.leftovers(remove=True) == (0, 0)
    assert [path.name for path in scratch.iterdir()] == ["young"]


def test_checkpoints_of_the_last_day_are_only_read_where_they_may_name_something_that_would_go(
    store: Store, later: Later, monkeypatch: pytest.MonkeyPatch
) -> None:
    create(store)
    agent = SavingAgent(store)
    for _ in range(3):
        agent.save([A], [B])
    read: list[str] = []
    load = WorkerStore.load_manifest

    def seen(self: WorkerStore, number: str) -> Manifest:
        read.append(number)
        return load(self, number)

    monkeypatch.setattr(WorkerStore, "load_manifest", seen)
    run(store)
    assert read == [], "nothing is old"
    later(2 * DAY)
    monkeypatch.setattr(collecting._Collection, "_unwanted", lambda *_: set())
    run(store)
    assert read == ["1-3"], "it names all that is old"
