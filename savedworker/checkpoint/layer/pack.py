"""Small files share chunks: for itself each would be an object in the store, and a wait for its answer.

Where a chunk ends is decided by the names and sizes of the files in it, and not by what came before: where everything is read
again (``/dev/shm``, or after an agent was killed), a file that is new or gone changes its own chunk and no other.
"""

from __future__ import annotations

import os
import zlib
from collections.abc import Callable, Iterable, Iterator, Sequence

from blake3 import blake3

from savedworker.checkpoint.layer.index import CHUNK_SIZE, Extent
from savedworker.checkpoint.layer.signature import FileState

SMALL = 1 << 20
"""Bytes up to which a file is packed."""
_TYPICAL = 2 << 20
"""Bytes after which a chunk ends on average."""
_MOST = 4096
"""Files in one chunk at most."""

Pieces = Sequence[tuple[int, bytes | memoryview]]
"""The data of a file: offsets, and what is there."""


class Packer:
    """Gives the data of files to ``sink``, and tells their states where it is: of small ones when their chunk is full, or at ``flush``."""

    def __init__(self, sink: Callable[[bytes], str]) -> None:
        self._sink = sink
        self._files: list[tuple[FileState, Pieces]] = []
        self._size = 0

    def add(
        self, path: str, state: FileState, pieces: Iterator[tuple[int, bytes]], before: FileState | None
    ) -> int:
        """Take the data of a file: offsets, and bytes within one chunk each. How many bytes that were.

        ``before``: what is known of the file from before; what it names is in the store and stays.
        """
        if state.size > SMALL:
            state.data = tuple(Extent.whole(offset, len(data), self._sink(data)) for offset, data in pieces)
            return sum(x.length for x in state.data)
        found = list(pieces)
        size = sum(len(data) for _, data in found)
        state.digest = digest(found)
        if before is not None and before.digest == state.digest:
            state.data = before.data
            return size
        if self._size + size > CHUNK_SIZE or len(self._files) == _MOST:
            self.flush()
        if size:
            self._files.append((state, found))
            self._size += size
            if zlib.crc32(os.fsencode(path)) * _TYPICAL < size << 32:
                self.flush()
        return size

    def flush(self) -> None:
        """Store what waits for its chunk to be full."""
        if not self._files:
            return
        key = self._sink(b"".join(data for _, pieces in self._files for _, data in pieces))
        at = 0
        for state, pieces in self._files:
            extents = []
            for offset, data in pieces:
                extents.append(Extent(offset, len(data), key, at, self._size))
                at += len(data)
            state.data = tuple(extents)
        self._files.clear()
        self._size = 0


def digest(pieces: Pieces) -> bytes:
    """Of the content of a file: equal ones have the same data at the same offsets."""
    found = blake3()
    for offset, data in pieces:
        found.update(b"%d %d " % (offset, len(data)))
        found.update(data)
    return found.digest()


def wasteful(states: Iterable[FileState]) -> frozenset[str]:
    """Keys of chunks less than half of which is data of ``states``: what is left in them is better packed anew."""
    used: dict[str, int] = {}
    size: dict[str, int] = {}
    for state in states:
        for extent in state.data:
            used[extent.key] = used.get(extent.key, 0) + extent.length
            size[extent.key] = extent.of
    return frozenset(key for key, count in used.items() if 2 * count < size[key])
