"""A collection never takes a chunk that a checkpoint names: beside a save, beside another collection, killed anywhere, however slow."""

from __future__ import annotations

import contextlib
import random
from collections.abc import Callable
from datetime import UTC, datetime

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from savedworker.checkpoint.keys import stored_chunk_keys
from savedworker.checkpoint.layer import Entry, Extent, LayerIndex
from savedworker.model.errors import Corrupt, NotFound, Temporary
from savedworker.model.fingerprint import Fingerprint
from savedworker.model.manifest import (
    Manifest,
    MemoryGroup,
    Runtime,
    StoredFile,
    StoredMemory,
    StreamPosition,
)
from savedworker.model.record import CheckpointEntry, WorkerRecord
from savedworker.model.spec import WorkerSpec
from savedworker.store import ChunkStore, Store, WorkerStore
from savedworker.store.collect import collect
from savedworker.store.sealing import PLAIN
from tests.store.memory import MemoryBackend, Turns, memory_store

GRACE = 1000.0
NOW = datetime(2030, 1, 1, tzinfo=UTC)
POOL = [b"one" * 50, b"two" * 50, b"three" * 50, b"four" * 50]
"""What the worker's memory and files may hold: few things, so that they go and come back."""


def index_of(contents: list[bytes]) -> LayerIndex:
    files = [
        Entry(f"f{n}", "file", size=len(data), data=(Extent.whole(0, len(data), PLAIN.chunk_name(data)),))
        for n, data in enumerate(contents)
    ]
    return LayerIndex([Entry(".", "dir"), *files])


def whole_file(name: str, data: bytes, put: Callable[[bytes], str]) -> StoredFile:
    return StoredFile(name=name, size=len(data), chunks=(put(data),))


def stored_memory(number: int, data: bytes, chunks: ChunkStore) -> StoredMemory:
    group = MemoryGroup(key=chunks.put(data), windows=(number,))
    return StoredMemory(
        name=f"pagemap-{number}.img", pages=f"pages-{number}.img", size=len(data), groups=(group,)
    )


class Agent:
    """Saves as checkpoint/save.py and agent/incarnation.py do, as far as the store can see."""

    def __init__(self, store: Store, backend: MemoryBackend, keep: int = 1) -> None:
        self.clock = lambda: backend.seconds
        self.store, self.kept_most = store, keep
        self.next = 1
        self.restart()

    def restart(self) -> None:
        """A new process, which knows nothing of what the one before put."""
        self.worker = WorkerStore(self.store, "w")
        self.worker.chunks = ChunkStore(self.store, "w", grace=GRACE, clock=self.clock)  # type: ignore[misc]
        self.keys: dict[str, frozenset[str]] = {}

    def save(self, images: list[bytes], files: list[bytes]) -> None:
        number, self.next = f"1-{self.next}", self.next + 1
        chunks = self.worker.chunks
        chunks.begin_save()
        for data in files:  # as the layer's snapshot does: what was stored before is not even read
            if not chunks.is_fresh(PLAIN.chunk_name(data)):
                chunks.put(data)
        empty = LayerIndex([Entry(".", "dir")])
        manifest = Manifest(
            worker="w",
            number=number,
            incarnation=1,
            cause="periodic",
            frozen_at=NOW,
            images=(),
            packed=StoredFile(name="packed", size=0, chunks=()),
            memory=tuple(stored_memory(n, data, chunks) for n, data in enumerate(images)),
            layer=whole_file("layer", index_of(files).to_bytes(), chunks.put),
            shm=whole_file("shm", empty.to_bytes(), chunks.put),
            log=StreamPosition(),
            runtime=Runtime(hostname="w"),
            fingerprint=Fingerprint(machine="x86_64"),
            bytes_image=0,
        )
        self.worker.publish_manifest(manifest)
        self.commit(manifest)

    def commit(self, manifest: Manifest) -> None:
        record = self.worker.load_record().record
        kept = [c.number for c in record.checkpoints][-self.kept_most :] if self.kept_most else []
        self.keep({number: keys for number, keys in self.keys.items() if number in kept})
        entry = CheckpointEntry(
            number=manifest.number, frozen_at=NOW, committed_at=NOW, bytes_image=0, bytes_uploaded=0
        )

        def change(record: WorkerRecord) -> WorkerRecord:
            entries = tuple(c for c in record.checkpoints if c.number in kept)
            return record.model_copy(update={"checkpoints": (*entries, entry)})

        self.worker.update_record(change)
        self.keep({**self.keys, manifest.number: stored_chunk_keys(manifest, self.worker.chunks)})

    def keep(self, keys: dict[str, frozenset[str]]) -> None:
        self.keys = keys
        self.worker.chunks.keep(frozenset[str]().union(*keys.values()))


@pytest.fixture
def memory() -> tuple[Store, MemoryBackend]:
    return worker_in_memory()


def worker_in_memory() -> tuple[Store, MemoryBackend]:
    store, backend = memory_store()
    worker = WorkerStore(store, "w")
    worker.create_spec(WorkerSpec(id="w", command=("true",)))
    worker.create_record(WorkerRecord(id="w", created_at=NOW))
    return store, backend


def check(store: Store) -> None:
    """Every checkpoint that can be seen is complete; the record's can all be seen."""
    worker = WorkerStore(store, "w")
    present = set(worker.list_checkpoints())
    assert {c.number for c in worker.load_record().record.checkpoints} <= present
    for number in present:
        for key in stored_chunk_keys(worker.load_manifest(number), worker.chunks):
            worker.chunks.get(key)


def gc(store: Store, backend: MemoryBackend) -> int:
    done = collect(WorkerStore(store, "w"), stored_chunk_keys, grace=GRACE, clock=lambda: backend.seconds)
    return done.objects


def restore(worker: WorkerStore) -> None:
    """Read all of the newest checkpoint, which may only fail when the record has stopped keeping it."""
    kept = worker.load_record().record.checkpoints
    try:
        for key in stored_chunk_keys(worker.load_manifest(kept[-1].number), worker.chunks) if kept else ():
            worker.chunks.get(key)
    except (Corrupt, NotFound):
        assert kept[-1] not in worker.load_record().record.checkpoints


def play(seed: int) -> None:
    """One random history: an agent, two collectors and the clock, all at once; any of them may be killed."""
    dice = random.Random(seed)
    store, backend = worker_in_memory()
    backend.patience = GRACE / 8
    agent = Agent(store, backend, keep=dice.choice([0, 1]))
    for _ in range(dice.randrange(3)):
        agent.save(dice.sample(POOL, 2), dice.sample(POOL, 1))
        backend.seconds += dice.choice([0.4, 0.9, 1.1]) * GRACE
    saves = [
        (dice.sample(POOL, dice.randrange(3)), dice.sample(POOL, dice.randrange(3)), dice.random() < 0.3)
        for _ in range(3)
    ]

    def live() -> None:
        for images, files, restart in saves:
            if restart:
                agent.restart()
            try:
                agent.save(images, files)
            except Temporary:
                continue  # the worker runs on, and the next one is as good

    def collector() -> None:
        for _ in range(2):
            try:
                gc(store, backend)
            except Temporary:
                continue

    def restorer() -> None:
        for _ in range(2):
            with contextlib.suppress(Temporary):
                restore(WorkerStore(store, "w"))

    def clock() -> None:
        for _ in range(dice.choice([0, 20, 40])):
            backend.step("tick")
            backend.seconds += dice.choice([0.01, 0.05, 0.1, 0.12, 1.0]) * GRACE

    kill = {name: dice.randrange(1, 60) for name in ("agent", "one", "two") if dice.random() < 0.3}
    weights = [dice.random() ** 2 + 0.01 for _ in range(5)]

    def choose(n: int) -> int:
        return dice.choices(range(n), weights[:n])[0]

    Turns(backend, choose, kill).run(agent=live, one=collector, two=collector, restorer=restorer, clock=clock)
    check(store)
    backend.patience = float("inf")
    agent.restart()
    agent.save(POOL[:2], POOL[2:])
    gc(store, backend)
    check(store)


@settings(max_examples=300, deadline=None)
@given(st.integers(0, 2**32))
def test_no_history_leaves_a_checkpoint_without_one_of_its_chunks(seed: int) -> None:
    play(seed)


def test_a_save_that_takes_so_long_that_a_collection_may_take_its_chunks_is_not_published(
    memory: tuple[Store, MemoryBackend],
) -> None:
    store, backend = memory
    agent = Agent(store, backend)
    chunks = agent.worker.chunks
    chunks.begin_save()
    chunks.put(POOL[0])
    backend.seconds += 0.37 * GRACE
    chunks.confirm_save()
    backend.seconds += 0.01 * GRACE
    with pytest.raises(Temporary, match="too long"):
        chunks.confirm_save()
    agent.save([POOL[0]], [])
    check(store)


def test_a_collection_that_takes_too_long_deletes_nothing_more(memory: tuple[Store, MemoryBackend]) -> None:
    store, backend = memory
    ChunkStore(store, "w").put(POOL[0])
    backend.seconds += 2 * GRACE

    def slow(what: str) -> None:
        backend.seconds += 0.6 * GRACE if what.startswith("create workers/w/doomed") else 0

    backend.step = slow
    with pytest.raises(Temporary, match="too long"):
        gc(store, backend)
    backend.step = lambda what: None
    assert ChunkStore(store, "w").get(PLAIN.chunk_name(POOL[0])) == POOL[0]
    assert gc(store, backend) == 1


def test_a_chunk_that_is_put_again_while_a_collection_deletes_it_has_a_copy(
    memory: tuple[Store, MemoryBackend],
) -> None:
    store, backend = memory
    Agent(store, backend).worker.chunks.put(POOL[0])
    backend.seconds += 2 * GRACE
    agent = Agent(store, backend)
    saved: list[bool] = []

    def during(what: str) -> None:
        if what == f"delete workers/w/chunks/{PLAIN.chunk_name(POOL[0])}" and not saved:
            saved.append(True)
            agent.save([POOL[0]], [])

    backend.step = during
    gc(store, backend)
    assert saved
    assert f"workers/w/chunks/{PLAIN.chunk_name(POOL[0])}" not in backend.objects
    check(store)
    for _ in range(3):  # the copy counts as the chunk from now on
        backend.seconds += 2 * GRACE
        gc(store, backend)
        check(store)


def test_a_chunk_that_is_gone_before_it_can_be_copied_fails_the_save_and_is_put_by_the_next(
    memory: tuple[Store, MemoryBackend],
) -> None:
    store, backend = memory
    Agent(store, backend).worker.chunks.put(POOL[0])
    backend.seconds += 2 * GRACE
    agent = Agent(store, backend)
    chunks = agent.worker.chunks

    def during(what: str) -> None:
        if what.startswith("delete"):
            backend.step = lambda what: None
            chunks.begin_save()
            chunks.put(POOL[0])

    backend.step = during
    assert gc(store, backend) == 1
    with pytest.raises(Temporary, match="put again"):
        chunks.confirm_save()
    agent.save([POOL[0]], [])
    check(store)


def test_announcements_of_collections_go_after_the_grace(memory: tuple[Store, MemoryBackend]) -> None:
    store, backend = memory
    ChunkStore(store, "w").put(POOL[0])
    backend.seconds += 2 * GRACE
    gc(store, backend)
    assert [key for key in backend.objects if "/doomed/" in key]
    backend.seconds += 2 * GRACE
    gc(store, backend)
    assert not [key for key in backend.objects if "/doomed/" in key]
