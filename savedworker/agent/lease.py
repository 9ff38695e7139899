"""Keeps the lease: renews it by compare-and-swap, proves each renewal to the shim, and notices when it is lost.

The deadline that the shim enforces counts from the moment at which the renewal was *sent*, on this machine's own clock, so a
renewal that took long (or whose answer was lost) never stretches it.
"""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable
from datetime import UTC, datetime

from savedworker.agent.shim import lease_clock
from savedworker.agent.shim_client import ShimClient, ShimGone
from savedworker.crashpoints import crash_point
from savedworker.model import defaults
from savedworker.model import events as ev
from savedworker.model.errors import Conflict, Fenced, SavedWorkerError
from savedworker.model.record import WorkerRecord
from savedworker.store.worker import WorkerStore

log = logging.getLogger(__name__)


def holds(record: WorkerRecord, incarnation: int, holder: str) -> bool:
    """True while ``record`` says that this holder of this incarnation has the lease."""
    lease = record.lease
    return (
        lease is not None
        and not lease.released
        and (lease.incarnation, lease.holder) == (incarnation, holder)
    )


class LeaseKeeper:
    """Renews in a thread of its own. ``changed`` gets every record it sees, ``lost`` is called once when fenced."""

    def __init__(
        self,
        worker: WorkerStore,
        incarnation: int,
        holder: str,
        term: float,
        shim: ShimClient,
        changed: Callable[[WorkerRecord], None],
        lost: Callable[[], None],
    ) -> None:
        self._worker = worker
        self._incarnation = incarnation
        self._holder = holder
        self._term = term
        self._shim = shim
        self._changed = changed
        self._lost = lost
        self._every = term / defaults.LEASE_RENEWALS_PER_TERM
        self._poll = min(self._every, max(0.5, term / 20))
        self._proven_until = 0.0
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="lease-keeper", daemon=True)

    @property
    def proven(self) -> bool:
        """True while the lease is held for certain: the last renewal that was answered has not run out."""
        return lease_clock() < self._proven_until

    def start(self) -> None:
        """Begin renewing."""
        self._thread.start()

    def stop(self) -> None:
        """Stop renewing; the shim's deadline stays where it is."""
        self._stop.set()
        if self._thread.is_alive():
            self._thread.join(timeout=max(30.0, self._term))

    def renew(self) -> WorkerRecord:
        """Renew now. Raises Fenced when the lease is somebody else's, Unreachable when the store is away."""
        sent = lease_clock()
        crash_point("agent.renew.before")
        event = ev.LeaseRenewed(at=datetime.now(UTC), incarnation=self._incarnation, holder=self._holder)
        held = self._worker.record_event(event)
        crash_point("agent.renew.answered")
        if not holds(held.record, self._incarnation, self._holder):
            raise Fenced(f"incarnation {self._incarnation} does not hold the lease any more")
        self._proven_until = sent + self._term
        try:
            self._shim.lease(sent + self._term, self._term)
        except ShimGone as error:
            log.warning("the lease was renewed but the shim was not told: %s", error)
        crash_point("agent.renew.proved")
        return held.record

    def _run(self) -> None:
        next_renewal = time.monotonic()
        while not self._stop.is_set():
            try:
                if time.monotonic() >= next_renewal:
                    record = self.renew()
                    next_renewal = time.monotonic() + self._every
                else:
                    record = self._worker.load_record().record
                    if not holds(record, self._incarnation, self._holder):
                        raise Fenced(f"incarnation {self._incarnation} does not hold the lease any more")
                self._changed(record)
                pause = min(self._poll, max(0.0, next_renewal - time.monotonic()))
            except Fenced as error:
                log.error("%s", error)
                self._proven_until = 0.0
                self._lost()
                return
            except Conflict:
                pause = 0.05  # many writers just now
            except SavedWorkerError as error:
                log.warning("the lease could not be renewed, trying again: %s", error)
                pause = min(1.0, self._every / 4)
            self._stop.wait(pause)
