"""CRIU's pagemap files: which pages of a space are in its pages file, in which order."""

from __future__ import annotations

import re
import struct
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from savedworker.checkpoint.criu_image import IMAGE, entries, fields, magic
from savedworker.model.errors import Corrupt

PAGE = 4096
WINDOW = 4 << 20
"""Bytes of address space in one window, at addresses that are multiples of it."""
PAGES = WINDOW // PAGE

_PAGEMAP_MAGIC = 0x56084025
_ANY, _PRIVATE = re.compile(r"pagemap-(?:shmem-)?\d+\.img"), re.compile(r"pagemap-(\d+)\.img")
_IN_PARENT, _LAZY, _PRESENT = 1, 2, 4
_END = 1 << 64
_MOST_HEADERS, _MOST_ENTRY = 4096, 64
"""Bytes of a pagemap beside its entries, and of an entry, which tells of a page at least; at most."""


@dataclass(frozen=True, slots=True)
class Segment:
    """``length`` bytes at ``start`` of a window, found at ``offset`` of the pages file. All are multiples of the page."""

    start: int
    length: int
    offset: int


@dataclass(frozen=True, slots=True)
class Window:
    """The part of a space from ``number * WINDOW`` on, as far as its pages are in the image."""

    number: int
    segments: tuple[Segment, ...]

    @property
    def size(self) -> int:
        """Bytes that are there."""
        return sum(x.length for x in self.segments)


@dataclass(frozen=True)
class Space:
    """One pagemap file, ``name``, and the pages file that it describes, of ``size`` bytes.

    Or a file that is cut by offset: an image (then ``pages`` is its name) or one of ``/dev/shm`` (then there are no ``pages``), of which ``size`` bytes of
    pages have data. It begins ``skip`` bytes, less than a page, after the beginning of its first window.
    """

    name: str
    pages: str | None
    windows: tuple[Window, ...]
    size: int
    skip: int = 0

    @property
    def process(self) -> int | None:
        """The inner pid of the process whose memory it is; None for shared memory."""
        found = _PRIVATE.fullmatch(self.name)
        return int(found[1]) if found else None


def is_pagemap(name: str) -> bool:
    """Whether an image of that name describes a space."""
    return _ANY.fullmatch(name) is not None


def read_pagemap(path: Path, limit: int) -> Space:
    """The space that ``path`` describes, of at most ``limit`` bytes. Raises Corrupt when it is none, or has pages elsewhere."""
    try:
        if path.stat().st_size > _MOST_HEADERS + limit // PAGE * _MOST_ENTRY:
            raise ValueError("it is too long for what it tells")
        data = path.read_bytes()
        found = list(entries(data, magic(IMAGE, _PAGEMAP_MAGIC)))
        pages = next(x for number, x, _ in fields(found[0]) if number == 1 and isinstance(x, int))
        runs = list(_runs(found[1:]))
        size = sum(x[1] for x in runs)
        if size > limit:
            raise ValueError(f"it tells of {size} bytes; at most {limit} can be right")
    except (OSError, ValueError, KeyError, IndexError, StopIteration, struct.error) as error:
        raise Corrupt(f"{path.name} cannot be understood: {error}") from error
    return Space(path.name, f"pages-{pages}.img", tuple(windows(runs)), size)


def space_of(name: str, runs: Iterable[tuple[int, int]], pages: str | None = None, skip: int = 0) -> Space:
    """The space ``name`` that no pagemap describes: the pages of a file that ``runs``, of offsets and lengths in ascending order, touch."""
    found = list[tuple[int, int, int]]()
    for at, length in runs:
        offset = at + skip
        start, end = offset // PAGE * PAGE, -(-(offset + length) // PAGE) * PAGE
        if found and found[-1][0] + found[-1][1] >= start:
            start = found.pop()[0]
        found.append((start, end - start, start))
    return Space(name, pages, tuple(windows(found)), sum(length for _, length, _ in found), skip)


def _runs(messages: list[bytes]) -> Iterator[tuple[int, int, int]]:
    """(address, bytes, offset) of each run of pages that are in the pages file."""
    offset, last = 0, 0
    for message in messages:
        entry = {number: value for number, value, _ in fields(message) if isinstance(value, int)}
        address, count, flags = entry[1], entry.get(2, 0) or entry.get(5, 0), entry.get(4, _PRESENT)
        if (flags & (_IN_PARENT | _LAZY) and not flags & _PRESENT) or entry.get(3):
            raise ValueError("some of its pages are elsewhere")
        if not flags & _PRESENT:
            continue
        length = count * PAGE
        if address % PAGE or address < last or count <= 0 or address + length > _END:
            raise ValueError("its runs are not in order")
        yield address, length, offset
        offset += length
        last = address + length


def windows(runs: Iterable[tuple[int, int, int]]) -> Iterator[Window]:
    """``runs``, (address, bytes, offset) each, in ascending order, cut into windows."""
    number, segments = -1, list[Segment]()
    for address, length, offset in runs:
        while length:
            here = address // WINDOW
            if here != number:
                if segments:
                    yield Window(number, tuple(segments))
                number, segments = here, []
            start = address % WINDOW
            part = min(length, WINDOW - start)
            before = segments[-1] if segments else None
            if before and (before.start + before.length, before.offset + before.length) == (start, offset):
                segments[-1] = Segment(before.start, before.length + part, before.offset)
            else:
                segments.append(Segment(start, part, offset))
            address, length, offset = address + part, length - part, offset + part
    if segments:
        yield Window(number, tuple(segments))
