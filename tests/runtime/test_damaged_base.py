"""One altered chunk of the base: every checkpoint that is told against it is passed over, by name, and no later one relies on it."""

from __future__ import annotations

from pathlib import Path

import pytest

from savedworker.checkpoint.keys import stored_chunk_keys
from savedworker.model import events as ev
from savedworker.model.errors import Corrupt
from savedworker.model.manifest import Manifest
from savedworker.model.record import State
from savedworker.model.spec import CheckpointPolicy, Volume
from savedworker.store.worker import WorkerStore
from tests.runtime.world import World

GROWS = """
import hashlib, random, time
def stage():
    try:
        with open("/ctl/stage") as file:
            return int(file.read() or 0)
    except OSError:
        return 0
def incarnation():
    with open("/.savedworker/incarnation") as file:
        return file.read().strip()
first = random.Random(1).randbytes(5 << 20)
print("begun", flush=True)
while stage() < 1:
    time.sleep(0.02)
more = bytearray(random.Random(2).randbytes(24 << 20))
before = hashlib.sha256(first + more).hexdigest()
print("grown in", incarnation(), flush=True)
while stage() < 2:
    time.sleep(0.02)
print("right" if hashlib.sha256(first + more).hexdigest() == before else "wrong", "in", incarnation(), flush=True)
"""


def test_a_damaged_chunk_costs_the_checkpoints_told_against_it_and_none_after_them(
    world: World, tmp_path: Path
) -> None:
    """The worker does the same again from the checkpoint before the damage, and comes to the same memory: it is stored anew."""
    control = tmp_path / "ctl"
    control.mkdir()
    worker = world.python(
        GROWS,
        volumes=(Volume(source=str(control), target="/ctl"),),
        checkpoint=CheckpointPolicy(interval=None, keep=6),
    )
    documents = WorkerStore(world.client.store, worker)
    world.until_output(worker, "begun")
    sound = world.checkpoint(worker)
    (control / "stage").write_text("1")
    world.until_output(worker, "grown in 1")
    told = [world.checkpoint(worker) for _ in range(2)]

    def groups(number: str) -> set[str]:
        return {group.key for space in documents.load_manifest(number).memory for group in space.groups}

    shared = set.intersection(*map(groups, told)) - groups(sound)
    sizes = {key: len(documents.chunks.get(key)) for key in shared}
    damaged = max(sizes, key=lambda key: (sizes[key], key))
    (file,) = tmp_path.glob(f"store/workers/*/chunks/{damaged}")
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(content)
    with pytest.raises(Corrupt, match=damaged):
        documents.chunks.get(damaged)

    world.preempt(worker, notice=None)
    record = world.record(worker)
    assert (record.migrations, record.cold_starts) == (1, 0), world.story(worker)
    assert record.incarnations[1].restored_from == sound
    failed = [x.event for x in documents.events() if isinstance(x.event, ev.RestoreFailed)]
    assert [(x.number, x.unusable, damaged in x.detail) for x in failed] == [
        (number, True, True) for number in reversed(told)
    ]
    shown = [x.detail for x in world.report(worker).timeline if x.event == "restore_failed"]
    assert all(any(number in x and damaged in x for x in shown) for number in told)

    world.until_output(worker, "grown in 2")
    after = world.checkpoint(worker)
    manifest: Manifest = documents.load_manifest(after)
    assert damaged in groups(after), "it did not come to the same memory: this shows nothing"
    for key in stored_chunk_keys(manifest, documents.chunks):
        documents.chunks.get(key)
    world.preempt(worker, notice=None)
    assert world.record(worker).incarnations[2].restored_from == after, world.story(worker)
    (control / "stage").write_text("2")
    record = world.until_settled(worker)
    assert record.state is State.SUCCEEDED, world.story(worker)
    assert "right in 3\n" in world.output(worker)
