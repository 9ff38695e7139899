"""The external programs: where they are, which version, and how they are called."""

from __future__ import annotations

import functools
import os
import re
import shutil
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from savedworker.model.errors import Fatal

PREFIX = Path("/opt/savedworker")
"""Where scripts/setup puts CRIU and runc when the distribution's are too old."""

MIN_CRIU = (4, 1)
MIN_RUNC = (1, 2)
"""runc 1.2 is the first with time namespaces."""


@dataclass(frozen=True)
class Tools:
    """Absolute paths and versions of what every instance needs."""

    criu: Path
    runc: Path
    criu_version: str
    runc_version: str


def which(name: str) -> Path | None:
    """The program ``name``: from $SAVEDWORKER_TOOLS/bin, the private prefix or bundle, PATH or the system's sbin folders."""
    own = os.environ.get("SAVEDWORKER_TOOLS")
    folders = [
        *([f"{own}/bin"] if own else []),
        f"{PREFIX}/bin",
        f"{PREFIX}/libexec",
        os.environ.get("PATH", ""),
        "/usr/sbin",
        "/sbin",
    ]
    found = shutil.which(name, path=os.pathsep.join(folders))
    return Path(found) if found else None


def need(name: str, package: str) -> Path:
    """The program ``name``, or Fatal naming the Debian ``package`` that has it."""
    path = which(name)
    if path is None:
        raise Fatal(f"the program {name} is missing", f"install the package {package}, or run scripts/setup")
    return path


def version_of(program: Path) -> str:
    """The version that ``program --version`` prints, like ``4.2.1``. Raises Fatal when it does not run."""
    try:
        text = subprocess.run(
            [program, "--version"], capture_output=True, text=True, timeout=20, check=True
        ).stdout
    except (OSError, subprocess.SubprocessError) as error:
        raise Fatal(f"{program} does not run: {error}", "run scripts/setup again") from error
    match = re.search(r"(\d+(?:\.\d+)+)", text)
    return match.group(1) if match else "0"


def as_tuple(version: str) -> tuple[int, ...]:
    """``4.2.1`` as (4, 2, 1)."""
    return tuple(int(part) for part in version.split(".") if part.isdigit())


@functools.cache
def find_tools() -> Tools:
    """CRIU and runc, new enough. Raises Fatal with the fix."""
    if os.geteuid() != 0:
        raise Fatal("checkpoint and restore need root", "run as root, or on a fleet whose instances do")
    criu, runc = need("criu", "criu"), need("runc", "runc")
    tools = Tools(criu, runc, version_of(criu), version_of(runc))
    for name, found, least in (
        ("criu", tools.criu_version, MIN_CRIU),
        ("runc", tools.runc_version, MIN_RUNC),
    ):
        if as_tuple(found) < least:
            wanted = ".".join(map(str, least))
            raise Fatal(
                f"{name} {found} is too old, {wanted} or newer is needed",
                "run scripts/setup, which brings one",
            )
    return tools


def run(
    argv: Sequence[str | Path], timeout: float = 30.0, check: bool = True
) -> subprocess.CompletedProcess[str]:
    """Run a short command and return it with its output. Raises Fatal with the command's own words when it fails."""
    words = [str(word) for word in argv]
    try:
        done = subprocess.run(words, capture_output=True, text=True, timeout=timeout, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise Fatal(f"{' '.join(words)}: {error}") from error
    if check and done.returncode:
        raise Fatal(
            f"{' '.join(words)} failed ({done.returncode}): {(done.stderr or done.stdout).strip()[-400:]}"
        )
    return done
