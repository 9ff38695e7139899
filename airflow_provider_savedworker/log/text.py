"""A worker's part of a task's log, as the lines of JSON that Airflow itself writes: what the task said, and one line per move."""

from __future__ import annotations

import json
from collections.abc import Iterator
from datetime import datetime
from typing import Any

from savedworker.agent.relay import airflow as relay
from savedworker.controller.client import Client
from savedworker.model.manifest import order
from savedworker.model.record import Incarnation, WorkerRecord
from savedworker.model.units import format_duration
from savedworker.store import logs

LAST_WORDS = 100
"""Lines of what the supervisor said that are shown of a worker which ended without telling Airflow how."""
_WHY = {
    "notice": "on a notice",
    "no_notice": "without a notice",
    "orphaned": "because nobody looked after it",
    "failed": "because it could not go on there",
}


def worker_log(client: Client, record: WorkerRecord) -> str:
    """Everything that is in the store now. Raises what the store raises."""
    lines = _Lines(record)
    for piece in client.logs(record.id, "stdout"):
        lines.add(piece)
    return "".join(f"{x}\n" for x in [*lines.finished(), *_end(client, record)])


def refusal_log(at: datetime, why: str) -> str:
    """The whole log of a task for which no worker could be made."""
    return _line(at, "error", f"[savedworker] refused: {why}") + "\n"


def _end(client: Client, record: WorkerRecord) -> Iterator[str]:
    """How a worker ended that did not tell Airflow so itself, or that moved."""
    if not record.state.terminal:
        return
    at = record.ended_at or record.created_at
    if record.concluded is None:
        said = b"".join(x.data for x in client.logs(record.id, "stderr") if isinstance(x, logs.Text))
        for line in said.decode("utf-8", "replace").splitlines()[-LAST_WORDS:]:
            yield _last_word(at, line)
        if unheard := _unheard(client, record):
            yield _line(at, "error", f"[savedworker] {unheard}")
        why = ": ".join(x for x in (str(record.reason or ""), record.detail) if x)
        yield _line(
            at, "error", f"[savedworker] worker {record.id} {record.state}: {why or 'no reason given'}"
        )
    elif record.state == "failed" and record.reason == "lost":
        yield _line(at, "warning", f"[savedworker] {record.detail}")
    if record.migrations or record.cold_starts:
        lost = sum(x.lost_seconds for x in record.incarnations)
        away = sum(x.away_seconds for x in record.incarnations)
        text = (
            f"[savedworker] migrations {record.migrations}, cold starts {record.cold_starts}, "
            f"{lost:.1f} s lost, {away:.1f} s away"
        )
        yield _line(at, "info", text)


def _unheard(client: Client, record: WorkerRecord) -> str:
    """That the task has never begun for Airflow, since its instance had no answer; empty if it had."""
    asked = client.engine_note(record.id, relay.HEARTBEAT) is not None
    if not asked or client.engine_note(record.id, relay.IDENTITY) is not None:
        return ""
    spec = client.spec(record.id)
    where = spec.relay.upstream if spec.relay else "?"
    return (
        f"its instance had no answer from the Execution API at {where}. "
        f"Fix: set [savedworker] execution_api_server_url to an address that instances reach"
    )


class _Lines:
    """Puts pieces together to lines; a move is told between two lines, where the new incarnation's output begins."""

    def __init__(self, record: WorkerRecord) -> None:
        self._runs = {x.number: x for x in record.incarnations if x.started_at}
        self._told = min(self._runs, default=1)
        self._lines: list[str] = []
        self._rest = b""
        self._moves: list[int] = []
        self._latest: datetime | None = None

    def add(self, piece: logs.LogPiece) -> None:
        """The next piece of the stream."""
        self._moves += [n for n in sorted(self._runs) if self._told < n <= piece.cursor.incarnation]
        self._told = max(self._told, piece.cursor.incarnation)
        if isinstance(piece, logs.Mark):
            self._flush()
            self._append(_line(self._latest, "warning", logs.render_mark(piece)))
            self._tell_moves()
            return
        *whole, self._rest = (self._rest + piece.data).split(b"\n")
        for line in whole:
            if not line:
                continue
            if self._moves and not self._rest_of_line(line):
                self._tell_moves()
            self._append(line.decode("utf-8", "replace"))
        if not self._rest:
            self._tell_moves()

    def finished(self) -> list[str]:
        """All lines. What has no newline yet is a line too."""
        self._flush()
        self._moves += [n for n in sorted(self._runs) if n > self._told]
        self._tell_moves()
        return self._lines

    @staticmethod
    def _rest_of_line(line: bytes) -> bool:
        """Whether this line began before the move: only then it is told after it."""
        return not line.startswith(b"{")

    def _flush(self) -> None:
        if self._rest:
            self._append(self._rest.decode("utf-8", "replace"))
            self._rest = b""

    def _append(self, line: str) -> None:
        self._lines.append(line)
        if at := _timestamp(line):
            self._latest = at

    def _tell_moves(self) -> None:
        for number in self._moves:
            text, at = _move(self._runs, number)
            # Airflow's reader sorts by time: a line of ours stays where it stands, after the one before.
            self._append(_line(self._latest or at, "info", f"{text} ({at:%H:%M:%S} UTC)"))
        self._moves = []


def _move(runs: dict[int, Incarnation], number: int) -> tuple[str, datetime]:
    """One line: when it was away, where from and to, what was lost."""
    new = runs[number]
    before = max((n for n in runs if n < number), default=None)
    old = runs[before] if before is not None else None
    left = _WHY.get((old.end_reason or "") if old else "", "")
    source = f"from {_place(old)} {left} " if old else ""
    how = (
        f"restored from checkpoint {new.restored_from}" if new.restored_from else "started again from nothing"
    )
    lost = sum(
        x.lost_seconds for n, x in runs.items() if n < number and n >= _since(new.restored_from, before or 0)
    )
    told = f"{lost:.1f} s of work are done again" if lost else "nothing was lost"
    away = format_duration(new.away_seconds)
    text = f"[savedworker] moved {source}to {_place(new)}: {how}, {away} away, {told}"
    assert new.started_at is not None
    return text, new.started_at


def _since(checkpoint: str | None, otherwise: int) -> int:
    return order(checkpoint)[0] if checkpoint else otherwise


def _place(incarnation: Incarnation | None) -> str:
    if incarnation is None:
        return "nowhere"
    return f"{incarnation.instance} ({incarnation.zone})" if incarnation.zone else incarnation.instance


def _line(at: datetime | None, level: str, text: str, logger: str = "savedworker") -> str:
    found: dict[str, Any] = {"timestamp": at.isoformat()} if at else {}
    return json.dumps({**found, "level": level, "event": text, "logger": logger})


def _last_word(at: datetime, line: str) -> str:
    """A line of the supervisor's, which writes JSON as tasks do; at the end of the log, whenever it was said."""
    try:
        found = json.loads(line)
    except ValueError:
        found = None
    if isinstance(found, dict) and isinstance(found.get("event"), str):
        return json.dumps({**found, "timestamp": at.isoformat()})
    return _line(at, "warning", line, "savedworker.stderr")


def _timestamp(line: str) -> datetime | None:
    try:
        found = json.loads(line)["timestamp"]
        at = datetime.fromisoformat(found)
    except (ValueError, TypeError, KeyError):
        return None
    return at if at.tzinfo else None
