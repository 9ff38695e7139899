"""What an engine or a person asks of workers: submit, watch, checkpoint, preempt, cancel. Thin calls over the store.

Every bridge (Airflow, Nextflow) and the command line use this one class.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator
from datetime import UTC, datetime

from savedworker.controller.reconcile import Controller
from savedworker.fleet.base import Fleet, get_fleet
from savedworker.model import events as ev
from savedworker.model.errors import AlreadyExists, Conflict, Corrupt, NotFound, Refused, SavedWorkerError
from savedworker.model.record import State, WorkerRecord
from savedworker.model.report import Report, Status, report, status
from savedworker.model.spec import WorkerSpec, check_worker_id
from savedworker.model.transitions import summary
from savedworker.store import logs
from savedworker.store.backend import Store, open_store
from savedworker.store.worker import WorkerStore, list_workers


def _now() -> datetime:
    return datetime.now(UTC)


def _not_running(record: WorkerRecord, fix: str) -> Refused:
    if record.state.terminal:
        return Refused(
            f"worker {record.id} has ended: {record.state}",
            f"its report tells how: savedworker report {record.id}",
        )
    return Refused(f"worker {record.id} is {record.state}", fix)


class Client:
    """All calls raise SavedWorkerError kinds: NotFound, Refused, Unreachable …; none leaves anything half done."""

    def __init__(self, store: Store | str, fleets: Callable[[str], Fleet] = get_fleet) -> None:
        self.store = open_store(store) if isinstance(store, str) else store
        self.controller = Controller(self.store, fleets)
        self._open: dict[str, WorkerStore] = {}

    def submit(self, spec: WorkerSpec) -> str:
        """Create the worker; its first launch is made by the next reconcile. Returns its id.

        Idempotent: submitting an equal spec again finds the worker that is there. Raises AlreadyExists when another
        spec has that id, Refused when the fleet is unknown.
        """
        self.controller.fleet(spec.fleet)
        self.store.ensure()
        documents = WorkerStore(self.store, spec.id)
        try:
            documents.create_spec(spec)
        except AlreadyExists as error:
            there = documents.load_spec()
            other = [x for x in WorkerSpec.model_fields if getattr(there, x) != getattr(spec, x)]
            if other:
                raise AlreadyExists(
                    f"worker {spec.id} exists already, and its specification differs in {', '.join(other)}",
                    "choose another --name",
                ) from error
        with contextlib.suppress(Conflict):  # it is there already
            documents.create_record(WorkerRecord(id=spec.id, created_at=_now(), fleet=spec.fleet))
        return spec.id

    def record(self, worker: str) -> WorkerRecord:
        """The worker's record. Raises NotFound."""
        return WorkerStore(self.store, check_worker_id(worker)).load_record().record

    def spec(self, worker: str) -> WorkerSpec:
        """The worker's spec. Raises NotFound."""
        return WorkerStore(self.store, check_worker_id(worker)).load_spec()

    def reconcile(self, worker: str) -> WorkerRecord:
        """One round of the controller for this worker; call it again and again until ``settled``."""
        return self.controller.reconcile(worker)

    def status(self, worker: str) -> Status:
        """The ``status --json`` document. Raises NotFound."""
        return status(self.record(worker), _now())

    def report(self, worker: str) -> Report:
        """The ``report --json`` document. Raises NotFound."""
        documents = WorkerStore(self.store, check_worker_id(worker))
        stored = [summary(e.n, e.incarnation, e.event) for e in documents.events()]
        return report(documents.load_record().record, stored, _now())

    def list(
        self,
        state: str | None = None,
        unreadable: Callable[[str, SavedWorkerError], None] = lambda _, error: None,
    ) -> list[Status]:
        """All workers of the store, or those in ``state``. ``unreadable`` gets the id and error of those whose record is damaged."""
        if state is not None and state not in set(State):
            raise Refused(f"there is no state {state!r}", f"use one of: {', '.join(State)}")
        found = []
        for worker in list_workers(self.store):
            try:
                document = self.status(worker)
            except NotFound:
                continue  # created this moment: the record follows the spec
            except Corrupt as error:
                unreadable(worker, error)
                continue
            if state is None or document.state == state:
                found.append(document)
        return found

    def cancel(self, worker: str, by: str) -> WorkerRecord:
        """Cancel the worker: the record says so at once; its processes and instance end within seconds."""
        return self._record(worker, ev.CancelRequested(at=_now(), by=by))

    def request_checkpoint(self, worker: str) -> int:
        """Ask for a checkpoint now. Returns the request's number, for ``checkpoint_result``. Raises Refused."""
        record = self.record(worker)
        if record.state not in (State.RUNNING, State.CHECKPOINTING):
            raise _not_running(record, "a checkpoint needs a running worker")
        return self._record(worker, ev.CheckpointRequested(at=_now())).checkpoint_requests

    def checkpoint(self, worker: str, timeout: float = 600.0, poll: float = 0.2) -> str:
        """Take a checkpoint now and return its number when it is committed. Raises Refused, SavedWorkerError."""
        known = {c.number for c in self.record(worker).checkpoints}
        request = self.request_checkpoint(worker)
        until = time.monotonic() + timeout
        while time.monotonic() < until:
            record = self.record(worker)
            new = [c.number for c in record.checkpoints if c.number not in known]
            if record.checkpoint_answered >= request:
                if new:
                    return new[-1]
                failed = [e for e in record.recent if e.event == "checkpoint_failed"]
                raise SavedWorkerError(failed[-1].detail if failed else "the checkpoint failed")
            if record.state.terminal:
                raise Refused(f"worker {worker} ended before the checkpoint: {record.state}")
            time.sleep(poll)
        raise SavedWorkerError(f"no checkpoint of {worker} was committed within {timeout:.0f} s")

    def preempt(self, worker: str, notice: float | None) -> str:
        """Drill: reclaim the instance that the worker runs on. Returns the instance's name. Raises Refused."""
        record = self.record(worker)
        if record.state.terminal or record.lease is None or record.lease.released:
            raise _not_running(record, "wait until it runs")
        self.controller.fleet(record.fleet).preempt(record.lease.launch, notice)
        current = record.incarnation
        return current.instance if current else record.lease.launch

    def logs(
        self, worker: str, stream: str, after: logs.Cursor | None = None
    ) -> Iterator[logs.LogPiece | logs.Mark]:
        """The worker's lines of ``stream`` (stdout or stderr) that are in the store, after ``after``."""
        try:
            yield from logs.read(self._opened(worker), stream, after)
        except Corrupt:
            self._open.pop(worker, None)  # another worker may have the name by now, under another key
            raise

    def engine_note(self, worker: str, engine: str) -> bytes | None:
        """What the bridge of ``engine`` wrote down beside the worker; None if nothing."""
        return self._opened(worker).load_engine_note(engine)

    def keep_engine_note(self, worker: str, engine: str, note: bytes) -> None:
        """Write down ``note`` beside the worker, sealed as its logs are."""
        self._opened(worker).keep_engine_note(engine, note)

    def _opened(self, worker: str) -> WorkerStore:
        """The worker's documents, whose key is looked for once: its log is read again and again."""
        if worker not in self._open:
            self._open[worker] = WorkerStore(self.store, check_worker_id(worker))
        return self._open[worker]

    def _record(self, worker: str, event: ev.Event) -> WorkerRecord:
        return WorkerStore(self.store, check_worker_id(worker)).record_event(event).record
