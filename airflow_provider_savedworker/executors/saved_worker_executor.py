"""SavedWorkerExecutor: a thin client of the controller and the store. One worker per queueing of a task instance.

Everything durable is in the store and in Airflow's database: a scheduler that begins finds its workers again. The scheduler's loop
only reads what the tracker's threads found, looks at the database, and tells Airflow.
"""

from __future__ import annotations

import hashlib
import threading
import time
from collections import deque
from collections.abc import Sequence
from datetime import UTC, datetime
from functools import cached_property, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from airflow.configuration import conf
from airflow.executors.base_executor import PARALLELISM, BaseExecutor, get_execution_api_server_url
from airflow.executors.workloads.callback import ExecuteCallback
from airflow.executors.workloads.task import ExecuteTask
from airflow.models.taskinstancekey import TaskInstanceKey
from sqlalchemy.exc import SQLAlchemyError

from airflow_provider_savedworker.executors import outcome
from airflow_provider_savedworker.executors.settings import (
    SECTION,
    Settings,
    only_here,
    read_settings,
    task_options,
)
from airflow_provider_savedworker.executors.tracker import Task, Tracker
from airflow_provider_savedworker.executors.workload import source, worker_id, worker_spec
from airflow_provider_savedworker.log import keep_finished
from savedworker.controller.client import Client
from savedworker.model.errors import NotFound, SavedWorkerError, Temporary
from savedworker.model.record import WorkerRecord
from savedworker.model.written import read
from savedworker.store.apart import open_store_apart
from savedworker.store.worker import list_workers

if TYPE_CHECKING:
    from airflow.executors.workloads import ExecutorWorkload
    from airflow.models.taskinstance import TaskInstance
    from sqlalchemy.orm import Session

LOOK_EVERY = 5.0
"""Seconds between two looks at the task instances of all workers in the database."""
STALE_HEARTBEAT = 12.0
"""A heartbeat older than this is a reason to ask the worker's relay whether the task lives."""

EVENT_LOGS_HELD = 1000
"""Rows for Airflow's event log that are held on to: Airflow 3.3.2 stores those only that somebody else refers to as well."""

NO_CALLBACKS = "SavedWorkerExecutor runs no callbacks. Fix: name another executor in SyncCallback(…, executor=…), or first in [core] executor"


class SavedWorkerExecutor(BaseExecutor):
    """Runs each task as a saved worker: Airflow's supervisor and the task itself move together when their instance is taken.

    Callback and connection-test workloads are refused, by flag; team-specific configuration is not supported.
    """

    supports_ad_hoc_ti_run = True
    supports_callbacks = False
    supports_connection_test = False
    supports_multi_team = False
    pre_assigns_external_executor_id: ClassVar[bool] = True
    is_local = False
    is_production = True
    serve_logs = False

    def __init__(self, parallelism: int | None = None, team_name: str | None = None) -> None:
        slots = parallelism or conf.getint(SECTION, "parallelism", fallback=0) or PARALLELISM
        super().__init__(parallelism=slots, team_name=team_name)
        self._tasks: dict[str, Task] = {}
        self._lock = threading.Lock()
        self._tracker: Tracker | None = None
        self._looked = float("-inf")
        self._event_logs: deque[Any] = deque(maxlen=EVENT_LOGS_HELD)

    # -- what it needs, also in the API server, where it is never started --

    @cached_property
    def settings(self) -> Settings:
        """``[savedworker]``. Raises BadSpec."""
        return read_settings(self.conf, get_execution_api_server_url(self.conf))

    @cached_property
    def client(self) -> Client:
        """On the store. Raises Refused."""
        return Client(open_store_apart(self.settings.store))  # this process forks LocalExecutor's tasks

    @cached_property
    def _airflow_config(self) -> Any:
        return conf.as_dict(display_source=True, display_sensitive=False)

    @cached_property
    def _on_kill(self) -> float:
        return outcome.ON_KILL + conf.getint("workers", "min_heartbeat_interval", fallback=5)

    @cached_property
    def deployment(self) -> str:
        """By which name workers are known to be of this Airflow, among others that share the store."""
        if self.settings.deployment:
            return self.settings.deployment
        from sqlalchemy.engine import make_url

        url = make_url(conf.get("database", "sql_alchemy_conn")).set(password=None)
        return "db-" + hashlib.sha256(url.render_as_string().encode()).hexdigest()[:12]

    # -- what the scheduler calls --

    def start(self) -> None:
        """Look for what an earlier scheduler left, and begin."""
        settings = self.settings
        if only_here(settings.upstream):
            self.log.warning(
                "instances do not reach the Execution API at %s, an address of this machine alone: "
                "set [%s] execution_api_server_url, or no task begins",
                settings.upstream,
                SECTION,
            )
        try:
            self.client.store.ensure()
        except Temporary as error:
            self.log.warning("the store does not answer; tasks wait for it: %s", error)
        self._tracker = Tracker(
            self.client,
            settings.poll_interval,
            settings.threads,
            settings.token_lifetime,
            self._mint,
            self._keep_log,
        )
        self._tracker.start()
        threading.Thread(target=self._sweep, name="savedworker-sweep", daemon=True).start()
        self.log.info("saved workers in %s on fleet %s", self.client.store.url, settings.fleet)

    def queue_workload(self, workload: ExecutorWorkload, session: Session) -> None:
        """A callback is refused, and fails with the reason: an exception here would end Airflow's scheduler, again and again."""
        if not isinstance(workload, ExecuteCallback):
            super().queue_workload(workload, session)
            return
        self.log.error("callback %s: %s", workload.display_name, NO_CALLBACKS)
        self.fail(workload.key, NO_CALLBACKS)

    def _process_workloads(self, workload_items: Sequence[ExecutorWorkload]) -> None:
        for workload in workload_items:
            if not isinstance(workload, ExecuteTask):
                raise TypeError(f"SavedWorkerExecutor runs tasks only, no {type(workload).__name__}")
            key = workload.key
            del self.queued_tasks[key]
            self.running.add(key)
            try:
                self._begin(workload)
            except SavedWorkerError as error:
                self._refuse(workload, str(error))
            except Exception as error:  # one task must not end the scheduler for all the others
                self.log.exception("%s cannot be begun", key)
                self._refuse(workload, f"{type(error).__name__}: {error}")

    def _begin(self, workload: ExecuteTask) -> None:
        ti, key = workload.ti, workload.key
        external_id = ti.external_executor_id or ""
        if not external_id:  # another executor's alias decides whether Airflow assigns one beforehand
            external_id = hashlib.sha256(f"{ti.id} {time.time_ns()}".encode()).hexdigest()[:32]
            self.running_state(key, external_id)
        options, settings = task_options(ti.executor_config, source(ti)), self.settings
        fleet = read(self.client.controller.fleet, options.fleet or settings.fleet, f"{source(ti)}: fleet")
        spec = worker_spec(workload, external_id, settings, options, fleet.lease_term, self._airflow_config)
        spec = spec.model_copy(update={"engine": {**spec.engine, "deployment": self.deployment}})
        self._track(Task(key, str(ti.id), external_id, spec.id, workload.log_path or "", spec=spec))
        self.log.info("%s is worker %s", key, spec.id)

    def _track(self, task: Task) -> None:
        with self._lock:
            known = self._tasks.get(task.worker)
            if known is not None:
                known.key = task.key
                return
            self._tasks[task.worker] = task
        assert self._tracker is not None
        self._tracker.add(task)

    def _refuse(self, workload: ExecuteTask, why: str) -> None:
        self._tell_refusal(workload.key, why, workload.log_path or "")
        self.fail(workload.key, why)

    def _tell_refusal(self, key: TaskInstanceKey, why: str, log_path: str) -> None:
        """Wherever people look for the reason: the scheduler's log, Airflow's event log, the log of the task."""
        self.log.error("%s: %s", key, why)
        self.log_task_event(event="saved worker refused", extra=why, ti_key=key)
        self._event_logs.append(self._task_event_logs[-1])
        if log_path and self._tracker is not None:
            at, base = datetime.now(UTC), Path(conf.get("logging", "base_log_folder"))
            keep = partial(keep_finished.keep_refusal, self.client, at, why, log_path, base)
            self._tracker.aside(f"the log of {key} is not kept", keep)

    def sync(self) -> None:
        """Tell Airflow what has ended, drop what it does not want any more, and keep alive what cannot say that it lives."""
        now = time.monotonic()
        with self._lock:
            tasks = list(self._tasks.values())
        if not tasks:
            return
        ending = [x for x in tasks if not x.ended and (x.refused or (x.record and outcome.over(x.record)))]
        # Before the look at the database: what a worker told Airflow by now is in there.
        seen = {x.worker: x.seen(now) for x in ending}
        due = now - self._looked >= LOOK_EVERY
        if due or ending:
            wanted = [x for x in tasks if not x.ended] if due else ending
            rows = self._look(wanted)
            if rows is None:
                return
            if due:
                self._looked = now
                self._keep_alive(wanted, rows, now)
            for task in wanted:
                self._doubt(task, rows.get(task.ti_id), now)
            for task in ending:
                self._end_task(task, rows.get(task.ti_id), seen[task.worker])
        with self._lock:
            for task in tasks:
                if task.done and task.ended:
                    self._tasks.pop(task.worker, None)

    def _look(self, tasks: Sequence[Task]) -> dict[str, outcome.Row] | None:
        from airflow_provider_savedworker.executors import database

        try:
            return dict(database.rows(x.ti_id for x in tasks))
        except SQLAlchemyError as error:
            self.log.warning("the database does not answer, trying again: %s", error)
            return None

    def _keep_alive(self, tasks: Sequence[Task], rows: dict[str, outcome.Row], now: float) -> None:
        from airflow_provider_savedworker.executors import database

        alive = []
        for task in tasks:
            row, seen = rows.get(task.ti_id), task.seen(now)
            if row is None or row.state != "running":
                continue
            if row.heard is not None and row.heard > STALE_HEARTBEAT:
                task.look_for_heartbeat = True
            term = task.record.lease.term if task.record and task.record.lease else 60.0
            if seen is None or outcome.keeps_alive(seen, term):
                alive.append(task.ti_id)
        try:
            database.heartbeat(alive)
        except SQLAlchemyError as error:
            self.log.warning("heartbeats of %d tasks that move wait for the database: %s", len(alive), error)

    def _doubt(self, task: Task, row: outcome.Row | None, now: float) -> None:
        """Drop a worker that Airflow does not wait for, once the record was read after that showed.

        One that runs may end by itself first: its task's ``on_kill`` is not cut off.
        """
        seen = task.seen(now)
        if seen is None or task.drop:
            return
        why = outcome.unwanted(seen, row, task.external_id)
        if not why:
            task.doubted_at = 0.0
        elif not task.doubted_at:
            task.doubted_at = now
        elif outcome.ends_itself(seen.record) and now - task.doubted_at < self._on_kill:
            return
        elif task.read_at > task.doubted_at:
            self.log.info("%s: %s: worker %s is dropped", task.key, why, task.worker)
            task.drop = why

    def _end_task(self, task: Task, row: outcome.Row | None, seen: outcome.Seen | None) -> None:
        if task.refused:
            self._tell_refusal(task.key, task.refused, task.log_path)
            self._settle(task, "failed", task.refused)
            return
        if seen is None:
            return
        if outcome.unheard_of(seen, row, task.external_id):
            task.deliver = True
        end = outcome.ending(seen, row, task.external_id)
        if end is not None:
            self._settle(task, end, _describe(seen.record))

    def _settle(self, task: Task, end: outcome.End, info: str) -> None:
        task.ended, task.ended_at = True, time.monotonic()
        with self._lock:
            again = any(x.key == task.key and not x.ended for x in self._tasks.values())
        mine = task.key in self.running
        self.log.info("%s: worker %s: %s", task.key, task.worker, info)
        if again or task.key in self.queued_tasks or not mine:
            return  # an event would meet the task instance that was queued again
        if end == "success":
            self.success(task.key, info)
        elif end == "failed":
            self.fail(task.key, info)
        else:
            self.running.discard(task.key)

    def try_adopt_task_instances(self, tis: Sequence[TaskInstance]) -> Sequence[TaskInstance]:
        """Go on with the workers of a scheduler that is gone. What has none is not adopted, and begins again."""
        lost: list[TaskInstance] = []
        for ti in tis:
            external_id = ti.external_executor_id or ""
            worker = worker_id(ti.dag_id, ti.task_id, ti.map_index, str(ti.id), external_id)
            record: WorkerRecord | None = None
            try:
                record = self.client.record(worker)
            except NotFound:
                self.log.info("%s has no worker: it is not adopted", ti.key)
                lost.append(ti)
                continue
            except SavedWorkerError as error:
                self.log.warning("%s: worker %s is adopted unseen: %s", ti.key, worker, error)
            if ti.state == "running":
                ti.last_heartbeat_at = datetime.now(UTC)
            self.running.add(ti.key)
            self._track(Task(ti.key, str(ti.id), external_id, worker, self._log_path(worker), record=record))
            self.log.info("adopted %s: worker %s", ti.key, worker)
        if len(lost) < len(tis):
            threading.Thread(target=self._sweep, name="savedworker-sweep", daemon=True).start()
        return lost

    def _log_path(self, worker: str) -> str:
        try:
            return self.client.spec(worker).engine.get("log_path", "")
        except SavedWorkerError:
            return ""

    def revoke_task(self, *, ti: TaskInstance) -> None:
        """Cancel the task instance's worker, without a word to Airflow."""
        self.running.discard(ti.key)
        self.queued_tasks.pop(ti.key, None)
        worker = worker_id(ti.dag_id, ti.task_id, ti.map_index, str(ti.id), ti.external_executor_id or "")
        with self._lock:
            found = [x for x in self._tasks.values() if x.worker == worker or x.key == ti.key]
        for task in found:
            task.drop = task.drop or "the task was revoked"
            task.ended, task.ended_at = True, time.monotonic()

    def end(self) -> None:
        """Let go of the workers: they go on, and the next scheduler adopts them."""
        if self._tracker is not None:
            self._tracker.stop()

    def terminate(self) -> None:
        """As ``end``."""
        self.end()

    def get_task_log(self, ti: TaskInstance, try_number: int) -> tuple[list[str], list[str]]:
        """What the running worker has said so far. Called in the API server."""
        from airflow_provider_savedworker.log.text import worker_log

        worker = worker_id(
            ti.dag_id, ti.task_id, ti.map_index, str(ti.id), getattr(ti, "external_executor_id", None) or ""
        )
        try:
            record = self.client.record(worker)
            text = worker_log(self.client, record)
        except NotFound:
            return [], []
        except SavedWorkerError as error:
            return [f"the log of worker {worker} cannot be read: {error}"], []
        current = record.incarnation
        where = f" on {current.instance}, incarnation {current.number}" if current else ""
        return [f"worker {worker}{where}: {record.state}"], [text]

    # -- what the tracker calls, in its threads --

    def _mint(self, ti_id: str, seconds: float) -> str:
        token: str = self.jwt_generator.generate(
            extras={"sub": ti_id, "scope": "execution"}, valid_for=seconds
        )
        return token

    def _keep_log(self, task: Task, record: WorkerRecord) -> None:
        if not task.log_path:
            task.log_path = self._log_path(task.worker)
        if task.log_path:
            keep_finished.keep(
                self.client, record, task.log_path, Path(conf.get("logging", "base_log_folder"))
            )
            self.log.debug("kept the log of %s", task.worker)

    def _sweep(self) -> None:
        """Find workers of this Airflow that no scheduler looks after: their task instances may be gone meanwhile."""
        try:
            for worker in list_workers(self.client.store):
                with self._lock:
                    if worker in self._tasks:
                        continue
                task = self._left_over(worker)
                if task is not None:
                    self.log.info("worker %s of %s is looked after", worker, task.key)
                    self._track(task)
        except SavedWorkerError as error:
            self.log.warning("workers that nobody looks after are not looked for: %s", error)

    def _left_over(self, worker: str) -> Task | None:
        try:
            record = self.client.record(worker)
            if record.state.terminal:
                return None
            engine = self.client.spec(worker).engine
        except SavedWorkerError:
            return None
        mine = engine.get("executor") == type(self).__name__ and engine.get("deployment") == self.deployment
        if not mine:
            return None
        key = TaskInstanceKey(
            engine["dag_id"],
            engine["task_id"],
            engine["run_id"],
            int(engine["try_number"]),
            int(engine["map_index"]),
        )
        return Task(
            key,
            engine["ti_id"],
            engine["external_executor_id"],
            worker,
            engine.get("log_path", ""),
            record=record,
        )


def _describe(record: WorkerRecord) -> str:
    """One line for the scheduler's log, and for people who look for the reason."""
    parts = [f"worker {record.id} {record.state}"]
    if record.concluded is not None:
        parts.append(f"told Airflow {record.concluded.outcome}")
    if record.reason:
        parts.append(f"{record.reason}{f' ({record.detail})' if record.detail else ''}")
    if record.migrations or record.cold_starts:
        parts.append(f"migrations {record.migrations}, cold starts {record.cold_starts}")
    return ", ".join(parts)
