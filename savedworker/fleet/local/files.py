"""Small files that several processes share: atomic JSON documents and locks that die with their holder."""

from __future__ import annotations

import fcntl
import json
import os
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any


def write_json(path: Path, document: Mapping[str, Any]) -> None:
    """Replace ``path`` in one step: a reader sees the old document or the new one."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    with open(descriptor, "w") as file:
        json.dump(document, file)
    temporary.replace(path)


def read_json(path: Path) -> dict[str, Any] | None:
    """The document at ``path``; None when there is none, or not a whole one (only a crash of the machine leaves that)."""
    try:
        document = json.loads(path.read_bytes())
    except (FileNotFoundError, NotADirectoryError, ValueError, RecursionError):
        return None
    return document if isinstance(document, dict) else None


class Lock:
    """An flock(2) on a file of this machine. The kernel releases it when the last process that has it is gone."""

    def __init__(self, fd: int) -> None:
        self.fd = fd

    @classmethod
    def take(cls, path: Path, wait: float | None = None) -> Lock | None:
        """The lock on ``path``, which is created if need be; waits at most ``wait`` seconds (None: for ever).

        None when it stays taken, or when the directory is (or was meanwhile) removed.
        """
        end = None if wait is None else time.monotonic() + wait
        while True:
            try:
                fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
            except (FileNotFoundError, NotADirectoryError):
                return None
            try:
                while True:
                    try:
                        fcntl.flock(fd, fcntl.LOCK_EX | (fcntl.LOCK_NB if end is not None else 0))
                        break
                    except BlockingIOError:
                        if end is None or time.monotonic() >= end:
                            os.close(fd)
                            return None
                        time.sleep(0.01)
                if os.path.samestat(os.fstat(fd), path.stat()):
                    return cls(fd)
            except FileNotFoundError:
                pass
            except BaseException:
                os.close(fd)
                raise
            os.close(fd)  # the file was removed while we waited: this lock guards nothing

    def release(self) -> None:
        """Let the next one have it, whoever else has inherited the descriptor."""
        fcntl.flock(self.fd, fcntl.LOCK_UN)
        os.close(self.fd)

    def __enter__(self) -> Lock:
        return self

    def __exit__(self, *_: object) -> None:
        self.release()
