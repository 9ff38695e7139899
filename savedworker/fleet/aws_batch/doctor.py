"""What ``savedworker doctor`` says of an AWS Batch fleet. Asks only: Batch has no dry run, and nothing is made."""

from __future__ import annotations

import base64
import binascii
import re
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

from savedworker.fleet.aws import doctor as shared
from savedworker.fleet.aws.session import Aws, code_of
from savedworker.fleet.aws_batch.settings import BatchSettings, Queue
from savedworker.fleet.finding import Finding
from savedworker.model.errors import SavedWorkerError

if TYPE_CHECKING:
    from savedworker.fleet.aws_batch.fleet import BatchFleet

_ECR = re.compile(r"(\d{12})\.dkr\.ecr\.([a-z0-9-]+)\.amazonaws\.com(?:\.cn)?/([^:@]+)(?:[:@](.+))?")
DRAINING, STOP = "ECS_ENABLE_SPOT_INSTANCE_DRAINING", "ECS_CONTAINER_STOP_TIMEOUT"


def diagnose(fleet: BatchFleet, store_url: str) -> Iterator[Finding]:
    """All findings."""
    aws, settings = fleet.aws, fleet.settings
    who = list(shared.guarded("credentials", lambda: shared.credentials(aws)))
    yield from who
    if who[-1].level == "FAIL":
        return
    yield Finding(
        "permissions",
        "OK",
        "AWS Batch has no dry run: batch:SubmitJob, batch:RegisterJobDefinition and batch:TerminateJob are not tried",
    )
    for queue in settings.queues:
        yield from shared.guarded("queue", lambda queue=queue: _queue(aws, queue, settings.stop_timeout))  # type: ignore[misc]
    yield from shared.guarded("image", lambda: _image(aws, settings))
    if settings.job_role:
        yield from shared.role(aws, "job_role", settings.job_role, "role")
    else:
        yield Finding(
            "job_role",
            "WARN",
            "containers use the role of their host, if that may reach the store",
            "create a role (docs/aws.md) and set job_role",
        )
    if settings.execution_role:
        yield from shared.role(aws, "execution_role", settings.execution_role, "role")
    yield from shared.guarded("bucket", lambda: shared.bucket(aws, store_url))


def _queue(aws: Aws, queue: Queue, stop_timeout: int) -> Iterator[Finding]:
    found = aws.call("batch", "describe_job_queues", "looking at the queue", jobQueues=[queue.queue]).get(
        "jobQueues", ()
    )
    if not found:
        yield Finding(
            "queue",
            "FAIL",
            f"there is no queue {queue.name} in {aws.region}",
            "correct queues, or the region",
        )
        return
    state, status = found[0].get("state"), found[0].get("status")
    if state != "ENABLED" or status != "VALID":
        yield Finding(
            "queue",
            "FAIL",
            f"{queue.name} is {state}, {status}: {found[0].get('statusReason') or 'jobs would wait'}",
            f"aws batch update-job-queue --job-queue {queue.name} --state ENABLED",
        )
        return
    yield Finding("queue", "OK", f"{queue.name} is enabled and valid ({queue.market})")
    names = [x["computeEnvironment"] for x in found[0].get("computeEnvironmentOrder", ())]
    environments = aws.call(
        "batch", "describe_compute_environments", "looking at compute environments", computeEnvironments=names
    ).get("computeEnvironments", ())
    for environment in environments:
        yield from _environment(aws, queue, environment, stop_timeout)


def _environment(
    aws: Aws, queue: Queue, environment: Mapping[str, Any], stop_timeout: int
) -> Iterator[Finding]:
    name = environment["computeEnvironmentName"]
    resources = environment.get("computeResources") or {}
    kind = str(resources.get("type", "EC2"))
    if environment.get("state") != "ENABLED" or environment.get("status") not in ("VALID", None):
        yield Finding(
            "environment",
            "FAIL",
            f"{name} is {environment.get('state')}, {environment.get('status')}: {environment.get('statusReason') or ''}".rstrip(
                ": "
            ),
            f"aws batch update-compute-environment --compute-environment {name} --state ENABLED",
        )
    if kind.startswith("FARGATE"):
        yield Finding(
            "environment",
            "FAIL",
            f"{name} is Fargate, which gives no privileges: nothing can be checkpointed there",
            "use a compute environment of EC2",
        )
        return
    if (kind == "SPOT") != (queue.market == "spot"):
        yield Finding(
            "environment",
            "WARN",
            f"{name} is {kind}, and the fleet says that {queue.name} is {queue.market}",
            "correct market of that queue",
        )
    template = resources.get("launchTemplate")
    data = _template(aws, template) if template else {}
    yield _draining(name, kind, data, stop_timeout)
    options = data.get("MetadataOptions", {})
    if options.get("HttpEndpoint") == "disabled":
        yield Finding(
            "metadata",
            "FAIL",
            f"{name}: its launch template turns the metadata service off, by which notices come",
            "set MetadataOptions.HttpEndpoint to enabled",
        )
    else:
        # Jobs on EC2 have the host's network (AWS Batch user guide, "Networking modes"), so one hop is enough.
        hops = options.get("HttpPutResponseHopLimit", "as in the image")
        yield Finding(
            "metadata", "OK", f"{name}: hop limit {hops}; jobs have the host's network, 1 is enough"
        )


def _template(aws: Aws, template: Mapping[str, str]) -> Mapping[str, Any]:
    which = {
        k: v
        for k, v in (
            ("LaunchTemplateId", template.get("launchTemplateId")),
            ("LaunchTemplateName", template.get("launchTemplateName")),
        )
        if v
    }
    answer = aws.call(
        "ec2",
        "describe_launch_template_versions",
        "reading the launch template of the compute environment",
        Versions=[template.get("version") or "$Default"],
        **which,
    )
    versions = answer.get("LaunchTemplateVersions", ())
    data: Mapping[str, Any] = versions[0]["LaunchTemplateData"] if versions else {}
    return data


def _draining(name: str, kind: str, template: Mapping[str, Any], stop_timeout: int) -> Finding:
    """What a container on a spot host hears of a reclaim, and how long it then lives.

    Without draining ECS says nothing, and the agent has the metadata service alone. With it a container gets SIGTERM at the notice, and
    SIGKILL after ECS_CONTAINER_STOP_TIMEOUT (30 s unless it is set), long before the host goes.
    """
    if kind != "SPOT":
        return Finding("draining", "OK", f"{name} is not spot")
    try:
        text = base64.b64decode(template.get("UserData", "")).decode(errors="replace")
    except binascii.Error:
        text = ""
    drains = re.search(rf"{DRAINING}\s*=\s*[\"']?true", text)
    if drains is None:
        return Finding(
            "draining",
            "WARN",
            f"{name}: {DRAINING} is not seen in its launch template; notices come from the metadata service alone",
            f"echo {DRAINING}=true >> /etc/ecs/ecs.config in the user data of its launch template, and {STOP}=110s",
        )
    found = re.search(rf"{STOP}\s*=\s*[\"']?(\d+)(s|m)?", text)
    seconds = int(found[1]) * (60 if found[2] == "m" else 1) if found else 30
    if seconds != stop_timeout:
        return Finding(
            "draining",
            "WARN",
            f"{name}: containers are killed {seconds} s after SIGTERM, and the fleet says {stop_timeout} s",
            f"set stop_timeout: {seconds}",
        )
    return Finding("draining", "OK", f"{name}: {DRAINING}=true, {seconds} s from SIGTERM to SIGKILL")


def _image(aws: Aws, settings: BatchSettings) -> Iterator[Finding]:
    match = _ECR.fullmatch(settings.image)
    if match is None:
        yield Finding(
            "image",
            "WARN",
            f"{settings.image} is not in ECR: not looked at",
            "see that the hosts can pull it",
        )
        return
    account, region, repository, tag = match.groups()
    which = {"imageDigest": tag} if tag and tag.startswith("sha256:") else {"imageTag": tag or "latest"}
    try:
        aws.call(
            "ecr",
            "describe_images",
            "looking at the image",
            registryId=account,
            repositoryName=repository,
            imageIds=[which],
        )
    except SavedWorkerError as error:
        code = code_of(error.__cause__ or error)
        if code in ("RepositoryNotFoundException", "ImageNotFoundException"):
            yield Finding("image", "FAIL", f"there is no {settings.image}", "push it: docs/aws.md")
        else:
            yield Finding(
                "image",
                "WARN",
                f"{settings.image} could not be looked at: {error.message}",
                "allow ecr:DescribeImages",
            )
        return
    if region == aws.region:
        yield Finding("image", "OK", f"{settings.image} is there")
    else:
        yield Finding(
            "image",
            "WARN",
            f"{settings.image} is in {region}: pulled across regions",
            "push it to this region",
        )
