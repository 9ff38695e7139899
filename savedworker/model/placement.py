"""Where the next launch goes: plain functions from a record, and what a fleet offers, to a choice with its reason.

A *choice* is what a fleet can be asked for by name: EC2's ``spot`` or ``on-demand``, a queue of AWS Batch. A *pool* is one type
in one zone; fleets that can pick pools order them with ``best_pools``.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Literal

from savedworker.model import attempts, defaults
from savedworker.model.fingerprint import Fingerprint
from savedworker.model.manifest import order
from savedworker.model.record import Incarnation, WorkerRecord
from savedworker.model.spec import PlacementPolicy
from savedworker.model.units import format_duration

Market = Literal["spot", "on-demand"]
"""``spot`` instances may be reclaimed, ``on-demand`` ones are not."""


@dataclass(frozen=True)
class Choice:
    """One thing that a fleet can be asked for."""

    name: str
    market: Market = "spot"
    price: float | None = None
    """Per hour, in any one currency; None when it is not known."""
    zones: tuple[str, ...] = ()
    """Where its instances can be, if that is known."""


@dataclass(frozen=True)
class Chosen:
    """The choice for the next launch (None: the fleet offers none), and why."""

    choice: str | None
    why: str


@dataclass(frozen=True)
class Fit:
    """What the next instance should be like because of the checkpoint that will be restored there."""

    fingerprint: Fingerprint | None = None
    ran_on: tuple[str, ...] = ()
    """Types on which the worker has run; first the one that the checkpoint is of."""
    unfit: tuple[str, ...] = ()
    """Types that an agent has found not to fit the worker's checkpoints."""


@dataclass(frozen=True)
class Pool:
    """One type in one zone. ``probable`` is False when its CPU may lack features of the source's."""

    type: str
    zone: str
    probable: bool = True

    @property
    def name(self) -> str:
        """As a place to be avoided."""
        return pool_name(self.type, self.zone)


def pool_name(instance_type: str, zone: str) -> str:
    """How a pool is written among the places to be avoided."""
    return f"{instance_type}@{zone}"


def _reclaimed(record: WorkerRecord, now: datetime, avoid_for: float) -> list[Incarnation]:
    """Incarnations whose place is being reclaimed or may soon be, or was, or failed, less than ``avoid_for`` seconds ago.

    Every refusal for lack of capacity since then halves the time: a place that has room becomes welcome again.
    """
    refusals = sum(x.outcome == "capacity" for x in attempts.fruitless(record))
    for_seconds = avoid_for / 2 ** min(refusals, 16)
    return [
        x
        for x in record.incarnations
        if _noticed(record, x)
        or (
            x.end_reason in ("notice", "no_notice", "failed")
            and x.ended_at
            and (now - x.ended_at).total_seconds() < for_seconds
        )
    ]


def _noticed(record: WorkerRecord, incarnation: Incarnation) -> bool:
    """Whether the place of ``incarnation`` is being reclaimed, or leaving it was recommended: another is launched before it has ended."""
    return incarnation is record.incarnation and incarnation.ended_at is None and record.notice is not None


def _leaving(record: WorkerRecord, incarnation: Incarnation) -> bool:
    """Whether the place of ``incarnation`` is being reclaimed."""
    notice = record.notice
    return _noticed(record, incarnation) and notice is not None and notice.seconds_left is not None


def reclaimed_places(record: WorkerRecord, now: datetime, avoid_for: float) -> tuple[str, ...]:
    """What to stay away from: zones (or instances, where no zone is known), types and pools that were reclaimed lately."""
    places: set[str] = set()
    for lost in _reclaimed(record, now, avoid_for):
        places.add(lost.zone or lost.instance)
        launch = record.launch(lost.launch)
        if launch is not None and launch.instance_type:
            places.add(launch.instance_type)
            if lost.zone:
                places.add(pool_name(launch.instance_type, lost.zone))
    return tuple(sorted(places))


def choose(
    record: WorkerRecord, policy: PlacementPolicy, choices: Sequence[Choice], now: datetime, waited: float
) -> Chosen:
    """The choice for the next launch. ``waited``: seconds since the first refusal for lack of capacity in a row.

    Spot before on-demand, until a stated number of losses or a stated time without capacity. Among those that may be used: what was
    refused least since the worker last ran, what was not reclaimed lately, the cheapest, the one that came quickest, the order given.
    """
    if not choices:
        return Chosen(None, "")
    spot = [x for x in choices if x.market == "spot"]
    on_demand = [x for x in choices if x.market == "on-demand"]
    why_on_demand = _why_on_demand(record, policy, {x.name for x in on_demand}, now, waited)
    if why_on_demand or not spot:
        allowed, preferred = list(choices), "on-demand"
    else:
        allowed, preferred = spot, "spot"
    avoided = {x.name: _avoided(record, x, now, policy.avoid_reclaimed) for x in allowed}
    refused = {x.name: _refusals(record, x.name) for x in allowed}

    def key(choice: Choice) -> tuple[int, bool, bool, float, float]:
        return (
            refused[choice.name],
            choice.market != preferred,
            bool(avoided[choice.name]),
            float("inf") if choice.price is None else choice.price,
            _usual_wait(record, choice.name),
        )

    best = min(allowed, key=key)  # min() keeps the order given among equals
    reasons = [why_on_demand] if why_on_demand and best.market == "on-demand" else []
    passed_over = [x.name for x in allowed if refused[x.name] > refused[best.name]]
    if passed_over and not reasons:
        reasons.append(f"nothing to be had in {', '.join(passed_over)}")
    left = [x for x in allowed if avoided[x.name] and not avoided[best.name] and x.name not in passed_over]
    reasons += [avoided[x.name] for x in left]
    return Chosen(best.name, ", ".join(reasons))


def _why_on_demand(
    record: WorkerRecord, policy: PlacementPolicy, on_demand: Collection[str], now: datetime, waited: float
) -> str:
    """Why instances that are not reclaimed may be used now; empty if they may not."""
    if not on_demand:
        return ""
    losses = 0
    for lost in record.incarnations:
        launch = record.launch(lost.launch)
        lately = lost.ended_at and (now - lost.ended_at).total_seconds() < defaults.LOSSES_WITHIN
        if (_leaving(record, lost) or (lost.end_reason in ("notice", "no_notice") and lately)) and not (
            launch is not None and launch.choice in on_demand
        ):
            losses += 1
    if policy.on_demand_after_losses == 0:
        return "by policy from the beginning"
    if policy.on_demand_after_losses is not None and losses >= policy.on_demand_after_losses:
        times = "once" if losses == 1 else f"{losses} times"
        return f"reclaimed {times} within {format_duration(defaults.LOSSES_WITHIN)}"
    if policy.on_demand_after_wait is not None and waited >= policy.on_demand_after_wait and waited > 0:
        return f"no spot capacity for {format_duration(waited)}"
    return ""


def _avoided(record: WorkerRecord, choice: Choice, now: datetime, avoid_for: float) -> str:
    """Why ``choice`` is avoided at present; empty if it is not."""
    lost = _reclaimed(record, now, avoid_for)
    for incarnation in lost:
        launch = record.launch(incarnation.launch)
        if launch is not None and launch.choice == choice.name:
            at_risk = _noticed(record, incarnation) and not _leaving(record, incarnation)
            return f"leaving {choice.name} was recommended" if at_risk else f"{choice.name} was reclaimed"
    gone = {x.zone for x in lost if x.zone}
    if choice.zones and gone.issuperset(choice.zones):
        return f"{choice.name} has only zones that were reclaimed or are to be left"
    return ""


def _refusals(record: WorkerRecord, choice: str) -> int:
    """How often ``choice`` had no instance, or one that did not fit, since the worker last ran, or for its present spare."""
    spares = attempts.spares(record, record.notice.id) if record.notice else []
    row = [*attempts.fruitless(record), *spares]
    return sum(x.outcome in ("capacity", "incompatible") and x.choice == choice for x in row)


def _usual_wait(record: WorkerRecord, choice: str) -> float:
    """Seconds from request to lease of this worker's launches of that choice, on average; inf when none is known."""
    requested = {x.id: x.requested_at for x in record.launches if x.choice == choice}
    waits = [
        max(0.0, (x.taken_at - requested[x.launch]).total_seconds())
        for x in record.incarnations
        if x.launch in requested
    ]
    return sum(waits) / len(waits) if waits else float("inf")


def fit(record: WorkerRecord, fingerprint: Fingerprint | None, checkpoint: str | None = None) -> Fit:
    """What is known of types that fit the worker. ``fingerprint``: of ``checkpoint``, which would be restored now."""
    taken_on = order(checkpoint)[0] if checkpoint else 0
    ran_on: list[str] = []
    # First the type that the checkpoint is of, then the others, the newest first.
    for incarnation in sorted(record.incarnations, key=lambda x: (x.number != taken_on, -x.number)):
        launch = record.launch(incarnation.launch)
        if incarnation.started_at and launch is not None and launch.instance_type:
            ran_on.append(launch.instance_type)
    unfit = {
        x.instance_type
        for x in record.launches
        if x.outcome == "incompatible" and x.instance_type and fingerprint is not None
    }
    return Fit(fingerprint, tuple(dict.fromkeys(ran_on)), tuple(sorted(unfit)))


def best_pools(pools: Sequence[Pool], avoid: Collection[str]) -> list[list[Pool]]:
    """The pools in groups, to be tried one group after the other: best first, none left out.

    Worse than anything is a CPU that may not fit, then the very pool that is avoided, then its zone, then its type.
    """
    groups: dict[int, list[Pool]] = {}
    for pool in pools:
        penalty = (
            8 * (not pool.probable)
            + 4 * (pool.name in avoid)
            + 2 * (pool.zone in avoid)
            + (pool.type in avoid)
        )
        groups.setdefault(penalty, []).append(pool)
    return [groups[penalty] for penalty in sorted(groups)]


_FAMILY = re.compile(r"([a-z]+?)([0-9]+)([a-z-]*)\.[a-z0-9-]+")


def cpu_probably_fits(source: str, target: str, declared: Sequence[Collection[str]] = ()) -> bool:
    """Whether type ``target`` has, as its name tells, every CPU feature of type ``source`` (EC2's way to name types).

    True within a family, within a group of families that are ``declared`` alike, and for the same maker's later generation.
    What a name cannot tell is found out by the agent before anything is downloaded.
    """
    if source == target:
        return True
    old, new = _FAMILY.fullmatch(source), _FAMILY.fullmatch(target)
    if old is None or new is None:
        return False
    families = {source.partition(".")[0], target.partition(".")[0]}
    if len(families) == 1 or any(families <= set(group) for group in declared):
        return True
    return _maker(old) == _maker(new) and int(new[2]) >= int(old[2])


def _maker(family: re.Match[str]) -> str:
    """Of the CPU: AMD's families have an ``a`` after the generation, Graviton's a ``g``."""
    return next((letter for letter in "ag" if letter in family[3]), "i")


def leftover(record: WorkerRecord | None, launch: str) -> str | None:
    """Why the instance of ``launch`` should not be there any more; None if it may be wanted.

    A launch is in the record before its fleet is called, so an instance that no record knows belongs to nobody.
    """
    if record is None:
        return "its worker is not in the store"
    known = record.launch(launch)
    if known is None:
        return "its worker knows nothing of this launch"
    if known.state == "ended":
        return f"its launch has ended: {known.outcome}"
    if record.state.terminal and not record.lease_held:
        return f"its worker has ended: {record.state}"
    return None
