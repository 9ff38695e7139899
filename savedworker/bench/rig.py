"""A worker driven without agent and record: started, saved and restored by savedworker.checkpoint, or by plain runc."""

from __future__ import annotations

import contextlib
import itertools
import os
import secrets
import shutil
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from savedworker.checkpoint import hooks, layer, save
from savedworker.checkpoint.cgroups import Cgroup
from savedworker.checkpoint.container import Container, Home, first_runtime
from savedworker.checkpoint.criu_image import fields
from savedworker.checkpoint.restore import restore
from savedworker.checkpoint.save import Saved, Saver
from savedworker.checkpoint.tools import find_tools
from savedworker.model.errors import Fatal
from savedworker.model.events import Noted
from savedworker.model.manifest import Manifest, StreamPosition
from savedworker.model.record import State, WorkerRecord
from savedworker.model.spec import WorkerSpec
from savedworker.store.backend import open_store
from savedworker.store.chunks import ChunkStore
from savedworker.store.sealing import PLAIN, Sealer
from savedworker.store.worker import WorkerStore

PROGRAM = """
import sys, time
import numpy as np
size = int(float(sys.argv[1]) * 2**30)
array = np.random.default_rng(1).integers(0, 2**64, size // 8, dtype=np.uint64)
print("ready", flush=True)
last = time.monotonic()
while True:
    time.sleep(0.001)
    now = time.monotonic()
    if now - last > 0.02:
        print("gap", now - last, flush=True)
    last = now
"""
"""Incompressible memory; tells every pause of more than 20 ms as it sees it (the clock is the container's, and goes on)."""

SCATTER = """
import sys, signal
signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGUSR1})  # for the threads of numpy, too
import numpy as np
size = int(float(sys.argv[1]) * 2**30)
array = np.random.default_rng(1).integers(0, 2**64, size // 8, dtype=np.uint64)
chance = np.random.default_rng(2)
pages = size // 4096
print("ready", flush=True)
while True:
    signal.sigwait({signal.SIGUSR1})
    array[chance.choice(pages, pages // 20, replace=False) * 512] += np.uint64(1)
    print("changed", flush=True)
"""
"""The same; on SIGUSR1 it changes one word in each of 5% of its pages, scattered."""

SHARED = """
import sys, signal
signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGUSR1})  # for the threads of numpy, too
import numpy as np
size = int(float(sys.argv[1]) * 2**30)
array = np.memmap("/dev/shm/shared", dtype=np.uint64, mode="w+", shape=(size // 8,))
chance = np.random.default_rng(1)
step = 2 << 20
for at in range(0, len(array), step):
    array[at : at + step] = chance.integers(0, 2**64, len(array[at : at + step]), dtype=np.uint64)
pages = size // 4096
print("ready", flush=True)
while True:
    signal.sigwait({signal.SIGUSR1})
    array[chance.choice(pages, pages // 20, replace=False) * 512] += np.uint64(1)
    print("changed", flush=True)
"""
"""As SCATTER, with its memory in a file of /dev/shm."""

CHANGES = """
import os, random, signal, sys
signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGUSR1})
kind, size = sys.argv[1], int(float(sys.argv[2]) * 2**30)
chance = random.Random(1)
PAGE, STEP = 4096, 16 << 20
if kind == "heap":
    data = []
    def more(count):
        for _ in range(count):
            number = chance.getrandbits(60)
            data.append({"id": number, "name": "item %d" % number, "tags": ["a", number % 7]})
    count = size // 600
    more(count)
else:
    data = bytearray()
    while len(data) < size:
        data += os.urandom(min(STEP, size - len(data)))
    more_data = []
print("ready", flush=True)
while True:
    signal.sigwait({signal.SIGUSR1})
    if kind == "heap":
        more(count // 20)
    elif kind == "scattered":
        for page in chance.sample(range(size // PAGE), size // PAGE // 20):
            data[page * PAGE] ^= 255
    elif kind == "incompressible":
        for at in range(0, size, STEP):
            data[at : at + STEP] = os.urandom(min(STEP, size - at))
    elif kind == "contiguous":
        part = size // 20 // PAGE * PAGE
        at = chance.randrange((size - part) // PAGE) * PAGE
        data[at : at + part] = os.urandom(part)
    elif kind == "growth":
        more_data.append(os.urandom(size // 20))
    print("changed", flush=True)
"""
"""Standard library only, so that it runs in any image. ``kind`` says what 5% of its memory do at SIGUSR1 (``incompressible``: all of it)."""

FILES = """
import os, sys, time
for i in range(int(sys.argv[1])):
    folder = f"/srv/{i // 100}"
    os.makedirs(folder, exist_ok=True)
    with open(f"{folder}/{i}", "wb") as file:
        file.write(os.urandom(4000))
print("ready", flush=True)
time.sleep(1e6)
"""
"""So many files of 4000 bytes each."""

_numbers = itertools.count(1)


@dataclass
class Rig:
    """One worker at a time below ``folder``. ``close`` takes everything away."""

    folder: Path
    interpreter: str
    url: str | None = None
    """The store; without one, a directory below ``folder``."""
    sealer: Sealer = PLAIN
    output: bytes = b""
    container: Container = field(init=False)
    _homes: int = 0
    _worker: WorkerStore | None = None
    _threads: list[threading.Thread] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._name = f"swbench-{os.getpid()}-{next(_numbers)}"
        self._id = f"bench-{secrets.token_hex(6)}"
        self.chunks = self.fresh_chunks()

    def fresh_chunks(self) -> ChunkStore:
        """The worker as if nothing of it had been stored yet, and its chunks, with the product's own write path (for a directory, fsync included)."""
        self._forget()
        store = open_store(self.url or f"file://{self.folder}/store")
        store.ensure()
        self._worker = WorkerStore(store, self._id, self.sealer)
        # One that has ended: no controller of this store launches it, and what a bench that is killed leaves is collected.
        now = datetime.now(UTC)
        WorkerStore(store, self._id).create_spec(WorkerSpec(id=self._id, command=("savedworker", "bench")))
        self._worker.create_record(
            WorkerRecord(id=self._id, created_at=now, ended_at=now, state=State.CANCELLED)
        )
        self.chunks = self._worker.chunks
        return self.chunks

    def _forget(self) -> None:
        if self._worker is not None:
            store = self._worker.store
            store.delete([x.key for x in store.list(self._worker.prefix)])

    def _commit(self, manifest: Manifest) -> None:
        """As an agent does it: the manifest, and then the record and its history say so."""
        assert self._worker is not None
        self._worker.publish_manifest(manifest)
        self._worker.record_event(Noted(at=datetime.now(UTC), event="bench", detail=manifest.number))

    def start(self, program: str, *args: str) -> Saver:
        """Start a Python program and wait until it is ready."""
        spec = WorkerSpec(id=self._id, command=(self.interpreter, "-u", "-c", program, *args))
        self._new_container(spec, first_runtime(spec))
        self.container.prepare()
        self.launch(self.container.start_command())
        self.until(b"ready", 1)
        return Saver(self.container, self.chunks, StreamPosition)

    def _new_container(self, spec: WorkerSpec, runtime: Any) -> None:
        self._homes += 1
        home = self.folder / f"home-{self._homes}"
        self.container = Container(
            spec, runtime, find_tools(), home, f"/{self._name}/{self._homes}", Path("/")
        )

    def launch(self, argv: list[str]) -> None:
        """Run runc with a pipe for the worker's output."""
        read_end, write_end = os.pipe()
        thread = threading.Thread(target=self._read, args=(read_end,), daemon=True)
        thread.start()
        try:
            done = subprocess.run(
                argv,
                stdin=subprocess.DEVNULL,
                stdout=write_end,
                stderr=write_end,
                env=self.container.environment(),
                check=False,
            )
        finally:
            os.close(write_end)
        if done.returncode:
            raise Fatal(
                f"runc ended with {done.returncode}: {self.container.runc_words()} {self.output[-300:]!r}"
            )

    def _read(self, read_end: int) -> None:
        while data := os.read(read_end, 1 << 16):
            self.output += data
        os.close(read_end)

    def until(self, text: bytes, times: int, seconds: float = 120.0) -> None:
        """Wait until the worker has written ``text`` so often."""
        end = time.monotonic() + seconds
        while self.output.count(text) < times:
            if time.monotonic() > end:
                raise Fatal(f"the worker did not write {text!r}: {self.output[-300:]!r}")
            time.sleep(0.01)

    def longest_gap(self, action: Callable[[], Any]) -> tuple[float, Any]:
        """The longest pause that the worker itself saw around ``action``, and what that returned."""
        time.sleep(0.2)
        before = len(self.output)
        result = action()
        time.sleep(0.2)
        gaps = [
            float(line.split()[1])
            for line in self.output[before:].decode().splitlines()
            if line.startswith("gap ")
        ]
        return max(gaps, default=0.0), result

    def change(self, times: int) -> None:
        """Have CHANGES (or SCATTER) change its memory for the ``times``-th time."""
        for pid in self.container.pids():
            if pid != self.container.init_pid():
                os.kill(pid, signal.SIGUSR1)
        self.until(b"changed", times)

    def images(self) -> Path:
        """An empty folder for a plain dump."""
        folder = self.folder / "plain-images"
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(mode=0o700)
        os.sync()
        return folder

    def plain_checkpoint(self, folder: Path, keep_running: bool = True) -> float:
        """``runc checkpoint`` of this very container with the same CRIU options but no action script. Returns seconds."""
        self.container.home.criu_conf.write_text(
            f"{save.tcp_option(self.container)}\nskip-in-flight\nlink-remap\ncpu-cap\nghost-limit 2G\nnetwork-lock skip\n"
        )
        return self._timed(self.container.checkpoint_command(folder, keep_running))

    def plain_restore(self, folder: Path, upper: Path) -> float:
        """``runc restore`` of ``folder`` into a fresh container with a copy of the layer. Returns the seconds of runc alone."""
        spec, runtime = self.container.spec, self.container.runtime
        self.container.teardown()
        self._new_container(spec, runtime)

        def fill(home: Home) -> None:
            subprocess.run(["cp", "-a", f"{upper}/.", str(home.upper)], check=True)

        self.container.prepare(fill)
        self.container.home.criu_conf.write_text(
            f"{save.tcp_option(self.container)}\nnetwork-lock skip\ncpu-cap\n"
        )
        started = time.monotonic()
        self.launch(self.container.restore_command(folder))
        return time.monotonic() - started

    def restore(self, manifest: Manifest) -> tuple[float, float]:
        """The product's restore into a fresh container. Returns the seconds of all of it, and of runc alone."""
        spec = self.container.spec
        self.container.teardown()
        self._new_container(spec, manifest.runtime)
        alone = 0.0

        def launch(argv: list[str]) -> None:
            nonlocal alone
            began = time.monotonic()
            self.launch(argv)
            alone = time.monotonic() - began

        started = time.monotonic()
        keep = Saver(self.container, self.chunks, StreamPosition).keep(manifest.memory)
        restore(self.container, manifest, self.chunks, launch, self._homes, keep)
        whole = time.monotonic() - started
        keep.wait()  # so that it disturbs nothing that is measured next
        return whole, alone

    def save(self, saver: Saver, number: int, hold: bool = False) -> tuple[Saved, float, Manifest]:
        """The product's save. Returns its answer, the wall seconds and the manifest."""
        os.sync()
        started = time.monotonic()
        saved = saver.save(f"1-{number}", "requested", self._commit, hold=hold)
        return saved, time.monotonic() - started, saved.manifest

    def _timed(self, argv: list[str]) -> float:
        started = time.monotonic()
        done = subprocess.run(
            argv, stdin=subprocess.DEVNULL, capture_output=True, env=self.container.environment(), check=False
        )
        if done.returncode:
            raise Fatal(f"runc failed: {self.container.runc_words()}")
        return time.monotonic() - started

    def criu_frozen_seconds(self, folder: Path) -> float:
        """CRIU's own count of the last dump (``stats-dump``): from the first frozen process to the thaw."""
        return _dump_stats((folder / "stats-dump").read_bytes())["frozen_time"] / 1e6

    def criu_dump_phases(self, folder: Path) -> dict[str, float]:
        """Seconds that CRIU gives for the parts of the last dump."""
        return {
            name: value / 1e6 for name, value in _dump_stats((folder / "stats-dump").read_bytes()).items()
        }

    def close(self) -> None:
        """Kill and remove everything."""
        with contextlib.suppress(AttributeError):
            self.container.teardown()
        Cgroup(self._name).remove()
        self._forget()
        shutil.rmtree(self.folder, ignore_errors=True)


def forget(path: Path) -> None:
    """Put the files below ``path`` out of the page cache: what is read next is cold. Other files stay as they are."""
    for file in [path] if path.is_file() else path.rglob("*"):
        if file.is_file():
            fd = os.open(file, os.O_RDONLY)
            os.fsync(fd)
            os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
            os.close(fd)


def warm(path: Path) -> None:
    """Have the file ``path``, or the files below it, in the page cache."""
    for file in [path] if path.is_file() else path.rglob("*"):
        if file.is_file():
            with file.open("rb", buffering=0) as opened:
                while opened.read(8 << 20):
                    pass


@contextlib.contextmanager
def phases() -> Iterator[dict[str, float]]:
    """Seconds of the parts of ``Saver.save`` during the block, by name; a part within another counts in both."""
    spent: dict[str, float] = {}
    undo: list[Callable[[], None]] = []

    def time_it(owner: Any, name: str, label: str) -> None:
        original = getattr(owner, name)

        def timed(*values: Any, **named: Any) -> Any:
            started = time.monotonic()
            try:
                return original(*values, **named)
            finally:
                spent[label] = spent.get(label, 0.0) + time.monotonic() - started

        setattr(owner, name, timed)
        undo.append(lambda: setattr(owner, name, original))

    for owner, name, label in (
        (Saver, "_precopy", "before: precopy"),
        (save, "preflight", "before: preflight"),
        (Saver, "_dump", "dump, with all of the freeze"),
        (hooks, "_answer", "freeze: hook, from its connection on"),
        (Saver, "_cut", "freeze: cut"),
        (layer, "finish", "freeze: cut: files"),
        (save, "mapped_outside_layer", "mapped files' digests (before and in the cut)"),
        (Saver, "_store", "store (in the freeze with hold)"),
    ):
        if hasattr(owner, name):
            time_it(owner, name, label)
    try:
        yield spent
    finally:
        for action in undo:
            action()


def _dump_stats(data: bytes) -> dict[str, int]:
    """DumpStatsEntry of CRIU's stats.proto: 8 bytes of magic, 4 of length, then protobuf."""
    names = {
        1: "freezing_time",
        2: "frozen_time",
        3: "memdump_time",
        4: "memwrite_time",
        5: "pages_scanned",
        7: "pages_written",
    }
    (entry,) = (value for number, value, _ in fields(data[12:]) if number == 1 and isinstance(value, bytes))
    found = {number: value for number, value, _ in fields(entry) if isinstance(value, int)}
    return {name: found[key] for key, name in names.items() if key in found and name.endswith("_time")}
