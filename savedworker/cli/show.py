"""The verbs that show: status, list, report."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import UTC, datetime

import click
from rich.console import RenderableType
from rich.text import Text

from savedworker.cli.exit_status import OTHER
from savedworker.cli.options import json_option, open_client, store_option, worker_id
from savedworker.cli.output import (
    checkpoint_age,
    columns,
    moves,
    outcome,
    print_json,
    protection,
    show,
    state_text,
)
from savedworker.cli.timeline import history, incarnations, picture
from savedworker.model.errors import SavedWorkerError
from savedworker.model.record import State
from savedworker.model.report import Report, Status
from savedworker.model.units import format_duration, format_size


@click.command()
@click.argument("workers", nargs=-1, required=True, metavar="ID…", type=worker_id)
@store_option
@json_option
def status(workers: tuple[str, ...], store: str | None, as_json: bool) -> None:
    """Show where workers are and whether they are protected."""
    client = open_client(store)
    _show([client.status(worker) for worker in workers], as_json)


@click.command("list")
@click.option("--state", type=click.Choice([s.value for s in State]), help="Only workers in this state.")
@store_option
@json_option
def list_workers(state: str | None, store: str | None, as_json: bool) -> None:
    """List the workers of the store."""
    damaged: list[str] = []

    def unreadable(worker: str, error: SavedWorkerError) -> None:
        damaged.append(worker)
        click.echo(f"savedworker: {worker} is left out: {error}", err=True)

    found = open_client(store).list(state, unreadable)
    if found or as_json:
        _show(found, as_json)
    elif not damaged:
        click.echo("no workers", err=True)
    if damaged:
        click.get_current_context().exit(OTHER)


def _show(found: Sequence[Status], as_json: bool) -> None:
    if as_json:
        print_json(found)
        return
    rows = [
        (
            s.id,
            state_text(s.state, s.reason),
            s.instance or "-",
            str(s.incarnation or "-"),
            protection(s),
            checkpoint_age(s),
            format_duration(((s.ended_at or datetime.now(UTC)) - s.created_at).total_seconds()),
        )
        for s in found
    ]
    header = ("ID", "STATE", "INSTANCE", "INCARNATION", "PROTECTED", "LAST CHECKPOINT", "AGE")
    show(columns(header, rows))


@click.command()
@click.argument("worker", metavar="ID", type=worker_id)
@store_option
@json_option
def report(worker: str, store: str | None, as_json: bool) -> None:
    """Tell a worker's history, with what was lost and kept."""
    document = open_client(store).report(worker)
    if as_json:
        print_json(document)
    else:
        _tell(document, datetime.now(UTC))


def _tell(document: Report, now: datetime) -> None:
    end = document.ended_at or now
    facts = [
        ("worker", document.id),
        ("state", outcome(document)),
        (
            "created",
            f"{document.created_at.astimezone():%Y-%m-%d %H:%M:%S}, {format_duration((end - document.created_at).total_seconds())} {'in all' if document.ended_at else 'so far'}",
        ),
        ("fleet", document.fleet),
        ("moves", moves(document)),
    ]
    if not document.ended_at:
        facts.append(("protected", protection(document)))
    if document.last_checkpoint:
        last = document.last_checkpoint
        facts.append(
            (
                "checkpoint",
                f"{last.number}, {format_duration(last.age_seconds)} {'before the end' if document.ended_at else 'ago'}, "
                f"{format_size(last.bytes_image)} image, {format_size(last.bytes_uploaded)} uploaded",
            )
        )
    parts: list[RenderableType] = [Text(f"{name:<12}{value}") for name, value in facts]
    if document.incarnations:
        parts += ["", *picture(document, end), "", incarnations(document)]
    if document.timeline:
        parts += ["", history(document)]
    show(*parts)
