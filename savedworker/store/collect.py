"""Deleting what nobody needs any more, one worker at a time: whole workers after their retention, else what no checkpoint names.

**What is kept.** The checkpoints that the record keeps. A manifest that the record does not know, while it is younger than the
grace or newer than the newest one that the record knows: its commit may be on its way. Every chunk that one of these
names, and every chunk that was written within the grace.

**Why it is safe.** Ages are by the store's clock, read *before* anything is looked at.

- *Beside a save.* A chunk that it left as it was (``ChunkStore``) was younger than half of the grace then, or belongs to a kept
  checkpoint; its manifest follows within the other half. So when such a chunk is older than the grace, its manifest is there. A chunk
  that it put again is young, unless it was chosen just before: the announcement (``doomed.py``) is for that. What is announced is
  looked at once more before it goes, so that what was put again before the announcement is spared.
- *Beside a restore.* It restores what the record keeps, and only the holder of the lease makes the record keep less.
- *Killed anywhere.* Manifests go before their chunks, spec and record last: whatever is left is found again by the next one.
- *Several at once.* All of them delete only what is not needed; deleting twice is deleting once.
- *Never by a guess.* Where a manifest cannot be read, or what it names, nothing of that worker is deleted.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import TypeVar

from savedworker.crashpoints import crash_point
from savedworker.model import defaults
from savedworker.model.decisions import settled
from savedworker.model.errors import Corrupt, NotFound, SavedWorkerError, Temporary
from savedworker.model.manifest import Manifest, order
from savedworker.model.record import WorkerRecord
from savedworker.store import doomed
from savedworker.store.ages import running_clock, store_time
from savedworker.store.base import ObjectInfo
from savedworker.store.chunks import ChunkStore, chunk_objects
from savedworker.store.worker import WorkerStore

KeysOf = Callable[[Manifest, ChunkStore], Iterable[str]]
"""All chunk keys of a checkpoint: those in its manifest, and those in the documents that it names, which are chunks themselves.

Raises SavedWorkerError when one of the documents cannot be read.
"""

CLOCK = "clock"
"""The object whose time tells the store's time."""
_AT_ONCE = 1000
"""Objects that are deleted before the time is looked at again; S3 takes as many in one request."""
_TRIES = 3
_T = TypeVar("_T")
_Chunks = Sequence[tuple[str, ObjectInfo]]
"""Objects that hold chunks, with the keys of these."""
_Found = tuple[dict[str, ObjectInfo], _Chunks]
"""The manifests that may go, by number, and the chunks."""


@dataclass(frozen=True, slots=True)
class Collected:
    """What was deleted of a worker, or would be. ``checkpoints`` counts manifests, which ``objects`` and ``bytes`` include."""

    worker: str
    checkpoints: int = 0
    objects: int = 0
    bytes: int = 0
    whole: bool = False
    """All of it goes: the worker ended longer ago than its retention."""
    retained_for: float | None = None
    """Seconds after which all of a worker goes that has ended; null for one that has not."""


def collect(
    worker: WorkerStore,
    keys_of: KeysOf,
    *,
    dry_run: bool = False,
    grace: float = defaults.COLLECTION_GRACE,
    clock: Callable[[], float] = running_clock,
) -> Collected:
    """Delete what is not needed of ``worker``; with ``dry_run`` only find it (the object ``clock`` is written all the same).

    Can be repeated at any time, and may be killed at any time. Raises NotFound when there is no such worker, Temporary when it
    took too long and has to begin again, Corrupt or Refused when something that is kept cannot be read: then nothing
    is deleted. Raises what ``Store`` does, too.
    """
    return _Collection(worker, keys_of, dry_run, grace, clock).run()


class _Collection:
    """One run. ``_now`` is the store's time before anything was looked at."""

    def __init__(
        self,
        worker: WorkerStore,
        keys_of: KeysOf,
        dry_run: bool,
        grace: float,
        clock: Callable[[], float],
    ) -> None:
        self._worker = worker
        self._store = worker.store
        self._keys_of = keys_of
        self._dry_run = dry_run
        self._grace = grace
        self._clock = clock
        self._begun = clock()
        self._now = store_time(worker.store, CLOCK)

    def run(self) -> Collected:
        try:
            record = self._worker.load_record().record
        except NotFound:
            return self._remains()
        written = self._store.head(f"{self._worker.prefix}/record.json")
        if not settled(record) or written is None:
            return self._sweep(record, None)
        try:
            retention = self._worker.load_spec().retention
        except NotFound:
            return self._remains_of_ended()
        # A record that is settled is not written any more. Its age by the store's clock is how long ago that was.
        left = retention - self._age(written)
        return self._whole() if left < 0 else self._sweep(record, left)

    def _age(self, info: ObjectInfo) -> float:
        return (self._now - info.modified).total_seconds()

    def _is_old(self, info: ObjectInfo) -> bool:
        return self._age(info) > self._grace

    # What no checkpoint names -----------------------------------------------------------------------------------

    def _sweep(self, record: WorkerRecord, retained_for: float | None) -> Collected:
        manifests, chosen = self._find(record)
        if not self._dry_run:
            self._delete_manifests(sorted(manifests, key=order))
            chosen = [one for some in _batches(chosen, doomed.AT_ONCE) for one in self._delete_chunks(some)]
            self._delete([x.key for x in self._store.list(doomed.prefix(self._worker.id)) if self._is_old(x)])
        gone = [*manifests.values(), *(info for _, info in chosen)]
        return Collected(
            self._worker.id,
            checkpoints=len(manifests),
            objects=len(gone),
            bytes=sum(info.size for info in gone),
            retained_for=retained_for,
        )

    def _find(self, record: WorkerRecord) -> _Found:
        """What may go. Looks again when the record stops keeping a checkpoint meanwhile, and another collection takes it."""
        for _ in range(_TRIES):
            try:
                return self._mark(record)
            except SavedWorkerError:
                before, record = record, self._worker.load_record().record
                if before.checkpoints == record.checkpoints:
                    raise
        return self._mark(record)

    def _mark(self, record: WorkerRecord) -> _Found:
        kept = {entry.number for entry in record.checkpoints}
        manifests = self._worker.manifests()
        unwanted = self._unwanted(kept, manifests)
        old = [(key, x) for key, x in chunk_objects(self._store, self._worker.id) if self._is_old(x)]
        chosen: _Chunks = old
        rest = manifests.keys() - unwanted - kept
        if old or unwanted:  # a young worker has nothing to delete: then nothing need be read
            for number in sorted(kept):
                try:
                    chosen = _without(chosen, self._keys(number))
                except NotFound:
                    raise Corrupt(
                        f"the manifest of checkpoint {number} of {self._worker.id} is missing, so nothing is deleted",
                        "restore it from a backup, or wait until the record stops keeping this checkpoint",
                    ) from None
        for number in sorted(rest, key=order, reverse=True):
            if not chosen:
                break
            try:
                chosen = _without(chosen, self._keys(number))
            except SavedWorkerError:
                if number in self._worker.manifests():
                    raise  # and else another collection came first
        return {number: manifests[number] for number in unwanted}, chosen

    def _unwanted(self, kept: set[str], manifests: dict[str, ObjectInfo]) -> set[str]:
        """Checkpoints that the record does not keep and never will."""
        newest = max((order(number) for number in kept), default=(0, 0))
        return {
            number
            for number, info in manifests.items()
            if number not in kept and order(number) < newest and self._is_old(info)
        }

    def _keys(self, number: str) -> frozenset[str]:
        """The keys of all chunks of a checkpoint. Raises NotFound without a manifest, other errors when they cannot be told."""
        manifest = self._worker.load_manifest(number)
        return frozenset(self._keys_of(manifest, self._worker.chunks))

    def _delete_manifests(self, numbers: Sequence[str]) -> None:
        for number in numbers:
            crash_point("collect.manifest.before")
            self._in_time()
            self._worker.delete_manifest(number)
            crash_point("collect.manifest.after")

    def _delete_chunks(self, chosen: _Chunks) -> _Chunks:
        """Delete those of ``chosen`` that were not put again before this was announced, and return them."""
        if not chosen:
            return []
        crash_point("collect.doomed.before")
        doomed.announce(self._store, self._worker.id, (key for key, _ in chosen))
        crash_point("collect.doomed.after")
        present = {info.key: info.modified for _, info in chunk_objects(self._store, self._worker.id)}
        still = [(key, info) for key, info in chosen if present.get(info.key) == info.modified]
        for some in _batches(still, _AT_ONCE):
            crash_point("collect.chunks.before")
            self._delete([info.key for _, info in some])
            crash_point("collect.chunks.after")
        return still

    # All of a worker --------------------------------------------------------------------------------------------

    def _whole(self) -> Collected:
        spec, record = f"{self._worker.prefix}/spec.json", f"{self._worker.prefix}/record.json"
        found = {info.key: info for info in self._store.list(self._worker.prefix)}
        if not self._dry_run:
            rest = [key for key in found if key not in (spec, record)]
            crash_point("collect.worker.before")
            self._delete([key for key in rest if "/checkpoints/" in key])
            self._delete([key for key in rest if "/checkpoints/" not in key])
            crash_point("collect.worker.data")
            self._delete([spec])
            crash_point("collect.worker.spec")
            self._delete([record])
        return self._all_of(found.values())

    def _remains_of_ended(self) -> Collected:
        """The record of a worker whose spec is gone: all that a collection left that was killed right before its end."""
        record = f"{self._worker.prefix}/record.json"
        found = list(self._store.list(self._worker.prefix))
        if any(info.key != record for info in found):
            raise Corrupt(
                f"worker {self._worker.id} has ended and has no spec.json, so nothing of it is deleted",
                "look what happened to it; if nobody needs the worker, delete its directory by hand",
            )
        if not self._dry_run:
            self._delete([record])
        return self._all_of(found)

    def _remains(self) -> Collected:
        """There is no record: what somebody who had lost the lease still wrote, or a worker that is being created."""
        found = list(self._store.list(self._worker.prefix))
        if not found:
            self._worker.load_record()  # raises the error that says so
        if any(info.key == f"{self._worker.prefix}/spec.json" for info in found):
            return Collected(self._worker.id)
        old = [info for info in found if self._is_old(info)]
        if not self._dry_run:
            self._delete([info.key for info in old])
        return self._all_of(old, whole=len(old) == len(found))

    def _all_of(self, found: Iterable[ObjectInfo], *, whole: bool = True) -> Collected:
        gone = list(found)
        manifests = sum(info.key.endswith("/manifest.json") for info in gone)
        return Collected(
            self._worker.id,
            checkpoints=manifests,
            objects=len(gone),
            bytes=sum(info.size for info in gone),
            whole=whole,
        )

    def _delete(self, keys: Sequence[str]) -> None:
        for some in _batches(keys, _AT_ONCE):
            self._in_time()
            self._store.delete(some)

    def _in_time(self) -> None:
        """What was found is acted upon soon, or not at all: its announcement is not for ever."""
        if self._clock() - self._begun > self._grace / 2:
            raise Temporary(f"the collection of {self._worker.id} took too long and has to begin again")


def _without(chunks: _Chunks, keys: frozenset[str]) -> _Chunks:
    return [(key, info) for key, info in chunks if key not in keys]


def _batches(items: Sequence[_T], size: int) -> Iterator[Sequence[_T]]:
    for start in range(0, len(items), size):
        yield items[start : start + size]
