"""The chunks of one restore, fetched by several threads at once: when one of them fails, all stop at their next chunk."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import contextmanager

from savedworker.model.budget import Shares
from savedworker.store.chunks import ChunkStore


class Fetching:
    """Chunks, until one of them cannot be had or a ``part`` fails; from then on that very error is the answer to everything."""

    def __init__(self, chunks: ChunkStore) -> None:
        self._chunks = chunks
        self._failures: list[BaseException] = []

    @property
    def shares(self) -> Shares:
        return self._chunks.shares

    def check(self) -> None:
        """Raise what has failed elsewhere."""
        if self._failures:
            raise self._failures[0]

    @contextmanager
    def part(self) -> Iterator[None]:
        """What fails in the block, for whatever reason, ends the other parts."""
        self.check()
        try:
            yield
        except BaseException as error:
            self._failures.append(error)
            raise

    def get(self, key: str) -> bytes:
        """As ``ChunkStore.get``."""
        with self.part():
            return self._chunks.get(key)

    def view(self, key: str) -> memoryview:
        """As ``ChunkStore.view``."""
        with self.part():
            return self._chunks.view(key)

    def get_many(self, keys: Iterable[str]) -> Iterator[bytes]:
        """As ``ChunkStore.get_many``."""
        for data in self._chunks.get_many(keys):
            self.check()
            yield data
