"""What a restore fetches is the base of the next checkpoint; what could not be kept meanwhile is fetched again."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from concurrent.futures import Executor, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from savedworker.checkpoint import base_keeper
from savedworker.checkpoint import restore as restoring
from savedworker.checkpoint.memory import (
    Base,
    Captured,
    Keep,
    capture,
    find_sources,
    image_targets,
    inherit,
    rebuild,
)
from savedworker.checkpoint.memory.pagemap import PAGES
from savedworker.store.backend import open_store
from savedworker.store.chunks import ChunkStore
from tests.checkpoint.bench import Bench
from tests.checkpoint.test_memory import noise, scattered, write_dump
from tests.checkpoint.test_mended import HOLDS

GROUPS = 5


class Moved:
    """A checkpoint all of whose memory is told against GROUPS groups of another instance's base, restored here."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.chunks = ChunkStore(open_store(str(folder / "store")), "w", known=())
        self.base = Base(folder / "memory-base")
        self.later = {"pagemap-1.img": {0: noise(1, GROUPS * PAGES)}}
        with ThreadPoolExecutor(4) as pool:
            before = Base(folder / "before")
            capture(find_sources(write_dump(folder / "1", self.later), {}), before, self.chunks, pool, True)
            self.later = {"pagemap-1.img": {0: scattered(self.later["pagemap-1.img"][0])}}
            self.dump = write_dump(folder / "2", self.later)
            self.stored = self.save(before, pool)
        assert len(self.stored.spaces[0].groups) == GROUPS

    def save(self, base: Base, pool: Executor) -> Captured:
        return capture(find_sources(self.dump, {}), base, self.chunks, pool, keep=False)

    def restore(self, keep: Keep) -> None:
        back = self.folder / "back"
        back.mkdir()
        (space,) = self.stored.spaces
        (back / space.name).write_bytes((self.dump / space.name).read_bytes())
        with ThreadPoolExecutor(4) as pool:
            for part in rebuild(
                image_targets([space], back, {}), self.chunks.view, pool, 64 << 20, keep.offer
            ):
                part.result()
        assert space.pages is not None
        assert (back / space.pages).read_bytes() == (self.dump / space.pages).read_bytes()

    def fetched_again(self) -> int:
        """Fetch what the base lacks. How many groups that were."""
        fetched = 0

        def get(key: str) -> memoryview:
            nonlocal fetched
            fetched += 1
            return self.chunks.view(key)

        inherit(self.stored.spaces[0], self.base, get, lambda: None)
        with ThreadPoolExecutor(4) as pool:
            uploaded = self.chunks.bytes_uploaded
            assert self.save(self.base, pool) == self.stored
            assert self.chunks.bytes_uploaded == uploaded
        return fetched


@pytest.fixture
def moved(tmp_path: Path) -> Moved:
    return Moved(tmp_path)


def test_what_is_fetched_is_kept_and_not_fetched_again(moved: Moved) -> None:
    keep = Keep(moved.base, 1 << 30, lambda _: True)
    moved.restore(keep)
    keep.wait()
    assert moved.fetched_again() == 0


@pytest.mark.parametrize(("most", "room"), [(1000, True), (1 << 30, False)])
def test_what_there_is_no_room_for_is_fetched_again(moved: Moved, most: int, room: bool) -> None:
    keep = Keep(moved.base, most, lambda _: room)
    moved.restore(keep)
    keep.wait()
    assert moved.base.size == 0
    assert moved.fetched_again() == GROUPS


class SlowDisk(Base):
    """Takes nothing until it is ``fast``."""

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        self.fast, self.asked = threading.Event(), threading.Event()

    def add(self, *values: Any) -> None:
        self.asked.set()
        assert self.fast.wait(60)
        super().add(*values)


@pytest.fixture
def slow(moved: Moved) -> Iterator[SlowDisk]:
    moved.base = made = SlowDisk(moved.folder / "memory-base")
    yield made
    made.fast.set()


def test_a_restore_does_not_wait_for_a_slow_disk(moved: Moved, slow: SlowDisk) -> None:
    group = moved.chunks.view(moved.stored.spaces[0].groups[0].key).nbytes
    keep = Keep(slow, 3 * group, lambda _: True)
    moved.restore(keep)
    assert slow.asked.wait(60)
    slow.fast.set()
    keep.wait()
    assert slow.size == 3 * group
    assert moved.fetched_again() == GROUPS - 3


def test_what_several_processes_have_in_common_waits_once(moved: Moved, slow: SlowDisk) -> None:
    """It is in memory once, and on the disk as well."""
    (space,) = moved.stored.spaces
    first, second, *_ = space.groups
    data = {group: moved.chunks.view(group.key) for group in (first, second)}
    keep = Keep(slow, int(1.5 * data[first].nbytes), lambda _: True)
    for process in range(1, 5):
        keep.offer(f"pagemap-{process}.img", first, data[first])
    keep.offer("pagemap-1.img", second, data[second])  # for this there is no room, yet
    slow.fast.set()
    keep.wait()
    found = {
        (process, slow.find(f"pagemap-{process}.img", first.windows[0]) is not None)
        for process in range(1, 5)
    }
    assert found == {(process, True) for process in range(1, 5)}
    assert slow.find("pagemap-1.img", second.windows[0]) is None
    assert (slow.size, keep._held) == (data[first].nbytes, 0)


def test_a_save_does_without_what_is_not_written_yet(moved: Moved, slow: SlowDisk) -> None:
    keep = Keep(slow, 1 << 30, lambda _: True)
    moved.restore(keep)
    assert slow.asked.wait(60)

    def go_on() -> None:
        while keep._waiting:
            time.sleep(0.01)
        slow.fast.set()

    threading.Thread(target=go_on, daemon=True).start()
    keep.drop()
    assert moved.fetched_again() == GROUPS - 1


def test_a_restore_that_fails_leaves_no_base(moved: Moved) -> None:
    keep = Keep(moved.base, 1 << 30, lambda _: True)
    moved.restore(keep)
    keep.undo()
    assert not (moved.folder / "memory-base").exists()
    assert moved.fetched_again() == GROUPS


def test_a_disk_that_fails_ends_the_keeping_and_nothing_else(moved: Moved) -> None:
    moved.base = Base(moved.folder / "no such folder" / "memory-base")
    keep = Keep(moved.base, 1 << 30, lambda _: True)
    moved.restore(keep)
    keep.wait()
    moved.base = Base(moved.folder / "memory-base")
    assert moved.fetched_again() == GROUPS


def test_how_much_is_needed_for_something_else_is_told(moved: Moved) -> None:
    asked: list[int] = []

    def has_room(beside: int) -> bool:
        asked.append(beside)
        return len(asked) < 2

    keep = Keep(moved.base, 1 << 30, has_room)
    keep.leave_room(12345)
    moved.restore(keep)
    keep.wait()
    assert asked == [12345, 12345]
    assert moved.fetched_again() == GROUPS - 1


def test_what_goes_wrong_in_the_keeping_leaves_nothing_held(
    moved: Moved, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(*_: object) -> None:
        raise MemoryError

    monkeypatch.setattr(moved.base, "add", fails)
    monkeypatch.setattr(threading, "excepthook", lambda _: None)
    keep = Keep(moved.base, 1 << 30, lambda _: True)
    moved.restore(keep)
    keep.wait()
    assert not keep._waiting
    keep.offer("pagemap-9.img", moved.stored.spaces[0].groups[0], memoryview(b""))
    assert not keep._waiting


@pytest.mark.criu
def test_a_notice_does_not_wait_for_what_is_kept(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not even when what reads ahead waits for it already."""
    bench.python(HOLDS, interpreter="/usr/bin/python3")
    bench.until_output("same True\n")
    bench.save(hold=True)
    go_on, asked = threading.Event(), threading.Event()
    add = Base.add

    def slow(*values: Any) -> None:
        asked.set()
        assert go_on.wait(60)
        add(*values)

    monkeypatch.setattr(Base, "add", slow)
    bench.restore()
    keeper = bench.saver._keeper
    keep = keeper._keep
    assert keep is not None
    assert asked.wait(60)
    assert len(keep._waiting) > 2
    monkeypatch.setattr(base_keeper, "_WARM_AFTER", 0.0)
    bench.saver.start_warming()

    def once_dropped() -> None:
        while keep._waiting:
            time.sleep(0.01)
        go_on.set()

    threading.Thread(target=once_dropped, daemon=True).start()
    bench.saver.stop_warming()
    assert not keeper.warming
    assert len(bench.saver._base._groups) == 1


@pytest.mark.criu
def test_where_the_images_are_on_disk_they_have_it_for_themselves(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    bench.python(HOLDS, interpreter="/usr/bin/python3")
    bench.until_output("same True\n")
    bench.save(hold=True)
    monkeypatch.setattr(restoring, "rooms", list)
    bench.restore()
    assert bench.saver._base.size == 0
    bench.saver.warm_now()
    assert bench.saver._base.size > 24 << 20
    bench.writes_on()


@pytest.mark.criu
def test_a_worker_that_has_moved_fetches_nothing_twice(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    bench.python(HOLDS, interpreter="/usr/bin/python3")
    bench.until_output("same True\n")
    bench.saver.warm_now()
    bench.save(hold=True)
    came = bench.restore()
    bench.chunks.keep(came.keys)

    def view(key: str) -> memoryview:
        pytest.fail(f"chunk {key} is fetched again")

    with monkeypatch.context() as patched:
        patched.setattr(bench.chunks, "view", view)
        bench.saver.warm_now()
    second = bench.save()
    assert second.bytes_uploaded < 4 << 20  # of 24 MiB of random bytes and the interpreter
    bench.restore()
    bench.writes_on()
    assert "same False" not in bench.text
