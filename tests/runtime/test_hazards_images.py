"""Users and images: who a worker runs as and what its root is travel with it; what cannot be had is said at once."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path

import pytest

from savedworker.model.record import Reason, State
from savedworker.store.documents import dump
from savedworker.store.worker import WorkerStore, digest_of
from tests.runtime.gate import PRELUDE, Gate
from tests.runtime.world import World


@pytest.fixture
def gate(tmp_path: Path) -> Gate:
    return Gate(tmp_path / "gate")


WHO = (
    PRELUDE
    + """
os.umask(0o027)
open("/tmp/mine", "w").write("x")
say("who", os.getuid(), os.getgid(), os.getgroups(), os.environ["HOME"])
wait_for("end")
say("who", os.getuid(), os.getgid(), os.getgroups(), os.environ["HOME"])
found = os.stat("/tmp/mine")
say("file", found.st_uid, oct(found.st_mode & 0o777))
open("/tmp/mine", "a").write("y")
try:
    open("/etc/shadow").read()
except PermissionError:
    say("shadow refused")
sys.exit(7)
"""
)


@pytest.mark.parametrize(("user", "uid"), [("1000", 1000), ("nobody", 65534)])
def test_a_worker_of_another_user_is_saved_and_comes_back_as_that_user(
    world: World, gate: Gate, user: str, uid: int
) -> None:
    worker = world.python(WHO, volumes=(gate.volume,), user=user)
    world.until_output(worker, "who")
    world.preempt(worker, notice=60)
    world.preempt(worker, notice=60)
    gate.open("end")
    record = world.until_settled(worker)
    assert (record.reason, record.exit_code) == (Reason.EXIT, 7), world.story(worker) + world.output(
        worker, "stderr"
    )
    first, second, *rest = world.output(worker).splitlines()
    assert first == second
    assert first.startswith(f"who {uid} ")
    assert rest == [f"file {uid} 0o640", "shadow refused"]


def spec_error(world: World, worker: str, message: str) -> None:
    """Fail unless the worker failed at once with this reason in one line, and nothing of it is left."""
    record = world.until_settled(worker)
    assert (record.state, record.reason) == (State.FAILED, Reason.SPEC_ERROR), world.story(worker)
    assert message in record.detail
    assert "\n" not in record.detail
    assert len(record.launches) == 1
    assert record.incarnations[-1].started_at is None
    assert world.output(worker) == ""


def test_a_user_that_the_image_does_not_have_is_told_at_once(world: World) -> None:
    worker = world.submit("/bin/true", user="no-such-user")
    spec_error(world, worker, "user 'no-such-user' is not in the image's /etc/passwd")


@pytest.mark.parametrize("image", ["/no/such/image", "oci:/no/such/layout:v1"])
def test_an_image_that_is_not_there_is_told_at_once(world: World, image: str) -> None:
    worker = world.submit("/bin/true", image=image)
    spec_error(world, worker, "/no/such/")


SHELL = 'echo "start $$"; n=0; while [ ! -e /gate/end ]; do n=$((n+1)); echo "line $n"; sleep 0.05; done; echo "end $$ $(cat /etc/name)"; exit 4'


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """The root directory of a tiny image: a shell, sleep, cat, and the libraries they need."""
    made = tmp_path / "root"
    for program in ("/bin/sh", "/bin/sleep", "/bin/cat"):
        listed = subprocess.run(["ldd", program], capture_output=True, text=True, check=True).stdout
        for path in (program, *re.findall(r"(/\S+) \(0x", listed)):
            target = made / path.lstrip("/")
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(path, target)
    (made / "etc").mkdir()
    (made / "etc/name").write_text("tiny\n")
    return made


def moved_and_ended(world: World, gate: Gate, image: str) -> None:
    worker = world.submit("/bin/sh", "-c", SHELL, image=image, volumes=(gate.volume,))
    world.until_output(worker, "line 3\n")
    world.preempt(worker, notice=60)
    gate.open("end")
    record = world.until_settled(worker)
    assert (record.reason, record.exit_code, record.migrations) == (Reason.EXIT, 4, 1), world.story(worker)
    first, *lines, last = world.output(worker).splitlines()
    assert lines == [f"line {n}" for n in range(1, len(lines) + 1)]
    assert last == f"end {first.split()[1]} tiny"


def test_a_worker_in_a_root_directory_moves(world: World, gate: Gate, root: Path) -> None:
    before = sorted(str(path) for path in root.rglob("*"))
    moved_and_ended(world, gate, str(root))
    assert sorted(str(path) for path in root.rglob("*")) == before, "the image was written to"


def replace(file: Path, content: bytes) -> None:
    """Another file in its place; whoever has the present one open keeps it."""
    new = file.with_suffix(".new")
    new.write_bytes(content)
    shutil.copymode(file, new)
    new.rename(file)


@pytest.mark.parametrize("how", ["rebuilt", pytest.param("longer", marks=pytest.mark.sweep)])
def test_another_c_library_is_found_before_anything_is_restored_and_the_right_one_is_waited_for(
    world: World, gate: Gate, root: Path, how: str
) -> None:
    """C45: a library that differs in its build id alone, with the same size, or in its size."""
    worker = world.submit("/bin/sh", "-c", SHELL, image=str(root), volumes=(gate.volume,))
    world.until_output(worker, "line 3\n")
    world.checkpoint(worker)
    (library,) = root.rglob("libc.so.6")
    right = library.read_bytes()
    note = right.index(b"GNU\0", right.index(b"\x04\0\0\0\x14\0\0\0\x03\0\0\0GNU\0"))
    build_id = bytes(byte ^ 1 for byte in right[note + 4 : note + 24])
    wrong = right[: note + 4] + build_id + right[note + 24 :] if how == "rebuilt" else right + b"\0"
    replace(library, wrong)
    lease = world.record(worker).lease
    assert lease is not None
    world.fleet.preempt(lease.launch, None)
    record = world.until(worker, lambda r: any(x.outcome == "incompatible" for x in r.launches), "be refused")
    (refused,) = [x for x in record.launches if x.outcome == "incompatible"][:1]
    assert "does not fit this instance" in refused.detail
    assert "libc.so.6" in refused.detail
    assert [x.restores_failed for x in record.incarnations] == [0], "CRIU was never started"
    replace(library, right)
    gate.open("end")
    record = world.until_settled(worker)
    assert (record.exit_code, record.migrations, record.cold_starts) == (4, 1, 0), world.story(worker)


def claim(world: World, worker: str, number: str, flags: tuple[str, ...]) -> None:
    """Have the stored checkpoint say that its CPU had these features; nobody else writes just now."""
    documents = WorkerStore(world.client.store, worker)
    manifest = documents.load_manifest(number)
    fingerprint = manifest.fingerprint.model_copy(update={"cpu_flags": flags})
    changed = manifest.model_copy(update={"fingerprint": fingerprint})
    world.client.store.put(f"{documents.prefix}/checkpoints/{number}/manifest.json", dump(changed))
    held = documents.load_record()
    entries = [
        c.model_copy(update={"digest": digest_of(changed)}) if c.number == number else c
        for c in held.record.checkpoints
    ]
    documents.swap_record(held, held.record.model_copy(update={"checkpoints": tuple(entries)}))


def test_an_instance_whose_cpu_lacks_a_feature_is_refused_before_anything_is_fetched_and_another_is_tried(
    world: World, gate: Gate
) -> None:
    """C43: the stored checkpoint claims a feature that this CPU has not; nobody sees a failure, or a process that began and died."""
    worker = world.submit("/bin/sh", "-c", SHELL, volumes=(gate.volume,))
    world.until_output(worker, "line 3\n")
    number = world.checkpoint(worker)
    flags = WorkerStore(world.client.store, worker).load_manifest(number).fingerprint.cpu_flags
    world.pause_controller(worker)
    lease = world.record(worker).lease
    assert lease is not None
    world.fleet.preempt(lease.launch, None)
    claim(world, worker, number, tuple(sorted({*flags, "avx1024f"})))
    world.resume_controller(worker)
    record = world.until(worker, lambda r: any(x.outcome == "incompatible" for x in r.launches), "be refused")
    (refused,) = [x for x in record.launches if x.outcome == "incompatible"]
    assert "CPU features missing: avx1024f" in refused.detail
    # The lease was never taken, and whatever is fetched is fetched by its holder.
    assert (len(record.incarnations), record.state) == (1, State.MIGRATING)
    world.pause_controller(worker)
    world.until(
        worker,
        lambda r: all(x.state in ("ending", "ended") for x in r.launches[1:]),
        "have no agent left that writes",
    )
    claim(world, worker, number, flags)
    world.resume_controller(worker)
    gate.open("end")
    record = world.until_settled(worker)
    assert (record.exit_code, record.migrations, record.cold_starts) == (4, 1, 0), world.story(worker)
    assert [x.end_reason for x in record.incarnations] == ["no_notice", "failed"]
    assert len(record.launches) > 2


def test_a_worker_in_an_oci_layout_moves(world: World, gate: Gate, root: Path, tmp_path: Path) -> None:
    layout, unpacked = tmp_path / "layout", tmp_path / "unpacked"
    subprocess.run(["umoci", "init", "--layout", layout], check=True)
    subprocess.run(["umoci", "new", "--image", f"{layout}:v1"], check=True)
    subprocess.run(["umoci", "unpack", "--image", f"{layout}:v1", unpacked], check=True)
    shutil.copytree(root, unpacked / "rootfs", dirs_exist_ok=True)
    subprocess.run(["umoci", "repack", "--image", f"{layout}:v1", unpacked], check=True)
    moved_and_ended(world, gate, f"oci:{layout}:v1")


def test_an_image_whose_etc_is_a_link_leads_nowhere_on_the_instance(
    world: World, root: Path, tmp_path: Path
) -> None:
    outside = tmp_path / "outside"
    outside.mkdir()
    (root / "etc/name").unlink()
    (root / "etc").rmdir()
    (root / "etc").symlink_to(outside)
    worker = world.submit("/bin/sh", "-c", "exit 0", image=str(root), network="host")
    assert world.until_settled(worker).state is State.SUCCEEDED, world.story(worker)
    assert list(outside.iterdir()) == []
