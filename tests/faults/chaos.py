"""``savedworker-chaos``: play random schedules of faults against truth workers, and say which of them broke a promise.

    scripts/savedworker-chaos --seed N [--store file|s3] [--keep]     one schedule, with its story
    scripts/savedworker-chaos --schedules K [--first N] [--jobs J]    seeds N to N+K-1, a line each

A schedule is drawn from its seed alone and waits for conditions, not for times, so the same seed plays the same faults again.
Exit status 1 when any schedule failed.
"""

from __future__ import annotations

import argparse
import collections
import contextlib
import json
import logging
import os
import shutil
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import dataclass
from multiprocessing import get_context
from pathlib import Path
from urllib.parse import urlsplit

from savedworker.model.errors import SavedWorkerError
from savedworker.model.record import State
from tests.faults import checks
from tests.faults.bed import Bed, environment
from tests.faults.faults import FAULTS
from tests.faults.proxy import Proxy
from tests.faults.schedule import Schedule, draw
from tests.runtime.world import BRIDGE

ATTEMPT = 200.0
"""Seconds that a schedule may take after its last fault."""


@dataclass
class Result:
    """How one schedule went."""

    schedule: Schedule
    complaints: list[str]
    story: str
    seconds: float
    reached: list[str]
    moves: int = 0

    def line(self) -> str:
        verdict = "ok" if not self.complaints else "FAILED: " + " | ".join(self.complaints)
        return f"{self.seconds:5.1f} s, {self.moves} moves: {self.schedule} {verdict}"


def play(schedule: Schedule, folder: Path, url: str | None = None) -> Result:
    """Play ``schedule`` in the empty ``folder``."""
    began = time.monotonic()
    with contextlib.ExitStack() as around:
        more: dict[str, str] = {}
        proxy = None
        if schedule.store == "s3":
            address = urlsplit(os.environ["AWS_ENDPOINT_URL"])
            proxy = Proxy(BRIDGE, (address.hostname or "", address.port or 0))
            around.callback(proxy.close)
            more["AWS_ENDPOINT_URL"] = proxy.url
        around.enter_context(environment(folder, **more))
        bed = Bed(folder, schedule.seed, url)
        bed.proxy = proxy
        found: list[str] = []
        record = None
        try:
            bed.begin(steps=schedule.length, interval=schedule.interval)
            for step in schedule.steps:
                start = len(bed.tracker.seen)
                if not bed.wait(lambda s=start, n=step.after: len(bed.tracker.seen) >= s + n, 60):  # type: ignore[misc]
                    break
                bed.note(f"{step.fault} {step.word}")
                FAULTS[step.fault](bed, step.word)
                bed.note(f"{step.fault} is done")
            record = bed.finish(ATTEMPT)
            bed.note(f"ended: {record.state}")
            if proxy is not None:
                proxy.clear()
            found = checks.complaints(bed, record, expected(schedule, record.state))
        except Exception:
            found = [traceback.format_exc(limit=-3)]
        story = ""
        if found and bed.worker:
            try:
                story = "\n".join([*bed.notes, bed.story(bed.worker), trace(bed)])
            except SavedWorkerError as error:
                story = f"the story cannot be told: {error}"
        bed.close()
        if not found:
            found = checks.leftovers(bed)
    moves = record.moves if record else 0
    return Result(schedule, found, story, time.monotonic() - began, sorted(bed.reached), moves)


def expected(schedule: Schedule, state: State) -> State:
    """A cancel may come after the end: then the worker has succeeded."""
    if schedule.expected is State.CANCELLED and state is State.SUCCEEDED:
        return State.SUCCEEDED
    return schedule.expected


def trace(bed: Bed) -> str:
    """The logs of every host, and what the tracker saw, in runs."""
    lines = []
    for log in sorted((bed.folder / "local/hosts").glob("*/*.log"), key=lambda x: x.stat().st_mtime):
        lines += [f"-- {log.parent.name} {log.name}", *log.read_text(errors="replace").splitlines()[-60:]]
    runs: list[str] = []
    for x in bed.tracker.seen:
        head = f"incarnation {x.incarnation} of {x.nonce}"
        if not runs or not runs[-1].startswith(head + ":"):
            runs.append(f"{head}:")
        runs[-1] += f" {x.step}"
    return "\n".join([*lines, *runs])


@contextlib.contextmanager
def stores(kind: str) -> Iterator[str | None]:
    """The URL below which schedules have their stores, None for directories of their own."""
    if kind == "file":
        yield None
        return
    from tests.faults.s3 import object_store

    with object_store() as url:
        yield url


def one(seed: int, kind: str, url: str | None, keep: bool = False) -> Result:
    folder = Path(tempfile.mkdtemp(prefix=f"sw-{kind}-{seed}-", dir="/var/tmp"))
    try:
        return play(
            draw(seed, "s3" if kind == "s3" else "file"), folder, f"{url}/{folder.name}" if url else None
        )
    finally:
        if not keep:
            shutil.rmtree(folder, ignore_errors=True)


def _stopped(*_: object) -> None:
    raise SystemExit(143)


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="savedworker-chaos", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("--seed", type=int)
    parser.add_argument("--schedules", type=int, default=8)
    parser.add_argument("--first", type=int, default=1)
    parser.add_argument("--store", choices=("file", "s3"), default="file")
    parser.add_argument("--jobs", type=int, default=3)
    parser.add_argument("--keep", action="store_true", help="leave the directory of --seed")
    given = parser.parse_args(argv)
    logging.disable(logging.CRITICAL)
    signal.signal(signal.SIGTERM, _stopped)
    if os.geteuid():
        parser.error("this needs root")
    seeds = [given.seed] if given.seed is not None else range(given.first, given.first + given.schedules)
    failed: list[Result] = []
    reached: collections.Counter[str] = collections.Counter()
    done = 0
    with stores(given.store) as url:
        if given.seed is not None:
            results: Iterator[Result] = iter([one(given.seed, given.store, url, given.keep)])
        else:
            results = _parallel(list(seeds), given.store, url, given.jobs)
        for result in results:
            done += 1
            reached.update(result.reached)
            print(f"{done}: {result.line()}", flush=True)
            if result.complaints:
                failed.append(result)
                print(result.story, flush=True)
    print(f"{done} schedules, {len(failed)} failed: {[x.schedule.seed for x in failed]}")
    print(json.dumps({"reached": dict(reached.most_common())}))
    return 1 if failed else 0


def _parallel(seeds: list[int], kind: str, url: str | None, jobs: int) -> Iterator[Result]:
    pool = ProcessPoolExecutor(jobs, mp_context=get_context("forkserver"))
    try:
        for future in as_completed([pool.submit(one, seed, kind, url) for seed in seeds]):
            yield future.result()
    finally:
        pool.shutdown(cancel_futures=True)  # what runs comes to its end, and cleans up


if __name__ == "__main__":
    sys.exit(main())
