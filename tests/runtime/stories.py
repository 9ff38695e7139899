"""Programs with a known undisturbed outcome, and what has to be true of them after any number of moves."""

from __future__ import annotations

import itertools
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from hashlib import sha256
from pathlib import Path
from typing import Any

from savedworker.checkpoint import processes
from savedworker.model.record import State, WorkerRecord
from tests.runtime.counter import Arrival, Counter
from tests.runtime.world import World

PROGRAMS = Path(__file__).with_name("programs")
NO_THREADS = {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
"""Sums of numpy and torch depend on the number of threads."""


@dataclass(frozen=True)
class Program:
    """A program of tests/runtime/programs. It posts steps 0 to ``steps``-1, then its files."""

    file: str
    steps: int
    seed: int = 7
    extra: tuple[str, ...] = ()

    def command(self, counter: Counter, folder: str) -> list[str]:
        interpreter = ["/bin/bash"] if self.file.endswith(".sh") else [sys.executable, "-u"]
        where = str(PROGRAMS / self.file)
        return [*interpreter, where, counter.address, folder, str(self.seed), str(self.steps), *self.extra]

    def submit(self, world: World, counter: Counter, **fields: Any) -> str:
        """Start it as a worker."""
        return world.submit(*self.command(counter, "/tmp/out"), env=NO_THREADS, **fields)


@cache
def undisturbed(program: Program) -> dict[str, str]:
    """The files' digests after a plain run outside the product."""
    counter = Counter()
    try:
        with tempfile.TemporaryDirectory() as folder:
            subprocess.run(
                program.command(counter, folder),
                env={"PATH": "/usr/bin:/bin", "LANG": "C.UTF-8", **NO_THREADS},
                stdout=subprocess.DEVNULL,
                timeout=240,
                check=True,
            )
        assert counter.steps == list(range(program.steps))
        return digests(counter)
    finally:
        counter.close()


def digests(counter: Counter) -> dict[str, str]:
    """sha256 of every file that was posted."""
    assert counter.files
    return {name: sha256(content).hexdigest() for name, content in counter.files.items()}


@dataclass(frozen=True)
class Loss:
    """A move without notice: the steps known just before the freeze of the checkpoint and just after it, and at the loss."""

    least: int
    most: int


def lose(world: World, worker: str, counter: Counter, ahead: int = 8) -> Loss:
    """Take a checkpoint, let the program go on for ``ahead`` steps, then take its instance away without a word."""
    number = world.checkpoint(worker)
    entry = next(c for c in world.record(worker).checkpoints if c.number == number)
    # The last one, not the greatest: after a loss shortly before, the program is still at steps that it has done already.
    least = [-1, *(a.step for a in counter.arrivals if a.at < entry.frozen_at)][-1]
    most = [-1, *(a.step for a in counter.arrivals if a.at < entry.committed_at)][-1] + 1
    counter.hold_at(most + ahead + 10)
    counter.until(most + ahead)
    world.preempt(worker, notice=None)
    return Loss(least, most)


def held(world: World, worker: str) -> bool:
    """True while CRIU holds every process of the worker (it thaws the cgroup as soon as it has them)."""
    pids = world.pids(worker)
    return bool(pids) and all(processes.state_of(pid) == "t" for pid in pids)


def is_the_same_process(
    world: World, worker: str, counter: Counter, program: Program, moves: int
) -> WorkerRecord:
    """Wait for the end; assert continuity (one nonce, no cold start) and identity (files as of an undisturbed run)."""
    record = world.until_settled(worker, 180)
    assert record.state is State.SUCCEEDED, world.story(worker)
    assert (record.migrations, record.cold_starts) == (moves, 0), world.story(worker)
    assert len(counter.nonces) == 1
    assert digests(counter) == undisturbed(program)
    return record


def steps_are_once(counter: Counter, program: Program, in_flight: int, losses: Sequence[Loss] = ()) -> None:
    """Assert what the counter saw: every step, in order; again only what was lost without notice or was in flight."""
    runs = split(counter.arrivals)
    assert len(runs) == 1 + len(losses), (
        f"went back {len(runs) - 1} times, not {len(losses)}: {counter.steps}"
    )
    for loss, after in zip(losses, runs[1:], strict=True):
        assert loss.least <= after[0] <= loss.most, f"resumed at {after[0]}, the checkpoint was at {loss}"
    repeated = 0
    for run in runs:
        once = sorted(set(run))
        assert once == list(range(run[0], run[-1] + 1)), f"steps are missing: {run}"
        repeated += len(run) - len(once)
    assert repeated <= in_flight
    done_again = sum(before[-1] - after[0] + 1 for before, after in itertools.pairwise(runs))
    assert len(counter.steps) - repeated == program.steps + done_again
    assert (runs[0][0], runs[-1][-1]) == (0, program.steps - 1)


def split(arrivals: Sequence[Arrival]) -> list[list[int]]:
    """The steps, cut where the program went back by more than the one that was in flight."""
    runs: list[list[int]] = [[]]
    for arrival in arrivals:
        if runs[-1] and arrival.step < runs[-1][-1]:
            runs.append([])
        runs[-1].append(arrival.step)
    return runs
