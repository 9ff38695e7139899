"""Looks at many launches with few requests: AWS limits how often it is asked, and every worker is reconciled every few seconds."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping, Sequence

from savedworker.model.decisions import InstanceView
from savedworker.model.errors import Refused, Temporary

LOOK_EVERY = 5.0
"""Seconds for which what was seen is not asked for again; a loss is noticed so much later."""
REMEMBER = 60.0
"""Seconds after which a launch that nobody asks for any more is left out."""


class Looks:
    """What ``look`` says of launches, asked for all of them together. Thread-safe: threads that come meanwhile share one look.

    Args:
        look: Asks AWS about these launches. What it raises reaches the caller, as Temporary, and is not remembered: a permission that
            is missing says nothing of the instances.
        every: Seconds for which an answer counts.
        clock: Monotonic seconds.
    """

    def __init__(
        self,
        look: Callable[[Sequence[str]], Mapping[str, InstanceView]],
        every: float = LOOK_EVERY,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._look = look
        self._every = every
        self._clock = clock
        self._lock = threading.Lock()
        self._asked: dict[str, float] = {}
        self._views: dict[str, InstanceView] = {}
        self._at = float("-inf")

    def __call__(self, launches: Sequence[str]) -> dict[str, InstanceView]:
        """What is known of each of ``launches``, at most ``every`` seconds old."""
        with self._lock:
            now = self._clock()
            self._asked |= dict.fromkeys(launches, now)
            if now - self._at >= self._every:
                self._asked = {x: at for x, at in self._asked.items() if now - at < REMEMBER}
                self._views = dict(self._ask(list(self._asked)))
                self._at = now
            elif missing := [x for x in launches if x not in self._views]:
                self._views |= self._ask(missing)
            return {x: self._views[x] for x in launches}

    def _ask(self, launches: Sequence[str]) -> Mapping[str, InstanceView]:
        try:
            return self._look(launches)
        except Refused as error:
            raise Temporary(error.message, retry_after=self._every, fix=error.fix) from error

    def forget(self, launch: str) -> None:
        """Something was done to ``launch``: look anew."""
        with self._lock:
            self._views.pop(launch, None)
