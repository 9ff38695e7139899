"""Looks after the executor's workers in threads of its own: submit, bring on, renew tokens, deliver, keep the log.

The scheduler's loop never waits for a store, a fleet or the API server. What a visit found is on the task; the loop reads it.
"""

from __future__ import annotations

import http.client
import json
import logging
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from pydantic import ValidationError

from airflow_provider_savedworker.executors.outcome import Seen, over
from savedworker.agent.relay import airflow as relay
from savedworker.agent.relay.tokens import TokenNote
from savedworker.agent.relay.upstream import Upstream
from savedworker.controller.client import Client
from savedworker.controller.due import Due
from savedworker.model.decisions import settled
from savedworker.model.errors import AlreadyExists, NotFound, Refused, SavedWorkerError
from savedworker.model.record import WorkerRecord
from savedworker.model.spec import WorkerSpec

log = logging.getLogger(__name__)

UNHEARD_FOR = 20.0
"""Seconds for which a note of the relay that nobody takes heartbeats counts."""
DELIVER_TIMEOUT = 10.0
MISSING_PATIENCE = 60.0
"""Seconds for which a worker may be missing from the store before that is believed."""
SETTLE_PATIENCE = 600.0
"""How long after a worker's end its instances are looked after."""


@dataclass
class Task:
    """One queueing of a task instance, and its worker. The tracker's threads write it, one at a time."""

    key: Any
    ti_id: str
    external_id: str
    worker: str
    log_path: str
    spec: WorkerSpec | None = None
    """None for a worker that an earlier scheduler submitted, until it is read."""
    record: WorkerRecord | None = None
    read_at: float = 0.0
    lease: tuple[int, int] | None = None
    lease_since: float = 0.0
    token_until: float = 0.0
    drop: str = ""
    """Why the worker is to be cancelled."""
    cancelled: bool = False
    doubted_at: float = 0.0
    """When Airflow's database first showed no interest in it."""
    look_for_heartbeat: bool = False
    heartbeat: bytes | None = None
    unheard_at: float = float("-inf")
    deliver: bool = False
    """Airflow has not heard what the worker concluded: pass it on."""
    delivered: bool = False
    refused: str = ""
    """Why the worker could not even be submitted, or is not there."""
    missing_since: float | None = None
    kept_log: bool = False
    ended: bool = False
    """Airflow has been told, or need not be."""
    ended_at: float = 0.0
    done: bool = False
    warned: dict[str, float] = field(default_factory=dict)

    def seen(self, now: float) -> Seen | None:
        """For the decisions; None before the first look."""
        if self.record is None:
            return None
        return Seen(
            record=self.record,
            age=now - self.read_at,
            lease_silent=now - self.lease_since if self.record.lease_held else 0.0,
            unheard=now - self.unheard_at < UNHEARD_FOR,
            delivered=self.delivered,
            dropped=self.cancelled,
        )


class Tracker:
    """``mint`` makes a token for a task instance that lives so many seconds; ``keep_log`` stores a finished worker's log."""

    def __init__(
        self,
        client: Client,
        poll: float,
        threads: int,
        token_lifetime: float,
        mint: Callable[[str, float], str],
        keep_log: Callable[[Task, WorkerRecord], None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._client = client
        self._poll = poll
        self._lifetime = token_lifetime
        self._mint = mint
        self._keep_log = keep_log
        self._clock = clock
        self._due = Due[Callable[[], None]]()
        # Daemons: a scheduler that ends does not wait for a store or a fleet. Every step may be cut off anywhere.
        self._threads = [
            threading.Thread(target=self._run, name=f"savedworker-tracker-{n}", daemon=True)
            for n in range(threads)
        ]

    def start(self) -> None:
        """Begin."""
        for thread in self._threads:
            thread.start()

    def stop(self) -> None:
        """End, without waiting long for what is under way; the workers go on, and whoever finds them goes on with them."""
        self._due.stop()
        until = time.monotonic() + 1.0
        for thread in self._threads:
            if thread.is_alive():
                thread.join(timeout=max(0.0, until - time.monotonic()))

    def add(self, task: Task) -> None:
        """Look after ``task`` from now on."""
        self._due.put(partial(self._work, task))

    def aside(self, name: str, work: Callable[[], None]) -> None:
        """Do ``work`` in a thread of the tracker's, once. What goes wrong is logged under ``name``."""
        self._due.put(partial(self._aside, name, work))

    @staticmethod
    def _aside(name: str, work: Callable[[], None]) -> None:
        try:
            work()
        except Exception as error:  # the store's, or the user's own remote logging's
            log.warning("%s: %s: %s", name, type(error).__name__, error)
            log.debug("%s", name, exc_info=True)

    def _run(self) -> None:
        while (work := self._due.take()) is not None:
            work()

    def _work(self, task: Task) -> None:
        try:
            self.visit(task)
            task.missing_since = None
        except NotFound as error:
            self._missing(task, str(error))
        except SavedWorkerError as error:
            self._complain(task, str(error))
        except Exception as error:  # a defect here, or in a fleet's library, must not end the worker
            self._complain(task, f"{type(error).__name__}: {error}")
            log.debug("visiting %s", task.worker, exc_info=True)
        if not task.done:
            self._due.put(partial(self._work, task), self._poll)

    def _missing(self, task: Task, why: str) -> None:
        """There is no such worker, or none any more: believed after a while."""
        now = self._clock()
        task.missing_since = now if task.missing_since is None else task.missing_since
        if now - task.missing_since > MISSING_PATIENCE:
            task.refused, task.done = why, True
        else:
            self._complain(task, why)

    def _complain(self, task: Task, text: str) -> None:
        now = self._clock()
        if now - task.warned.get(text, float("-inf")) > 60.0:
            task.warned[text] = now
            log.warning("worker %s: %s; trying again", task.worker, text)

    def visit(self, task: Task) -> None:
        """One look at a worker, and what follows. Raises SavedWorkerError; the next visit goes on."""
        if task.record is None and task.spec is not None and not self._submit(task):
            return
        if task.drop and not task.cancelled:
            self._client.cancel(task.worker, f"Airflow: {task.drop}")
            task.cancelled = True
        if task.record is None or not task.record.state.terminal:
            self._renew_token(task)
        try:
            record = self._client.reconcile(task.worker)
        except NotFound:
            raise
        except SavedWorkerError as error:
            self._complain(task, str(error))
            record = self._client.record(task.worker)  # a fleet that does not answer hides nothing
        self._saw(task, record)
        if task.look_for_heartbeat:
            self._look_for_heartbeat(task)
        if not over(record):
            return
        if task.deliver and not task.delivered:
            task.delivered = self._deliver(task)
        if not task.kept_log:
            self._keep_log(task, record)
            task.kept_log = True
        if task.ended:
            task.done = settled(record) or self._clock() - task.ended_at > SETTLE_PATIENCE

    def _saw(self, task: Task, record: WorkerRecord) -> None:
        now = self._clock()
        lease = (record.lease.incarnation, record.lease.renewal) if record.lease else None
        if lease != task.lease:
            task.lease, task.lease_since = lease, now
        task.record, task.read_at = record, now

    def _submit(self, task: Task) -> bool:
        """Create the worker. False when that can never succeed."""
        assert task.spec is not None
        try:
            self._client.submit(task.spec)
        except (Refused, AlreadyExists) as error:
            task.refused = str(error)
            task.done = True
            return False
        task.record = self._client.record(task.worker)
        task.read_at = self._clock()
        return True

    def _renew_token(self, task: Task) -> None:
        """Before the worker begins, and again when half of the token's life is over."""
        if self._clock() < task.token_until - self._lifetime / 2:
            return
        token = self._mint(task.ti_id, self._lifetime)
        self._client.keep_engine_note(
            task.worker, relay.TOKEN, TokenNote(token=token).model_dump_json().encode()
        )
        task.token_until = self._clock() + self._lifetime

    def _look_for_heartbeat(self, task: Task) -> None:
        task.look_for_heartbeat = False
        note = self._client.engine_note(task.worker, relay.HEARTBEAT)
        if note is not None and note != task.heartbeat:
            task.heartbeat, task.unheard_at = note, self._clock()

    def _deliver(self, task: Task) -> bool:
        """Pass on what the worker concluded, once more. True when Airflow took or refused it."""
        spec = task.spec = task.spec or self._client.spec(task.worker)
        note = self._client.engine_note(task.worker, relay.CONCLUSION)
        if note is None or spec.relay is None:
            return True
        try:
            call = relay.ConclusionNote.model_validate_json(note)
        except ValidationError as error:
            self._complain(task, f"what it concluded cannot be read: {error}")
            return True
        token = self._mint(task.ti_id, 60.0)
        headers = {"Content-Type": "application/json"}
        if call.api_version:
            headers[relay.API_VERSION] = call.api_version
        try:
            answer = Upstream(spec.relay.upstream, spec.relay.authorities).send(
                "PATCH", call.path, headers, call.body.encode(), token, DELIVER_TIMEOUT
            )
        except (OSError, http.client.HTTPException) as error:
            self._complain(task, f"what it concluded waits for the API server: {error}")
            return False
        if answer.status >= 500 or answer.status in (401, 403, 429):
            self._complain(task, f"what it concluded waits for the API server: status {answer.status}")
            return False
        if answer.status >= 400:
            log.info(
                "worker %s: the API server answers %d to %s", task.worker, answer.status, _state(call.body)
            )
        return True


def _state(body: str) -> str:
    try:
        return str(json.loads(body).get("state"))
    except (ValueError, AttributeError):
        return "?"
