"""pid 1 is the last guard: a worker whose shim is dead can be frozen by nobody, so it ends."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from savedworker.checkpoint.native import init_program


@pytest.fixture
def init(tmp_path: Path) -> Iterator[tuple[subprocess.Popen[bytes], Path]]:
    """Init as pid 1 of a namespace, with a command that runs on, and its status file."""
    status = tmp_path / "status"
    status.touch()
    command = ["unshare", "--pid", "--fork", "--kill-child", str(init_program()), str(status)]
    with subprocess.Popen([*command, "sleep", "1000"], stdout=subprocess.PIPE) as process:
        until = time.monotonic() + 30
        while "sleep" not in [name(pid) for pid in children(process.pid)]:
            assert time.monotonic() < until
            time.sleep(0.01)
        yield process, status
        process.kill()


def name(pid: int) -> str:
    return Path(f"/proc/{pid}/comm").read_text().strip()


def children(pid: int) -> Iterator[int]:
    """Every descendant."""
    for child in map(int, Path(f"/proc/{pid}/task/{pid}/children").read_text().split()):
        yield child
        yield from children(child)


def test_a_broken_stdout_ends_the_worker_without_a_report(init: tuple[subprocess.Popen[bytes], Path]) -> None:
    process, status = init
    below = list(children(process.pid))
    assert process.poll() is None
    assert process.stdout is not None
    process.stdout.close()
    assert process.wait(60) == 125
    assert [pid for pid in below if Path(f"/proc/{pid}").exists()] == []
    assert status.read_text() == ""


def test_an_end_of_the_command_is_reported_while_stdout_is_whole(
    init: tuple[subprocess.Popen[bytes], Path],
) -> None:
    process, status = init
    *_, command = children(process.pid)
    os.kill(command, signal.SIGUSR1)
    assert process.wait(60) == 128 + signal.SIGUSR1
    assert status.read_text() == f"signal {signal.SIGUSR1:d}\n"
