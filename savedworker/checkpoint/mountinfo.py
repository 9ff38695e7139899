"""What /proc/PID/mountinfo writes (proc_pid_mountinfo(5))."""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from pathlib import Path

_OCTAL = re.compile(r"\\([0-7]{3})")


@dataclass(frozen=True)
class Mount:
    """One mount: where it is, and the kind of its file system."""

    point: str
    kind: str


def plain(field: str) -> str:
    """A field without its octal escapes."""
    return _OCTAL.sub(lambda code: chr(int(code[1], 8)), field)


def mounts() -> list[Mount]:
    """What is mounted in this mount namespace, the oldest first."""
    found = []
    for line in Path("/proc/self/mountinfo").read_text(errors="surrogateescape").splitlines():
        left, _, right = line.partition(" - ")
        found.append(Mount(plain(left.split(" ")[4]), right.split(" ")[0]))
    return found


def mounts_below(folder: Path) -> list[Path]:
    """Mount points below ``folder`` in this mount namespace, the innermost and newest first."""
    prefix = f"{os.path.realpath(folder)}/"
    return [Path(x.point) for x in reversed(mounts()) if x.point.startswith(prefix)]
