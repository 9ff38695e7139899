"""How much memory this process may still fill: of the machine, and of every cgroup above it that has a limit.

The limits of cgroup version 2 are unproven here, as ``cgroups.py`` says; their files are tested as text.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from savedworker.checkpoint.mountinfo import plain
from savedworker.model.room import Room

_UNLIMITED = 1 << 60
"""A limit from here on is none (version 1 has no other word for it)."""


@dataclass(frozen=True)
class _Version:
    """The names that one version of the memory controller has for the same things."""

    limits: tuple[str, ...]
    usage: str
    cache: tuple[str, ...]
    """In memory.stat: what the kernel takes back when it needs room."""


_V1 = _Version(
    ("memory.limit_in_bytes",), "memory.usage_in_bytes", ("total_inactive_file", "total_active_file")
)
_V2 = _Version(("memory.max", "memory.high"), "memory.current", ("inactive_file", "active_file"))


def rooms(proc: Path = Path("/proc")) -> list[Room]:
    """What is free now at each place that has a limit. Empty when that cannot be found out."""
    try:
        available = next(
            int(line.split()[1]) << 10
            for line in (proc / "meminfo").read_text().splitlines()
            if line.startswith("MemAvailable:")
        )
        return [Room(available, "are available"), *_limits(proc)]
    except (OSError, ValueError, StopIteration):
        return []


def _limits(proc: Path) -> Iterator[Room]:
    for line in (proc / "self/cgroup").read_text().splitlines():
        _, controllers, path = line.split(":", 2)
        if not controllers:
            # Next to version 1 hierarchies it may be there without any controller, or not be mounted.
            yield from _along(proc, path, "cgroup2", "", _V2, needed=False)
        elif "memory" in controllers.split(","):
            yield from _along(proc, path, "cgroup", "memory", _V1, needed=True)


def _along(proc: Path, path: str, kind: str, option: str, version: _Version, needed: bool) -> Iterator[Room]:
    """The limits of the cgroup ``path`` and of those above it that can be seen here. Raises OSError when none can be although ``needed``."""
    for line in (proc / "self/mountinfo").read_text(errors="surrogateescape").splitlines():
        before, _, after = line.partition(" - ")
        found, _, options = after.split(" ")[:3]
        if found != kind or (option and option not in options.split(",")):
            continue
        root, mount = map(plain, before.split(" ")[3:5])
        top = Path(mount)
        # In a container the mount may begin at its own cgroup, while the path is told from the machine's root.
        inside = path.removeprefix(root.rstrip("/")) if path.startswith(root) else ""
        folder = top / inside.strip("/")
        if not folder.is_dir():
            folder = top
        while True:
            yield from _limit(folder, version)
            if folder == top:
                return
            folder = folder.parent
    if needed:
        raise FileNotFoundError(f"no {option} cgroups are mounted here")


def _limit(folder: Path, version: _Version) -> Iterator[Room]:
    limits = []
    for name in version.limits:
        try:
            text = (folder / name).read_text().strip()
        except FileNotFoundError:
            continue  # the root of version 2, or a cgroup that does not have the controller
        if text != "max" and int(text) < _UNLIMITED:
            limits.append(int(text))
    if not limits:
        return
    usage = int((folder / version.usage).read_text())
    stat = dict(line.split() for line in (folder / "memory.stat").read_text().splitlines())
    cache = sum(int(stat.get(name, 0)) for name in version.cache)
    yield Room(min(limits) - max(0, usage - cache), f"are left of the limit of cgroup {folder}")
