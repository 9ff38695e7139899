"""Reading and writing at places of files. All raise OSError."""

from __future__ import annotations

import contextlib
import errno
import os
from collections.abc import Iterator
from pathlib import Path


@contextlib.contextmanager
def opened(path: Path, flags: int) -> Iterator[int]:
    """A descriptor of ``path``, private if it is created."""
    fd = os.open(path, flags | os.O_CLOEXEC, 0o600)
    try:
        yield fd
    finally:
        os.close(fd)


def read_at(fd: int, into: memoryview, offset: int) -> None:
    """Fill ``into`` with what is at ``offset``. A file that ends before that is an OSError, too."""
    while into:
        got = os.preadv(fd, [into], offset)
        if not got:
            raise OSError(errno.EIO, "the file ends too early")
        into, offset = into[got:], offset + got


def write_at(fd: int, data: memoryview, offset: int) -> None:
    """Write all of ``data`` at ``offset``."""
    while data:
        done = os.pwrite(fd, data, offset)
        data, offset = data[done:], offset + done
