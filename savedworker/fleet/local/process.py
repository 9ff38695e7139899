"""A process named by pid and start time, so that a reused pid is never taken for the process that had it before."""

from __future__ import annotations

import os
import signal
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class ProcessId:
    """One process of this boot. ``start`` is its start time in clock ticks since boot (proc(5), field 22 of stat)."""

    pid: int
    start: int

    @classmethod
    def of(cls, pid: int) -> ProcessId | None:
        """The process that has ``pid`` now; None when there is none or only its zombie."""
        try:
            stat = Path(f"/proc/{pid}/stat").read_bytes()
        except (FileNotFoundError, ProcessLookupError):
            return None
        fields = stat[stat.rindex(b")") + 2 :].split()
        return None if fields[0] in (b"Z", b"X") else cls(pid, int(fields[19]))

    @property
    def alive(self) -> bool:
        """True while this very process executes (a stopped one does, a zombie does not)."""
        return ProcessId.of(self.pid) == self

    def kill(self) -> None:
        """SIGKILL this very process; nothing happens when it is gone."""
        try:
            pidfd = os.pidfd_open(self.pid)
        except ProcessLookupError:
            return
        try:
            if self.alive:  # checked while the pidfd pins it: no other process can be hit
                signal.pidfd_send_signal(pidfd, signal.SIGKILL)
        except ProcessLookupError:
            pass
        finally:
            os.close(pidfd)


def boot_id() -> str:
    """Changes with every start of the machine: pids and start times mean nothing across it."""
    return Path("/proc/sys/kernel/random/boot_id").read_text().strip()
