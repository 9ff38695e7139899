"""A full disk spoils a checkpoint and nothing else."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from savedworker.model.errors import SavedWorkerError
from savedworker.model.record import State
from tests.faults.bed import FREE, Bed
from tests.faults.checks import complaints
from tests.runtime.conftest import gone

SIZE = 300 << 20
LEFT = 256 << 10
"""Bytes that are left when the disk is full: enough for the worker's own lines, too few for CRIU's images."""


@pytest.fixture
def small_disk(bed: Bed) -> Iterator[Path]:
    """The hosts' scratch on a file system of its own."""
    hosts = bed.folder / "local/hosts"
    hosts.mkdir()
    image = bed.folder / "disk.img"
    with image.open("wb") as file:
        file.truncate(SIZE)
    subprocess.run(["mkfs.ext4", "-q", "-m", "0", image], check=True)
    subprocess.run(["mount", "-o", "loop", image, hosts], check=True)
    yield hosts
    bed.close()
    gone(str(hosts), besides=f" {hosts} ")
    subprocess.run(["umount", hosts], check=True)


class Ballast:
    """Fills the disk of ``host`` but for LEFT bytes."""

    def __init__(self, hosts: Path) -> None:
        self._hosts = hosts
        self._file = hosts / "ballast"

    def fill(self) -> None:
        import os

        disk = os.statvfs(self._hosts)
        size = disk.f_bavail * disk.f_frsize - LEFT
        subprocess.run(["fallocate", "-l", str(size), self._file], check=True)

    def remove(self) -> None:
        self._file.unlink()


@pytest.mark.criu
def test_a_disk_that_fills_up_during_a_checkpoint_harms_nothing(bed: Bed, small_disk: Path) -> None:
    ballast = Ballast(small_disk)
    bed.tracker.hold_at(60)
    worker = bed.begin(steps=250, interval=None)
    assert bed.wait(lambda: bed.tracker.last >= 10, 40)
    good = bed.checkpoint(worker)
    bed.arm("checkpoint.dump.before", "hang:60")
    asked = bed.client.request_checkpoint(worker)
    assert bed.wait(lambda: bed.was_hit("checkpoint.dump.before"), 20)
    ballast.fill()
    bed.let_go("checkpoint.dump.before")
    record = bed.until(worker, lambda r: r.checkpoint_answered >= asked, "answer")
    assert [c.number for c in record.checkpoints] == [good]
    assert "space" in record.recent[-1].detail.lower() or any(
        "space" in e.detail.lower() for e in record.recent
    ), bed.story(worker)
    bed.tracker.hold_at(150)
    assert bed.wait(lambda: bed.tracker.last > 65, 20), "the worker does not run on"
    with pytest.raises(SavedWorkerError, match="free"):
        bed.checkpoint(worker)  # now it is known beforehand
    assert not bed.until(worker, lambda r: r.state is State.RUNNING, "run").protected
    ballast.remove()
    assert bed.checkpoint(worker) != good
    bed.until(worker, lambda r: r.protected, "be protected again", 60)
    bed.preempt(worker, 15)
    bed.tracker.hold_at(FREE)
    record = bed.finish()
    assert set(complaints(bed, record)) <= {f"mount {small_disk}"}
    assert record.migrations == 1
