"""The Fleet protocol: how instances of one kind are launched, described and terminated.

A fleet knows nothing of leases, checkpoints or records. It never raises for "the instance is gone": that is an answer.

``get_fleet(NAME)`` takes a name of the fleet file (``fleet/settings.py``) or a kind. Kinds are those below, and what other
distributions add to the entry-point group ``savedworker.fleets``.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from importlib import import_module
from importlib.metadata import entry_points
from typing import Any, Protocol, runtime_checkable

from savedworker.fleet import settings
from savedworker.fleet.finding import Finding
from savedworker.model import defaults
from savedworker.model.decisions import InstanceView
from savedworker.model.errors import Refused, SavedWorkerError
from savedworker.model.placement import Choice, Fit
from savedworker.model.spec import WorkerSpec

ENTRY_POINT_GROUP = "savedworker.fleets"
OWN_KINDS = {
    "local": "savedworker.fleet.local:LocalFleet",
    "ec2": "savedworker.fleet.ec2:Ec2Fleet",
    "aws-batch": "savedworker.fleet.aws_batch:BatchFleet",
}
"""The kinds of this distribution: they are there also where it runs without its metadata, as from a copied folder."""


class NoCapacity(SavedWorkerError):
    """No instance can be had now: another place or another time may do."""

    code = "no_capacity"


@dataclass(frozen=True)
class LaunchRequest:
    """One request for an instance. ``launch`` is the client token: the same one never makes a second instance."""

    launch: str
    worker: str
    store_url: str
    spec: WorkerSpec
    avoid: tuple[str, ...] = ()
    """Zones, instances, types and pools (``TYPE@ZONE``) to stay away from, if there is any other choice."""
    environment: Mapping[str, str] = field(default_factory=dict, repr=False)
    """Variables that the agent needs to open the worker. They may hold the store's key: they go into no argument and no log."""
    choice: str | None = None
    """Which of the fleet's ``choices`` to use."""
    fit: Fit = field(default_factory=Fit)
    """What the instance should be like because of the checkpoint that will be restored there."""


@dataclass(frozen=True)
class Launched:
    """The fleet's answer: a name for people, and zone and type where they are known."""

    instance: str
    zone: str | None = None
    instance_type: str | None = None


@dataclass(frozen=True)
class Owned:
    """An instance that a fleet made and that has not ended."""

    launch: str
    worker: str
    instance: str


@runtime_checkable
class Fleet(Protocol):
    """What every fleet can do. All calls are idempotent and may come from several processes at once."""

    name: str
    lease_term: float
    """Lease term for workers of this fleet, in seconds."""
    embedded: bool
    """True when its instances live on this machine, so that nobody else brings its workers on."""

    def launch(self, request: LaunchRequest) -> Launched:
        """Have an instance boot with the agent of ``request``. Raises NoCapacity, Refused or Temporary."""
        ...

    def describe(self, launches: Sequence[str]) -> Mapping[str, InstanceView]:
        """What is known of each launch; one that the fleet never heard of is ``unknown``. Raises Temporary."""
        ...

    def terminate(self, launch: str) -> None:
        """End the instance of ``launch``; nothing happens when it is gone already. Returns when the end is certain to come."""
        ...

    def preempt(self, launch: str, notice: float | None) -> None:
        """Drill: reclaim the instance after ``notice`` seconds of warning, at once and without one for None. Raises Refused."""
        ...


@runtime_checkable
class Chooses(Protocol):
    """A fleet that offers several kinds of place: markets, queues. The controller chooses (``model/placement.py``)."""

    def choices(self, spec: WorkerSpec) -> Sequence[Choice]:
        """What can be asked for on behalf of ``spec``, in order of preference. Asks nobody."""
        ...


@runtime_checkable
class Keeps(Protocol):
    """A fleet whose instances outlive everything that could end them, and so are looked for now and then."""

    def owned(self, store_url: str) -> Sequence[Owned]:
        """The instances of workers of that store that have not ended. Raises Temporary or Refused."""
        ...


@runtime_checkable
class Tidies(Protocol):
    """A fleet that makes things besides instances, which would outlive their use."""

    def tidy(self, store_url: str, environment: Mapping[str, str], *, dry_run: bool = False) -> Sequence[str]:
        """Delete what was made for workers of that store and is of no use any more, and tell what.

        ``environment``: as in LaunchRequest. Raises Temporary or Refused.
        """
        ...


@runtime_checkable
class Warns(Protocol):
    """A fleet whose notice is not told by its name."""

    @property
    def notice(self) -> float:
        """Seconds of warning that its instances give."""
        ...


@runtime_checkable
class Diagnoses(Protocol):
    """A fleet that can say whether it is set up rightly."""

    def diagnose(self, store_url: str) -> Iterator[Finding]:
        """All findings; raises nothing that is expected."""
        ...


def get_fleet(name: str) -> Fleet:
    """The fleet ``name`` of the fleet file, or the one of kind ``name``. Raises Refused."""
    configured = settings.kinds()
    kind = configured.get(name, name)
    known = {point.name: point.value for point in entry_points(group=ENTRY_POINT_GROUP)} | OWN_KINDS
    if kind not in known:
        what = (
            f"fleet {name!r} is of kind {kind!r}, and there is none"
            if name in configured
            else f"there is no fleet {name!r}"
        )
        names = sorted({*configured, *known}) if name not in configured else sorted(known)
        raise Refused(what, f"use one of: {', '.join(names)}")
    module, _, attribute = known[kind].partition(":")
    try:
        made: Any = getattr(import_module(module), attribute)
    except ModuleNotFoundError as error:
        if error.name and error.name.partition(".")[0] in ("boto3", "botocore", "tenacity"):
            raise Refused(
                f"fleet {name!r} needs {error.name}, which is not installed",
                "pip install 'airflow-provider-savedworker[aws]'",
            ) from error
        raise
    fleet = (
        made() if name == kind and name not in configured and kind not in settings.CONFIGURED else made(name)
    )
    assert isinstance(fleet, Fleet)
    return fleet


def notice_of(name: str) -> float:
    """Seconds of warning that instances of fleet ``name`` give, or are assumed to give."""
    try:
        fleet: object = get_fleet(name)
    except Refused:
        fleet = None
    return fleet.notice if isinstance(fleet, Warns) else defaults.NOTICE.get(name, defaults.GRACE_SIGTERM)


def keeping_fleets(names: Sequence[str]) -> Iterator[Fleet]:
    """Of the fleets ``names`` and all that are configured, those that keep instances of their own."""
    for name in dict.fromkeys((*names, *settings.kinds())):
        try:
            fleet = get_fleet(name)
        except Refused:
            continue  # whoever uses it is told
        if isinstance(fleet, Keeps):
            yield fleet
