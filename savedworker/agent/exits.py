"""How the worker ended, from what the shim saw: a plain function, so that every rule is a table in a test."""

from __future__ import annotations

import os
import signal
from dataclasses import dataclass

from savedworker.agent.shim_client import WorkerExit
from savedworker.model.record import Reason

_SHELL_SIGKILL = 128 + signal.SIGKILL


@dataclass(frozen=True)
class Ending:
    """The user's own process: exit code, signal, and the reason if it failed. ``exit_code`` is 128+n for signal n."""

    exit_code: int
    signal: int | None
    reason: Reason | None
    detail: str


def ending(end: WorkerExit) -> Ending:
    """What to report. Init's report tells exit from signal; without one, init itself was killed."""
    what, _, number = end.report.partition(" ")
    code, killed_by = 0, None
    if what == "exit" and number.isdigit():
        code = int(number)
    elif what == "signal" and number.isdigit():
        killed_by = int(number)
    elif os.WIFSIGNALED(end.wait_status):
        killed_by = os.WTERMSIG(end.wait_status)
    else:
        code = os.WEXITSTATUS(end.wait_status)
        if code == 0:
            # pid 1 ended well without saying how the command did: not a success that anybody saw.
            return Ending(255, None, Reason.INTERNAL, "the worker's init ended without a report")
    if killed_by is not None:
        code = 128 + killed_by
    if code == 0:
        return Ending(0, None, None, "")
    if end.oom_kills and (killed_by == signal.SIGKILL or code == _SHELL_SIGKILL):
        return Ending(code, killed_by, Reason.OOM, "the kernel killed a process at the worker's memory limit")
    if killed_by is not None:
        name = signal.Signals(killed_by).name if killed_by in set(signal.Signals) else str(killed_by)
        return Ending(code, killed_by, Reason.SIGNAL, f"killed by {name}")
    note = "" if not end.oom_kills else f"; {end.oom_kills} of its processes were killed at the memory limit"
    return Ending(code, None, Reason.EXIT, f"exit code {code}{note}")
