"""What ``run`` shows beside the worker's own output: a live view on a terminal, plain lines elsewhere."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Protocol

from savedworker.cli.output import moves, outcome
from savedworker.cli.relay import Sink
from savedworker.model.record import EventSummary, WorkerRecord
from savedworker.model.report import status
from savedworker.model.units import format_duration

IMPORTANT = frozenset(
    {
        "notice_received",
        "notice_withdrawn",
        "checkpoint_committed",
        "checkpoint_failed",
        "handed_over",
        "yielded",
        "instance_lost",
        "restored",
        "restore_failed",
        "protection_changed",
        "checkpoints_set_aside",
        "cancel_requested",
        "gave_up",
        "waiting",
    }
)
"""Events that a person wants to hear of even where nobody is looking."""
_WHEN_MOVING = frozenset({"lease_taken", "started"})
"""Important from the second incarnation on."""


class News:
    """Finds what is new and important from one record to the next, as plain lines."""

    def __init__(self) -> None:
        self._seen = 0
        self._launches: set[str] = set()

    def lines(self, record: WorkerRecord) -> list[str]:
        """One line per important event, oldest first."""
        new = [e for e in record.recent if e.number > self._seen and self._important(e, record)]
        found = [e.detail or e.event.replace("_", " ") for e in new]
        for launch in record.launches:
            if (
                launch.outcome in ("capacity", "incompatible", "failed", "gone")
                and launch.id not in self._launches
            ):
                self._launches.add(launch.id)
                if not record.state.terminal:
                    found.append(
                        f"launch {launch.id} came to nothing ({launch.outcome}): {launch.detail or 'no reason given'}"
                    )
        self._seen = record.events
        return [" ".join(line.split()) for line in found]

    @staticmethod
    def _important(event: EventSummary, record: WorkerRecord) -> bool:
        if record.ended_at and event.at > record.ended_at:
            return False
        return event.event in IMPORTANT or (event.event in _WHEN_MOVING and event.incarnation > 1)


def closing_line(record: WorkerRecord) -> str:
    """How it ended, in one line."""
    now = status(record, datetime.now(UTC))
    took = (
        f" after {format_duration((now.ended_at - now.created_at).total_seconds())}" if now.ended_at else ""
    )
    return f"{record.id} {outcome(now)}{took}; {moves(now)}"


class View(Protocol):
    """Where everything goes that ``run`` writes."""

    def data(self, stream: str, data: bytes) -> None:
        """The worker's output. Raises BrokenPipeError when nobody reads our stdout."""
        ...

    def say(self, line: str) -> None:
        """A line of ours, on stderr."""
        ...

    def update(self, record: WorkerRecord) -> None:
        """Show this record."""
        ...

    def tick(self) -> None:
        """Time has passed."""
        ...

    def close(self) -> None:
        """Write what is held back and leave the screen tidy."""
        ...


class PlainView:
    """Output as it comes; with ``announce``, one line per important event on stderr."""

    def __init__(self, stdout: Sink, stderr: Sink, announce: bool) -> None:
        self._sinks = {"stdout": stdout, "stderr": stderr}
        self._announce = announce
        self._news = News()

    def data(self, stream: str, data: bytes) -> None:
        """See View. A closed stderr is not the worker's trouble."""
        try:
            self._sinks[stream].write(data)
        except BrokenPipeError:
            if stream == "stdout":
                raise

    def say(self, line: str) -> None:
        """See View."""
        if self._announce:
            self.data("stderr", own_line(line, self._sinks["stderr"]))

    def update(self, record: WorkerRecord) -> None:
        """See View."""
        for line in self._news.lines(record):
            self.say(line)

    def tick(self) -> None:
        """See View."""

    def close(self) -> None:
        """See View."""


def own_line(line: str, sink: Sink) -> bytes:
    """``line`` as a line of ours, on a new line if the worker has left one unfinished."""
    return f"{'' if sink.at_line_start else chr(10)}savedworker: {line}\n".encode()
