"""Tasks on AWS Batch: C14, a triggerer dies; C58, no queue has anything. AWS is moto, a stand-in."""

from __future__ import annotations

import asyncio
import logging
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
from airflow.sdk.exceptions import (
    AirflowException,
    AirflowFailException,
    AirflowTaskTimeout,
    TaskDeferred,
)

from airflow_provider_savedworker.follow import Follower
from airflow_provider_savedworker.hooks.saved_worker import SavedWorkerHook
from airflow_provider_savedworker.operators.saved_worker import SavedWorkerOperator
from airflow_provider_savedworker.triggers import saved_worker
from airflow_provider_savedworker.triggers.saved_worker import SavedWorkerTrigger
from savedworker.controller.client import Client
from savedworker.model import events as ev
from savedworker.model.spec import WorkerSpec
from savedworker.store.backend import open_store
from savedworker.store.worker import WorkerStore
from tests.airflow.conftest import Lines, make_context
from tests.airflow.test_trigger import first_event, until
from tests.fleet.aws.conftest import Cloud, aws, cloud, moto_server

__all__ = ["aws", "cloud", "moto_server"]  # fixtures


def test_a_triggerer_that_is_killed_while_the_task_is_deferred_leaves_one_job_for_the_next(
    cloud: Cloud,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    cloud.queues("spot", "on-demand")
    url = open_store(str(tmp_path / "store")).url

    def client(_: Any = None) -> Client:
        """Of a process of its own: nothing is remembered."""
        return Client(url, fleets=lambda _: cloud.batch_fleet())

    client().submit(WorkerSpec(id="w", command=("true",), fleet="batch"))
    documents = WorkerStore(open_store(url), "w")
    monkeypatch.setattr(SavedWorkerTrigger, "_client", client)
    monkeypatch.setattr(saved_worker, "LEAST_DEFERRAL", 0.0)
    first = SavedWorkerTrigger("w", url, poll_interval=0.02)
    first.task_instance = make_context()["ti"]
    _, arguments = first.serialize()

    def tell(kind: Any, **fields: Any) -> None:
        documents.record_event(kind(at=datetime.now(UTC), **fields))

    async def work() -> None:
        killed = asyncio.create_task(first_event(first))
        await until(lambda: bool(cloud.jobs()), 60)
        killed.cancel()
        with pytest.raises(asyncio.CancelledError):
            await killed  # as after kill -9: nothing of it is cleaned up
        second = SavedWorkerTrigger(**arguments)
        second.task_instance = make_context()["ti"]
        task = asyncio.create_task(first_event(second))
        (job,) = cloud.jobs()
        await until(lambda: client().record("w").launches[0].instance == job.job_id, 60)
        cloud.job(job.job_id, "RUNNING")
        launch = client().record("w").launches[0].id
        tell(ev.LeaseTaken, incarnation=1, holder="h", launch=launch, instance=job.job_id)
        tell(ev.Started, incarnation=1, holder="h")
        await asyncio.sleep(0.2)
        assert not task.done()
        tell(ev.Finished, incarnation=1, holder="h", exit_code=0)
        tell(ev.LeaseReleased, incarnation=1, holder="h", end_reason="finished")
        cloud.job(job.job_id, "SUCCEEDED", "Essential container in task exited", {"exitCode": 0})
        event = await asyncio.wait_for(task, 60)
        assert event.payload["worker"] == "w"

    asyncio.run(work())
    assert len(cloud.made("submit_job")) == 1
    assert len(cloud.jobs()) == 1
    assert client().record("w").state == "succeeded"


def test_a_task_that_finds_no_queue_says_why_it_waits_and_fails_with_no_capacity_in_its_first_try(
    cloud: Cloud, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """C58, with the default limits and a clock that the test moves: every wait stands in the task's log."""
    cloud.queues("spot", "on-demand")
    fleet = cloud.batch_fleet()
    client = Client(open_store(str(tmp_path / "store")), fleets=lambda _: fleet)
    passed = [0.0]
    start = datetime.now(UTC)
    monkeypatch.setattr(client.controller, "_clock", lambda: passed[0])
    monkeypatch.setattr(client.controller, "_now", lambda: start + timedelta(seconds=passed[0]))
    monkeypatch.setattr(SavedWorkerHook, "store", property(lambda self: client.store.url))
    monkeypatch.setattr(SavedWorkerHook, "get_client", lambda self: client)
    monkeypatch.setattr(SavedWorkerHook, "_fields", property(lambda self: {}))
    task = SavedWorkerOperator(task_id="train", command=["train"], fleet="batch", deferrable=True)
    context = make_context()
    with pytest.raises(TaskDeferred) as deferred:
        type(task).execute.__wrapped__(task, context)  # type: ignore[attr-defined]
    worker = str(deferred.value.trigger.worker)
    lines = Lines()
    follower = Follower(client, worker, lines, clock=lambda: passed[0])
    reason = "CAPACITY:INSUFFICIENT_INSTANCE_CAPACITY - All compute environments have insufficient capacity"
    while not follower.step().done and passed[0] < 7200:
        for job in cloud.jobs():
            if job.stop:
                cloud.job(job.job_id, "FAILED", job.job_stopped_reason)
            elif job.status == "SUBMITTED":
                cloud.job(job.job_id, "RUNNABLE", reason)
        passed[0] += 20
    told = "\n".join(lines.of(""))
    assert f"RUNNABLE: {reason}" in told
    assert "on-demand is next (no spot capacity for 10m" in told
    assert {x["jobQueue"] for x in cloud.made("submit_job")} == {"spot", "on-demand"}
    record = client.record(worker)
    assert (record.state, record.reason, record.moves) == ("failed", "no_capacity", 0)
    assert 1800 <= passed[0] < 2400
    assert all(job.stop for job in cloud.jobs())
    event = {"worker": worker, "store": client.store.url}
    with pytest.raises(AirflowException, match="failed: no_capacity") as failed:
        task.resume_execution("execute_complete", {"event": event}, context)
    assert not isinstance(failed.value, AirflowFailException | AirflowTaskTimeout)
    assert "exit code" not in str(failed.value)
    assert any(level >= logging.WARNING and "gave up: no_capacity" in text for level, _, text in lines)
