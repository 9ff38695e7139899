"""The verbs that ask something of one worker: checkpoint, preempt, cancel."""

from __future__ import annotations

import json

import click

from savedworker.cli.follow import caller
from savedworker.cli.options import duration, json_option, open_client, store_option, worker_id
from savedworker.cli.output import print_json
from savedworker.model import defaults
from savedworker.model.errors import SavedWorkerError
from savedworker.model.units import format_duration


@click.command()
@click.argument("worker", metavar="ID", type=worker_id)
@store_option
@json_option
def checkpoint(worker: str, store: str | None, as_json: bool) -> None:
    """Take a checkpoint now; prints its number when it is committed."""
    number = open_client(store).checkpoint(worker)
    click.echo(json.dumps({"id": worker, "number": number}) if as_json else number)


@click.command()
@click.argument("worker", metavar="ID", type=worker_id)
@click.option(
    "--notice", type=duration, metavar="30s", help="How long before the instance goes. Default: 30s."
)
@click.option("--no-notice", is_flag=True, help="Take the instance at once, without any warning.")
@store_option
@json_option
def preempt(worker: str, notice: float | None, no_notice: bool, store: str | None, as_json: bool) -> None:
    """Reclaim the worker's instance as a cloud would: a drill."""
    if no_notice and notice is not None:
        raise click.UsageError("--notice and --no-notice exclude each other")
    seconds = None if no_notice else defaults.GRACE_LOCAL if notice is None else notice
    instance = open_client(store).preempt(worker, seconds)
    if as_json:
        click.echo(json.dumps({"id": worker, "instance": instance, "notice_seconds": seconds}))
    elif seconds is None:
        click.echo(f"{instance} is gone, without notice")
    else:
        click.echo(f"{instance} goes in {format_duration(seconds)}")


@click.command()
@click.argument("worker", metavar="ID", type=worker_id)
@store_option
@json_option
def cancel(worker: str, store: str | None, as_json: bool) -> None:
    """Cancel a worker.

    It ends within seconds, and its instance with it. Nothing happens when it has ended.
    """
    client = open_client(store)
    already = client.record(worker).state.terminal
    client.cancel(worker, caller())
    try:
        client.reconcile(worker)  # nobody else may be there to end the instance
    except SavedWorkerError as error:
        click.echo(
            f"savedworker: {worker} is cancelled, but its instance could not be seen to yet: {error}",
            err=True,
        )
    status = client.status(worker)
    if as_json:
        print_json(status)
    else:
        click.echo(
            f"{worker} had ended already: {status.state}" if already else f"{worker} is {status.state}"
        )
