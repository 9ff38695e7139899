"""Launches and incarnations from which nothing came: how many in a row, and which of them a record may forget."""

from __future__ import annotations

from savedworker.model.record import Incarnation, Launch, WorkerRecord

LAUNCHES_KEPT = 100
"""Launches in a record beyond which old ones that came to nothing are forgotten."""
ROW_KEPT = 16
"""So many of the newest fruitless launches are never forgotten: back-off and limits are counted from them."""


def fruitless(record: WorkerRecord) -> list[Launch]:
    """The launches since the worker last executed from which nothing came, newest first.

    That is: no instance could be had, it did not fit, it ended before its agent won the lease, or its incarnation ended
    before the worker executed. A launch that may still come to something, or was not needed, begins a new row. A spare that nobody
    came to need says nothing: the worker did not wait for it.
    """
    by_launch = {x.launch: x for x in record.incarnations}
    holder = record.lease.launch if record.lease and record.lease_held else None
    row: list[Launch] = []
    for launch in reversed(record.launches):
        incarnation = by_launch.get(launch.id)
        if incarnation is not None:
            if incarnation.started_at:
                break
            if launch.id == holder:
                continue  # not known yet; what was before it still counts
        elif launch.spare_of is not None:
            continue
        elif launch.state in ("requested", "accepted") or launch.outcome == "surplus":
            break
        row.append(launch)
    return row


def boots(record: WorkerRecord) -> list[Launch]:
    """Those of ``fruitless`` whose instance had nothing to restore and yet never executed the worker, newest first.

    Attempts at a restore are counted on their checkpoints instead (``failed_restores``), so that the older checkpoint
    and then the policy get their turn.
    """
    by_launch = {x.launch: x for x in record.incarnations}

    def failed(launch: Launch) -> bool:
        incarnation = by_launch.get(launch.id)
        if incarnation is not None:
            return incarnation.restore_from is None
        return launch.outcome in ("failed", "gone")

    return [x for x in fruitless(record) if failed(x)]


def spares(record: WorkerRecord, notice: str) -> list[Launch]:
    """The launches that were made at the notice without a deadline of that id, oldest first."""
    return [x for x in record.launches if x.spare_of == notice]


def missed_restore(incarnation: Incarnation) -> str | None:
    """The checkpoint to blame when ``incarnation`` is lost now: it was to be restored, and nothing was heard of that."""
    if incarnation.started_at is None and incarnation.restores_failed == 0:
        return incarnation.restore_from
    return None


def remembered(record: WorkerRecord) -> tuple[Launch, ...]:
    """The launches worth keeping: all but the oldest ended ones from which nothing came, once there are many.

    Launches that had an incarnation stay, and of the present row the newest and the first of each kind: what is counted or
    timed from them does not change.
    """
    surplus = len(record.launches) - LAUNCHES_KEPT
    if surplus <= 0:
        return record.launches
    over = tuple(x for x in record.launches if x.state == "ended")
    row = fruitless(record.model_copy(update={"launches": over}))
    kept = {x.id for x in row[:ROW_KEPT]} | {x.launch for x in record.incarnations}
    kept |= set({x.outcome: x.id for x in row}.values())  # the last assignment is the oldest of its kind
    kept |= {x.id for x in spares(record, record.notice.id)} if record.notice else set()
    forgotten = {x.id for x in [x for x in over if x.id not in kept][:surplus]}
    return tuple(x for x in record.launches if x.id not in forgotten)
