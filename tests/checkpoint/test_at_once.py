"""C46. Several workers of equal inner pids are dumped and restored at the same time in one network namespace."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from tests.checkpoint.bench import Bench

pytestmark = pytest.mark.criu

TICKS = """
import os, time
PID = 64  # runc's own threads take a few numbers more or less before the worker's first process
while os.getpid() != PID:
    child = os.fork()
    if not child:
        if os.getpid() < PID:
            os._exit(0)
    else:
        os.waitpid(child, 0)
        if child >= PID:
            os._exit(0)
print("pid", os.getpid(), flush=True)
while True:
    print("tick", flush=True)
    time.sleep(0.02)
"""


@pytest.fixture
def benches() -> Iterator[list[Bench]]:
    folders = [Path(tempfile.mkdtemp(prefix="sw-bench-", dir="/var/tmp")) for _ in range(4)]
    made = [Bench(folder) for folder in folders]
    try:
        yield made
    finally:
        for bench, folder in zip(made, folders, strict=True):
            bench.close()
            shutil.rmtree(folder)


def at_once(benches: list[Bench], action: Callable[[Bench], object]) -> None:
    with ThreadPoolExecutor(len(benches)) as pool:
        list(pool.map(action, benches))


def play(benches: list[Bench], rounds: int) -> None:
    for bench in benches:
        bench.python(TICKS, network="host")
    for bench in benches:
        bench.until_output("tick\n")
    assert [bench.lines()[0] for bench in benches] == ["pid 64"] * len(benches)
    for _ in range(rounds):
        at_once(benches, Bench.save)
        at_once(benches, Bench.restore)
        at_once(benches, Bench.writes_on)


def test_four_workers_are_dumped_and_restored_at_once_on_one_network(benches: list[Bench]) -> None:
    play(benches, 2)


@pytest.mark.sweep
def test_four_workers_are_dumped_and_restored_at_once_twenty_times(benches: list[Bench]) -> None:
    play(benches, 20)
