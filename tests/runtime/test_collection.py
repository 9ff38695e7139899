"""A living worker beside collections: whatever is deleted, its checkpoints are whole and it goes on from them."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

import pytest

from savedworker.checkpoint.keys import stored_chunk_keys
from savedworker.controller.collection import collect_worker
from savedworker.model.record import State
from savedworker.store.collect import Collected
from savedworker.store.worker import WorkerStore
from tests.runtime.gate import PRELUDE, Gate
from tests.runtime.test_cases_owner import kill_agent, until_restarted
from tests.runtime.world import World

PROGRAM = (
    PRELUDE
    + """
import hashlib
growing = open("/growing", "ab", buffering=0)
with open("/fixed", "wb") as file:
    for _ in range(40):
        file.write(os.urandom(1 << 20))
def digest():
    with open("/fixed", "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
fixed = digest()
count = 0
while closed("end"):
    count += 1
    growing.write(os.urandom(1000))
    say("tick", count)
    time.sleep(0.05)
say("same", digest() == fixed)
say("grown", os.stat("/growing").st_size == 1000 * count)
"""
)


@pytest.fixture
def gate(tmp_path: Path) -> Gate:
    return Gate(tmp_path / "gate")


def collect_after_days(world: World, worker: str) -> Collected:
    """Make all that is stored two days older, and collect. What is left must be whole."""
    for folder, _, names in os.walk(world.folder / "store"):
        for name in names:
            path = Path(folder, name)
            with contextlib.suppress(FileNotFoundError):  # the record is written again and again
                then = path.stat().st_mtime - 2 * 24 * 3600
                os.utime(path, (then, then))
    done = collect_worker(world.client.store, worker)
    documents = WorkerStore(world.client.store, worker)
    numbers = documents.list_checkpoints()
    assert {c.number for c in documents.load_record().record.checkpoints} <= set(numbers)
    for number in numbers:
        for key in stored_chunk_keys(documents.load_manifest(number), documents.chunks):
            documents.chunks.get(key)
    return done


def test_a_worker_goes_on_from_what_collections_leave_of_its_checkpoints(world: World, gate: Gate) -> None:
    worker = world.python(PROGRAM, volumes=(gate.volume,))
    world.until_output(worker, "tick 5\n")
    for _ in range(3):
        world.checkpoint(worker)
    assert collect_after_days(world, worker).checkpoints == 1, "two are kept"
    world.preempt(worker, 30)
    assert collect_after_days(world, worker).checkpoints == 1, "the one that the last checkpoint replaced"
    world.checkpoint(worker)
    uploaded = world.record(worker).checkpoints[-1].bytes_uploaded
    assert uploaded < 40 << 20, (
        "what is old, and in the checkpoint that it was restored from, is not put again"
    )
    assert collect_after_days(world, worker).objects > 0
    world.preempt(worker, None)
    world.checkpoint(worker)
    gate.open("end")
    record = world.until_settled(worker)
    assert record.state is State.SUCCEEDED, world.story(worker)
    assert (record.migrations, record.cold_starts) == (2, 0), world.story(worker)
    seen = world.output(worker)
    assert "same True\n" in seen
    assert "grown True\n" in seen


def test_an_agent_that_was_started_again_does_not_put_again_what_its_last_checkpoint_has(
    world: World, gate: Gate
) -> None:
    worker = world.python(PROGRAM, volumes=(gate.volume,))
    world.until_output(worker, "tick 5\n")
    world.checkpoint(worker)
    collect_after_days(world, worker)
    until_restarted(world, worker, kill_agent(world, worker))
    world.checkpoint(worker)
    uploaded = world.record(worker).checkpoints[-1].bytes_uploaded
    assert uploaded < 40 << 20
    gate.open("end")
    assert world.until_settled(worker).state is State.SUCCEEDED, world.story(worker)
