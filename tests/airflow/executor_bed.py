"""A whole Airflow with LocalExecutor and SavedWorkerExecutor side by side, and how tests look at runs, move workers and compare."""

from __future__ import annotations

import base64
import contextlib
import json
import re
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any
from urllib.parse import quote

from savedworker.controller.client import Client
from savedworker.fleet.local import LocalFleet, network
from savedworker.model.decisions import settled
from savedworker.model.errors import NotFound
from savedworker.model.record import WorkerRecord
from savedworker.store.backend import open_store
from savedworker.store.worker import WorkerStore, list_workers
from scripts.local_airflow import AirflowTrouble, LocalAirflow
from tests.airflow.engine import eventually

DAGS = Path(__file__).parent / "executor_dags"
EXECUTORS = "LocalExecutor,saved:airflow_provider_savedworker.executors.SavedWorkerExecutor"

_VARIES = re.compile(
    r"0x[0-9a-f]+|\d{4}-\d\d-\d\d[T ][0-9:.+Z]*|[0-9a-f]{8}-[0-9a-f-]{27}|(local|saved)_(?=[a-z])|\(ID \d+\)"
)
"""What differs from run to run in a line: addresses, times, ids, and which of the two DAGs it is."""
_TOKEN = re.compile(rb"eyJ[A-Za-z0-9_-]+\.(eyJ[A-Za-z0-9_-]+)\.")
_OURS = ("[savedworker]", "::group::", "::endgroup::", "worker ", "file://", "/")
_OWN_EFFECT = ("The `airflow.utils", "Skipping masking", "sleeping ", "yielding event")
"""Lines that are said once per process, of which LocalExecutor's are long-lived; and those of the trigger's clock."""


@dataclass
class Run:
    """One run of a DAG of the suite."""

    bed: Bed
    dag: str
    id: str
    before: frozenset[str]
    moves: list[str] = field(default_factory=list)

    def state(self) -> str:
        """The run's state; ``away`` while the API server is."""
        try:
            return self.bed.airflow.run_state(self.dag, self.id)
        except (OSError, AirflowTrouble):
            return "away"

    def ended(self, seconds: float = 240.0) -> str:
        return str(
            eventually(
                lambda: next((x for x in (self.state(),) if x in ("success", "failed")), None),
                seconds,
                f"{self.dag} {self.id} has ended: {self.tasks()}",
            )
        )

    def tasks(self) -> list[dict[str, Any]]:
        path = f"/api/v2/dags/{self.dag}/dagRuns/{quote(self.id)}/taskInstances"
        try:
            return list(self.bed.airflow.call("GET", path)["task_instances"])
        except (OSError, AirflowTrouble):
            return []

    def workers(self) -> list[WorkerRecord]:
        """Of this run, in the order in which they were made."""
        found = [
            self.bed.client.record(x)
            for x in list_workers(self.bed.client.store)
            if x.startswith(self.dag.replace("_", "-"))
            and x not in self.before
            and self.bed.labels(x).get("run_id") == self.id
        ]
        return sorted(found, key=lambda x: x.created_at)

    def running(self, task: str | None = None, said: str = "", seconds: float = 240.0) -> str:
        """The id of a worker of this run that runs, and whose task has said ``said``."""

        def look() -> str | None:
            for record in self.workers():
                wanted = record.state == "running" and task in (None, self.bed.labels(record.id)["task_id"])
                if wanted and (not said or said in self.bed.output(record.id)):
                    return record.id
            return None

        return str(eventually(look, seconds, f"a worker of {self.dag} runs and has said {said!r}", every=0.4))

    def move(self, worker: str, notice: float | None = 15.0, wait: bool = True) -> None:
        """Take the worker's host away; with ``wait``, until it runs elsewhere (or has ended)."""
        client = self.bed.client
        was = len(client.record(worker).incarnations)
        with contextlib.suppress(Exception):  # it may have ended in this moment
            self.moves.append(client.preempt(worker, notice))
        if wait:

            def moved() -> bool:
                record = client.record(worker)
                current = record.incarnation
                return record.state.terminal or bool(
                    len(record.incarnations) > was and current and current.started_at
                )

            eventually(moved, 120, f"{worker} runs elsewhere")

    def facts(self) -> dict[str, Any]:
        """What must agree: states, tries, XComs and log lines of each task instance.

        What a task prints and what it logs come to Airflow's supervisor on two ways, each in order; on a busy machine it sees the end of
        one before the beginning of the other.
        """
        found = {}
        for ti in self.tasks():
            index = int(ti["map_index"])
            suffix = "" if index < 0 else f"/{index}"
            task = f"/api/v2/dags/{self.dag}/dagRuns/{quote(self.id)}/taskInstances/{ti['task_id']}"
            tries = self.bed.airflow.call("GET", f"{task}{suffix}/tries")["task_instances"]
            entries = self.bed.airflow.call("GET", f"{task}/xcomEntries?map_index={index}")["xcom_entries"]
            xcoms = {
                x["key"]: self.bed.airflow.xcom(self.dag, self.id, ti["task_id"], x["key"], index)
                for x in entries
                if x["map_index"] == index
            }
            logs = {
                (x["try_number"], what): [line for printed, line in lines if printed == (what == "printed")]
                for x in tries
                if x["start_date"]
                for lines in (self.lines(ti["task_id"], x["try_number"], index),)
                for what in ("printed", "logged")
            }
            name = f"{ti['task_id']}[{index}]"
            history = [(x["try_number"], x["state"]) for x in tries]
            found[name] = {"state": ti["state"], "tries": history, "xcoms": _same(xcoms), "logs": logs}
        return found

    def log(self, task: str = "work", try_number: int = 1, index: int = -1) -> list[str]:
        """The task's lines, without what differs from run to run and without ours."""
        return [line for _, line in self.lines(task, try_number, index)]

    def lines(self, task: str = "work", try_number: int = 1, index: int = -1) -> list[tuple[bool, str]]:
        """The same; true for a line that the task printed, and did not log."""
        lines = self.bed.airflow.log_by_logger(self.dag, self.id, task, try_number, index)
        return [
            (logger in ("task.stdout", "task.stderr"), _VARIES.sub("*", x))
            for logger, x in lines
            if not x.startswith(_OURS) and "::group::" not in x and not x.startswith(_OWN_EFFECT)
        ]

    def marks(self, task: str = "work", try_number: int = 1) -> list[str]:
        """Our own lines in the log."""
        lines = self.bed.airflow.log(self.dag, self.id, task, try_number)
        return [x.removeprefix("[savedworker] ") for x in lines if x.startswith("[savedworker]")]

    def told(self) -> str:
        """What was said of each of its workers, and by the task: for a person who asks why a run ended as it did."""
        workers = [
            f"{x.id}: {x.state} {x.reason} {x.detail!r}; {self.bed.events(x.id)}" for x in self.workers()
        ]
        tasks = [
            line
            for x in self.tasks()
            for line in self.bed.airflow.log(
                self.dag, self.id, x["task_id"], x["try_number"], int(x["map_index"])
            )[-60:]
        ]
        return "\n".join([*workers, *tasks])

    def callbacks(self) -> list[str]:
        """The task and try of every failure or retry callback that was called."""
        run = "".join(x if x.isalnum() else "-" for x in self.id)
        found = self.bed.airflow.call("GET", "/api/v2/variables?limit=1000&variable_key_pattern=callback_%25")
        begins = f"callback_{self.dag}_{run}_"
        keys = [x["key"] for x in found["variables"] if x["key"].startswith(begins)]
        return sorted(x.removeprefix(begins).replace("_", " ") for x in keys)


def _same(value: Any) -> Any:
    return _VARIES.sub("*", value) if isinstance(value, str) else value


@dataclass
class Bed:
    """The Airflow, and the store and fleet that its saved tasks use."""

    airflow: LocalAirflow
    client: Client
    home: Path
    _labels: dict[str, dict[str, str]] = field(default_factory=dict)

    def labels(self, worker: str) -> dict[str, str]:
        """What the worker's specification says of its task; empty while it is being made."""
        if worker not in self._labels:
            try:
                self._labels[worker] = self.client.spec(worker).engine
                self.client.record(worker)
            except NotFound:
                self._labels.pop(worker, None)
                return {}
        return self._labels[worker]

    def run(self, dag: str, steps: int = 3) -> Run:
        before = (
            frozenset(x.id for x in self.client.list()) if (self.home / "store").exists() else frozenset()
        )
        for _ in range(5):
            with contextlib.suppress(AirflowTrouble):
                return Run(self, dag, self.airflow.trigger(dag, {"steps": steps}), before)
            time.sleep(2.0)  # SQLite on a busy machine: "database is locked"
        return Run(self, dag, self.airflow.trigger(dag, {"steps": steps}), before)

    def output(self, worker: str) -> str:
        """What the worker's task has said so far."""
        from savedworker.store import logs

        pieces = self.client.logs(worker, "stdout")
        return b"".join(x.data for x in pieces if isinstance(x, logs.Text)).decode("utf-8", "replace")

    def events(self, worker: str) -> str:
        """What happened to the worker, in order."""
        return ", ".join(f"{x.at:%H:%M:%S} {x.event} {x.detail}" for x in self.client.report(worker).timeline)

    def stored_secrets(self, worker: str) -> list[str]:
        """What of Airflow's own secrets, and which tokens of Airflow's, stand in the worker's specification or checkpoints."""
        environment = self.airflow.environment
        names = ("API_AUTH__JWT_SECRET", "CORE__FERNET_KEY", "DATABASE__SQL_ALCHEMY_CONN", "API__SECRET_KEY")
        secrets = {environment[f"AIRFLOW__{x}"].encode(): x for x in names}
        chunks = WorkerStore(self.client.store, worker).chunks
        texts = [chunks.get(key) for key, _ in chunks.list()]
        assert len(texts) > 3, "there is a checkpoint"
        texts.append(self.client.spec(worker).model_dump_json().encode())
        found = {name for text in texts for secret, name in secrets.items() if secret in text}
        for text in texts:
            for token in _TOKEN.findall(text):
                with contextlib.suppress(ValueError):
                    claims = json.loads(base64.urlsafe_b64decode(token + b"=" * (-len(token) % 4)))
                    if isinstance(claims, dict) and "sub" in claims and "exp" in claims:
                        found.add(f"a token of {claims['sub']}")
        return sorted(found)

    def said(self, component: str, text: str) -> bool:
        """Whether a component of Airflow has written ``text`` to its own log."""
        return text in self.airflow.output(component).read_text(errors="replace")

    def refused_heartbeats(self) -> list[str]:
        """What the API server said about heartbeats of workers' tasks that should not run any more.

        LocalExecutor's tasks are left out: its own event about one stretch of a task may fail the next one (see ``oracle``).
        """
        mine = {f"ti_id={self.labels(x)['ti_id']}" for x in list_workers(self.client.store) if self.labels(x)}
        lines = self.airflow.output("api-server").read_text(errors="replace").splitlines()
        wrong = ("Task not in running state", "Task running elsewhere", "not in live table")
        return [x for x in lines if any(w in x for w in wrong) and mine.intersection(x.split())]


@contextlib.contextmanager
def executor_bed(home: Path, settings: Mapping[str, str] | None = None) -> Iterator[Bed]:
    """Start Airflow in ``home`` with short limits; in the end stop it, and every worker that is left."""
    network.ensure_bridge()
    environment = {
        "SAVEDWORKER_STORE": f"file://{home}/store",
        "SAVEDWORKER_LOCAL_DIR": str(home / "hosts"),
        "AIRFLOW__CORE__EXECUTOR": EXECUTORS,
        "AIRFLOW__CORE__PARALLELISM": "12",
        "AIRFLOW__CORE__MAX_ACTIVE_TASKS_PER_DAG": "12",
        "AIRFLOW__LOGGING__LOGGING_CONFIG_CLASS": "airflow_provider_savedworker.log.config.LOGGING_CONFIG",
        "AIRFLOW__SAVEDWORKER__POLL_INTERVAL": "0.5",
        "AIRFLOW__EXECUTION_API__JWT_EXPIRATION_TIME": "60",
        "AIRFLOW__SCHEDULER__TASK_INSTANCE_HEARTBEAT_TIMEOUT": "40",
        "AIRFLOW__SCHEDULER__TASK_INSTANCE_HEARTBEAT_TIMEOUT_DETECTION_INTERVAL": "5",
        "AIRFLOW__SCHEDULER__SCHEDULER_HEALTH_CHECK_THRESHOLD": "15",
        "AIRFLOW__SCHEDULER__ORPHANED_TASKS_CHECK_INTERVAL": "10",
        # A busy machine answers late; LocalExecutor's tasks are not to fail for it.
        "AIRFLOW__WORKERS__EXECUTION_API_TIMEOUT": "30",
        **(settings or {}),
    }
    airflow = LocalAirflow(home, DAGS, environment, host=network.GATEWAY)
    fleet = LocalFleet(home / "hosts")
    client = Client(open_store(environment["SAVEDWORKER_STORE"]), fleets=lambda _: fleet)
    try:
        airflow.start()
        connection = {
            "connection_id": "suite",
            "conn_type": "http",
            "host": "example.invalid",
            "login": "somebody",
            "password": "a-secret-password",
        }
        airflow.call("POST", "/api/v2/connections", connection)
        yield Bed(airflow, client, home)
    finally:
        airflow.stop(grace=5.0)
        client.store.ensure()
        for worker in [x.id for x in client.list()]:
            with contextlib.suppress(Exception):
                client.cancel(worker, "the end of the tests")
                eventually(partial(_settled, client, worker), 40, "the worker is gone")


def _settled(client: Client, worker: str) -> bool:
    return settled(client.reconcile(worker))


def in_the_meantime(runs: Iterable[Run], act: Callable[[], None], seconds: float) -> None:
    """Call ``act`` until all runs have ended."""
    until = time.monotonic() + seconds
    while any(x.state() not in ("success", "failed") for x in runs):
        assert time.monotonic() < until, {x.dag: (x.state(), x.tasks()) for x in runs}
        act()
        time.sleep(0.5)


def oracle(bed: Bed, names: Iterable[str], steps: Mapping[str, int], seconds: float) -> dict[str, Run]:
    """Runs of the suite under LocalExecutor, as they are meant to end.

    On a busy machine LocalExecutor's own event about one stretch of a task may meet the next one, and fail it (the scheduler says that it
    "finished with state success, but the task instance's state attribute is …"). Such a run is no oracle, and is done again.
    """
    found: dict[str, Run] = {}
    for _ in range(5):
        missing = [x for x in names if x not in found or found[x].state() != ENDS.get(x, "success")]
        found |= {x: bed.run(f"local_{x}", steps.get(x, 2)) for x in missing}
        in_the_meantime([found[x] for x in missing], lambda: None, seconds)
    wrong = {x: found[x].facts() for x in names if found[x].state() != ENDS.get(x, "success")}
    assert not wrong, f"LocalExecutor is no oracle here: {wrong}"
    return found


ENDS = {"failed": "failed"}
"""How runs of the suite end, where not with success."""
