"""One truth worker and all that surrounds it: store, fleet, controller, tracker, ledger, crash points, CPU samples."""

from __future__ import annotations

import contextlib
import os
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from savedworker.checkpoint.cgroups import Cgroup
from savedworker.crashpoints import POINTS, VARIABLE
from savedworker.fleet.local import HostInfo
from savedworker.model.decisions import settled
from savedworker.model.errors import SavedWorkerError
from savedworker.model.record import WorkerRecord
from savedworker.model.spec import Volume
from tests.faults.proxy import Proxy
from tests.faults.tracker import Tracker
from tests.runtime.world import PYTHON, World

TERM = 4.0
"""Lease term in seconds: short, so that schedules are."""
INTERVAL = 1.5
SAMPLE_EVERY = 0.03
FREE = float("inf")
"""For ``tracker.hold_at``: no step is held."""


class Bed(World):
    """The environment must name ``folder/crash`` and ``folder/local`` before the first launch: see ``environment``."""

    def __init__(self, folder: Path, seed: int, store: str | None = None) -> None:
        for name in ("crash/seen", "local", "ledger"):
            (folder / name).mkdir(parents=True, exist_ok=True)
        super().__init__(folder, store)
        self.seed = seed
        self.steps = 0
        self.megabytes = 2.0
        self.tracker = Tracker()
        self.worker = ""
        self.latest: WorkerRecord | None = None
        self.hosts: dict[str, HostInfo] = {}
        self.usage: dict[str, list[tuple[float, float]]] = {}
        """Of each launch: the CPU seconds of its worker, and by the monotonic clock when they were last seen to be no more."""
        self.notes: list[str] = []
        self.stray = ""
        self.proxy: Proxy | None = None
        self.began = time.monotonic()
        self._watch = threading.Thread(target=self._sample, daemon=True)

    # Beginning and end ----------------------------------------------------------------------------------------

    def begin(
        self, steps: int = 150, pause: float = 0.03, interval: float | None = INTERVAL, **fields: Any
    ) -> str:
        """Submit the workload."""
        self.steps = steps
        truth = Path(__file__).with_name("truth.py")
        fields.setdefault("lease_term", TERM)
        fields.setdefault("volumes", (Volume(source=str(self.folder / "ledger"), target="/ledger"),))
        words = [
            self.tracker.address,
            self.seed,
            steps,
            pause,
            "/tmp/truth",
            "/ledger/ledger",
            self.megabytes,
        ]
        self.worker = self.submit(PYTHON, str(truth), *map(str, words), interval=interval, **fields)
        self._watch.start()
        return self.worker

    def finish(self, seconds: float = 180.0) -> WorkerRecord:
        """Wait until the worker has ended and nothing of it runs."""
        return self.until_settled(self.worker, seconds)

    def close(self) -> None:
        super().close()
        self.tracker.close()
        if self._watch.is_alive():
            self._watch.join(timeout=10)

    def note(self, text: str) -> None:
        """A line for the story of this run."""
        self.notes.append(
            f"{time.monotonic() - self.began:7.2f} s, {len(self.tracker.seen):4} arrivals: {text}"
        )

    # Crash points ---------------------------------------------------------------------------------------------

    @property
    def crashes(self) -> Path:
        return self.folder / "crash"

    def arm(self, point: str, action: str = "kill", host: HostInfo | None = None, nth: int = 1) -> None:
        """From now on the next process (of ``host``) that gets to ``point`` is stopped there."""
        assert point in POINTS, point
        where = f" in {host.cgroup}/" if host else ""
        (self.crashes / f"{point}.hit").unlink(missing_ok=True)
        scratch = self.crashes / f".{point}"
        scratch.write_text(f"@{nth}={action}{where}")
        scratch.rename(self.crashes / point)

    def was_hit(self, point: str) -> bool:
        return (self.crashes / f"{point}.hit").exists()

    def let_go(self, point: str) -> None:
        """End the hang of the thread that was hit there."""
        (self.crashes / f"{point}.hit").unlink()

    def disarm(self) -> None:
        for file in self.crashes.iterdir():
            if file.name in POINTS:
                file.unlink(missing_ok=True)

    @property
    def reached(self) -> set[str]:
        """Every crash point that any process got to."""
        return set(os.listdir(self.crashes / "seen"))

    # Looking --------------------------------------------------------------------------------------------------

    def wait(self, condition: Callable[[], object], seconds: float) -> bool:
        """True as soon as ``condition`` holds, False when it does not in time or the worker has ended."""
        until = time.monotonic() + seconds
        while not condition():
            if time.monotonic() > until or (self.latest is not None and settled(self.latest)):
                return bool(condition())
            time.sleep(0.02)
        return True

    def holder(self) -> HostInfo | None:
        """The host on which the worker holds its lease, if it lives."""
        record = self.record(self.worker)
        if record.lease is None or record.lease.released:
            return None
        return self.find(record.lease.launch)

    def find(self, launch: str) -> HostInfo | None:
        try:
            found = self.fleet.host(launch)
        except SavedWorkerError:
            return None
        self.hosts[launch] = found
        return found

    @staticmethod
    def shim_pid(host: HostInfo) -> int | None:
        try:
            return int((host.scratch / "agent/shim/shim.pid").read_text())
        except (OSError, ValueError):
            return None

    # In the background ----------------------------------------------------------------------------------------

    def _reconcile(self) -> None:
        while not self._stop.wait(0.2):
            for worker in list(self.workers):
                with self._round, contextlib.suppress(SavedWorkerError):
                    if worker in self._paused:
                        self.latest = self.record(worker)
                    else:
                        self.latest = self.client.reconcile(worker)

    def _sample(self) -> None:
        """Cumulative CPU seconds of every worker's cgroup, again and again."""
        while not self._stop.is_set():
            record = self.latest
            for launch in record.launches if record else ():
                if launch.id not in self.hosts:
                    self.find(launch.id)
                host = self.hosts.get(launch.id)
                if host is not None:
                    at = time.monotonic()
                    used = Cgroup(f"{host.cgroup}/worker").cpu_seconds()
                    samples = self.usage.setdefault(launch.id, [])
                    if samples and samples[-1][1] == used:
                        samples.pop()
                    if used:
                        samples.append((at, used))
            time.sleep(SAMPLE_EVERY)


@contextlib.contextmanager
def environment(folder: Path, **more: str) -> Any:
    """What hosts inherit while a Bed in ``folder`` is used."""
    values = {"SAVEDWORKER_LOCAL_DIR": str(folder / "local"), VARIABLE: str(folder / "crash"), **more}
    before = {name: os.environ.get(name) for name in values}
    os.environ.update(values)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value


def this_python() -> str:
    return sys.executable
