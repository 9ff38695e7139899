"""A host loses its network while the worker on it computes on: the lease ends that, and nothing else has to."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from savedworker.checkpoint.cgroups import Cgroup
from savedworker.model.record import State
from tests.faults import faults
from tests.faults.bed import FREE, TERM, Bed, environment
from tests.faults.checks import EXIT_COST, complaints
from tests.faults.s3 import object_store

pytestmark = pytest.mark.criu


@pytest.fixture
def bed() -> Iterator[Bed]:
    """With an object store, so that the network matters."""
    with (
        object_store() as url,
        tempfile.TemporaryDirectory(prefix="sw-", dir="/var/tmp") as name,
        environment(Path(name)),
    ):
        made = Bed(Path(name), seed=11, store=f"{url}/tests")
        try:
            yield made
        finally:
            made.close()


def test_a_host_that_is_cut_off_stops_its_worker_before_another_one_runs_it(bed: Bed) -> None:
    """Frozen at the term by the shim alone, taken over after it, killed a term later: no step is done by two at a time."""
    bed.tracker.hold_at(200)
    worker = bed.begin(steps=300)
    assert bed.wait(lambda: bed.record(worker).checkpoints and bed.tracker.last > 30, 40)
    host = bed.holder()
    assert host is not None
    group = Cgroup(f"{host.cgroup}/worker")
    faults.link(host, "down")
    cut = time.monotonic()
    while True:
        looked = time.monotonic()
        if group.frozen():
            break
        assert looked - cut < TERM + 0.5, "the shim did not freeze the worker at its deadline"
        time.sleep(0.02)
    used = group.cpu_seconds()
    record = bed.until(
        worker, lambda r: len(r.incarnations) == 2 and r.state is State.RUNNING, "run elsewhere"
    )
    assert record.incarnations[0].end_reason == "no_notice"
    ledger = (bed.folder / "ledger/ledger").read_text().splitlines()
    first = next(i for i, line in enumerate(ledger) if line.split()[2] == "2")
    assert {line.split()[2] for line in ledger[:first]} == {"1"}
    grown = group.cpu_seconds() - used
    # It stands still, or the shim has killed it by now, which costs its end.
    assert grown == 0 if group.pids() and group.frozen() else grown < EXIT_COST
    bed.tracker.hold_at(FREE)
    record = bed.finish()
    assert complaints(bed, record) == []
    assert record.migrations == 1


def test_a_short_cut_costs_a_freeze_and_nothing_else(bed: Bed) -> None:
    """The network is back before anybody took over: the agent proves its lease, and the same process goes on."""
    bed.tracker.hold_at(100)
    worker = bed.begin(steps=200, interval=None)
    assert bed.wait(lambda: bed.tracker.last > 20, 40)
    bed.pause_controller(worker)  # nobody else is launched
    host = bed.holder()
    assert host is not None
    group = Cgroup(f"{host.cgroup}/worker")
    faults.link(host, "down")
    bed.wait(group.frozen, TERM + 2)
    assert group.frozen()
    faults.link(host, "up")
    bed.tracker.hold_at(FREE)
    last = bed.tracker.last
    assert bed.wait(lambda: bed.tracker.last > last + 5, 30), bed.story(worker)
    bed.resume_controller(worker)
    record = bed.finish()
    assert complaints(bed, record) == []
    assert (record.migrations, len(record.incarnations)) == (0, 1)
