"""``savedworker wait``: until workers have ended, bringing them on meanwhile."""

from __future__ import annotations

import time

import click

from savedworker.cli.exit_status import TIMED_OUT, exit_status
from savedworker.cli.follow import SETTLE
from savedworker.cli.options import duration, json_option, open_client, store_option, worker_id
from savedworker.cli.output import print_json
from savedworker.cli.reconciler import Reconciler, Watched
from savedworker.cli.signals import Signals
from savedworker.cli.views import closing_line
from savedworker.controller.client import Client


@click.command()
@click.argument("workers", nargs=-1, required=True, metavar="ID…", type=worker_id)
@click.option("--timeout", type=duration, metavar="T", help="Give up after this time, with exit status 124.")
@store_option
@json_option
@click.pass_context
def wait(
    ctx: click.Context, workers: tuple[str, ...], timeout: float | None, store: str | None, as_json: bool
) -> None:
    """Wait until the workers have ended.

    Exits with the worker's code; of several, with that of the first one in the order given that did not succeed.
    """
    client = open_client(store)
    wanted = list(dict.fromkeys(workers))
    for worker in wanted:
        client.record(worker)  # all exist, before any of them is waited for
    if not _wait(client, wanted, timeout):
        if as_json:
            print_json([client.status(worker) for worker in wanted])
        else:
            late = [w for w in wanted if not client.record(w).state.terminal]
            click.echo(
                f"savedworker: the time is up; still going: {', '.join(late) or 'nothing, just now'}",
                err=True,
            )
        ctx.exit(TIMED_OUT)
    ended = [client.record(worker) for worker in wanted]
    if as_json:
        print_json([client.status(worker) for worker in wanted])
    else:
        for record in ended:
            click.echo(closing_line(record))
    ctx.exit(next((code for record in ended if (code := exit_status(record))), 0))


def _wait(client: Client, workers: list[str], timeout: float | None) -> bool:
    """True when all have ended, False when the time ran out. Raises an error that lasts."""
    until = None if timeout is None else time.monotonic() + timeout
    ended_at: dict[str, float] = {}

    def done(seen: Watched) -> bool:
        if seen.record is None or not seen.record.state.terminal:
            return False
        first = ended_at.setdefault(seen.worker, time.monotonic())
        return seen.settled or time.monotonic() - first > SETTLE

    with (
        Signals([]) as bell,
        Reconciler(client, slowest=2.0, threads=4, on_round=lambda _: bell.wake()) as rounds,
    ):
        for worker in workers:
            rounds.add(worker)
        while True:
            waiting = [worker for worker in workers if not done(rounds.watched[worker])]
            if not waiting:
                return True
            for seen in rounds.watched.values():
                if error := seen.lasting_error():
                    raise error
            left = 1.0 if until is None else until - time.monotonic()
            if left <= 0:
                return False
            bell.wait(min(left, 1.0))
