"""``savedworker controller``: brings the workers of a store on, with nobody watching."""

from __future__ import annotations

import json
import logging
import signal
import sys
import time
from datetime import datetime
from functools import partial

import click

from savedworker.cli.collector import Collector
from savedworker.cli.exit_status import OTHER
from savedworker.cli.options import json_option, open_client, store_option, worker_id
from savedworker.cli.reaper import Reaper
from savedworker.cli.reconciler import Reconciler, Watched
from savedworker.cli.signals import Signals
from savedworker.controller.client import Client
from savedworker.controller.collection import collect_worker
from savedworker.model.errors import NotFound, SavedWorkerError, Temporary
from savedworker.store.worker import list_workers

log = logging.getLogger("savedworker.controller")

THREADS = 8
SLOWEST = 2.5
"""Seconds between two looks at a quiet worker: well below the shortest lease term."""
DISCOVER = 2.0
"""Seconds between two listings of the store; ten times that when it is long and nothing is new."""
HOPELESS = 10
"""Failures in a row, other than of a store or fleet that does not answer, after which --until-idle leaves a worker alone."""


@click.command()
@click.option("--until-idle", is_flag=True, help="End when every worker has ended and its instance is gone.")
@click.option(
    "--worker",
    "workers",
    multiple=True,
    metavar="ID",
    type=worker_id,
    help="Only these. Default: all of the store.",
)
@store_option
@json_option
@click.pass_context
def controller(
    ctx: click.Context, until_idle: bool, workers: tuple[str, ...], store: str | None, as_json: bool
) -> None:
    """Bring the workers of a store on until stopped.

    Launches, relaunches and finishes them.

    Deletes what is not needed any more of each, about once an hour, and ends instances that nobody wants (see gc).

    Any number of controllers may run at once, and each may be killed at any time. Log lines go to stderr, with --json
    as one JSON object each.
    """
    client = open_client(store)
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(_JsonLines() if as_json else _Lines())
    logger = logging.getLogger("savedworker")
    logger.addHandler(handler)
    level = logger.level
    logger.setLevel(logging.INFO)
    try:
        ctx.exit(_control(client, workers, until_idle))
    finally:
        logger.removeHandler(handler)
        logger.setLevel(level)


def _control(client: Client, chosen: tuple[str, ...], until_idle: bool) -> int:
    for worker in chosen:
        client.record(worker)  # a wrong id is the caller's mistake
    known = list(chosen or list_workers(client.store))
    log.info(
        "controlling %s", f"{len(known)} workers in {client.store.url}" if not chosen else ", ".join(chosen)
    )
    ended: set[str] = set()
    hopeless: set[str] = set()
    next_listing = time.monotonic() + DISCOVER
    with (
        Signals([signal.SIGTERM, signal.SIGINT]) as signals,
        Reconciler(
            client, slowest=SLOWEST, threads=THREADS, on_round=lambda seen: _after(seen, signals)
        ) as rounds,
        Collector(partial(collect_worker, client.store)) as collector,
        Reaper(client.store, lambda: _fleets(rounds)),
    ):
        while True:
            for worker in known:
                rounds.add(worker)
                collector.add(worker)
            if signals.take():
                log.info("stopping; the workers go on")
                return 0
            for seen in list(rounds.watched.values()):
                if seen.settled and seen.worker not in ended:
                    ended.add(seen.worker)
                    log.info("%s: %s", seen.worker, seen.record.state if seen.record else "?")
                elif until_idle and _is_hopeless(seen) and seen.worker not in hopeless:
                    hopeless.add(seen.worker)
                    rounds.drop(seen.worker)
                    log.error("%s: given up after %d failures", seen.worker, seen.failures)
            if until_idle and ended | hopeless >= set(known):
                return OTHER if hopeless else 0
            if not chosen and time.monotonic() >= next_listing:
                try:
                    known = list(list_workers(client.store))
                except SavedWorkerError as error:
                    log.warning("the store cannot be listed now: %s", error)
                for worker in {
                    seen.worker for seen in list(rounds.watched.values()) if seen.settled
                }.difference(known):
                    ended.discard(worker)  # deleted, and perhaps made again one day
                    rounds.forget(worker)
                next_listing = time.monotonic() + DISCOVER
            signals.wait(DISCOVER)


def _fleets(rounds: Reconciler) -> list[str]:
    """The names of the fleets of all workers that are looked after."""
    return sorted({seen.record.fleet for seen in list(rounds.watched.values()) if seen.record})


def _after(seen: Watched, signals: Signals) -> None:
    if seen.settled or seen.error is not None:
        signals.wake()


def _is_hopeless(seen: Watched) -> bool:
    if seen.error is None or isinstance(seen.error, Temporary):
        return False
    return isinstance(seen.error, NotFound) or seen.failures >= HOPELESS


class _Lines(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        """One line for people."""
        text = " ".join(record.getMessage().split())
        at = datetime.fromtimestamp(record.created).astimezone()
        line = f"savedworker: {at:%Y-%m-%d %H:%M:%S} {record.levelname.lower()}: {text}"
        return f"{line}\n{self.formatException(record.exc_info)}" if record.exc_info else line


class _JsonLines(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        """One JSON object."""
        at = datetime.fromtimestamp(record.created).astimezone()
        document = {"at": at.isoformat(), "level": record.levelname.lower(), "message": record.getMessage()}
        if record.exc_info:
            document["traceback"] = self.formatException(record.exc_info)
        return json.dumps(document, ensure_ascii=False)
