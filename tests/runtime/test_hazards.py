"""The hazards of checkpoint and restore that are known to corrupt silently: each has its guard, and here its test."""

from __future__ import annotations

import hashlib
import os
from pathlib import Path

import pytest

from savedworker.model.errors import SavedWorkerError
from savedworker.model.record import State
from savedworker.model.spec import CheckpointPolicy
from savedworker.store.worker import WorkerStore
from tests.runtime.gate import PRELUDE, Gate
from tests.runtime.world import VENV_PYTHON, World

MIB = 1 << 20


@pytest.fixture
def gate(tmp_path: Path) -> Gate:
    return Gate(tmp_path / "gate")


def succeeded(world: World, worker: str) -> str:
    """The whole output of a worker that ended well."""
    record = world.until_settled(worker)
    assert record.state is State.SUCCEEDED, f"{world.output(worker, 'stderr')[-2000:]}\n{world.story(worker)}"
    assert record.cold_starts == 0, world.story(worker)
    return world.output(worker)


LOADER = (
    PRELUDE
    + """
import torch
from torch.utils.data import DataLoader, Dataset
torch.set_num_threads(1)
class Rows(Dataset):
    def __len__(self):
        return 64
    def __getitem__(self, i):
        return torch.full((4096,), epoch * 1000 + i, dtype=torch.int64)
checked = 0
epoch = 0
while closed("end"):
    # forked anew in every epoch: workers see the epoch of their fork
    for at, batch in enumerate(DataLoader(Rows(), batch_size=8, num_workers=2, prefetch_factor=2)):
        wanted = torch.arange(at * 8, at * 8 + 8).unsqueeze(1).expand(8, 4096) + epoch * 1000
        if not torch.equal(batch, wanted):
            say("WRONG", epoch, at, batch[:, 0].tolist())
        checked += 1
        time.sleep(0.01)
    epoch += 1
    say("epoch", epoch)
say("checked", checked)
"""
)


def test_pytorch_loader_workers_hand_over_the_right_batches_after_several_moves(
    world: World, gate: Gate
) -> None:
    worker = world.python(LOADER, interpreter=VENV_PYTHON, volumes=(gate.volume,))
    seen = 0
    for move in range(3):
        world.until_output(worker, f"epoch {seen + 2}\n")
        if move == 1:
            world.checkpoint(worker)
            world.preempt(worker, notice=None)
        else:
            world.preempt(worker, notice=60)
        seen = max(int(x.split()[1]) for x in world.output(worker).splitlines() if x.startswith("epoch"))
    world.until_output(worker, f"epoch {seen + 2}\n")
    gate.open("end")
    output = succeeded(world, worker)
    assert "WRONG" not in output
    assert "checked" in output


SHARED = (
    PRELUDE
    + """
data = os.urandom(1 << 20)
with open("/dev/shm/block", "wb") as file:
    for _ in range(96):
        file.write(data)
import hashlib
say("sum", hashlib.sha256(open("/dev/shm/block", "rb").read()).hexdigest())
def number(path):
    return os.stat(path).st_dev
last, seen = number("/dev/shm"), 1
say("device", seen, last)
while closed("end"):
    time.sleep(0.05)
    if number("/dev/shm") != last:
        last, seen = number("/dev/shm"), seen + 1
        say("device", seen, last)
say("sum", hashlib.sha256(open("/dev/shm/block", "rb").read()).hexdigest())
"""
)


def test_dev_shm_is_captured_as_files_and_its_device_number_is_new_after_every_move(
    world: World, gate: Gate
) -> None:
    worker = world.python(SHARED, volumes=(gate.volume,))
    world.until_output(worker, "device ")
    number = world.checkpoint(worker)
    manifest = WorkerStore(world.client.store, worker).load_manifest(number)
    assert manifest.bytes_image < 48 * MIB, "96 MiB of /dev/shm went through CRIU's tar and gzip"
    for moves in range(2, 5):
        world.preempt(worker, notice=60)
        world.until_output(worker, f"device {moves} ")
    gate.open("end")
    lines = succeeded(world, worker).splitlines()
    devices = [line.split()[2] for line in lines if line.startswith("device")]
    assert len(set(devices)) == len(devices) == 4
    sums = {line for line in lines if line.startswith("sum")}
    assert len(sums) == 1


LINKED = (
    PRELUDE
    + """
os.makedirs("/srv/data")
one = open("/srv/data/one", "w+")
one.write("kept open by a name that is gone\\n")
one.flush()
os.link("/srv/data/one", "/srv/data/two")
os.unlink("/srv/data/one")
say("ready", sorted(os.listdir("/srv/data")))
wait_for("end")
one.write("written after the move\\n")
one.flush()
one.seek(0)
say("open", one.read().splitlines())
say("two", open("/srv/data/two").read().splitlines())
say("same", os.fstat(one.fileno()).st_ino == os.stat("/srv/data/two").st_ino)
say("names", sorted(os.listdir("/srv/data")))
"""
)


def test_a_file_open_by_a_deleted_name_comes_back_linked_however_often_its_checkpoint_is_restored(
    world: World, gate: Gate
) -> None:
    worker = world.python(LINKED, volumes=(gate.volume,))
    world.until_output(worker, "ready ['two']")
    number = world.checkpoint(worker)
    assert sorted(os.listdir(world.layer(worker) / "srv/data")) == ["two"], "the dump's helper links stayed"
    world.preempt(worker, notice=None)
    world.preempt(worker, notice=None)
    assert [x.restored_from for x in world.record(worker).incarnations] == [None, number, number]
    gate.open("end")
    output = succeeded(world, worker)
    lines = "['kept open by a name that is gone', 'written after the move']"
    assert f"open {lines}\ntwo {lines}\nsame True\nnames ['two']\n" in output


STOPPED = (
    PRELUDE
    + """
import signal
child = os.fork()
if child == 0:
    os.kill(os.getpid(), signal.SIGSTOP)
    say("child goes on")
    os._exit(0)
while closed("continue"):
    say("tick", time.monotonic())
    time.sleep(0.05)
os.kill(child, signal.SIGCONT)
os.waitpid(child, 0)
say("child ended")
wait_for("end")
"""
)


def test_a_stopped_process_is_named_and_a_checkpoint_attempt_leaves_everything_as_it_was(
    world: World, gate: Gate
) -> None:
    worker = world.python(STOPPED, volumes=(gate.volume,))
    record = world.until(worker, lambda r: "stopped by a signal" in str(r.unprotected_reasons), "name it")
    assert not record.protected
    assert "(python3) is stopped by a signal" in record.unprotected_reasons[0]
    with pytest.raises(SavedWorkerError, match="stopped by a signal"):
        world.checkpoint(worker)
    ticks = world.output(worker).count("tick")
    world.until(worker, lambda _: world.output(worker).count("tick") > ticks + 5, "run on")
    gate.open("continue")
    world.until_output(worker, "child goes on\nchild ended\n")
    world.checkpoint(worker)
    world.until(worker, lambda r: r.protected, "be protected again")
    gate.open("end")
    succeeded(world, worker)


DELETED = (
    PRELUDE
    + """
import hashlib, mmap, tempfile
folder = tempfile.mkdtemp()  # of its own: the image is this machine
def fill(file, size):
    for at in range(0, size, 1 << 20):
        file.write(hashlib.sha256(str(at).encode()).digest() * (1 << 15))
    file.flush()
shared = open("/dev/shm/block", "wb+")
fill(shared, 64 << 20)
mapped = mmap.mmap(shared.fileno(), 64 << 20)
os.unlink("/dev/shm/block")
sparse = open(f"{folder}/sparse", "wb+")
sparse.truncate(1 << 30)
for at in (0, 300 << 20, (1 << 30) - 4096):
    sparse.seek(at)
    sparse.write(os.urandom(4096))
sparse.flush()
os.unlink(f"{folder}/sparse")
small = open(f"{folder}/small", "wb+")
fill(small, 3 << 20)
os.unlink(f"{folder}/small")
def sums():
    found = []
    for file in (shared, sparse, small):
        digest = hashlib.sha256()
        file.seek(0)
        while part := file.read(1 << 20):
            digest.update(part)
        found.append(digest.hexdigest()[:16])
    found.append(hashlib.sha256(mapped).hexdigest()[:16])
    return " ".join(found)
say("before", sums())
wait_for("end")
say("after", sums())
say("blocks", os.fstat(sparse.fileno()).st_blocks * 512)
mapped[0:4] = b"same"
shared.seek(0)
say("shared", shared.read(4))
"""
)


def test_deleted_files_that_are_still_open_come_back_with_their_content_and_their_holes(
    world: World, gate: Gate
) -> None:
    worker = world.python(DELETED, volumes=(gate.volume,))
    before = world.until_output(worker, "before ").split("before ")[1].splitlines()[0]
    world.preempt(worker, notice=60)
    manifest = WorkerStore(world.client.store, worker).load_manifest(
        world.record(worker).checkpoints[-1].number
    )
    assert manifest.bytes_image < 160 * MIB, "the holes of the sparse file were stored"
    gate.open("end")
    output = succeeded(world, worker)
    assert f"after {before}\n" in output
    assert int(output.split("blocks ")[1].split()[0]) < 16 * MIB
    assert "shared b'same'" in output


def test_a_deleted_file_above_the_limit_is_named_before_a_checkpoint_is_tried(
    world: World, gate: Gate
) -> None:
    program = (
        PRELUDE
        + """
file = open("/tmp/huge", "wb")
os.posix_fallocate(file.fileno(), 0, (2 << 30) + (1 << 20))
os.unlink("/tmp/huge")
say("ready")
wait_for("end")
"""
    )
    worker = world.python(program, volumes=(gate.volume,))
    world.until_output(worker, "ready")
    record = world.until(worker, lambda r: "/tmp/huge" in str(r.unprotected_reasons), "name the file")
    assert "more than the limit of 2.0 GiB" in record.unprotected_reasons[0]
    gate.open("end")
    succeeded(world, worker)


WATCHING = (
    PRELUDE
    + """
import ctypes
libc = ctypes.CDLL(None)
open("/srv/file", "w").close()
watch = libc.inotify_init1(os.O_NONBLOCK)
assert libc.inotify_add_watch(watch, b"/srv/file", 2) >= 0
say("ready")
while closed("end"):
    with open("/srv/file", "a") as file:
        file.write("x")
    say("events", len(os.read(watch, 4096)))
    time.sleep(0.05)
"""
)


def test_a_watch_on_a_file_of_the_layer_is_saved_or_refused_with_its_cause_and_never_lost(
    world: World, gate: Gate
) -> None:
    worker = world.python(WATCHING, volumes=(gate.volume,))
    world.until_output(worker, "events")
    refusal = ""
    try:
        world.checkpoint(worker)
    except SavedWorkerError as error:
        refusal = str(error)
    assert not refusal or "inotify" in refusal
    seen = world.output(worker).count("events")
    world.until(worker, lambda _: world.output(worker).count("events") > seen + 3, "run on")
    gate.open("end")
    succeeded(world, worker)


GENERATIONS = (
    PRELUDE
    + """
import random
random.seed(7)
for generation in range(1, 100):
    state = random.randbytes(1 << 20)
    say("generation", generation)
    while closed(f"after-{generation}") and closed("end"):
        time.sleep(0.02)
    if not closed("end"):
        break
"""
)


def test_a_damaged_checkpoint_is_never_restored_and_the_one_before_is_used_and_all_of_it_is_said(
    world: World, gate: Gate
) -> None:
    worker = world.python(
        GENERATIONS, volumes=(gate.volume,), checkpoint=CheckpointPolicy(interval=None, keep=5)
    )
    documents = WorkerStore(world.client.store, worker)
    numbers, chunks = [], []
    for generation in range(1, 6):
        world.until_output(worker, f"generation {generation}\n")
        numbers.append(world.checkpoint(worker))
        manifest = documents.load_manifest(numbers[-1])
        chunks.append(set(manifest.chunk_keys()))
        gate.open(f"after-{generation}")
    folder = world.folder / "store" / "workers" / worker

    def chunk_of_its_own(index: int) -> Path:
        others = set().union(*(keys for i, keys in enumerate(chunks) if i != index))
        own = [next(folder.glob(f"chunks/**/{key}")) for key in chunks[index] - others]
        return max(own, key=lambda path: path.stat().st_size)

    flipped, truncated, missing = chunk_of_its_own(4), chunk_of_its_own(3), chunk_of_its_own(2)
    data = bytearray(flipped.read_bytes())
    data[len(data) // 2] ^= 1
    flipped.write_bytes(data)
    truncated.write_bytes(truncated.read_bytes()[:-1000])
    missing.unlink()
    (folder / "checkpoints" / numbers[1] / "manifest.json").write_text("{}")
    world.preempt(worker, notice=None)
    record = world.record(worker)
    assert record.incarnations[-1].restored_from == numbers[0], world.story(worker)
    assert {c.number for c in record.checkpoints if c.damage_seen} == set(numbers[1:])
    failures = [e for e in world.report(worker).timeline if e.event == "restore_failed"]
    assert [next(n for n in numbers if n in e.detail) for e in failures] == numbers[:0:-1]
    status = world.client.status(worker)
    assert status.last_checkpoint is not None
    assert status.last_checkpoint.number == numbers[0]
    gate.open("end")
    output = succeeded(world, worker)
    assert output.splitlines()[-1].startswith("generation"), hashlib.sha256(output.encode()).hexdigest()
