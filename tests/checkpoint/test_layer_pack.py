"""Small files share chunks: few objects however many they are, each fetched once, and little room for what is gone."""

from __future__ import annotations

import json
import os
import random
import signal
from collections import Counter
from pathlib import Path

import pytest

from savedworker.checkpoint.keys import read_index
from savedworker.checkpoint.layer import (
    CHUNK_SIZE,
    LayerIndex,
    PreCopy,
    Snapshot,
    extract,
    finish,
    precopy,
    wasteful,
)
from savedworker.checkpoint.layer.pack import SMALL
from savedworker.checkpoint.save import Saved, Saver
from savedworker.model.errors import Temporary
from tests.checkpoint.bench import Bench
from tests.checkpoint.layer_trees import Chunks, described

pytestmark = pytest.mark.criu  # extracting restores owners, which needs root


class Tree:
    """Files below a root, captured again and again as checkpoints do."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.root = folder, folder / "root"
        self.root.mkdir()
        (folder / "stage").mkdir()
        self.chunks = Chunks()
        self.snapshot = Snapshot()
        self.index = LayerIndex([])
        self.ahead = PreCopy()

    def write(self, *names: str, size: int = 4000) -> None:
        for name in names:
            path = self.root / name
            path.parent.mkdir(exist_ok=True)
            path.write_bytes(os.urandom(size))
        self.settle()

    def settle(self) -> None:
        """Have the clock of file times go on, so that what is read now is not read again for want of certainty."""
        marker = self.folder / "clock"
        marker.touch()
        begun = marker.stat().st_ctime_ns
        while marker.stat().st_ctime_ns <= begun + 40_000_000:
            marker.chmod(0o600)

    def capture(self) -> list[int]:
        """Sizes of the chunks that were stored for it."""
        before = len(self.chunks.sunk)
        waste = wasteful(self.snapshot.states.values())
        known = {
            file: state
            for file, state in self.snapshot.states.items()
            if not any(x.key in waste for x in state.data)
        }
        self.ahead = precopy(self.root, self.chunks.sink, Snapshot(known))
        pending = finish(self.root, self.ahead, self.folder / "stage")
        index, self.snapshot = pending.complete(self.chunks.sink)
        self.index = LayerIndex.parse(index.to_bytes())
        return self.chunks.sunk[before:]

    def back(self, threads: int = 1) -> Counter[str]:
        """Extract it and compare. How often each chunk was fetched."""
        fetched: Counter[str] = Counter()

        def fetch(key: str) -> bytes:
            fetched[key] += 1
            return self.chunks.fetch(key)

        target = self.folder / f"back-{len(os.listdir(self.folder))}"
        target.mkdir()
        extract(self.index, fetch, target, threads)
        assert described(target) == described(self.root)
        return fetched


@pytest.fixture
def tree(tmp_path: Path) -> Tree:
    return Tree(tmp_path)


def names(count: int) -> list[str]:
    return [f"d{i % 7}/f{i}" for i in range(count)]


def test_many_small_files_are_few_chunks(tree: Tree) -> None:
    tree.write(*names(1500))
    tree.write("large", size=SMALL + 1)
    stored = tree.capture()
    assert sum(stored) == 1500 * 4000 + SMALL + 1
    assert max(stored) <= CHUNK_SIZE
    assert len(stored) <= 10
    assert tree.capture() == []
    assert tree.ahead.bytes_reused == 1500 * 4000 + SMALL + 1


def test_one_that_changes_is_stored_alone_and_the_others_stay_where_they_are(tree: Tree) -> None:
    tree.write(*names(200))
    tree.capture()
    before = {x.path: x.data for x in tree.index.entries}
    tree.write("d1/f1")
    assert tree.capture() == [4000]
    assert [x.path for x in tree.index.entries if x.data != before[x.path]] == ["d1/f1"]
    tree.back()


@pytest.mark.parametrize("threads", [1, 3])
def test_each_chunk_is_fetched_once_in_whatever_order_files_were_written(tree: Tree, threads: int) -> None:
    chance = random.Random(threads)
    tree.write(*names(800))
    (tree.root / "d2" / "other name").hardlink_to(tree.root / "d1" / "f1")
    tree.write("large", size=SMALL + 1)
    for _ in range(6):
        tree.capture()
        tree.write(*chance.sample(names(800), 30))
    tree.capture()
    fetched = tree.back(threads)
    assert fetched == dict.fromkeys(tree.index.chunk_keys(), 1)
    assert len(fetched) > 5


def test_what_is_left_of_a_chunk_that_is_hardly_used_is_packed_anew(tree: Tree) -> None:
    tree.write(*names(100), size=400)
    tree.capture()
    (first,) = set(tree.index.chunk_keys())
    tree.write(*names(49), size=400)
    tree.capture()
    assert first in set(tree.index.chunk_keys())
    tree.write(*names(51), size=400)
    tree.capture()
    assert tree.capture() == [49 * 400]
    assert first not in set(tree.index.chunk_keys())
    assert tree.capture() == []
    tree.back()


def test_where_all_is_read_again_a_new_file_and_one_that_is_gone_change_their_own_chunks(tree: Tree) -> None:
    tree.write(*names(3000))
    tree.capture()
    tree.write("d0/a new one")
    (tree.root / "d6" / "f6").unlink()
    tree.snapshot = Snapshot()
    known = set(tree.index.chunk_keys())
    assert len(known) >= 4
    tree.capture()
    assert len(set(tree.index.chunk_keys()) - known) <= 2
    tree.back()


def test_what_changes_all_the_time_is_kept_apart_from_what_does_not(tree: Tree) -> None:
    tree.write(*names(100), size=400)
    tree.capture()
    for _ in range(3):
        tree.write(*names(60), size=400)
        tree.capture()
    tree.write(*names(60), size=400)
    assert tree.capture() == [60 * 400]
    assert sum(x.of for x in {y.key: y for e in tree.index.entries for y in e.data}.values()) == 100 * 400
    tree.back()


def test_what_is_touched_or_read_again_and_is_the_same_is_not_stored_again(tree: Tree) -> None:
    tree.write(*names(100))
    tree.capture()
    before = {x.path: x.data for x in tree.index.entries}
    for name in names(50):
        os.utime(tree.root / name)
    (tree.root / "d1" / "f1").chmod(0o600)
    tree.settle()
    tree.write("another")
    assert tree.capture() == [4000]
    assert [x.path for x in tree.index.entries if x.data != before.get(x.path)] == ["another"]
    tree.back()


def test_what_was_read_before_the_freeze_and_copied_in_it_is_stored_once(tree: Tree) -> None:
    """Just written: its time stamps say nothing yet."""
    tree.write(*names(50))
    for name in names(50):
        os.utime(tree.root / name)
    before = len(tree.chunks.sunk)
    ahead = precopy(tree.root, tree.chunks.sink)
    for name in names(50):
        os.utime(tree.root / name)
    pending = finish(tree.root, ahead, tree.folder / "stage")
    assert len(pending.staged) == 50
    tree.index, _ = pending.complete(tree.chunks.sink)
    assert sum(tree.chunks.sunk[before:]) == 50 * 4000
    tree.back()


def test_a_tree_that_is_all_copied_in_the_freeze_stores_what_is_new(tree: Tree) -> None:
    """As /dev/shm, whose time stamps do not tell."""
    known = Snapshot()

    def capture() -> list[int]:
        nonlocal known
        before = len(tree.chunks.sunk)
        pending = finish(tree.root, PreCopy(known), tree.folder / "stage", trust_ctime=False)
        tree.index, known = pending.complete(tree.chunks.sink)
        return tree.chunks.sunk[before:]

    tree.write(*names(100))
    assert sum(capture()) == 100 * 4000
    assert capture() == []
    tree.write("d1/f1", "new")
    assert sum(capture()) == 2 * 4000
    tree.back()


def test_after_a_move_what_is_touched_is_not_stored_again(tree: Tree) -> None:
    tree.write(*names(100))
    tree.capture()
    target = tree.folder / "moved"
    target.mkdir()
    tree.snapshot = extract(tree.index, tree.chunks.fetch, target)
    tree.root = target
    for name in names(100):
        os.utime(target / name)
    tree.settle()
    assert tree.capture() == []
    tree.back()


def test_reading_ahead_can_be_ended_at_any_file(tree: Tree) -> None:
    tree.write(*names(20))
    asked = 0

    def check() -> None:
        nonlocal asked
        asked += 1
        if asked == 7:
            raise TimeoutError

    with pytest.raises(TimeoutError):
        precopy(tree.root, tree.chunks.sink, check=check)
    assert asked == 7


def test_a_file_with_holes_has_all_of_its_data_in_one_chunk(tree: Tree) -> None:
    tree.write("a", size=SMALL - 1)
    tree.write("b", size=SMALL - 1)
    tree.write("c", size=SMALL - 1)
    with open(tree.root / "d", "wb") as file:
        for at in range(0, SMALL, SMALL // 4):
            file.seek(at)
            file.write(os.urandom(SMALL // 8))
    tree.settle()
    tree.capture()
    for entry in tree.index.entries:
        assert len({x.key for x in entry.data}) <= 1
    tree.back()


@pytest.mark.parametrize("version", [1, 2])
def test_an_index_of_a_version_before_is_read(tree: Tree, version: int) -> None:
    tree.write("a", "b", "c")
    tree.capture()
    document = json.loads(tree.index.to_bytes())
    document["version"] = version
    for entry in document["entries"]:
        if entry.get("data"):
            data = (tree.root / entry["path"]).read_bytes()
            entry["data"] = [[0, len(data), tree.chunks.sink(data)]]
    tree.index = LayerIndex.parse(json.dumps(document).encode())
    tree.back()


PROGRAM = """
import os, signal, sys
signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGUSR1})
def write(count):
    for i in range(count):
        with open(f"/srv/{i}", "wb") as file:
            file.write(os.urandom(20000))
    print("wrote", flush=True)
write(100)
while True:
    signal.sigwait({signal.SIGUSR1})
    write(90)
"""


def half_empty(bench: Bench, saved: Saved) -> set[str]:
    """The layer's chunks less than half of which that checkpoint uses."""
    used: Counter[str] = Counter()
    size: dict[str, int] = {}
    for entry in read_index(saved.manifest.layer, bench.chunks).entries:
        for extent in entry.data:
            used[extent.key] += extent.length
            size[extent.key] = extent.of
    return {key for key, count in used.items() if 2 * count < size[key]}


def write_again(bench: Bench) -> None:
    times = bench.text.count("wrote") + 1
    for pid in bench.container.pids():
        if pid != bench.container.init_pid():
            os.kill(pid, signal.SIGUSR1)
    bench.until(lambda: bench.text.count("wrote") == times, "write again")


def test_a_worker_with_many_small_files_moves_and_leaves_no_chunk_half_empty(bench: Bench) -> None:
    bench.python(PROGRAM, interpreter="/usr/bin/python3")
    bench.until_output("wrote\n")
    bench.save()
    write_again(bench)
    assert half_empty(bench, bench.save())
    third = bench.save()
    assert not half_empty(bench, third)
    assert third.bytes_uploaded < 2 << 20
    bench.restore()
    write_again(bench)


def test_a_checkpoint_that_cannot_be_stored_leaves_no_copies_and_those_of_a_killed_agent_go(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Copies of all changed files and of /dev/shm: the next checkpoint needs the room."""
    bench.python(PROGRAM, interpreter="/usr/bin/python3")
    bench.until_output("wrote\n")
    stage = bench.container.home.stage
    seen: list[list[str]] = []

    def fails(*_: object) -> None:
        seen.append(os.listdir(stage))
        raise Temporary("the store is away")

    with monkeypatch.context() as patched:
        patched.setattr(Saver, "_store", fails)
        for _ in range(2):
            with pytest.raises(Temporary):
                bench.save()
    assert [len(copies) for copies in seen] == [2, 2]
    assert os.listdir(stage) == []
    (stage / seen[0][0]).mkdir()
    (stage / seen[0][0] / "small").write_bytes(b"of an agent that was killed")
    bench.save()
    assert os.listdir(stage) == []


SHARED = """
import os, time
for i in range(50):
    with open(f"/dev/shm/{i}", "wb") as file:
        file.write(os.urandom(20000))
print("wrote", flush=True)
while True:
    time.sleep(0.1)
    print("on", flush=True)
"""


def test_what_is_in_shared_memory_and_stays_as_it_is_is_stored_once_also_after_a_move(bench: Bench) -> None:
    bench.python(SHARED, interpreter="/usr/bin/python3")
    bench.until_output("wrote\n")
    first = bench.save()
    of_shm = set(read_index(first.manifest.shm, bench.chunks).chunk_keys())
    assert of_shm
    bench.restore()
    bench.writes_on()
    assert set(read_index(bench.save().manifest.shm, bench.chunks).chunk_keys()) == of_shm
