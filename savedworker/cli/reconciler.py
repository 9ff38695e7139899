"""Reconciles any number of workers in background threads, each at its own pace, so that a slow fleet or store blocks nobody."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass

from savedworker.controller.client import Client
from savedworker.controller.due import Due
from savedworker.model.decisions import settled
from savedworker.model.errors import NotFound, SavedWorkerError, Temporary
from savedworker.model.record import WorkerRecord

log = logging.getLogger(__name__)

FASTEST = 0.4
"""Seconds between two rounds of a worker that changes."""
LONGEST_RETRY = 30.0
PATIENCE = 600.0
"""Seconds for which a store or fleet may not answer while a person waits."""
LITTLE_PATIENCE = 30.0
"""The same for errors that are not expected to pass."""


@dataclass
class Watched:
    """What the rounds of one worker have shown so far."""

    worker: str
    record: WorkerRecord | None = None
    error: Exception | None = None
    """Of the last round; None when it went well."""
    failing_since: float | None = None
    """On the monotonic clock."""
    failures: int = 0
    pause: float = FASTEST
    let_go: bool = False
    """It has no further round."""

    @property
    def settled(self) -> bool:
        """True when the worker has ended and nothing of it runs any more."""
        return self.record is not None and settled(self.record)

    def lasting_error(self) -> Exception | None:
        """Why it is no use to go on watching: the worker is not there, or every round has failed for too long."""
        if self.error is None or self.failing_since is None:
            return None
        patience = PATIENCE if isinstance(self.error, Temporary) else LITTLE_PATIENCE
        lasts = isinstance(self.error, NotFound) or time.monotonic() - self.failing_since > patience
        return self.error if lasts else None


class Reconciler:
    """Calls ``client.reconcile`` again and again for every worker that was added, until it is settled.

    ``slowest`` is the pause in seconds between two rounds of a worker to which nothing happens. ``on_round`` is called
    in a thread of this class after every round.
    """

    def __init__(
        self,
        client: Client,
        *,
        slowest: float,
        threads: int = 1,
        on_round: Callable[[Watched], None] | None = None,
    ) -> None:
        self._client = client
        self._slowest = slowest
        self._on_round = on_round
        self._due = Due[str]()
        self._lock = threading.Lock()
        self.watched: dict[str, Watched] = {}
        # Daemons: a command that detaches must not wait for a fleet that does not answer. Every step of reconcile may
        # be cut off anywhere.
        self._threads = [
            threading.Thread(target=self._work, name=f"reconcile-{n}", daemon=True) for n in range(threads)
        ]

    def __enter__(self) -> Reconciler:
        for thread in self._threads:
            thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._due.stop()
        until = time.monotonic() + 1.0
        for thread in self._threads:
            thread.join(timeout=max(0.0, until - time.monotonic()))

    def add(self, worker: str) -> None:
        """Begin with this worker; nothing happens when it was added before."""
        with self._lock:
            if worker in self.watched:
                return
            self.watched[worker] = Watched(worker)
        self._due.put(worker)

    def drop(self, worker: str) -> None:
        """Stop with this worker, also when a round of it is under way."""
        with self._lock:
            if worker in self.watched:
                self.watched[worker].let_go = True
        self._due.drop(worker)

    def forget(self, worker: str) -> None:
        """Stop with this worker, and begin anew when it is added again: it was deleted."""
        self.drop(worker)
        with self._lock:
            self.watched.pop(worker, None)

    def _work(self) -> None:
        while (worker := self._due.take()) is not None:
            with self._lock:
                seen = self.watched.get(worker)
            if seen is None:
                continue  # it was let go at this moment
            self._round(seen)
            with self._lock:
                if not seen.settled and not seen.let_go:
                    self._due.put(worker, seen.pause)
            if self._on_round is not None:
                self._on_round(seen)

    def _round(self, seen: Watched) -> None:
        try:
            record = self._client.reconcile(seen.worker)
        except Exception as error:  # one worker's trouble must not end the others' controller
            seen.failures += 1
            seen.failing_since = seen.failing_since or time.monotonic()
            seen.pause = min(FASTEST * 2**seen.failures, LONGEST_RETRY)
            if isinstance(error, SavedWorkerError):
                seen.error = error
                level = logging.WARNING if isinstance(error, Temporary) else logging.ERROR
                log.log(level, "%s: %s; tried again in %.0f s", seen.worker, error, seen.pause)
            else:
                seen.error = error
                log.exception("%s: unexpected; tried again in %.0f s", seen.worker, seen.pause)
            return
        seen.error, seen.failing_since, seen.failures = None, None, 0
        hurry = record.state.terminal or _changed(seen.record, record)
        seen.pause = FASTEST if hurry else min(seen.pause * 1.5, self._slowest)
        seen.record = record


def _changed(old: WorkerRecord | None, new: WorkerRecord) -> bool:
    return old is None or (old.events, old.state) != (new.events, new.state)
