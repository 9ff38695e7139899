"""Room on the disk of the instance: what a checkpoint needs of it, and what has to go for that."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from savedworker.checkpoint import base_keeper, layer
from savedworker.checkpoint.layer.content import Stage
from savedworker.checkpoint.memory import Base
from savedworker.model.errors import Fatal
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


def raises(error: Exception) -> Any:
    raise error


def test_a_base_that_an_agent_before_left_takes_no_room(tmp_path: Path) -> None:
    left = tmp_path / "memory-base"
    left.write_bytes(b"of a process that was killed")
    base = Base(left)
    assert (base.size, left.exists()) == (0, False)
