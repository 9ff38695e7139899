"""A move for which there is no capacity for a long time: no limit of Airflow's is hit by it.

The half hour: ./scripts/test -m sweep tests/airflow/test_executor_long_move.py; SAVEDWORKER_SWEEP_AWAY: other seconds.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Iterator

import pytest

from savedworker.fleet.base import LaunchRequest
from savedworker.fleet.local import LocalFleet
from savedworker.model.spec import parse_spec
from tests.airflow.engine import eventually
from tests.airflow.executor_bed import Bed, executor_bed

HALF_AN_HOUR = float(os.environ.get("SAVEDWORKER_SWEEP_AWAY", "1800"))
RETRY_MOST = 120.0
"""Seconds for which no instance is asked for, at most, after one could not be had."""

pytestmark = [pytest.mark.engine, pytest.mark.criu, pytest.mark.timeout(HALF_AN_HOUR + 900)]


@pytest.fixture
def bed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Bed]:
    """Of one host, with limits that are all shorter than the move: tokens 60 s, heartbeats 40 s, the queue 60 s."""
    settings = {
        "SAVEDWORKER_LOCAL_CAPACITY": "1",
        "AIRFLOW__SAVEDWORKER__WAIT_FOR_CAPACITY": f"{HALF_AN_HOUR + 900:.0f}s",
        "AIRFLOW__SCHEDULER__TASK_QUEUED_TIMEOUT": "60",
        "AIRFLOW__SCHEDULER__TASK_QUEUED_TIMEOUT_CHECK_INTERVAL": "10",
    }
    with executor_bed(tmp_path_factory.mktemp("long"), settings) as started:
        yield started


@contextlib.contextmanager
def no_capacity(bed: Bed) -> Iterator[None]:
    """Somebody else has the only host for a while."""
    other = LocalFleet(bed.home / "hosts", agent=["/bin/sleep", "infinity"])
    spec = parse_spec({"id": "other", "command": ["true"]})
    other.launch(LaunchRequest("other", "other", bed.client.store.url, spec))
    try:
        yield
    finally:
        other.terminate("other")


@pytest.mark.parametrize("away", [70.0, pytest.param(HALF_AN_HOUR, marks=pytest.mark.sweep)])
def test_a_move_without_capacity_outlives_tokens_heartbeats_and_the_queue(bed: Bed, away: float) -> None:
    run = bed.run("saved_python", 24)
    worker = run.running(said="traffic step 3")
    with no_capacity(bed):
        run.move(worker, 20.0, wait=False)
        eventually(lambda: not bed.client.record(worker).lease_held, 60, "it has left its host")
        until = time.monotonic() + away
        while (left := until - time.monotonic()) > 0:
            record = bed.client.record(worker)
            assert (record.state, record.lease_held) == ("migrating", False)
            for task in run.tasks():
                assert (task["state"], task["try_number"]) == ("running", 1)
            time.sleep(min(left, 5.0))
    assert run.ended(RETRY_MOST + 120) == "success"
    (task,) = run.tasks()
    assert (task["try_number"], run.callbacks()) == (1, [])
    record = bed.client.record(worker)
    assert (record.migrations, record.cold_starts) == (1, 0)
    assert record.incarnations[-1].away_seconds >= away
    assert any(x.outcome == "capacity" for x in record.launches), "an instance was asked for all the while"
    assert [x for x in run.log() if x.startswith("traffic step")] == [f"traffic step {i}" for i in range(24)]
    assert not bed.said("scheduler", "without heartbeat")
