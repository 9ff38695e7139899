"""The live view: a few lines at the foot of the terminal, below the worker's output.

It does not use rich's Live, which would take the worker's bytes apart: here they pass unchanged. Rich lays the lines out. A
line that the worker has not finished yet is held back and shown in the view (a progress bar moves there), so that
nothing of ours ever stands inside a line of the worker's.
"""

from __future__ import annotations

import io
import os
import re
import time
from datetime import UTC, datetime

from rich.console import Console, Group, RenderableType
from rich.table import Table
from rich.text import Text

from savedworker.cli.output import STYLES, clock, moves
from savedworker.cli.relay import Sink
from savedworker.cli.views import own_line
from savedworker.model.record import EventSummary, State, WorkerRecord
from savedworker.model.report import Status, status
from savedworker.model.units import format_duration, format_size

REDRAW = 0.25
"""Seconds between two redraws while time passes."""
HELD_BACK = 1 << 16
"""Bytes of an unfinished line after which it is let through."""
LAST_EVENTS = 4
_SILENT = frozenset({"lease_released", "launch_requested", "launch_accepted", "launch_ended"})
_CONTROL = re.compile(r"[\x00-\x08\x0b-\x1a\x1c-\x1f\x7f]")


class LiveView:
    """See View. ``stdout_is_terminal``: whether the worker's stdout shares the screen with the view."""

    def __init__(self, stdout: Sink, stderr: Sink, stdout_is_terminal: bool, size_fd: int = 2) -> None:
        self._sinks = {"stdout": stdout, "stderr": stderr}
        self._shared = {"stdout": stdout_is_terminal, "stderr": True}
        self._held = {"stdout": b"", "stderr": b""}
        self._size_fd = size_fd
        self._record: WorkerRecord | None = None
        self._drawn: list[str] = []
        self._drawn_at = 0.0

    def data(self, stream: str, data: bytes) -> None:
        """See View."""
        if not self._shared[stream]:
            self._sinks[stream].write(data)
            return
        lines, newline, rest = (self._held[stream] + data).rpartition(b"\n")
        self._held[stream] = rest
        out = lines + newline
        if len(rest) > HELD_BACK:
            out, self._held[stream] = out + rest, b""
        if out:
            self._erase()
            self._sinks[stream].write(out)
        self._draw()

    def say(self, line: str) -> None:
        """See View."""
        self._erase()
        sink = self._sinks["stderr"]
        self._terminal(own_line(line, sink))
        self._draw()

    def update(self, record: WorkerRecord) -> None:
        """See View."""
        self._record = record
        self._draw()

    def tick(self) -> None:
        """See View."""
        if time.monotonic() - self._drawn_at >= REDRAW:
            self._draw()

    def close(self) -> None:
        """See View."""
        self._erase()
        self._record = None
        for stream, rest in self._held.items():
            self._held[stream] = b""
            self._sinks[stream].write(rest)
            if rest:
                self._sinks["stderr"].at_line_start = False

    def _terminal(self, data: bytes) -> None:
        try:
            self._sinks["stderr"].write(data)
        except BrokenPipeError:
            return  # the terminal went away: nothing to show, and not the worker's trouble

    def _erase(self) -> None:
        if self._drawn:
            up = f"\x1b[{len(self._drawn) - 1}A" if len(self._drawn) > 1 else ""
            self._terminal(f"\r{up}\x1b[J".encode())
            self._drawn = []
            self._sinks["stderr"].at_line_start = True

    def _draw(self) -> None:
        self._drawn_at = time.monotonic()
        if self._record is None:
            return
        try:
            width, height = os.get_terminal_size(self._size_fd)
        except OSError:
            width, height = 80, 24
        lines = render(self._record, datetime.now(UTC), self._held, max(20, width - 1))[: max(1, height - 2)]
        if lines != self._drawn:
            up = f"\x1b[{len(self._drawn) - 1}A" if len(self._drawn) > 1 else ""
            back = f"\r{up}\x1b[J" if self._drawn else ""
            self._terminal((back + "\n".join(lines)).encode())
            self._drawn = lines


def render(record: WorkerRecord, now: datetime, held: dict[str, bytes], width: int) -> list[str]:
    """The lines of the view, with colours for a terminal, each at most ``width`` columns wide."""
    console = Console(
        file=io.StringIO(),
        width=width,
        force_terminal=True,
        color_system=None if os.environ.get("NO_COLOR") else "standard",
        highlight=False,
        legacy_windows=False,
    )
    with console.capture() as captured:
        console.print(layout(record, now, held))
    return captured.get().rstrip("\n").split("\n")


def layout(record: WorkerRecord, now: datetime, held: dict[str, bytes]) -> RenderableType:
    """The view of ``record`` at wall-clock time ``now``."""
    current = status(record, now)
    unfinished = [line for rest in held.values() if (line := _visible(rest)) is not None]
    title = Text(no_wrap=True, overflow="ellipsis")
    title.append("── ", style="dim")
    title.append(record.id, style="bold")
    title.append("  ")
    title.append(record.state.value, style=STYLES.get(record.state.value, ""))
    if current.instance:
        where = "from" if record.state is State.MIGRATING else "on"
        title.append(f" {where} {current.instance}")
        title.append(f"  incarnation {current.incarnation}", style="dim")
    title.append(f"  {_since(record.created_at, record.ended_at or now)}", style="dim")
    facts = Table.grid(padding=(0, 2, 0, 0))
    facts.add_column(no_wrap=True, style="dim")
    facts.add_column(no_wrap=True, overflow="ellipsis")
    for name, value in _facts(record, current, now):
        facts.add_row(f"   {name}", value)
    shown = [e for e in record.recent if e.event not in _SILENT][-LAST_EVENTS:]
    events = [
        Text.assemble((f"   {clock(e.at)}  ", "dim"), _event(e), no_wrap=True, overflow="ellipsis")
        for e in shown
    ]
    return Group(*unfinished, title, facts, *events)


def _facts(record: WorkerRecord, current: Status, now: datetime) -> list[tuple[str, Text]]:
    facts = []
    doing = _doing(record, now)
    if doing:
        facts.append(("now", Text(doing, style="cyan")))
    if record.notice:
        left = record.notice.seconds_left
        text = f"from {record.notice.source}"
        if left is not None:
            rest = left - (now - record.notice.received_at).total_seconds()
            text += f", {_whole(rest)} left" if rest > 0 else ", time is up"
        facts.append(("notice", Text(text, style="bold yellow")))
    if not record.state.terminal:
        if record.protected:
            facts.append(("protected", Text("yes", style="green")))
        else:
            why = "; ".join(record.unprotected_reasons) or "not known why"
            facts.append(("protected", Text.assemble(("no", "bold red"), f": {why}")))
    last = current.last_checkpoint
    if last:
        sizes = f"{format_size(last.bytes_image)} image, {format_size(last.bytes_uploaded)} uploaded"
        facts.append(("checkpoint", Text(f"{last.number}, {_whole(last.age_seconds)} ago ({sizes})")))
    if record.moves:
        facts.append(("moves", Text(moves(current))))
    return facts


def _doing(record: WorkerRecord, now: datetime) -> str:
    """What goes on at this moment besides the worker's own work, and for how long."""
    began = {e.event: e for e in record.recent}
    if record.state is State.CHECKPOINTING and (start := began.get("checkpoint_started")):
        return f"{start.detail} being taken for {_since(start.at, now)}"
    if record.state is State.RESTORING and record.lease and (taken := record.incarnation):
        return f"restoring for {_since(taken.taken_at, now)}"
    if record.state is State.MIGRATING and (last := record.incarnation) and last.ended_at:
        return f"away for {_since(last.stopped_at or last.ended_at, now)}, waiting for an instance"
    if record.state is State.PENDING:
        return f"waiting for an instance for {_since(record.created_at, now)}"
    if record.cancel and record.lease_held:
        return f"ending on its instance for {_since(record.cancel.at, now)}"
    return ""


def _event(event: EventSummary) -> Text:
    style = {"checkpoint_failed": "red", "restore_failed": "red", "notice_received": "yellow"}.get(
        event.event, ""
    )
    return Text(event.detail or event.event.replace("_", " "), style=style)


def _visible(rest: bytes) -> Text | None:
    """The unfinished line as a terminal would show it: what the last carriage return left."""
    parts = [part for part in rest.decode(errors="replace").split("\r") if part.strip()]
    if not parts:
        return None
    text = Text.from_ansi(_CONTROL.sub("", parts[-1].expandtabs()))
    text.no_wrap, text.overflow = True, "ellipsis"
    return text


def _since(begin: datetime, end: datetime) -> str:
    return _whole((end - begin).total_seconds())


def _whole(seconds: float) -> str:
    """Whole seconds: tenths that move are restless to look at."""
    whole = max(0, int(seconds))
    return f"{whole}s" if whole < 60 else format_duration(whole)
