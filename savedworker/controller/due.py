"""Workers, or what else is looked at again and again, and when each is due: for background threads that wait for the next one."""

from __future__ import annotations

import heapq
import itertools
import threading
import time
from typing import Generic, TypeVar

T = TypeVar("T")


class Due(Generic[T]):
    """A queue in the order of times. Thread-safe."""

    def __init__(self) -> None:
        self._heap: list[tuple[float, int, T]] = []
        self._numbers = itertools.count()
        self._changed = threading.Condition()
        self._stopped = False

    def put(self, item: T, pause: float = 0.0) -> None:
        """Have ``item`` due in ``pause`` seconds."""
        with self._changed:
            heapq.heappush(self._heap, (time.monotonic() + pause, next(self._numbers), item))
            self._changed.notify()

    def drop(self, item: T) -> None:
        """Forget when ``item`` is due."""
        with self._changed:
            self._heap = [entry for entry in self._heap if entry[2] != item]
            heapq.heapify(self._heap)

    def take(self) -> T | None:
        """Wait for the next item that is due, and take it out; None once ``stop`` was called."""
        with self._changed:
            while not self._stopped and (not self._heap or self._heap[0][0] > time.monotonic()):
                self._changed.wait(self._heap[0][0] - time.monotonic() if self._heap else None)
            return None if self._stopped else heapq.heappop(self._heap)[2]

    def stop(self) -> None:
        """End all waiting, for good."""
        with self._changed:
            self._stopped = True
            self._changed.notify_all()
