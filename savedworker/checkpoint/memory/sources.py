"""Where the memory of a dump is read: in the pages files that CRIU wrote, or in the frozen processes themselves. (Files: ``by_offset.py``.)

With ``pages.c`` loaded CRIU leaves the pages files of processes empty. Their memory is then read inside the freeze, which
saves writing it all to a file first. Which of the two it is, the files say: whoever runs a CRIU that writes them is served as well.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from savedworker.checkpoint.memory.by_offset import deleted_files
from savedworker.checkpoint.memory.files import opened, read_at
from savedworker.checkpoint.memory.pagemap import WINDOW, Segment, Space, Window, is_pagemap, read_pagemap
from savedworker.checkpoint.memory.records import Words, as_bytes
from savedworker.model.errors import Fatal, Temporary

_MOST = 1 << 46
"""Bytes of memory that a process can have."""
_AT_ONCE = 1024
"""Pieces of memory that one call reads, IOV_MAX of Linux."""


class Unreadable(Temporary):
    """The memory of a frozen process cannot be read from outside: CRIU, which reads it from inside, has to write it."""


class Source(Protocol):
    """One space and where its pages are."""

    @property
    def space(self) -> Space: ...

    def read(self, window: Window, content: Words) -> None:
        """Read the pages of ``window`` into ``content``; what is between them is arbitrary. Raises Fatal, Unreadable."""
        ...


@dataclass(frozen=True)
class InFile:
    """A space whose pages CRIU wrote to ``path``."""

    space: Space
    path: Path

    def read(self, window: Window, content: Words) -> None:
        into = as_bytes(content)
        try:
            with opened(self.path, os.O_RDONLY) as fd:
                for segment in window.segments:
                    read_at(fd, into[segment.start : segment.start + segment.length], segment.offset)
        except OSError as error:
            raise Fatal(
                f"the memory images cannot be read: {error.strerror}", "look at the disk of this instance"
            ) from error


class _Vector(ctypes.Structure):
    _fields_ = (("base", ctypes.c_size_t), ("length", ctypes.c_size_t))


_libc = ctypes.CDLL(None, use_errno=True)
_libc.process_vm_readv.restype = ctypes.c_ssize_t
_libc.process_vm_readv.argtypes = (
    ctypes.c_int,
    ctypes.POINTER(_Vector),
    ctypes.c_ulong,
    ctypes.POINTER(_Vector),
    ctypes.c_ulong,
    ctypes.c_ulong,
)


@dataclass(frozen=True)
class InProcess:
    """A space that is the private memory of the frozen process ``pid`` (as this instance numbers it)."""

    space: Space
    pid: int

    def read(self, window: Window, content: Words) -> None:
        for at in range(0, len(window.segments), _AT_ONCE):
            segments = window.segments[at : at + _AT_ONCE]
            if self._copy(window.number, segments, content) != sum(x.length for x in segments):
                self._read(window.number, segments, content)

    def _copy(self, number: int, segments: tuple[Segment, ...], content: Words) -> int:
        """The fast way, which memory without the right to read refuses. How many bytes it read, or -1."""
        here, there = content.ctypes.data, number * WINDOW
        count = len(segments)
        local = (_Vector * count)(*(_Vector(here + x.start, x.length) for x in segments))
        remote = (_Vector * count)(*(_Vector(there + x.start, x.length) for x in segments))
        return int(_libc.process_vm_readv(self.pid, local, count, remote, count, 0))

    def _read(self, number: int, segments: tuple[Segment, ...], content: Words) -> None:
        into = as_bytes(content)
        try:
            with opened(Path(f"/proc/{self.pid}/mem"), os.O_RDONLY) as fd:
                for x in segments:
                    read_at(fd, into[x.start : x.start + x.length], number * WINDOW + x.start)
        except OSError as error:
            raise Unreadable(
                f"the memory of pid {self.pid} cannot be read at {number * WINDOW:#x}: {error.strerror}"
            ) from error


def find_sources(folder: Path, processes: Mapping[int, int]) -> list[Source]:
    """The spaces of the dump in ``folder``, but those in ``/dev/shm``. ``processes``: inner to outer pid of those that are still frozen.

    Raises Corrupt when a pagemap cannot be understood, Fatal when a pages file has another size than its pagemap tells.
    """
    found: list[Source] = [
        _source(folder, read_pagemap(folder / name, _MOST), processes)
        for name in sorted(os.listdir(folder))
        if is_pagemap(name)
    ]
    return [*found, *deleted_files(folder)]


def _source(folder: Path, space: Space, processes: Mapping[int, int]) -> Source:
    assert space.pages is not None  # it is from a pagemap
    path = folder / space.pages
    size = path.stat().st_size if path.exists() else 0
    if size == space.size:
        return InFile(space, path)
    if size == 0 and space.process is not None and space.process in processes:
        return InProcess(space, processes[space.process])
    raise Fatal(
        f"{space.pages} has not the {space.size} bytes that {space.name} tells",
        "report this with the version of CRIU",
    )
