"""Memory that is read from the frozen processes, with nothing of it written by CRIU: the same bytes, whatever the mapping."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Executor, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from savedworker.checkpoint import processes
from savedworker.checkpoint import save as saving
from savedworker.checkpoint.memory import (
    Base,
    InProcess,
    Source,
    Spill,
    Unreadable,
    capture,
    find_sources,
)
from savedworker.checkpoint.memory.pagemap import PAGE, WINDOW, read_pagemap
from savedworker.checkpoint.memory.records import blank, mask_of
from savedworker.checkpoint.memory.sources import InFile
from savedworker.model.errors import Fatal
from savedworker.store.backend import open_store
from savedworker.store.chunks import ChunkStore
from tests.checkpoint.bench import Bench
from tests.checkpoint.test_memory import noise, rebuilt, write_dump

MAPPINGS = """
import ctypes, hashlib, mmap, os, random, threading, time
libc = ctypes.CDLL(None, use_errno=True)
libc.mprotect.argtypes = libc.mlock.argtypes = libc.madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
size, chance = 2 << 20, random.Random(5)
open("/srv/mapped", "wb").write(chance.randbytes(size))
file = open("/srv/mapped", "r+b")
memfd = os.memfd_create("data")
os.ftruncate(memfd, size)
private = {
    "anonymous": mmap.mmap(-1, size, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS),
    "huge": mmap.mmap(-1, 4 * size, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS),
    "locked": mmap.mmap(-1, size, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS),
    "of a file": mmap.mmap(file.fileno(), size, mmap.MAP_PRIVATE),
    "no rights": mmap.mmap(-1, size, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS),
}
shared = {"anonymous": mmap.mmap(-1, size), "memfd": mmap.mmap(memfd, size)}
address = lambda area: ctypes.addressof(ctypes.c_char.from_buffer(area))
libc.madvise(address(private["huge"]), 4 * size, 14)
for area in [*private.values(), *shared.values()]:
    area[: len(area) // 2] = chance.randbytes(len(area) // 2)
    for at in range(len(area) // 2, len(area), 3 * 4096):  # with pages between that were never there
        area[at] = 7
libc.mlock(address(private["locked"]), size, 0)
child = os.fork()
if not child:
    private["anonymous"][:4096] = chance.randbytes(4096)
threading.Thread(target=time.sleep, args=(9999,), daemon=True).start()
def digest():
    found = hashlib.sha256()
    libc.mprotect(address(private["no rights"]), size, 1)
    for area in [*private.values(), *shared.values()]:
        found.update(area)
    libc.mprotect(address(private["no rights"]), size, 0)
    return found.hexdigest()
name = "parent" if child else "child"
while True:
    os.write(1, f"{name} {digest()}\\n".encode())
    time.sleep(0.1)
"""
READ = 16 << 20
"""Less than what MAPPINGS has in private memory."""


def digests(lines: list[str]) -> dict[str, set[str]]:
    found: dict[str, set[str]] = {"parent": set(), "child": set()}
    for name, value in (x.split() for x in lines if len(x.split()) == 2):
        found[name].add(value)
    return found


@pytest.fixture
def running(bench: Bench) -> Bench:
    """A worker with all kinds of mappings, of which both processes have said what they hold.

    Without restartable sequences: the kernel writes the number of the CPU into their area whenever a thread goes on, and CRIU has the
    thread execute its own code between the two readings.
    """
    bench.python(MAPPINGS, env={"GLIBC_TUNABLES": "glibc.pthread.rseq=0"})
    bench.until(lambda: all(digests(bench.lines()).values()), "say both digests")
    return bench


@pytest.fixture
def seen(monkeypatch: pytest.MonkeyPatch) -> list[Source]:
    """The sources of every checkpoint."""
    found: list[Source] = []

    def noting(*values: Any) -> list[Source]:
        sources = find_sources(*values)
        found.extend(sources)
        return sources

    monkeypatch.setattr(saving, "find_sources", noting)
    return found


@pytest.mark.criu
@pytest.mark.parametrize("hold", [True, False])
def test_a_worker_comes_back_from_memory_that_criu_never_wrote(
    running: Bench, seen: list[Source], hold: bool
) -> None:
    bench = running
    bench.saver.warm_now()  # without a base the worker would wait for less when CRIU writes
    bench.save(hold=hold)
    live = [x for x in seen if isinstance(x, InProcess)]
    assert {x.space.process for x in seen} - {x.space.process for x in live} == {None}  # shared memory only
    assert sum(x.space.size for x in live) > READ
    before = digests(bench.lines())
    bench.restore()
    mark = len(bench.lines())
    bench.until(lambda: all(digests(bench.lines()[mark:]).values()), "say both digests again")
    assert digests(bench.lines()[mark:]) == before
    assert [len(x) for x in before.values()] == [1, 1]


@pytest.mark.criu
def test_what_is_read_outside_is_what_criu_writes_in_the_same_freeze(
    running: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    compared = 0

    def compare(saver: saving.Saver, folder: Path, cut: saving._Cut, still_wanted: Callable[[], None]) -> Any:
        nonlocal compared
        for source in find_sources(folder, {}):
            assert isinstance(source, InFile)
            inner = source.space.process
            if inner is None:
                continue
            outside = InProcess(source.space, saver._processes()[inner])
            for window in source.space.windows:
                written, read, mask = blank(), blank(), mask_of(window.segments)
                source.read(window, written)
                outside.read(window, read)
                assert (written[mask] == read[mask]).all(), f"{source.space.name} window {window.number:#x}"
                compared += window.size
        return original(saver, folder, cut, still_wanted)

    original = saving.Saver._read_memory
    monkeypatch.setattr(saving.Saver, "_read_memory", compare)
    running.save()  # with no base: CRIU writes all of it
    assert compared > READ


@pytest.mark.criu
def test_memory_that_cannot_be_read_from_outside_is_written_by_criu(
    running: Bench, seen: list[Source], monkeypatch: pytest.MonkeyPatch
) -> None:
    def refused(*_: Any) -> None:
        raise Unreadable("the memory of pid 7 cannot be read at 0x400000: not today")

    monkeypatch.setattr(InProcess, "read", refused)
    running.save(hold=True)
    assert isinstance(seen[-1], InFile)
    before = digests(running.lines())
    running.restore()
    mark = len(running.lines())
    running.until(lambda: all(digests(running.lines()[mark:]).values()), "say both digests again")
    assert digests(running.lines()[mark:]) == before


@pytest.mark.criu
@pytest.mark.parametrize("hold", [True, False])
def test_a_damaged_base_costs_uploads_and_no_checkpoint(running: Bench, hold: bool) -> None:
    bench = running
    bench.saver.warm_now()
    place = bench.container.home.path / "memory-base"
    content = bytearray(place.read_bytes())
    content[:: 1 << 20] = bytes(x ^ 1 for x in content[:: 1 << 20])
    place.write_bytes(content)
    bench.save(hold=hold)
    before = digests(bench.lines())
    bench.restore()
    mark = len(bench.lines())
    bench.until(lambda: all(digests(bench.lines()[mark:]).values()), "say both digests again")
    assert digests(bench.lines()[mark:]) == before


@pytest.mark.criu
@pytest.mark.parametrize("hold", [True, False])
def test_what_was_read_while_criu_was_killed_is_never_a_checkpoint(
    running: Bench, monkeypatch: pytest.MonkeyPatch, hold: bool
) -> None:
    """Its processes run on then. That runc has not noticed yet (it is stopped, or has no CPU) makes no difference."""
    bench = running
    bench.saver.warm_now()
    killed: list[int] = []
    original, first = InProcess.read, threading.Lock()

    def kill(source: InProcess, *values: Any) -> None:
        original(source, *values)
        if first.acquire(blocking=False):  # several threads read
            killed.append(processes.tracer_of(source.pid))
            os.kill(killed[0], signal.SIGKILL)

    with monkeypatch.context() as patched:
        patched.setattr(InProcess, "read", kill)
        patched.setattr(saving.Saver, "_check_runc", lambda _: None)
        with pytest.raises(Fatal, match="CRIU ended in the middle of the dump"):
            bench.save(hold=hold)
    assert killed
    assert bench.manifest is None
    bench.writes_on()
    bench.save()


@pytest.mark.criu
@pytest.mark.parametrize("hold", [True, False])
def test_what_was_read_after_criu_was_killed_is_never_a_checkpoint(
    running: Bench, monkeypatch: pytest.MonkeyPatch, hold: bool
) -> None:
    """Nobody traces the processes any more, at the beginning of the cut as at its end."""
    bench = running
    bench.saver.warm_now()
    killed: list[int] = []
    original = saving.Saver._tracers

    def kill(saver: saving.Saver) -> dict[int, int]:
        found = original(saver)
        if not killed:
            killed.extend(set(found.values()) - {0})
            os.kill(killed[0], signal.SIGKILL)
            bench.until(lambda: not any(original(saver).values()), "be let go")
        return original(saver)

    with monkeypatch.context() as patched:
        patched.setattr(saving.Saver, "_tracers", kill)
        patched.setattr(saving.Saver, "_check_runc", lambda _: None)
        with pytest.raises(Fatal, match="CRIU ended in the middle of the dump"):
            bench.save(hold=hold)
    assert len(killed) == 1
    assert bench.manifest is None
    bench.writes_on()
    bench.save()


def test_a_process_that_is_gone_is_unreadable(tmp_path: Path) -> None:
    folder = write_dump(tmp_path / "1", {"pagemap-9.img": {16: noise(1, 3)}})
    space = read_pagemap(folder / "pagemap-9.img", 1 << 30)
    child = os.fork()
    if not child:
        os._exit(0)
    os.waitpid(child, 0)
    with pytest.raises(Unreadable, match=f"pid {child} cannot be read"):
        InProcess(space, child).read(space.windows[0], blank())


@pytest.fixture
def pool() -> Iterator[Executor]:
    with ThreadPoolExecutor(4) as made:
        yield made


@pytest.fixture
def chunks(tmp_path: Path) -> ChunkStore:
    return ChunkStore(open_store(str(tmp_path / "store")), "w", known=())


def test_what_is_spilt_and_stored_later_is_what_is_stored_at_once(
    tmp_path: Path, chunks: ChunkStore, pool: Executor
) -> None:
    pages = 3 * WINDOW // PAGE
    first = {
        "pagemap-1.img": {8: noise(1, pages), 8 + 2 * pages: noise(2, 5)},
        "pagemap-2.img": {0: noise(1, 9)},
    }
    changed = np.frombuffer(first["pagemap-1.img"][8], dtype=np.uint64).copy()
    changed[:: 20 * PAGE // 8] += np.uint64(1)
    second = {
        "pagemap-1.img": {8: changed.tobytes(), 8 + 2 * pages: noise(2, 5)},
        "pagemap-2.img": {0: noise(1, 9)},
    }
    base = Base(tmp_path / "base")
    for number, dump in enumerate((first, second)):
        folder = write_dump(tmp_path / f"{number}", dump)
        spill = Spill(tmp_path / f"spill-{number}", chunks)
        read = capture(find_sources(folder, {}), base, spill, pool, False)
        uploaded = chunks.bytes_uploaded
        spill.store(read, base, pool, keep=True)
        assert chunks.bytes_uploaded > uploaded
        beside = ChunkStore(open_store(str(tmp_path / f"beside-{number}")), "w", known=())
        again = capture(find_sources(folder, {}), base, beside, pool, False)
        if number:
            assert again == read
            assert read.bytes_known == sum(x.size for x in read.spaces)
        rebuilt(folder, read.spaces, tmp_path / f"back-{number}", chunks.get, pool)


def test_groups_of_the_base_that_the_store_lost_are_put_again(
    tmp_path: Path, chunks: ChunkStore, pool: Executor
) -> None:
    folder = write_dump(tmp_path / "1", {"pagemap-1.img": {8: noise(1, 3000)}})
    base = Base(tmp_path / "base")
    capture(find_sources(folder, {}), base, chunks, pool, keep=True)
    empty = ChunkStore(open_store(str(tmp_path / "other")), "w", known=())
    spill = Spill(tmp_path / "spill", empty)
    read = capture(find_sources(folder, {}), base, spill, pool, False)
    spill.store(read, base, pool, keep=False)
    rebuilt(folder, read.spaces, tmp_path / "back", empty.get, pool)


@pytest.mark.parametrize("damage", ["altered", "short", "gone"])
def test_what_the_disk_does_not_give_back_becomes_no_checkpoint(
    tmp_path: Path, chunks: ChunkStore, pool: Executor, damage: str
) -> None:
    folder = write_dump(tmp_path / "1", {"pagemap-1.img": {8: noise(1, 3000)}})
    place, base = tmp_path / "spill", Base(tmp_path / "base")
    spill = Spill(place, chunks)
    read = capture(find_sources(folder, {}), base, spill, pool, False)
    content = bytearray(place.read_bytes())
    content[len(content) // 2] ^= 1
    place.write_bytes(content[:-1] if damage == "short" else content)
    if damage == "gone":
        place.unlink()
    with pytest.raises(Fatal, match="disk of this instance"):
        spill.store(read, base, pool, keep=False)
