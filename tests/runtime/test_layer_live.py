"""Files of a living worker: its writable layer goes back to the cut with its memory, volumes as far as they can."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from savedworker.checkpoint.layer import LayerIndex
from savedworker.model.record import State
from savedworker.model.spec import Volume
from savedworker.store.worker import WorkerStore
from tests.runtime.gate import PRELUDE, Gate
from tests.runtime.world import World


@pytest.fixture
def gate(tmp_path: Path) -> Gate:
    return Gate(tmp_path / "gate")


@pytest.fixture
def data(tmp_path: Path) -> Volume:
    """A directory that every instance sees as /data."""
    (tmp_path / "data").mkdir()
    return Volume(source=str(tmp_path / "data"), target="/data")


def succeeded(world: World, worker: str) -> str:
    record = world.until_settled(worker)
    assert record.state is State.SUCCEEDED, f"{world.output(worker, 'stderr')[-2000:]}\n{world.story(worker)}"
    assert record.cold_starts == 0, world.story(worker)
    return world.output(worker)


def restored_details(world: World, worker: str) -> list[str]:
    return [e.detail for e in world.report(worker).timeline if e.event == "restored"]


WRITER = (
    PRELUDE
    + """
import hashlib
folder = sys.argv[1]
first = open(folder + "/first", "a", buffering=1)
second = os.open(folder + "/second", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
third = open(folder + "/third", "wb+", buffering=0)
third.write(bytes(64 * 512))
for step in range(400):
    first.write(f"line {step}\\n")
    os.write(second, hashlib.sha256(str(step).encode()).hexdigest().encode() + b"\\n")
    third.seek(step % 64 * 512)
    third.write(f"{step:08d}".encode() * 64)
    say("step", step)
    time.sleep(0.01)
    if step == 150:
        wait_for("on")
    if step == 300:
        wait_for("finish")
for name in ("first", "second", "third"):
    say(name, hashlib.sha256(open(folder + "/" + name, "rb").read()).hexdigest())
"""
)


def sums(output: str) -> list[str]:
    return [line for line in output.splitlines() if line.split()[0] in ("first", "second", "third")]


def test_after_a_loss_without_notice_the_files_of_the_layer_are_those_of_an_undisturbed_run(
    world: World, gate: Gate
) -> None:
    program = WRITER.replace("folder = sys.argv[1]", "folder = '/srv/out'; os.makedirs(folder)")
    gate.open("on")
    disturbed = world.python(program, volumes=(gate.volume,), interval=1.0)
    world.until_output(disturbed, "step 20\n")
    world.until(disturbed, lambda r: r.checkpoints, "take a periodic checkpoint")
    world.until_output(disturbed, "step 300\n")
    world.preempt(disturbed, notice=None)
    gate.open("finish")
    undisturbed = world.python(program, volumes=(gate.volume,))
    assert world.record(disturbed).incarnations[1].restored_from
    assert sums(succeeded(world, disturbed)) == sums(succeeded(world, undisturbed))


def test_on_a_volume_appended_files_are_cut_back_and_a_file_rewritten_in_place_is_reported(
    world: World, gate: Gate, data: Volume
) -> None:
    # The third file grows after the checkpoint, so CRIU would refuse its size.
    program = WRITER.replace("third.write(bytes(64 * 512))", "").replace("step % 64 * 512", "step * 512")
    worker = world.python(program, "/data", volumes=(gate.volume, data))
    world.until_output(worker, "step 20\n")
    number = world.checkpoint(worker)
    gate.open("on")
    world.until_output(worker, "step 300\n")
    grown = {name: (Path(data.source) / name).stat().st_size for name in ("first", "second", "third")}
    known = {x.path: x for x in WorkerStore(world.client.store, worker).load_manifest(number).volume_files}
    assert {name: file.append for name, file in known.items()} == {
        "first": True,
        "second": True,
        "third": False,
    }
    world.preempt(worker, notice=None)
    assert world.record(worker).incarnations[-1].restored_from == number, world.story(worker)
    detail = restored_details(world, worker)[-1]
    for name in ("first", "second"):
        assert f"/data/{name}: cut back by {grown[name] - known[name].size} bytes to the checkpoint" in detail
    assert (
        f"/data/third is not captured: it has {grown['third']} bytes, the checkpoint knew {known['third'].size}"
        in detail
    )
    gate.open("finish")
    output = succeeded(world, worker)
    (Path(data.source) / "other").mkdir()
    undisturbed = world.python(program, "/data/other", volumes=(gate.volume, data))
    assert sums(output) == sums(succeeded(world, undisturbed))


READER = (
    PRELUDE
    + """
import mmap
log = open("/data/growing")
say(log.readline().strip())
both = open("/data/both", "rb+", buffering=0)
mapped = mmap.mmap(os.open("/data/mapped", os.O_RDWR), 4096)
say("ready", both.read(4), mapped[:4])
wait_for("end")
say(log.readline().strip(), both.read(4), mapped[:4])
say(os.fstat(both.fileno()).st_size)
"""
)


def test_files_of_a_volume_that_others_made_longer_or_shorter_meanwhile_do_not_stop_a_restore(
    world: World, gate: Gate, data: Volume
) -> None:
    folder = Path(data.source)
    (folder / "growing").write_text("one\n")
    (folder / "both").write_text("abcdefghijkl")
    (folder / "mapped").write_bytes(b"here" * 2048)
    worker = world.python(READER, volumes=(gate.volume, data))
    world.until_output(worker, "ready b'abcd' b'here'")
    number = world.checkpoint(worker)
    with (folder / "growing").open("a") as file:
        file.write("two\n")
    os.truncate(folder / "both", 6)
    os.truncate(folder / "mapped", 4096)
    (folder / "both").chmod(0o600)
    world.preempt(worker, notice=None)
    assert world.record(worker).incarnations[-1].restored_from == number, world.story(worker)
    detail = restored_details(world, worker)[-1]
    assert "/data/both is not captured: it has 6 bytes, the checkpoint knew 12" in detail
    gate.open("end")
    assert "two b'ef' b'here'\n6\n" in succeeded(world, worker)


def test_a_file_of_a_volume_that_is_gone_is_named_and_its_checkpoint_not_used(
    world: World, gate: Gate, data: Volume
) -> None:
    program = (
        PRELUDE
        + "say('begin')\nfile = open('/data/part', 'w') if not closed('open') else None\nsay('opened', file)\nwait_for('end')\n"
    )
    gate.open("open")
    worker = world.python(program, volumes=(gate.volume, data))
    world.until_output(worker, "opened <")
    number = world.checkpoint(worker)
    (Path(data.source) / "part").unlink()
    world.preempt(worker, notice=None)
    failures = [e.detail for e in world.report(worker).timeline if e.event == "restore_failed"]
    assert failures
    assert all(number in x and "/data/part" in x and "missing here" in x for x in failures), failures
    gate.open("end")
    record = world.until_settled(worker)
    assert record.state is State.SUCCEEDED
    assert (record.migrations, record.cold_starts) == (0, 1)


COPIED_UP = (
    PRELUDE
    + """
with open("/etc/issue", "a") as file:
    file.write("added\\n")
import shutil
shutil.rmtree("/etc/skel")
os.mkdir("/etc/skel")
open("/etc/skel/new", "w").close()
os.unlink("/etc/motd")
held = open("/etc/issue.net", "a")
held.write("first\\n")
held.flush()
say("ready")
wait_for("end")
held.write("second\\n")
held.flush()
say(open("/etc/issue").read().splitlines()[-1], os.listdir("/etc/skel"), os.path.exists("/etc/motd"))
say(open("/etc/issue.net").read().splitlines()[-2:])
"""
)


def attributes(path: Path) -> set[str]:
    return set(os.listxattr(path, follow_symlinks=False))


def test_marks_of_the_overlay_that_name_inodes_of_the_old_instance_stay_behind_and_the_others_travel(
    world: World, gate: Gate
) -> None:
    worker = world.python(COPIED_UP, volumes=(gate.volume,))
    world.until_output(worker, "ready")
    layer = world.layer(worker)
    here = attributes(layer / "etc/issue")
    world.preempt(worker, notice=60)
    there = world.layer(worker)
    documents = WorkerStore(world.client.store, worker)
    stored = documents.load_manifest(world.record(worker).checkpoints[-1].number).layer
    index = LayerIndex.parse(b"".join(documents.chunks.get(key) for key in stored.chunks))
    travelled = {name for entry in index.entries for name in entry.xattrs}
    assert not {name for name in travelled if name.endswith((".origin", ".uuid"))}
    assert os.getxattr(there / "etc/skel", "trusted.overlay.opaque") == b"y"
    assert attributes(there / "etc/issue") == here - {"trusted.overlay.origin", "trusted.overlay.uuid"}
    gate.open("end")
    assert "added ['new'] False\n['first', 'second']\n" in succeeded(world, worker)


RESULTS = (
    PRELUDE
    + """
places = ("/srv/results", "/dev/shm/results", "/tmp/results")
say("left over", sum(os.path.exists(x) for x in places), "of", len(places))
for place in places:
    os.mkdir(place)
    open(place + "/.exitcode", "w").write("0")
    open(place + "/result", "w").write("half")
say("written")
wait_for("end")
"""
)


def test_a_worker_that_begins_again_finds_no_file_of_what_was_lost_and_that_it_did_is_said(
    world: World, gate: Gate
) -> None:
    """C50."""
    worker = world.python(RESULTS, volumes=(gate.volume,))
    world.until_output(worker, "written")
    world.preempt(worker, notice=None)
    gate.open("end")
    record = world.until_settled(worker)
    assert (record.state, record.cold_starts) == (State.SUCCEEDED, 1), world.story(worker)
    assert world.output(worker).count("left over 0 of 3") >= 1
    assert "left over 3" not in world.output(worker)
    started = [x.detail for x in world.report(worker).timeline if x.event == "started"]
    assert started == ["started", "started from nothing: there is no checkpoint"]
