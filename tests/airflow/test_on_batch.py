"""C14: a deferred task on AWS Batch whose triggerer dies. AWS is moto, a stand-in."""

from __future__ import annotations

import asyncio
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest

from airflow_provider_savedworker.triggers import saved_worker
from airflow_provider_savedworker.triggers.saved_worker import SavedWorkerTrigger
from savedworker.controller.client import Client
from savedworker.model import events as ev
from savedworker.model.spec import WorkerSpec
from savedworker.store.backend import open_store
from savedworker.store.worker import WorkerStore
from tests.airflow.conftest import make_context
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
