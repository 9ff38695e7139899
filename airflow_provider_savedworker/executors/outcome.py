"""What the executor does about one task: plain functions of what the worker's record and Airflow's database say."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from savedworker.model.record import State, WorkerRecord

WAITS = frozenset({"deferred", "up_for_reschedule", "awaiting_input"})
"""Conclusions after which the task instance is queued again under the same key: no event of the executor must meet it then."""
RUNS = frozenset({"queued", "running", "restarting"})
"""States in which Airflow still waits for the executor."""
STORE_PATIENCE = 30 * 60.0
"""Seconds for which a task is kept alive whose worker cannot be looked at, because the store is away."""


ON_KILL = 20.0
"""Seconds that a running task has to end by itself, beside its supervisor's heartbeat interval: by the answer to a heartbeat it hears that
Airflow does not wait for it any more, and Airflow then gives it five seconds for its ``on_kill``."""


@dataclass(frozen=True)
class Row:
    """The task instance in Airflow's database. ``heard``: seconds since its last heartbeat, None before the first."""

    state: str | None
    external_id: str | None
    heard: float | None


@dataclass(frozen=True)
class Seen:
    """One worker as the executor last saw it. Durations in seconds, on its own clock."""

    record: WorkerRecord
    age: float = 0.0
    """Since the record was read."""
    lease_silent: float = 0.0
    """Since the lease last changed."""
    unheard: bool = False
    """The relay said just now that the task lives and the API server takes no heartbeats."""
    delivered: bool = False
    """The executor has passed on what the worker concluded, and Airflow took or refused it."""
    dropped: bool = False
    """The executor has cancelled the worker."""


End = Literal["success", "failed", "silent"]
"""How the executor ends a task: with an event, or without one."""


def over(record: WorkerRecord) -> bool:
    """The worker has ended, and nothing of it executes any more."""
    return record.state.terminal and not record.lease_held


def unheard_of(seen: Seen, row: Row | None, external_id: str) -> bool:
    """Whether Airflow has not heard what the worker concluded: it may have died in between, or had no answer but errors.

    What Airflow has heard is never passed on: the same task instance may run again, after a deferral that was over at once.
    """
    told = seen.record.concluded is not None and over(seen.record)
    return told and not seen.delivered and _still_runs(row, external_id)


def _still_runs(row: Row | None, external_id: str) -> bool:
    """Whether to Airflow the task instance runs, and as it was queued for this worker."""
    if row is None or row.state != "running":
        return False
    return not _queued_anew(row, external_id)


def ending(seen: Seen, row: Row | None, external_id: str) -> End | None:
    """How to end the task for Airflow; None while it goes on. ``row`` is None when the task instance is gone (cleared)."""
    record = seen.record
    if not over(record) or unheard_of(seen, row, external_id):
        return None
    if record.concluded is not None:
        if _still_runs(row, external_id):
            return "failed"  # it was delivered, and Airflow refused it
        return "silent" if record.concluded.outcome in WAITS else "success"
    if row is None or row.state == "restarting" or seen.dropped:
        return "success"  # RESTARTING and this event: the scheduler queues a cleared task again
    return "failed" if row.state in RUNS and not _queued_anew(row, external_id) else "silent"


def _queued_anew(row: Row, external_id: str) -> bool:
    return bool(row.external_id and external_id and row.external_id != external_id)


def unwanted(seen: Seen, row: Row | None, external_id: str) -> str:
    """Why Airflow does not wait for this worker any more; empty if it does, or may."""
    if seen.record.state.terminal or seen.record.concluded is not None or seen.dropped:
        return ""
    if row is None:
        return "the task instance was cleared or deleted"
    if row.state not in RUNS:
        return f"the task instance is {row.state or 'cleared'}"
    if row.state == "restarting":
        return "the task instance was cleared"
    if _queued_anew(row, external_id):
        return "the task instance was queued anew"
    return ""


def ends_itself(record: WorkerRecord) -> bool:
    """Whether a worker that Airflow does not wait for any more can hear of it from Airflow, and end as its task wants to."""
    begun = record.incarnation is not None and record.incarnation.started_at is not None
    return record.state is State.RUNNING and record.lease_held and begun and record.notice is None


def keeps_alive(seen: Seen, term: float) -> bool:
    """Whether the executor sends the task's heartbeat: it cannot do so itself, and its worker is not lost.

    The time is bounded by the worker's own limits: what ends it (no capacity, its budget) ends this too.
    """
    record = seen.record
    if record.state.terminal:
        return record.concluded is not None and not seen.delivered
    if seen.age > 60.0:
        return seen.age < STORE_PATIENCE
    if record.concluded is not None:
        return True
    if record.incarnation is None or not record.lease_held or record.incarnation.started_at is None:
        return True
    if record.state is State.CHECKPOINTING or record.notice is not None:
        return True
    return seen.unheard or seen.lease_silent > term / 2
