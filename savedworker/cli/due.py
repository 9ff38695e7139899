"""Workers and when each is due, for background threads that wait for the next one."""

from __future__ import annotations

import heapq
import threading
import time


class Due:
    """A queue of workers in the order of their times. Thread-safe."""

    def __init__(self) -> None:
        self._heap: list[tuple[float, str]] = []
        self._changed = threading.Condition()
        self._stopped = False

    def put(self, worker: str, pause: float = 0.0) -> None:
        """Have ``worker`` due in ``pause`` seconds."""
        with self._changed:
            heapq.heappush(self._heap, (time.monotonic() + pause, worker))
            self._changed.notify()

    def drop(self, worker: str) -> None:
        """Forget when ``worker`` is due."""
        with self._changed:
            self._heap = [entry for entry in self._heap if entry[1] != worker]
            heapq.heapify(self._heap)

    def take(self) -> str | None:
        """Wait for the next worker that is due, and take it out; None once ``stop`` was called."""
        with self._changed:
            while not self._stopped and (not self._heap or self._heap[0][0] > time.monotonic()):
                self._changed.wait(self._heap[0][0] - time.monotonic() if self._heap else None)
            return None if self._stopped else heapq.heappop(self._heap)[1]

    def stop(self) -> None:
        """End all waiting, for good."""
        with self._changed:
            self._stopped = True
            self._changed.notify_all()
