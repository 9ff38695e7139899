"""One real Airflow for all engine tests, and how they look at a task and at its worker from outside."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any
from urllib.parse import quote

from savedworker.controller.client import Client
from savedworker.fleet.local import LocalFleet
from savedworker.model.decisions import settled
from savedworker.model.record import WorkerRecord
from savedworker.store.backend import open_store
from scripts.local_airflow import LocalAirflow

DAGS = Path(__file__).parent / "dags"

COUNTER = """
i=0
while [ $i -lt {seconds} ]; do
    echo "tick $i"
    echo "$i" >> /shared/ticks
    i=$((i + 1))
    sleep 1
done
{then}
"""
"""Counts the seconds on stdout and, where the test can see it whatever happens to the worker, in a file on a volume."""


def eventually(condition: Callable[[], Any], seconds: float, what: str, every: float = 0.3) -> Any:
    """The first true value of ``condition``; fails after ``seconds``."""
    until = time.monotonic() + seconds
    while not (value := condition()):
        assert time.monotonic() < until, f"not within {seconds} s: {what}"
        time.sleep(every)
    return value


@dataclass
class Run:
    """One run of one of the DAGs in ``dags/``, whose task is called ``work``."""

    engine: Engine
    dag: str
    id: str
    volume: Path

    def task(self) -> dict[str, Any]:
        return self.engine.airflow.task(self.dag, self.id, "work")

    def state(self) -> str | None:
        state = self.task()["state"]
        return None if state is None else str(state)

    def after(self) -> str | None:
        """The state of the task after ``work``."""
        state = self.engine.airflow.task(self.dag, self.id, "after")["state"]
        return None if state is None else str(state)

    def processes(self) -> list[int]:
        """The task's own process and its supervisor."""
        pid = int(self.task()["pid"])
        stat = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        return [int(stat[1]), pid]

    def wait_for(self, *states: str | None, seconds: float = 180.0) -> str | None:
        found = eventually(
            lambda: [x for x in (self.state(),) if x in states],
            seconds,
            f"{self.dag} is {states}, not {self.state()}",
        )
        state: str | None = found[0]
        return state

    def ended(self, seconds: float = 240.0) -> str:
        """The state of the run, once it has one that stays."""
        return str(
            eventually(
                lambda: next(
                    (
                        x
                        for x in (self.engine.airflow.run_state(self.dag, self.id),)
                        if x in ("success", "failed")
                    ),
                    None,
                ),
                seconds,
                f"{self.dag} has ended",
            )
        )

    def worker(self, seconds: float = 180.0) -> str:
        """The id of the task's present worker."""
        note = eventually(
            lambda: self.engine.airflow.xcom(self.dag, self.id, "work", "saved_worker"),
            seconds,
            "the task has a worker",
        )
        return str(note["worker"])

    def record(self) -> WorkerRecord:
        return self.engine.client.record(self.worker())

    def running(self, ticks: int = 2) -> str:
        """Wait until the task is deferred (or follows) and its worker has counted to ``ticks``; the worker's id."""
        worker = self.worker()
        eventually(lambda: len(self.ticks()) >= ticks, 180, "the worker counts")
        return worker

    def ticks(self) -> list[int]:
        with contextlib.suppress(FileNotFoundError):
            return [int(x) for x in (self.volume / "ticks").read_text().split()]
        return []

    def log(self, try_number: int = 1) -> list[str]:
        return self.engine.airflow.log(self.dag, self.id, "work", try_number)

    def output(self, try_number: int = 1) -> list[str]:
        """The worker's own lines in the task's log."""
        return [x for x in self.log(try_number) if x.startswith("tick ")]

    def tries(self) -> list[tuple[int, str]]:
        return [(x["try_number"], x["state"]) for x in self.engine.airflow.tries(self.dag, self.id, "work")]

    def callbacks(self) -> list[str]:
        lines = self.engine.callbacks.read_text().splitlines() if self.engine.callbacks.exists() else []
        return [f"{kind} {number}" for kind, run, number in (x.split(" ") for x in lines) if run == self.id]

    def set_state(self, state: str) -> None:
        """As a user does it in Airflow's pages."""
        path = f"/api/v2/dags/{self.dag}/dagRuns/{quote(self.id)}/taskInstances/work"
        self.engine.airflow.call("PATCH", path, {"new_state": state})

    def fail_run(self) -> None:
        """As a user does it in Airflow's pages: the whole run is marked failed."""
        path = f"/api/v2/dags/{self.dag}/dagRuns/{quote(self.id)}"
        self.engine.airflow.call("PATCH", path, {"state": "failed"})

    def dag_has_ended(self) -> bool:
        """Whether nothing of this run will be tried any more."""
        return self.engine.airflow.run_state(self.dag, self.id) in ("success", "failed")

    def clear(self) -> None:
        """As a user does it in Airflow's pages."""
        self.engine.airflow.call(
            "POST",
            f"/api/v2/dags/{self.dag}/clearTaskInstances",
            {"dag_run_id": self.id, "task_ids": ["work"], "dry_run": False, "only_failed": False},
        )


@dataclass
class Engine:
    """The Airflow, and the store and fleet that its tasks use."""

    airflow: LocalAirflow
    client: Client
    home: Path

    @property
    def callbacks(self) -> Path:
        return self.home / "callbacks"

    def run(self, dag: str, command: str, **conf: Any) -> Run:
        volume = self.home / "volumes" / f"{dag}-{time.monotonic_ns()}"
        volume.mkdir(parents=True)
        run = self.airflow.trigger(dag, {"command": command, "volume": str(volume), **conf})
        return Run(self, dag, run, volume)

    def count(self, dag: str, seconds: int, then: str = "", **conf: Any) -> Run:
        return self.run(dag, COUNTER.format(seconds=seconds, then=then), **conf)


@contextlib.contextmanager
def running_engine(home: Path) -> Iterator[Engine]:
    """Start Airflow in ``home``; in the end, stop it and every worker that a test left."""
    settings = {
        "SAVEDWORKER_STORE": f"file://{home}/store",
        "SAVEDWORKER_LOCAL_DIR": str(home / "hosts"),
        "SAVEDWORKER_TEST_CALLBACKS": str(home / "callbacks"),
        "AIRFLOW__CORE__PARALLELISM": "8",
        # A busy machine answers late; a request that is given up and repeated only adds to its load.
        "AIRFLOW__WORKERS__EXECUTION_API_TIMEOUT": "30",
        # So that the loss of a task process or of a triggerer is noticed within seconds.
        "AIRFLOW__TRIGGERER__TRIGGERER_HEALTH_CHECK_THRESHOLD": "8",
        "AIRFLOW__TRIGGERER__JOB_HEARTBEAT_SEC": "2",
        "AIRFLOW__SCHEDULER__TASK_INSTANCE_HEARTBEAT_TIMEOUT": "20",
        "AIRFLOW__SCHEDULER__TASK_INSTANCE_HEARTBEAT_TIMEOUT_DETECTION_INTERVAL": "3",
        # A task of a dead scheduler is looked for when the next one starts, and again only after this time: at the start the dead
        # one may still count as alive.
        "AIRFLOW__SCHEDULER__SCHEDULER_HEALTH_CHECK_THRESHOLD": "15",
        "AIRFLOW__SCHEDULER__ORPHANED_TASKS_CHECK_INTERVAL": "10",
    }
    airflow = LocalAirflow(home, DAGS, settings)
    fleet = LocalFleet(home / "hosts")
    client = Client(open_store(settings["SAVEDWORKER_STORE"]), fleets=lambda _: fleet)
    try:
        airflow.start()
        yield Engine(airflow, client, home)
    finally:
        airflow.stop(grace=5.0)
        client.store.ensure()
        for worker in [x.id for x in client.list()]:
            with contextlib.suppress(Exception):
                client.cancel(worker, "the end of the tests")
                eventually(partial(_settled, client, worker), 40, "the worker is gone")


def _settled(client: Client, worker: str) -> bool:
    return settled(client.reconcile(worker))
