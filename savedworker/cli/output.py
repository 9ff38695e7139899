"""Printing: JSON for programs, plain columns for people."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable, Sequence
from datetime import datetime
from typing import Any

import click
from pydantic import BaseModel
from rich.console import Console, RenderableType
from rich.table import Table
from rich.text import Text

from savedworker.model.report import Status
from savedworker.model.units import format_duration

WIDE = 10_000
"""Columns when no terminal limits them: nothing is cut in a pipe."""

STYLES = {
    "pending": "yellow",
    "starting": "yellow",
    "running": "green",
    "checkpointing": "cyan",
    "migrating": "magenta",
    "restoring": "magenta",
    "succeeded": "bold green",
    "failed": "bold red",
    "cancelled": "bold yellow",
}


def print_json(document: BaseModel | Sequence[BaseModel] | Any) -> None:
    """One JSON document on stdout."""
    click.echo(json.dumps(_plain(document), indent=2, ensure_ascii=False))


def _plain(document: Any) -> Any:
    if isinstance(document, BaseModel):
        return document.model_dump(mode="json")
    if isinstance(document, list | tuple):
        return [_plain(item) for item in document]
    return document


def show(*renderables: RenderableType) -> None:
    """Print on stdout, one after the other: coloured and as wide as the terminal, or plain and never cut in a pipe."""
    terminal = sys.stdout.isatty()
    console = Console(file=sys.stdout, width=None if terminal else WIDE, highlight=False)
    with console.capture() as captured:
        for renderable in renderables:
            console.print(renderable)
    click.echo("\n".join(line.rstrip() for line in captured.get().splitlines()))


def columns(header: Sequence[str], rows: Iterable[Sequence[str | Text]]) -> Table:
    """A plain table: two spaces between columns, no lines."""
    table = Table(box=None, padding=(0, 2, 0, 0), pad_edge=False, header_style="bold")
    for name in header:
        table.add_column(name, overflow="fold")
    for row in rows:
        table.add_row(*(cell if isinstance(cell, Text) else Text(cell) for cell in row))
    return table


def state_text(state: str, reason: str | None = None) -> Text:
    """The state, with the reason where there is one: ``failed (oom)``."""
    return Text(f"{state} ({reason})" if reason and reason != state else state, style=STYLES.get(state, ""))


def protection(status: Status) -> str:
    """``yes``, or ``no`` with the reasons; ``-`` after the end."""
    if status.ended_at:
        return "-"
    return "yes" if status.protected else f"no: {'; '.join(status.unprotected_reasons) or 'not known why'}"


def checkpoint_age(status: Status) -> str:
    """``1-3, 42s ago``, or ``-``."""
    last = status.last_checkpoint
    if last is None:
        return "-"
    when = "before the end" if status.ended_at else "ago"
    return f"{last.number}, {format_duration(last.age_seconds)} {when}"


def clock(at: datetime) -> str:
    """Local time of day, for people."""
    return at.astimezone().strftime("%H:%M:%S")


def outcome(status: Status) -> str:
    """How a worker ended, in words: ``failed (exit): exit code 3``."""
    if status.state == "cancelled":
        return status.detail or "cancelled"
    words = str(state_text(status.state, status.reason))
    if status.exit_code and not status.detail:
        words += f", exit code {status.exit_code}"
    if status.after_restore:
        words += ", soon after a restore"
    if status.detail and status.state != "succeeded":
        words += f": {status.detail}"
    return words


def moves(status: Status) -> str:
    """What the worker went through: ``2 migrations, 12s away, nothing lost``."""
    parts = [_count(status.migrations, "migration")]
    if status.cold_starts:
        parts.append(_count(status.cold_starts, "cold start"))
    if status.migrations or status.cold_starts:
        parts.append(f"{format_duration(status.away_seconds)} away")
        parts.append(
            f"up to {format_duration(status.lost_seconds)} of work lost"
            if status.lost_seconds
            else "nothing lost"
        )
    return ", ".join(parts)


def _count(number: int, what: str) -> str:
    return f"{number or 'no'} {what}{'' if number == 1 else 's'}"
