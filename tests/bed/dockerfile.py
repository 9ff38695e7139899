"""Executes a Dockerfile without Docker: each stage is a root directory, each RUN a chroot in namespaces of its own.

Just what docker/agent.Dockerfile uses: ARG, FROM … AS, ENV, COPY (also --from), RUN, CMD. Anything else is refused.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

CERTIFICATES = "/etc/ssl/certs/ca-certificates.crt"


@dataclass
class Stage:
    """One stage: its root and what it says."""

    root: Path
    environment: dict[str, str] = field(default_factory=dict)
    arguments: dict[str, str] = field(default_factory=dict)
    command: tuple[str, ...] = ()


def instructions(text: str) -> list[tuple[str, str]]:
    """(word, rest) of each instruction, continued lines joined."""
    lines = [line for line in text.splitlines() if not line.lstrip().startswith("#")]
    joined = re.sub(r"\\\n", " ", "\n".join(lines))
    found = []
    for line in joined.splitlines():
        if line.strip():
            word, _, rest = line.strip().partition(" ")
            found.append((word.upper(), " ".join(rest.split()) if word.upper() != "RUN" else rest.strip()))
    return found


def build(
    dockerfile: Path, context: Path, folder: Path, images: Mapping[str, Path], environment: Mapping[str, str]
) -> dict[str, Stage]:
    """Execute all stages below ``folder``; the last one is under the name ``""``.

    ``images``: a root directory for each image that a FROM names. ``environment``: for every RUN, as --build-arg proxies are.
    """
    stages: dict[str, Stage] = {}
    arguments: dict[str, str] = {}
    stage: Stage | None = None
    for word, rest in instructions(dockerfile.read_text()):
        if word == "ARG":
            name, _, value = rest.partition("=")
            (arguments if stage is None else stage.arguments)[name] = value
        elif word == "FROM":
            image, _, name = _fill(rest, arguments).partition(" AS ")
            stage = Stage(folder / f"stage-{len(stages)}-{name or 'last'}")
            stages[name] = stage
            if image == "scratch":
                stage.root.mkdir(parents=True)
            else:
                stage.root.parent.mkdir(parents=True, exist_ok=True)
                subprocess.run(["cp", "-a", "--reflink=auto", images[image], stage.root], check=True)
        elif stage is None:
            raise ValueError(f"{word} before the first FROM")
        elif word == "ENV":
            name, _, value = rest.partition("=")
            stage.environment[name] = value
        elif word == "COPY":
            _copy(rest.split(), context, stage, stages)
        elif word == "RUN":
            _run(rest, stage, environment)
        elif word == "CMD":
            stage.command = tuple(json.loads(rest))
        else:
            raise ValueError(f"{word} is not executed here")
    return stages


def _fill(text: str, values: Mapping[str, str]) -> str:
    return re.sub(r"\$\{(\w+)\}", lambda match: values[match[1]], text)


def _copy(words: list[str], context: Path, stage: Stage, stages: Mapping[str, Stage]) -> None:
    source = context
    if words[0].startswith("--from="):
        source = stages[words.pop(0).removeprefix("--from=")].root
    *names, target = words
    there = stage.root / target.lstrip("/")
    if len(names) > 1 or target.endswith("/"):
        there.mkdir(parents=True, exist_ok=True)
    for name in names:
        file = source / name.lstrip("/")
        if file.is_dir():
            ignored = shutil.ignore_patterns("__pycache__")
            shutil.copytree(file, there, symlinks=True, dirs_exist_ok=True, ignore=ignored)
        else:
            shutil.copy2(file, there / file.name if there.is_dir() else there)


def _run(line: str, stage: Stage, environment: Mapping[str, str]) -> None:
    root = stage.root
    mounts = "mount --make-rprivate / && mount --bind $1 $1 && mount -t proc proc $1/proc && mount --rbind /dev $1/dev && mount --rbind /sys $1/sys"
    binds = ""
    for name in ("/etc/resolv.conf", CERTIFICATES):  # of this machine, as Docker does with the first
        (root / "run/machine").mkdir(exist_ok=True)
        target = name if name != CERTIFICATES else f"/run/machine/{Path(name).name}"
        (root / target.lstrip("/")).touch()
        binds += f" && mount --bind {name} $1{target}"
    words = [
        "unshare",
        "--mount",
        "--pid",
        "--fork",
        "sh",
        "-c",
        f'{mounts}{binds} && exec chroot $1 /bin/sh -ec "$2"',
        "sh",
    ]
    values = {"PATH": "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin", "HOME": "/root"}
    done = subprocess.run(
        [*words, str(root), line],
        env={**values, **environment, **stage.arguments, **stage.environment},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
    )
    if done.returncode:
        raise RuntimeError(f"RUN {line[:200]}\n{done.stdout[-3000:]}\n{done.stderr[-3000:]}")


def machine_mirror() -> str:
    """The Debian mirror that this machine's apt uses."""
    listed = subprocess.run(
        ["apt-get", "indextargets", "--format", "$(SITE)", "Created-By: Packages"],
        capture_output=True,
        text=True,
        check=True,
    )
    for site in listed.stdout.split():
        if "debian" in site and "security" not in site:
            return site
    raise RuntimeError("this machine's apt has no Debian mirror")


def machine_index() -> dict[str, str]:
    """How this machine's pip finds packages, as variables."""
    listed = subprocess.run(["python3", "-m", "pip", "config", "list"], capture_output=True, text=True)
    found = {
        name: value for name, value in os.environ.items() if name.startswith("PIP_") and "CERT" not in name
    }
    for match in re.finditer(
        r"^(?:global|install|:env:)\.(index-url|extra-index-url|trusted-host)='(.*)'$",
        listed.stdout,
        re.MULTILINE,
    ):
        found[f"PIP_{match[1].upper().replace('-', '_')}"] = match[2]
    for name in ("http_proxy", "https_proxy", "no_proxy"):
        found |= {x: os.environ[x] for x in (name, name.upper()) if x in os.environ}
    for name in ("PIP_FIND_LINKS", "PIP_CONSTRAINT"):
        found.pop(name, None)
    found = {name: value for name, value in found.items() if "file:" not in value}
    return {**found, "PIP_CERT": f"/run/machine/{Path(CERTIFICATES).name}"}
