"""``savedworker bench``: what saving and restoring costs on this machine, beside plain runc."""

from __future__ import annotations

import os
from pathlib import Path

import click
from rich.text import Text

from savedworker.cli.exit_status import BadArgument
from savedworker.cli.options import json_option, open_client, store_option
from savedworker.cli.output import columns, print_json, show

PARTS = (
    "overhead",
    "freeze",
    "restore",
    "change",
    "reclaim",
    "shared",
    "notice",
    "sealing",
    "memory",
    "files",
)
"""As savedworker.bench.suite has them, which is not imported for the help."""


@click.command()
@click.option(
    "--quick", is_flag=True, help="One small run of everything, a minute or two: a smoke, not a measurement."
)
@click.option(
    "--only",
    multiple=True,
    type=click.Choice(PARTS),
    metavar="PART",
    help=f"Of {', '.join(PARTS)}. Repeat for more.",
)
@click.option(
    "--size",
    "sizes",
    multiple=True,
    type=click.FloatRange(min=0.05, max=1024),
    metavar="GIB",
    help="Memory of the worker. Repeat for more. Default: 0.5, 1 and 2.",
)
@click.option("--runs", type=click.IntRange(min=1), metavar="N", help="Default: 3.")
@click.option(
    "--scratch",
    default="/var/tmp",
    metavar="DIR",
    help="A folder on the disk that is to be measured. Default: /var/tmp.",
)
@store_option
@json_option
def bench(
    quick: bool,
    only: tuple[str, ...],
    sizes: tuple[float, ...],
    runs: int | None,
    scratch: str,
    store: str | None,
    as_json: bool,
) -> None:
    """Measure what saving and restoring costs here.

    Freeze, time to safe, restore, overhead and memory. With --store, checkpoints go there and are deleted; without, to a
    directory in --scratch. Each figure is beside the same done by runc alone, in the same run. Needs root, and a machine that does nothing else.
    """
    from savedworker.bench.suite import PARTS as ALL
    from savedworker.bench.suite import Plan, begin, measure
    from savedworker.checkpoint.allocator import begin_again_in_huge_pages

    begin_again_in_huge_pages()  # as an agent does
    if os.geteuid() != 0:
        raise BadArgument("bench needs root", "run it with sudo")
    if not Path(scratch).is_dir():
        raise BadArgument(
            f"--scratch {scratch} is not a directory", "give one on the disk that is to be measured"
        )
    plan = Plan(
        parts=only or ALL,
        sizes=sizes or ((0.1,) if quick else (0.5, 1.0, 2.0)),
        runs=runs or (1 if quick else 3),
        scratch=Path(scratch),
        quick=quick,
        store=None if store is None else open_client(store).store.url,
    )
    results = begin(plan)
    measure(plan, lambda text: click.echo(f"bench: {text}", err=True), results)
    if as_json:
        print_json(results.document())
        return
    header = ("FIGURE", "OURS", "AGAINST", "RATIO", "TARGET")
    show(
        Text(results.machine()),
        "",
        columns(header, results.rows()),
        *(Text(f"\n{line}") for line in results.spent()),
    )
