"""The documents that people and programs read: ``status --json`` and ``report --json``."""

from __future__ import annotations

from collections.abc import Iterable
from datetime import datetime

from savedworker.model.base import Document, Frozen, Instant
from savedworker.model.record import EventSummary, WorkerRecord


class LastCheckpoint(Frozen):
    """The newest usable checkpoint. ``age_seconds`` counts from the freeze; after the end, up to the end."""

    number: str
    age_seconds: float
    bytes_image: int
    bytes_uploaded: int


class Status(Document):
    """One worker now."""

    id: str
    state: str
    reason: str | None
    detail: str
    exit_code: int | None
    signal: int | None
    after_restore: bool
    fleet: str
    instance: str | None
    incarnation: int
    migrations: int
    cold_starts: int
    protected: bool
    unprotected_reasons: tuple[str, ...]
    last_checkpoint: LastCheckpoint | None
    lost_seconds: float
    away_seconds: float
    created_at: Instant
    ended_at: Instant | None


class IncarnationReport(Frozen):
    """One stretch of the worker's life."""

    number: int
    instance: str
    zone: str | None
    started_at: Instant | None
    ended_at: Instant | None
    end_reason: str | None
    restored_from: str | None
    lost_seconds: float
    away_seconds: float


class TimelineEntry(Frozen):
    """One event, as people read it."""

    at: Instant
    event: str
    seconds: float | None
    detail: str


class Report(Status):
    """One worker's whole history."""

    incarnations: tuple[IncarnationReport, ...]
    timeline: tuple[TimelineEntry, ...]


def status(record: WorkerRecord, now: datetime) -> Status:
    """The status document of ``record`` at wall-clock time ``now``."""
    last = record.last_checkpoint
    until = record.ended_at or now
    current = record.incarnation
    return Status(
        id=record.id,
        state=record.state.value,
        reason=record.reason.value if record.reason else None,
        detail=record.detail,
        exit_code=record.exit_code,
        signal=record.signal,
        after_restore=record.after_restore,
        fleet=record.fleet,
        instance=current.instance if current else None,
        incarnation=len(record.incarnations),
        migrations=record.migrations,
        cold_starts=record.cold_starts,
        protected=record.protected,
        unprotected_reasons=record.unprotected_reasons,
        last_checkpoint=LastCheckpoint(
            number=last.number,
            age_seconds=max(0.0, (until - last.frozen_at).total_seconds()),
            bytes_image=last.bytes_image,
            bytes_uploaded=last.bytes_uploaded,
        )
        if last
        else None,
        lost_seconds=sum(x.lost_seconds for x in record.incarnations),
        away_seconds=sum(x.away_seconds for x in record.incarnations),
        created_at=record.created_at,
        ended_at=record.ended_at,
    )


def report(record: WorkerRecord, events: Iterable[EventSummary], now: datetime) -> Report:
    """The report document; ``events`` are the stored ones, to which the record's own recent ones are added."""
    known = {e.number: e for e in (*events, *record.recent)}
    return Report(
        **dict(status(record, now)),
        incarnations=tuple(
            IncarnationReport(
                number=x.number,
                instance=x.instance,
                zone=x.zone,
                started_at=x.started_at,
                ended_at=x.ended_at,
                end_reason=x.end_reason,
                restored_from=x.restored_from,
                lost_seconds=x.lost_seconds,
                away_seconds=x.away_seconds,
            )
            for x in record.incarnations
        ),
        timeline=tuple(
            TimelineEntry(at=e.at, event=e.event, seconds=e.seconds, detail=e.detail)
            for _, e in sorted(known.items())
        ),
    )
