"""Files as spaces, cut into windows by offset: those of ``/dev/shm``, which are memory, and what CRIU writes of deleted ones that are open.

What is written through a mapping shows no time stamp, so that each checkpoint has to look at all of it: against the base that costs a
comparison, and no copy. Files of ``/dev/shm`` are read where they are.
"""

from __future__ import annotations

import os
import re
import stat
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from blake3 import blake3

from savedworker.checkpoint.layer import SPACE_PATH_MAX, ChangedWhileFrozen, Held, held_apart
from savedworker.checkpoint.layer.errors import OUTSIDER
from savedworker.checkpoint.memory.files import opened, read_at
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
        """Raises ChangedWhileFrozen when it is another file by now."""
        try:
            # Looked at before it is opened: what a link leads to may be somebody's terminal or pipe.
            with opened(self.root / self.file.path, os.O_PATH | os.O_NOFOLLOW) as found:
                self._check_that_it_is(os.fstat(found))
                with opened(Path(f"/proc/self/fd/{found}"), os.O_RDONLY) as fd:
                    self._read(fd, window, content)
                    self._check_that_it_is(os.fstat(fd))
        except OSError as error:
            raise self._changed() from error

    def _read(self, fd: int, window: Window, content: Words) -> None:
        into, size = as_bytes(content), self.file.status.st_size
        for segment in window.segments:
            part = into[segment.start : segment.start + segment.length]
            offset = segment.offset - self.space.skip
            first, last = max(0, -offset), min(segment.length, size - offset)
            part[:first] = bytes(first)
            read_at(fd, part[first:last], offset + first)
            part[last:] = bytes(segment.length - last)

    def _check_that_it_is(self, status: os.stat_result) -> None:
        """A worker that runs could put a link to something else in the place of a folder."""
        if _identity(status, self.frozen) != _identity(self.file.status, self.frozen):
            raise self._changed()

    def _changed(self) -> ChangedWhileFrozen:
        where = f"{self.root.name}/{self.file.path}"
        return ChangedWhileFrozen(f"{where!r} changed while it was read", fix=OUTSIDER)


def _identity(status: os.stat_result, content: bool) -> tuple[int, ...]:
    """What stays while it is the same file, and of the same ``content`` as far as its time tells."""
    found = (status.st_dev, status.st_ino, stat.S_IFMT(status.st_mode), status.st_size)
    return (*found, status.st_ctime_ns) if content else found


def shm_sources(root: Path, files: Iterable[Held]) -> list[ByOffset]:
    """The spaces that ``files`` of the ``/dev/shm`` at ``root`` are, whose worker is frozen."""
    return [ByOffset(space_of(file.space, file.runs), root, file, True) for file in files]


def find_shm_sources(root: Path) -> list[ByOffset]:
    """The spaces in the ``/dev/shm`` at ``root`` now, while its worker may be changing them. Raises Fatal, Refused."""
    files = held_apart(root, space_name)
    return [ByOffset(space_of(file.space, file.runs), root, file, False) for file in files]


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
