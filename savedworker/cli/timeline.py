"""The picture of a worker's life: one bar per incarnation over one time axis, then every event."""

from __future__ import annotations

import sys
from datetime import datetime, timedelta

from rich.table import Table
from rich.text import Text

from savedworker.cli.output import clock, columns
from savedworker.model.report import IncarnationReport, Report
from savedworker.model.units import format_duration

WIDTH = 56
"""Columns of the time axis."""


class Glyphs:
    """What the bars are drawn with: block characters, or ASCII where the output cannot hold those."""

    def __init__(self, encoding: str | None) -> None:
        try:
            "█▒·▲!".encode(encoding or "ascii")
            self.run, self.lost, self.away, self.checkpoint, self.axis = "█", "▒", "·", "▲", "─"
        except (UnicodeEncodeError, LookupError):
            self.run, self.lost, self.away, self.checkpoint, self.axis = "#", "x", ".", "^", "-"
        self.notice = "!"


def picture(report: Report, end: datetime, glyphs: Glyphs | None = None) -> list[Text]:
    """Bars of running, lost and away time, with notices and checkpoints below them, and a legend."""
    g = glyphs or Glyphs(sys.stdout.encoding)
    begin = report.created_at
    span = max((end - begin).total_seconds(), 0.001)

    def column(at: datetime) -> int:
        return min(WIDTH - 1, max(0, int((at - begin).total_seconds() / span * WIDTH)))

    label = max(len(_name(i)) for i in report.incarnations)
    right = format_duration(span)
    lines = [Text(f"{'':{label}}  0s{right:>{WIDTH - 2}}", style="dim")]
    for i in report.incarnations:
        lines.append(_bar(i, end, g, label, column))
    marks = [" "] * WIDTH
    for entry in report.timeline:
        glyph = {"checkpoint_committed": g.checkpoint, "notice_received": g.notice}.get(entry.event)
        if glyph:
            at = column(entry.at)
            marks[at] = g.notice if g.notice in (marks[at], glyph) else glyph
    if any(mark != " " for mark in marks):
        lines.append(Text(f"{'':{label}}  {''.join(marks).rstrip()}", style="cyan"))
    shown = "".join(line.plain for line in lines[1:])
    legend = [
        f"{glyph} {meaning}"
        for glyph, meaning in (
            (g.run, "running"),
            (g.lost, "work done again"),
            (g.away, "away"),
            (g.checkpoint, "checkpoint"),
            (g.notice, "notice"),
        )
        if glyph in shown
    ]
    lines.append(Text(f"{'':{label}}  {'   '.join(legend)}", style="dim"))
    return lines


def _bar(i: IncarnationReport, end: datetime, g: Glyphs, label: int, column: object) -> Text:
    assert callable(column)
    text = Text(f"{_name(i):<{label}}  ")
    stop = i.ended_at or end
    if i.started_at is None:
        text.append(" " * column(stop) + g.away, style="yellow")
        return text
    first, last = column(i.started_at), column(stop)
    away = column(i.started_at - timedelta(seconds=i.away_seconds)) if i.away_seconds else first
    lost = column(stop - timedelta(seconds=i.lost_seconds)) if i.lost_seconds else last + 1
    lost = min(lost, last) if i.lost_seconds else lost
    text.append(" " * away)
    text.append(g.away * (first - away), style="yellow")
    text.append(g.run * (max(first, lost) - first), style="green")
    text.append(g.lost * (last + 1 - max(first, lost)), style="red")
    return text


def _name(i: IncarnationReport) -> str:
    return f"{i.number} {i.instance}"


def incarnations(report: Report) -> Table:
    """One row per incarnation."""
    rows = []
    for i in report.incarnations:
        end = i.ended_at or report.ended_at
        ran = (end - i.started_at).total_seconds() if i.started_at and end else None
        rows.append(
            (
                str(i.number),
                i.instance,
                i.zone or "-",
                i.restored_from or ("nothing" if i.started_at else "-"),
                format_duration(i.away_seconds) if i.number > 1 else "-",
                "-" if ran is None else format_duration(ran),
                format_duration(i.lost_seconds) if i.lost_seconds else "-",
                (i.end_reason or "still going").replace("_", " "),
            )
        )
    return columns(("#", "INSTANCE", "ZONE", "FROM", "AWAY BEFORE", "RAN", "LOST", "END"), rows)


def history(report: Report) -> Table:
    """Every event: local time, time since the beginning, and what happened."""
    table = Table.grid(padding=(0, 2, 0, 0))
    table.add_column(style="dim", no_wrap=True)
    table.add_column(style="dim", justify="right", no_wrap=True)
    table.add_column(overflow="fold")
    day = report.created_at.astimezone().date()
    for entry in report.timeline:
        local = entry.at.astimezone().date()
        if local != day:
            day = local
            table.add_row(f"{day:%Y-%m-%d}", "", "")
        since = format_duration(max(0.0, (entry.at - report.created_at).total_seconds()))
        table.add_row(clock(entry.at), f"+{since}", Text(entry.detail or entry.event.replace("_", " ")))
    return table
