"""apply(record, event): the only way in which a record changes.

An event that does not apply (from an incarnation that lost the lease, after the end, out of order) leaves the record
exactly as it was; the caller sees that by comparing.
"""

from __future__ import annotations

from collections.abc import Callable
from datetime import datetime, timedelta
from typing import Any

from savedworker.model import attempts
from savedworker.model import events as ev
from savedworker.model.manifest import order
from savedworker.model.record import (
    ActiveNotice,
    Cancel,
    CheckpointEntry,
    Conclusion,
    DamageSeen,
    EndReason,
    EventSummary,
    Incarnation,
    Launch,
    Lease,
    Reason,
    State,
    WorkerRecord,
)
from savedworker.model.units import format_duration, format_size

RECENT_EVENTS = 32
AFTER_RESTORE_SECONDS = 60.0
"""A failure this soon after a restore is marked ``after_restore``."""
PROGRESS_SECONDS = 10.0
"""A worker that ran this long after a restore (or committed a checkpoint) has progressed: the restore was good."""
_END_REASONS: dict[State, EndReason] = {
    State.SUCCEEDED: "finished",
    State.FAILED: "failed",
    State.CANCELLED: "cancelled",
}
"""How an incarnation that was still there ended with its worker."""


def apply(record: WorkerRecord, event: ev.Event) -> WorkerRecord:
    """The record after ``event``, or ``record`` itself when the event changes nothing."""
    if isinstance(event, ev._Fenced) and not _holds(record, event):
        return record
    changed = _RULES[type(event)](record, event)
    if changed is record or isinstance(event, ev.LeaseRenewed | ev.EngineHeard):
        return changed
    line = summary(record.events + 1, len(changed.incarnations), event)
    return changed.model_copy(
        update={"events": line.number, "recent": (*record.recent, line)[-RECENT_EVENTS:]}
    )


def summary(number: int, incarnation: int, event: ev.Event) -> EventSummary:
    """The line of history for ``event``."""
    return EventSummary(
        number=number,
        incarnation=incarnation,
        at=event.at,
        event=event.event if isinstance(event, ev.Noted) else event.kind,
        seconds=getattr(event, "seconds", None),
        detail=_describe(event),
    )


def _holds(record: WorkerRecord, event: ev._Fenced) -> bool:
    lease = record.lease
    return (
        lease is not None
        and not lease.released
        and (lease.incarnation, lease.holder) == (event.incarnation, event.holder)
    )


def _with(record: WorkerRecord, **update: Any) -> WorkerRecord:
    return record.model_copy(update=update)


def _current(record: WorkerRecord, **update: Any) -> tuple[Incarnation, ...]:
    return (*record.incarnations[:-1], record.incarnations[-1].model_copy(update=update))


def _launch(record: WorkerRecord, launch: str, **update: Any) -> tuple[Launch, ...]:
    return tuple(x.model_copy(update=update) if x.id == launch else x for x in record.launches)


def _used(record: WorkerRecord, launch: str) -> bool:
    return any(x.launch == launch for x in record.incarnations)


def _ran(record: WorkerRecord) -> bool:
    return any(x.started_at for x in record.incarnations)


def _close(
    record: WorkerRecord, at: datetime, reason: EndReason, stopped_at: datetime | None = None
) -> WorkerRecord:
    """End the present incarnation and release its lease."""
    lease, current = record.lease, record.incarnation
    if lease is None or current is None:
        return record
    if stopped_at is None:
        stopped_at = _at_the_latest(record, lease, current, at) if reason == "no_notice" else at
    closed = _with(
        record,
        lease=lease.model_copy(update={"released": True}),
        incarnations=_current(record, ended_at=at, end_reason=reason, stopped_at=stopped_at),
        notice=None,
        checkpoint_under_way=None,
        protected=False,
        unprotected_reasons=("it runs on no instance at present",),
    )
    blamed = attempts.missed_restore(current) if reason in ("no_notice", "failed") else None
    return _blame(closed, blamed) if blamed and not record.state.terminal else closed


def _close_and_move(record: WorkerRecord, at: datetime, reason: EndReason) -> WorkerRecord:
    """End the present incarnation; a worker that has not ended goes on elsewhere."""
    if record.state.terminal:
        return _close(record, at, _END_REASONS[record.state])
    return _with(_close(record, at, reason), state=State.MIGRATING if _ran(record) else State.PENDING)


def _at_the_latest(record: WorkerRecord, lease: Lease, current: Incarnation, at: datetime) -> datetime:
    """Until when, on the holder's clock, the worker can have executed there, its end having been noticed ``at``.

    Not before the last sign of it, and not longer than the lease that it had then: its shim froze it at the end of that.
    """
    frozen = (c.frozen_at for c in record.checkpoints if order(c.number)[0] == current.number)
    seen = max(filter(None, (lease.renewed_at, current.started_at, *frozen)))
    return min(max(seen, at), seen + timedelta(seconds=lease.term))


def _count_loss(record: WorkerRecord, restored: str | None) -> tuple[Incarnation, ...]:
    """The incarnations with what each of them lost, now that the newest one goes on from ``restored`` (None: nothing)."""
    frozen = {c.number: c.frozen_at for c in record.checkpoints}
    source = order(restored)[0] if restored else 0
    counted = []
    for past in record.incarnations[:-1]:
        if past.started_at and past.stopped_at and past.number >= source:
            kept_until = (
                frozen.get(restored or "", past.started_at) if past.number == source else past.started_at
            )
            lost = max(0.0, (past.stopped_at - kept_until).total_seconds())
            past = past.model_copy(update={"lost_seconds": max(lost, past.lost_seconds)})
        counted.append(past)
    return (*counted, record.incarnations[-1])


def _runs(record: WorkerRecord, at: datetime, restored: str | None) -> WorkerRecord:
    """The newest incarnation executes the worker from now on."""
    ran = [x for x in record.incarnations[:-1] if x.started_at]
    away = max(0.0, (at - ran[-1].stopped_at).total_seconds()) if ran and ran[-1].stopped_at else 0.0
    record = _with(record, incarnations=_count_loss(record, restored))
    record = _contradicted(record, restored) if restored else record
    return _with(
        record,
        state=State.RUNNING,
        incarnations=_current(record, started_at=at, away_seconds=away, restored_from=restored),
        migrations=record.migrations + (1 if restored else 0),
        cold_starts=record.cold_starts + (1 if ran and not restored else 0),
        protected=False,
        unprotected_reasons=("not checked yet on this instance",),
    )


def _progressed(record: WorkerRecord) -> WorkerRecord:
    """The worker came on since it began here: the checkpoint that it came from is good."""
    current = record.incarnation
    if current is None or current.progressed:
        return record
    entries = tuple(
        c.model_copy(update={"failed_restores": 0}) if c.number == current.restored_from else c
        for c in record.checkpoints
    )
    return _with(record, incarnations=_current(record, progressed=True), checkpoints=entries)


def _end(
    record: WorkerRecord, at: datetime, state: State, reason: Reason | None, **update: Any
) -> WorkerRecord:
    return _with(
        record,
        state=state,
        reason=reason,
        ended_at=at,
        notice=None,
        protected=False,
        unprotected_reasons=("it has ended",),
        **update,
    )


def _launch_requested(r: WorkerRecord, e: ev.LaunchRequested) -> WorkerRecord:
    if r.state.terminal or r.launch(e.launch):
        return r
    new = Launch(id=e.launch, requested_at=e.at, avoid=e.avoid, choice=e.choice, spare_of=e.spare_of)
    return _with(r, launches=(*r.launches, new))


def _launch_accepted(r: WorkerRecord, e: ev.LaunchAccepted) -> WorkerRecord:
    known = r.launch(e.launch)
    if known is None or known.state != "requested":
        return r
    place = {"instance": e.instance, "zone": e.zone, "instance_type": e.instance_type}
    return _with(r, launches=_launch(r, e.launch, state="accepted", **place))


def _launch_ending(r: WorkerRecord, e: ev.LaunchEnding) -> WorkerRecord:
    known = r.launch(e.launch)
    if known is None or known.state in ("ending", "ended") or _used(r, e.launch):
        return r  # in the meantime its agent may have won the lease
    return _with(r, launches=_launch(r, e.launch, state="ending", outcome=e.outcome, detail=e.detail))


def _launch_ended(r: WorkerRecord, e: ev.LaunchEnded) -> WorkerRecord:
    known = r.launch(e.launch)
    if known is None or known.state == "ended":
        return r
    if r.lease_held and r.lease and r.lease.launch == e.launch:
        return r  # an instance is not forgotten while the worker may execute on it: first the lease, then the launch
    outcome = "used" if _used(r, e.launch) else known.outcome or e.outcome
    detail = known.detail or e.detail
    r = _with(r, launches=_launch(r, e.launch, state="ended", outcome=outcome, detail=detail))
    return _with(r, launches=attempts.remembered(r))


def _lease_taken(r: WorkerRecord, e: ev.LeaseTaken) -> WorkerRecord:
    known = r.launch(e.launch)
    if r.state.terminal or r.concluded or e.incarnation != len(r.incarnations) + 1:
        return r
    if known is None or known.state in ("ending", "ended") or _used(r, e.launch):
        return r
    if r.lease_held:
        r = _close(r, e.at, "no_notice")
    new = Incarnation(
        number=e.incarnation,
        launch=e.launch,
        instance=e.instance,
        zone=e.zone,
        taken_at=e.at,
        restore_from=e.restore_from,
    )
    # To the engines a worker that has run stays running: only the first start is "starting".
    from_nothing = State.MIGRATING if _ran(r) else State.STARTING
    return _with(
        r,
        state=State.RESTORING if e.restore_from else from_nothing,
        lease=Lease(
            incarnation=e.incarnation, holder=e.holder, launch=e.launch, term=e.term, renewed_at=e.at
        ),
        incarnations=(*r.incarnations, new),
        launches=_launch(
            r,
            e.launch,
            state="accepted",
            instance=e.instance,
            zone=e.zone,
            instance_type=e.instance_type or known.instance_type,
        ),
        notice=None,
        protected=False,
        unprotected_reasons=("not running yet on this instance",),
    )


def _lease_renewed(r: WorkerRecord, e: ev.LeaseRenewed) -> WorkerRecord:
    lease, current = r.lease, r.incarnation
    if lease is None or current is None:
        return r
    r = _with(r, lease=lease.model_copy(update={"renewal": lease.renewal + 1, "renewed_at": e.at}))
    ran = (e.at - current.started_at).total_seconds() if current.started_at else 0.0
    return _progressed(r) if ran >= PROGRESS_SECONDS and not r.state.terminal else r


def _started(r: WorkerRecord, e: ev.Started) -> WorkerRecord:
    return _runs(r, e.at, None) if _beginning(r) else r


def _restored(r: WorkerRecord, e: ev.Restored) -> WorkerRecord:
    if not _beginning(r) or not any(c.number == e.number for c in r.checkpoints):
        return r
    return _blame(_runs(r, e.at, e.number), e.number)


def _beginning(r: WorkerRecord) -> bool:
    """True while the present incarnation has not executed the worker yet."""
    return r.incarnation is not None and not r.incarnation.started_at and not r.state.terminal


def _entry(record: WorkerRecord, number: str, update: Callable[[CheckpointEntry], Any]) -> WorkerRecord:
    return _with(
        record,
        checkpoints=tuple(
            c.model_copy(update=update(c)) if c.number == number else c for c in record.checkpoints
        ),
    )


def _blame(record: WorkerRecord, number: str) -> WorkerRecord:
    """Count a restore against a checkpoint; progress takes it back."""
    return _entry(record, number, lambda c: {"failed_restores": c.failed_restores + 1})


def _damaged(record: WorkerRecord, number: str, by: Incarnation, detail: str) -> WorkerRecord:
    """One instance has read checkpoint ``number`` and found it damaged. When another one had before, it cannot be used.

    The first word counts as no failed restore, so that there is a second one. The same instance's word, in a later incarnation, does:
    where no other can be had, that comes to an end too.
    """
    seen = DamageSeen(incarnation=by.number, instance=by.instance, detail=detail)

    def told(entry: CheckpointEntry) -> dict[str, Any]:
        first = entry.damage_seen
        if entry.unusable is not None or (first is not None and first.incarnation == by.number):
            return {}
        if first is None:
            return {"damage_seen": seen}
        failed = entry.failed_restores + 1
        if first.instance == by.instance:
            return {"damage_seen": seen, "failed_restores": failed}
        return {"unusable": detail, "failed_restores": failed}

    return _entry(record, number, told)


def _contradicted(record: WorkerRecord, number: str) -> WorkerRecord:
    """Checkpoint ``number`` was restored: an instance that had found it damaged is not believed in anything that it said alone."""
    wrong = next(
        (c.damage_seen.instance for c in record.checkpoints if c.number == number and c.damage_seen), None
    )
    if wrong is None:
        return record
    entries = tuple(
        c.model_copy(update={"damage_seen": None})
        if c.unusable is None and c.damage_seen and c.damage_seen.instance == wrong
        else c
        for c in record.checkpoints
    )
    return _with(record, checkpoints=entries)


def _restore_failed(r: WorkerRecord, e: ev.RestoreFailed) -> WorkerRecord:
    current = r.incarnation
    if current is None or not _beginning(r):
        return r
    r = _with(r, incarnations=_current(r, restores_failed=current.restores_failed + 1))
    return _damaged(r, e.number, current, e.detail) if e.unusable else _blame(r, e.number)


def _notice_received(r: WorkerRecord, e: ev.NoticeReceived) -> WorkerRecord:
    if r.state.terminal:
        return r
    standing = r.notice
    if standing is not None:
        gains_deadline = standing.seconds_left is None and e.seconds_left is not None
        if standing.id == e.id and not gains_deadline:
            return r
        if standing.seconds_left is not None and e.seconds_left is None:
            return _with(r)  # a rebalance after an interruption takes nothing back; the history has it
    new = ActiveNotice(id=e.id, source=e.source, received_at=e.at, seconds_left=e.seconds_left)
    return _with(r, notice=new)


def _notice_withdrawn(r: WorkerRecord, e: ev.NoticeWithdrawn) -> WorkerRecord:
    if r.state.terminal or r.notice is None or r.notice.id != e.id:
        return r
    state = State.RUNNING if r.state is State.CHECKPOINTING else r.state
    return _with(r, notice=None, state=state)


def _checkpoint_started(r: WorkerRecord, e: ev.CheckpointStarted) -> WorkerRecord:
    if r.state is not State.RUNNING or r.concluded:
        return r
    return _with(r, state=State.CHECKPOINTING, checkpoint_under_way=e.number)


def _checkpoint_committed(r: WorkerRecord, e: ev.CheckpointCommitted) -> WorkerRecord:
    if r.state.terminal or any(c.number == e.number for c in r.checkpoints):
        return r
    if r.incarnation is not None and _beginning(r):
        # Its agent died between the start and saying so. What is checkpointed has run.
        r = _runs(r, e.frozen_at, None if r.incarnation.restores_failed else r.incarnation.restore_from)
    entry = CheckpointEntry(
        number=e.number,
        frozen_at=e.frozen_at,
        committed_at=e.at,
        bytes_image=e.bytes_image,
        bytes_uploaded=e.bytes_uploaded,
        digest=e.digest,
    )
    r = _progressed(r)
    return _with(
        r,
        state=r.state if e.cause in ("notice", "orphaned") else State.RUNNING,
        checkpoint_under_way=None,
        checkpoints=(*(c for c in r.checkpoints if c.number not in e.dropped), entry),
        checkpoint_answered=max(r.checkpoint_answered, e.answered),
        rates=e.rates or r.rates,
    )


def _checkpoint_failed(r: WorkerRecord, e: ev.CheckpointFailed) -> WorkerRecord:
    if r.state not in (State.RUNNING, State.CHECKPOINTING):
        return r
    answered = max(r.checkpoint_answered, e.answered)
    return _with(r, state=State.RUNNING, checkpoint_under_way=None, checkpoint_answered=answered)


def _protection_changed(r: WorkerRecord, e: ev.ProtectionChanged) -> WorkerRecord:
    if r.state.terminal or r.concluded or (r.unprotected_reasons == e.unprotected_reasons):
        return r
    return _with(r, protected=not e.unprotected_reasons, unprotected_reasons=e.unprotected_reasons)


def _handed_over(r: WorkerRecord, e: ev.HandedOver) -> WorkerRecord:
    if r.state.terminal:
        return _close(r, e.at, _END_REASONS[r.state])
    frozen = next((c.frozen_at for c in r.checkpoints if c.number == e.number), None)
    return _with(_close(r, e.at, e.why, frozen), state=State.MIGRATING if _ran(r) else State.PENDING)


def _yielded(r: WorkerRecord, e: ev.Yielded) -> WorkerRecord:
    return _close_and_move(r, e.at, "notice")


def _concluded(r: WorkerRecord, e: ev.Concluded) -> WorkerRecord:
    if r.state.terminal or (r.concluded is not None and r.concluded.outcome == e.outcome):
        return r
    return _with(
        r,
        concluded=Conclusion(at=e.at, outcome=e.outcome),
        protected=False,
        unprotected_reasons=("it has told its engine how it ends",),
    )


def _finished(r: WorkerRecord, e: ev.Finished) -> WorkerRecord:
    if r.state.terminal:
        return r
    if e.exit_code == 0 and e.signal is None and e.reason is None:
        return _end(r, e.at, State.SUCCEEDED, None, exit_code=0)
    own = Reason.SIGNAL if e.signal else Reason.INTERNAL if e.exit_code is None else Reason.EXIT
    reason = e.reason or own
    current = r.incarnation
    soon = bool(
        current
        and current.restored_from
        and current.started_at
        and (e.at - current.started_at).total_seconds() <= AFTER_RESTORE_SECONDS
    )
    return _end(
        r,
        e.at,
        State.FAILED,
        reason,
        exit_code=e.exit_code,
        signal=e.signal,
        detail=e.detail,
        after_restore=soon,
    )


def _lease_released(r: WorkerRecord, e: ev.LeaseReleased) -> WorkerRecord:
    if e.detail and r.lease is not None:
        r = _with(r, launches=_launch(r, r.lease.launch, detail=e.detail))
    return _close(r, e.at, e.end_reason) if r.state.terminal else _close_and_move(r, e.at, e.end_reason)


def _instance_lost(r: WorkerRecord, e: ev.InstanceLost) -> WorkerRecord:
    if not r.lease_held or r.lease is None or r.lease.incarnation != e.incarnation:
        return r
    return _close_and_move(r, e.at, "no_notice")


def _lease_expired(r: WorkerRecord, e: ev.LeaseExpired) -> WorkerRecord:
    lease = r.lease
    if lease is None or lease.released or (lease.incarnation, lease.renewal) != (e.incarnation, e.renewal):
        return r
    return _close_and_move(r, e.at, "no_notice")


def _engine_heard(r: WorkerRecord, e: ev.EngineHeard) -> WorkerRecord:
    return r if r.state.terminal or r.engine_heard_at == e.at else _with(r, engine_heard_at=e.at)


def _checkpoint_requested(r: WorkerRecord, e: ev.CheckpointRequested) -> WorkerRecord:
    return r if r.state.terminal else _with(r, checkpoint_requests=r.checkpoint_requests + 1)


def _cancel_requested(r: WorkerRecord, e: ev.CancelRequested) -> WorkerRecord:
    if r.state.terminal:
        return r
    return _end(
        r,
        e.at,
        State.CANCELLED,
        Reason.CANCELLED,
        cancel=Cancel(at=e.at, by=e.by),
        detail=f"cancelled by {e.by}",
    )


def _set_aside(r: WorkerRecord, e: ev.CheckpointsSetAside) -> WorkerRecord:
    usable = [c for c in r.checkpoints if c.unusable is None]
    if r.state.terminal or r.lease_held or not usable:
        return r  # an agent that took the lease in the meantime may be restoring one
    return _with(
        r, checkpoints=tuple(c.model_copy(update={"unusable": c.unusable or e.detail}) for c in r.checkpoints)
    )


def _gave_up(r: WorkerRecord, e: ev.GaveUp) -> WorkerRecord:
    if r.state.terminal or r.lease_held:
        return r  # nobody gives up a worker that may be executing: an agent won the lease in the meantime
    return _end(r, e.at, State.FAILED, e.reason, detail=e.detail)


def _noted(r: WorkerRecord, e: ev.Noted) -> WorkerRecord:
    return _with(r)


_RULES: dict[type[Any], Callable[[WorkerRecord, Any], WorkerRecord]] = {
    ev.LaunchRequested: _launch_requested,
    ev.LaunchAccepted: _launch_accepted,
    ev.LaunchEnding: _launch_ending,
    ev.LaunchEnded: _launch_ended,
    ev.LeaseTaken: _lease_taken,
    ev.LeaseRenewed: _lease_renewed,
    ev.Started: _started,
    ev.Restored: _restored,
    ev.RestoreFailed: _restore_failed,
    ev.NoticeReceived: _notice_received,
    ev.NoticeWithdrawn: _notice_withdrawn,
    ev.CheckpointStarted: _checkpoint_started,
    ev.CheckpointCommitted: _checkpoint_committed,
    ev.CheckpointFailed: _checkpoint_failed,
    ev.ProtectionChanged: _protection_changed,
    ev.HandedOver: _handed_over,
    ev.Yielded: _yielded,
    ev.Concluded: _concluded,
    ev.Finished: _finished,
    ev.LeaseReleased: _lease_released,
    ev.InstanceLost: _instance_lost,
    ev.LeaseExpired: _lease_expired,
    ev.EngineHeard: _engine_heard,
    ev.CheckpointRequested: _checkpoint_requested,
    ev.CancelRequested: _cancel_requested,
    ev.CheckpointsSetAside: _set_aside,
    ev.GaveUp: _gave_up,
    ev.Noted: _noted,
}


def _describe(event: Any) -> str:
    """One plain line for people."""
    detail = getattr(event, "detail", "")
    match event:
        case ev.LaunchRequested():
            text = f"launch {event.launch}" + (", a spare" if event.spare_of else "")
            text += f" of {event.choice}" if event.choice else ""
            text += f", avoiding {', '.join(event.avoid)}" if event.avoid else ""
        case ev.LaunchAccepted():
            kind = f" ({event.instance_type})" if event.instance_type else ""
            where = f" in {event.zone}" if event.zone else ""
            text = f"launch {event.launch}: instance {event.instance}{kind}{where}"
        case ev.LaunchEnding():
            text = f"launch {event.launch} is not wanted any more"
        case ev.LaunchEnded():
            text = f"launch {event.launch}: {event.outcome}"
        case ev.LeaseTaken():
            what = (
                f"restores checkpoint {event.restore_from}" if event.restore_from else "starts from nothing"
            )
            text = f"incarnation {event.incarnation} on {event.instance} {what}"
        case ev.Started():
            text = f"started from nothing: {event.why}" if event.why else "started"
        case ev.Restored():
            text = f"restored from checkpoint {event.number} in {format_duration(event.seconds)}"
        case ev.RestoreFailed():
            text = f"checkpoint {event.number} could not be restored"
            text += ", damaged as it was read here" if event.unusable else ""
        case ev.NoticeReceived():
            left = "" if event.seconds_left is None else f", {format_duration(event.seconds_left)} left"
            text = f"notice from {event.source}{left}"
        case ev.NoticeWithdrawn():
            text = "notice withdrawn"
        case ev.CheckpointStarted():
            text = f"checkpoint {event.number} ({event.cause})"
        case ev.CheckpointCommitted():
            text = (
                f"checkpoint {event.number} ({event.cause}) committed in {format_duration(event.seconds)}, "
                f"{format_size(event.bytes_image)} image, {format_size(event.bytes_uploaded)} uploaded, "
                f"frozen {format_duration(event.frozen_seconds)}"
            )
        case ev.CheckpointFailed():
            text = f"checkpoint {event.number} failed"
        case ev.ProtectionChanged():
            text = (
                "not protected: " + "; ".join(event.unprotected_reasons)
                if event.unprotected_reasons
                else "protected"
            )
        case ev.HandedOver():
            text = f"handed over at checkpoint {event.number}" if event.number else "handed over"
            text = {"notice": text, "orphaned": f"no engine looks after it: {text}"}[event.why]
        case ev.Yielded():
            text = "ended without a new checkpoint"
        case ev.Concluded():
            text = f"tells its engine: {event.outcome}"
        case ev.Finished():
            end = f"signal {event.signal}" if event.signal else f"exit code {event.exit_code}"
            told = bool(detail) and (event.reason is None or event.reason.by_user_process)
            text = "the worker's process ended" + ("" if told else f": {event.reason or end}")
        case ev.LeaseReleased():
            text = f"incarnation ended: {event.end_reason}"
        case ev.InstanceLost():
            text = f"instance of incarnation {event.incarnation} is gone"
        case ev.LeaseExpired():
            text = f"incarnation {event.incarnation} let its lease run out"
        case ev.CancelRequested():
            text = f"cancelled by {event.by}"
        case ev.GaveUp():
            text = f"gave up: {event.reason}"
        case ev.CheckpointsSetAside():
            text = "checkpoints set aside"
        case _:
            text = ""
    return ": ".join(part for part in (text, detail) if part)
