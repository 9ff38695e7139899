"""Room on the disk of the instance: what a checkpoint needs of it, and what has to go for that."""

from __future__ import annotations

import errno
from pathlib import Path
from typing import Any

import pytest

from savedworker.checkpoint import base_keeper, cgroups, layer
from savedworker.checkpoint.layer.content import Stage
from savedworker.checkpoint.memory import Base, Spill, Unreadable
from savedworker.checkpoint.save import Saver
from savedworker.model.errors import Fatal
from savedworker.model.manifest import Cause
from tests.checkpoint.bench import Bench

MIB = 1 << 20
HOLDS = """
import os, time
data = os.urandom(64 << 20)
while True:
    print("tick", flush=True)
    time.sleep(0.02)
"""


@pytest.fixture
def narrow(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> Bench:
    """A worker of 64 MiB whose base is there, on a disk with 96 MiB left, of which 64 are never used."""
    bench.python(HOLDS)
    bench.until_output("tick")
    bench.saver.warm_now()
    assert bench.saver._base.size > 64 * MIB
    monkeypatch.setattr(base_keeper, "free_space", lambda _: 96 * MIB)
    return bench


@pytest.mark.criu
def test_a_last_checkpoint_needs_no_room_for_memory_that_is_never_written(narrow: Bench) -> None:
    """The base would be given up at the very notice, and all of the memory stored again."""
    saved = narrow.save(hold=True)
    assert narrow.saver._base.size > 64 * MIB
    assert saved.bytes_uploaded < 8 * MIB
    narrow.restore()
    narrow.writes_on()


@pytest.mark.criu
def test_a_base_makes_room_for_memory_that_criu_writes(narrow: Bench) -> None:
    narrow.saver._readable = False
    saved = narrow.save(hold=True)
    assert narrow.saver._base.size == 0
    assert len(saved.manifest.memory) > 0
    narrow.restore()
    narrow.writes_on()


@pytest.mark.criu
def test_memory_for_which_there_is_no_room_at_all_is_refused_where_criu_would_write_it(
    narrow: Bench,
) -> None:
    narrow.saver._base.clear()
    assert ["a checkpoint needs" in x for x in narrow.saver.problems()] == [True]
    narrow.saver._readable = False
    with pytest.raises(Fatal, match=r"a checkpoint needs .* and 96.0 MiB are free"):
        narrow.save(hold=True)
    narrow.writes_on()


@pytest.mark.criu
def test_a_base_makes_room_for_files_that_change_in_the_freeze(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Their copies lie on the same disk. How large they are is known only then."""
    bench.python(HOLDS)
    bench.until_output("tick")
    bench.saver.warm_now()
    original = Stage.copy

    def copy(*values: Any) -> Any:
        if bench.saver._base.size:
            raise layer.NoSpace("cannot stage a file: No space left on device")
        return original(*values)

    monkeypatch.setattr(Stage, "copy", copy)
    monkeypatch.setattr(layer, "precopy", lambda *_, **__: layer.PreCopy())
    bench.container.home.upper.joinpath("srv").mkdir(exist_ok=True)
    bench.container.home.upper.joinpath("srv/file").write_bytes(bytes(range(256)) * 9000)
    bench.save(hold=True)
    assert bench.saver._base.size == 0
    bench.restore()
    assert bench.container.home.upper.joinpath("srv/file").stat().st_size == 256 * 9000
    bench.writes_on()
    with monkeypatch.context() as patch:
        patch.setattr(Stage, "copy", lambda *_: raises(layer.NoSpace("still full")))
        with pytest.raises(layer.NoSpace, match="still full"):
            bench.save(hold=True)
    bench.writes_on()


@pytest.mark.criu
def test_a_base_makes_room_for_what_a_periodic_checkpoint_sets_aside(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And if its memory cannot be read from outside either, CRIU writes it: both may come at one checkpoint."""
    bench.python(HOLDS)
    bench.until_output("tick")
    bench.saver.warm_now()
    tries: list[str] = []
    written = Spill.put

    def put(spill: Spill, data: bytes | bytearray) -> str:
        if bench.saver._base.size:
            tries.append("full")
            raise OSError(errno.ENOSPC, "No space left on device")
        if bench.saver._readable:
            tries.append("unreadable")
            raise Unreadable("the memory of pid 1 cannot be read")
        return written(spill, data)

    def live(saver: Saver, hold: bool) -> bool:
        return saver._readable

    monkeypatch.setattr(Spill, "put", put)
    monkeypatch.setattr(Saver, "_can_read_live", live)
    bench.save()
    assert (sorted(set(tries)), bench.saver._base.size > 0, bench.saver._readable) == (
        ["full", "unreadable"],
        True,
        False,
    )
    bench.writes_on()
    bench.restore()
    bench.writes_on()


@pytest.mark.criu
def test_a_checkpoint_that_is_published_is_not_taken_again(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The disk may be full only then; another one under its number would be refused."""
    bench.python(HOLDS)
    bench.until_output("tick")
    bench.saver.warm_now()
    published: list[object] = []

    def take(saver: Saver, number: str, cause: Cause, publish: Any, *_: object) -> Any:
        publish("a manifest")
        raise layer.NoSpace("the disk is full")

    monkeypatch.setattr(Saver, "_take", take)
    with pytest.raises(layer.NoSpace):
        bench.saver.save("1-1", "notice", published.append, hold=True)
    assert published == ["a manifest"]
    assert bench.saver._base.size > 64 * MIB


@pytest.mark.parametrize(
    ("unified", "stat", "sizes"),
    [
        (True, "anon 700\nfile 9000\nshmem 30\n", (730, 30)),
        (False, "rss 1\nshmem 2\ntotal_rss 700\ntotal_shmem 30\n", (730, 30)),
        (False, "total_rss 700\nshmem 30\n", (730, 30)),
        (True, "no numbers here\n", (0, 0)),
    ],
)
def test_what_is_shared_of_a_workers_memory_is_known_on_both_versions_of_cgroups(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, unified: bool, stat: str, sizes: tuple[int, int]
) -> None:
    monkeypatch.setattr(cgroups, "ROOT", tmp_path)
    monkeypatch.setattr(cgroups, "unified", lambda: unified)
    folder = tmp_path / ("worker" if unified else "memory/worker")
    folder.mkdir(parents=True)
    (folder / "memory.stat").write_text(stat)
    worker = cgroups.Cgroup("/worker")
    assert (worker.memory(), worker.shared_memory()) == sizes


def raises(error: Exception) -> Any:
    raise error


def test_a_base_that_an_agent_before_left_takes_no_room(tmp_path: Path) -> None:
    left = tmp_path / "memory-base"
    left.write_bytes(b"of a process that was killed")
    base = Base(left)
    assert (base.size, left.exists()) == (0, False)
