"""Exit statuses: what scripts and engines decide by (ARCHITECTURE, section 8)."""

from __future__ import annotations

from savedworker.model.errors import Refused
from savedworker.model.record import Reason, State, WorkerRecord

OTHER = 1
BAD_ARGUMENTS = 2
TIMED_OUT = 124
OTHER_OF_RUN = 125


class BadArgument(Refused):
    """An argument or environment variable is wrong: exit status 2."""

    code = "bad_argument"


def exit_status(record: WorkerRecord) -> int:
    """The exit status of ``run`` and ``wait`` for a worker that has ended: its own code, 128+n for signal n, else 125."""
    if record.state is State.SUCCEEDED:
        return 0
    if record.reason is None or not record.reason.by_user_process:
        return OTHER_OF_RUN
    if record.signal:
        return 128 + record.signal
    if record.exit_code:
        return record.exit_code
    return 137 if record.reason is Reason.OOM else OTHER_OF_RUN
