"""Deleting what is not needed any more, as the ``gc`` command and a controller that runs for itself do it."""

from __future__ import annotations

from savedworker.store.backend import Store
from savedworker.store.collect import Collected, collect
from savedworker.store.worker import WorkerStore


def collect_worker(store: Store, worker: str, *, dry_run: bool = False) -> Collected:
    """See ``savedworker.store.collect.collect``."""
    from savedworker.checkpoint.keys import (
        stored_chunk_keys,  # here: what only instances need is slow to load
    )

    return collect(WorkerStore(store, worker), stored_chunk_keys, dry_run=dry_run)
