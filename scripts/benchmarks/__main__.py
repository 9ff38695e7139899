"""``scripts/bench``: ``savedworker bench`` beside podman, its results kept in docs/measurements/. Root only."""

from __future__ import annotations

import argparse
import contextlib
import signal
import sys
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path

from savedworker.bench.suite import KINDS, PARTS, Plan, begin, measure
from savedworker.bench.summary import table, write
from savedworker.checkpoint.allocator import begin_again_in_huge_pages
from savedworker.model.errors import SavedWorkerError
from scripts.benchmarks.object_store import KINDS as KINDS_OF_S3
from scripts.benchmarks.object_store import s3
from scripts.benchmarks.podman import PYTHON, Podman, installed, version

ROOT = Path(__file__).parents[2]


def main() -> int:
    """Measure, write, print the table."""
    begin_again_in_huge_pages()  # as an agent does
    given = arguments()
    plan = Plan(
        parts=given.only,
        sizes=given.sizes or ([0.1] if given.quick else [0.5, 1.0, 2.0]),
        kinds=given.kinds,
        runs=given.runs or (1 if given.quick else 3),
        scratch=Path(given.scratch),
        quick=given.quick,
    )
    with contextlib.ExitStack() as after:
        signal.signal(signal.SIGTERM, signal.default_int_handler)
        if given.store != "file":
            kind = replace(
                KINDS_OF_S3[given.store],
                **(
                    {"delay": given.delay_ms / 1000} if given.delay_ms and given.store == "s3-delayed" else {}
                ),
                **({"rate": given.mbit * 1_000_000} if given.mbit and given.store == "s3-capped" else {}),
            )
            plan = replace(plan, store=after.enter_context(s3(kind, plan.scratch)), store_name=str(kind))
        return run(plan, given)


def run(plan: Plan, given: argparse.Namespace) -> int:
    """Measure ``plan``; the exit status."""
    results = begin(plan)
    if given.peer:
        if not installed():
            say("there is no podman to compare with; install it, or leave --peer out")
            return 1
        results.header["machine"]["podman"] = version()
        plan = replace(plan, peer=Podman)
        say(f"reclaim runs {PYTHON}, the interpreter of podman's image")
    name = f"{datetime.now(UTC):%Y-%m-%d}-{given.name or ('quick' if given.quick else 'bench')}"
    try:
        measure(plan, say, results)
    except KeyboardInterrupt:
        say("interrupted: these are the figures so far, nothing is written")
        print(table(name, results))
        return 130
    except SavedWorkerError as error:
        say(str(error))
        return 1
    if given.quick and not given.name:
        print(table(name, results))  # a smoke is not worth keeping
        return 0
    paths = write(ROOT / "docs" / "measurements", name, results)
    print(paths[1].read_text())
    say(f"written: {', '.join(str(path.relative_to(ROOT)) for path in paths)}")
    return 0


def arguments() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(prog="scripts/bench")
    parser.add_argument(
        "--quick", action="store_true", help="one small run of everything, printed and not kept"
    )
    parser.add_argument("--only", nargs="+", choices=PARTS, default=PARTS)
    parser.add_argument("--sizes", nargs="+", type=float, metavar="GIB")
    parser.add_argument("--runs", type=int, help="samples of each figure. Default: 3")
    parser.add_argument(
        "--kinds", nargs="+", choices=KINDS, default=KINDS, help="what changes in the memory of reclaim"
    )
    parser.add_argument("--peer", action="store_true", help="measure podman beside (it must be installed)")
    parser.add_argument(
        "--store",
        choices=("file", *KINDS_OF_S3),
        default="file",
        help="where freeze, restore, change, reclaim, shared, sealing and files store: a directory, or a moto S3 in a network namespace, also with "
        "late requests or with a limited link (tc tbf)",
    )
    parser.add_argument("--delay-ms", type=float, help="of s3-delayed. Default: 30")
    parser.add_argument("--mbit", type=int, help="of s3-capped. Default: 1000")
    parser.add_argument("--name", help="last part of the files' names")
    parser.add_argument("--scratch", default="/var/tmp", help="a folder on the disk to be measured")
    return parser.parse_args()


def say(text: str) -> None:
    print(f"bench: {text}", file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(main())
