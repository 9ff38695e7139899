"""From the memory of a dump to groups in the store: new windows whole, known ones as what differs from the base.

A known window that was *replaced* is stored whole again: its difference would be as large, and whoever restores would fetch what the base
has of it for nothing.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Executor, Future
from dataclasses import dataclass, field
from queue import LifoQueue
from typing import Protocol

import numpy as np

from savedworker.checkpoint.layer.errors import NoSpace
from savedworker.checkpoint.memory.base import Base, BaseDamaged, BaseGroup, Slot
from savedworker.checkpoint.memory.pagemap import PAGE, WINDOW, Space, Window
from savedworker.checkpoint.memory.records import BITMAP, Mask, Words, as_bytes, blank, encode, mask_of
from savedworker.checkpoint.memory.sources import Source
from savedworker.model.errors import Fatal
from savedworker.model.manifest import MemoryGroup, StoredMemory
from savedworker.store.compression import pack


class Chunks(Protocol):
    """Where groups are stored."""

    def put(self, data: bytes | bytearray, /) -> str:
        """Store one chunk durably and return its key."""
        ...

    def is_fresh(self, key: str, /) -> bool:
        """Whether a chunk that was put before this save is there and stays, so that it may be named without a put."""
        ...


GROUP = WINDOW + BITMAP
"""Bytes of records after which a group is full: one dense window, or many sparse ones."""
_BATCH = 32 << 20
"""Bytes of memory whose changes go into one group: few objects, and well below a chunk's limit."""
_BATCH_WINDOWS = 256
_AT_ONCE = 128
"""Pages that are compared at once: with what they are compared to they fit into a core's own cache."""
_SAMPLE = 8
"""Pages of a window that tell whether it was replaced."""
_NO_SHORTER = 0.9
"""Share of the bytes that those pages take themselves, from which on nothing is gained by their difference from the base."""
_LEVEL = 1
"""Of zstd, to find that out."""


@dataclass(frozen=True)
class Captured:
    """All spaces of one dump, in bytes of its memory: what is new, and what the base knew, told against it or replaced."""

    spaces: tuple[StoredMemory, ...]
    bytes_new: int
    bytes_known: int

    def __add__(self, other: Captured) -> Captured:
        return Captured(
            self.spaces + other.spaces,
            self.bytes_new + other.bytes_new,
            self.bytes_known + other.bytes_known,
        )

    @property
    def files(self) -> frozenset[str]:
        """Names of the images that are in here: not to be stored again."""
        return frozenset(x.pages for x in self.spaces if x.pages is not None)


@dataclass
class _Part:
    """What one batch came to."""

    groups: list[MemoryGroup] = field(default_factory=list)
    used: dict[BaseGroup, None] = field(default_factory=dict)
    """Groups of the base, in order."""
    delta: MemoryGroup | None = None
    bytes_known: int = 0


class _Room:
    """Buffers to read into and to compare with."""

    def __init__(self) -> None:
        self.now, self.before = blank(), blank(_AT_ONCE)


class _Turn:
    """Of many threads only as many read as there are cores, each in a room. One keeps it until it waits for the store: changing costs more
    than reading a window."""

    def __init__(self, free: LifoQueue[_Room]) -> None:
        self._free = free
        self._room: _Room | None = None

    def take(self) -> _Room:
        """The room, when there is one."""
        if self._room is None:
            self._room = self._free.get()
        return self._room

    def leave(self) -> None:
        """Let another thread have it."""
        if self._room is not None:
            self._free.put(self._room)
        self._room = None


def capture(
    sources: Sequence[Source],
    base: Base,
    chunks: Chunks,
    pool: Executor,
    keep: bool,
    still_wanted: Callable[[int, bool], None] = lambda *_: None,
) -> Captured:
    """Store the memory that is in ``sources``, with the threads of ``pool``.

    With ``keep`` new groups are added to ``base``, so that the next checkpoint is told against them. ``still_wanted`` is
    called before every window, by any thread, with its size and whether the base knows it, with a size of 0 before what is left of each kind is
    stored, and may raise to end it early. Raises what it, ``chunks``,
    ``base`` and the sources raise.
    """
    rooms: LifoQueue[_Room] = LifoQueue()  # in the one that was used last most is in a cache
    for _ in os.sched_getaffinity(0):
        rooms.put(_Room())
    under_way: list[list[Future[_Part]]] = []
    try:
        for source in sources:
            under_way.append(
                [
                    pool.submit(_capture, source, batch, base, chunks, keep, _Turn(rooms), still_wanted)
                    for batch in _batches(source.space.windows)
                ]
            )
        parts = [[x.result() for x in futures] for futures in under_way]
    except OSError as error:
        full = error.errno in (errno.ENOSPC, errno.EDQUOT)
        raise (NoSpace if full else Fatal)(
            f"the disk of this instance fails beside the memory that is read: {error.strerror}",
            "free space there, or give a larger disk",
        ) from error
    finally:
        for futures in under_way:
            for future in futures:
                future.cancel()
        for futures in under_way:
            for future in futures:
                if not future.cancelled():
                    future.exception()  # it still uses the sources
    stored = tuple(_stored(x.space, found) for x, found in zip(sources, parts, strict=True))
    known = sum(x.bytes_known for found in parts for x in found)
    return Captured(stored, sum(x.size for x in stored) - known, known)


def _stored(space: Space, parts: Sequence[_Part]) -> StoredMemory:
    used = dict.fromkeys(group for part in parts for group in part.used)
    return StoredMemory(
        name=space.name,
        pages=space.pages,
        size=space.size,
        skip=space.skip,
        groups=(
            *(MemoryGroup(key=group.key, windows=group.windows) for group in used),
            *(group for part in parts for group in part.groups),
        ),
        deltas=tuple(part.delta for part in parts if part.delta is not None),
    )


def _batches(windows: Sequence[Window]) -> Iterator[list[Window]]:
    batch, size = list[Window](), 0
    for window in windows:
        if batch and (size + window.size > _BATCH or len(batch) == _BATCH_WINDOWS):
            yield batch
            batch, size = [], 0
        batch.append(window)
        size += window.size
    if batch:
        yield batch


def _capture(
    source: Source,
    batch: list[Window],
    base: Base,
    chunks: Chunks,
    keep: bool,
    turn: _Turn,
    still_wanted: Callable[[int, bool], None],
) -> _Part:
    part, space = _Part(), source.space
    new, again = Group(space.name, chunks, base if keep else None), Group(space.name, chunks, None)
    changes, changed = bytearray(), list[int]()
    try:
        for window in batch:
            slot = base.find(space.name, window.number)
            still_wanted(window.size, slot is not None)
            mask = mask_of(window.segments)
            part.bytes_known += window.size if slot is not None else 0
            room = turn.take()
            source.read(window, room.now)
            if slot is None or _is_replaced(base, slot, mask, room):
                whole = new if slot is None else again
                whole.add(window.number, mask, room.now)
                if whole.has_full:
                    turn.leave()
                    part.groups += whole.store_full()
                continue
            if slot.group not in part.used:
                part.used[slot.group] = None
                if see_to_it(base, slot.group.key, chunks, turn.leave):
                    room = turn.take()
                    source.read(window, room.now)
            differs = _difference(base, slot, mask, room)
            if differs.any():
                changed.append(window.number)
                for piece in encode(differs, room.now):
                    changes += piece
    finally:
        turn.leave()
    still_wanted(0, False)
    part.groups += new.finish()
    still_wanted(0, True)
    part.groups += again.finish()
    if changed:
        part.delta = MemoryGroup(key=chunks.put(changes), windows=tuple(changed))
    return part


def _is_replaced(base: Base, slot: Slot, mask: Mask, room: _Room) -> bool:
    """Whether the window in ``room.now`` is to be stored whole although the base has it, judged by a few of its pages.

    If each is another one than in the base and their difference no shorter. Not if the group of the base has other windows: a checkpoint
    that names it for those has this one as well.
    """
    if len(slot.group.windows) > 1:
        return False
    both = np.flatnonzero(mask & slot.mask)
    step = max(1, -(-len(both) // _SAMPLE))
    # Others in each window: what changes may lie at regular places.
    rows = both[slot.group.windows[0] % step :: step]
    before = room.before[: len(rows)]
    for row, known in zip(rows.tolist(), before, strict=True):
        base.read_page(slot, row, known)
        if (room.now[row] == known).all():
            return False
    now = room.now[rows]
    return _packed_size(now ^ before) >= _NO_SHORTER * _packed_size(now)


def _packed_size(pages: Words) -> int:
    data = as_bytes(pages)
    return len(pack(data, _LEVEL) or data)


def see_to_it(base: Base, key: str, chunks: Chunks, waits: Callable[[], None] = lambda: None) -> bool:
    """Have the group ``key`` of the base in the store, now if not before: whether it had to be put. Then ``waits`` was called first.

    Raises BaseDamaged when the base has something else by now.
    """
    if chunks.is_fresh(key):
        return False
    waits()
    if chunks.put(base.content(key)) != key:
        raise BaseDamaged("the base of the memory has changed on the disk of this instance")
    return True


def _difference(base: Base, slot: Slot, mask: Mask, room: _Room) -> Mask:
    """Turn ``room.now`` into its difference from the base; which of its pages are not all zeros then."""
    differs = base.difference(slot, room.now, room.before)
    others = mask & ~slot.mask
    if others.any():
        differs[others] = np.bitwise_or.reduce(room.now[others], axis=1) != 0
    return differs & mask


class Group:
    """Collects records of one space until a group is full, stores it, and adds it to ``base`` if one is given."""

    def __init__(self, space: str, chunks: Chunks, base: Base | None) -> None:
        self._space, self._chunks, self._base = space, chunks, base
        self._open = _Records()
        self._full: list[_Records] = []

    @property
    def has_full(self) -> bool:
        """Whether there is something that ``store_full`` stores."""
        return bool(self._full)

    def add(self, number: int, mask: Mask, content: Words) -> None:
        """Append the pages in ``mask`` of a window."""
        size = BITMAP + int(mask.sum()) * PAGE
        if self._open.numbers and len(self._open.content) + size > GROUP:
            self._close()
        for piece in encode(mask, content):
            self._open.content += piece
        self._open.numbers.append(number)
        self._open.masks.append(mask)

    def _close(self) -> None:
        self._full.append(self._open)
        self._open = _Records()

    def store_full(self) -> list[MemoryGroup]:
        """Store what will not grow any more."""
        found = [self._store(records) for records in self._full]
        self._full.clear()
        return found

    def finish(self) -> list[MemoryGroup]:
        """Store all that there is."""
        if self._open.numbers:
            self._close()
        return self.store_full()

    def _store(self, records: _Records) -> MemoryGroup:
        key = self._chunks.put(records.content)
        if self._base is not None:
            self._base.add(self._space, records.numbers, records.masks, key, records.content)
        return MemoryGroup(key=key, windows=tuple(records.numbers))


@dataclass
class _Records:
    content: bytearray = field(default_factory=bytearray)
    numbers: list[int] = field(default_factory=list)
    masks: list[Mask] = field(default_factory=list)
