"""The test bed: one store, one local fleet, and helpers that read like what a user does."""

from __future__ import annotations

import contextlib
import sys
import textwrap
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from savedworker.controller.client import Client
from savedworker.fleet.local import HostInfo, LocalFleet
from savedworker.model import defaults
from savedworker.model.decisions import settled
from savedworker.model.errors import SavedWorkerError
from savedworker.model.record import State, WorkerRecord
from savedworker.model.report import Report
from savedworker.model.spec import CheckpointPolicy, WorkerSpec
from savedworker.store import logs

PYTHON = "/usr/bin/python3"
"""An interpreter of the image ``host`` that is not ours, for programs that need only the standard library."""
VENV_PYTHON = sys.executable
BRIDGE = "198.18.0.1"
"""An address outside every worker and every host: where a test's own servers listen."""


class World:
    """One store and one fleet. ``reconcile`` runs in the background for every worker that was submitted."""

    def __init__(self, folder: Path, store: str | None = None) -> None:
        self.folder = folder
        self.fleet = LocalFleet()
        self.client = Client(store or f"file://{folder}/store", fleets=lambda _name: self.fleet)
        self.workers: list[str] = []
        self._paused: set[str] = set()
        self._round = threading.Lock()
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._reconcile, daemon=True)
        self._thread.start()
        self._count = 0

    # What a user does -----------------------------------------------------------------------------------------

    def submit(self, *command: str, interval: float | None = None, **fields: Any) -> str:
        """Submit a worker that runs ``command``; no periodic checkpoints unless ``interval`` (seconds) is given."""
        self._count += 1
        policy = fields.pop("checkpoint", CheckpointPolicy(interval=interval))
        fields.setdefault(
            "id", f"t{self._count}-{self.folder.name[-24:].lower().replace('_', '-').strip('-')}"
        )
        spec = WorkerSpec(
            command=command,
            checkpoint=policy,
            lease_term=fields.pop("lease_term", defaults.LEASE_TERM_LOCAL),
            **fields,
        )
        self.client.submit(spec)
        self.workers.append(spec.id)
        return spec.id

    def python(self, program: str, *args: str, interpreter: str = PYTHON, **fields: Any) -> str:
        """Submit a Python program given as text."""
        return self.submit(interpreter, "-u", "-c", textwrap.dedent(program), *args, **fields)

    def preempt(self, worker: str, notice: float | None) -> None:
        """Reclaim the worker's instance, and wait until the worker runs on the next one (or has ended)."""
        before = len(self.record(worker).incarnations)
        self.client.preempt(worker, notice)
        self.until(
            worker,
            lambda r: (
                r.state.terminal
                or (len(r.incarnations) > before and r.state in (State.RUNNING, State.CHECKPOINTING))
            ),
            f"run on after {'a notice' if notice is not None else 'no notice'}",
        )

    def checkpoint(self, worker: str) -> str:
        """Take a checkpoint now; its number."""
        return self.client.checkpoint(worker, timeout=120)

    # What a user sees -----------------------------------------------------------------------------------------

    def record(self, worker: str) -> WorkerRecord:
        return self.client.record(worker)

    def report(self, worker: str) -> Report:
        return self.client.report(worker)

    def output(self, worker: str, stream: str = "stdout", marks: bool = False) -> str:
        """All lines of a stream so far; with ``marks`` the marks of discarded tails in between."""
        parts = []
        for piece in self.client.logs(worker, stream):
            if isinstance(piece, logs.Text):
                parts.append(piece.data.decode(errors="replace"))
            elif marks:
                parts.append(f"\n{logs.render_mark(piece)}\n")
        return "".join(parts)

    def until(
        self, worker: str, condition: Callable[[WorkerRecord], object], what: str, seconds: float = 120.0
    ) -> WorkerRecord:
        """Wait until ``condition`` holds for the record; fail saying ``what`` did not happen and what is known."""
        until = time.monotonic() + seconds
        while True:
            record = self.record(worker)
            if condition(record):
                return record
            if time.monotonic() > until:
                raise AssertionError(f"{worker} did not {what} within {seconds:.0f} s\n{self.story(worker)}")
            time.sleep(0.1)

    def until_running(self, worker: str, seconds: float = 120.0) -> WorkerRecord:
        return self.until(worker, lambda r: r.state is State.RUNNING or r.state.terminal, "run", seconds)

    def until_output(self, worker: str, text: str, seconds: float = 120.0, stream: str = "stdout") -> str:
        """Wait until the stream contains ``text``."""
        until = time.monotonic() + seconds
        while True:
            seen = self.output(worker, stream)
            if text in seen:
                return seen
            record = self.record(worker)
            if time.monotonic() > until or (settled(record) and text not in self.output(worker, stream)):
                raise AssertionError(
                    f"{worker} did not write {text!r}\n{seen[-1500:]}\n{self.output(worker, 'stderr')[-1500:]}\n{self.story(worker)}"
                )
            time.sleep(0.1)

    def until_settled(self, worker: str, seconds: float = 180.0) -> WorkerRecord:
        """Wait until the worker has ended and nothing of it runs any more."""
        return self.until(worker, settled, "end", seconds)

    def story(self, worker: str) -> str:
        """Everything that is known, for the message of a failing test."""
        report = self.report(worker)
        lines = [f"{e.at:%H:%M:%S.%f} {e.event}: {e.detail}" for e in report.timeline]
        for launch in self.record(worker).launches:
            try:
                log = self.host_of_launch(launch.id).directory / "daemon.log"
                lines += [f"-- {launch.id}", *log.read_text(errors="replace").splitlines()[-15:]]
            except (SavedWorkerError, OSError):
                continue
        return "\n".join([f"{worker}: {report.state} {report.reason} {report.detail}", *lines])

    # What only a test looks at --------------------------------------------------------------------------------

    def host(self, worker: str) -> HostInfo:
        """The host on which the worker holds its lease."""
        lease = self.record(worker).lease
        assert lease is not None
        return self.fleet.host(lease.launch)

    def host_of_launch(self, launch: str) -> HostInfo:
        return self.fleet.host(launch)

    def layer(self, worker: str) -> Path:
        """The writable layer of the running worker, seen from outside."""
        return self.host(worker).scratch / "agent" / "worker" / "upper"

    def pids(self, worker: str) -> list[int]:
        """Outer pids of the worker's processes."""
        from savedworker.checkpoint.cgroups import Cgroup

        return Cgroup(f"{self.host(worker).cgroup}/worker").pids()

    def pause_controller(self, worker: str) -> None:
        """Stop reconciling this worker; a round that is under way is waited for."""
        with self._round:
            self._paused.add(worker)

    def resume_controller(self, worker: str) -> None:
        self._paused.discard(worker)

    def close(self) -> None:
        """Cancel and end everything that was started."""
        self._paused.clear()
        for worker in self.workers:
            try:
                self.client.cancel(worker, "the test is over")
            except SavedWorkerError:
                continue
        self._stop.set()
        self._thread.join(timeout=60)
        for worker in self.workers:
            try:
                for launch in self.record(worker).launches:
                    self.fleet.terminate(launch.id)
            except SavedWorkerError:
                continue

    def _reconcile(self) -> None:
        while not self._stop.wait(0.2):
            for worker in list(self.workers):
                with self._round, contextlib.suppress(SavedWorkerError):
                    if worker not in self._paused:
                        self.client.reconcile(worker)
