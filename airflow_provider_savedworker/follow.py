"""Following one worker for Airflow: bring it on, relay its output and its events to a task's log, say when it is over.

Used by the trigger, by the operator while it does not defer, and by the operator's end. Plain blocking calls.
"""

from __future__ import annotations

import base64
import logging
import threading
import time
import uuid
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import UTC, datetime

from pydantic import Field, ValidationError, field_validator

from savedworker.controller.client import Client
from savedworker.model import defaults
from savedworker.model.base import Document, Frozen
from savedworker.model.decisions import settled
from savedworker.model.errors import Corrupt, NotFound, SavedWorkerError
from savedworker.model.record import EventSummary, State, WorkerRecord
from savedworker.model.spec import WorkerSpec
from savedworker.model.units import format_duration
from savedworker.store import logs

STREAMS = ("stdout", "stderr")
QUIET = frozenset(
    {"launch_requested", "launch_accepted", "checkpoint_started", "checkpoint_requested", "lease_released"}
)
"""Events that tell a reader of the task's log nothing that another line does not."""
WARNINGS = frozenset(
    {
        "restore_failed",
        "checkpoint_failed",
        "yielded",
        "instance_lost",
        "launch_ended",
        "gave_up",
        "checkpoints_set_aside",
    }
)
ENDS = frozenset({"finished", "cancel_requested", "gave_up"})
LONGEST_LINE = 64 << 10
REMOTE_LOGS_EVERY = 5.0
"""Seconds between two looks for output in an object store: each is several requests, which cost money."""
REPEAT_WARNING = 60.0
UNPROTECTED_PATIENCE = 30.0
"""How long a running worker may be unprotected without an event that says why."""
MISSING_PATIENCE = 60.0
"""How long a worker's record may be missing before that is believed."""
SETTLE_PATIENCE = 300.0
"""How long after the worker's end its instances are waited for."""

Line = tuple[int, str, str]
"""A level of ``logging``, where the line is from (``stdout``, ``stderr``, or empty for ours), and the line."""

Log = Callable[[int, str, str], None]
"""Takes the three parts of a Line."""


class _Stream(Frozen):
    """How far one stream was relayed; ``partial`` is the beginning of a line whose end has not come yet (base64)."""

    cursor: str | None = Field(default=None, pattern=r"^[1-9][0-9]{0,8}:[0-9]{1,20}$")
    partial: str = ""

    @field_validator("partial")
    @classmethod
    def _is_base64(cls, value: str) -> str:
        base64.b64decode(value.encode("ascii"), validate=True)
        return value


class Position(Document):
    """How far a worker was relayed, as it stands in the store: a follower that begins later goes on from there."""

    writer: str = ""
    """The follower that wrote this."""
    events: int = Field(default=0, ge=0, lt=1 << 63)
    streams: dict[str, _Stream] = Field(default_factory=dict)


@dataclass
class Step:
    """What one look at the worker showed."""

    record: WorkerRecord | None = None
    done: bool = False
    """The worker has ended, all is relayed, and nothing of it runs any more (or it is missing for good)."""
    trouble: Exception | None = None
    """Why this look failed; the next one may succeed."""


@dataclass
class Follower:
    """Follows ``worker`` and writes to ``log``. For one thread at a time; holds nothing that the store does not."""

    client: Client
    worker: str
    log: Log
    only_looks: bool = False
    """Relay, and leave it to others to bring the worker on."""
    on_spec: Callable[[WorkerSpec], None] | None = None
    """Called once, before anything is relayed."""
    clock: Callable[[], float] = time.monotonic
    now: Callable[[], datetime] = lambda: datetime.now(UTC)
    _id: str = field(default_factory=lambda: uuid.uuid4().hex)
    _position: Position | None = None
    _stored: Position | None = None
    """The position document as this follower last saw it."""
    _spec: WorkerSpec | None = None
    _warned: dict[str, float] = field(default_factory=dict)
    _missing_since: float | None = None
    _unprotected_since: float | None = None
    _told_unprotected: tuple[int, tuple[str, ...]] | None = None
    _ended_since: float | None = None
    _logs_at: float | None = None

    def step(self) -> Step:
        """Bring the worker on, relay what is new, and say whether it is over. Never raises: a task must not fail for it."""
        try:
            record = self._look()
            relayed = self._relay(record)
        except NotFound as error:
            if self._missing_since is None:
                self._missing_since = self.clock()
            gone = self.clock() - self._missing_since > MISSING_PATIENCE
            self._complain(error)
            return Step(done=gone, trouble=error)
        except SavedWorkerError as error:
            self._complain(error)
            return Step(trouble=error)
        except Exception as error:  # a defect of ours or of a fleet's library; the worker itself is fine
            self._warn(f"{type(error)}", f"{type(error).__name__}: {error}; trying again")
            logging.getLogger(__name__).debug("following %s", self.worker, exc_info=True)
            return Step(trouble=error)
        self._missing_since = None
        return Step(record, done=relayed and self._over(record))

    def _look(self) -> WorkerRecord:
        if self._spec is None:
            spec = self.client.spec(self.worker)
            if self.on_spec is not None:
                self.on_spec(spec)
            self._spec = spec
        if self.only_looks:
            return self.client.record(self.worker)
        try:
            return self.client.reconcile(self.worker)
        except NotFound:
            raise
        except SavedWorkerError as error:
            # A fleet that does not answer must not keep the worker's output and its end from the task's log.
            self._complain(error)
            return self.client.record(self.worker)

    def _over(self, record: WorkerRecord) -> bool:
        if not record.state.terminal:
            self._ended_since = None
            return False
        if settled(record):
            return True
        if self._ended_since is None:
            self._ended_since = self.clock()
        if self.clock() - self._ended_since < SETTLE_PATIENCE:
            return False
        self._warn(
            "unsettled",
            "the worker has ended, but the end of its instance is not confirmed: see `savedworker list`",
        )
        return True

    def _complain(self, error: SavedWorkerError) -> None:
        self._warn(f"{error.code} {error.message}", f"{error}; trying again")

    def _warn(self, key: str, text: str, every: float = REPEAT_WARNING) -> None:
        """A warning of ours, and not the same one again within ``every`` seconds."""
        last = self._warned.get(key)
        if last is None or self.clock() - last >= every:
            self._warned[key] = self.clock()
            self.log(logging.WARNING, "", text)

    # -- position --

    def _load(self) -> Position | None:
        try:
            note = self.client.engine_note(self.worker, "airflow")
            return None if note is None else Position.model_validate_json(note)
        except (Corrupt, ValidationError):
            return None  # damaged or of a newer release: at worst some lines come twice

    def _begin(self) -> Position:
        if self._position is None:
            self._stored = self._load()
            self._position = self._stored or Position()
            if self._stored is not None and not self.only_looks:
                self.log(
                    logging.INFO, "", f"following worker {self.worker} again, from where the task's log ended"
                )
        return self._position

    def _relay(self, record: WorkerRecord) -> bool:
        """Write new output and events to the log, then the new position to the store. True when all is relayed.

        A follower that dies between the two makes its successor repeat that one batch; nothing is left out.
        """
        position = self._begin()
        lines: list[Line] = []
        streams = dict(position.streams)
        due = self._logs_at is None or self.clock() - self._logs_at >= self._logs_every()
        if due or record.state.terminal:
            self._logs_at = self.clock()
            for stream in STREAMS:
                streams[stream], new = self._read(
                    stream, streams.get(stream, _Stream()), record.state.terminal
                )
                lines += new
        before, loss, after = self._events(record, position.events)
        # What a lost incarnation said comes before its loss; what the next one says again, after the mark in the output.
        mark = next((i for i, x in enumerate(lines) if not x[1]), len(lines))
        lines = [*before, *lines[:mark], *loss, *lines[mark:], *after]
        moved = position.model_copy(
            update={"streams": streams, "events": max(record.events, position.events)}
        )
        if moved != position:
            if self._overtaken():
                return False
            for line in lines:
                self.log(*line)
            self._position = self._stored = moved.model_copy(update={"writer": self._id})
            self.client.keep_engine_note(self.worker, "airflow", self._stored.model_dump_json().encode())
        self._watch_protection(record)
        return True

    def _overtaken(self) -> bool:
        """True when another follower has relayed meanwhile (this one was frozen): then go on from its position."""
        stored = self._load()
        if stored is None or stored == self._stored:
            return False
        self._position = self._stored = stored
        return True

    def _logs_every(self) -> float:
        return 0.0 if self.client.store.url.startswith("file:") else REMOTE_LOGS_EVERY

    def _read(self, name: str, stream: _Stream, ended: bool) -> tuple[_Stream, list[Line]]:
        """The new whole lines of one stream, and how far it is read then. ``ended``: also the rest without a newline."""
        lines: list[Line] = []
        buffer = base64.b64decode(stream.partial)
        cursor = stream.cursor
        for piece in self.client.logs(self.worker, name, logs.Cursor.parse(cursor) if cursor else None):
            cursor = str(piece.cursor)
            if isinstance(piece, logs.Mark):
                if buffer:
                    lines.append((logging.INFO, name, _text(buffer)))
                    buffer = b""
                lines.append((logging.WARNING, "", logs.render_mark(piece).removeprefix("[savedworker] ")))
                continue
            *whole, buffer = (buffer + piece.data).split(b"\n")
            lines += [(logging.INFO, name, _text(x)) for x in whole]
        if buffer and (ended or len(buffer) > LONGEST_LINE):
            lines.append((logging.INFO, name, _text(buffer)))
            buffer = b""
        return _Stream(cursor=cursor, partial=base64.b64encode(buffer).decode()), lines

    # -- events and protection --

    def _events(self, record: WorkerRecord, seen: int) -> tuple[list[Line], list[Line], list[Line]]:
        """The lines of the events after number ``seen``: before the new output, from a loss without notice on, the end."""
        events = [e for e in record.recent if e.number > seen]
        before: list[Line] = []
        loss: list[Line] = []
        after: list[Line] = []
        if seen and (missed := record.events - seen - len(events)) > 0:
            before.append((logging.INFO, "", f"{missed} more events: see `savedworker report {self.worker}`"))
        for event in events:
            if line := self._event_line(event, record):
                lost = bool(loss) or event.event == "instance_lost"
                (after if event.event in ENDS else loss if lost else before).append(line)
        return before, loss, after

    def _event_line(self, event: EventSummary, record: WorkerRecord) -> Line | None:
        if event.event in QUIET or (event.event == "launch_ended" and not _fruitless(event, record)):
            return None
        level = logging.WARNING if event.event in WARNINGS else logging.INFO
        text = event.detail or event.event.replace("_", " ")
        if event.event == "protection_changed" and not record.protected:
            level = logging.WARNING
            self._told_unprotected = (len(record.incarnations), record.unprotected_reasons)
        if event.event == "checkpoint_failed":
            text += f" ({self._age(record)})"
        return level, "", text

    def _age(self, record: WorkerRecord) -> str:
        last = record.last_checkpoint
        if last is None:
            return "there is no good checkpoint yet"
        age = max(0.0, (self.now() - last.frozen_at).total_seconds())
        return f"age of the last good checkpoint, {last.number}: {format_duration(age)}"

    def _watch_protection(self, record: WorkerRecord) -> None:
        """Warn of what no single event tells: a worker that stays unprotected, and checkpoints that do not come."""
        if record.state not in (State.RUNNING, State.CHECKPOINTING):
            self._unprotected_since = None
            return
        if record.protected:
            self._unprotected_since = None
        else:
            if self._unprotected_since is None:
                self._unprotected_since = self.clock()
            now = (len(record.incarnations), record.unprotected_reasons)
            if (
                now != self._told_unprotected
                and self.clock() - self._unprotected_since >= UNPROTECTED_PATIENCE
            ):
                self._told_unprotected = now
                self.log(
                    logging.WARNING,
                    "",
                    f"not protected: {'; '.join(record.unprotected_reasons) or 'no reason given'}",
                )
        interval = self._spec.checkpoint.interval if self._spec else None
        interval = defaults.INTERVAL_MOST if interval == "auto" else interval
        current = record.incarnation
        if not interval or current is None or current.started_at is None:
            return
        usable = [c.frozen_at for c in record.checkpoints if c.unusable is None]
        since = max([current.started_at, *usable])
        if (self.now() - since).total_seconds() > 2 * interval + 10:
            self._warn(
                "age",
                f"no checkpoint for two intervals: {self._age(record)}",
                every=max(interval, REPEAT_WARNING),
            )


def _fruitless(event: EventSummary, record: WorkerRecord) -> bool:
    """Whether the launch that ended came to nothing, which is worth a line."""
    launch = next((x for x in record.launches if x.id in event.detail), None)
    return launch is None or launch.outcome not in ("used", "surplus")


def _text(line: bytes) -> str:
    return line.decode("utf-8", "replace").rstrip("\r")


def cancel(client: Client, worker: str, by: str, patience: float = 600.0) -> threading.Thread:
    """Cancel ``worker`` in a thread of its own and see to it that its instances end. Repeats until it is done.

    The thread goes on when whoever waits for it gives up, and ends with the process at the latest.
    """

    def work() -> None:
        until = time.monotonic() + patience
        wait = threading.Event()
        asked = False
        while time.monotonic() < until:
            try:
                if not asked:
                    client.cancel(worker, by)
                    asked = True
                if settled(client.reconcile(worker)):
                    return
            except NotFound:
                return
            except SavedWorkerError as error:
                logging.getLogger(__name__).warning("cancelling worker %s: %s; trying again", worker, error)
            wait.wait(1.0)

    thread = threading.Thread(target=work, name=f"cancel {worker}", daemon=True)
    thread.start()
    return thread
