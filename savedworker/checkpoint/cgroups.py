"""One cgroup path, on version 1 hierarchies or version 2: freeze, thaw, kill, usage, out-of-memory kills.

Used by the shim too, so standard library only. Version 2 is unproven: the machines this was built on have no
version 2 controllers.
"""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

ROOT = Path("/sys/fs/cgroup")


def unified() -> bool:
    """True when the controllers are on the version 2 hierarchy."""
    return (ROOT / "cgroup.controllers").exists()


class Cgroup:
    """The cgroup ``path`` (like ``/savedworker/host/worker``) in every hierarchy."""

    def __init__(self, path: str) -> None:
        self.path = "/" + path.strip("/")
        self._unified = unified()

    def _folder(self, controller: str) -> Path:
        return Path(f"{ROOT}{self.path}") if self._unified else Path(f"{ROOT}/{controller}{self.path}")

    def pids(self) -> list[int]:
        """Every process in the cgroup and those below it."""
        found = []
        top = self._folder("freezer")
        for folder, _, _ in os.walk(top):
            try:
                found += [int(line) for line in Path(folder, "cgroup.procs").read_text().split()]
            except OSError:
                continue  # removed meanwhile
        return found

    def freeze(self) -> None:
        """Stop every process. Returns at once; see ``frozen``."""
        self._write_freeze(True)

    def thaw(self) -> None:
        """Let every process go on."""
        self._write_freeze(False)

    def _write_freeze(self, on: bool) -> None:
        try:
            if self._unified:
                (self._folder("") / "cgroup.freeze").write_text("1" if on else "0")
            else:
                (self._folder("freezer") / "freezer.state").write_text("FROZEN" if on else "THAWED")
        except FileNotFoundError:
            return  # no such cgroup: nothing runs

    def frozen(self) -> bool:
        """True when all processes are stopped, or there are none."""
        try:
            if self._unified:
                return "frozen 1" in (self._folder("") / "cgroup.events").read_text()
            return (self._folder("freezer") / "freezer.state").read_text().strip() == "FROZEN"
        except FileNotFoundError:
            return True

    def freezing(self) -> bool:
        """True when a freeze was asked for, complete or not."""
        try:
            if self._unified:
                return (self._folder("") / "cgroup.freeze").read_text().strip() == "1"
            return (self._folder("freezer") / "freezer.state").read_text().strip() != "THAWED"
        except FileNotFoundError:
            return False

    def kill(self, timeout: float = 10.0) -> bool:
        """SIGKILL every process until none is left; True when that was reached within ``timeout`` seconds."""
        until = time.monotonic() + timeout
        while True:
            pids = self.pids()
            if not pids:
                return True
            for pid in pids:
                try:
                    os.kill(pid, signal.SIGKILL)
                except ProcessLookupError:
                    continue
            self.thaw()  # a frozen process dies only when thawed (version 1)
            if time.monotonic() > until:
                return False
            time.sleep(0.01)

    def oom_kills(self) -> int:
        """Processes that the kernel killed here for lack of memory."""
        file = self._folder("memory") / ("memory.events" if self._unified else "memory.oom_control")
        try:
            words = dict(line.split() for line in file.read_text().splitlines())
        except (OSError, ValueError):
            return 0
        return int(words.get("oom_kill", 0))

    def memory(self) -> int:
        """Bytes of anonymous and shared memory now: about the size of a memory image."""
        words = self._memory_stat()
        return words.get("anon" if self._unified else "total_rss", 0) + _shared(words)

    def shared_memory(self) -> int:
        """Bytes of it that are shared."""
        return _shared(self._memory_stat())

    def _memory_stat(self) -> dict[str, int]:
        try:
            lines = (self._folder("memory") / "memory.stat").read_text().splitlines()
            return {name: int(value) for name, value in map(str.split, lines)}
        except (OSError, ValueError):
            return {}

    def cpu_seconds(self) -> float:
        """CPU time that everything in it ever used, in seconds."""
        try:
            if self._unified:
                words = dict(x.split() for x in (self._folder("") / "cpu.stat").read_text().splitlines())
                return int(words["usage_usec"]) / 1e6
            return int((self._folder("cpuacct") / "cpuacct.usage").read_text()) / 1e9
        except (OSError, KeyError, ValueError):
            return 0.0

    def remove(self) -> None:
        """Delete the (empty) cgroup and those below it in every hierarchy."""
        tops = [Path(f"{ROOT}{self.path}")] if self._unified else [h / self.path[1:] for h in ROOT.iterdir()]
        for top in tops:
            for folder, _, _ in os.walk(top, topdown=False):
                try:
                    os.rmdir(folder)
                except OSError:
                    continue


def _shared(words: dict[str, int]) -> int:
    return words.get("total_shmem", words.get("shmem", 0))
