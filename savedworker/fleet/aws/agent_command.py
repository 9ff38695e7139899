"""How the agent is started on an instance of AWS: the words and the environment, without any secret."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Annotated, Any

from pydantic import BeforeValidator, Field, field_validator, model_validator

from savedworker.fleet.base import LaunchRequest
from savedworker.fleet.settings import FleetSettings
from savedworker.model.errors import Refused
from savedworker.store.sealing import ALLOW_PLAIN, KEY, KEY_FILE

PREFIX = "/opt/savedworker"
"""Where the agent's bundle is on an instance and in an image."""
STATE = "/var/lib/savedworker"


_VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
_TAG = re.compile(r"[A-Za-z0-9+\-=._:@]{1,127}")


def _several(value: Any) -> Any:
    return (value,) if isinstance(value, str) else value


Names = Annotated[tuple[str, ...], BeforeValidator(_several)]
"""A list in the file; a single one may be written plainly."""


class AwsSettings(FleetSettings):
    """Settings that both kinds have."""

    region: str | None = None
    """Default: what boto3 finds (``AWS_REGION``, the profile)."""
    profile: str | None = None
    """A profile of the AWS configuration, for the controller; never for instances."""
    key_from: str | None = Field(
        default=None, pattern=r"arn:aws[a-z-]*:(ssm|secretsmanager):[a-z0-9-]+:\d{12}:.+"
    )
    """ARN of the SSM parameter or secret that holds the store's key. Instances fetch it with their role."""
    key_file: str | None = Field(default=None, pattern=r"/.+")
    """Path of a file with the store's key that is on every instance already (in its image)."""
    environment: dict[str, str] = Field(default_factory=dict)
    """More variables for the agent. No secrets."""
    agent: str = f"{PREFIX}/bin/savedworker"
    """The program on the instance, or in the image."""
    tags: dict[str, str] = Field(default_factory=dict)
    """More tags for all that is made."""
    terminated_by_hand: str = Field(default="cancel", pattern="cancel|replace")
    """What it means when a person ends the instance or job with AWS's tools."""

    @field_validator("environment")
    @classmethod
    def _no_key(cls, value: dict[str, str]) -> dict[str, str]:
        for name in value:
            if name in (KEY, KEY_FILE):
                raise ValueError(f"{name} is not given so: use key_from or key_file")
            if not _VARIABLE.fullmatch(name):
                raise ValueError(f"{name!r} is no name of a variable")
        return value

    @field_validator("tags")
    @classmethod
    def _visible_tags(cls, value: dict[str, str]) -> dict[str, str]:
        for key in value:
            if not _TAG.fullmatch(key) or key.startswith(("aws:", "savedworker:")):
                raise ValueError(
                    f"tag {key!r}: use letters, digits and +-=._:@ (the metadata service shows no others), and not aws: or savedworker:"
                )
        return value

    @model_validator(mode="after")
    def _one_key(self) -> AwsSettings:
        if self.key_from and self.key_file:
            raise ValueError("key_from and key_file are both given: use one")
        return self


def check_key(settings: AwsSettings, fleet: str, environment: Mapping[str, str]) -> None:
    """Raise Refused if the store has a key here that instances would not have."""
    if (KEY in environment or KEY_FILE in environment) and not (settings.key_from or settings.key_file):
        raise Refused(
            f"the store has a key here, and fleet {fleet} has no way to give it to its instances: user data and job "
            "definitions can be read by too many",
            "put the key into an SSM parameter (SecureString) or a secret and set key_from to its ARN; docs/aws.md",
        )


def agent_environment(settings: AwsSettings, request: LaunchRequest, region: str) -> dict[str, str]:
    """The variables of the agent. Holds no secret: the key itself is fetched (``key_from``) or found (``key_file``)."""
    found = {"AWS_REGION": region, **settings.environment}
    if settings.key_file:
        found[KEY_FILE] = settings.key_file
    if request.environment.get(ALLOW_PLAIN):
        found[ALLOW_PLAIN] = request.environment[ALLOW_PLAIN]
    return found


def agent_words(
    settings: AwsSettings, store_url: str, kind: str, folder: str, more: Sequence[str] = ()
) -> tuple[str, ...]:
    """The agent's command, kept running by its own supervisor. What is not given here it asks the metadata service.

    ``folder``: the name of this agent's own folder and cgroup, for instances that run several at once.
    """
    return (
        *(settings.agent, "agent", "--supervise", "--store", store_url, "--fleet", kind),
        *("--state-dir", f"{STATE}/{folder}", "--cgroup-parent", f"/savedworker/{folder}"),
        *more,
    )
