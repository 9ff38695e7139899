"""The settings of a fleet of kind ``ec2``."""

from __future__ import annotations

from typing import Any

from pydantic import Field, field_validator, model_validator

from savedworker.fleet.aws.agent_command import AwsSettings, Names
from savedworker.fleet.aws.sizes import Size
from savedworker.model.placement import Market


class Ec2Settings(AwsSettings):
    """How instances are made. docs/aws.md explains each setting."""

    instance_types: Names = Field(min_length=1, max_length=100)
    """Types, or patterns such as ``m6i.*``. Those that are too small for a worker, or do not fit its checkpoint, are left out."""
    subnets: Names = ()
    """Subnet ids, one or more for each zone to be used; default: the default subnets of the region."""
    security_groups: Names = ()
    instance_profile: str | None = None
    """Name or ARN. Instances need what docs/aws/instance-policy.json allows."""
    image: str | None = Field(default=None, pattern=r"ami-[0-9a-f]+|resolve:ssm:.+")
    """An AMI, or an SSM parameter that names one."""
    launch_template: str | None = Field(
        default=None, pattern=r"[A-Za-z0-9().\-/_]+(:\d+|:\$Latest|:\$Default)?"
    )
    """Name or id of your own template, with ``:VERSION`` if it is not the default one: what it says stands where nothing is set here."""
    markets: tuple[Market, ...] = ("spot", "on-demand")
    """What may be asked for, in this order; see ``placement`` of the spec."""
    max_price: float | None = Field(default=None, gt=0, allow_inf_nan=False)
    """Most dollars per hour for a spot instance; better left out: then it is the on-demand price."""
    architecture: str = Field(default="x86_64", pattern="x86_64|arm64")
    alike: tuple[Names, ...] = ()
    """Groups of families whose processors are alike (``[m6i, c6i, r6i]``), besides what names tell."""
    gpu_model: str | None = None
    """As DescribeInstanceTypes names it: ``A10G``, ``T4``. After the first checkpoint its GPUs decide."""
    gpu_count: int = Field(default=0, ge=0, le=64)
    memory_reserve: Size = 1 << 30
    """Bytes of an instance's memory that agent and system need, beside the worker's limit."""
    volume_size: int | None = Field(default=None, ge=8, le=65536)
    """GiB of the root volume; default: the image's."""
    volume_device: str = "/dev/xvda"
    """The image's root device: ``/dev/xvda``, or ``/dev/sda1``."""
    hop_limit: int = Field(default=1, ge=1, le=64)
    """Network hops that answers of the metadata service may take. The agent needs 1; with 2 workers see it too."""
    key_name: str | None = None
    """An SSH key pair, to look at instances."""
    bundle: str | None = Field(default=None, pattern=r"(s3|https)://.+")
    """Where the agent's bundle is fetched from when the image has none at /opt/savedworker."""
    bundle_sha256: str | None = Field(default=None, pattern=r"[0-9a-f]{64}")

    @field_validator("markets", mode="before")
    @classmethod
    def _markets(cls, value: Any) -> Any:
        return (value,) if isinstance(value, str) else value

    @model_validator(mode="after")
    def _complete(self) -> Ec2Settings:
        if not self.image and not self.launch_template:
            raise ValueError("image is missing: give an AMI, or a launch_template that names one")
        if not self.markets or len(set(self.markets)) != len(self.markets):
            raise ValueError("markets: give spot, on-demand, or both, each once")
        if self.gpu_model and not self.gpu_count:
            raise ValueError("gpu_model needs gpu_count")
        return self
