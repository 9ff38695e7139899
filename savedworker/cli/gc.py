"""``savedworker gc``: delete what nobody needs any more."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

import click

from savedworker.cli.exit_status import OTHER
from savedworker.cli.options import json_option, open_client, store_option, worker_id
from savedworker.cli.output import print_json
from savedworker.controller.collection import collect_worker
from savedworker.controller.reaping import Reaped, reap, tidy
from savedworker.fleet.base import keeping_fleets
from savedworker.model.errors import NotFound, SavedWorkerError, Unreachable
from savedworker.model.units import format_size
from savedworker.store.backend import Store
from savedworker.store.collect import Collected
from savedworker.store.worker import list_workers


@dataclass(frozen=True)
class _Outcome:
    """Of one worker: what was found, or why nothing was."""

    worker: str
    found: Collected | None = None
    error: SavedWorkerError | None = None

    def to_json(self) -> dict[str, Any]:
        found = self.found or Collected(self.worker)
        return {
            "id": self.worker,
            "whole": found.whole,
            "checkpoints": found.checkpoints,
            "objects": found.objects,
            "bytes": found.bytes,
            "error": self.error.to_json() if self.error else None,
        }


@click.command()
@click.argument("workers", nargs=-1, metavar="[ID]…", type=worker_id)
@click.option("--dry-run", is_flag=True, help="Only say what would be deleted.")
@store_option
@json_option
@click.pass_context
def gc(ctx: click.Context, workers: tuple[str, ...], dry_run: bool, store: str | None, as_json: bool) -> None:
    """Delete what is not needed any more.

    Of these workers, or of all. Workers go as a whole when they ended longer ago than their retention. Of the others go old checkpoints that are not
    kept, and what no checkpoint names, a day after it was written. Instances of configured fleets that belong to no worker that wants
    them are ended, and launch templates that are out of use are deleted. Safe at any time, beside anything.

    Exits with 1 when a worker or a fleet could not be dealt with; nothing of it is deleted then, and the others are.
    """
    opened = open_client(store).store
    outcomes = []
    for worker in dict.fromkeys(workers or list_workers(opened)):
        outcome = _collect(opened, worker, dry_run, by_name=bool(workers))
        if outcome is None:
            continue
        outcomes.append(outcome)
        if not as_json:
            _tell(outcome, dry_run)
    leftovers = (0, 0) if workers else opened.leftovers(remove=not dry_run)
    reaped, tidied, deaf = ([], [], []) if workers else _reap(opened, dry_run)
    objects = sum(x.found.objects for x in outcomes if x.found) + leftovers[0]
    size = sum(x.found.bytes for x in outcomes if x.found) + leftovers[1]
    if as_json:
        print_json(
            {
                "dry_run": dry_run,
                "workers": [outcome.to_json() for outcome in outcomes],
                "leftovers": {"objects": leftovers[0], "bytes": leftovers[1]},
                "instances": [asdict(x) for x in reaped],
                "tidied": [{"fleet": fleet, "what": what} for fleet, what in tidied],
                "fleets_unheard": deaf,
                "objects": objects,
                "bytes": size,
            }
        )
    else:
        for each in reaped:
            ended = "would be ended" if dry_run else each.error or "ended"
            click.echo(f"instance {each.instance} of fleet {each.fleet}: {ended}: {each.why}")
        for fleet, what in tidied:
            click.echo(
                f"{what} of fleet {fleet}: {'would be ' if dry_run else ''}deleted: of no use any more"
            )
        for text in deaf:
            click.echo(f"savedworker: {text}", err=True)
        if leftovers[0]:
            click.echo(f"leftovers of killed writers: {_deleted(*leftovers, dry_run)}")
        count = "1 worker" if len(outcomes) == 1 else f"{len(outcomes)} workers"
        click.echo(f"{count}: {_deleted(objects, size, dry_run)}")
    trouble = any(outcome.error for outcome in outcomes) or any(x.error for x in reaped) or bool(deaf)
    ctx.exit(OTHER if trouble else 0)


def _reap(store: Store, dry_run: bool) -> tuple[list[Reaped], list[tuple[str, str]], list[str]]:
    """What was left over in the configured fleets: instances, other things with their fleets; and what those say that could not be asked."""
    found: list[Reaped] = []
    tidied: list[tuple[str, str]] = []
    deaf: list[str] = []
    try:
        for fleet in keeping_fleets(()):
            try:
                found += reap(store, fleet, dry_run=dry_run)
                tidied += [(fleet.name, what) for what in tidy(store, fleet, dry_run=dry_run)]
            except SavedWorkerError as error:
                deaf.append(f"fleet {fleet.name}: {error}")
    except SavedWorkerError as error:  # the fleet file cannot be used
        deaf.append(str(error))
    return found, tidied, deaf


def _collect(store: Store, worker: str, dry_run: bool, by_name: bool) -> _Outcome | None:
    """None for a worker that somebody else deleted since the store was listed. Raises Unreachable: the next one would fare no better."""
    try:
        return _Outcome(worker, collect_worker(store, worker, dry_run=dry_run))
    except Unreachable:
        raise
    except SavedWorkerError as error:
        if isinstance(error, NotFound) and not by_name:
            return None
        return _Outcome(worker, error=error)


def _tell(outcome: _Outcome, dry_run: bool) -> None:
    if outcome.found is None:
        click.echo(" ".join(f"savedworker: {outcome.worker}: {outcome.error}".split()), err=True)
        return
    found = outcome.found
    line = f"{outcome.worker}: {_deleted(found.objects, found.bytes, dry_run)}"
    if found.whole and found.objects:
        line += ", all of it: its retention is over"
    elif found.checkpoints:
        line += f", with {found.checkpoints} old checkpoint{'' if found.checkpoints == 1 else 's'}"
    click.echo(line)


def _deleted(objects: int, size: int, dry_run: bool) -> str:
    if not objects:
        return "nothing to delete"
    count = "1 object" if objects == 1 else f"{objects} objects"
    return f"{'would delete' if dry_run else 'deleted'} {count}, {format_size(size)}"
