"""The settings of a fleet of kind ``aws-batch``."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import BeforeValidator, Field, model_validator

from savedworker.fleet.aws.agent_command import AwsSettings
from savedworker.fleet.aws.sizes import Size
from savedworker.fleet.settings import FleetSettings
from savedworker.model.placement import Market


class Queue(FleetSettings):
    """One queue."""

    queue: str = Field(pattern=r"[A-Za-z0-9_-]{1,128}|arn:aws[a-z-]*:batch:.+:job-queue/.+")
    market: Market = "spot"
    """Of its compute environment: only a ``spot`` one is left for ``on-demand`` by policy."""
    price: float | None = Field(default=None, ge=0, allow_inf_nan=False)
    """Per hour, for ordering queues of one market; leave it out and the order given counts."""
    zones: tuple[str, ...] = ()
    """Zones of its compute environment, so that it can be left when all of them were reclaimed."""

    @property
    def name(self) -> str:
        """Of the queue, without its account and region."""
        return self.queue.rpartition("/")[2]


def _queues(value: Any) -> Any:
    listed = value if isinstance(value, list | tuple) else [value]
    return [{"queue": each} if isinstance(each, str) else each for each in listed]


class BatchSettings(AwsSettings):
    """How jobs are made. docs/aws.md explains each setting."""

    queues: Annotated[tuple[Queue, ...], BeforeValidator(_queues)] = Field(min_length=1, max_length=20)
    """In order of preference: names, or ``{queue: NAME, market: on-demand, price: 0.2}``."""
    image: str = Field(min_length=1)
    """The agent's image (docker/agent.Dockerfile), or yours with the agent's bundle in it."""
    job_role: str | None = None
    """ARN of the role of the container: what docs/aws/instance-policy.json allows."""
    execution_role: str | None = None
    """ARN of the role with which ECS fetches key_from and private images."""
    vcpus: int = Field(default=1, ge=1, le=1024)
    """Processors of a worker whose spec says nothing."""
    memory: Size = 2 << 30
    """Bytes for a worker whose spec says nothing."""
    memory_reserve: Size = 1 << 30
    """Bytes beside the worker's own, for the agent."""
    gpus: int = Field(default=0, ge=0, le=64)
    stop_timeout: int = Field(default=30, ge=10, le=120)
    """Seconds between SIGTERM and SIGKILL on the hosts: their ECS_CONTAINER_STOP_TIMEOUT. A job definition cannot set it."""
    scratch: str | None = Field(default=None, pattern=r"/.+")
    """Folder of the host for layers and images, for example a local NVMe disk; default: a volume of Docker's."""

    @model_validator(mode="after")
    def _each_once(self) -> BatchSettings:
        names = [each.name for each in self.queues]
        if len(set(names)) != len(names):
            raise ValueError("queues: each may be given once")
        if self.key_from and not self.execution_role:
            raise ValueError("key_from needs execution_role: ECS fetches the key with it")
        return self
