"""SavedWorkerOperator: a command that Airflow sees as one task, however often its instance is reclaimed.

Imported by DAG files: everything of ``savedworker`` is imported when a task runs, not here.
"""

from __future__ import annotations

import hashlib
import logging
import re
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeVar
from urllib.parse import urlsplit

from airflow.sdk import BaseOperator, ResumableJobMixin
from airflow.sdk.configuration import conf
from airflow.sdk.exceptions import (
    AirflowException,
    AirflowFailException,
    AirflowSkipException,
    AirflowTaskTimeout,
)

from airflow_provider_savedworker.links.saved_worker import SavedWorkerLink

if TYPE_CHECKING:
    from airflow.sdk import Context
    from pydantic import JsonValue

    from airflow_provider_savedworker.follow import Follower
    from airflow_provider_savedworker.hooks.saved_worker import SavedWorkerHook
    from savedworker.controller.client import Client
    from savedworker.model.record import WorkerRecord
    from savedworker.model.spec import WorkerSpec

T = TypeVar("T")

STATE_KEY = "saved_worker"
"""Key in Airflow's task state store (and XCom) that says which worker a task instance has, across its tries."""

SUBMIT_PATIENCE = 300.0
"""How long a store that does not answer is waited for before the try fails."""

OLD_WORKER_PATIENCE = 300.0
"""How long a cleared task waits for the end of its worker before, so that there are never two."""

CLEARED, MISSING = "cleared", "missing"
"""What an earlier try's worker is to the next one, beside the states of a worker's record."""

XCOM_TIMELINE = 200
"""Most entries of a report's timeline in an XCom, which is a row of Airflow's database. The store has them all."""

ENDED_BY_AIRFLOW = frozenset(
    {"failed", "success", "skipped", "upstream_failed", "removed", "restarting", None}
)
"""States of a task instance in which nobody waits for its worker any more: set by a user, or final in another way.

None is a task that was cleared. In every other state the worker belongs to a try that runs, or to the next one.
"""


class SavedWorkerOperator(ResumableJobMixin, BaseOperator):
    """Runs ``command`` as a saved worker and follows it to its end; returns its report (``report --json``) as XCom.

    A reclaimed instance costs no try: the task stays running (deferred) while the worker moves. A failure of the worker
    fails the try with the reason, and the task's ``retries`` apply; a wrong specification and a worker that somebody
    cancelled fail the task at once.

    :param command: the program and its arguments; a string is run by ``/bin/sh -c``. Templated.
    :param env: environment of the worker. It is stored with the worker's specification. Templated.
    :param image: ``host``, a root directory, ``oci:/DIR[:TAG]``, or ``docker://NAME[:TAG]``. Templated.
    :param user: user (and group) to run as, ``NAME[:GROUP]`` or numbers. Templated.
    :param workdir: working directory in the image. Templated.
    :param volumes: host paths to show in the worker, ``SRC:DST[:ro|rw]``; they are not part of a checkpoint. Templated.
    :param inputs: ``URL:PATH``, fetched into the worker's files before its first start. Templated.
    :param outputs: ``PATH:URL``, published once, when the worker has succeeded. Templated.
    :param credentials: ``instance`` gives the worker the AWS credentials of whatever instance it is on; ``none`` (default) does not.
    :param memory: limit, such as ``4GiB``, or a number of bytes.
    :param cpus: limit, in CPUs.
    :param network: ``private`` or ``host``.
    :param checkpoint_interval: ``5m``, a number of seconds, ``auto``, or ``off`` (on notice only): the short form of
        ``checkpoint={"interval": …}``. Templated.
    :param checkpoint: fields of the checkpoint policy as in docs/spec.md, such as ``{"keep": 3, "bandwidth": "4MiB"}``. Templated.
    :param placement: fields of the placement policy as in docs/spec.md, such as ``{"on_demand_after_losses": 2, "spare_for": None}``.
        Templated.
    :param max_migrations: how many moves are allowed; None for any number, 0 for none.
    :param orphan_after: for how long (``24h``) no engine may look after the worker, before it is checkpointed and its instance ends.
    :param retention: how long (``7d``) the store keeps the worker after its end.
    :param fleet: kind of instance; otherwise the connection's, then ``[savedworker] fleet``. Templated.
    :param syscalls: ``guarded`` or ``all``: whether system calls whose state cannot be saved are refused.
    :param store: store URL; otherwise the connection's, ``SAVEDWORKER_STORE``, or ``[savedworker] store``. Templated.
    :param name: readable beginning of the worker's id; otherwise DAG and task. Templated.
    :param savedworker_conn_id: connection of type ``savedworker``; it need not exist.
    :param skip_on_exit_code: exit code, or codes, with which the task is skipped rather than failed (or done).
    :param deferrable: True (default) follows the worker in the triggerer; False occupies a slot of the executor.
    :param poll_interval: seconds between two looks at the worker; otherwise ``[savedworker] poll_interval``.
    :param durable: True (default) lets a retry go on with the worker of a try whose process was lost. False cancels that
        worker and starts from the beginning.
    """

    template_fields: Sequence[str] = (
        "command",
        "env",
        "image",
        "user",
        "workdir",
        "volumes",
        "inputs",
        "outputs",
        "checkpoint_interval",
        "checkpoint",
        "placement",
        "fleet",
        "store",
        "name",
        "savedworker_conn_id",
    )
    template_fields_renderers = {  # noqa: RUF012
        "command": "bash",
        "env": "json",
        "volumes": "json",
        "checkpoint": "json",
        "placement": "json",
    }
    operator_extra_links = (SavedWorkerLink(),)
    ui_color = "#d7ecd9"
    external_id_key = STATE_KEY

    def __init__(
        self,
        *,
        command: str | Sequence[str],
        env: Mapping[str, str] | None = None,
        image: str = "host",
        user: str | None = None,
        workdir: str = "/",
        volumes: Sequence[str] = (),
        inputs: Sequence[str] = (),
        outputs: Sequence[str] = (),
        credentials: str = "none",
        memory: str | int | None = None,
        cpus: float | None = None,
        network: str = "private",
        checkpoint_interval: str | float | None = None,
        checkpoint: Mapping[str, Any] | None = None,
        placement: Mapping[str, Any] | None = None,
        max_migrations: int | None = None,
        orphan_after: str | float | None = None,
        retention: str | float | None = None,
        fleet: str | None = None,
        syscalls: str = "guarded",
        store: str | None = None,
        name: str | None = None,
        savedworker_conn_id: str = "savedworker_default",
        skip_on_exit_code: int | Sequence[int] | None = None,
        deferrable: bool = True,
        poll_interval: float | None = None,
        **kwargs: Any,
    ) -> None:
        super().__init__(**kwargs)
        self.command = command
        self.env = env
        self.image = image
        self.user = user
        self.workdir = workdir
        self.volumes = volumes
        self.inputs = inputs
        self.outputs = outputs
        self.credentials = credentials
        self.memory = memory
        self.cpus = cpus
        self.network = network
        self.checkpoint_interval = checkpoint_interval
        self.checkpoint = checkpoint
        self.placement = placement
        self.max_migrations = max_migrations
        self.orphan_after = orphan_after
        self.retention = retention
        self.fleet = fleet
        self.syscalls = syscalls
        self.store = store
        self.name = name
        self.savedworker_conn_id = savedworker_conn_id
        self.skip_on_exit_code = skip_on_exit_code
        self.deferrable = deferrable
        self.poll_interval = poll_interval
        self._client: Client | None = None
        self._worker: str | None = None
        self._context: Context | None = None
        self._report: dict[str, Any] | None = None
        self._wake = threading.Event()

    # -- what Airflow calls --

    def execute(self, context: Context) -> dict[str, Any] | None:
        """Submit the worker, or find the one that this task instance has already, and follow it."""
        self._context = context
        try:
            report: dict[str, Any] | None = self.execute_resumable(context)
        except AirflowTaskTimeout:
            if self._client is not None and self._worker is not None:
                self._end(self._client, self._worker, f"execution_timeout of {self._label(context)}")
            raise
        return report

    def execute_complete(self, context: Context, event: Mapping[str, Any]) -> dict[str, Any] | None:
        """The trigger says that the worker has ended: relay what is left, and report."""
        from savedworker.model.errors import SavedWorkerError

        worker = str(event["worker"])
        try:
            client = self._hook(str(event["store"])).get_client()
            ended = client.record(worker).state.terminal
        except SavedWorkerError as error:
            raise AirflowException(f"worker {worker}: {error}") from error
        self._client, self._worker, self._context = client, worker, context
        if not ended:
            self._defer(client, worker)
        self._follower(client, worker, only_looks=True).step()
        return self._finish(context, client, worker)

    def resume_execution(self, next_method: str, next_kwargs: dict[str, Any] | None, context: Context) -> Any:
        """As in BaseOperator; when the deferral timed out or its trigger broke, the worker ends with the try."""
        from airflow.sdk.exceptions import TaskDeferralError, TaskDeferralTimeout

        try:
            return super().resume_execution(next_method, next_kwargs, context)
        except (TaskDeferralError, TaskDeferralTimeout) as error:
            known = self._known(context)
            if known:
                self.log.warning("%s: worker %s is cancelled with this try", error, known["worker"])
                client = self._hook(known["store"]).get_client()
                self._end(client, known["worker"], f"{type(error).__name__} of {self._label(context)}")
            raise

    def on_kill(self) -> None:
        """Cancel the worker if, and only if, a user (or Airflow for good) ended this task instance.

        Airflow also calls this when the machine of this *task process* goes away; then the worker goes on, and the next
        try finds it. Which of the two it is stands in the task instance's state, which is asked for in a thread: this
        is a signal handler, and Airflow kills the process a few seconds later.
        """
        if self._client is not None and self._worker is not None and self._context is not None:
            threading.Thread(
                target=self._cancel_if_ended, args=(self._client, self._worker, self._context), daemon=True
            ).start()
        self._wake.set()

    # -- starting --

    def _hook(self, store: str | None = None) -> SavedWorkerHook:
        from airflow_provider_savedworker.hooks.saved_worker import SavedWorkerHook

        return SavedWorkerHook(self.savedworker_conn_id, store or self.store, self.fleet)

    def _patiently(self, call: Callable[[], T]) -> T:
        """``call``, again and again while the store does not answer; what else fails, fails the task."""
        from savedworker.model.errors import Refused, SavedWorkerError, Temporary

        until = time.monotonic() + SUBMIT_PATIENCE
        while True:
            try:
                return call()
            except Refused as error:
                raise AirflowFailException(str(error)) from error
            except Temporary as error:
                if time.monotonic() > until:
                    raise AirflowException(f"the worker could not be submitted: {error}") from error
                self.log.warning("%s; trying again", error)
                self._wake.wait(error.retry_after)
                self._wake.clear()
            except SavedWorkerError as error:
                raise AirflowException(f"the worker could not be submitted: {error}") from error

    # -- what ResumableJobMixin calls: the "job" is the note below STATE_KEY --

    def submit_job(self, context: Context) -> JsonValue:
        """Submit this try's worker, once no worker of an earlier try runs any more; returns the note."""
        return self._patiently(lambda: self._submit(context))

    def get_job_status(self, external_id: JsonValue, context: Context) -> str:
        """The state of the noted worker; CLEARED if a user wants another one; MISSING if it was never submitted."""
        from savedworker.model.errors import NotFound

        note = _as_note(external_id)
        if note is None:
            return MISSING
        if note["max_tries"] != context["ti"].max_tries:  # which only clearing a task raises
            return CLEARED
        try:
            return self._patiently(lambda: str(self._client_of(note).record(note["worker"]).state.value))
        except AirflowException as error:
            if isinstance(error.__cause__, NotFound):
                return MISSING
            raise

    def is_job_active(self, status: str) -> bool:
        """Whether to go on with a worker in this state."""
        from savedworker.model.record import State

        return status not in (CLEARED, MISSING) and not State(status).terminal

    def is_job_succeeded(self, status: str) -> bool:
        """Whether to take the result of a worker in this state."""
        return status == "succeeded"

    def poll_until_complete(self, external_id: JsonValue, context: Context) -> Any:
        """Follow the noted worker, or defer; returns the report (which the mixin wants of it, when it reconnects)."""
        client, worker = self._adopt(external_id, context)
        if self.deferrable:
            self._defer(client, worker)
        return self.get_job_result(external_id, context)

    def get_job_result(self, external_id: JsonValue, context: Context) -> Any:
        """The noted worker's report, after its end; raises what Airflow should see of a worker that did not succeed."""
        if self._report is None:
            client, worker = self._adopt(external_id, context)
            self._follow(client, worker)
            self._report = self._finish(context, client, worker)
        return self._report

    def _submit(self, context: Context) -> JsonValue:
        from savedworker.model.errors import AlreadyExists

        hook = self._hook()
        client = hook.get_client()
        spec = self.worker_spec(context, hook)
        self._end_older(context, spec.id)
        # First the note, then the worker: a process that dies in between leaves nothing that its successor cannot find.
        note = self._note(context, client, spec.id)
        self._client, self._worker = client, spec.id
        try:
            client.submit(spec)
            self.log.info("worker %s in %s", spec.id, client.store.url)
        except AlreadyExists:
            self.log.warning(
                "worker %s was submitted by this try before, a little differently: it goes on", spec.id
            )
        return note

    def _adopt(self, external_id: JsonValue, context: Context) -> tuple[Client, str]:
        """The noted worker as this try's own."""
        note = _as_note(external_id)
        if note is None:
            raise AirflowException(f"{external_id!r} names no worker")
        worker = str(note["worker"])
        client = self._client if self._worker == worker and self._client else self._client_of(note)
        if note["try_number"] != context["ti"].try_number:
            self.log.info("going on with worker %s of try %s", worker, note["try_number"])
            self._note(context, client, worker)
        self._client, self._worker = client, worker
        return client, worker

    def _client_of(self, note: Mapping[str, Any]) -> Client:
        return self._hook(str(note["store"])).get_client()

    def _end_older(self, context: Context, worker: str) -> None:
        """Cancel the noted worker if it is another one than ``worker`` and alive, and wait for the end of all of it."""
        from airflow_provider_savedworker.follow import cancel
        from savedworker.model.errors import NotFound

        known = self._known(context)
        if known is None or known["worker"] == worker:
            return
        old = str(known["worker"])
        client = self._client_of(known)
        try:
            record = client.record(old)
        except NotFound:
            return
        if not record.state.terminal:
            self.log.info("worker %s of try %s is cancelled: a new one is wanted", old, known["try_number"])
        ending = cancel(client, old, f"a new worker for {self._label(context)}", OLD_WORKER_PATIENCE)
        ending.join(OLD_WORKER_PATIENCE)
        if ending.is_alive():
            raise AirflowException(
                f"worker {old} of try {known['try_number']} has not ended: no second one starts"
            )

    def _known(self, context: Context) -> dict[str, Any] | None:
        """The note that this or an earlier try of the task instance left."""
        states = context.get("task_state_store")
        return _as_note(states.get(STATE_KEY)) if states is not None else None

    def _note(self, context: Context, client: Client, worker: str) -> JsonValue:
        ti = context["ti"]
        note: dict[str, JsonValue] = {
            "worker": worker,
            "store": client.store.url,
            "try_number": ti.try_number,
            "max_tries": ti.max_tries,
        }
        states = context.get("task_state_store")
        if states is not None:
            states.set(STATE_KEY, note)
        ti.xcom_push(STATE_KEY, {"worker": worker, "store": client.store.url})
        return note

    def worker_id(self, context: Context) -> str:
        """This try's worker: the same whenever it is asked, and no other try's anywhere.

        Airflow gives every try of every task instance its own id, which makes this hold across deployments that share a
        store, and across runs that are deleted and made again.
        """
        ti = context["ti"]
        words = self.name or f"{ti.dag_id}-{ti.task_id}"
        readable = re.sub(r"[^a-z0-9]+", "-", words.lower())[:40].strip("-") or "task"
        if ti.map_index is not None and ti.map_index >= 0:
            readable = f"{readable}-{ti.map_index}"
        return f"{readable}-{hashlib.sha256(str(ti.id).encode()).hexdigest()[:12]}"

    def worker_spec(self, context: Context, hook: SavedWorkerHook) -> WorkerSpec:
        """The specification of this try's worker. Raises Refused (BadSpec) for fields that are wrong."""
        from savedworker.model.errors import BadSpec
        from savedworker.model.spec import Input, Output, Volume, parse_spec
        from savedworker.model.units import parse_duration, parse_interval, parse_size
        from savedworker.model.written import read, read_checkpoint, read_placement

        ti = context["ti"]
        source = f"task {ti.task_id}"
        if not self.command:
            raise BadSpec(
                f"{source}: command is empty", "give a program and its arguments, or a line for the shell"
            )
        checkpoint = read_checkpoint(self.checkpoint, self.checkpoint_interval, source)
        if "interval" not in checkpoint and hook.checkpoint_interval is not None:
            where = f"connection {self.savedworker_conn_id}: checkpoint_interval"
            checkpoint["interval"] = read(parse_interval, hook.checkpoint_interval, where)
        durations = {
            name: read(parse_duration, value, f"{source}: {name}")
            for name, value in (("orphan_after", self.orphan_after), ("retention", self.retention))
            if value is not None
        }
        command = (
            ["/bin/sh", "-c", self.command]
            if isinstance(self.command, str)
            else [str(x) for x in self.command]
        )
        return parse_spec(
            {
                "id": self.worker_id(context),
                "command": tuple(command),
                "env": {str(k): str(v) for k, v in (self.env or {}).items()},
                "image": self.image,
                "user": self.user,
                "workdir": self.workdir,
                "volumes": tuple(read(Volume.parse, x, f"{source}: volumes") for x in self.volumes),
                "inputs": tuple(read(Input.parse, x, f"{source}: inputs") for x in self.inputs),
                "outputs": tuple(read(Output.parse, x, f"{source}: outputs") for x in self.outputs),
                "credentials": self.credentials,
                "memory": None if self.memory is None else read(parse_size, self.memory, f"{source}: memory"),
                "cpus": self.cpus,
                "network": self.network,
                "syscalls": self.syscalls,
                "fleet": hook.fleet,
                "lease_term": hook.lease_term(),
                "checkpoint": checkpoint,
                "placement": read_placement(self.placement, source),
                "max_migrations": self.max_migrations,
                **durations,
                "engine": engine_labels(ti),
            },
            source=source,
        )

    # -- following --

    def _poll_interval(self) -> float:
        return self.poll_interval or conf.getfloat("savedworker", "poll_interval", fallback=2.0)

    def _defer(self, client: Client, worker: str) -> None:
        from airflow_provider_savedworker.triggers.saved_worker import SavedWorkerTrigger

        self.defer(
            trigger=SavedWorkerTrigger(
                worker=worker,
                store=client.store.url,
                poll_interval=self._poll_interval(),
                secrets=secret_names(self.env or {}),
                key_file=self._hook().key_file,
            ),
            method_name="execute_complete",
            timeout=self.execution_timeout,
        )

    def _follower(self, client: Client, worker: str, only_looks: bool = False) -> Follower:
        from airflow_provider_savedworker.follow import Follower

        return Follower(client, worker, log_line, only_looks)

    def _follow(self, client: Client, worker: str) -> None:
        follower = self._follower(client, worker)
        while not follower.step().done:
            self._wake.wait(self._poll_interval())
            self._wake.clear()

    def _end(self, client: Client, worker: str, by: str) -> None:
        from airflow_provider_savedworker.follow import cancel

        cancel(client, worker, by).join(60)

    def _cancel_if_ended(self, client: Client, worker: str, context: Context) -> None:
        try:
            state = task_state(context["ti"])
        except Exception as error:  # noqa: BLE001 whatever it is, a doubt must not end a healthy worker
            self.log.warning("the task's state is not known (%s): worker %s goes on", error, worker)
            return
        if state in ENDED_BY_AIRFLOW:
            self.log.info("the task is %s: worker %s is cancelled", state or "cleared", worker)
            self._end(client, worker, f"Airflow: {self._label(context)} is {state or 'cleared'}")
        else:
            self.log.info("this process ends, the task is %s: worker %s goes on", state, worker)

    # -- the end --

    def _finish(self, context: Context, client: Client, worker: str) -> dict[str, Any] | None:
        """The report of a worker that succeeded; otherwise raise what the engine should see."""
        from savedworker.model.errors import SavedWorkerError
        from savedworker.model.record import Reason

        try:
            record = client.record(worker)
            report = bounded(client.report(worker).model_dump(mode="json"))
        except SavedWorkerError as error:
            raise AirflowException(f"worker {worker}: {error}") from error
        self.log.info("%s", summary(report))
        own = report["state"] == "succeeded" or record.reason is Reason.EXIT
        if own and record.exit_code is not None and record.exit_code in self._skip_codes():
            context["ti"].xcom_push("report", report)
            raise AirflowSkipException(f"worker {worker} ended with exit code {record.exit_code}: skipped")
        if report["state"] == "succeeded":
            return report
        context["ti"].xcom_push("report", report)
        raise failure(record)

    def _skip_codes(self) -> Sequence[int]:
        wanted = self.skip_on_exit_code
        return () if wanted is None else (wanted,) if isinstance(wanted, int) else wanted

    def _label(self, context: Context) -> str:
        ti = context["ti"]
        index = "" if ti.map_index is None or ti.map_index < 0 else f"[{ti.map_index}]"
        return f"{ti.dag_id}.{ti.task_id}{index} of {ti.run_id}"


def _as_note(found: Any) -> dict[str, Any] | None:
    """``found`` as the note that a try left, if it is one."""
    wanted = {"worker", "store", "try_number", "max_tries"}
    return found if isinstance(found, dict) and wanted <= set(found) else None


def engine_labels(ti: Any) -> dict[str, str]:
    """What the worker's specification says of the task instance: deployment (if it has a name), DAG, run, task, map index, try."""
    deployment = conf.get("savedworker", "deployment", fallback="")
    labels = {
        "engine": "airflow",
        "dag_id": ti.dag_id,
        "run_id": ti.run_id,
        "task_id": ti.task_id,
        "map_index": str(-1 if ti.map_index is None else ti.map_index),
        "try_number": str(ti.try_number),
        "ti_id": str(ti.id),
    }
    return {"deployment": str(deployment), **labels} if deployment else labels


def secret_names(env: Mapping[str, str]) -> tuple[str, ...]:
    """Variables of the worker's environment that hold something which Airflow masks in this process."""
    from airflow.sdk._shared.secrets_masker import redact

    return tuple(str(k) for k, v in env.items() if redact(str(v)) != str(v))


def mask_values(env: Mapping[str, str], names: Sequence[str]) -> None:
    """Have Airflow mask these variables' values in this process too; of a URL, also the password alone."""
    from airflow.sdk.log import mask_secret

    for value in (env[x] for x in names if x in env):
        mask_secret(value)
        try:
            password = urlsplit(value).password
        except ValueError:
            password = None
        if password:
            mask_secret(password)


def bounded(report: dict[str, Any], limit: int = XCOM_TIMELINE) -> dict[str, Any]:
    """``report`` with at most ``limit`` timeline entries, and ``timeline_omitted``: how many were left out.

    The oldest checkpoints that went well go first, then the oldest entries of any other kind.
    """
    timeline = report["timeline"]
    excess = len(timeline) - limit
    if excess <= 0:
        return report
    routine = [
        i for i, x in enumerate(timeline) if x["event"] in ("checkpoint_started", "checkpoint_committed")
    ]
    others = [i for i in range(len(timeline)) if i not in set(routine)]
    dropped = set([*routine, *others][:excess])
    kept = [x for i, x in enumerate(timeline) if i not in dropped]
    return {**report, "timeline": kept, "timeline_omitted": excess}


def failure(record: WorkerRecord) -> AirflowException:
    """What a worker that did not succeed is for Airflow. One more try helps against all but a wrong spec and a cancel."""
    from savedworker.model.record import Reason

    parts = [f"worker {record.id} {record.state}: {record.reason or 'no reason given'}"]
    if record.exit_code is not None:
        parts.append(f"exit code {record.exit_code}")
    if record.signal is not None:
        parts.append(f"signal {record.signal}")
    if record.detail and record.detail not in parts:  # which often says the same
        parts.append(record.detail)
    if record.after_restore:
        parts.append("soon after a restore")
    final = record.reason in (Reason.SPEC_ERROR, Reason.CANCELLED)
    return (AirflowFailException if final else AirflowException)(", ".join(parts))


def summary(report: Mapping[str, Any]) -> str:
    """One line for the end of the task's log."""
    return (
        f"worker {report['id']} {report['state']}: "
        f"migrations {report['migrations']}, cold starts {report['cold_starts']}, "
        f"{report['lost_seconds']:.1f} s lost, {report['away_seconds']:.1f} s away"
    )


def log_line(level: int, source: str, text: str) -> None:
    """Write one line to the log of the task (or trigger) that this code runs for."""
    if source:
        logging.getLogger(f"savedworker.{source}").log(level, "%s", text)
    else:
        logging.getLogger("savedworker").log(level, "[savedworker] %s", text)


def task_state(ti: Any) -> str | None:
    """The state that Airflow's database has for this task instance now; None if it was cleared.

    Raises what Airflow's own channel raises when it cannot be asked. A task instance that is gone counts as removed.
    """
    from airflow.sdk.execution_time.task_runner import RuntimeTaskInstance

    found = RuntimeTaskInstance.get_task_states(
        dag_id=ti.dag_id, task_ids=[ti.task_id], run_ids=[ti.run_id], map_index=ti.map_index
    )
    key = ti.task_id if ti.map_index < 0 else f"{ti.task_id}_{ti.map_index}"
    state = found.get(ti.run_id, {}).get(key, "removed")
    return None if state is None else str(getattr(state, "value", state))
