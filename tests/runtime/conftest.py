"""Fixtures of the runtime tests."""

from __future__ import annotations

import os
import subprocess
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Protocol

import pytest

from tests.runtime.counter import Counter
from tests.runtime.world import World


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if "tests/runtime" in str(item.fspath):
            item.add_marker(pytest.mark.criu)


@pytest.fixture
def store_url() -> str | None:
    """Another store than a directory: overridden where a test wants one."""
    return None


@pytest.fixture
def world(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, store_url: str | None) -> Iterator[World]:
    """A fresh store and fleet; nothing of it is left afterwards, which is checked."""
    with tempfile.TemporaryDirectory(prefix="sw-", dir="/var/tmp") as local:
        monkeypatch.setenv("SAVEDWORKER_LOCAL_DIR", local)
        made = World(tmp_path, store_url)
        try:
            yield made
        finally:
            made.close()
        assert gone(local) == []


@pytest.fixture
def counter() -> Iterator[Counter]:
    """Counts what programs do, from outside."""
    made = Counter()
    yield made
    made.close()


class Pace(Protocol):
    """Sets how many seconds each chunk takes to the store, and each one from there and each container to be made (see slow_store)."""

    def __call__(self, to: float, back: float | None = None) -> None: ...


HELD = 100.0
"""A pace at which nothing goes on until the test sets another one."""


@pytest.fixture
def pace(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Pace:
    file = tmp_path / "pace"
    before = os.environ.get("PYTHONPATH", "")
    monkeypatch.setenv("PYTHONPATH", f"{Path(__file__).with_name('slow_store')}:{before}".rstrip(":"))
    monkeypatch.setenv("SAVEDWORKER_TEST_PACE", str(file))

    def set_pace(to: float, back: float | None = None) -> None:
        scratch = file.with_suffix(".new")
        scratch.write_text(f"{to} {to if back is None else back}")
        scratch.rename(file)

    return set_pace


def gone(folder: str, besides: str = "") -> list[str]:
    """Wait until nothing of the hosts below ``folder`` is left; what is, if it does not go. Lines with ``besides`` do not count.

    A host's daemon is the last of it to end, a moment after it says so.
    """
    until = time.monotonic() + 30
    while True:
        left = [x for x in leftovers(folder) if not besides or besides not in x]
        if not left or time.monotonic() > until:
            return left
        time.sleep(0.1)


def leftovers(folder: str) -> list[str]:
    """What hosts below ``folder`` left behind: mounts, and processes that name it."""
    found = [line for line in Path("/proc/self/mountinfo").read_text().splitlines() if folder in line]
    for pid in filter(str.isdigit, os.listdir("/proc")):
        try:
            command = Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
        except OSError:
            continue
        if folder in command and int(pid) != os.getpid():
            found.append(f"process {pid}: {command[:200]}")
    return found


def network_namespaces() -> set[str]:
    """Names of this project's network namespaces."""
    listed = subprocess.run(["ip", "netns", "list"], capture_output=True, text=True, check=True).stdout
    return {line.split()[0] for line in listed.splitlines() if line.startswith(("sw-", "swk-"))}
