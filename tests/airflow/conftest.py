"""Workers to follow without a machine: the real client, controller and store, and an instance that tests move by hand."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from types import SimpleNamespace
from typing import Any

# Before anything imports airflow, which makes its home where these say, and a database only when asked.
os.environ.setdefault("AIRFLOW_HOME", tempfile.mkdtemp(prefix="airflow-unit-"))
os.environ.setdefault("AIRFLOW__CORE__UNIT_TEST_MODE", "True")
os.environ.setdefault("AIRFLOW__CORE__LOAD_EXAMPLES", "False")

import pytest

from savedworker.controller.client import Client
from savedworker.fleet.base import Launched, LaunchRequest
from savedworker.model import events as ev
from savedworker.model.decisions import InstanceView
from savedworker.model.record import WorkerRecord
from savedworker.model.spec import CheckpointPolicy, WorkerSpec
from savedworker.store.backend import open_store
from savedworker.store.logs import LogWriter
from savedworker.store.worker import WorkerStore


class HandFleet:
    """A fleet whose instances exist because the test says so."""

    name = "local"
    lease_term = 10.0
    embedded = False

    def __init__(self) -> None:
        self.launches: dict[str, str] = {}
        self.terminated: list[str] = []

    def launch(self, request: LaunchRequest) -> Launched:
        self.launches.setdefault(request.launch, "running")
        return Launched(instance=f"i-{len(self.launches)}", zone="z")

    def describe(self, launches: Sequence[str]) -> Mapping[str, InstanceView]:
        return {x: InstanceView(self.launches.get(x, "unknown")) for x in launches}  # type: ignore[arg-type]

    def terminate(self, launch: str) -> None:
        self.terminated.append(launch)
        self.launches[launch] = "ended"

    def preempt(self, launch: str, notice: float | None) -> None:
        self.launches[launch] = "ended"


class Hand:
    """One worker, and what its agent would report, said by the test."""

    def __init__(self, client: Client, fleet: HandFleet, spec: WorkerSpec) -> None:
        self.client, self.fleet, self.spec = client, fleet, spec
        self.documents = WorkerStore(client.store, spec.id)
        self.incarnation = 0
        self.launch = ""
        self._writers: dict[str, LogWriter] = {}

    @property
    def id(self) -> str:
        return self.spec.id

    def record(self, event: ev.Event) -> WorkerRecord:
        return self.documents.record_event(event).record

    def fenced(self, kind: Any, **fields: Any) -> WorkerRecord:
        fields.setdefault("at", datetime.now(UTC))
        return self.record(kind(incarnation=self.incarnation, holder="h", **fields))

    def begin(self, restore: str | None = None, position: int = 0) -> None:
        """An instance boots, its agent wins the lease and starts (or restores) the worker, which is protected."""
        record = self.client.reconcile(self.id)
        launch = next(x.id for x in record.launches if x.state != "ended")
        self.incarnation += 1
        self.launch = launch
        self.fenced(ev.LeaseTaken, launch=launch, instance=f"i-{self.incarnation}", restore_from=restore)
        if restore:
            self.fenced(ev.Restored, number=restore, seconds=0.5)
        else:
            self.fenced(ev.Started)
        self.fenced(ev.ProtectionChanged, unprotected_reasons=())
        self._writers = {
            x: LogWriter(self.documents, x, self.incarnation, position) for x in ("stdout", "stderr")
        }

    def say(self, text: str, stream: str = "stdout") -> None:
        self._writers[stream].append(text.encode())

    def vanish(self) -> None:
        """The instance is gone; a replacement that was launched on notice is not."""
        self.fleet.launches[self.launch] = "ended"

    def end(self, exit_code: int | None = 0, **fields: Any) -> None:
        """The process ends, the agent lets go of the lease, the instance is gone."""
        self.fenced(ev.Finished, exit_code=exit_code, **fields)
        self.fenced(ev.LeaseReleased, end_reason="finished")
        for launch in self.fleet.launches:
            self.fleet.launches[launch] = "ended"


class Lines(list[tuple[int, str, str]]):
    """A log that remembers: (level, source, text)."""

    def __call__(self, level: int, source: str, text: str) -> None:
        self.append((level, source, text))

    def of(self, source: str) -> list[str]:
        return [text for _, where, text in self if where == source]


@pytest.fixture
def fleet() -> HandFleet:
    return HandFleet()


@pytest.fixture
def client(tmp_path: Path, fleet: HandFleet) -> Client:
    return Client(open_store(str(tmp_path / "store")), fleets=lambda _: fleet)


@pytest.fixture
def hand(client: Client, fleet: HandFleet) -> Hand:
    """A submitted worker with no instance yet."""
    spec = WorkerSpec(id="w", command=("true",), lease_term=10.0, checkpoint=CheckpointPolicy(interval=60.0))
    client.submit(spec)
    return Hand(client, fleet, spec)


class States(dict[str, Any]):
    """Airflow's task state store, which outlives a try."""

    def set(self, key: str, value: Any) -> None:
        self[key] = value


class TaskInstance(SimpleNamespace):
    """What the operator needs of Airflow's RuntimeTaskInstance."""

    def xcom_push(self, key: str, value: Any) -> None:
        self.xcoms[key] = value


def make_context(states: States | None = None, try_number: int = 1, **fields: Any) -> Any:
    """The context of one try; every try has an id of its own, as in Airflow 3."""
    defaults: dict[str, Any] = {
        "id": f"id-of-try-{try_number}",
        "dag_id": "Some.DAG",
        "task_id": "train",
        "run_id": "manual__1",
        "map_index": -1,
        "try_number": try_number,
        "max_tries": 2,
        "xcoms": {},
        "stats_tags": {},
    }
    return {
        "ti": TaskInstance(**(defaults | fields)),
        "task_state_store": States() if states is None else states,
    }
