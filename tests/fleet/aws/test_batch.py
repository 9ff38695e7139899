"""The AWS Batch fleet against moto (a stand-in): real boto3, requests validated by botocore."""

from __future__ import annotations

import threading
from typing import Any

import pytest
from botocore.exceptions import ReadTimeoutError

from savedworker.fleet.aws import marks
from savedworker.fleet.aws_batch.ending import OURS
from savedworker.fleet.aws_batch.settings import BatchSettings
from savedworker.fleet.base import Chooses, Diagnoses, Fleet, Keeps
from savedworker.model.decisions import InstanceView
from savedworker.model.errors import Refused, SavedWorkerError, Temporary
from savedworker.model.placement import Choice
from savedworker.model.record import Reason
from tests.fleet.aws.conftest import ACCOUNT, STORE, Cloud, refusal, request


@pytest.fixture
def batch(cloud: Cloud) -> Cloud:
    cloud.queues("spot", "on-demand")
    return cloud


# One job for a launch -------------------------------------------------------------------------------------------------


def test_it_is_a_fleet_that_chooses_keeps_and_diagnoses(batch: Cloud):
    fleet: object = batch.batch_fleet()
    assert isinstance(fleet, Fleet)
    assert isinstance(fleet, Chooses)
    assert isinstance(fleet, Keeps)
    assert isinstance(fleet, Diagnoses)
    assert fleet.choices(request().spec) == (Choice("spot"), Choice("on-demand", "on-demand"))


def test_a_job_whose_submission_nobody_wrote_down_is_found_and_not_submitted_again(batch: Cloud):
    """C14: the controller dies right after the answer to SubmitJob."""
    first = batch.batch_fleet().launch(request(choice="on-demand"))
    again = batch.batch_fleet().launch(request(choice="on-demand"))
    assert again.instance == first.instance
    assert len(batch.made("submit_job")) == 1
    assert [x.job_name for x in batch.jobs()] == ["savedworker-l-1"]


def test_a_job_is_submitted_as_the_documents_say(batch: Cloud):
    fleet = batch.batch_fleet(tags={"team": "a"}, environment={"LEVEL": "3"})
    fleet.launch(request(spec={"memory": 3 << 30, "cpus": 1.5}, choice="spot"))
    (asked,) = batch.made("submit_job")
    words = asked["containerOverrides"]["command"]
    assert words[:3] == ["/opt/savedworker/bin/savedworker", "agent", "--supervise"]
    given = dict(zip(words[3::2], words[4::2], strict=True))
    assert given == {
        "--store": STORE,
        "--fleet": "aws-batch",
        "--state-dir": "/var/lib/savedworker/l-1",
        "--cgroup-parent": "/savedworker/l-1",
        "--worker": "w",
        "--launch": "l-1",
        "--sigterm-grace": "25",
    }
    assert {"name": "LEVEL", "value": "3"} in asked["containerOverrides"]["environment"]
    assert asked["retryStrategy"] == {"attempts": 1}  # a second copy is not Batch's to start
    assert (asked["tags"][marks.WORKER], asked["tags"]["team"]) == ("w", "a")
    (definition,) = batch.batch.describe_job_definitions(
        jobDefinitionName=asked["jobDefinition"], status="ACTIVE"
    )["jobDefinitions"]
    container = definition["containerProperties"]
    assert container["privileged"] is True
    assert container["jobRoleArn"] == f"arn:aws:iam::{ACCOUNT}:role/worker"
    assert {x["type"]: x["value"] for x in container["resourceRequirements"]} == {
        "VCPU": "2",
        "MEMORY": "4096",
    }
    assert container["mountPoints"][0]["containerPath"] == "/var/lib/savedworker"
    assert definition["retryStrategy"]["attempts"] == 1


def test_workers_of_equal_needs_share_a_definition_and_others_have_their_own(batch: Cloud):
    fleet = batch.batch_fleet()
    for launch in ("l-1", "l-2"):
        fleet.launch(request(launch))
    assert len(batch.made("register_job_definition")) == 1
    fleet.launch(request("l-3", spec={"cpus": 4}))
    batch.batch_fleet(image="another").launch(request("l-4"))
    assert len({x["jobDefinition"] for x in batch.made("submit_job")}) == 3


def test_the_stores_key_comes_by_the_execution_role_and_is_in_no_definition(batch: Cloud):
    secret = {"SAVEDWORKER_KEY": "c2VjcmV0IHNlY3JldCBzZWNyZXQgc2VjcmV0IQ=="}
    with pytest.raises(Refused, match="no way to give it"):
        batch.batch_fleet().launch(request(environment=secret))
    arn = f"arn:aws:secretsmanager:eu-west-1:{ACCOUNT}:secret:key-AbCdEf"
    role = f"arn:aws:iam::{ACCOUNT}:role/execution"
    with pytest.raises(ValueError, match="needs execution_role"):
        BatchSettings(queues="spot", image="i", key_from=arn)  # type: ignore[arg-type]
    batch.batch_fleet(key_from=arn, execution_role=role).launch(request(environment=secret))
    container = batch.made("register_job_definition")[0]["containerProperties"]
    assert container["secrets"] == [{"name": "SAVEDWORKER_KEY", "valueFrom": arn}]
    assert container["executionRoleArn"] == role
    assert secret["SAVEDWORKER_KEY"] not in repr(batch.calls)


def test_two_controllers_that_submit_at_the_same_moment_leave_one_job(
    batch: Cloud, monkeypatch: pytest.MonkeyPatch
):
    """Batch has no client token: both looked, and neither saw the other's job."""
    fleet = batch.batch_fleet()
    client = batch.aws.client("batch")
    real = client.submit_job
    meet = threading.Barrier(2, timeout=20)

    def together(**parameters: Any) -> Any:
        meet.wait()
        return real(**parameters)

    monkeypatch.setattr(client, "submit_job", together)
    answers: list[str] = []
    threads = [
        threading.Thread(target=lambda: answers.append(fleet.launch(request()).instance)) for _ in range(2)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(batch.jobs()) == 2
    assert len(answers) == 2
    # Whoever came last ended all but the first; both controllers may name either, and the living one is what is described.
    living = [x.job_id for x in batch.jobs() if x.job_stopped_reason is None]
    assert len(living) == 1
    for ended in {x.job_id for x in batch.jobs()} - set(living):
        batch.job(ended, "FAILED", batch.made("terminate_job")[0]["reason"])
    assert fleet.describe(["l-1"])["l-1"].instance == living[0]


def test_an_unknown_queue_and_an_unknown_launch(batch: Cloud):
    fleet = batch.batch_fleet()
    with pytest.raises(Refused, match="no queue nobodys"):
        fleet.launch(request(choice="nobodys"))
    assert fleet.describe(["l-9"]) == {"l-9": InstanceView("unknown")}
    fleet.terminate("l-9")
    with pytest.raises(SavedWorkerError, match="missing"):
        batch.batch_fleet(queues=["missing"]).launch(request())


# States ---------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("status", "state"),
    [
        ("SUBMITTED", "pending"),
        ("PENDING", "pending"),
        ("RUNNABLE", "pending"),
        ("STARTING", "running"),
        ("RUNNING", "running"),
        ("SUCCEEDED", "ended"),
        ("FAILED", "ended"),
    ],
)
def test_every_state_of_a_job_has_its_meaning_and_all_that_live_can_be_ended(
    batch: Cloud, status: str, state: str
):
    fleet = batch.batch_fleet()
    job = fleet.launch(request()).instance
    batch.job(job, status)
    view = fleet.describe(["l-1"])["l-1"]
    assert (view.state, view.instance) == (state, job)
    fleet.terminate("l-1")
    ended = [x["jobId"] for x in batch.made("terminate_job")]
    assert ended == ([job] if state != "ended" else [])


def test_a_job_that_waits_says_why(batch: Cloud):
    """C58."""
    fleet = batch.batch_fleet()
    batch.job(
        fleet.launch(request()).instance,
        "RUNNABLE",
        "CAPACITY:INSUFFICIENT_INSTANCE_CAPACITY - All compute …",
    )
    view = fleet.describe(["l-1"])["l-1"]
    assert (view.state, view.final) == ("pending", None)
    assert view.detail.startswith("RUNNABLE: CAPACITY:INSUFFICIENT_INSTANCE_CAPACITY")


ESSENTIAL = "Essential container in task exited"


@pytest.mark.parametrize(
    ("reason", "attempt", "outcome", "words", "final"),
    [
        ("Host EC2 (instance i-0abc) terminated.", {}, "gone", "AWS took the host", None),
        ("Host EC2 (instance i-0abc) terminated.", {"exitCode": 143}, "gone", "AWS took the host", None),
        (ESSENTIAL, {"exitCode": 0}, "gone", "ended itself", None),
        (ESSENTIAL, {"exitCode": 1}, "failed", "exit status 1", None),
        (ESSENTIAL, {"exitCode": 143}, "failed", "exit status 143", None),
        (
            ESSENTIAL,
            {"exitCode": 137, "reason": "OutOfMemoryError: Container killed due to memory usage"},
            "failed",
            "more memory",
            Reason.OOM,
        ),
        (
            "Task failed to start",
            {"reason": "CannotPullContainerError: pull access denied for agent"},
            "failed",
            "image cannot be fetched",
            None,
        ),
        (
            "ResourceInitializationError: unable to pull secrets or registry auth",
            {},
            "failed",
            "execution_role",
            None,
        ),
        (
            "Task failed to start",
            {"reason": "CannotStartContainerError: no such file"},
            "failed",
            "start",
            None,
        ),
        ("Job attempt duration exceeded timeout", {"exitCode": 137}, "gone", "time limit", Reason.TIMEOUT),
        (f"{OURS}not wanted any more", {"exitCode": 137}, "gone", "not wanted any more", None),
        ("Something that Batch says from 2027 on", {}, "failed", "Something that Batch says", None),
        ("MISCONFIGURATION:JOB_RESOURCE_REQUIREMENT - …", {}, "capacity", "no compute environment", None),
    ],
)
def test_every_end_of_a_job_is_told_apart(
    batch: Cloud, reason: str, attempt: dict[str, Any], outcome: str, words: str, final: Reason | None
):
    """C11: host lost, own exit, memory, cancel, definition and people: none passes for another."""
    fleet = batch.batch_fleet()
    batch.job(fleet.launch(request()).instance, "FAILED", reason, attempt)
    view = fleet.describe(["l-1"])["l-1"]
    assert (view.state, view.outcome, view.final) == ("ended", outcome, final)
    assert words in view.detail


@pytest.mark.parametrize("status", ["SUBMITTED", "RUNNABLE", "RUNNING"])
def test_a_person_who_ends_the_job_means_it_unless_the_fleet_says_otherwise(batch: Cloud, status: str):
    fleet = batch.batch_fleet()
    job = fleet.launch(request()).instance
    batch.job(job, status)
    batch.batch.terminate_job(jobId=job, reason="I do not need this any more")
    batch.job(job, "FAILED", "I do not need this any more", {"exitCode": 137})
    view = fleet.describe(["l-1"])["l-1"]
    assert (view.state, view.final) == ("ended", Reason.CANCELLED)
    assert view.detail == f"whoever ended job {job} with AWS Batch (I do not need this any more)"
    assert batch.batch_fleet(terminated_by_hand="replace").describe(["l-1"])["l-1"].final is None


def test_what_the_product_ends_is_no_persons_end(batch: Cloud):
    fleet = batch.batch_fleet()
    job = fleet.launch(request()).instance
    fleet.terminate("l-1")
    batch.job(job, "FAILED", batch.made("terminate_job")[0]["reason"], {"exitCode": 137})
    assert fleet.describe(["l-1"])["l-1"].final is None


def test_a_drill_is_no_persons_end(batch: Cloud):
    fleet = batch.batch_fleet()
    job = fleet.launch(request()).instance
    batch.job(job, "RUNNING")
    with pytest.raises(Refused, match="Fault Injection"):
        fleet.preempt("l-1", 30.0)
    fleet.preempt("l-1", None)
    batch.job(job, "FAILED", batch.made("terminate_job")[0]["reason"], {"exitCode": 137})
    view = fleet.describe(["l-1"])["l-1"]
    assert (view.final, view.detail) == (None, "preempted without notice")
    with pytest.raises(Refused, match="has no job"):
        fleet.preempt("l-1", None)


def test_owned_are_the_living_jobs_of_one_store(batch: Cloud):
    fleet = batch.batch_fleet()
    fleet.launch(request("l-1", worker="a"))
    living = fleet.launch(request("l-2", worker="b", choice="on-demand")).instance
    batch.job(batch.jobs()[0].job_id, "SUCCEEDED")
    assert [(x.launch, x.worker, x.instance) for x in fleet.owned(STORE)] == [("l-2", "b", living)]
    assert fleet.owned("s3://other") == []


# What goes wrong ------------------------------------------------------------------------------------------------------


def test_a_submission_whose_answer_is_lost_is_looked_for_and_not_sent_again(batch: Cloud):
    """SubmitJob has no client token: botocore's own second try would make a second job."""
    sent: list[Any] = []
    client = batch.aws.client("batch")

    def lose(request: Any, **_: Any) -> None:
        sent.append(request)
        raise ReadTimeoutError(endpoint_url="https://batch", request=request)

    client.meta.events.register("before-send.batch.SubmitJob", lose, unique_id="lost")
    try:
        with pytest.raises(Temporary):
            batch.batch_fleet().launch(request())
    finally:
        client.meta.events.unregister("before-send.batch.SubmitJob", unique_id="lost")
    assert len(sent) == 1


def test_a_job_that_the_list_does_not_show_yet_is_known_by_its_id(
    batch: Cloud, monkeypatch: pytest.MonkeyPatch
):
    fleet = batch.batch_fleet()
    with monkeypatch.context() as patch:
        patch.setattr(batch.aws.client("batch"), "list_jobs", lambda **_: {"jobSummaryList": []})
        made = fleet.launch(request()).instance
        assert fleet.describe(["l-1"])["l-1"].instance == made


@pytest.mark.parametrize(
    ("code", "status", "kind"),
    [
        ("ClientException", 400, Refused),
        ("ServerException", 500, Temporary),
        ("AccessDeniedException", 403, Refused),
        ("TooManyRequestsException", 429, Temporary),
    ],
)
def test_errors_of_submit_job(
    batch: Cloud, monkeypatch: pytest.MonkeyPatch, code: str, status: int, kind: type[SavedWorkerError]
):
    def fail(**_: Any) -> Any:
        raise refusal(code, status)

    monkeypatch.setattr(batch.aws.client("batch"), "submit_job", fail)
    with pytest.raises(kind, match="as AWS says"):
        batch.batch_fleet().launch(request())


def test_settings_that_cannot_work_are_refused():
    for fields, text in (
        ({"queues": [], "image": "i"}, "queues"),
        ({"queues": ["a", "a"], "image": "i"}, "each may be given once"),
        ({"queues": ["a"]}, "image"),
        ({"queues": [{"queue": "a", "market": "cheap"}], "image": "i"}, "market"),
        ({"queues": ["a"], "image": "i", "environment": {"SAVEDWORKER_KEY": "x"}}, "key_from"),
    ):
        with pytest.raises(ValueError, match=text):
            BatchSettings.model_validate(fields)
