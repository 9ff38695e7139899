"""The data of regular files: its extents, cut into chunks, and the copies made inside a freeze."""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from savedworker.checkpoint.layer.errors import OUTSIDER, ChangedWhileFrozen, os_errors, translated
from savedworker.checkpoint.layer.index import CHUNK_SIZE
from savedworker.checkpoint.layer.signature import FileId
from savedworker.model.errors import Fatal

# Non-blocking, because it may have become a fifo meanwhile.
_READ = os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
_HOLE_WORTH_KEEPING = 64 << 10
"""Bytes. A smaller hole inside a chunk is stored as zeros: a chunk for every page would cost more than it saves."""
_SMALL = 128 << 10
"""Bytes. Up to this size files share one staging file: creating one for each costs more than the copy."""
_SURPLUS = 4096
"""Extents that a file may have got while it is read, beyond one for each KiB that it had."""
_STEP = 64 << 20
"""Bytes copied between two looks at the deadline."""
_NOT_HERE = (errno.EXDEV, errno.EINVAL, errno.ENOSYS, errno.EOPNOTSUPP)


class Unreadable(Exception):
    """A file vanished, was replaced or cannot be read. Never leaves this package."""

    def __init__(self, cause: OSError) -> None:
        super().__init__(str(cause))
        self.cause = cause


class OpenFile:
    """A file descriptor as a context manager, without the buffering of ``open``."""

    __slots__ = ("fd",)

    def __init__(self, fd: int) -> None:
        self.fd = fd

    def __enter__(self) -> int:
        return self.fd

    def __exit__(self, *_: object) -> None:
        os.close(self.fd)


def open_regular(directory: int, name: str, identity: FileId) -> OpenFile:
    """Open the very file that was seen by lstat. Raises Unreadable if there is another one, or none, under that name."""
    try:
        fd = os.open(name, _READ, dir_fd=directory)
    except OSError as error:
        raise Unreadable(error) from error
    status = os.fstat(fd)
    if (status.st_dev, status.st_ino) != identity or not stat.S_ISREG(status.st_mode):
        os.close(fd)
        raise Unreadable(FileNotFoundError(errno.ENOENT, "replaced by another file", name))
    return OpenFile(fd)


def extents(fd: int, status: os.stat_result, changing: bool) -> Iterator[tuple[int, int]]:
    """(offset, length) in bytes of what is not a hole (lseek(2), SEEK_DATA). Raises OSError.

    Of a file that somebody may be ``changing`` only as many as it could have had: data that moves on before us would have no end.
    """
    size, left = status.st_size, status.st_blocks // 2 + _SURPLUS
    if status.st_blocks * 512 >= size:  # no room for a hole: the usual small file needs no seeking
        if size:
            yield 0, size
        return
    position = 0
    while position < size:
        try:
            start = os.lseek(fd, position, os.SEEK_DATA)
        except OSError as error:
            if error.errno == errno.ENXIO:  # only a hole is left
                return
            if error.errno == errno.EINVAL:  # a file system without holes
                yield position, size - position
                return
            raise
        if start >= size:
            return
        position = min(os.lseek(fd, start, os.SEEK_HOLE), size)
        left -= 1
        if changing and left < 0:
            raise OSError(errno.ESTALE, os.strerror(errno.ESTALE))
        yield start, position - start


def pieces(found: Iterator[tuple[int, int]]) -> Iterator[tuple[int, int]]:
    """Extents cut at multiples of CHUNK_SIZE, with small holes between them filled."""
    start = end = -1
    for offset, length in found:
        while length > 0:
            step = min(length, CHUNK_SIZE - offset % CHUNK_SIZE)
            if (
                start >= 0
                and offset - end < _HOLE_WORTH_KEEPING
                and start // CHUNK_SIZE == offset // CHUNK_SIZE
            ):
                end = offset + step
            else:
                if start >= 0:
                    yield start, end - start
                start, end = offset, offset + step
            offset += step
            length -= step
    if start >= 0:
        yield start, end - start


def chunks(fd: int, status: os.stat_result, tolerant: bool) -> Iterator[tuple[int, bytes]]:
    """(offset, bytes) of a file's data, each of 1 to CHUNK_SIZE bytes.

    ``tolerant`` stops where the file was truncated meanwhile and raises Unreadable for errors; else both are Fatal.
    """
    try:
        for offset, length in pieces(extents(fd, status, tolerant)):
            data = os.pread(fd, length, offset)
            while 0 < len(data) < length:
                more = os.pread(fd, length - len(data), offset + len(data))
                if not more:
                    break
                data += more
            if len(data) < length and not tolerant:
                raise Fatal(
                    f"a staged copy ends {length - len(data)} bytes early", "take the checkpoint again"
                )
            if data:
                yield offset, data
            if len(data) < length:
                return
    except OSError as error:
        if tolerant:
            raise Unreadable(error) from error
        raise


@dataclass(slots=True)
class Staged:
    """Where the copy of one file lies in the stage."""

    name: str
    offset: int
    """Bytes from the start of the staging file; not 0 only in the shared one."""
    size: int
    bytes_data: int

    def chunks(self, stage: Path) -> Iterator[tuple[int, bytes]]:
        """(offset in the captured file, bytes). Raises Fatal if the copy is damaged or gone."""
        with os_errors("read", stage), OpenFile(os.open(stage / self.name, os.O_RDONLY | os.O_CLOEXEC)) as fd:
            if self.name != _SHARED_NAME:
                yield from chunks(fd, os.fstat(fd), tolerant=False)
                return
            data = os.pread(fd, self.size, self.offset)
            if len(data) != self.size:
                raise Fatal("the staged copies of small files are truncated", "take the checkpoint again")
            yield 0, data


_SHARED_NAME = "small"


class Stage:
    """Copies files into a directory as fast as the kernel can: small ones into one file, large ones into one each."""

    def __init__(self, directory: Path, check: Callable[[], None] | None) -> None:
        self._directory = directory
        self._check = check
        self._count = 0
        self._shared = -1
        self._shared_end = 0
        self._buffer: list[bytes] = []
        self._buffered = 0

    def __enter__(self) -> Stage:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        try:
            if kind is None:
                self._flush()
        finally:
            if self._shared >= 0:
                os.close(self._shared)

    def copy(self, fd: int, status: os.stat_result, path: str) -> Staged:
        """Copy the open file, which had ``status`` before. Raises NoSpace, ChangedWhileFrozen, Unreadable, Fatal."""
        if self._check is not None:
            self._check()
        size = status.st_size
        if size <= _SMALL and status.st_blocks * 512 >= size:
            try:
                data = os.pread(fd, size + 1, 0)
            except OSError as error:
                raise Unreadable(error) from error
            staged = Staged(_SHARED_NAME, self._shared_end, size, size)
            self._shared_end += size
            self._buffer.append(data)
            self._buffered += size
            changed = len(data) != size
            if self._buffered >= CHUNK_SIZE:
                self._flush()
        else:
            self._count += 1
            name = str(self._count)
            staged = Staged(name, 0, size, self._copy_large(fd, status, name, path))
            changed = False
        after = os.fstat(fd)
        if changed or after.st_size != size or after.st_ctime_ns != status.st_ctime_ns:
            raise ChangedWhileFrozen(
                f"{path!r} changed while it was copied in the freeze",
                fix=OUTSIDER,
            )
        return staged

    def _flush(self) -> None:
        with os_errors("stage files in", self._directory):
            if self._buffer and self._shared < 0:
                name = self._directory / _SHARED_NAME
                self._shared = os.open(name, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
            data = memoryview(b"".join(self._buffer))
            while data:
                data = data[os.write(self._shared, data) :]
        self._buffer.clear()
        self._buffered = 0

    def _copy_large(self, fd: int, status: os.stat_result, name: str, path: str) -> int:
        copied = 0
        with os_errors("stage a file in", self._directory):
            to = os.open(self._directory / name, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        with OpenFile(to):
            try:
                os.ftruncate(to, status.st_size)
                for offset, length in extents(fd, status, changing=False):
                    end = offset + length
                    copied += length
                    while offset < end:
                        step = _copy_range(fd, to, offset, min(end - offset, _STEP))
                        if step == 0:
                            raise ChangedWhileFrozen(
                                f"{path!r} shrank while it was copied in the freeze", fix=OUTSIDER
                            )
                        offset += step
                        if self._check is not None:
                            self._check()
            except OSError as error:
                raise translated(error, "stage a file in", self._directory) from error
        return copied


def _copy_range(source: int, target: int, offset: int, count: int) -> int:
    """Copy at the same offset in both; copy_file_range shares blocks where the file system can. Raises OSError."""
    try:
        return os.copy_file_range(source, target, count, offset, offset)
    except OSError as error:
        if error.errno not in _NOT_HERE:
            raise
    os.lseek(target, offset, os.SEEK_SET)
    return os.sendfile(target, source, offset, count)
