"""Files as spaces, cut into windows by offset: those of ``/dev/shm``, which are memory, and what CRIU writes of deleted ones that are open.

What is written through a mapping shows no time stamp, so that each checkpoint has to look at all of it: against the base that costs a
comparison, and no copy. Files of ``/dev/shm`` are read where they are.
"""

from __future__ import annotations

import os
import re
import stat
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from blake3 import blake3

from savedworker.checkpoint.layer import SPACE_PATH_MAX, ChangedWhileFrozen, Held, held_apart
from savedworker.checkpoint.layer.content import Unreadable, open_regular
from savedworker.checkpoint.layer.errors import OUTSIDER, os_errors
from savedworker.checkpoint.layer.index import ROOT
from savedworker.checkpoint.layer.tree import DirectoryCursor, walk
from savedworker.checkpoint.memory.files import read_at
from savedworker.checkpoint.memory.pagemap import PAGE, Space, Window, space_of
from savedworker.checkpoint.memory.records import Words, as_bytes

_LEAST = 1 << 20
"""Bytes from which on a file is a space of its own. Smaller ones share chunks."""
_DELETED = re.compile(r"ghost-file-[0-9a-f]+\.img")


def space_name(path: str, status: os.stat_result) -> str | None:
    """The space that the file at ``path`` of ``/dev/shm`` is, in every checkpoint and on every instance.

    None for a small one, and one that has other names: which of them tells its space would be left to chance.
    """
    raw = os.fsencode(path)
    if status.st_size <= _LEAST or status.st_nlink > 1 or len(raw) > SPACE_PATH_MAX:
        return None
    return f"shm-{blake3(raw).hexdigest(length=16)}"


@dataclass(frozen=True)
class ByOffset:
    """A space that is a file below ``root``, as it was when it was looked at."""

    space: Space
    root: Path
    file: Held
    frozen: bool
    """Whether nobody may change its content while it is read."""

    def read(self, window: Window, content: Words) -> None:
        """Raises ChangedWhileFrozen when it is another file by now. Nothing outside of ``root`` is opened, whatever the worker makes of its folders."""
        parent, _, name = self.file.path.rpartition("/")
        before = self.file.status
        try:
            with (
                DirectoryCursor(self.root) as cursor,
                open_regular(cursor.open(parent or ROOT), name, (before.st_dev, before.st_ino)) as fd,
            ):
                self._read(fd, window, content)
                after = os.fstat(fd)
        except Unreadable as error:
            raise self._changed(error.cause.strerror) from error
        except OSError as error:
            raise self._changed(error.strerror) from error
        if _content(after, self.frozen) != _content(before, self.frozen):
            raise self._changed("it is another one")

    def _read(self, fd: int, window: Window, content: Words) -> None:
        into, size = as_bytes(content), self.file.status.st_size
        for segment in window.segments:
            part = into[segment.start : segment.start + segment.length]
            offset = segment.offset - self.space.skip
            first, last = max(0, -offset), min(segment.length, size - offset)
            part[:first] = bytes(first)
            read_at(fd, part[first:last], offset + first)
            part[last:] = bytes(segment.length - last)

    def _changed(self, why: str | None) -> ChangedWhileFrozen:
        where = f"{self.root.name}/{self.file.path}"
        return ChangedWhileFrozen(f"{where!r} changed while it was read: {why}", fix=OUTSIDER)


def _content(status: os.stat_result, frozen: bool) -> tuple[int, ...]:
    """What stays while the content does, as far as anything tells."""
    return (status.st_size, status.st_ctime_ns) if frozen else (status.st_size,)


def shm_sources(root: Path, files: Iterable[Held]) -> list[ByOffset]:
    """The spaces that ``files`` of the ``/dev/shm`` at ``root`` are, whose worker is frozen."""
    return [ByOffset(space_of(file.space, file.runs), root, file, True) for file in files]


def find_shm_sources(root: Path, still_wanted: Callable[[], None]) -> Iterator[ByOffset]:
    """The spaces in the ``/dev/shm`` at ``root``, while its worker may be changing them: one after the other, as many as they may be.

    Raises Fatal, Refused, and what ``still_wanted`` does, which is called again and again.
    """
    for file in held_apart(root, space_name, still_wanted):
        yield ByOffset(space_of(file.space, file.runs), root, file, False)


def shm_size(root: Path) -> int:
    """Bytes of memory that the spaces in the ``/dev/shm`` at ``root`` are now. Raises Fatal, Refused."""
    with os_errors("read", root):
        cursor = DirectoryCursor(root)
    with cursor:
        found = walk(cursor, tolerant=True)
        return sum(
            status.st_blocks * 512
            for path, _, _, status in found
            if stat.S_ISREG(status.st_mode) and space_name(path, status)
        )


def deleted_files(folder: Path) -> list[ByOffset]:
    """The spaces that large deleted files are in the dump in ``folder``. Raises OSError."""
    found = []
    for name in sorted(filter(_DELETED.fullmatch, os.listdir(folder))):
        status = os.stat(folder / name)
        if status.st_size > _LEAST:
            file = Held(name, status, name, ((0, status.st_size),))
            skip = -_header(folder / name) % PAGE
            found.append(ByOffset(space_of(name, file.runs, name, skip), folder, file, True))
    return found


def _header(path: Path) -> int:
    """Bytes that CRIU writes before the content of a deleted file: its times are in there, as numbers of any length."""
    with path.open("rb") as file:
        magic, length = file.read(8), file.read(4)
    return len(magic) + len(length) + int.from_bytes(length, "little")
