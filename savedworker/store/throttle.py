"""A limit on what is sent per second, which can be lifted at any moment."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable


class Throttle:
    """Lets ``rate`` bytes a second through, for all threads together; None lets everything through. Thread-safe."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._changed = threading.Condition()
        self._rate: float | None = None
        self._free_at = 0.0
        self._waited = 0.0

    @property
    def waited(self) -> float:
        """Seconds that threads have waited here so far, all together."""
        return self._waited

    @property
    def rate(self) -> float | None:
        """Bytes a second; None without a limit."""
        return self._rate

    def limit(self, rate: float | None) -> None:
        """From now on ``rate`` bytes a second. Whoever waits at this moment goes on at the new rate, at once without one."""
        with self._changed:
            self._rate = rate
            self._free_at = self._clock()
            self._changed.notify_all()

    def take(self, size: int) -> None:
        """Wait until ``size`` bytes may be sent; what is sent next then waits for as long as they take."""
        with self._changed:
            while self._rate is not None:
                began = self._clock()
                if began >= self._free_at:
                    break
                self._changed.wait(self._free_at - began)
                self._waited += self._clock() - began
            if self._rate is not None:
                self._free_at = self._clock() + size / self._rate
