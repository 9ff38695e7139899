"""The user data of an instance: a shell script that installs the agent if need be, runs it, and ends the instance with it.

It is the same for all launches of a fleet: worker and launch are tags of the instance, which the agent asks the metadata service for.
It holds no secret.
"""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from importlib.resources import files

from savedworker.fleet.aws.agent_command import PREFIX
from savedworker.model.errors import Refused

LIMIT = 16384
"""Most bytes of user data that EC2 takes."""


@dataclass(frozen=True)
class Boot:
    """What an instance is told."""

    agent: Sequence[str]
    """The agent's command."""
    environment: Mapping[str, str] = field(default_factory=dict)
    bundle: str = ""
    bundle_sha256: str = ""


def render(boot: Boot) -> str:
    """The script. Raises Refused when it is longer than EC2 takes."""
    lines = [
        "#!/bin/sh",
        "# Saved Worker: runs the agent of one launch, and ends this instance with it.",
        "set -u",
        "umask 022",
        # The instance goes whatever happens: InstanceInitiatedShutdownBehavior=terminate makes a shutdown its end.
        "finish() { sync; shutdown -h now || poweroff -f; }",
        "trap finish EXIT",
        'fail() { echo "savedworker: $*" >&2; exit 1; }',
        f"PREFIX={shlex.quote(PREFIX)}",
        f"AGENT={shlex.quote(boot.agent[0])}",
        f"BUNDLE={shlex.quote(boot.bundle)}",
        f"BUNDLE_SHA256={shlex.quote(boot.bundle_sha256)}",
        *(f"export {name}={shlex.quote(value)}" for name, value in sorted(boot.environment.items())),
        _install_script(),
        # In the background, so that the shell can pass on SIGTERM while it waits.
        f"{shlex.join(boot.agent)} &",
        "agent=$!",
        "trap 'kill -TERM \"$agent\"' TERM",
        'while kill -0 "$agent" 2>/dev/null; do wait "$agent"; done',
        "",
    ]
    text = "\n".join(lines)
    if len(text.encode()) > LIMIT:
        raise Refused(
            f"the user data would have {len(text.encode())} bytes, and EC2 takes {LIMIT}",
            "give the fleet fewer or shorter variables in environment",
        )
    return text


@cache
def _install_script() -> str:
    text = files("savedworker.fleet.ec2").joinpath("install.sh").read_text()
    return "\n".join(line for line in text.splitlines() if not line.startswith("#") and line.strip())
