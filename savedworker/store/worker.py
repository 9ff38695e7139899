"""Everything durable of one worker: its spec, record, events, checkpoints and chunks, under ``workers/<id>/``."""

from __future__ import annotations

import logging
import random
import re
import secrets
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cached_property, partial
from typing import TypeVar

from blake3 import blake3

from savedworker.crashpoints import crash_point
from savedworker.model.base import Document
from savedworker.model.errors import (
    AlreadyExists,
    BadSpec,
    Conflict,
    Corrupt,
    NotFound,
    Refused,
    Unreachable,
)
from savedworker.model.events import Event
from savedworker.model.manifest import Manifest, check_checkpoint_number, order
from savedworker.model.record import WorkerRecord
from savedworker.model.spec import WorkerSpec, check_worker_id
from savedworker.model.transitions import apply
from savedworker.store.backend import Store
from savedworker.store.base import ObjectInfo, Version
from savedworker.store.chunks import ChunkStore
from savedworker.store.documents import dump, load, read_twice
from savedworker.store.sealing import ALLOW_PLAIN, PLAIN, Kind, Sealer

log = logging.getLogger(__name__)

_EVENT = re.compile(r"(\d{1,9})-(\d{1,12})\.json")
_READERS = 8
_D = TypeVar("_D", bound=Document)


@dataclass(frozen=True, slots=True)
class Held:
    """A record as it was read or written, with the version that the next swap has to find."""

    record: WorkerRecord
    version: Version


class StoredEvent(Document):
    """One event as an object of its own. ``incarnation`` is 0 for what happened before the first one."""

    incarnation: int
    n: int
    event: Event


class WorkerStore:
    """One worker in ``store``. Thread-safe. Methods raise what ``Store``'s do, and Corrupt or Refused for bad documents.

    ``sealer``: what the worker is sealed with, where it is not its spec that says it.
    """

    def __init__(self, store: Store, worker_id: str, sealer: Sealer | None = None) -> None:
        self.store = store
        self.id = check_worker_id(worker_id)
        self.prefix = f"workers/{self.id}"
        self._sealer = sealer
        self._last_record: tuple[bytes, WorkerRecord] | None = None
        """The record that was read or written last, and its bytes: most looks find it unchanged, and parsing costs the most."""

    @property
    def _spec_key(self) -> str:
        return f"{self.prefix}/spec.json"

    @property
    def _record_key(self) -> str:
        return f"{self.prefix}/record.json"

    @property
    def sealer(self) -> Sealer:
        """Seals and opens what is stored of this worker, as its spec says; known once the spec has been seen. Raises NoKey."""
        if self._sealer is None:
            try:
                return self._found_sealer(self.store.get(self._spec_key).data)
            except NotFound:
                if self.store.sealing.ring is not None:
                    raise self._no_worker() from None
                return PLAIN
        return self._sealer

    def _found_sealer(self, spec: bytes) -> Sealer:
        if self._sealer is None:
            self._sealer = self.store.sealing.find(self.id, self._spec_key, spec)
        return self._sealer

    def refuse_plain(self) -> None:
        """Raise Refused when this worker must not be executed here: keys are configured, and it was made without one.

        Or somebody who can write to the store put a spec of their own in the place of a sealed one.
        """
        sealing = self.store.sealing
        if sealing.ring is not None and not sealing.allow_plain and self.sealer is PLAIN:
            raise Refused(
                f"worker {self.id} was made without a key, and such workers are not executed where one is configured",
                f"set {ALLOW_PLAIN}=1 until they have ended, if the store is trusted; see docs/encryption.md",
            )

    @cached_property
    def chunks(self) -> ChunkStore:
        """The worker's chunks; the first ``put`` lists them."""
        return ChunkStore(self.store, self.id, sealer=self.sealer)

    def create_spec(self, spec: WorkerSpec) -> None:
        """Create the worker's spec, sealed where a key is configured. Raises AlreadyExists when the worker exists."""
        sealer = self.store.sealing.begin(self.id)
        data = sealer.seal("spec", self._spec_key, dump(self._own(spec.id, spec)))
        try:
            self.store.create(self._spec_key, data)
        except AlreadyExists:
            raise AlreadyExists(
                f"worker {self.id} exists already", "choose another name, or remove it"
            ) from None
        self._sealer = sealer

    def load_spec(self) -> WorkerSpec:
        """The worker's spec. Raises NotFound when there is no such worker, NoKey when it is sealed and the key is missing."""
        return read_twice(self._load_spec)

    def _load_spec(self) -> WorkerSpec:
        try:
            data = self.store.get(self._spec_key).data
        except NotFound:
            raise self._no_worker() from None
        sealer = self._sealer or self.store.sealing.find(self.id, self._spec_key, data)
        spec = load(WorkerSpec, sealer.open("spec", self._spec_key, data), self._spec_key)
        self._sealer = sealer
        return self._own(spec.id, spec)

    def create_record(self, record: WorkerRecord) -> Held:
        """Write the first record, as revision 1. Raises Conflict when there is one."""
        return self._write(record, 0, None)

    def load_record(self) -> Held:
        """The record as it is now. Raises NotFound when there is no such worker."""
        return read_twice(self._load_record)

    def _load_record(self) -> Held:
        try:
            found = self.store.get(self._record_key)
        except NotFound:
            raise self._no_worker() from None
        last = self._last_record
        if last is not None and last[0] == found.data:
            return Held(last[1], found.version)
        record = load(WorkerRecord, found.data, self._record_key)
        self._own(record.id, record)
        self._last_record = found.data, record
        return Held(record, found.version)

    def swap_record(self, held: Held, new_record: WorkerRecord) -> Held:
        """Replace ``held`` by ``new_record`` with the next revision and a fresh writer nonce.

        Raises Conflict when the record is not ``held`` any more.
        """
        return self._write(new_record, held.record.revision, held.version)

    def update_record(self, fn: Callable[[WorkerRecord], WorkerRecord], tries: int = 10) -> Held:
        """Swap the record for ``fn`` of it, reading again and asking again after a Conflict, at most ``tries`` times.

        ``fn`` may be called several times and must only look at its argument. When it returns an equal record, nothing
        is written. Raises Conflict after the last try, and whatever ``fn`` raises.
        """
        for attempt in range(1, tries + 1):
            held = self.load_record()
            new = fn(held.record)
            if new == held.record:
                return held
            try:
                return self.swap_record(held, new)
            except Conflict:
                if attempt == tries:
                    raise
                time.sleep(random.uniform(0, min(0.5, 0.01 * 2**attempt)))
        raise Conflict(f"the record of {self.id} was not updated: no try was allowed")

    def record_event(self, event: Event, tries: int = 10) -> Held:
        """Apply ``event`` to the record by compare-and-swap and store it in the history.

        When it does not apply (see ``transitions.apply``) the record comes back unchanged. Raises Conflict after the last try.
        """
        before: list[WorkerRecord] = []

        def change(record: WorkerRecord) -> WorkerRecord:
            before[:] = [record]
            return apply(record, event)

        held = self.update_record(change, tries)
        self._remember(before[0], held.record, event)
        return held

    def swap_event(self, held: Held, event: Event) -> Held:
        """Like ``record_event``, but only on the very record ``held``. Raises Conflict when it is not the present one."""
        changed = apply(held.record, event)
        if changed == held.record:
            return held
        new = self.swap_record(held, changed)
        self._remember(held.record, new.record, event)
        return new

    def _remember(self, before: WorkerRecord, after: WorkerRecord, event: Event) -> None:
        if after.events == before.events:
            return
        crash_point("store.event.before")
        try:
            self.append_event(len(after.incarnations), after.events, event)
        except (Unreachable, AlreadyExists) as error:
            log.warning("event %d of %s is only in the record so far: %s", after.events, self.id, error)

    def append_event(self, incarnation: int, n: int, event: Event) -> None:
        """Store event number ``n``. The same event again is fine; raises AlreadyExists if another one has the number."""
        key = f"{self.prefix}/events/{incarnation}-{n}.json"
        data = dump(StoredEvent(incarnation=incarnation, n=n, event=event))
        try:
            self.store.create(key, data)
        except AlreadyExists:
            if self.store.get(key).data != data:
                raise

    def events(self) -> Sequence[StoredEvent]:
        """All stored events in order of ``n``, then incarnation."""
        prefix = f"{self.prefix}/events"
        numbers = []
        for info in self.store.list(prefix):
            match = _EVENT.fullmatch(info.key.removeprefix(f"{prefix}/"))
            if match:
                numbers.append((int(match[2]), int(match[1]), info.key))
        with ThreadPoolExecutor(max_workers=_READERS) as pool:
            return list(pool.map(self._load_event, sorted(numbers)))

    def publish_manifest(self, manifest: Manifest) -> None:
        """Commit a checkpoint: everything that it names must be in the store, put there by ``chunks``. Again is fine.

        Raises AlreadyExists if another manifest has the number, Temporary as ``ChunkStore.confirm_save`` does.
        """
        if manifest.worker != self.id:
            raise Corrupt(f"the manifest is of worker {manifest.worker}, not {self.id}")
        self.chunks.confirm_save()
        crash_point("store.manifest.before")
        self._create_same("manifest", self._manifest_key(manifest.number), dump(manifest))
        crash_point("store.manifest.after")

    def load_manifest(self, number: str, digest: str = "") -> Manifest:
        """The manifest of checkpoint ``number`` (``<incarnation>-<n>``). Raises NotFound when it is not committed.

        With the ``digest`` that the record has of it, one that was altered is Corrupt also where nothing is sealed.
        """
        return read_twice(partial(self._load_manifest, number, digest))

    def _load_manifest(self, number: str, digest: str) -> Manifest:
        key = self._manifest_key(number)
        try:
            data = self.store.get(key).data
        except NotFound:
            raise NotFound(f"worker {self.id} has no checkpoint {number}") from None
        plain = self.sealer.open("manifest", key, data)
        if digest and blake3(plain).hexdigest() != digest:
            raise Corrupt(f"{key} is altered: the record has another digest of it")
        manifest = load(Manifest, plain, key)
        if (manifest.worker, manifest.number) != (self.id, number):
            raise Corrupt(f"{key} is the manifest of {manifest.worker} {manifest.number}")
        return manifest

    def list_checkpoints(self) -> Sequence[str]:
        """Numbers of all committed checkpoints that are in the store, oldest first."""
        return sorted(self.manifests(), key=order)

    def manifests(self) -> dict[str, ObjectInfo]:
        """The objects that hold the manifests of the checkpoints in the store, by number."""
        prefix = f"{self.prefix}/checkpoints/"
        found = {}
        for info in self.store.list(prefix):
            number, _, name = info.key.removeprefix(prefix).partition("/")
            if name == "manifest.json" and re.fullmatch(r"[1-9]\d{0,8}-[1-9]\d{0,8}", number):
                found[number] = info
        return found

    def delete_manifest(self, number: str) -> None:
        """Withdraw a checkpoint that the record does not keep any more. Its chunks come after, never before."""
        self.store.delete([self._manifest_key(number)])

    def load_engine_note(self, engine: str) -> bytes | None:
        """What an engine's side wrote down for itself with ``keep_engine_note``; None if nothing."""
        key = self._engine_key(engine)
        try:
            return self.sealer.open("engine", key, self.store.get(key).data)
        except NotFound:
            return None

    def keep_engine_note(self, engine: str, note: bytes) -> None:
        """Keep ``note`` for the engine's side, in place of the one before. It may hold the worker's output."""
        key = self._engine_key(engine)
        self.store.put(key, self.sealer.seal("engine", key, note))

    def delete_engine_notes(self, engines: Iterable[str]) -> None:
        """Delete notes of the engine's side; one that is not there is no matter."""
        self.store.delete([self._engine_key(x) for x in engines])

    def _engine_key(self, engine: str) -> str:
        return f"{self.prefix}/engine/{engine}.json"

    def _manifest_key(self, number: str) -> str:
        return f"{self.prefix}/checkpoints/{check_checkpoint_number(number)}/manifest.json"

    def _load_event(self, where: tuple[int, int, str]) -> StoredEvent:
        n, incarnation, key = where
        stored = load(StoredEvent, self.store.get(key).data, key)
        if (stored.n, stored.incarnation) != (n, incarnation):
            raise Corrupt(f"{key} holds event {stored.incarnation}-{stored.n}")
        return stored

    def _create_same(self, kind: Kind, key: str, data: bytes) -> None:
        sealer = self.sealer
        try:
            self.store.create(key, sealer.seal(kind, key, data))
        except AlreadyExists:
            if sealer.open(kind, key, self.store.get(key).data) != data:
                raise

    def _write(self, record: WorkerRecord, revision: int, expected: Version | None) -> Held:
        self._own(record.id, record)
        new = record.model_copy(update={"revision": revision + 1, "writer": secrets.token_hex(8)})
        data = dump(new)
        version = self.store.swap(self._record_key, data, expected)
        self._last_record = data, new
        return Held(new, version)

    def _own(self, worker_id: str, document: _D) -> _D:
        if worker_id != self.id:
            raise Corrupt(f"a document of worker {worker_id!r} is in the place of {self.id}'s")
        return document

    def _no_worker(self) -> NotFound:
        return NotFound(
            f"there is no worker {self.id} in {self.store.url}", "see `savedworker list`, and check --store"
        )


def digest_of(manifest: Manifest) -> str:
    """The digest by which the record knows ``manifest``."""
    return blake3(dump(manifest)).hexdigest()


def list_workers(store: Store) -> Sequence[str]:
    """Sorted ids of the workers in ``store``; directories with other names are left out."""
    found = []
    for name in store.list_dirs("workers"):
        try:
            found.append(check_worker_id(name))
        except BadSpec:
            continue
    return found
