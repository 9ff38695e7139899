"""The worker's stdout and stderr in the store, across incarnations.

``logs/<stream>/<incarnation>/<offset>`` holds the bytes of the stream from ``offset`` on, counted over the *worker's* life:
an incarnation that was restored from a checkpoint with log position P begins at P, one that started from nothing at 0.
``logs/<stream>/<incarnation>/begin-<offset>`` is empty and written first, so that a reader knows where an incarnation begins
before it has said anything. Offsets have 20 digits, so names sort. Within an incarnation objects follow one another without
gap or overlap, each is written once, and the next only after the one before is durable. Where the worker is sealed, each object is
sealed for its very name (``store/sealing.py``), the empty ones too.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from savedworker.crashpoints import crash_point
from savedworker.model.errors import AlreadyExists, Conflict, Corrupt, NotFound, Refused
from savedworker.store.backend import Store
from savedworker.store.base import ObjectInfo, is_component
from savedworker.store.sealing import Sealer
from savedworker.store.worker import WorkerStore

MAX_PIECE = 8 << 20
"""Most bytes of one log object."""

_OFFSET = re.compile(r"\d{20}")
_BEGIN = re.compile(r"begin-(\d{20})")
_INCARNATION = re.compile(r"[1-9]\d{0,8}")
_CURSOR = re.compile(r"([1-9]\d{0,8}):(\d{1,20})")


@dataclass(frozen=True, slots=True, order=True)
class Cursor:
    """How far a stream has been read: ``offset`` bytes of the worker's life, as ``incarnation`` told it."""

    incarnation: int
    offset: int

    def __str__(self) -> str:
        return f"{self.incarnation}:{self.offset}"

    @classmethod
    def parse(cls, text: str) -> Cursor:
        """The cursor in ``text``. Raises Refused."""
        match = _CURSOR.fullmatch(text)
        if not match:
            raise Refused(
                f"{text[:80]!r} is not a log cursor", "use one that a read returned, such as 1:4096"
            )
        return cls(int(match[1]), int(match[2]))


@dataclass(frozen=True, slots=True)
class Text:
    """Bytes of the stream; ``cursor`` is where to go on after them."""

    data: bytes
    cursor: Cursor


@dataclass(frozen=True, slots=True)
class Mark:
    """The place where the stream does not simply go on.

    ``discarded_bytes`` and ``discarded_lines`` above it, from offset ``replay_from`` on, are done again below it, because
    incarnation ``lost`` ended without a last checkpoint. ``missing_bytes`` never reached the store. ``mid_line``: what stands above
    does not end with a newline.
    """

    lost: int
    incarnation: int
    discarded_bytes: int
    discarded_lines: int
    replay_from: int
    missing_bytes: int
    mid_line: bool
    cursor: Cursor


LogPiece = Text | Mark


def render_mark(mark: Mark) -> str:
    """The line that people see in place of ``mark``, without a newline."""
    if mark.missing_bytes:
        return f"[savedworker] {mark.missing_bytes} bytes of incarnation {mark.lost}'s output never reached the store"
    lines = "line" if mark.discarded_lines == 1 else f"{mark.discarded_lines} lines"
    verb = "is" if mark.discarded_lines == 1 else "are"
    return (
        f"[savedworker] incarnation {mark.lost} ended without a last checkpoint; the last {lines} above, "
        f"since checkpoint position {mark.replay_from}, {verb} done again below"
    )


class LogWriter:
    """Ships one stream of one incarnation. For one thread at a time.

    ``position`` is the offset in bytes at which this incarnation goes on: the checkpoint's log position, 0 without one, or,
    for an agent that was restarted within the incarnation, anything up to what it shipped before.
    """

    def __init__(self, worker: WorkerStore, stream: str, incarnation: int, position: int) -> None:
        self._store = worker.store
        self._sealer = worker.sealer
        self._prefix = f"{_stream_prefix(worker, stream)}/{incarnation}"
        self._position = position
        self._ahead = b""
        self._begun = False

    @property
    def position(self) -> int:
        """Everything before this offset is durable."""
        return self._position

    def begin(self) -> None:
        """Say where this incarnation begins, once the worker runs; ``append`` does it too.

        Raises Conflict if the incarnation has begun at a later position, and what ``Store`` raises.
        """
        if self._begun:
            return
        crash_point("logs.begin.before")
        begun = _begin(self._store, self._sealer, self._prefix)
        if begun is None:
            key = f"{self._prefix}/begin-{self._position:020d}"
            with contextlib.suppress(AlreadyExists):  # our own, before a restart
                self._store.create(key, self._sealer.seal("begin", key, b""))
        elif begun > self._position:
            raise Conflict(f"{self._prefix} begins at {begun}: it cannot go on at {self._position}")
        self._begun = True

    def append(self, data: bytes) -> None:
        """Store ``data`` at the current position; durable on return.

        After an error, call again with the same bytes, or more: what did reach the store is recognised. Raises Conflict when
        there is something else at this place: somebody else writes as this incarnation.
        """
        self.begin()
        view = memoryview(data)
        while view:
            if self._ahead:
                n = min(len(view), len(self._ahead))
                if view[:n] != self._ahead[:n]:
                    raise self._conflict()
                self._ahead = self._ahead[n:]
            else:
                n = min(len(view), MAX_PIECE)
                key = f"{self._prefix}/{self._position:020d}"
                crash_point("logs.piece.before")
                try:
                    self._store.create(key, self._sealer.seal("log", key, bytes(view[:n])))
                except AlreadyExists:
                    self._ahead = self._sealer.open("log", key, self._store.get(key).data)
                    if not self._ahead:
                        raise self._conflict() from None
                    continue
                crash_point("logs.piece.after")
            view = view[n:]
            self._position += n

    def _conflict(self) -> Conflict:
        return Conflict(f"{self._prefix} holds other output at {self._position}: another agent writes there")


def read(worker: WorkerStore, stream: str, after: Cursor | None = None) -> Iterator[LogPiece]:
    """What ``stream`` holds now, after cursor ``after``: all of incarnation 1, then of 2, and so on, with marks between.

    To follow, read again after the last piece's cursor. The read ends before an object that is not visible yet, unless a
    later incarnation has begun. Raises Corrupt for an object of impossible size or that was altered, NoKey, and what ``Store`` raises.
    """
    return _Reader(worker, stream).read(after)


class _Reader:
    """One read. Knows where incarnations begin, and how many lines the pieces had that it saw."""

    def __init__(self, worker: WorkerStore, stream: str) -> None:
        self._prefix = _stream_prefix(worker, stream)
        self._store = worker.store
        self._sealer = worker.sealer
        self._starts: dict[int, int] = {}
        self._seen: dict[tuple[int, int], tuple[int, int, bool]] = {}
        """Incarnation and offset of a piece -> its bytes, its newlines, and whether it ends with one."""

    def read(self, after: Cursor | None) -> Iterator[LogPiece]:
        # Incarnations first: when k+1 is there, all that k wrote is there too.
        names = self._store.list_dirs(self._prefix)
        numbers = sorted(int(name) for name in names if _INCARNATION.fullmatch(name))
        at = after or Cursor(numbers[0] if numbers else 1, 0)
        begun = [n for n in numbers if n >= at.incarnation]
        for n in begun:
            start = self._start(n)
            if start is None:
                return
            if n != at.incarnation or (after is None and n == begun[0]):
                if start != at.offset:
                    yield self._mark(numbers, at, Cursor(n, start))
                at = Cursor(n, start)
            for piece in self._incarnation(at, is_last=n == begun[-1]):
                yield piece
                at = piece.cursor

    def _incarnation(self, at: Cursor, *, is_last: bool) -> Iterator[LogPiece]:
        number, offset = at.incarnation, at.offset
        for begins, data in self._objects(number, offset):
            if begins > offset:
                if is_last:
                    return
                yield Mark(number, number, 0, 0, begins, begins - offset, False, Cursor(number, begins))
            offset = begins + len(data)
            yield Text(data, Cursor(number, offset))

    def _objects(self, number: int, offset: int) -> Iterator[tuple[int, bytes]]:
        """The pieces of incarnation ``number`` that begin at ``offset`` or later, in order, none overlapping."""
        for begins, info in self._infos(number, offset):
            data = self._data(info) if begins >= offset else b""
            if data:
                self._seen[number, begins] = len(data), data.count(b"\n"), data.endswith(b"\n")
                offset = begins + len(data)
                yield begins, data

    def _infos(self, number: int, offset: int) -> Sequence[tuple[int, ObjectInfo]]:
        prefix = f"{self._prefix}/{number}"
        found = []
        for info in self._store.list(prefix, after=f"{prefix}/{offset - 1:020d}" if offset else None):
            name = info.key.removeprefix(f"{prefix}/")
            if _OFFSET.fullmatch(name):
                found.append((int(name), info))
        return sorted(found, key=lambda pair: pair[0])

    def _data(self, info: ObjectInfo) -> bytes:
        if self._size(info) > MAX_PIECE:
            raise Corrupt(f"log object {info.key} is too long ({info.size} bytes)")
        try:
            data = self._store.get(info.key).data
        except NotFound:  # retention came by
            return b""
        return self._sealer.open("log", info.key, data)

    def _size(self, info: ObjectInfo) -> int:
        """Bytes of the stream in the object."""
        return info.size - self._sealer.overhead

    def _start(self, number: int) -> int | None:
        """The offset at which incarnation ``number`` begins, None if it has not."""
        if number not in self._starts:
            start = _begin(self._store, self._sealer, f"{self._prefix}/{number}")
            if start is None:
                return None
            self._starts[number] = start
        return self._starts[number]

    def _mark(self, numbers: list[int], at: Cursor, new: Cursor) -> Mark:
        """The mark between ``at``, where all that is known ends, and the beginning of another incarnation."""
        if new.offset > at.offset:
            return Mark(at.incarnation, new.incarnation, 0, 0, new.offset, new.offset - at.offset, False, new)
        newlines, ends_with_newline = self._count(numbers, at, new.offset)
        lines = newlines + (not ends_with_newline)
        return Mark(
            at.incarnation,
            new.incarnation,
            at.offset - new.offset,
            lines,
            new.offset,
            0,
            not ends_with_newline,
            new,
        )

    def _count(self, numbers: list[int], end: Cursor, start: int) -> tuple[int, bool]:
        """Newlines from offset ``start`` to ``end`` in what was valid then, and whether it ends with one."""
        newlines, ends_with_newline = 0, True
        for number, low, high in self._segments([n for n in numbers if n <= end.incarnation], end.offset):
            if high <= start:
                continue
            low = max(low, start)
            seen = [(o, *self._seen[n, o]) for n, o in sorted(self._seen) if n == number]
            if sum(size for o, size, _, _ in seen if low <= o and o + size <= high) == high - low:
                for o, size, count, ends in seen:
                    if low <= o and o + size <= high:
                        newlines, ends_with_newline = newlines + count, ends
                continue
            for begins, info in self._infos(number, 0):
                if begins >= high or begins + self._size(info) <= low:
                    continue
                part = self._data(info)[max(0, low - begins) : high - begins]
                if part:
                    newlines, ends_with_newline = newlines + part.count(b"\n"), part.endswith(b"\n")
        return newlines, ends_with_newline

    def _segments(self, numbers: list[int], end: int) -> list[tuple[int, int, int]]:
        """Which incarnation tells which range of offsets in the valid history: (incarnation, low, high), in order."""
        segments: list[tuple[int, int, int]] = []
        for number in numbers:
            start = self._start(number)
            if start is not None:
                segments = [(n, low, min(high, start)) for n, low, high in segments if low < start]
                segments.append((number, start, end))
        return segments


def _begin(store: Store, sealer: Sealer, prefix: str) -> int | None:
    """The offset at which the incarnation begins, None if it has not. Raises Corrupt when somebody else says where."""
    names = (info.key.rpartition("/")[2] for info in store.list(prefix, after=f"{prefix}/begin-"))
    begun = min((int(match[1]) for name in names if (match := _BEGIN.fullmatch(name))), default=None)
    if begun is not None and sealer.overhead:
        key = f"{prefix}/begin-{begun:020d}"
        try:
            sealer.open("begin", key, store.get(key).data)
        except NotFound:  # retention came by
            return None
    return begun


def _stream_prefix(worker: WorkerStore, stream: str) -> str:
    if not is_component(stream):
        raise Refused(f"{stream[:80]!r} is not a stream", "ask for stdout or stderr")
    return f"{worker.prefix}/logs/{stream}"
