"""Nobody's wall clock decides anything: it may leap by days, on any machine, at any moment."""

from __future__ import annotations

import os
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest

from savedworker.model import events as ev
from savedworker.model.decisions import settled
from tests.controller.conftest import World as ControllerWorld
from tests.faults.bed import FREE, Bed
from tests.faults.checks import attribute, counts, identity, leftovers, order, output, usage

DAY = 24 * 3600.0


@pytest.fixture
def clock(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[float], None]:
    """Sets by how many seconds agents' wall clocks are wrong."""
    file = tmp_path / "clock"
    before = os.environ.get("PYTHONPATH", "")
    monkeypatch.setenv("PYTHONPATH", f"{Path(__file__).with_name('shifted_clock')}:{before}".rstrip(":"))
    monkeypatch.setenv("SAVEDWORKER_TEST_CLOCK", str(file))

    def shift(seconds: float) -> None:
        file.write_text(str(seconds))

    return shift


@pytest.mark.criu
@pytest.mark.parametrize("leap", [DAY, -DAY], ids=["forward", "back"])
def test_an_agents_clock_that_leaps_by_a_day_changes_nothing(
    bed: Bed, clock: Callable[[float], None], leap: float
) -> None:
    """While it runs, before a notice with a deadline in absolute time, and before a loss without one."""
    bed.tracker.hold_at(300)
    worker = bed.begin(steps=330)
    assert bed.wait(lambda: bed.record(worker).checkpoints and bed.tracker.last > 20, 40)
    clock(leap)
    assert bed.wait(lambda: bed.tracker.last > 60, 20)

    def renewed_by_the_wrong_clock() -> bool:
        lease = bed.record(worker).lease
        return lease is not None and abs((datetime.now(UTC) - lease.renewed_at).total_seconds()) > DAY / 2

    assert bed.wait(renewed_by_the_wrong_clock, 20)
    bed.preempt(worker, 12)
    assert [x.end_reason for x in bed.record(worker).incarnations] == ["notice", None], bed.story(worker)
    clock(-leap)
    moved = bed.tracker.last
    assert bed.wait(lambda: bed.tracker.last > moved + 50, 30)
    bed.preempt(worker, None)
    clock(0)
    bed.tracker.hold_at(FREE)
    record = bed.finish()
    found = attribute(bed, record) + identity(bed, record) + output(bed) + counts(bed, record)
    assert found + order(bed) + usage(bed, record) + leftovers(bed) == [], bed.story(worker)
    assert (record.migrations, record.cold_starts) == (2, 0)


@pytest.mark.parametrize("leap", [DAY, -DAY, 400 * DAY, -400 * DAY])
def test_a_controllers_clock_that_leaps_ends_no_lease_and_no_launch(tmp_path: Path, leap: float) -> None:
    """Two controllers, one of them in another time, over one worker that is well."""
    world = ControllerWorld(tmp_path / "store")
    world.submit()
    launch = world.run()
    elsewhere = world.another_controller()
    elsewhere._now = lambda: datetime.now(UTC) + timedelta(seconds=leap)
    before = world.record
    for _ in range(20):
        world.pass_time(1.0)
        world.fenced(ev.LeaseRenewed)
        elsewhere.reconcile("w")
        world.reconcile()
    record = world.record
    assert [(x.id, x.state) for x in record.launches] == [(launch, "accepted")]
    assert record.lease_held
    assert [x.ended_at for x in record.incarnations] == [x.ended_at for x in before.incarnations] == [None]
    assert not settled(record)
