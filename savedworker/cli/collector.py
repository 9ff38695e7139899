"""Collects workers now and then in a background thread, one after the other, beside the rounds of a controller."""

from __future__ import annotations

import logging
import random
import threading
from collections.abc import Callable

from savedworker.controller.due import Due
from savedworker.model import defaults
from savedworker.model.errors import NotFound, SavedWorkerError
from savedworker.model.units import format_size
from savedworker.store.collect import Collected

log = logging.getLogger(__name__)


class Collector:
    """Calls ``collect`` with every worker that was added, every ``every`` seconds, and when an ended one's retention is over.

    The first time is drawn from the whole of that span, so that a store of many workers is not asked for all of them at once, and a
    controller that lives for a moment asks for none.
    """

    def __init__(
        self,
        collect: Callable[[str], Collected],
        *,
        every: float = defaults.COLLECT_EVERY,
        draw: Callable[[], float] = random.random,
    ) -> None:
        self._collect = collect
        self._every = every
        self._draw = draw
        self._due = Due[str]()
        self._known: set[str] = set()
        self._lock = threading.Lock()
        # A daemon: a collection may be cut off anywhere.
        self._thread = threading.Thread(target=self._work, name="collector", daemon=True)

    def __enter__(self) -> Collector:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._due.stop()
        self._thread.join(timeout=1.0)

    def add(self, worker: str) -> None:
        """Begin with this worker; nothing happens when it was added before."""
        with self._lock:
            if worker in self._known:
                return
            self._known.add(worker)
        self._due.put(worker, self._every * self._draw())

    def _work(self) -> None:
        while (worker := self._due.take()) is not None:
            pause = self._round(worker)
            if pause is not None:
                self._due.put(worker, pause)
                continue
            with self._lock:
                self._known.discard(worker)

    def _round(self, worker: str) -> float | None:
        """Seconds until the next time; None when the worker is gone."""
        try:
            done = self._collect(worker)
        except NotFound:
            return None
        except SavedWorkerError as error:
            log.warning("%s: nothing was collected: %s", worker, error)
            return self._every
        except Exception:  # one worker's trouble must not end the others' collections
            log.exception("%s: unexpected; nothing was collected", worker)
            return self._every
        if done.objects:
            log.info("%s: deleted %d objects, %s", worker, done.objects, format_size(done.bytes))
        return next_pause(done, self._every)


def next_pause(done: Collected, every: float) -> float | None:
    """Seconds until it is worth while to look again: rarely at a worker that has ended, but soon after its retention."""
    if done.whole:
        return None
    if done.retained_for is None:
        return every
    return min(done.retained_for + 1.0, max(every, defaults.COLLECTION_GRACE))
