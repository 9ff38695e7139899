"""A limit that is a promise, on a machine that has other things to do."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

TRIES = 4


def within(seconds: float, call: Callable[[], object]) -> None:
    """Assert that ``call`` ends within so many seconds: at one of a few tries, as a machine may stand still during one of them."""
    took: list[float] = []
    while not took or took[-1] >= seconds:
        assert len(took) < TRIES, f"it takes {took} s, not {seconds:g} s at most"
        began = time.monotonic()
        call()
        took.append(time.monotonic() - began)


class Lateness:
    """How much later than they are due the threads of this process go on: what a busy machine adds to each time that a test takes."""

    def __init__(self) -> None:
        self.most = 0.0
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._look, daemon=True)

    def __enter__(self) -> Lateness:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._thread.join()

    def _look(self) -> None:
        while not self._over.is_set():
            began = time.monotonic()
            time.sleep(0.002)
            self.most = max(self.most, time.monotonic() - began - 0.002)
