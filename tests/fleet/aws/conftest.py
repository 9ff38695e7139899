"""A stand-in for AWS: moto's server in this process, on loopback. Requests go through the real boto3 and are validated by botocore.

moto starts no machines. What boots an instance or a job, and takes it away, is the test, which changes moto's own objects.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Iterator
from datetime import UTC, datetime
from typing import Any

import moto.batch.models
import pytest
from botocore.exceptions import ClientError
from moto.backends import get_backend
from moto.batch.models import batch_backends
from moto.ec2.models import ec2_backends
from moto.moto_api import state_manager
from moto.server import ThreadedMotoServer

from savedworker.fleet.aws.session import Aws
from savedworker.fleet.aws_batch import BatchFleet
from savedworker.fleet.aws_batch.settings import BatchSettings
from savedworker.fleet.base import LaunchRequest
from savedworker.fleet.ec2 import Ec2Fleet
from savedworker.fleet.ec2.settings import Ec2Settings
from savedworker.model.spec import parse_spec
from tests.fleet.aws import permissions

POLICY = permissions.policy("controller-policy.json")
REGION = "eu-west-1"
ACCOUNT = "123456789012"
STORE = "s3://workers/prefix"


@pytest.fixture(scope="session")
def moto_server() -> Iterator[str]:
    logging.getLogger("werkzeug").setLevel(logging.ERROR)
    server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    host, port = server.get_host_and_port()
    yield f"http://{host}:{port}"
    server.stop()


class Cloud:
    """The region: clients of its own, and hands on what moto keeps."""

    def __init__(self, aws: Aws) -> None:
        self.aws = aws
        self.ec2 = aws.client("ec2")
        self.batch = aws.client("batch")
        self.iam = aws.client("iam")
        self.s3 = aws.client("s3")
        self.calls: list[tuple[str, dict[str, Any]]] = []
        self.denied: list[tuple[str, permissions.Need]] = []
        """What the product called and docs/aws/controller-policy.json does not permit. No test may end with any."""
        self._count()

    def _count(self) -> None:
        call = functools.partial(Aws.call, self.aws)

        def counted(service: str, operation: str, doing: str, **parameters: Any) -> Any:
            self.calls.append((operation, parameters))
            named = f"{service}.{operation}"
            found = permissions.denied(POLICY, named, parameters, self.tags_of)
            self.denied += [(named, need) for need in found]
            return call(service, operation, doing, **parameters)

        self.aws.call = counted  # type: ignore[method-assign]

    def tags_of(self, name: str) -> dict[str, str]:
        """The tags of an instance, a launch template or a job."""
        job = batch_backends[ACCOUNT][REGION]._jobs.get(name)
        if job is not None:
            found: dict[str, str] = job.backend.list_tags_for_resource(job.arn)
            return found
        return dict(ec2_backends[ACCOUNT][REGION].tags.get(name, {}))

    def made(self, operation: str) -> list[dict[str, Any]]:
        """The parameters of every call of ``operation``."""
        return [parameters for name, parameters in self.calls if name == operation]

    # EC2

    def subnets(self, *zones: str) -> list[str]:
        """The default subnets of those zones (``a``, ``b``), or of all."""
        found = self.ec2.describe_subnets(Filters=[{"Name": "default-for-az", "Values": ["true"]}])["Subnets"]
        by_zone = {x["AvailabilityZone"]: x["SubnetId"] for x in found}
        return [by_zone[f"{REGION}{zone}"] for zone in zones] if zones else list(by_zone.values())

    image = "ami-03cf127a"
    """One that moto knows."""

    def instance(self, instance_id: str) -> Any:
        return self.ec2.describe_instances(InstanceIds=[instance_id])["Reservations"][0]["Instances"][0]

    def instances(self) -> list[Any]:
        return [x for r in self.ec2.describe_instances()["Reservations"] for x in r["Instances"]]

    def end_instance(self, instance_id: str, code: str, state: str = "terminated") -> None:
        """The end of an instance as EC2 documents it, which moto cannot produce by itself."""
        instance = ec2_backends[ACCOUNT][REGION].get_instance(instance_id)
        instance._state.name, instance._state.code = (
            state,
            {"terminated": 48, "stopped": 80, "shutting-down": 32}[state],
        )
        instance.state_reason.code = code
        instance.state_reason.message = f"{code}: as documented"

    def ec2_fleet(self, **settings: Any) -> Ec2Fleet:
        fields = {
            "instance_types": ["m5.large", "m5.xlarge", "m6i.large"],
            "subnets": self.subnets("a", "b"),
            "image": self.image,
            "instance_profile": "worker",
            **settings,
        }
        return Ec2Fleet("spot", Ec2Settings.model_validate(fields), self.aws, look_every=0.0)

    # Batch

    def queues(self, *names: str) -> None:
        role = self.iam.create_role(RoleName="service", AssumeRolePolicyDocument="{}")["Role"]["Arn"]
        profile = self.iam.create_instance_profile(InstanceProfileName="hosts")["InstanceProfile"]["Arn"]
        for name in names:
            environment = self.batch.create_compute_environment(
                computeEnvironmentName=f"{name}-hosts",
                type="MANAGED",
                state="ENABLED",
                serviceRole=role,
                computeResources={
                    "type": "EC2" if "demand" in name else "SPOT",
                    "minvCpus": 0,
                    "maxvCpus": 8,
                    "instanceTypes": ["m5.large"],
                    "subnets": self.subnets("a"),
                    "securityGroupIds": [self.ec2.describe_security_groups()["SecurityGroups"][0]["GroupId"]],
                    "instanceRole": profile,
                },
            )["computeEnvironmentArn"]
            self.batch.create_job_queue(
                jobQueueName=name,
                state="ENABLED",
                priority=1,
                computeEnvironmentOrder=[{"order": 1, "computeEnvironment": environment}],
            )

    def jobs(self) -> list[Any]:
        return list(batch_backends[ACCOUNT][REGION]._jobs.values())

    def job(self, job_id: str, status: str, reason: str | None = None, attempt: Any = None) -> None:
        """Puts a job into ``status`` with AWS's ``reason``, and ``attempt`` as the container of its attempt."""
        job = batch_backends[ACCOUNT][REGION]._jobs[job_id]
        job.status = status
        job.job_stopped_reason = reason
        job.job_started_at = datetime.now(UTC).replace(tzinfo=None)
        if attempt:
            job.attempts = [{"container": attempt, "statusReason": reason or ""}]

    def batch_fleet(self, **settings: Any) -> BatchFleet:
        fields = {
            "queues": ["spot", {"queue": "on-demand", "market": "on-demand"}],
            "image": f"{ACCOUNT}.dkr.ecr.{REGION}.amazonaws.com/agent:1",
            "job_role": f"arn:aws:iam::{ACCOUNT}:role/worker",
            **settings,
        }
        return BatchFleet("batch", BatchSettings.model_validate(fields), self.aws, look_every=0.0)


@pytest.fixture(scope="session")
def aws(moto_server: str) -> Iterator[Aws]:
    """One connection for all tests: a client of EC2 takes long to make. Its tries are quick.

    The environment is as before while it lasts: other tests run in this process, too.
    """
    with pytest.MonkeyPatch.context() as patch:
        _environment(patch, moto_server)
        aws = Aws(pause=0.01)
        for service in ("ec2", "batch", "iam", "s3", "sts", "ecr"):
            aws.client(service)
    yield aws
    for client in aws._clients.values():
        client.close()


def _environment(patch: pytest.MonkeyPatch, server: str) -> None:
    for name, value in {
        "AWS_ENDPOINT_URL": server,
        "AWS_ACCESS_KEY_ID": "testing",
        "AWS_SECRET_ACCESS_KEY": "testing",
        "AWS_REGION": REGION,
        "AWS_DEFAULT_REGION": REGION,
    }.items():
        patch.setenv(name, value)
    for name in ("AWS_PROFILE", "SAVEDWORKER_FLEETS"):
        patch.delenv(name, raising=False)


@pytest.fixture
def cloud(moto_server: str, aws: Aws, monkeypatch: pytest.MonkeyPatch) -> Iterator[Cloud]:
    _environment(monkeypatch, moto_server)
    # Jobs stay as they are until a test moves them; moto itself would look for Docker.
    monkeypatch.setattr(moto.batch.models.Job, "run", lambda self: None)
    monkeypatch.setattr(moto.batch.models.Job, "describe", _described)
    state_manager.set_transition("batch::job", {"progression": "manual", "times": 1_000_000})
    made = Cloud(aws)
    try:
        yield made
    finally:
        state_manager.unset_transition("batch::job")
        _forget()
        vars(aws).pop("call")
    assert made.denied == []


_describe = moto.batch.models.Job.describe


def _described(job: Any) -> Any:
    """moto knows no isTerminated, which AWS sets after TerminateJob: its jobs are stopped by nothing else here."""
    return {**_describe(job), "isTerminated": bool(job.stop)}


def _forget() -> None:
    """Everything that a test made. The region's own network and images stay, since making them anew takes seconds."""
    ec2 = ec2_backends[ACCOUNT][REGION]
    for kept in (
        ec2.reservations,
        ec2.launch_templates,
        ec2.launch_template_name_to_ids,
        ec2.fleets,
        ec2.spot_instance_requests,
        ec2.tags,
    ):
        kept.clear()
    for service in ("batch", "ecr", "iam", "s3", "secretsmanager", "ssm"):
        for account in get_backend(service).values():
            for backend in account.values():
                backend.reset()


def refusal(code: str, status: int = 400) -> ClientError:
    """AWS's answer with ``code``: a stand-in where moto does not give it."""
    answer: Any = {
        "Error": {"Code": code, "Message": "as AWS says"},
        "ResponseMetadata": {"HTTPStatusCode": status},
    }
    return ClientError(answer, "Operation")


def request(launch: str = "l-1", worker: str = "w", **fields: Any) -> LaunchRequest:
    """A launch of a small worker."""
    spec = {"id": worker, "command": ["true"], "fleet": "spot", **fields.pop("spec", {})}
    return LaunchRequest(launch, worker, STORE, parse_spec(spec), **fields)
