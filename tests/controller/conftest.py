"""A controller on a real ``file://`` store, with a fleet that is a double: instances exist in memory, because a test says so."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest

from savedworker.controller.client import Client
from savedworker.controller.reconcile import Controller
from savedworker.fleet.base import Fleet, Launched, LaunchRequest
from savedworker.model import events as ev
from savedworker.model.decisions import InstanceView
from savedworker.model.record import WorkerRecord
from savedworker.model.spec import WorkerSpec, parse_spec
from savedworker.store.backend import Store, open_store
from savedworker.store.worker import WorkerStore


class MemoryFleet:
    """Instances in a dictionary. ``trouble`` is raised by the next calls of that name, ``during`` (``during_end``) runs inside the next launch (end)."""

    name = "memory"
    lease_term = 10.0
    embedded = False

    def __init__(self) -> None:
        self.instances: dict[str, InstanceView] = {}
        self.calls: list[tuple[str, str]] = []
        self.trouble: dict[str, list[Exception]] = {}
        self.during: Callable[[], object] = lambda: None
        self.during_end: Callable[[], object] = lambda: None
        self.preempted: list[tuple[str, float | None]] = []

    def _call(self, verb: str, launch: str) -> None:
        self.calls.append((verb, launch))
        if self.trouble.get(verb):
            raise self.trouble[verb].pop(0)

    def launch(self, request: LaunchRequest) -> Launched:
        self._call("launch", request.launch)
        during, self.during = self.during, lambda: None
        during()
        if request.launch not in self.instances:
            self.instances[request.launch] = InstanceView("running")
        return Launched(f"i-{request.launch}", "zone-a")

    def describe(self, launches: Sequence[str]) -> Mapping[str, InstanceView]:
        self._call("describe", "")
        return {x: self.instances.get(x, InstanceView("unknown")) for x in launches}

    def terminate(self, launch: str) -> None:
        self._call("terminate", launch)
        during, self.during_end = self.during_end, lambda: None
        during()
        if launch in self.instances:
            self.instances[launch] = InstanceView("ended", detail="terminated")

    def preempt(self, launch: str, notice: float | None) -> None:
        self.preempted.append((launch, notice))

    def made(self) -> list[str]:
        """The launches of every call, in order."""
        return [launch for verb, launch in self.calls if verb == "launch"]

    def running(self) -> list[str]:
        return [x for x, view in self.instances.items() if view.state != "ended"]


class World:
    """One store, one fleet, one worker, and clocks that the test moves."""

    def __init__(self, path: Path) -> None:
        self.store: Store = open_store(path.as_uri())
        self.fleet = MemoryFleet()
        self.time = 1000.0
        self.now = datetime(2026, 1, 1, tzinfo=UTC)
        self.controller = self.another_controller()
        self.spec: WorkerSpec = parse_spec(
            {"id": "w", "command": ["true"], "lease_term": 10.0, "fleet": "memory"}
        )
        self.documents = WorkerStore(self.store, "w")

    def another_controller(self) -> Controller:
        def fleets(_: str) -> Fleet:
            return self.fleet

        return Controller(self.store, fleets, clock=lambda: self.time, now=lambda: self.now)

    def client(self) -> Client:
        return Client(self.store, lambda _: self.fleet)

    def submit(self, **fields: Any) -> None:
        self.spec = parse_spec({**self.spec.model_dump(), **fields})
        self.store.ensure()
        self.documents.create_spec(self.spec)
        self.documents.create_record(WorkerRecord(id="w", created_at=self.now, fleet="memory"))

    def reconcile(self) -> WorkerRecord:
        return self.controller.reconcile("w")

    def pass_time(self, seconds: float) -> None:
        self.time += seconds
        self.now += timedelta(seconds=seconds)

    @property
    def record(self) -> WorkerRecord:
        return self.documents.load_record().record

    def tell(self, kind: Any, **fields: Any) -> WorkerRecord:
        return self.documents.record_event(kind(at=self.now, **fields)).record

    def fenced(self, kind: Any, **fields: Any) -> WorkerRecord:
        number = len(self.record.incarnations)
        return self.tell(kind, incarnation=number, holder=f"h{number}", **fields)

    def take(self, launch: str, restore: str | None = None) -> None:
        number = len(self.record.incarnations) + 1
        self.tell(
            ev.LeaseTaken,
            incarnation=number,
            holder=f"h{number}",
            launch=launch,
            instance=f"i-{launch}",
            restore_from=restore,
        )

    def run(self, restore: str | None = None) -> str:
        """Reconcile, and let the agent of the launch that is there begin. Returns the launch."""
        self.reconcile()
        had = {x.launch for x in self.record.incarnations}
        launch = next(x.id for x in self.record.launches if x.state == "accepted" and x.id not in had)
        self.take(launch, restore)
        if restore:
            self.fenced(ev.Restored, number=restore)
        else:
            self.fenced(ev.Started)
        return launch

    def checkpoint(self, number: str, cause: str = "periodic") -> None:
        self.fenced(
            ev.CheckpointCommitted,
            number=number,
            cause=cause,
            frozen_at=self.now,
            bytes_image=1,
            bytes_uploaded=1,
        )


@pytest.fixture
def world(tmp_path: Path) -> World:
    return World(tmp_path / "store")
