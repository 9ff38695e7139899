"""What to do next: plain functions from a record and observations to actions. They know no clock and do no I/O."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from typing import Literal

from savedworker.model import attempts, defaults
from savedworker.model import events as ev
from savedworker.model.manifest import order
from savedworker.model.placement import Choice, choose, reclaimed_places
from savedworker.model.record import CheckpointEntry, Launch, Reason, WorkerRecord
from savedworker.model.spec import WorkerSpec
from savedworker.model.transitions import apply
from savedworker.model.units import format_duration

_TRIES_HERE = 2
"""Restores of one checkpoint on one instance, which may itself be at fault."""
_HEARD = 8
"""Times within ``orphan_after`` that whoever looks after a worker says so."""
InstanceState = Literal["pending", "running", "ended", "unknown"]


@dataclass(frozen=True)
class InstanceView:
    """What a fleet says of one launch. ``outcome`` and ``detail`` explain an end, or why a pending one waits."""

    state: InstanceState
    instance: str | None = None
    zone: str | None = None
    outcome: Literal["capacity", "failed", "gone"] = "gone"
    detail: str = ""
    final: Reason | None = None
    """Set when this end is the worker's end: cancelled by a person who ended the instance, a time limit, out of memory."""


@dataclass(frozen=True)
class Observations:
    """What an observer has seen. All durations are seconds on the observer's own monotonic clock."""

    instances: Mapping[str, InstanceView] = field(default_factory=dict)
    lease_silent: float = 0.0
    """For how long the lease has not changed while it was being watched."""
    watched: float = 0.0
    """For how long the worker has been watched."""
    choices: tuple[Choice, ...] = ()
    """What its fleet offers, where that is more than one kind of thing."""
    running: Mapping[str, float] = field(default_factory=dict)
    """For how long the instance of each launch has been seen running."""


@dataclass(frozen=True)
class Record:
    """Apply this event to the record. ``only_now``: only to the very record that was looked at."""

    event: ev.Event
    only_now: bool = False


@dataclass(frozen=True)
class RequestLaunch:
    """Record a new launch, then call the fleet."""

    avoid: tuple[str, ...]
    why: str
    choice: str | None = None
    spare_of: str | None = None


@dataclass(frozen=True)
class CallFleet:
    """Ask the fleet again for a launch that is recorded and that the fleet does not know."""

    launch: Launch


@dataclass(frozen=True)
class Terminate:
    """End the instance of a launch."""

    launch: Launch
    why: str


Action = Record | RequestLaunch | CallFleet | Terminate


def lease_wait(term: float) -> float:
    """Seconds for which a taker must have seen the lease unchanged before it may take it over."""
    return term * (1 + defaults.LEASE_MARGIN)


def lease_dead(term: float) -> float:
    """Seconds of an unchanged lease after which the worker is not only frozen but killed: the shim does so a term later."""
    return 2 * lease_wait(term)


def choose_checkpoint(
    record: WorkerRecord, spec: WorkerSpec, reader: int | None = None
) -> CheckpointEntry | None:
    """The newest checkpoint worth a restore: not known bad, not tried too often without progress.

    What one instance has found damaged comes after all others, and not for that ``reader``, an incarnation, again.
    """
    usable = [
        c
        for c in record.checkpoints
        if c.unusable is None
        and c.failed_restores < spec.checkpoint.restores_without_progress
        and (c.damage_seen is None or c.damage_seen.incarnation != reader)
    ]
    return max(usable, key=lambda c: (c.sound, order(c.number)), default=None)


@dataclass(frozen=True)
class Elsewhere:
    """Another instance gets the next try; ``why``, where the history does not say so already."""

    why: str = ""


@dataclass(frozen=True)
class StartOver:
    """The worker begins from nothing. ``why`` is empty when it never had a checkpoint."""

    why: str


@dataclass(frozen=True)
class Nothing:
    """No checkpoint can be restored, and by policy the worker does not begin again from nothing."""


def next_try(
    record: WorkerRecord, spec: WorkerSpec, reader: int, tried: Sequence[str]
) -> CheckpointEntry | Elsewhere | StartOver | Nothing:
    """What the incarnation ``reader`` does to have the worker run, having ``tried`` these checkpoints in vain.

    A checkpoint that one instance alone has found damaged is not given up: when that is all that is left, another one reads it.
    """
    entry = choose_checkpoint(record, spec, reader)
    if entry is not None:
        again = bool(tried) and tried[-1] == entry.number
        return Elsewhere() if again and tried.count(entry.number) >= _TRIES_HERE else entry
    doubtful = choose_checkpoint(record, spec)
    if doubtful is not None:
        return Elsewhere(
            f"what is left is damaged as it was read here: another instance tries checkpoint {doubtful.number} again"
        )
    had = bool(tried or record.checkpoints)
    if had and not may_start_over(record, spec):
        return Nothing()
    return StartOver("no checkpoint could be restored" if had else "")


def launch_pause(record: WorkerRecord) -> float:
    """Seconds between the last launch and the next one: doubles with every launch in a row that came to nothing.

    A first instance that vanished, rather than being refused, is replaced at once.
    """
    row = attempts.fruitless(record)
    if not row or (len(row) == 1 and row[0].outcome not in ("capacity", "incompatible", "failed")):
        return 0.0
    return min(defaults.LAUNCH_RETRY * float(1 << min(len(row) - 1, 16)), defaults.LAUNCH_RETRY_MAX)


def decide(record: WorkerRecord, spec: WorkerSpec, seen: Observations, now: datetime) -> list[Action]:
    """The actions that bring the worker on. Idempotent: acting twice on the same record does no harm.

    What was learned is recorded first; what follows from it is decided on the record that says so. A launch is requested
    before anything else is done, so that it is decided by compare-and-swap on the very record that was looked at.
    """
    if record.state.terminal:
        return _wind_up(record, seen, now)
    if _since(now, record.engine_heard_at or record.created_at) >= spec.orphan_after / _HEARD:
        return [Record(ev.EngineHeard(at=now))]
    live = [
        (x, seen.instances.get(x.id, InstanceView("unknown"))) for x in record.launches if x.state != "ended"
    ]
    learned = _learned(record, spec, seen, live, now)
    if learned:
        return learned
    if record.concluded is not None and not record.lease_held:
        # Restored, it would tell its engine again, and perhaps something else.
        told = f"its instance was lost after it told its engine: {record.concluded.outcome}"
        return [Record(ev.GaveUp(at=now, reason=Reason.LOST, detail=told))]
    return _replacement(record, spec, seen, live, now) + _not_wanted(record, spec, seen, live, now)


_Live = list[tuple[Launch, InstanceView]]


def _holder(record: WorkerRecord) -> str | None:
    return record.lease.launch if record.lease and record.lease_held else None


def _needs_another(record: WorkerRecord, spec: WorkerSpec, seen: Observations) -> bool:
    """True when nothing executes the worker, or what does is about to go or has not been heard of for too long."""
    if record.concluded is not None:
        return False
    return _holder(record) is None or _leaving(record) or seen.lease_silent > lease_wait(spec.lease_term)


def _leaving(record: WorkerRecord) -> bool:
    return record.notice is not None and record.notice.seconds_left is not None


def _wants_spare(record: WorkerRecord, spec: WorkerSpec, now: datetime) -> bool:
    """True while an instance should wait beside the one that executes the worker, which was recommended to leave.

    For ``spare_for`` from its first launch on: once for each recommendation, and however long that stands.
    """
    notice = record.notice
    if notice is None or notice.seconds_left is not None or record.concluded is not None:
        return False
    if not record.lease_held or not spec.placement.spare_for:
        return False
    made = attempts.spares(record, notice.id)
    return not made or _since(now, made[0].requested_at) < spec.placement.spare_for


def _since(now: datetime, then: datetime) -> float:
    """Seconds since ``then``. Wall clocks jump: what lies far in the future counts as long ago, so that nothing hangs."""
    passed = (now - then).total_seconds()
    return passed if passed >= -defaults.LAUNCH_PATIENCE else -passed


def _learned(
    record: WorkerRecord, spec: WorkerSpec, seen: Observations, live: _Live, now: datetime
) -> list[Action]:
    """What the record does not know yet."""
    found: list[ev.Event] = []
    lease, holder = record.lease, _holder(record)
    for launch, view in live:
        if view.state == "ended":
            if lease and launch.id == holder:
                found.append(ev.InstanceLost(at=now, incarnation=lease.incarnation, detail=view.detail))
            found.append(ev.LaunchEnded(at=now, launch=launch.id, outcome=view.outcome, detail=view.detail))
            found += _final(record, launch, view, now)
        elif launch.state == "accepted" and launch.id != holder and _forgotten(launch, view, seen, now):
            detail = "its fleet does not know it any more"
            found.append(ev.LaunchEnded(at=now, launch=launch.id, outcome="gone", detail=detail))
    if not found and lease and holder and seen.lease_silent > lease_dead(spec.lease_term):
        found.append(
            ev.LeaseExpired(
                at=now,
                incarnation=lease.incarnation,
                renewal=lease.renewal,
                detail=f"not renewed for {format_duration(seen.lease_silent)}",
            )
        )
    return [Record(event) for event in found]


def _final(record: WorkerRecord, launch: Launch, view: InstanceView, now: datetime) -> list[ev.Event]:
    """The worker's end, when the fleet says that the end of this instance is meant so. Never for what we ended ourselves."""
    over = any(x.launch == launch.id and x.ended_at for x in record.incarnations)
    if view.final is None or launch.state == "ending":
        return []
    if view.final is Reason.CANCELLED:
        # Also after a hand-over: to the agent, a person who ends its instance looks like a notice.
        return [ev.CancelRequested(at=now, by=view.detail)]
    return [] if over else [ev.GaveUp(at=now, reason=view.final, detail=view.detail)]


def _forgotten(launch: Launch, view: InstanceView, seen: Observations, now: datetime) -> bool:
    """The fleet knows nothing of a launch that was requested long enough ago to be known."""
    return (
        view.state == "unknown"
        and seen.watched >= defaults.LAUNCH_RETRY
        and _since(now, launch.requested_at) >= defaults.LAUNCH_PATIENCE
    )


def _can_end(launch: Launch, view: InstanceView, seen: Observations, now: datetime) -> bool:
    """False while another controller may be about to call the fleet for this launch: what came then would be left over."""
    return view.state != "unknown" or launch.instance is not None or _forgotten(launch, view, seen, now)


def _spare(record: WorkerRecord, live: _Live) -> _Live:
    """The launches whose agents may take the lease, the most promising first."""
    had = {x.launch for x in record.incarnations}
    order_of = {"running": 0, "pending": 1, "unknown": 2}
    spare = [(x, v) for x, v in live if x.state in ("requested", "accepted") and x.id not in had]
    return sorted(spare, key=lambda pair: order_of.get(pair[1].state, 3))


def _not_wanted(
    record: WorkerRecord, spec: WorkerSpec, seen: Observations, live: _Live, now: datetime
) -> list[Action]:
    """End what is left over: first in the record, so that no agent wins the lease while its instance is being ended."""
    actions: list[Action] = []
    had = {x.launch for x in record.incarnations}
    for launch, view in live:
        over = launch.id in had and launch.id != _holder(record)
        if (over or launch.state == "ending") and _can_end(launch, view, seen, now):
            actions.append(Terminate(launch, "its incarnation has ended" if over else launch.detail))
    needed = _needs_another(record, spec, seen)
    wanted = needed or _wants_spare(record, spec, now)
    for launch, _ in _spare(record, live)[1 if wanted else 0 :]:
        why = "one is enough" if wanted else _why_not_needed(record, spec, launch)
        ending = ev.LaunchEnding(at=now, launch=launch.id, outcome="surplus", detail=f"not needed: {why}")
        # A notice that comes at this moment needs it.
        actions.append(Record(ending, only_now=True))
    return actions


def _why_not_needed(record: WorkerRecord, spec: WorkerSpec, launch: Launch) -> str:
    if launch.spare_of is None:
        return "the notice was withdrawn or the lease is held"
    if record.notice is None or record.notice.id != launch.spare_of:
        return "the recommendation to leave was withdrawn"
    return _no_notice_came(spec)


def _no_notice_came(spec: WorkerSpec) -> str:
    return f"no notice came within {format_duration(_patience(spec))} of the recommendation to leave"


def _patience(spec: WorkerSpec) -> float:
    """Seconds for which an agent waits where nothing says that it will be needed."""
    return spec.placement.spare_for or defaults.SPARE_FOR


def _replacement(
    record: WorkerRecord, spec: WorkerSpec, seen: Observations, live: _Live, now: datetime
) -> list[Action]:
    """Have exactly one launch on its way when one is needed, or may soon be."""
    needed = _needs_another(record, spec, seen)
    if not needed and not _wants_spare(record, spec, now):
        return []
    spare = _spare(record, live)
    if not spare:
        have = _launch_or_give_up if needed else _launch_spare
        return have(record, spec, seen.choices, now)
    launch, view = spare[0]
    overdue = _overdue(record, spec, seen, launch, view, now)
    if overdue is not None:
        return [Record(overdue)]
    patience_over = _since(now, launch.requested_at) >= defaults.LAUNCH_PATIENCE
    if view.state == "pending" and view.detail and patience_over and not _told(record, launch, view.detail):
        waits = ev.Noted(at=now, event="waiting", detail=f"launch {launch.id}: {view.detail}")
        return [Record(waits)]
    if launch.state == "requested" and view.state == "unknown" and seen.watched >= defaults.LAUNCH_RETRY:
        return [CallFleet(launch)]
    return []


def _overdue(
    record: WorkerRecord,
    spec: WorkerSpec,
    seen: Observations,
    launch: Launch,
    view: InstanceView,
    now: datetime,
) -> ev.LaunchEnding | None:
    """The end of a launch that takes too long: an instance that does not come, or whose agent does not begin.

    One that does not come ends sooner where the fleet has another choice that may be used now.
    """
    waited = _waited(record, [launch], now)
    if view.state == "running":
        # Not since the request: it may have waited for its instance nearly as long as that is allowed.
        booting = min(waited, seen.running.get(launch.id, 0.0))
        if record.lease_held or booting < defaults.BOOT_LIMIT:
            return None
        detail = f"its agent did not begin within {format_duration(booting)}"
        return ev.LaunchEnding(at=now, launch=launch.id, outcome="failed", detail=detail)
    detail = f"no instance within {format_duration(waited)}" + (f": {view.detail}" if view.detail else "")
    ending = ev.LaunchEnding(at=now, launch=launch.id, outcome="capacity", detail=detail)
    without = record.model_copy(update={"launches": tuple(x for x in record.launches if x.id != launch.id)})
    refused = [x for x in attempts.fruitless(without) if x.outcome == "capacity"]
    waited_in_all = _waited(record, [launch, *refused], now)
    if waited_in_all >= max(spec.placement.wait_for_capacity, defaults.LAUNCH_PATIENCE):
        return ending
    if len(seen.choices) < 2 or waited < spec.placement.wait_per_choice:
        return None
    moved_on = choose(apply(record, ending), spec.placement, seen.choices, now, waited_in_all)
    if moved_on.choice == launch.choice:
        return None  # nothing else may be used yet
    why = f" ({moved_on.why})" if moved_on.why else ""
    return ending.model_copy(update={"detail": f"{detail}; {moved_on.choice} is next{why}"})


def _told(record: WorkerRecord, launch: Launch, detail: str) -> bool:
    """Whether the history says already why ``launch`` waits."""
    return any(x.event == "waiting" and launch.id in x.detail and detail in x.detail for x in record.recent)


def _waited(record: WorkerRecord, launches: list[Launch], now: datetime) -> float:
    """Seconds since the first of ``launches`` was requested, counted from the last loss or notice: then the need arose."""
    since = min(x.requested_at for x in launches)
    last = record.incarnation
    if last is not None and last.ended_at is not None:
        since = max(since, last.ended_at)
    if record.notice is not None:
        since = max(since, record.notice.received_at)
    return (now - since).total_seconds()


def _launch_or_give_up(
    record: WorkerRecord, spec: WorkerSpec, choices: Sequence[Choice], now: datetime
) -> list[Action]:
    """Launch another instance, or give up; the latter never while an incarnation may be executing."""
    free = not record.lease_held
    over = _hopeless(record, spec, now)
    if over is not None:
        return [Record(over)] if free else []
    row = attempts.fruitless(record)
    refused = [x for x in row if x.outcome == "incompatible"]
    if (
        refused
        and free
        and choose_checkpoint(record, spec) is not None
        and _waited(record, refused, now) >= spec.checkpoint.wait_for_match
    ):
        detail = f"no matching instance in time: {refused[0].detail}"
        return [Record(ev.CheckpointsSetAside(at=now, detail=detail))]
    if row and _since(now, row[0].requested_at) < launch_pause(record):
        return []
    ran = any(x.started_at for x in record.incarnations)
    why = "first start"
    if ran:
        why = "the instance is gone" if free else "notice" if _leaving(record) else "the lease is not renewed"
    full = [x for x in row if x.outcome == "capacity"]
    waited = _waited(record, full, now) if full else 0.0
    chosen = choose(record, spec.placement, choices, now, waited)
    if chosen.why:
        why = f"{why}; {chosen.choice}: {chosen.why}"
    avoid = reclaimed_places(record, now, spec.placement.avoid_reclaimed)
    return [RequestLaunch(avoid, why, chosen.choice)]


def _launch_spare(
    record: WorkerRecord, spec: WorkerSpec, choices: Sequence[Choice], now: datetime
) -> list[Action]:
    """Launch an instance that waits, unless the worker would not be let onto it, or enough was tried."""
    assert record.notice is not None
    made = attempts.spares(record, record.notice.id)
    if len(made) >= defaults.SPARES or _budget_used_up(record, spec):
        return []
    if made and _since(now, made[-1].requested_at) < defaults.LAUNCH_RETRY_MAX:
        return []
    chosen = choose(record, spec.placement, choices, now, 0.0)
    why = f"leaving was recommended; it waits {format_duration(_patience(spec))} for a notice"
    if chosen.why:
        why = f"{why}; {chosen.choice}: {chosen.why}"
    avoid = reclaimed_places(record, now, spec.placement.avoid_reclaimed)
    return [RequestLaunch(avoid, why, chosen.choice, record.notice.id)]


def _hopeless(record: WorkerRecord, spec: WorkerSpec, now: datetime) -> ev.GaveUp | None:
    """Why no further launch is made, by budget, policy or limit."""

    def give_up(reason: Reason, detail: str) -> ev.GaveUp:
        return ev.GaveUp(at=now, reason=reason, detail=detail)

    ran = any(x.started_at for x in record.incarnations)
    if ran and _budget_used_up(record, spec):
        return give_up(
            Reason.MIGRATION_BUDGET,
            f"the instance was reclaimed and max_migrations={spec.max_migrations} is used up",
        )
    restorable = choose_checkpoint(record, spec) is not None
    # On a notice the checkpoint that will be restored is still to come.
    if _must_not_start_over(record, spec) and not (record.lease_held and _leaving(record)):
        if not record.checkpoints:
            return give_up(Reason.LOST, "the instance was lost before the first checkpoint")
        worst = record.checkpoints[-1]
        return give_up(
            Reason.CRASH_LOOP,
            f"no checkpoint can be restored (newest {worst.number}: {worst.unusable or 'too many restores without progress'})",
        )
    boots = attempts.boots(record)
    # What is saved is not given up because a permission or a setting is wrong for a minute.
    patient = restorable and all(x.instance is None for x in boots)
    waited = _waited(record, boots, now) if boots else 0.0
    if len(boots) >= defaults.BOOTS_WITHOUT_LEASE and not (
        patient and waited < spec.placement.wait_for_capacity
    ):
        return give_up(
            Reason.CRASH_LOOP if record.checkpoints and not restorable else Reason.INTERNAL,
            f"{len(boots)} instances in a row ended before the worker could start; "
            f"the last: {boots[0].detail or 'no reason given'}",
        )
    row = attempts.fruitless(record)
    refused = [x for x in row if x.outcome == "incompatible"]
    if (
        refused
        and restorable
        and spec.checkpoint.when_unrestorable == "fail"
        and _waited(record, refused, now) >= spec.checkpoint.wait_for_match
    ):
        return give_up(Reason.INCOMPATIBLE, refused[0].detail)
    full = [x for x in row if x.outcome == "capacity"]
    if full and full[0] is row[0] and _waited(record, full, now) >= spec.placement.wait_for_capacity:
        return give_up(Reason.NO_CAPACITY, full[0].detail or "no instance could be had")
    return None


def _budget_used_up(record: WorkerRecord, spec: WorkerSpec) -> bool:
    return spec.max_migrations is not None and record.moves >= spec.max_migrations


def _must_not_start_over(record: WorkerRecord, spec: WorkerSpec) -> bool:
    """The worker has run, nothing of that can be restored, and by policy it does not begin again from nothing."""
    ran = any(x.started_at for x in record.incarnations)
    return ran and not may_start_over(record, spec) and choose_checkpoint(record, spec) is None


def may_start_over(record: WorkerRecord, spec: WorkerSpec) -> bool:
    """Whether policy and budget let a worker that has run begin again from nothing."""
    most = spec.checkpoint.max_cold_starts
    return spec.checkpoint.when_unrestorable != "fail" and (most is None or record.cold_starts < most)


def _wind_up(record: WorkerRecord, seen: Observations, now: datetime) -> list[Action]:
    """After the end: every instance goes, once its agent has let go of the lease or had time for it."""
    actions: list[Action] = []
    lease, holder = record.lease, _holder(record)
    over = abs((now - record.ended_at).total_seconds()) if record.ended_at else 0.0
    for launch in record.launches:
        view = seen.instances.get(launch.id, InstanceView("unknown"))
        ended = launch.state == "ended" or view.state == "ended"
        if ended and lease and launch.id == holder:
            actions.append(Record(ev.InstanceLost(at=now, incarnation=lease.incarnation, detail=view.detail)))
        if launch.state == "ended":
            continue
        if view.state == "ended":
            actions.append(
                Record(ev.LaunchEnded(at=now, launch=launch.id, outcome=view.outcome, detail=view.detail))
            )
        elif (launch.id != holder or over > defaults.STOP_GRACE) and _can_end(launch, view, seen, now):
            actions.append(Terminate(launch, f"the worker has ended: {record.state}"))
    return actions


def settled(record: WorkerRecord) -> bool:
    """True when the worker has ended and nothing of it runs or bills any more."""
    return (
        record.state.terminal and not record.lease_held and all(x.state == "ended" for x in record.launches)
    )


@dataclass(frozen=True)
class Take:
    """The agent may take the lease by compare-and-swap, and goes on from ``checkpoint`` (None: from nothing)."""

    checkpoint: CheckpointEntry | None


@dataclass(frozen=True)
class Wait:
    """The agent must not take the lease yet."""

    why: str


@dataclass(frozen=True)
class Leave:
    """The agent is not wanted and ends its instance."""

    why: str


def may_take(
    record: WorkerRecord, spec: WorkerSpec, launch: str, lease_silent: float, waited: float = 0.0
) -> Take | Wait | Leave:
    """Whether the agent of ``launch`` may take the lease.

    ``lease_silent``: as in Observations, on the agent's clock. ``waited``: seconds on it for which the agent has waited and the record has
    shown the same notice, or none: controllers end what is not needed, and where there is none any more an agent goes by itself.
    """
    known = record.launch(launch)
    if record.state.terminal:
        return Leave(f"the worker has ended: {record.state}")
    if record.concluded is not None:
        return Leave("the worker has told its engine how it ends, and is not restored any more")
    if known is None or known.state in ("ending", "ended"):
        return Leave("this launch is not expected")
    if any(x.launch == launch for x in record.incarnations):
        return Leave("this launch had its incarnation already")
    if record.lease_held and lease_silent <= lease_wait(spec.lease_term):
        if waited >= _patience(spec) and not _leaving(record):
            why = _no_notice_came(spec) if known.spare_of else "nothing says any more that it will be needed"
            return Leave(why)
        return Wait(f"incarnation {record.lease.incarnation if record.lease else '?'} holds the lease")
    ran = any(x.started_at for x in record.incarnations)
    if ran and _budget_used_up(record, spec):
        return Leave("max_migrations is used up")
    if _must_not_start_over(record, spec):
        return Leave("no checkpoint can be restored")
    return Take(choose_checkpoint(record, spec))


def checkpoints_to_drop(record: WorkerRecord, keep: int) -> tuple[str, ...]:
    """Numbers that the record stops keeping when one more checkpoint is committed: all but the best usable ``keep``-1.

    The best are those that were restored without trouble, then the newest.
    """
    current = record.incarnation
    proven = current.restored_from if current else None

    def value(entry: CheckpointEntry) -> tuple[int, tuple[int, int]]:
        return (0 if entry.number == proven else -entry.failed_restores, order(entry.number))

    usable = sorted((c for c in record.checkpoints if c.sound), key=value)
    kept = {c.number for c in usable[-(keep - 1) :]} if keep > 1 else set()
    return tuple(c.number for c in record.checkpoints if c.number not in kept)
