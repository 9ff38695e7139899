"""The cgroup of a host: the one place that says which processes belong to it, and the way to end them all.

The daemon and the agent live in ``<host cgroup>/system``, so that a container can have ``<host cgroup>/worker`` beside
it (cgroup v2 allows no processes in an inner node with controllers).
"""

from __future__ import annotations

import contextlib
import errno
import os
import signal
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from savedworker.model.errors import Refused, Temporary


@dataclass(frozen=True)
class Hierarchy:
    """One mounted cgroup hierarchy."""

    mount: Path
    controllers: frozenset[str]
    v2: bool


def hierarchies() -> list[Hierarchy]:
    """The cgroup hierarchies that are mounted here, each once, where it was first.

    A CRIU that restores mounts all of them once more in its work directory, for a moment: whoever looks there finds nothing soon.
    """
    found: dict[tuple[str, frozenset[str]], Hierarchy] = {}
    for line in Path("/proc/self/mountinfo").read_text().splitlines():
        before, _, after = line.partition(" - ")
        kind, _, options = after.split(" ", 2)
        if kind in ("cgroup", "cgroup2"):
            named = frozenset(options.split(","))
            key = (kind, named if kind == "cgroup" else frozenset())
            found.setdefault(key, Hierarchy(Path(before.split(" ")[4]), named, kind == "cgroup2"))
    return list(found.values())


class HostCgroup:
    """The cgroup ``path`` (for example ``/savedworker/host-3f2a``) in every hierarchy."""

    def __init__(self, path: str) -> None:
        self.path = path
        self._all = hierarchies()

    def join(self) -> None:
        """Create the cgroup and move this process into it. Raises Refused when no hierarchy can hold it."""
        own = self._own()
        if not own:
            raise Refused(
                "no cgroup hierarchy with a freezer is mounted",
                "mount cgroup2, or the v1 freezer, below /sys/fs/cgroup",
            )
        for hierarchy in own:
            system = self._below(hierarchy) / "system"
            system.mkdir(parents=True, exist_ok=True)
            (system / "cgroup.procs").write_text(str(os.getpid()))

    def leave(self) -> None:
        """Move this process out, so that it can end the others and remove the cgroup."""
        for hierarchy in self._own():
            (hierarchy.mount / "cgroup.procs").write_text(str(os.getpid()))

    def _own(self) -> list[Hierarchy]:
        """Where the host's first process is put; its children follow.

        Beside v1 controllers the empty v2 hierarchy is left alone: runc does not manage it there, so CRIU would write this
        host's path into the images and create it on the next host.
        """
        v1 = [h for h in self._all if not h.v2 and h.controllers & {"freezer", "pids"}]
        return v1 if any("freezer" in h.controllers for h in v1) else [h for h in self._all if h.v2][:1]

    def _below(self, hierarchy: Hierarchy) -> Path:
        return hierarchy.mount / self.path.lstrip("/")

    def _groups(self, hierarchy: Hierarchy) -> Iterator[Path]:
        """Its cgroup and all below, the outer ones first; names of containers are the user's, so no globbing."""
        for directory, _, _ in os.walk(self._below(hierarchy)):
            yield Path(directory)

    def processes(self) -> set[int]:
        """Pids of the host's processes in this pid namespace."""
        pids: set[int] = set()
        for hierarchy in self._all:
            for group in self._groups(hierarchy):
                # a v2 cgroup with threads answers EOPNOTSUPP, one just removed ENODEV: its processes show elsewhere
                with contextlib.suppress(OSError):
                    pids.update(int(pid) for pid in (group / "cgroup.procs").read_text().split())
        return pids - {0}

    def kill_all(self, limit: float = 30.0) -> None:
        """SIGKILL every process of the host but the caller until none is left. Raises Temporary after ``limit`` seconds."""
        end = time.monotonic() + limit
        pause = 0.001
        self._freeze()
        while pids := self.processes() - {os.getpid()}:
            for hierarchy in self._all:
                if hierarchy.v2:
                    with contextlib.suppress(OSError):  # before Linux 5.14; the signals below do the same
                        (self._below(hierarchy) / "cgroup.kill").write_text("1")
            for pid in pids:
                self._kill(pid)
            self._thaw()  # a frozen process dies only when it is thawed
            if time.monotonic() > end:
                raise Temporary(
                    f"{len(pids)} processes of {self.path} do not die: {sorted(pids)[:10]}", retry_after=5.0
                )
            time.sleep(pause)
            pause = min(pause * 2, 0.1)
        self._thaw()

    def _freeze(self) -> None:
        """Hold still what forks faster than we can look; best effort, as a v1 freezer can hang on a stopped task."""
        for hierarchy in self._all:
            name, value = ("cgroup.freeze", "1") if hierarchy.v2 else ("freezer.state", "FROZEN")
            with contextlib.suppress(OSError):
                (self._below(hierarchy) / name).write_text(value)
        end = time.monotonic() + 0.05
        while time.monotonic() < end and not self._frozen():
            time.sleep(0.001)

    def _frozen(self) -> bool:
        for hierarchy in self._all:
            try:
                if (
                    not hierarchy.v2
                    and (self._below(hierarchy) / "freezer.state").read_text().strip() == "FREEZING"
                ):
                    return False
            except OSError:
                continue
        return True

    def _thaw(self) -> None:
        for hierarchy in self._all:
            name, value = ("cgroup.freeze", "0") if hierarchy.v2 else ("freezer.state", "THAWED")
            for group in self._groups(hierarchy):
                with contextlib.suppress(OSError):
                    (group / name).write_text(value)

    def _kill(self, pid: int) -> None:
        """SIGKILL ``pid`` if it is (still) a process of this host."""
        try:
            pidfd = os.pidfd_open(pid)
        except OSError:
            return
        try:
            paths = [line.split(":", 2)[2] for line in Path(f"/proc/{pid}/cgroup").read_text().splitlines()]
            if any(path == self.path or path.startswith(f"{self.path}/") for path in paths):
                signal.pidfd_send_signal(pidfd, signal.SIGKILL)
        except OSError:
            pass  # it died meanwhile
        finally:
            os.close(pidfd)

    def remove(self, limit: float = 5.0) -> None:
        """Remove the cgroup in every hierarchy, also where only the container runtime made it. Raises Temporary."""
        end = time.monotonic() + limit
        for hierarchy in self._all:
            for group in reversed(list(self._groups(hierarchy))):
                while True:
                    try:
                        group.rmdir()
                    except FileNotFoundError:
                        break
                    except OSError as error:
                        if error.errno not in (errno.EBUSY, errno.ENOTEMPTY) or time.monotonic() > end:
                            raise Temporary(f"cgroup {group} cannot be removed: {error.strerror}") from error
                        time.sleep(0.005)  # the last process is on its way out
                    else:
                        break

    def exists(self) -> bool:
        """True while any hierarchy has it."""
        return any(self._below(hierarchy).exists() for hierarchy in self._all)
