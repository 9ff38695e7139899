"""A worker's life told in events, with a clock that the test moves; and a fleet that exists only in a dictionary."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from typing import Any

from savedworker.model import events as ev
from savedworker.model.decisions import (
    CallFleet,
    InstanceView,
    Observations,
    Record,
    RequestLaunch,
    Terminate,
    choose_checkpoint,
    decide,
)
from savedworker.model.placement import Choice
from savedworker.model.record import Launch, State, WorkerRecord
from savedworker.model.spec import WorkerSpec, parse_spec
from savedworker.model.transitions import apply

BIRTH = datetime(2026, 1, 1, tzinfo=UTC)


def make_spec(**fields: Any) -> WorkerSpec:
    return parse_spec({"id": "w", "command": ["true"], "lease_term": 10.0, **fields})


class Life:
    """One worker. ``launch`` … ``lose`` say what happened; ``decide`` and ``settle`` let the decisions act on a fleet."""

    def __init__(self, **spec: Any) -> None:
        self.spec = make_spec(**spec)
        self.now = BIRTH
        self.record = WorkerRecord(id="w", created_at=BIRTH)
        self.launches = 0
        self.fleet: dict[str, InstanceView] = {}
        self.calls: list[str] = []
        self.refuse: str | None = None
        """What every call to the fleet is answered with instead of an instance: an outcome."""
        self.silent = 0.0
        self.watched = 60.0
        self.offered: tuple[Choice, ...] = ()
        self._running: dict[str, datetime] = {}

    # What happens

    def pass_time(self, seconds: float) -> None:
        self.now += timedelta(seconds=seconds)

    def tell(self, kind: Any, **fields: Any) -> WorkerRecord:
        self.record = apply(self.record, kind(at=self.now, **fields))
        return self.record

    def fenced(self, kind: Any, **fields: Any) -> WorkerRecord:
        number = len(self.record.incarnations)
        return self.tell(kind, **{"incarnation": number, "holder": f"h{number}", **fields})

    def launch(self, state: str = "running") -> str:
        self.launches += 1
        launch = f"l{self.launches}"
        self.tell(ev.LaunchRequested, launch=launch)
        self.call(launch, state)
        return launch

    def call(self, launch: str, state: str = "running") -> None:
        self.calls.append(launch)
        if self.refuse:
            self.tell(ev.LaunchEnded, launch=launch, outcome=self.refuse, detail=f"refused: {self.refuse}")
            return
        if launch not in self.fleet:
            self.fleet[launch] = InstanceView(state)  # type: ignore[arg-type]
        self.tell(ev.LaunchAccepted, launch=launch, instance=f"i-{launch}", zone=f"z-{launch}")

    def take(self, launch: str | None = None, restore: str | None = None) -> int:
        number = len(self.record.incarnations) + 1
        launch = launch or self.launch()
        self.tell(
            ev.LeaseTaken,
            incarnation=number,
            holder=f"h{number}",
            launch=launch,
            instance=f"i-{launch}",
            zone=f"z-{launch}",
            restore_from=restore,
            term=self.spec.lease_term,
        )
        return number

    def run(self, launch: str | None = None, restore: str | None = None) -> int:
        """Take the lease and execute the worker, from ``restore`` or from nothing."""
        number = self.take(launch, restore)
        if restore:
            self.fenced(ev.Restored, number=restore)
        else:
            self.fenced(ev.Started)
        return number

    def renew(self) -> None:
        self.fenced(ev.LeaseRenewed)

    def checkpoint(self, number: str, cause: str = "periodic", **fields: Any) -> None:
        self.fenced(ev.CheckpointStarted, number=number, cause=cause)
        fields = {"frozen_at": self.now, "bytes_image": 1, "bytes_uploaded": 1, **fields}
        self.fenced(ev.CheckpointCommitted, number=number, cause=cause, **fields)

    def notice(self, seconds_left: float | None = 30.0, notice: str = "n") -> None:
        self.fenced(ev.NoticeReceived, id=notice, source="spot", seconds_left=seconds_left)

    def hand_over(self, number: str) -> None:
        self.checkpoint(number, "notice")
        self.fenced(ev.HandedOver, number=number)

    def lose(self) -> None:
        """The instance of the present incarnation is gone without notice."""
        assert self.record.lease
        self.fleet[self.record.lease.launch] = InstanceView("ended", detail="reclaimed")
        self.tell(ev.InstanceLost, incarnation=len(self.record.incarnations))
        self.tell(ev.LaunchEnded, launch=self.record.lease.launch, outcome="gone")

    # What is done about it

    def seen(self) -> Observations:
        silent = self.silent if self.record.lease_held else 0.0
        return Observations(dict(self.fleet), silent, self.watched, self.offered, self.running())

    def running(self) -> dict[str, float]:
        """For how long each instance has been seen running."""
        runs = [x for x, view in self.fleet.items() if view.state == "running"]
        self._running = {x: self._running.get(x, self.now) for x in runs}
        return {x: (self.now - since).total_seconds() for x, since in self._running.items()}

    def decide(self) -> list[Any]:
        return list(decide(self.record, self.spec, self.seen(), self.now))

    def act(self, action: Any) -> None:
        """What a controller does with one action."""
        match action:
            case Record(event):
                self.record = apply(self.record, event)
            case RequestLaunch(avoid, _, _, spare_of):
                self.launches += 1
                launch = f"l{self.launches}"
                self.tell(ev.LaunchRequested, launch=launch, avoid=avoid, spare_of=spare_of)
                if self.record.launch(launch):
                    self.call(launch, "pending")
            case CallFleet(launch):
                self.call(launch.id, "pending")
            case Terminate(launch, why):
                self.terminate(launch, why)
            case _:
                raise AssertionError(action)

    def terminate(self, launch: Launch, why: str) -> None:
        if launch.id in self.fleet:
            self.fleet[launch.id] = InstanceView("ended", detail="terminated")
        lease = self.record.lease
        if lease and self.record.lease_held and lease.launch == launch.id:
            self.tell(ev.InstanceLost, incarnation=lease.incarnation, detail=why)
        self.tell(ev.LaunchEnded, launch=launch.id, outcome="surplus", detail=why)

    def settle(self, rounds: int = 20) -> list[Any]:
        """Decide and act until nothing new comes. Returns all that was done; fails when that does not end."""
        done: list[Any] = []
        for _ in range(rounds):
            before = (self.record, dict(self.fleet))
            actions = self.decide()
            for action in actions:
                self.act(action)
            done += actions
            if (self.record, self.fleet) == before:
                return done
        raise AssertionError(f"it does not converge: {done[-8:]}")

    def spares(self) -> list[str]:
        """The launches whose agents may still take the lease."""
        had = {x.launch for x in self.record.incarnations}
        return [
            x.id for x in self.record.launches if x.state in ("requested", "accepted") and x.id not in had
        ]

    def choice(self) -> str | None:
        entry = choose_checkpoint(self.record, self.spec)
        return entry.number if entry else None

    def state(self) -> State:
        return self.record.state

    def last(self) -> str:
        return self.record.recent[-1].event
