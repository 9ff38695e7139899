"""Local fleets for tests: each with a state directory of its own, and nothing left of its hosts afterwards."""

from __future__ import annotations

import os
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest

from savedworker.fleet.base import LaunchRequest
from savedworker.fleet.local import HostInfo, LocalFleet, network
from savedworker.fleet.local.cgroup import HostCgroup
from savedworker.fleet.local.host import HostDir, HostRecord
from savedworker.model.errors import SavedWorkerError
from savedworker.model.spec import WorkerSpec

SLEEPER = ("/bin/sh", "-c", "exec sleep 600")


def request_for(launch: str, avoid: tuple[str, ...] = (), store: str = "file:///nowhere") -> LaunchRequest:
    """A request that the fleet can answer; what the worker would be does not matter here."""
    return LaunchRequest(launch, "w", store, WorkerSpec(id="w", command=("true",)), avoid)


def wait(condition: Callable[[], object], seconds: float = 60.0) -> bool:
    """Whether ``condition`` came true in time."""
    end = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > end:
            return False
        time.sleep(0.02)
    return True


def leftovers(record: HostRecord | HostInfo, directory: Path) -> list[str]:
    """Whatever there still is of a host, in words."""
    short = record.instance.removeprefix("host-")
    found = []
    if Path(f"/run/netns/sw-{short}").exists():
        found.append("network namespace")
    if Path(f"/sys/class/net/swv{short}").exists():
        found.append("veth")
    if HostCgroup(record.cgroup).exists():
        found.append(f"cgroup with {HostCgroup(record.cgroup).processes()}")
    if (network.ADDRESSES / record.address).exists():
        found.append("address")
    if (directory / "scratch").exists():
        found.append("scratch")
    for pid in filter(str.isdigit, os.listdir("/proc")):
        try:
            if f"{directory}/scratch/" in Path(f"/proc/{pid}/mountinfo").read_text():
                found.append(f"mount seen by pid {pid}")
        except OSError:
            continue
    return found


@dataclass
class Fleets:
    """Makes fleets on one state directory."""

    directory: Path

    def __call__(
        self,
        agent: Sequence[str] = SLEEPER,
        capacity: int | None = None,
        restart_pause: float = 0.05,
        restart_limit: int = 20,
    ) -> LocalFleet:
        return LocalFleet(
            self.directory,
            agent=agent,
            capacity=capacity,
            restart_pause=restart_pause,
            restart_limit=restart_limit,
        )

    def records(self) -> list[tuple[HostRecord, Path]]:
        """All hosts that are written down."""
        found = []
        for path in (self.directory / "hosts").glob("*"):
            record = HostDir(path).record()
            if record is not None:
                found.append((record, path))
        return found


@pytest.fixture
def fleets() -> Iterator[Fleets]:
    # Not below the test's long name: the path is deep enough as it is, and root's only.
    directory = Path(tempfile.mkdtemp(prefix="sw-fleet-"))
    fleets = Fleets(directory)
    fleet = fleets()
    problems: list[str] = []
    try:
        yield fleets
    finally:
        for record, _ in fleets.records():
            try:
                fleet.terminate(record.launch)
            except SavedWorkerError as error:
                problems.append(str(error))
        for record, path in fleets.records():
            end = time.monotonic() + 15
            while (left := leftovers(record, path)) and time.monotonic() < end:
                time.sleep(0.05)  # the daemon's own mount namespace goes with its last instruction
            problems += [f"{record.instance}: {what}" for what in left]
        shutil.rmtree(directory, ignore_errors=True)
    assert problems == []
