"""Spec, record, events and checkpoints of one worker; documents that are wrong are said to be."""

from __future__ import annotations

import json
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime

import pytest

from savedworker.model.base import FORMAT
from savedworker.model.errors import AlreadyExists, BadSpec, Conflict, Corrupt, NotFound, Refused
from savedworker.model.events import Noted
from savedworker.model.fingerprint import Fingerprint
from savedworker.model.manifest import ImageFile, Manifest, Runtime, StoredFile, StreamPosition
from savedworker.model.record import WorkerRecord
from savedworker.model.spec import WorkerSpec
from savedworker.store import Store, WorkerStore, list_workers, open_store
from savedworker.store.documents import dump, load
from savedworker.store.sealing import NO_KEY
from savedworker.store.worker import digest_of
from tests.store import keys
from tests.store.memory import Altering

NOW = datetime(2026, 1, 2, 3, 4, 5, 678901, tzinfo=UTC)
SPEC = WorkerSpec(id="w-1", command=("echo", "grüße"), env={"B": "2", "A": "1"})
RECORD = WorkerRecord(id="w-1", created_at=NOW)


@pytest.fixture
def worker(store: Store) -> WorkerStore:
    return WorkerStore(store, "w-1")


def noted(text: str) -> Noted:
    return Noted(at=NOW, event="note", detail=text)


def make_manifest(number: str, worker: str = "w-1") -> Manifest:
    empty = StoredFile(name="index", size=0, chunks=())
    return Manifest(
        worker=worker,
        number=number,
        incarnation=int(number.split("-")[0]),
        cause="periodic",
        frozen_at=NOW,
        images=(ImageFile(name="files.img", size=3),),
        packed=StoredFile(name="packed", size=3, chunks=("0" * 64,)),
        layer=empty,
        shm=empty,
        log=StreamPosition(stdout=7),
        runtime=Runtime(hostname="h"),
        fingerprint=Fingerprint(machine="x86_64"),
        bytes_image=3,
    )


def test_a_document_is_canonical_and_comes_back_equal() -> None:
    data = dump(SPEC)
    assert load(WorkerSpec, data) == SPEC
    assert dump(load(WorkerSpec, data)) == data
    assert (
        data
        == json.dumps(json.loads(data), sort_keys=True, separators=(",", ":"), ensure_ascii=False).encode()
        + b"\n"
    )
    assert "grüße".encode() in data
    assert load(WorkerRecord, dump(RECORD)) == RECORD


def test_a_document_of_a_newer_version_is_refused_by_name() -> None:
    newer = json.dumps({"format": FORMAT + 1, "something": "unknown"}).encode()
    with pytest.raises(Refused, match=r"workers/w-1/spec.json was written by a newer version.*Fix: upgrade"):
        load(WorkerSpec, newer, "workers/w-1/spec.json")


@pytest.mark.parametrize(
    "data",
    [
        b"", b"{", b"\xff", b"[]", b"null", b"{}", b'{"format":"1"}', b'{"format":true}', b'{"format":0}', b'{"format":1.0}',
        b'{"format":1}', b"[" * 100_000, dump(SPEC)[:-10], dump(SPEC).replace(b'"id":"w-1"', b'"id":"../x"'),
        dump(SPEC).replace(b'"id"', b'"unknown":1,"id"'),
    ],
)  # fmt: skip
def test_anything_else_is_corrupt_and_named(data: bytes) -> None:
    with pytest.raises(Corrupt, match=r"here/spec\.json"):
        load(WorkerSpec, data, "here/spec.json")


def test_a_worker_is_created_once(worker: WorkerStore) -> None:
    with pytest.raises(NotFound, match="no worker w-1"):
        worker.load_spec()
    with pytest.raises(NotFound, match="no worker w-1"):
        worker.load_record()
    worker.create_spec(SPEC)
    with pytest.raises(AlreadyExists):
        worker.create_spec(SPEC)
    assert worker.load_spec() == SPEC
    held = worker.create_record(RECORD)
    assert held.record.revision == 1
    with pytest.raises(Conflict):
        worker.create_record(RECORD)
    assert worker.load_record() == held


def test_every_write_of_the_record_has_the_next_revision_and_a_fresh_writer(worker: WorkerStore) -> None:
    held = worker.create_record(RECORD)
    writers = {held.record.writer}
    for n in range(2, 5):
        held = worker.swap_record(held, held.record.model_copy(update={"detail": "the same"}))
        assert held.record.revision == n
        assert worker.load_record() == held
        writers.add(held.record.writer)
    assert len(writers) == 4


def test_a_record_that_changed_in_the_meantime_is_not_overwritten(worker: WorkerStore) -> None:
    held = worker.create_record(RECORD)
    newer = worker.swap_record(held, held.record.model_copy(update={"detail": "newer"}))
    with pytest.raises(Conflict):
        worker.swap_record(held, held.record.model_copy(update={"detail": "stale"}))
    assert worker.load_record() == newer


def test_update_asks_again_after_a_conflict_and_writes_nothing_for_an_equal_record(
    worker: WorkerStore,
) -> None:
    held = worker.create_record(RECORD)
    assert worker.update_record(lambda record: record) == held
    calls = 0

    def disturbed(record: WorkerRecord) -> WorkerRecord:
        nonlocal calls
        calls += 1
        if calls == 1:
            now = worker.load_record()
            worker.swap_record(now, now.record.model_copy(update={"detail": "other"}))
        return record.model_copy(update={"events": record.events + 1})

    updated = worker.update_record(disturbed)
    assert (calls, updated.record.events, updated.record.detail, updated.record.revision) == (
        2,
        1,
        "other",
        3,
    )

    def always(record: WorkerRecord) -> WorkerRecord:
        now = worker.load_record()
        worker.swap_record(now, now.record.model_copy(update={"detail": now.record.detail + "."}))
        return record.model_copy(update={"events": 99})

    with pytest.raises(Conflict):
        worker.update_record(always, tries=2)


def test_concurrent_updates_all_count(tmp_path: object) -> None:
    worker = WorkerStore(open_store(str(tmp_path)), "w-1")
    worker.create_record(RECORD)

    def add(_: int) -> None:
        worker.update_record(
            lambda record: record.model_copy(update={"events": record.events + 1}), tries=100
        )

    with ThreadPoolExecutor(5) as pool:
        list(pool.map(add, range(50)))
    record = worker.load_record().record
    assert (record.events, record.revision) == (50, 51)


def test_notes_of_an_engine_s_side_are_replaced_and_deleted(worker: WorkerStore) -> None:
    for name, note in (("a", b"1"), ("a", b"2"), ("b", b"3")):
        worker.keep_engine_note(name, note)
    worker.delete_engine_notes(["a", "never-there"])
    assert [worker.load_engine_note(x) for x in ("a", "b")] == [None, b"3"]


def test_a_document_of_another_worker_is_not_accepted(worker: WorkerStore, store: Store) -> None:
    other = WorkerStore(store, "w-2")
    for write in (lambda: other.create_spec(SPEC), lambda: other.create_record(RECORD)):
        with pytest.raises(Corrupt):
            write()
    worker.create_spec(SPEC)
    store.put("workers/w-2/spec.json", store.get("workers/w-1/spec.json").data)
    with pytest.raises(Corrupt, match="w-1"):
        other.load_spec()


def test_events_are_appended_once_and_come_back_in_order(worker: WorkerStore, store: Store) -> None:
    for incarnation, n in [(1, 2), (0, 1), (2, 11), (1, 10), (1, 3)]:
        worker.append_event(incarnation, n, noted(f"{n}"))
    worker.append_event(1, 3, noted("3"))
    with pytest.raises(AlreadyExists):
        worker.append_event(1, 3, noted("another"))
    store.put("workers/w-1/events/README", b"foreign")
    found = worker.events()
    assert [(stored.incarnation, stored.n) for stored in found] == [(0, 1), (1, 2), (1, 3), (1, 10), (2, 11)]
    assert found[1].event == noted("2")
    store.put("workers/w-1/events/5-5.json", store.get("workers/w-1/events/1-3.json").data)
    with pytest.raises(Corrupt):
        worker.events()


def test_a_checkpoint_is_visible_with_its_manifest_and_not_before(worker: WorkerStore, store: Store) -> None:
    store.put("workers/w-1/checkpoints/1-1/partial", b"")
    store.put("workers/w-1/checkpoints/no-number/manifest.json", b"")
    assert worker.list_checkpoints() == []
    for number in ("2-1", "1-10", "1-9"):
        worker.publish_manifest(make_manifest(number))
    assert worker.load_manifest("1-10") == make_manifest("1-10")
    assert worker.list_checkpoints() == ["1-9", "1-10", "2-1"]
    with pytest.raises(NotFound, match="no checkpoint 1-1"):
        worker.load_manifest("1-1")
    with pytest.raises(Refused):
        worker.load_manifest("../../spec.json")
    worker.delete_manifest("1-10")
    assert worker.list_checkpoints() == ["1-9", "2-1"]


def test_a_manifest_is_immutable_and_stays_in_its_place(worker: WorkerStore, store: Store) -> None:
    worker.publish_manifest(make_manifest("1-1"))
    worker.publish_manifest(make_manifest("1-1"))
    with pytest.raises(AlreadyExists):
        worker.publish_manifest(make_manifest("1-1").model_copy(update={"bytes_image": 4}))
    with pytest.raises(Corrupt):
        worker.publish_manifest(make_manifest("1-2", worker="w-2"))
    store.put("workers/w-1/checkpoints/1-3/manifest.json", dump(make_manifest("1-1")))
    with pytest.raises(Corrupt):
        worker.load_manifest("1-3")


def test_workers_are_listed_and_foreign_names_left_out(store: Store) -> None:
    assert list_workers(store) == []
    for name in ("b", "a.1", "UPPER", "-x"):
        store.put(f"workers/{name}/spec.json", b"")
    store.put("workers/file", b"")
    assert list_workers(store) == ["a.1", "b"]


@pytest.mark.parametrize("name", ["", "..", "a/b", "UPPER", "x" * 64, "a b"])
def test_an_impossible_worker_id_is_refused(store: Store, name: str) -> None:
    with pytest.raises(BadSpec):
        WorkerStore(store, name)


def test_a_record_that_did_not_change_is_not_parsed_again_and_one_that_did_is(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    parsed: list[str] = []

    def counted(kind: type[WorkerRecord], data: bytes, where: str = "") -> WorkerRecord:
        parsed.append(where)
        return load(kind, data, where)

    monkeypatch.setattr("savedworker.store.worker.load", counted)
    mine, other = WorkerStore(store, "w-1"), WorkerStore(store, "w-1")
    mine.create_record(RECORD)
    seen = [mine.load_record() for _ in range(3)]
    assert parsed == []
    assert {held.version for held in seen} == {other.load_record().version}
    assert len(parsed) == 1
    other.record_event(noted("by another one"))
    assert mine.load_record() == other.load_record()
    assert mine.load_record().record.events == seen[0].record.events + 1
    assert len(parsed) == 2
    mine.swap_record(mine.load_record(), mine.load_record().record)
    assert other.load_record() == mine.load_record()


def test_no_byte_of_a_plain_checkpoint_can_be_altered_unnoticed(worker: WorkerStore, store: Store) -> None:
    """Neither of its manifest, which the record has the digest of, nor of a chunk, whose name is its content's."""
    chunk = worker.chunks.put(b"some content " * 20)
    manifest = make_manifest("1-1")
    worker.publish_manifest(manifest)
    digest = digest_of(manifest)
    assert worker.load_manifest("1-1", digest) == manifest
    for key, read in (
        ("workers/w-1/checkpoints/1-1/manifest.json", lambda: worker.load_manifest("1-1", digest)),
        (f"workers/w-1/chunks/{chunk}", lambda: worker.chunks.get(chunk)),
    ):
        whole = store.get(key).data
        # Every byte where that is cheap, some where each costs a request to a server.
        for at in range(0, len(whole), 1 if store.url.startswith("file") else 37):
            store.put(key, bytes([*whole[:at], whole[at] ^ (1 << at % 8), *whole[at + 1 :]]))
            try:
                found = read()
            except (Corrupt, Refused):
                continue
            assert found == b"some content " * 20, at  # zstd's frame has bits that mean nothing to it
        for other in (whole[:-1], whole + b" ", b""):
            store.put(key, other)
            with pytest.raises((Corrupt, Refused)):
                read()
        store.put(key, whole)
        read()


@pytest.mark.parametrize("sealed", [False, True])
def test_a_document_that_arrives_altered_is_read_once_more_before_it_is_called_damaged(sealed: bool) -> None:
    backend = Altering()
    store = Store("memory://", backend, keys.sealing(keys.key()) if sealed else NO_KEY)
    worker = WorkerStore(store, "w-1")
    worker.create_spec(SPEC)
    worker.create_record(RECORD)
    manifest = make_manifest("1-1")
    worker.publish_manifest(manifest)
    reads: list[tuple[Callable[[WorkerStore], object], object]] = [
        (lambda w: w.load_spec(), SPEC),
        (lambda w: w.load_record().record.id, "w-1"),
        (lambda w: w.load_manifest("1-1", digest_of(manifest)), manifest),
    ]
    for read, expected in reads:
        reader = WorkerStore(store, "w-1")
        _ = reader.sealer
        backend.times = 1
        assert read(reader) == expected
        backend.times = 2
        with pytest.raises(Corrupt):
            read(reader)
        assert backend.times == 0


def test_a_sealed_spec_that_arrives_altered_is_opened_with_its_own_key_the_second_time() -> None:
    """Also where the altered byte is one of those that say which key that is."""
    backend = Altering()
    store = Store("memory://", backend, keys.sealing(keys.key()))
    WorkerStore(store, "w-1").create_spec(SPEC)
    backend.times = 1
    assert WorkerStore(store, "w-1").load_spec() == SPEC
