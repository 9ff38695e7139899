"""Content-addressed chunks of one worker, compressed, verified whenever they are read.

A chunk's key is the BLAKE3 of its plaintext in hex, under a key of the worker where it has one. What is stored is a header and a body::

    4 bytes  magic "SWCH"
    1 byte   format version
    1 byte   codec: 0 stored as is, 1 one zstd frame with its content size
    2 bytes  flags: 1 when the body is sealed (``store/sealing.py``); packing and deltas will have theirs here
    8 bytes  plaintext length, little-endian

Chunks are never shared between workers, so only the holder of the lease writes here. A collection (``collect.py``) deletes, at
any time, what no checkpoint names and is older than the grace. So that it never takes a chunk from a save that is under way,

- a chunk counts as present only if a checkpoint that the record keeps names it, or while it is younger than half of the grace. Any
  other one is put again, which makes it young;
- from the first chunk that a save left as it was to its manifest, less than the other half of the grace may pass;
- a chunk that a collection had chosen before it was put again gets a copy, ``<key>+<nonce>``, before the manifest is published.
"""

from __future__ import annotations

import re
import secrets
import struct
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, suppress
from functools import partial

import zstandard

from savedworker.crashpoints import crash_point
from savedworker.model import defaults
from savedworker.model.budget import shares
from savedworker.model.compression import FIRST_LEVEL
from savedworker.model.errors import Corrupt, NotFound, Refused, Temporary
from savedworker.model.units import format_duration
from savedworker.store.ages import running_clock, store_time
from savedworker.store.backend import ObjectInfo, Store
from savedworker.store.base import Data
from savedworker.store.compression import Meter, pack, try_level
from savedworker.store.documents import read_twice
from savedworker.store.doomed import doomed_keys
from savedworker.store.sealing import PLAIN, Sealer
from savedworker.store.throttle import Throttle

MAX_CHUNK = 64 << 20
"""Longest plaintext of a chunk in bytes. Nothing longer is written, or decompressed."""
_MOST_WAITING = 1024
"""Chunks that ``putting`` lets wait at most, however small they are."""
_SMALL = 128 << 10
_SMALL_AT_ONCE = 32
"""Chunks up to _SMALL bytes that ``putting`` stores at a time: they need next to no memory, and wait for the store like large ones."""

_MAGIC = b"SWCH"
_VERSION = 1
_HEADER = struct.Struct("<4sBBHQ")
_NONE, _ZSTD = 0, 1
_KEY = re.compile(r"[0-9a-f]{64}")
_NAME = re.compile(r"([0-9a-f]{64})(?:\+[0-9a-f]{16})?")
_LONGEST_SAVE = 3 / 8
"""Share of the grace. With the half of it that a fresh chunk may be old, an eighth is left for clocks that differ."""


def encode(data: Data, key: str = "", sealer: Sealer = PLAIN, level: int = FIRST_LEVEL) -> bytes:
    """The stored form of plaintext ``data`` for the chunk ``key``. Raises Refused above MAX_CHUNK.

    Never longer than ``data`` by more than 16 bytes and ``sealer.chunk_overhead``.
    """
    _check_size(data)
    return _wrap(data, pack(data, level), key, sealer)


def _check_size(data: Data) -> None:
    size = memoryview(data).nbytes
    if size > MAX_CHUNK:
        raise Refused(
            f"a chunk of {size} bytes is too long", f"cut it into chunks of at most {MAX_CHUNK} bytes"
        )


def _wrap(data: Data, packed: bytes | None, key: str, sealer: Sealer) -> bytes:
    """Header and body, sealed."""
    codec, body = (_NONE, data) if packed is None else (_ZSTD, packed)
    header = _HEADER.pack(_MAGIC, _VERSION, codec, sealer.flags, memoryview(data).nbytes)
    return b"".join((header, *sealer.seal_chunk(key, header, body)))


def decode(key: str, stored: Data, limit: int = MAX_CHUNK, sealer: Sealer = PLAIN) -> memoryview:
    """The plaintext of chunk ``key`` from its stored form, verified. Holds at most ``limit`` bytes of it; may be a view of ``stored``.

    Raises Corrupt when anything is wrong with it, Refused when a newer version wrote it.
    """
    view = memoryview(stored)
    if len(view) < _HEADER.size:
        raise Corrupt(f"chunk {key} is truncated ({len(view)} bytes)")
    magic, version, codec, flags, size = _HEADER.unpack_from(view)
    body = view[_HEADER.size :]
    if magic != _MAGIC:
        raise Corrupt(f"chunk {key} is not a chunk")
    if version > _VERSION:
        raise Refused(
            f"chunk {key} was written by a newer version of Saved Worker", "upgrade Saved Worker here"
        )
    if version == _VERSION and flags in (0, 1) and flags != sealer.flags:
        raise Corrupt(f"chunk {key} is {'sealed' if flags else 'not sealed'}, unlike its worker")
    if version < 1 or flags != sealer.flags or codec not in (_NONE, _ZSTD):
        raise Corrupt(f"chunk {key} has an impossible header")
    if size > min(limit, MAX_CHUNK):
        raise Corrupt(f"chunk {key} claims {size} bytes; at most {min(limit, MAX_CHUNK)} can be right")
    opened = memoryview(sealer.open_chunk(key, view[: _HEADER.size], body))
    plain = opened if codec == _NONE else memoryview(_decompress(key, opened, size))
    if len(plain) != size:
        raise Corrupt(f"chunk {key} is truncated: {len(plain)} of {size} bytes")
    if sealer.chunk_name(plain) != key:
        raise Corrupt(f"chunk {key} is altered: its content has another hash")
    return plain


def _decompress(key: str, body: memoryview, size: int) -> bytes:
    try:
        # zstandard allocates what the frame says, whatever max_output_size: the frame must say what the header says.
        if zstandard.frame_content_size(body) != size:
            raise Corrupt(f"chunk {key} is damaged: header and body disagree about its length")
        plain = zstandard.ZstdDecompressor(max_window_size=2 * MAX_CHUNK).decompress(
            body, max_output_size=size, allow_extra_data=False
        )
    except zstandard.ZstdError as error:
        raise Corrupt(f"chunk {key} is damaged: {error}") from error
    return bytes(plain)


def chunk_objects(store: Store, worker_id: str) -> Iterator[tuple[str, ObjectInfo]]:
    """Every object that holds a chunk of the worker, with the chunk's key. A key can come more than once: chunks have copies."""
    prefix = f"workers/{worker_id}/chunks/"
    for info in store.list(prefix):
        match = _NAME.fullmatch(info.key.removeprefix(prefix))
        if match:
            yield match[1], info


class ChunkStore:
    """The chunks of one worker, sealed by its ``sealer``. Thread-safe, but for one save at a time.

    ``known`` are the keys that checkpoints of the record name (as for ``keep``); without it the store is listed once, when it is
    first asked about a chunk. ``grace`` in seconds is that of the collection; ``clock`` gives seconds that pass.

    A save is ``begin_save``, any number of ``put`` and ``is_fresh``, and then ``WorkerStore.publish_manifest``.
    """

    def __init__(
        self,
        store: Store,
        worker_id: str,
        *,
        known: Iterable[str] | None = None,
        grace: float = defaults.COLLECTION_GRACE,
        clock: Callable[[], float] = running_clock,
        sealer: Sealer = PLAIN,
    ) -> None:
        self._store = store
        self._worker = worker_id
        self._sealer = sealer
        self._prefix = f"workers/{worker_id}/chunks"
        self._grace = grace
        self._clock = clock
        self._lock = threading.Lock()
        self._fresh_until: dict[str, float] | None = None if known is None else {}
        """Until when, on ``clock``, a chunk that is in the store is younger than half of the grace."""
        self._kept = frozenset(known or ())
        self._used: set[str] = set()
        """What the present save relies on."""
        self._copied: dict[str, float] = {}
        """Until when a copy of a chunk under a name of its own is younger than half of the grace."""
        self._lengths: dict[str, int] = {}
        """How long, stored, a chunk is that was put or read here. Of others no more is known than that they are longer than a header."""
        self._damaged: set[str] = set()
        """What was read, was damaged or missing, and was not put since: whoever names it, it is put again."""
        self._gone: frozenset[str] = frozenset()
        """What ``check_known`` missed and was not put since, although checkpoints name it."""
        self._begun = clock()
        self._under_way: dict[str, Future[None]] = {}
        self.throttle = Throttle()
        """What holds ``put`` back; it lets everything through unless told otherwise."""
        self.budget = defaults.MEMORY_BUDGET
        """Bytes of memory that this process may use."""
        self.shares = shares(self.budget)
        """Threads that store and fetch at once, and bytes of plaintext that they hold at most, unless one chunk alone is more."""
        self.meter = Meter(self.shares.threads)
        """What says how hard ``put`` compresses."""
        self.bytes_in = 0
        """Bytes of plaintext given to ``put``."""
        self.bytes_uploaded = 0
        """Bytes that went to the store, compressed, headers included."""
        self.chunks_uploaded = 0

    def key(self, data: Data) -> str:
        """The key of the chunk with plaintext ``data``: 64 hexadecimal digits."""
        return self._sealer.chunk_name(data)

    def keep(self, keys: Iterable[str]) -> None:
        """Say which keys the checkpoints name that the record keeps, all of them: these chunks cannot vanish.

        To be said again, before the next save begins, when the record stops keeping one. Keys of a checkpoint that is not
        committed yet, or not kept any more, do not belong here; leaving some out costs nothing but uploads.
        """
        kept = frozenset(keys)
        with self._lock:
            self._gone &= kept
            self._kept = kept - self._gone

    def ignore_listing(self) -> None:
        """Believe of no chunk that it is whole because the store lists it: somebody has found damage there.

        To be said before the first save. What is kept, and what is put from here on, is relied upon as ever.
        """
        with self._lock:
            self._fresh_until = {}

    def is_fresh(self, key: str) -> bool:
        """Whether a manifest of the present save may name chunk ``key`` although it is not put: it is there and stays.

        Never reuse a key of an earlier save, or of a base, without asking in this one. Raises what ``Store.list`` does.
        """
        self._seed()
        with self._lock:
            return self._use_if_fresh(key)

    def begin_save(self) -> None:
        """A save begins: what was put, or found to be fresh, before does not count for it. Raises what ``Store.list`` does."""
        self._seed()  # now, and not in a freeze
        with self._lock:
            self._used.clear()
            self._begun = self._clock()
        self.meter.decide(self.throttle.rate)

    def check_known(self) -> frozenset[str]:
        """Compare what need not be put with what is in the store, by one listing. Returns the keys that are to be put again.

        Those that are not there, or not as long as they were: somebody deleted or truncated them. What was altered in its place has
        the same length, and is found by whoever reads it. Raises what ``Store.list`` does.
        """
        self._seed()
        with self._lock:
            relied = self._kept | self._gone | (self._fresh_until or {}).keys()
        whole: dict[str, bool] = {}
        for key, info in chunk_objects(self._store, self._worker):
            if info.key == f"{self._prefix}/{key}":  # which is read before any copy of it
                whole[key] = info.size == self._lengths.get(key, max(info.size, self._shortest))
            else:
                whole.setdefault(key, info.size >= self._shortest)
        gone = frozenset(key for key in relied if not whole.get(key, False))
        self.forget(gone)
        with self._lock:
            self._gone = gone
        return gone

    @property
    def _shortest(self) -> int:
        """Bytes that every stored chunk has."""
        return _HEADER.size + self._sealer.chunk_overhead

    def confirm_save(self) -> None:
        """All chunks of the save are in the store: its manifest is published next (``WorkerStore.publish_manifest`` calls this).

        Costs one listing, of a prefix that is nearly always empty. Raises Temporary when the save took too long for its
        manifest to be safe from a collection, or lost a chunk to one: begin again. Raises what ``Store`` does, too.
        """
        with self._lock:
            used = self._used - self._kept
        for key in sorted(used & doomed_keys(self._store, self._worker)):
            if self._copied.get(key, 0.0) <= self._clock():
                self._copy(key)
        took = self._clock() - self._begun
        if took > self._grace * _LONGEST_SAVE:
            raise Temporary(
                f"the checkpoint took {format_duration(took)}, too long to be safe from a collection",
                fix="see what slows the store down",
            )

    def _copy(self, key: str) -> None:
        """Keep chunk ``key`` under a second name, one that nobody can be about to delete."""
        started = self._clock()
        try:
            stored = encode(self.get(key), key, self._sealer)
        except Corrupt as error:
            self.forget([key])
            raise Temporary(
                f"a collection took chunk {key} while it was put again; the next try puts it anew"
            ) from error
        self._store.put(f"{self._prefix}/{key}+{secrets.token_hex(8)}", stored)
        with self._lock:
            self._copied[key] = started + self._grace / 2
            self.bytes_uploaded += len(stored)
            self.chunks_uploaded += 1

    def _use_if_fresh(self, key: str) -> bool:
        """Whether ``key`` need not be put. With the lock."""
        fresh = key in self._kept or (self._fresh_until or {}).get(key, 0.0) > self._clock()
        if fresh and key not in self._damaged:
            self._used.add(key)
            return True
        return False

    def put(self, data: Data) -> str:
        """Store plaintext ``data`` unless it is there and fresh; when this returns, it is durable. Returns its key.

        Raises what ``Store.put`` raises, and Refused above MAX_CHUNK.
        """
        key = self.key(data)
        self._seed()
        with self._lock:
            self.bytes_in += memoryview(data).nbytes
            if self._use_if_fresh(key):
                return key
            self._used.add(key)
            mine: Future[None] = Future()
            under_way = self._under_way.setdefault(key, mine)
        if under_way is not mine:
            under_way.result()
            return key
        try:
            _check_size(data)
            level, busy = self.meter.level, time.thread_time()
            packed = pack(data, level)
            busy = time.thread_time() - busy
            if packed is not None and (other := self.meter.trial()) is not None:
                self.meter.tried(other, try_level(data, other))
            stored = _wrap(data, packed, key, self._sealer)
            self.throttle.take(len(stored))
            started, sending = self._clock(), time.monotonic()
            crash_point("store.chunk.before")
            self._store.put(f"{self._prefix}/{key}", stored)
            crash_point("store.chunk.after")
            sending = time.monotonic() - sending
        except BaseException as error:
            with self._lock:
                del self._under_way[key]
            mine.set_exception(error)
            raise
        with self._lock:
            del self._under_way[key]
            if self._fresh_until is not None:
                self._fresh_until[key] = started + self._grace / 2
            self._lengths[key] = len(stored)
            self._gone -= {key}
            self._damaged.discard(key)
            self.bytes_uploaded += len(stored)
            self.chunks_uploaded += 1
        size = memoryview(data).nbytes
        as_packed = None if packed is None else len(packed)
        self.meter.sent(level, size, as_packed, busy, len(stored), sending, self.throttle.rate)
        mine.set_result(None)
        return key

    def get(self, key: str, *, limit: int = MAX_CHUNK) -> bytes:
        """The verified plaintext of ``key``, at most ``limit`` bytes. Raises Corrupt, also when it is missing."""
        return bytes(self.view(key, limit=limit))

    def view(self, key: str, *, limit: int = MAX_CHUNK) -> memoryview:
        """The same as ``get``, not copied."""
        if not _KEY.fullmatch(key):
            raise Corrupt(f"{key[:80]!r} is not a chunk key")
        path = f"{self._prefix}/{key}"
        damage = Corrupt(f"chunk {key} is missing from the store")
        try:
            stored, plain = read_twice(partial(self._load, path, key, limit))
            self._lengths[key] = len(stored)
            return plain
        except NotFound:
            pass
        except Corrupt as error:
            damage = error
        for info in self._store.list(self._prefix, after=path):
            if info.key.startswith(f"{path}+"):
                with suppress(NotFound, Corrupt):
                    return self._load(info.key, key, limit)[1]
        with self._lock:
            self._damaged.add(key)
        raise damage

    def _load(self, path: str, key: str, limit: int) -> tuple[Data, memoryview]:
        """The object at ``path`` and the chunk in it."""
        stored = self._read(path, key, limit)
        return stored, decode(key, stored, limit, self._sealer)

    def _read(self, path: str, key: str, limit: int) -> Data:
        longest = min(limit, MAX_CHUNK) + _HEADER.size + self._sealer.chunk_overhead
        pieces: list[bytes] = []
        size = 0
        for piece in self._store.get_stream(path, 8 << 20):
            pieces.append(piece)
            size += len(piece)
            if size > longest:
                raise Corrupt(
                    f"chunk {key} is longer than any chunk of at most {min(limit, MAX_CHUNK)} bytes"
                )
        return pieces[0] if len(pieces) == 1 else b"".join(pieces)

    def spend(self, budget: int) -> None:
        """Use at most about ``budget`` bytes of memory from now on, this process's own included."""
        self.budget = budget
        self.shares = shares(budget)
        self.meter = Meter(self.shares.threads)

    def put_many(self, chunks: Iterable[Data]) -> list[str]:
        """``put`` all of ``chunks`` in parallel and return their keys in order.

        Takes the next chunk only while less than ``shares.waiting`` bytes are held. To stop early (a deadline), raise from
        ``chunks``: what is under way is finished and the error comes back. The first failure is raised likewise.
        """
        budget = _Budget(self.shares.waiting)
        failures: list[Exception] = []

        def put(data: Data, size: int) -> str:
            try:
                return self.put(data)
            except Exception as error:
                failures.append(error)
                raise
            finally:
                budget.give_back(size)

        keys: list[Future[str]] = []
        with _pool(self.shares.threads) as pool:
            for data in chunks:
                size = memoryview(data).nbytes
                budget.take(size)
                if failures:
                    raise failures[0]
                keys.append(pool.submit(put, data, size))
            return [key.result() for key in keys]

    @contextmanager
    def putting(self, still_wanted: Callable[[], None] = lambda: None) -> Iterator[Callable[[Data], str]]:
        """A ``put`` that returns the key at once and stores in parallel; when the block is left, all is durable.

        For many small chunks, where each waits for the store. ``still_wanted`` is called before each is taken, and before it is stored,
        by any thread, and may raise. The first failure is raised at a later call or at the end of the
        block; when the block raises, what is under way is finished and the rest dropped.
        """
        memory = self.shares.waiting
        budget = _Budget(memory)
        failures: list[BaseException] = []

        def put(data: Data, size: int) -> None:
            try:
                if not failures:
                    still_wanted()
                    self.put(data)
            except BaseException as error:
                failures.append(error)
                raise
            finally:
                budget.give_back(size)

        with _pool(self.shares.threads) as large, _pool(_SMALL_AT_ONCE) as small:

            def put_soon(data: Data) -> str:
                still_wanted()
                size = memoryview(data).nbytes
                room = max(size, memory // _MOST_WAITING)
                budget.take(room)
                if failures:
                    raise failures[0]
                (small if size <= _SMALL else large).submit(put, data, room)
                return self.key(data)

            yield put_soon
            large.shutdown(wait=True)
            small.shutdown(wait=True)
            if failures:
                raise failures[0]

    def get_many(
        self,
        keys: Iterable[str],
        *,
        chunk_bytes: int = MAX_CHUNK,
    ) -> Iterator[bytes]:
        """The plaintexts of ``keys`` in order, fetched ahead in parallel while at most ``shares.waiting`` bytes are held.

        ``chunk_bytes`` is the longest that any of them can be, the size at which the file was cut. Raises Corrupt.
        """
        ahead = max(1, min(2 * self.shares.threads, self.shares.waiting // max(1, 2 * chunk_bytes)))
        waiting: deque[Future[bytes]] = deque()
        with _pool(self.shares.threads) as pool:
            for key in keys:
                waiting.append(pool.submit(self.get, key, limit=chunk_bytes))
                if len(waiting) >= ahead:
                    yield waiting.popleft().result()
            while waiting:
                yield waiting.popleft().result()

    def list(self) -> Iterator[tuple[str, int]]:
        """Key and stored size in bytes of every chunk in the store, of copies too."""
        for key, info in chunk_objects(self._store, self._worker):
            yield key, info.size

    def forget(self, keys: Iterable[str]) -> None:
        """Upload these again when they are put again."""
        gone = frozenset(keys)
        with self._lock:
            self._kept -= gone
            for key in gone:
                (self._fresh_until or {}).pop(key, None)

    def _seed(self) -> None:
        """List the store, the first time that somebody wants to know what is in it."""
        if self._fresh_until is not None:
            return
        at = self._clock()
        now = store_time(self._store, f"workers/{self._worker}/clock")
        found: dict[str, float] = {}
        for key, info in chunk_objects(self._store, self._worker):
            age = max(0.0, (now - info.modified).total_seconds())
            if info.size >= self._shortest:
                found[key] = max(found.get(key, 0.0), at - age + self._grace / 2)
        with self._lock:
            if self._fresh_until is None:
                self._fresh_until = found


class _Budget:
    """Bytes that may be held. One request is always granted when nothing is held, so none waits for ever."""

    def __init__(self, total: int) -> None:
        self._total = total
        self._held = 0
        self._changed = threading.Condition()

    def take(self, size: int) -> None:
        with self._changed:
            self._changed.wait_for(lambda: self._held == 0 or self._held + size <= self._total)
            self._held += size

    def give_back(self, size: int) -> None:
        with self._changed:
            self._held -= size
            self._changed.notify_all()


@contextmanager
def _pool(threads: int) -> Iterator[ThreadPoolExecutor]:
    """A thread pool that, on the way out with an error, drops what has not begun and waits for the rest."""
    pool = ThreadPoolExecutor(max_workers=threads, thread_name_prefix="chunks")
    try:
        yield pool
    finally:
        pool.shutdown(wait=True, cancel_futures=True)
