"""Ending instances that nobody wants any more: what a controller left behind that died at the wrong moment, or somebody's deleted worker.

Reconciling ends what a record knows. This looks from the other side: at what a fleet has, by its marks.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass

from savedworker.fleet.base import Fleet, Keeps, Tidies
from savedworker.model.errors import Corrupt, NotFound, Refused, SavedWorkerError
from savedworker.model.placement import leftover
from savedworker.model.record import WorkerRecord
from savedworker.model.spec import check_worker_id
from savedworker.store.backend import Store
from savedworker.store.worker import WorkerStore, list_workers

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Reaped:
    """One instance that was left over. ``error`` when it could not be ended now."""

    fleet: str
    launch: str
    worker: str
    instance: str
    why: str
    error: str = ""


def reap(store: Store, fleet: Fleet, *, dry_run: bool = False) -> list[Reaped]:
    """End every instance of ``fleet`` that belongs to a worker of ``store`` and is not wanted. Idempotent; may run anywhere.

    Nothing is ended of a worker whose record cannot be read, and nothing at all where the store has no worker: a directory that is
    not mounted here looks so. Raises Temporary or Refused when the fleet or the store does not answer.
    """
    if not isinstance(fleet, Keeps):
        return []
    found = []
    for owned in fleet.owned(store.url):
        try:
            record = _record(store, owned.worker)
        except (Corrupt, Refused) as error:
            log.warning("instance %s of %s is left alone: %s", owned.instance, owned.worker, error)
            continue
        if record is None and not any(True for _ in list_workers(store)):
            log.warning("instance %s is left alone: the store %s has no worker", owned.instance, store.url)
            continue
        why = leftover(record, owned.launch)
        if why is None:
            continue
        error_text = ""
        if not dry_run:
            try:
                fleet.terminate(owned.launch)
                log.info(
                    "%s: ended instance %s of launch %s: %s", owned.worker, owned.instance, owned.launch, why
                )
            except SavedWorkerError as error:
                error_text = str(error)
                log.warning("%s: instance %s could not be ended: %s", owned.worker, owned.instance, error)
        found.append(Reaped(fleet.name, owned.launch, owned.worker, owned.instance, why, error_text))
    return found


def tidy(store: Store, fleet: Fleet, *, dry_run: bool = False) -> list[str]:
    """Delete what ``fleet`` made besides instances and has no use for any more; what that was. Raises Temporary or Refused."""
    if not isinstance(fleet, Tidies):
        return []
    gone = list(fleet.tidy(store.url, store.sealing.environment(), dry_run=dry_run))
    for what in () if dry_run else gone:
        log.info("fleet %s: deleted %s", fleet.name, what)
    return gone


def _record(store: Store, worker: str) -> WorkerRecord | None:
    try:
        return WorkerStore(store, check_worker_id(worker)).load_record().record
    except NotFound:
        return None
