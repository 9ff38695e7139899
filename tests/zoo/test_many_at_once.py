"""Several workers saved and restored at the same time: nothing of one stands in another's way (criu issues 2499 and 1798)."""

from __future__ import annotations

import re
from concurrent.futures import ThreadPoolExecutor

import pytest

from savedworker.model.record import State
from tests.runtime.gate import Gate
from tests.runtime.world import World
from tests.zoo import zoo

COUNT = 4


@pytest.mark.timeout(1500)
@pytest.mark.parametrize("rounds", [2, pytest.param(20, marks=pytest.mark.sweep)])
def test_four_workers_with_equal_pids_and_host_networking_are_saved_and_restored_at_the_same_time(
    world: World, gate: Gate, rounds: int
) -> None:
    command = (zoo.PYTHON, "-B", str(zoo.PROGRAMS / "threads.py"))
    workers = [world.submit(*command, volumes=(gate.volume,), network="host") for _ in range(COUNT)]

    def move(worker: str, notice: float | None) -> None:
        if notice is None:
            world.checkpoint(worker)
        world.preempt(worker, notice)

    for worker in workers:
        world.until_output(worker, "ok 3\n", 120)
    with ThreadPoolExecutor(COUNT) as together:
        for number in range(1, rounds + 1):
            list(together.map(lambda w, n=number: move(w, 40.0 if n % 2 else None), workers))
            for worker in workers:
                record = world.record(worker)
                assert (record.migrations, record.cold_starts) == (number, 0), world.story(worker)
                seen = max(map(int, re.findall(r"^ok (\d+)$", world.output(worker), re.MULTILINE)))
                world.until_output(worker, f"ok {seen + 3}\n")
    failures = [
        e
        for w in workers
        for e in world.report(w).timeline
        if e.event in ("checkpoint_failed", "restore_failed")
    ]
    assert failures == []
    gate.open("end")
    for worker in workers:
        record = world.until_settled(worker)
        assert record.state is State.SUCCEEDED, (
            f"{world.output(worker, 'stderr')[-2000:]}\n{world.story(worker)}"
        )
