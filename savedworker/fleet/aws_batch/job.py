"""What is registered and submitted for a launch: plain functions from settings and request to parameters."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from savedworker.fleet.aws import marks
from savedworker.fleet.aws.agent_command import STATE, agent_environment, agent_words
from savedworker.fleet.aws_batch.settings import BatchSettings, Queue
from savedworker.fleet.base import LaunchRequest
from savedworker.model.spec import WorkerSpec
from savedworker.store.sealing import KEY

KIND = "aws-batch"
PREFIX = "savedworker-"
"""All jobs and definitions of ours begin so."""


SPARE = 5
"""Seconds of the time after SIGTERM that are not relied on."""


def job_name(launch: str) -> str:
    """Found again by this name when nobody wrote down the job's id."""
    return PREFIX + launch


def launch_of(name: str) -> str:
    """The launch of a job of that name."""
    return name.removeprefix(PREFIX)


def definition(settings: BatchSettings, spec: WorkerSpec) -> dict[str, Any]:
    """The job definition: what all launches of workers with equal needs share. Named after its content.

    ``privileged``: ECS on EC2 has no single capabilities to give, and the agent needs SYS_ADMIN, NET_ADMIN, SYS_PTRACE and others
    to freeze and restore. ``attempts``: a second copy would not be Batch's to start.
    """
    memory = (settings.memory if spec.memory is None else spec.memory) + settings.memory_reserve
    cpus = settings.vcpus if spec.cpus is None else math.ceil(spec.cpus)
    needs = [
        {"type": "VCPU", "value": str(cpus)},
        {"type": "MEMORY", "value": str(math.ceil(memory / (1 << 20)))},
        *([{"type": "GPU", "value": str(settings.gpus)}] if settings.gpus else []),
    ]
    container: dict[str, Any] = {
        "image": settings.image,
        "privileged": True,
        "resourceRequirements": needs,
        "command": [settings.agent, "agent", "--help"],
        # Layers cannot lie on the container's own overlay.
        "volumes": [
            {"name": "scratch", "host": {"sourcePath": settings.scratch} if settings.scratch else {}}
        ],
        "mountPoints": [{"sourceVolume": "scratch", "containerPath": STATE, "readOnly": False}],
    }
    if settings.job_role:
        container["jobRoleArn"] = settings.job_role
    if settings.execution_role:
        container["executionRoleArn"] = settings.execution_role
    if settings.key_from:
        container["secrets"] = [{"name": KEY, "valueFrom": settings.key_from}]
    content = {
        "type": "container",
        "platformCapabilities": ["EC2"],
        "containerProperties": container,
        "retryStrategy": {"attempts": 1},
        "propagateTags": True,
    }
    return {"jobDefinitionName": PREFIX + marks.digest(content), **content, "tags": dict(settings.tags)}


def submission(
    settings: BatchSettings,
    request: LaunchRequest,
    fleet: str,
    queue: Queue,
    definition_name: str,
    region: str,
) -> dict[str, Any]:
    """The parameters of SubmitJob."""
    grace = str(settings.stop_timeout - SPARE)
    own = ("--worker", request.worker, "--launch", request.launch, "--sigterm-grace", grace)
    words = agent_words(settings, request.store_url, KIND, request.launch, own)
    environment = agent_environment(settings, request, region)
    tags = {**settings.tags, **marks.tags(request.worker, request.launch, request.store_url, fleet)}
    return {
        "jobName": job_name(request.launch),
        "jobQueue": queue.queue,
        "jobDefinition": definition_name,
        "containerOverrides": {
            "command": list(words),
            "environment": [{"name": k, "value": v} for k, v in sorted(environment.items())],
        },
        "retryStrategy": {"attempts": 1},
        "propagateTags": True,
        "tags": tags,
    }


def tags_of(job: Mapping[str, Any]) -> Mapping[str, str]:
    """The tags of a described job."""
    return job.get("tags") or {}
