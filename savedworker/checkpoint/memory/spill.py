"""What was read inside a freeze and is stored after it, kept on local disk until then."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from concurrent.futures import Executor, Future
from pathlib import Path
from typing import Protocol

from savedworker.checkpoint.memory.base import Base
from savedworker.checkpoint.memory.capture import Captured, Chunks, see_to_it
from savedworker.checkpoint.memory.files import opened, read_at, write_at
from savedworker.checkpoint.memory.records import split
from savedworker.model.errors import Fatal
from savedworker.model.manifest import MemoryGroup


class Store(Chunks, Protocol):
    """Where it goes in the end."""

    def key(self, data: bytes | bytearray, /) -> str:
        """The key that ``put`` would return."""
        ...


class Spill:
    """Takes groups in the place of ``chunks``, into one private file. Safe for several threads. ``put`` raises OSError."""

    def __init__(self, path: Path, chunks: Store) -> None:
        self._path, self._chunks = path, chunks
        self._places: dict[str, tuple[int, int]] = {}
        self._relied: set[str] = set()
        self._end = 0
        self._lock = threading.Lock()

    def put(self, data: bytes | bytearray, /) -> str:
        """Keep one chunk; the key that it will have in the store."""
        key = self._chunks.key(data)
        with self._lock:
            if key in self._places:
                return key
            start = self._end
            self._end += len(data)
            self._places[key] = start, len(data)
        with opened(self._path, os.O_WRONLY | os.O_CREAT) as fd:
            write_at(fd, memoryview(data), start)
        return key

    def is_fresh(self, key: str, /) -> bool:
        """True: whether it is will be asked later, and the chunk put again if not."""
        with self._lock:
            self._relied.add(key)
        return True

    def store(
        self,
        captured: Captured,
        base: Base,
        pool: Executor,
        keep: bool,
        still_wanted: Callable[[int], None] = lambda _: None,
    ) -> None:
        """Put all of it into the store; ``captured`` is what was captured into this. With ``keep`` its groups are added to ``base``.

        ``still_wanted`` is called with the size of every chunk before it is put. Raises as ``capture`` does, and Fatal when the
        local disk does not give back what was kept there.
        """
        groups: dict[str, list[tuple[str, MemoryGroup]]] = {}
        if keep:
            for space in captured.spaces:
                for group in space.groups:
                    groups.setdefault(group.key, []).append((space.name, group))
        tasks: list[Future[None]] = []
        try:
            for key in self._relied:
                still_wanted(0)
                see_to_it(base, key, self._chunks)
            for key in self._places:
                tasks.append(pool.submit(self._store, key, groups.get(key, []), base, still_wanted))
            for task in tasks:
                task.result()
        except OSError as error:
            raise Fatal(
                f"the disk of this instance does not give back what was read: {error.strerror}",
                "look at the disk of this instance",
            ) from error
        finally:
            for task in tasks:
                task.cancel()
            for task in tasks:
                if not task.cancelled():
                    task.exception()  # it still uses the file

    def _store(
        self,
        key: str,
        groups: list[tuple[str, MemoryGroup]],
        base: Base,
        still_wanted: Callable[[int], None],
    ) -> None:
        start, size = self._places[key]
        still_wanted(size)
        data = bytearray(size)
        with opened(self._path, os.O_RDONLY) as fd:
            read_at(fd, memoryview(data), start)
        if self._chunks.put(data) != key:
            raise _changed()
        for space, group in groups:
            masks = [mask for mask, _ in split(memoryview(data), len(group.windows), key)]
            base.add(space, group.windows, masks, key, data)


def _changed() -> Fatal:
    return Fatal(
        "what was kept on the disk of this instance for the checkpoint has changed there",
        "look at the disk of this instance",
    )
