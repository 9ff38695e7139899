"""A worker on a bench: container, checkpoint and restore driven directly, without agent, shim, fleet or record."""

from __future__ import annotations

import itertools
import os
import subprocess
import textwrap
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from savedworker.checkpoint.container import Container, first_runtime, unmount_below
from savedworker.checkpoint.mountinfo import mounts_below
from savedworker.checkpoint.restore import Came, restore
from savedworker.checkpoint.save import Saved, Saver
from savedworker.checkpoint.tools import find_tools
from savedworker.model.errors import Fatal
from savedworker.model.manifest import Manifest, StreamPosition
from savedworker.model.spec import WorkerSpec
from savedworker.store.backend import open_store
from savedworker.store.chunks import ChunkStore

PYTHON = "/usr/bin/python3"
_count = itertools.count(1)


class Output:
    """What the worker wrote on one instance: a pipe and the thread that empties it, as the shim does."""

    def __init__(self) -> None:
        self.read_end, self.write_end = os.pipe2(os.O_CLOEXEC)
        self.data = b""
        self._thread = threading.Thread(target=self._read, daemon=True)
        self._thread.start()

    def _read(self) -> None:
        while part := os.read(self.read_end, 1 << 16):
            self.data += part

    def close(self) -> None:
        os.close(self.write_end)
        self._thread.join(timeout=10)
        os.close(self.read_end)


class Bench:
    """One worker that can be checkpointed and moved between homes of this machine. Uses the host's network by default."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._number = next(_count)
        self.chunks = ChunkStore(open_store(f"file://{folder}/store"), "bench")
        self.outputs: list[Output] = []
        self.homes = 0
        self.taken = 0
        self.container: Container
        self.saver: Saver
        self.manifest: Manifest | None = None

    def _container(self, spec: WorkerSpec, runtime: Any) -> Container:
        self.homes += 1
        home = self.folder / f"home-{self.homes}"
        cgroup = f"/sw-bench-{os.getpid()}-{self._number}-{self.homes}"
        return Container(spec, runtime, find_tools(), home, cgroup, Path("/"))

    def start(self, *command: str, **fields: Any) -> None:
        """Start ``command`` as a new worker."""
        fields.setdefault("network", "host")
        spec = WorkerSpec(id="bench", command=command, **fields)
        self.container = self._container(spec, first_runtime(spec))
        self.container.prepare()
        self._launch(self.container.start_command())
        self.saver = Saver(self.container, self.chunks, StreamPosition)

    def python(self, program: str, *args: str, interpreter: str = PYTHON, **fields: Any) -> None:
        """Start a Python program given as text."""
        self.start(interpreter, "-u", "-c", textwrap.dedent(program), *args, **fields)

    def save(self, hold: bool = False) -> Saved:
        """Take a checkpoint."""
        self.taken += 1

        def publish(manifest: Manifest) -> None:
            self.manifest = manifest

        return self.saver.save(f"1-{self.taken}", "requested", publish, hold=hold)

    def restore(
        self, manifest: Manifest | None = None, launch: Callable[[list[str]], None] | None = None
    ) -> Came:
        """Restore the last (or the given) checkpoint into a new home. What ran before is gone first."""
        manifest = manifest or self.manifest
        assert manifest is not None
        spec = self.container.spec
        self._end()
        self.container = self._container(spec, manifest.runtime)
        self.saver = Saver(self.container, self.chunks, StreamPosition)
        keep = self.saver.keep(manifest.memory)
        came = restore(self.container, manifest, self.chunks, launch or self._launch, 1, keep)
        self.saver.start_from(came.snapshot, came.shm, manifest.memory)
        return came

    def _end(self) -> None:
        """As an agent ends a worker."""
        if hasattr(self, "saver"):
            self.saver.stop_warming()
        self.container.teardown()

    def _launch(self, argv: list[str]) -> None:
        output = Output()
        self.outputs.append(output)
        done = subprocess.run(
            argv,
            stdin=subprocess.DEVNULL,
            stdout=output.write_end,
            stderr=output.write_end,
            env=self.container.environment(),
            timeout=120,
        )
        if done.returncode:
            raise Fatal(f"runc ended with status {done.returncode}: {output.data[-500:]!r}")

    @property
    def text(self) -> str:
        """What the worker wrote, on all instances."""
        return b"".join(output.data for output in self.outputs).decode(errors="replace")

    def until(self, condition: Callable[[], object], what: str, seconds: float = 30.0) -> None:
        """Wait until ``condition`` holds; fail saying ``what`` did not happen."""
        until = time.monotonic() + seconds
        while not condition():
            if time.monotonic() > until:
                raise AssertionError(f"it did not {what} within {seconds:.0f} s; output: {self.text[-1500:]}")
            time.sleep(0.02)

    def until_output(self, text: str, seconds: float = 30.0) -> None:
        self.until(lambda: text in self.text, f"write {text!r}", seconds)

    def lines(self) -> list[str]:
        return self.text.splitlines()

    def writes_on(self, seconds: float = 30.0) -> None:
        """Wait until the worker has written something more: it runs."""
        before = len(self.text)
        self.until(lambda: len(self.text) > before, "go on writing", seconds)

    def close(self) -> None:
        """Kill and remove everything. Nothing is ever deleted through a mount: it could be a cgroup hierarchy."""
        if hasattr(self, "container"):
            self._end()
        unmount_below(self.folder)
        assert mounts_below(self.folder) == []
        for output in self.outputs:
            output.close()
