"""What has to be durable before what: else a crash in between loses it for good."""

from __future__ import annotations

import pytest

from savedworker.store import logs
from savedworker.store.worker import WorkerStore
from tests.faults.bed import Bed


@pytest.mark.criu
def test_the_lines_before_a_checkpoint_are_in_the_store_before_the_checkpoint_is(bed: Bed) -> None:
    """Whoever goes on from it never writes them again. The shipper alone is up to a second behind."""
    bed.tracker.hold_at(20)
    worker = bed.begin(steps=300, interval=None)
    for wanted in (10, 25, 40):
        bed.tracker.hold_at(wanted + 10)
        assert bed.wait(lambda n=wanted: bed.tracker.last >= n, 40)  # type: ignore[misc]
        number = bed.checkpoint(worker)
        stored = [x for x in bed.client.logs(worker, "stdout") if isinstance(x, logs.Text)]
        position = WorkerStore(bed.client.store, worker).load_manifest(number).log.stdout
        assert stored
        assert stored[-1].cursor.offset >= position > 0
