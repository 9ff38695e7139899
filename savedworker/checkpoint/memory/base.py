"""What this instance has, on its own disk, of the groups that are in the store: what changed memory is told against.

What is read back is checked: memory that is told against something else than what is in the store would come back wrong.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt
from blake3 import blake3

from savedworker.checkpoint import native
from savedworker.checkpoint.memory.files import opened, read_at, write_at
from savedworker.checkpoint.memory.pagemap import PAGE, PAGES
from savedworker.checkpoint.memory.records import BITMAP, Mask, Words
from savedworker.model.errors import Temporary


class BaseDamaged(Temporary):
    """The disk of this instance does not give back what was written: ``clear`` it, and store all of the memory anew."""


@dataclass(frozen=True, slots=True)
class BaseGroup:
    """One group: its key in the store, the windows of its space in the order of their records, and where it is on disk.

    Groups of equal content, of other windows or other spaces, have one key and lie at one place.
    """

    key: str
    windows: tuple[int, ...]
    offset: int
    size: int


@dataclass(frozen=True, slots=True)
class Slot:
    """Where the record of one window is."""

    group: BaseGroup
    offset: int
    mask: Mask
    check: bytes


class Base:
    """Groups in one private file. Safe for several threads; ``clear`` only while no other call is under way."""

    def __init__(self, path: Path) -> None:
        native.comparer()  # loaded now, and not in a freeze
        path.unlink(missing_ok=True)  # of an agent before this one: nobody knows what is in it
        self._path = path
        self._end = 0
        self._slots: dict[tuple[str, int], Slot] = {}
        self._groups: dict[str, BaseGroup] = {}
        self._lock = threading.Lock()

    @property
    def size(self) -> int:
        """Bytes on disk."""
        return self._end

    def find(self, space: str, number: int) -> Slot | None:
        """Where window ``number`` of the space is, if it is here."""
        return self._slots.get((space, number))

    def content(self, key: str) -> bytearray:
        """The whole content of the group ``key``, as far as the disk kept it: whoever stores it sees by the key. Raises BaseDamaged."""
        place = self._groups[key]
        content = bytearray(place.size)
        try:
            with opened(self._path, os.O_RDONLY) as fd:
                read_at(fd, memoryview(content), place.offset)
        except OSError as error:
            raise _unreadable(error) from error
        return content

    def add(
        self,
        space: str,
        numbers: Sequence[int],
        masks: Sequence[Mask],
        key: str,
        group: bytes | bytearray | memoryview,
    ) -> None:
        """Take in a group that is in the store under ``key``: its whole content, in records. Raises OSError.

        Not if one of its windows is here already: a checkpoint names whole groups, and no window twice.
        """
        with self._lock:
            if any((space, number) in self._slots for number in numbers):
                return
            known = self._groups.get(key)
            start = self._end if known is None else known.offset
            if known is None:
                self._end += len(group)
        if known is None:
            with opened(self._path, os.O_WRONLY | os.O_CREAT) as fd:
                write_at(fd, memoryview(group), start)
        added = BaseGroup(key, tuple(numbers), start, len(group))
        slots, at = {}, 0
        for number, mask in zip(numbers, masks, strict=True):
            count = int(mask.sum()) * (PAGE // 8)
            pages = np.frombuffer(group, dtype=np.uint64, count=count, offset=at + BITMAP)
            slots[space, number] = Slot(added, start + at + BITMAP, mask, _check(pages))
            at += BITMAP + count * 8
        with self._lock:
            self._groups.setdefault(key, added)
            self._slots |= slots

    def difference(self, slot: Slot, content: Words, room: Words) -> Mask:
        """Which of the pages that ``slot`` has are others in ``content``, where they become their difference from it.

        ``room``: scratch for as many pages as are to be compared at once. Raises BaseDamaged; ``content`` is arbitrary then.
        """
        rows = np.flatnonzero(slot.mask)
        sums, differs = np.empty(len(rows), dtype=np.uint64), np.zeros(PAGES, dtype=np.bool_)
        try:
            with opened(self._path, os.O_RDONLY) as fd:
                _compare(fd, slot.offset, content, rows, room, sums, differs)
        except OSError as error:
            raise _unreadable(error) from error
        if _digest(sums) != slot.check:
            raise BaseDamaged("the base of the memory has changed on the disk of this instance")
        return differs

    def read_page(self, slot: Slot, row: int, into: npt.NDArray[np.uint64]) -> None:
        """Read the page ``row`` of the window, one that ``slot`` has. It is not checked: what it says may be wrong. Raises BaseDamaged."""
        at = slot.offset + int(np.count_nonzero(slot.mask[:row])) * PAGE
        try:
            with opened(self._path, os.O_RDONLY) as fd:
                read_at(fd, into.data.cast("B"), at)
        except OSError as error:
            raise _unreadable(error) from error

    def clear(self) -> None:
        """Forget everything and free the disk."""
        self._slots.clear()
        self._groups.clear()
        self._end = 0
        self._path.unlink(missing_ok=True)


def _unreadable(error: OSError) -> BaseDamaged:
    return BaseDamaged(f"the base of the memory cannot be read: {error.strerror}")


def _compare(
    fd: int,
    offset: int,
    content: Words,
    rows: npt.NDArray[np.int64],
    room: Words,
    sums: npt.NDArray[np.uint64],
    differs: Mask,
) -> None:
    """``compare`` of compare.c. Raises OSError."""
    assert len(room)
    assert all(x.flags.c_contiguous for x in (content, rows, room))
    places = (x.ctypes.data for x in (content, rows, room, sums, differs))
    content_at, rows_at, room_at, sums_at, differs_at = places
    problem = native.comparer().compare(
        fd, offset, content_at, rows_at, len(rows), room_at, len(room), sums_at, differs_at
    )
    if problem:
        raise OSError(problem, os.strerror(problem))


def _check(pages: Words) -> bytes:
    """Tells altered and exchanged pages apart, at the speed of memory."""
    return _digest(np.add.reduce(pages.reshape(-1, PAGE // 8), axis=1))


def _digest(sums: npt.NDArray[np.uint64]) -> bytes:
    """Of the sums of the words of each page."""
    return bytes(blake3(sums.tobytes()).digest(length=16))
