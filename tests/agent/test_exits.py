"""How the worker's end is told: a table."""

from __future__ import annotations

import pytest

from savedworker.agent.exits import Ending, ending
from savedworker.agent.shim_client import WorkerExit
from savedworker.model.record import Reason

KILLED = 9  # wait status of a process that SIGKILL ended


@pytest.mark.parametrize(
    ("status", "report", "oom_kills", "code", "signal", "reason"),
    [
        (0, "exit 0", 0, 0, None, None),
        (3 << 8, "exit 3", 0, 3, None, Reason.EXIT),
        (
            137 << 8,
            "exit 137",
            0,
            137,
            None,
            Reason.EXIT,
        ),  # a plain exit that looks like a signal stays an exit
        (137 << 8, "signal 9", 0, 137, 9, Reason.SIGNAL),
        (139 << 8, "signal 11", 0, 139, 11, Reason.SIGNAL),
        (143 << 8, "signal 15", 0, 143, 15, Reason.SIGNAL),
        (137 << 8, "signal 9", 1, 137, 9, Reason.OOM),
        (137 << 8, "exit 137", 2, 137, None, Reason.OOM),  # a shell whose child the kernel killed
        (1 << 8, "exit 1", 1, 1, None, Reason.EXIT),  # the program caught it and says so itself
        (0, "exit 0", 1, 0, None, None),  # a killed child that the program could do without
        (KILLED, "", 0, 137, 9, Reason.SIGNAL),
        (KILLED, "", 1, 137, 9, Reason.OOM),
        (0, "", 0, 255, None, Reason.INTERNAL),  # nobody saw the command succeed
        (0, "exit x", 0, 255, None, Reason.INTERNAL),
    ],
)
def test_the_end_of_the_users_process_is_told_exactly(
    status: int, report: str, oom_kills: int, code: int, signal: int | None, reason: Reason | None
) -> None:
    end = ending(WorkerExit(status, report, oom_kills))
    assert (end.exit_code, end.signal, end.reason) == (code, signal, reason)
    assert bool(end.detail) == (reason is not None)


def test_only_exit_status_zero_of_the_users_process_is_a_success() -> None:
    assert ending(WorkerExit(0, "exit 0", 0)) == Ending(0, None, None, "")
