"""A controller with the AWS fleets: what happens to a worker when AWS refuses, delays, reclaims, or somebody interferes.

AWS is moto (a stand-in), the store a directory, the agents are told by events. The rules themselves are tested in tests/model.
"""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
from moto.ec2.models import ec2_backends

from savedworker.controller.reaping import reap
from savedworker.controller.reconcile import Controller
from savedworker.fleet.base import Fleet
from savedworker.model import events as ev
from savedworker.model.decisions import settled
from savedworker.model.record import Reason, State, WorkerRecord
from savedworker.model.spec import parse_spec
from savedworker.store.backend import open_store
from savedworker.store.worker import WorkerStore
from tests.fleet.aws.conftest import ACCOUNT, REGION, Cloud, refusal
from tests.model.test_documents import a_manifest


class Killed(BaseException):
    """The controller's process dies here."""


class Story:
    """One worker on one fleet, with clocks that the test moves."""

    def __init__(self, path: Path, cloud: Cloud, fleet: Any) -> None:
        self.cloud = cloud
        self.fleet = fleet
        self.store = open_store(path.as_uri())
        self.store.ensure()
        self.now = datetime(2026, 1, 1, tzinfo=UTC)
        self.time = 0.0
        self.documents = WorkerStore(self.store, "w")
        self.controller = self.another_controller()

    def another_controller(self) -> Controller:
        def fleets(_: str) -> Fleet:
            return self.fleet

        return Controller(self.store, fleets, clock=lambda: self.time, now=lambda: self.now)

    def submit(self, **fields: Any) -> None:
        spec = parse_spec({"id": "w", "command": ["true"], "fleet": self.fleet.name, **fields})
        self.documents.create_spec(spec)
        self.documents.create_record(WorkerRecord(id="w", created_at=self.now, fleet=self.fleet.name))

    def round(self, seconds: float = 0.0) -> WorkerRecord:
        self.now += timedelta(seconds=seconds)
        self.time += seconds
        return self.controller.reconcile("w")

    @property
    def record(self) -> WorkerRecord:
        return self.documents.load_record().record

    def tell(self, kind: Any, **fields: Any) -> None:
        self.documents.record_event(kind(at=self.now, **fields))

    def begin(self, zone: str | None = None, kind: str | None = None) -> str:
        """The agent of the newest launch executes the worker. Returns the launch."""
        launch = self.record.launches[-1]
        number = len(self.record.incarnations) + 1
        self.tell(
            ev.LeaseTaken,
            incarnation=number,
            holder=f"h{number}",
            launch=launch.id,
            instance=launch.instance or "?",
            zone=zone or launch.zone,
            instance_type=kind,
        )
        self.tell(ev.Started, incarnation=number, holder=f"h{number}")
        return launch.id

    def checkpoint(self, number: str) -> None:
        incarnation = len(self.record.incarnations)
        self.tell(
            ev.CheckpointCommitted,
            incarnation=incarnation,
            holder=f"h{incarnation}",
            number=number,
            cause="periodic",
            frozen_at=self.now,
            bytes_image=1,
            bytes_uploaded=1,
        )

    def told(self) -> str:
        return "\n".join(x.detail for x in self.record.recent)


@pytest.fixture
def on_batch(cloud: Cloud, tmp_path: Path) -> Story:
    cloud.queues("spot", "on-demand")
    return Story(tmp_path / "store", cloud, cloud.batch_fleet())


@pytest.fixture
def on_ec2(cloud: Cloud, tmp_path: Path) -> Story:
    return Story(tmp_path / "store", cloud, cloud.ec2_fleet(instance_types=["m5.large", "m6i.large"]))


def test_a_controller_killed_right_after_submit_job_leaves_one_job_that_the_next_one_attaches_to(
    on_batch: Story, monkeypatch: pytest.MonkeyPatch
):
    """C14, second window: SubmitJob has answered, and nothing is recorded."""
    on_batch.submit()
    client = on_batch.cloud.aws.client("batch")
    real = client.submit_job

    def die(**parameters: Any) -> Any:
        real(**parameters)
        raise Killed

    with monkeypatch.context() as patch:
        patch.setattr(client, "submit_job", die)
        with pytest.raises(Killed):
            on_batch.round()
    on_batch.controller = on_batch.another_controller()
    for _ in range(4):
        on_batch.round(10)
    (job,) = on_batch.cloud.jobs()
    (launch,) = on_batch.record.launches
    assert len(on_batch.cloud.made("submit_job")) == 1
    assert on_batch.fleet.describe([launch.id])[launch.id].instance == job.job_id
    on_batch.cloud.job(job.job_id, "RUNNING")
    on_batch.begin()
    on_batch.round()
    assert on_batch.record.state is State.RUNNING
    assert len(on_batch.cloud.jobs()) == 1


def test_a_queue_that_never_starts_its_job_is_left_for_on_demand_and_then_given_up(on_batch: Story):
    """C58, with limits of a minute: the wait shows with its reason, no try is used up, the end is no_capacity."""
    placement = {"wait_per_choice": 60, "on_demand_after_wait": 60, "wait_for_capacity": 150}
    on_batch.submit(placement=placement)
    on_batch.round()
    first = on_batch.cloud.jobs()[0]
    on_batch.cloud.job(first.job_id, "RUNNABLE", "CAPACITY:INSUFFICIENT_INSTANCE_CAPACITY - All compute …")
    for _ in range(14):
        on_batch.round(5)
    assert "RUNNABLE: CAPACITY:INSUFFICIENT_INSTANCE_CAPACITY" in on_batch.told()
    assert "on-demand is next (no spot capacity for 1m00s)" in on_batch.told()
    queues = [x["jobQueue"] for x in on_batch.cloud.made("submit_job")]
    assert queues == ["spot", "on-demand"]
    assert [x["jobId"] for x in on_batch.cloud.made("terminate_job")] == [first.job_id]
    second = on_batch.cloud.jobs()[1]
    on_batch.cloud.job(second.job_id, "RUNNABLE", "MISCONFIGURATION:COMPUTE_ENVIRONMENT_MAX_RESOURCE - All …")
    for _ in range(40):
        record = on_batch.round(5)
        if settled(record):
            break
        for job in on_batch.cloud.jobs():
            if job.stop:
                on_batch.cloud.job(job.job_id, "FAILED", job.job_stopped_reason)
    assert (on_batch.record.state, on_batch.record.reason) == (State.FAILED, Reason.NO_CAPACITY)
    assert "MISCONFIGURATION:COMPUTE_ENVIRONMENT_MAX_RESOURCE" in on_batch.record.detail
    assert on_batch.record.moves == 0
    assert all(job.stop for job in on_batch.cloud.jobs())


def test_a_reclaimed_spot_host_is_a_loss_and_not_a_failure(on_batch: Story):
    """C11 (d): with exit code 143 on it, too."""
    on_batch.submit()
    on_batch.round()
    job = on_batch.cloud.jobs()[0]
    on_batch.cloud.job(job.job_id, "RUNNING")
    on_batch.begin()
    on_batch.cloud.job(job.job_id, "FAILED", "Host EC2 (instance i-1) terminated.", {"exitCode": 143})
    record = on_batch.round()
    assert record.state is State.MIGRATING
    assert (record.exit_code, record.reason) == (None, None)
    assert len(on_batch.cloud.jobs()) == 2


def test_five_reclaims_use_up_no_budget_that_is_not_theirs(on_batch: Story):
    """C12: the migration budget is its own, and an on-demand queue is used after three losses."""
    on_batch.submit(max_migrations=5)
    for _ in range(5):
        on_batch.round(5)
        job = on_batch.cloud.jobs()[-1]
        on_batch.cloud.job(job.job_id, "RUNNING")
        on_batch.begin()
        on_batch.cloud.job(job.job_id, "FAILED", "Host EC2 (instance i-1) terminated.")
    on_batch.round(5)
    assert on_batch.record.state is State.MIGRATING
    queues = [x["jobQueue"] for x in on_batch.cloud.made("submit_job")]
    assert queues == ["spot"] * 3 + ["on-demand"] * 3
    assert "reclaimed 3 times within 1h00m" in on_batch.told()


def test_a_person_who_ends_the_job_has_cancelled_the_worker(on_batch: Story):
    on_batch.submit()
    on_batch.round()
    job = on_batch.cloud.jobs()[0].job_id
    on_batch.cloud.job(job, "RUNNING")
    on_batch.begin()
    on_batch.cloud.batch.terminate_job(jobId=job, reason="too dear")
    on_batch.cloud.job(job, "FAILED", "too dear", {"exitCode": 137})
    record = on_batch.round()
    assert (record.state, record.reason) == (State.CANCELLED, Reason.CANCELLED)
    assert "(too dear)" in record.detail
    assert settled(record)
    assert len(on_batch.cloud.jobs()) == 1


def test_a_container_that_had_too_little_memory_is_a_failure_of_its_own(on_batch: Story):
    on_batch.submit()
    on_batch.round()
    job = on_batch.cloud.jobs()[0].job_id
    on_batch.cloud.job(job, "RUNNING")
    on_batch.begin()
    killed = {"exitCode": 137, "reason": "OutOfMemoryError: Container killed due to memory usage"}
    on_batch.cloud.job(job, "FAILED", "Essential container in task exited", killed)
    record = on_batch.round()
    assert (record.state, record.reason) == (State.FAILED, Reason.OOM)


@pytest.mark.parametrize("status", ["SUBMITTED", "PENDING", "RUNNABLE", "STARTING", "RUNNING"])
def test_a_cancel_is_in_the_record_first_and_ends_the_job_in_every_state(on_batch: Story, status: str):
    on_batch.submit()
    on_batch.round()
    job = on_batch.cloud.jobs()[0]
    on_batch.cloud.job(job.job_id, status)
    seen: list[Any] = []
    terminate = on_batch.fleet.terminate

    def watched(launch: str) -> None:
        seen.append(on_batch.record.state)
        terminate(launch)

    on_batch.fleet.terminate = watched
    on_batch.tell(ev.CancelRequested, by="ann")
    on_batch.round()
    assert seen == [State.CANCELLED]
    assert job.stop
    assert settled(on_batch.record)


def test_the_zone_and_type_of_a_reclaimed_instance_are_left_by_default(on_ec2: Story):
    """C56, from EC2's word to the next request."""
    on_ec2.submit()
    on_ec2.round()
    first = on_ec2.record.launches[0]
    assert first.instance is not None
    on_ec2.begin()
    on_ec2.cloud.end_instance(first.instance, "Server.SpotInstanceTermination")
    record = on_ec2.round()
    assert record.state is State.MIGRATING
    second = record.launches[1]
    assert set(second.avoid) == {first.zone, first.instance_type, f"{first.instance_type}@{first.zone}"}
    assert (second.zone, second.instance_type) != (first.zone, first.instance_type)
    assert second.zone != first.zone
    assert second.zone in (f"{REGION}a", f"{REGION}b")
    assert f"avoiding {', '.join(second.avoid)}" in on_ec2.told()


def test_spot_without_capacity_falls_back_to_on_demand_after_the_stated_time(
    on_ec2: Story, monkeypatch: pytest.MonkeyPatch
):
    client = on_ec2.cloud.aws.client("ec2")
    real = client.create_fleet

    def no_spot(**parameters: Any) -> Any:
        if parameters["TargetCapacitySpecification"]["DefaultTargetCapacityType"] == "spot":
            raise refusal("MaxSpotInstanceCountExceeded")
        return real(**parameters)

    monkeypatch.setattr(client, "create_fleet", no_spot)
    on_ec2.submit()
    for _ in range(60):
        if any(x.instance for x in on_ec2.round(15).launches):
            break
    made = on_ec2.record.launches[-1]
    assert made.choice == "on-demand"
    assert (on_ec2.now - on_ec2.record.created_at).total_seconds() >= 600
    assert "quota of spot instances is used up" in on_ec2.told()
    assert "on-demand: no spot capacity for 1" in on_ec2.told()


def test_a_type_that_lacks_a_feature_is_left_and_another_is_tried_with_the_worker_none_the_wiser(
    on_ec2: Story, cloud: Cloud
):
    """C43: the agent refuses before it downloads anything; the engine sees a worker that is being restored, and no failure."""
    on_ec2.fleet = cloud.ec2_fleet(instance_types=["m5.large", "m6i.large", "m6i.xlarge"])
    on_ec2.submit()
    on_ec2.round()
    first = on_ec2.record.launches[0]
    on_ec2.begin(kind="m6i.large")
    manifest = a_manifest()
    on_ec2.documents.chunks.begin_save()
    on_ec2.documents.publish_manifest(manifest)
    on_ec2.checkpoint("1-1")
    cloud.end_instance(str(first.instance), "Server.SpotInstanceTermination")
    on_ec2.round(5)
    asked = cloud.made("create_fleet")[1]
    tried = {x["InstanceType"] for x in asked["LaunchTemplateConfigs"][0]["Overrides"]}
    assert tried <= {"m6i.large", "m6i.xlarge"}  # an older processor would come last
    second = on_ec2.record.launches[1]
    assert second.instance_type in tried
    on_ec2.tell(
        ev.LaunchEnding, launch=second.id, outcome="incompatible", detail="CPU features missing: avx512f"
    )
    cloud.end_instance(str(second.instance), "Client.InstanceInitiatedShutdown")
    for _ in range(10):
        if len(on_ec2.round(5).launches) > 2:
            break
    third = on_ec2.record.launches[2]
    assert third.instance_type not in (None, second.instance_type)
    asked = cloud.made("create_fleet")[2]
    assert second.instance_type not in {
        x["InstanceType"] for x in asked["LaunchTemplateConfigs"][0]["Overrides"]
    }
    assert (on_ec2.record.state, len(on_ec2.record.incarnations)) == (State.MIGRATING, 1)


def test_expired_credentials_are_waited_out(on_ec2: Story, monkeypatch: pytest.MonkeyPatch):
    on_ec2.submit()
    with monkeypatch.context() as patch:
        for operation in ("create_fleet", "describe_instances"):

            def expired(**_: Any) -> Any:
                raise refusal("ExpiredToken")

            patch.setattr(on_ec2.cloud.aws.client("ec2"), operation, expired)
        for _ in range(20):
            on_ec2.round(60)
        assert on_ec2.record.state is State.PENDING
    on_ec2.round(10)
    assert on_ec2.record.launches[-1].instance is not None
    assert len(on_ec2.cloud.instances()) == 1


# Reaping --------------------------------------------------------------------------------------------------------------


def from_store(story: Story, worker: str, launch: str) -> Any:
    """An instance that somebody made for a worker of this store."""
    from savedworker.fleet.base import LaunchRequest

    spec = parse_spec({"id": worker, "command": ["true"]})
    return story.fleet.launch(LaunchRequest(launch, worker, story.store.url, spec)).instance


def test_the_reaper_ends_what_no_record_wants_and_nothing_else(on_ec2: Story):
    on_ec2.submit()
    on_ec2.round()
    wanted = on_ec2.record.launches[0].instance
    deleted = from_store(on_ec2, "long-gone", "l-of-a-deleted-worker")
    unknown = from_store(on_ec2, "w", "l-nobody-knows")
    would = reap(on_ec2.store, on_ec2.fleet, dry_run=True)
    assert {x.instance for x in would} == {deleted, unknown}
    living = {x["InstanceId"] for x in on_ec2.cloud.instances() if x["State"]["Name"] == "running"}
    assert living == {wanted, deleted, unknown}  # a dry run ends nothing
    done = reap(on_ec2.store, on_ec2.fleet)
    assert {(x.launch, x.why) for x in done} == {
        ("l-of-a-deleted-worker", "its worker is not in the store"),
        ("l-nobody-knows", "its worker knows nothing of this launch"),
    }
    living = {x["InstanceId"] for x in on_ec2.cloud.instances() if x["State"]["Name"] == "running"}
    assert living == {wanted}
    assert reap(on_ec2.store, on_ec2.fleet) == []


def test_the_reaper_leaves_everything_where_the_store_is_empty(on_ec2: Story):
    """A directory that is not mounted here looks like a store without workers."""
    from_store(on_ec2, "w", "l-1")
    assert reap(on_ec2.store, on_ec2.fleet) == []
    assert on_ec2.cloud.instances()[0]["State"]["Name"] == "running"


def test_the_reaper_ends_jobs_too_and_leaves_a_worker_whose_record_is_damaged(on_batch: Story):
    on_batch.submit()
    on_batch.round()
    launch = on_batch.record.launches[0].id
    from_store(on_batch, "gone", "l-left")
    on_batch.store.swap("workers/w/record.json", b"{", on_batch.documents.load_record().version)
    assert [x.launch for x in reap(on_batch.store, on_batch.fleet)] == ["l-left"]
    ended = [job.job_name for job in on_batch.cloud.jobs() if job.stop]
    assert ended == ["savedworker-l-left"]
    assert launch not in ended[0]


def test_gc_reaps_configured_fleets(on_ec2: Story, monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    import json

    import yaml
    from click.testing import CliRunner

    from savedworker.cli.application import cli

    on_ec2.submit()
    left = from_store(on_ec2, "gone", "l-left")
    (old,) = (
        x["LaunchTemplateName"] for x in on_ec2.cloud.ec2.describe_launch_templates()["LaunchTemplates"]
    )
    for kept in ec2_backends[ACCOUNT][REGION].launch_templates.values():
        kept.create_time -= timedelta(days=2)
    file = tmp_path / "fleets.yaml"
    fields = on_ec2.fleet.settings.model_dump(mode="json", exclude_defaults=True)
    fields["key_name"] = "ann"
    file.write_text(yaml.safe_dump({"fleets": {"spot": {"kind": "ec2", **fields}}}))
    monkeypatch.setenv("SAVEDWORKER_FLEETS", str(file))
    for words, state in ((["--dry-run"], "running"), ([], "terminated")):
        done = CliRunner().invoke(cli, ["gc", "--json", "--store", on_ec2.store.url, *words])
        assert done.exit_code == 0, done.output
        said = json.loads(done.stdout)
        (found,) = said["instances"]
        assert (found["instance"], found["fleet"]) == (left, "spot")
        assert said["tidied"] == [{"fleet": "spot", "what": f"launch template {old}"}]
        there = {
            x["LaunchTemplateName"] for x in on_ec2.cloud.ec2.describe_launch_templates()["LaunchTemplates"]
        }
        assert (old in there) is (words == ["--dry-run"])
        assert on_ec2.cloud.instance(left)["State"]["Name"] == state


# Reasons --------------------------------------------------------------------------------------------------------------


def test_no_capacity_the_users_own_sigterm_a_cancel_and_a_preemption_are_four_things(
    cloud: Cloud, tmp_path: Path
):
    """C11: four machine-readable reasons, and 143 for the user's own SIGTERM only."""
    from savedworker.cli.exit_status import exit_status

    cloud.queues("spot")
    seen: dict[str, WorkerRecord] = {}
    for case in ("no capacity", "own signal", "cancel", "preemption"):
        story = Story(tmp_path / case.replace(" ", "-"), cloud, cloud.batch_fleet(queues=["spot"]))
        story.submit(placement={"wait_for_capacity": 30})
        story.round()
        job = cloud.jobs()[-1].job_id
        if case == "no capacity":
            cloud.job(job, "RUNNABLE", "CAPACITY:INSUFFICIENT_INSTANCE_CAPACITY - …")
            story.round(31)
            story.round(1)
        else:
            cloud.job(job, "RUNNING")
            story.begin()
        if case == "own signal":
            story.tell(ev.Finished, incarnation=1, holder="h1", signal=15)
            cloud.job(job, "SUCCEEDED", "Essential container in task exited", {"exitCode": 0})
        elif case == "cancel":
            story.tell(ev.CancelRequested, by="Airflow")
            cloud.job(job, "FAILED", "Essential container in task exited", {"exitCode": 143})
        elif case == "preemption":
            story.checkpoint("1-1")
            story.tell(ev.HandedOver, incarnation=1, holder="h1", number="1-1")
            cloud.job(job, "FAILED", "Host EC2 (instance i-1) terminated.", {"exitCode": 143})
        seen[case] = story.round(1)
    assert {case: (str(x.state), x.reason) for case, x in seen.items()} == {
        "no capacity": ("failed", Reason.NO_CAPACITY),
        "own signal": ("failed", Reason.SIGNAL),
        "cancel": ("cancelled", Reason.CANCELLED),
        "preemption": ("migrating", None),
    }
    assert {case: exit_status(x) for case, x in seen.items() if x.state.terminal} == {
        "no capacity": 125,
        "own signal": 143,
        "cancel": 125,
    }
