"""A checkpoint that fails leaves the worker running, says why, and does not stand in the way of the next one."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from savedworker.model.errors import SavedWorkerError
from savedworker.model.record import State
from savedworker.model.spec import Volume
from tests.runtime.conftest import gone
from tests.runtime.gate import PRELUDE, Gate
from tests.runtime.world import World

TICKER = (
    PRELUDE
    + """
import random
random.seed(1)
block = [random.randbytes(1 << 20) for _ in range(int(sys.argv[1]))]
count = 0
while closed("end"):
    count += 1
    say("tick", count)
    time.sleep(0.05)
"""
)


@pytest.fixture
def gate(tmp_path: Path) -> Gate:
    return Gate(tmp_path / "gate")


def ticks(world: World, worker: str) -> list[int]:
    return [int(line.split()[1]) for line in world.output(worker).splitlines() if line.startswith("tick")]


def runs_on(world: World, worker: str) -> None:
    """Fail unless the worker writes more lines."""
    before = len(ticks(world, worker))
    world.until(worker, lambda _: len(ticks(world, worker)) > before + 5, "run on")


def ends_well(world: World, worker: str, gate: Gate) -> None:
    gate.open("end")
    record = world.until_settled(worker)
    assert record.state is State.SUCCEEDED, world.story(worker)
    assert record.cold_starts == 0
    seen = ticks(world, worker)
    assert seen == list(range(1, len(seen) + 1))


def failed_events(world: World, worker: str) -> list[str]:
    return [e.detail for e in world.report(worker).timeline if e.event == "checkpoint_failed"]


@pytest.fixture
def small_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A file system of 400 MiB on which the local fleet keeps its hosts."""
    image = tmp_path / "disk.img"
    with image.open("wb") as file:
        file.truncate(400 << 20)
    with tempfile.TemporaryDirectory(prefix="sw-small-", dir="/var/tmp") as name:
        mounted = Path(name)
        subprocess.run(["mkfs.ext4", "-q", "-m", "0", "-F", image], check=True)
        subprocess.run(["mount", "-o", "loop", image, mounted], check=True)
        try:
            monkeypatch.setenv("SAVEDWORKER_LOCAL_DIR", name)
            yield mounted
        finally:
            gone(name, besides=f" {name} ")
            subprocess.run(["umount", mounted], check=True)


@pytest.fixture
def small_world(tmp_path: Path, small_disk: Path) -> Iterator[World]:
    """A world whose hosts lie on the small disk."""
    made = World(tmp_path)
    try:
        yield made
    finally:
        made.close()
    assert gone(str(small_disk), besides=f" {small_disk} ") == []


def test_a_full_disk_fails_the_checkpoint_and_not_the_worker(
    small_world: World, small_disk: Path, gate: Gate
) -> None:
    world = small_world
    worker = world.python(TICKER, "60", volumes=(gate.volume,))
    world.until_output(worker, "tick 1\n")
    world.checkpoint(worker)
    filler = small_disk / "filler"
    disk = os.statvfs(small_disk)
    with filler.open("wb") as file:
        os.posix_fallocate(file.fileno(), 0, disk.f_bavail * disk.f_frsize - (30 << 20))
    with pytest.raises(SavedWorkerError, match=r"a checkpoint needs .* are free"):
        world.checkpoint(worker)
    world.until(
        worker, lambda r: "the last checkpoint failed" in str(r.unprotected_reasons), "say that it failed"
    )
    assert len(failed_events(world, worker)) == 1
    runs_on(world, worker)
    filler.unlink()
    world.checkpoint(worker)
    world.until(worker, lambda r: r.protected, "be protected again")
    world.preempt(worker, notice=60)
    ends_well(world, worker, gate)


@pytest.mark.parametrize("device", ["/dev/loop-control", "/dev/fuse"])
def test_an_open_device_is_named_at_once_and_the_checkpoint_refused_early(
    world: World, gate: Gate, device: str
) -> None:
    program = (
        PRELUDE + f"file = os.open({device!r}, os.O_RDWR)\nsay('fd', file)\n" + TICKER.removeprefix(PRELUDE)
    )
    worker = world.python(program, "1", volumes=(gate.volume, Volume(source=device, target=device)))
    fd = world.until_output(worker, "fd ").split("fd ")[1].split()[0]
    record = world.until(worker, lambda r: device in str(r.unprotected_reasons), "name the device", 30)
    assert (
        f"(python3) fd {fd} has the device {device} open, which cannot be saved"
        in record.unprotected_reasons[0]
    )
    assert record.unprotected_reasons[0].startswith("pid ")
    with pytest.raises(SavedWorkerError, match=device):
        world.checkpoint(worker)
    runs_on(world, worker)
    ends_well(world, worker, gate)


def criu_of(folder: Path) -> list[int]:
    """CRIU processes that write images below ``folder``."""
    found = []
    for entry in filter(str.isdigit, os.listdir("/proc")):
        try:
            if Path(f"/proc/{entry}/comm").read_text().strip() != "criu":
                continue
            links = [os.readlink(f"/proc/{entry}/fd/{fd}") for fd in os.listdir(f"/proc/{entry}/fd")]
        except OSError:
            continue
        if any(str(folder) in link for link in links):
            found.append(int(entry))
    return found


def signal_criu(home: Path, number: int, over: Callable[[], object]) -> list[int]:
    """Signal the CRIU that writes images below ``home`` as soon as it has come to the memory; its pids, none when it is ``over``."""
    looked = time.monotonic()
    while True:
        found = []
        for pid in criu_of(home) if any(home.glob("images-*/pages-*.img")) else []:
            with contextlib.suppress(ProcessLookupError):  # it has ended by itself, or with its parent
                os.kill(pid, number)
                found.append(pid)
        if found:
            return found
        if time.monotonic() > looked + 1.0:
            if over():
                return []
            looked = time.monotonic()
        time.sleep(0.002)


def stop_dump_of_a_notice(world: World, worker: str) -> tuple[str, Path, list[int]]:
    """Give the worker a notice and stop CRIU at work: the launch, the worker's home and the pids.

    Where the worker has left before CRIU could be stopped, again from where it is then.
    """
    for number in range(1, 6):
        world.until_running(worker)
        launch, home = world.host(worker).launch, world.layer(worker).parent
        world.fleet.preempt(launch, 300.0)

        def left(number: int = number) -> bool:
            return len(world.record(worker).incarnations) > number

        if stopped := signal_criu(home, signal.SIGSTOP, left):
            return launch, home, stopped
    raise AssertionError("each dump was over before it could be stopped")


def test_a_dump_that_is_not_wanted_any_more_is_not_waited_for(world: World, gate: Gate) -> None:
    """The notice is withdrawn while CRIU is at work (and stopped, so that it stays so): the worker runs on, and nothing is left."""
    worker = world.python(TICKER, "500", volumes=(gate.volume,))
    world.until_output(worker, "tick 1\n")
    launch, home, stopped = stop_dump_of_a_notice(world, worker)
    try:
        world.fleet.withdraw(launch)
        world.until(worker, lambda r: r.notice is None, "have its notice withdrawn", 20)
    finally:
        for pid in stopped:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGCONT)
    runs_on(world, worker)
    world.checkpoint(worker)
    assert not list(home.glob("images-*")), "half a checkpoint stayed on the disk"
    ends_well(world, worker, gate)


def kill_dump(world: World, worker: str, home: Path) -> SavedWorkerError:
    """Ask for a checkpoint and kill CRIU at work; why the checkpoint failed. One that is over before is taken again."""
    for _ in range(5):
        over = threading.Event()
        with ThreadPoolExecutor(1) as pool:
            killing = pool.submit(signal_criu, home, signal.SIGKILL, over.is_set)
            try:
                world.checkpoint(worker)
            except SavedWorkerError as error:
                assert killing.result()
                return error
            finally:
                over.set()
        assert not killing.result(), "the checkpoint whose CRIU was killed is none"
    raise AssertionError("each dump was over before it could be killed")


def test_criu_killed_in_the_middle_of_a_dump_leaves_the_worker_running(world: World, gate: Gate) -> None:
    worker = world.python(TICKER, "500", volumes=(gate.volume,))
    world.until_output(worker, "tick 1\n")
    home = world.layer(worker).parent
    kill_dump(world, worker, home)
    assert len(failed_events(world, worker)) == 1
    world.until(worker, lambda r: not r.protected, "say that it is not protected")
    runs_on(world, worker)
    assert not list(home.glob("images-*")), "half a checkpoint stayed on the disk"
    agent = world.host(worker).agent_pid
    mounts = Path(f"/proc/{agent}/mountinfo").read_text()
    assert "criu.cgyard" not in mounts, "the cgroup hierarchies that CRIU mounts for itself stayed"
    world.checkpoint(worker)
    world.preempt(worker, notice=60)
    ends_well(world, worker, gate)


def test_a_store_that_fails_during_the_upload_fails_the_checkpoint_and_not_the_worker(
    world: World, gate: Gate
) -> None:
    worker = world.python(TICKER, "8", volumes=(gate.volume,))
    world.until_output(worker, "tick 1\n")
    chunks = world.folder / "store" / "workers" / worker / "chunks"
    chunks.mkdir(exist_ok=True)
    folders = [chunks, *(x for x in chunks.rglob("*") if x.is_dir())]
    subprocess.run(["chattr", "+i", *folders], check=True)
    try:
        with pytest.raises(SavedWorkerError, match=r"1-1 failed"):
            world.checkpoint(worker)
        record = world.until(worker, lambda r: not r.protected, "say that it is not protected")
        assert "the last checkpoint failed" in str(record.unprotected_reasons)
        assert not record.checkpoints
        runs_on(world, worker)
    finally:
        subprocess.run(["chattr", "-i", *folders], check=True)
    number = world.checkpoint(worker)
    world.preempt(worker, notice=None)
    assert world.record(worker).incarnations[-1].restored_from == number
    gate.open("end")
    record = world.until_settled(worker)
    assert record.state is State.SUCCEEDED


RING = r"""
#include <errno.h>
#include <stdio.h>
#include <string.h>
#include <sys/syscall.h>
#include <unistd.h>
int main(int argc, char **argv)
{
    char parameters[120] = {0};
    setvbuf(stdout, NULL, _IOLBF, 0);
    printf("start\n");
    while (access("/gate/ring", F_OK))
        usleep(20000);
    long fd = syscall(__NR_io_uring_setup, 8, parameters);
    printf("ring %s\n", fd < 0 ? strerror(errno) : "made");
    for (int n = 1; access("/gate/end", F_OK); n++) {
        printf("tick %d\n", n);
        usleep(50000);
    }
    return 0;
}
"""


@pytest.fixture
def ring(tmp_path: Path, gate: Gate) -> str:
    """A small C program that sets up an io_uring, where the worker sees it."""
    if shutil.which("cc") is None:
        pytest.fail("this test needs a C compiler")
    (tmp_path / "ring.c").write_text(RING)
    subprocess.run(["cc", "-O1", "-o", gate.folder / "ring-program", tmp_path / "ring.c"], check=True)
    return "/gate/ring-program"


def test_guarded_system_calls_answer_that_they_do_not_exist(world: World, gate: Gate, ring: str) -> None:
    worker = world.submit(ring, volumes=(gate.volume,))
    world.until_output(worker, "start")
    gate.open("ring")
    world.until_output(worker, "ring Function not implemented\n")
    world.checkpoint(worker)
    ends_well(world, worker, gate)


def test_with_all_system_calls_an_io_uring_is_flagged_within_one_check_and_a_checkpoint_refused(
    world: World, gate: Gate, ring: str
) -> None:
    worker = world.submit(ring, volumes=(gate.volume,), syscalls="all")
    world.until_output(worker, "start")
    world.until(worker, lambda r: r.protected, "be protected before")
    gate.open("ring")
    world.until_output(worker, "ring made\n")
    record = world.until(worker, lambda r: "io_uring" in str(r.unprotected_reasons), "be flagged", 30)
    assert "has io_uring open, which cannot be saved" in record.unprotected_reasons[0]
    with pytest.raises(SavedWorkerError, match="io_uring"):
        world.checkpoint(worker)
    runs_on(world, worker)
    ends_well(world, worker, gate)
