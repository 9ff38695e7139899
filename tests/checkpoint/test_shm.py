"""Large files of /dev/shm are memory: cut by offset, told against the base, never copied; bit for bit the same after a restore."""

from __future__ import annotations

import os
import shutil
import stat
import subprocess
import tempfile
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from savedworker.checkpoint import base_keeper, layer
from savedworker.checkpoint import restore as restoring
from savedworker.checkpoint.keys import read_index
from savedworker.checkpoint.layer import (
    SPACE_PATH_MAX,
    ChangedWhileFrozen,
    LayerIndex,
    PreCopy,
    Snapshot,
    content,
    extract,
    finish,
)
from savedworker.checkpoint.memory import (
    Base,
    ByOffset,
    Source,
    Spill,
    Target,
    capture,
    file_target,
    find_shm_sources,
    rebuild,
    shm_sources,
    space_name,
    warm_shm,
)
from savedworker.checkpoint.memory.pagemap import PAGE, PAGES, WINDOW
from savedworker.checkpoint.memory.records import Words, blank
from savedworker.checkpoint.save import Saver, TooLate
from savedworker.model.errors import Fatal
from savedworker.model.manifest import StoredMemory
from savedworker.model.room import memory_need
from savedworker.store.backend import open_store
from savedworker.store.chunks import ChunkStore
from tests.checkpoint.bench import Bench
from tests.checkpoint.layer_trees import described

pytestmark = pytest.mark.criu  # mounting and owners need root
MIB = 1 << 20


class Tmpfs:
    """A tree as /dev/shm is one, captured again and again against a base as checkpoints do, and brought back."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.root = self.mount("shm")
        self.store = ChunkStore(open_store(str(folder / "store")), "w", known=())
        self.base = Base(folder / "base")
        self.known = Snapshot()
        (folder / "stage").mkdir()
        self.index = LayerIndex([])
        self.memory: tuple[StoredMemory, ...] = ()
        self.staged = 0
        self.uploaded = 0

    def mount(self, name: str) -> Path:
        target = self.folder / name
        target.mkdir()
        subprocess.run(["mount", "-t", "tmpfs", "-o", "mode=1777", "tmpfs", target], check=True)
        return target

    def capture(self, keep: bool = True, spilled: bool = False) -> None:
        """With ``spilled`` as a periodic checkpoint does it."""
        before = self.store.bytes_uploaded
        pending = finish(
            self.root, PreCopy(self.known), self.folder / "stage", trust_ctime=False, apart=space_name
        )
        self.staged = pending.bytes_staged
        sources: Sequence[Source] = shm_sources(self.root, pending.apart.values())
        with ThreadPoolExecutor(3) as pool:
            if spilled:
                spill = Spill(self.folder / "spill", self.store)
                captured = capture(sources, self.base, spill, pool, False)
                spill.store(captured, self.base, pool, keep)
                (self.folder / "spill").unlink(missing_ok=True)
            else:
                captured = capture(sources, self.base, self.store, pool, keep)
        self.memory = captured.spaces
        self.index, self.known = pending.complete(self.store.put)
        self.uploaded = self.store.bytes_uploaded - before

    def back(self, name: str) -> Path:
        """Another instance's, from what is in the store."""
        index = LayerIndex.parse(self.index.to_bytes())
        stored = {x.name: x for x in self.memory}

        def fill(files: list[tuple[layer.Entry, Path]]) -> None:
            targets: list[Target] = []
            for entry, path in files:
                assert entry.space is not None
                targets.append(file_target(stored[entry.space], entry.runs, path, entry.size))
            with ThreadPoolExecutor(3) as pool:
                for part in rebuild(targets, self.store.view, pool, 64 << 20):
                    part.result()

        target = self.mount(name)
        extract(index, self.store.get, target, fill=fill)
        return target

    def comes_back(self, name: str = "back") -> None:
        back = self.back(name)
        assert described(back, holes=False) == described(self.root, holes=False)
        subprocess.run(["umount", back], check=True)

    def close(self) -> None:
        for folder in self.folder.iterdir():
            if os.path.ismount(folder):
                subprocess.run(["umount", folder], check=True)
        shutil.rmtree(self.folder)


@pytest.fixture
def shm() -> Iterator[Tmpfs]:
    made = Tmpfs(Path(tempfile.mkdtemp(prefix="sw-shm-")))
    try:
        yield made
    finally:
        made.close()


def noise(seed: int, size: int) -> bytes:
    return np.random.default_rng(seed).bytes(size)


def found(shm: Tmpfs) -> list[ByOffset]:
    return list(find_shm_sources(shm.root, lambda: None))


def scatter(path: Path, every: int = 20) -> None:
    """Change one byte of every ``every``-th page, as through a mapping: no time stamp shows it."""
    times = path.stat()
    data = np.memmap(path, dtype=np.uint8, mode="r+")
    data[:: every * PAGE] ^= 255
    assert path.stat().st_mtime_ns == times.st_mtime_ns


@pytest.mark.parametrize("spilled", [True, False])
def test_changes_are_told_against_the_base_and_nothing_is_copied(shm: Tmpfs, spilled: bool) -> None:
    (shm.root / "large").write_bytes(noise(1, 16 * MIB))
    (shm.root / "small").write_bytes(noise(2, 4000))
    shm.capture(spilled=spilled)
    assert (shm.staged, len(shm.memory)) == (4000, 1)
    assert shm.uploaded > 16 * MIB
    scatter(shm.root / "large")
    shm.capture(spilled=spilled)
    assert shm.uploaded < MIB // 4, "a fifth of all pages has changed, one byte of each"
    assert len(shm.memory[0].deltas) == 1
    shm.comes_back()


def test_a_file_that_grows_shrinks_or_gets_holes_comes_back(shm: Tmpfs) -> None:
    file = shm.root / "file"
    file.write_bytes(noise(1, 9 * MIB))
    shm.capture()
    with file.open("r+b") as opened:
        opened.seek(0, 2)
        opened.write(noise(2, 5 * MIB + 7))
        opened.seek(20 * MIB)
        opened.write(b"far away")
    shm.capture(keep=False)
    assert 5 * MIB < shm.uploaded < 7 * MIB
    shm.comes_back("grown")
    os.truncate(file, 2 * MIB + 100)
    shm.capture(keep=False)
    assert shm.uploaded < MIB
    shm.comes_back("shrunk")
    os.truncate(file, 9 * MIB)
    shm.capture(keep=False)
    back = shm.back("sparse") / "file"
    assert back.read_bytes() == file.read_bytes()
    assert back.stat().st_blocks * 512 < 3 * MIB
    os.truncate(file, 10)
    shm.capture()
    assert shm.memory == ()
    shm.comes_back("small")


def test_owners_modes_times_links_and_odd_names_come_back(shm: Tmpfs) -> None:
    folder = shm.root / "deep/er"
    folder.mkdir(parents=True)
    for number, name in enumerate(("plain", "new\nline", "caf\udce9", "é")):
        (folder / name).write_bytes(noise(number, MIB + 1 + number))
        os.chown(folder / name, 1000 + number, 2000)
        os.chmod(folder / name, (0o4711, 0o000, 0o2640, 0o600)[number])
        os.utime(folder / name, ns=(number, 10**18 + number))
    os.link(folder / "plain", shm.root / "second")
    os.setxattr(
        folder / "plain", "security.capability", bytes.fromhex("0100000200200000000000000000000000000000")
    )
    os.utime(folder, ns=(5, 5))
    shm.capture()
    assert len(shm.memory) == 3, "the one that has two names is stored as files are"
    shm.comes_back()
    shm.capture()
    assert shm.uploaded == 0
    shm.comes_back("again")


def test_a_path_that_is_too_long_to_be_opened_by_is_stored_as_other_files_are(shm: Tmpfs) -> None:
    here = os.open(shm.root, os.O_RDONLY)
    for _ in range(SPACE_PATH_MAX // 200 + 1):
        os.mkdir("d" * 200, dir_fd=here)
        below = os.open("d" * 200, os.O_RDONLY, dir_fd=here)
        os.close(here)
        here = below
    file = os.open("file", os.O_WRONLY | os.O_CREAT, dir_fd=here)
    os.write(file, noise(1, 2 * MIB))
    os.close(file)
    os.close(here)
    shm.capture()
    assert shm.memory == ()
    shm.comes_back()


def test_what_is_read_ahead_is_the_base_of_the_first_checkpoint(shm: Tmpfs) -> None:
    for number in range(3):
        (shm.root / f"{number}").write_bytes(noise(number, 4 * MIB))
    read = warm_shm(found(shm), shm.base, shm.store, lambda: None)
    assert read == 12 * MIB
    assert warm_shm(found(shm), shm.base, shm.store, lambda: None) == 0
    scatter(shm.root / "1")
    shm.capture()
    assert shm.uploaded < MIB // 4
    shm.comes_back()


def test_reading_ahead_ends_when_it_is_not_wanted(shm: Tmpfs) -> None:
    """At each file that is looked for, and each window that is read."""
    for number in range(3):
        (shm.root / f"{number}").write_bytes(noise(number, 8 * MIB))
    for turn in range(1, 10):
        left = turn

        def still_wanted() -> None:
            nonlocal left
            left -= 1
            if not left:
                raise TimeoutError

        with pytest.raises(TimeoutError):
            warm_shm(find_shm_sources(shm.root, still_wanted), shm.base, shm.store, still_wanted)
        assert len(shm.base._slots) == 0 if turn < 3 else len(shm.base._slots) <= 6
        shm.base.clear()
    assert warm_shm(find_shm_sources(shm.root, lambda: None), shm.base, shm.store, lambda: None) == 24 * MIB


def test_a_folder_that_vanishes_while_files_are_looked_for_is_left_out(shm: Tmpfs) -> None:
    for number in range(3):
        (shm.root / f"{number}").mkdir()
        (shm.root / f"{number}/file").write_bytes(noise(number, 2 * MIB))
    sources = find_shm_sources(shm.root, lambda: None)
    first = next(sources)
    for number in range(3):
        if not first.file.path.startswith(f"{number}/"):
            shutil.rmtree(shm.root / f"{number}")
    assert list(sources) == []


def test_from_more_than_a_mib_on_a_file_is_a_space(shm: Tmpfs) -> None:
    for size in (MIB - 1, MIB, MIB + 1):
        (shm.root / f"{size}").write_bytes(noise(size, size))
    shm.capture()
    assert [x.size for x in shm.memory] == [MIB + PAGE]
    shm.comes_back()


def test_files_that_change_while_they_are_read_ahead_are_left_out_and_the_others_are_not(shm: Tmpfs) -> None:
    for number in range(4):
        (shm.root / f"{number}").write_bytes(noise(number, 8 * MIB))
    sources = found(shm)
    os.truncate(shm.root / "0", 5 * MIB)
    (shm.root / "1").unlink()
    (shm.root / "2").rename(shm.root / "1")
    assert warm_shm(sources, shm.base, shm.store, lambda: None) == 8 * MIB
    shm.capture()
    shm.comes_back()


def test_no_file_of_the_host_is_read_through_a_folder_that_became_a_link(shm: Tmpfs) -> None:
    """Which a worker can make of it while it runs."""
    precious = shm.folder / "precious"
    precious.mkdir()
    (shm.root / "folder").mkdir()
    for folder in (precious, shm.root / "folder"):
        (folder / "file").write_bytes(noise(1, 2 * MIB))
        os.mkfifo(folder / "fifo")
    (source,) = found(shm)
    shutil.move(shm.root / "folder", shm.root / "aside")
    (shm.root / "folder").symlink_to(precious)
    read = blank()
    read[:] = 0
    with pytest.raises(ChangedWhileFrozen, match="shm/folder/file' changed"):
        source.read(source.space.windows[0], read)
    assert not read.any()
    assert warm_shm([source], shm.base, shm.store, lambda: None) == 0
    assert [x.file.path for x in found(shm)] == ["aside/file"]


def test_nothing_of_the_host_is_even_opened_through_such_a_link(shm: Tmpfs) -> None:
    """Whoever waits at a pipe would be let go; a terminal would become the agent's."""
    pipes = shm.folder / "pipes"
    for folder in (pipes, shm.root / "folder"):
        folder.mkdir()
    (shm.root / "folder/file").write_bytes(noise(1, 2 * MIB))
    os.mkfifo(pipes / "file")
    (source,) = found(shm)
    shutil.move(shm.root / "folder", shm.root / "aside")
    (shm.root / "folder").symlink_to(pipes)
    waiting = subprocess.Popen(["sh", "-c", 'echo >"$0"', pipes / "file"])
    try:
        while Path(f"/proc/{waiting.pid}/wchan").read_text() != "wait_for_partner":
            assert waiting.poll() is None
        assert warm_shm([source], shm.base, shm.store, lambda: None) == 0
        with pytest.raises(subprocess.TimeoutExpired):
            waiting.wait(timeout=0.5)
    finally:
        waiting.kill()
        waiting.wait()


def test_data_that_a_worker_moves_on_before_the_reader_has_an_end(
    shm: Tmpfs, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(content, "_SURPLUS", 32)
    with (shm.root / "file").open("wb+") as file:
        file.truncate(64 * MIB)
        before = os.fstat(file.fileno())
        for at in range(0, 64 * MIB, MIB):
            os.pwrite(file.fileno(), bytes(PAGE), at)
        there = list(content.extents(file.fileno(), before, changing=False))
        assert len(there) == 64
        assert list(content.extents(file.fileno(), os.fstat(file.fileno()), changing=True)) == there
        with pytest.raises(OSError, match="Stale"):
            list(content.extents(file.fileno(), before, changing=True))


def test_many_files_are_rebuilt_with_one_buffer_for_each_thread(
    shm: Tmpfs, monkeypatch: pytest.MonkeyPatch
) -> None:
    for number in range(40):
        with (shm.root / f"{number}").open("wb") as file:
            file.truncate(40 * MIB)
            for at in (0, 36 * MIB):
                os.pwrite(file.fileno(), noise(number + at, PAGE), at)
    shm.capture()
    made: list[None] = []

    def counted(*pages: int) -> Words:
        made.append(None)
        return blank(*pages)

    module = import_module("savedworker.checkpoint.memory.rebuild")  # the name is that of a function, too
    monkeypatch.setattr(module, "blank", counted)
    shm.comes_back()
    assert 1 <= len(made) <= 4  # of three threads and of the one that begins it


def test_a_file_in_whose_place_a_fifo_is_holds_nobody_up(shm: Tmpfs) -> None:
    (shm.root / "file").write_bytes(noise(1, 2 * MIB))
    (source,) = found(shm)
    (shm.root / "file").unlink()
    os.mkfifo(shm.root / "file")
    with pytest.raises(ChangedWhileFrozen):
        source.read(source.space.windows[0], blank())


def test_a_file_that_changes_in_the_midst_of_reading_it_is_not_taken(
    shm: Tmpfs, monkeypatch: pytest.MonkeyPatch
) -> None:
    (shm.root / "file").write_bytes(noise(1, 2 * MIB))
    (source,) = found(shm)
    original = ByOffset._read

    def changes(*values: Any) -> None:
        original(*values)
        os.truncate(shm.root / "file", 3 * MIB)

    monkeypatch.setattr(ByOffset, "_read", changes)
    with pytest.raises(ChangedWhileFrozen, match="another one"):
        source.read(source.space.windows[0], blank())


def test_a_file_that_somebody_writes_in_the_freeze_ends_the_checkpoint(shm: Tmpfs) -> None:
    (shm.root / "file").write_bytes(noise(1, 2 * MIB))
    pending = finish(shm.root, PreCopy(), shm.folder / "stage", trust_ctime=False, apart=space_name)
    (source,) = shm_sources(shm.root, pending.apart.values())
    source.read(source.space.windows[0], blank())
    before = os.stat(shm.root / "file").st_ctime_ns
    while os.stat(shm.root / "file").st_ctime_ns == before:
        (shm.root / "file").write_bytes(noise(2, 2 * MIB))
    with pytest.raises(ChangedWhileFrozen, match="changed while it was read"):
        source.read(source.space.windows[0], blank())
    pending.discard()


# runs of pages near each other, at the edges of windows, and far away
runs = st.dictionaries(
    st.one_of(st.integers(0, 40), st.integers(PAGES - 3, PAGES + 3), st.integers(5 * PAGES, 5 * PAGES + 9)),
    st.tuples(st.integers(1, 20), st.integers(0, 3)),
    max_size=6,
)
file = st.tuples(runs, st.integers(MIB + 1, 6 * WINDOW))
tree = st.dictionaries(st.sampled_from(["a", "b", "d/c"]), file, max_size=3)


def write(root: Path, files: dict[str, tuple[dict[int, tuple[int, int]], int]]) -> None:
    for old in sorted(root.rglob("*"), reverse=True):
        if stat.S_ISREG(old.lstat().st_mode):
            old.unlink()
    (root / "d").mkdir(exist_ok=True)
    for name, (data, size) in files.items():
        with (root / name).open("wb") as opened:
            for page, (count, seed) in data.items():
                opened.seek(page * PAGE)
                opened.write(noise(seed + page % 3, count * PAGE) if seed else bytes(count * PAGE))
            opened.truncate(size)


@settings(max_examples=40, suppress_health_check=[HealthCheck.too_slow], deadline=None)
@given(history=st.lists(tree, min_size=1, max_size=3), keep=st.lists(st.booleans(), min_size=3, max_size=3))
def test_every_tree_comes_back_whatever_came_before(history: list[dict[str, Any]], keep: list[bool]) -> None:
    shm = Tmpfs(Path(tempfile.mkdtemp(prefix="sw-shm-")))
    try:
        for number, files in enumerate(history):
            write(shm.root, files)
            shm.capture(keep[number], spilled=keep[number - 1])
            shm.comes_back(f"back-{number}")
    finally:
        shm.close()


SHARES = """
import hashlib, mmap, os, signal, sys, time
def say(*words):
    os.write(1, (" ".join(map(str, words)) + "\\n").encode())  # a line at once: there are two who write
signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGUSR1})
size = 48 << 20
with open("/dev/shm/large", "wb") as file:
    for _ in range(48):
        file.write(os.urandom(1 << 20))
file = open("/dev/shm/large", "r+b")
data = mmap.mmap(file.fileno(), size)
if os.fork() == 0:
    while True:
        signal.sigwait({signal.SIGUSR1})
        for at in range(0, size, 20 * 4096):
            data[at] ^= 255
        say("sum", hashlib.sha256(data).hexdigest())
say("sum", hashlib.sha256(data).hexdigest())
last = None
while True:
    now = hashlib.sha256(data).hexdigest()
    if now != last:
        say("seen", now)
    last = now
    time.sleep(0.02)
"""


class Sharing:
    """A worker of two processes that share a file of 48 MiB; one changes a byte in each twentieth page of it when it is told to."""

    def __init__(self, bench: Bench, program: str = SHARES) -> None:
        self.bench = bench
        bench.python(program)
        bench.until_output("seen")

    @property
    def sums(self) -> list[str]:
        return [line.split()[1] for line in self.bench.lines() if line.startswith("sum")]

    def change(self) -> None:
        count = len(self.sums)
        *_, child = sorted(self.bench.container.pids())
        os.kill(child, 10)
        self.bench.until(lambda: len(self.sums) > count, "change its memory")
        self.is_right()

    def is_right(self) -> None:
        """The other process sees the same."""
        self.bench.until_output(f"seen {self.sums[-1]}")


@pytest.mark.parametrize("hold", [True, False])
def test_a_worker_that_shares_memory_uploads_what_changed_of_it_before_and_after_a_move(
    bench: Bench, hold: bool
) -> None:
    sharing = Sharing(bench)
    bench.saver.warm_now()
    sharing.change()
    assert bench.save(hold=hold).bytes_uploaded < 6 * MIB
    bench.restore()
    sharing.change()
    bench.saver.warm_now()
    sharing.change()
    assert bench.save(hold=True).bytes_uploaded < 6 * MIB
    bench.restore()
    sharing.change()


def test_no_room_on_the_disk_is_needed_for_what_is_shared_and_no_copy_made(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    sharing = Sharing(bench)
    bench.saver.warm_now()
    monkeypatch.setattr(base_keeper, "free_space", lambda _: 90 * MIB)  # of which 64 are never used
    seen: list[int] = []
    original = layer.finish

    def finished(*values: Any, **named: Any) -> layer.Pending:
        pending = original(*values, **named)
        seen.append(pending.bytes_staged)
        return pending

    monkeypatch.setattr(layer, "finish", finished)
    saved = bench.save(hold=True)
    assert max(seen) < MIB
    assert bench.saver._base.size > 48 * MIB
    assert saved.bytes_uploaded < 6 * MIB
    bench.restore()
    sharing.is_right()
    sharing.change()


ANONYMOUS = SHARES.replace(
    "if os.fork() == 0:",
    "more = mmap.mmap(-1, 32 << 20)\nmore.write(os.urandom(32 << 20))\nif os.fork() == 0:",
)


def test_room_is_needed_for_what_is_shared_without_a_name_also_after_a_move(bench: Bench) -> None:
    """CRIU writes that. What a restore wrote into /dev/shm is charged to the agent, and is memory of the worker all the same."""
    sharing = Sharing(bench, ANONYMOUS)
    bench.saver.warm_now()
    for _ in range(2):
        assert 32 * MIB <= bench.saver._written(hold=True) < 36 * MIB
        assert 80 * MIB <= sum(bench.saver._sizes()) < 140 * MIB
        saved = bench.save(hold=True)
        assert 32 * MIB <= saved.manifest.bytes_image < 80 * MIB, "without what is in files"
        bench.restore()
        sharing.change()
        bench.saver.warm_now()


def test_a_last_checkpoint_of_shared_memory_ends_at_its_deadline(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is in /dev/shm counts in what is foretold."""
    sharing = Sharing(bench)
    told: list[int] = []
    original = Saver._in_time

    def telling(saver: Saver, sources: Sequence[Source], *values: Any) -> Any:
        told.append(sum(x.space.size for x in sources))
        return original(saver, sources, *values)

    monkeypatch.setattr(Saver, "_in_time", telling)
    bench.saver.save("1-1", "notice", lambda _: None, hold=False, deadline=time.monotonic() + 600)
    with pytest.raises(TooLate):
        bench.saver.save("1-2", "notice", lambda _: None, hold=True, deadline=time.monotonic())
    taken = bench.saver.save("1-3", "notice", lambda _: None, hold=True, deadline=time.monotonic() + 600)
    assert told[-1] == sum(x.size for x in taken.manifest.memory) > 48 * MIB
    bench.restore(taken.manifest)
    sharing.change()


def test_a_restore_has_room_for_what_is_shared_beside_its_images(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    sharing = Sharing(bench)
    bench.save()
    asked: list[tuple[int, ...]] = []

    def need(*numbers: int) -> int:
        asked.append(numbers)
        return memory_need(*numbers)

    monkeypatch.setattr(restoring, "memory_need", need)
    bench.restore()
    assert bench.manifest is not None
    ((_, processes, beside, _),) = asked
    assert (processes, beside) == (len(bench.manifest.image_memory), 48 * MIB)
    sharing.change()


def test_a_first_checkpoint_without_a_base_has_all_of_it(bench: Bench) -> None:
    sharing = Sharing(bench)
    saved = bench.save()
    (stored,) = saved.manifest.shm_memory
    assert (stored.size, stored.deltas) == (48 * MIB, ())
    assert not list(read_index(saved.manifest.shm, bench.chunks).chunk_keys())
    assert {key for group in stored.groups for key in [group.key]} <= saved.keys
    sharing.change()
    assert bench.save().bytes_uploaded < 6 * MIB
    bench.restore()
    sharing.change()


DELETED = """
import hashlib, os, signal, sys
def say(*words):
    os.write(1, (" ".join(map(str, words)) + "\\n").encode())  # a line at once
signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGUSR1, signal.SIGUSR2})
file = open(sys.argv[1] + "/gone", "wb+", buffering=0)
size = (24 << 20) + 5
file.write(os.urandom(size))
os.unlink(file.name)
os.utime(file.fileno(), ns=(10**18 + 1, 10**18 + 1))
def tell():
    content = os.pread(file.fileno(), size + 1, 0)
    say("sum", hashlib.sha256(content).hexdigest(), len(content))
tell()
while True:
    if signal.sigwait({signal.SIGUSR1, signal.SIGUSR2}) == signal.SIGUSR1:
        for at in range(0, size, 20 * 4096):
            os.pwrite(file.fileno(), b"?" * 7, at)
        os.utime(file.fileno(), ns=(2 * 10**18 - 1, 2 * 10**18 - 1))
    tell()
"""


@pytest.mark.parametrize("folder", ["/dev/shm", "/tmp"])
def test_a_deleted_file_that_is_open_is_told_against_the_base_as_well(bench: Bench, folder: str) -> None:
    """As PyTorch's shared tensors are. CRIU has it among its images: others come before it, and its times, in which the numbers have more digits, do."""

    def sums() -> list[str]:
        return [line for line in bench.lines() if line.startswith("sum")]

    def tells(signal: int) -> str:
        count = len(sums())
        os.kill(max(bench.container.pids()), signal)
        bench.until(lambda: len(sums()) > count, "tell its content")
        return sums()[-1]

    bench.python(DELETED, folder)
    bench.until_output("sum")
    first = bench.save()
    assert first.bytes_uploaded > 24 * MIB
    (image,) = (x for x in first.manifest.images if x not in first.manifest.packed_images)
    assert image.size >= (24 << 20) + 5
    changed = tells(10)
    for _ in range(2):
        saved = bench.save(hold=True)
        if folder == "/dev/shm":  # on a disk CRIU may write it in pieces, as it lies there
            assert saved.bytes_uploaded < 6 * MIB
        bench.restore()
        assert tells(12) == changed
        bench.saver.warm_now()


def test_a_tmpfs_that_is_too_small_for_it_is_told(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    sharing = Sharing(bench)
    bench.save()
    with monkeypatch.context() as patched:
        patched.setattr("savedworker.checkpoint.container._shm_size", lambda: 16 * MIB)
        with pytest.raises(Fatal, match=r"/dev/shm cannot be written: No space left"):
            bench.restore()
    bench.restore()
    sharing.change()


def test_a_source_says_what_it_is(shm: Tmpfs) -> None:
    (shm.root / "file").write_bytes(noise(1, WINDOW + 5))
    (source,) = found(shm)
    assert isinstance(source, ByOffset)
    assert (source.space.pages, source.space.process, source.space.size) == (None, None, WINDOW + PAGE)
    assert [x.number for x in source.space.windows] == [0, 1]
    read = blank()
    read[:] = ~np.uint64(0)
    source.read(source.space.windows[1], read)
    assert read.tobytes()[:PAGE] == noise(1, WINDOW + 5)[WINDOW:] + bytes(PAGE - 5)
