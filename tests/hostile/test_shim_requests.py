"""The shim keeps the worker, its lines and its lease: no request ends it, and no file of the worker's fools it."""

from __future__ import annotations

import contextlib
import json
import os
import socket
import stat
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from savedworker.agent.exits import ending
from savedworker.agent.shim import Connection, Shim, _report, lease_clock
from savedworker.agent.shim_client import WorkerExit
from tests.hostile.material import anything, damaged, few

START = {
    "op": "start",
    "argv": ["/bin/true"],
    "env": {"A": "b"},
    "positions": {"stdout": 0, "stderr": 0},
    "status_file": "/nonexistent/status",
    "state_file": "/nonexistent/state",
}
LEASE = {"op": "lease", "deadline": 5.0, "term": 1.0}
NOTHING = "savedworker-hostile/none"


@pytest.fixture
def shim(tmp_path: Path) -> Iterator[Shim]:
    made = Shim(tmp_path, NOTHING)
    yield made
    made.selector.close()


def ask(shim: Shim, data: bytes, reads: bool = True) -> list[dict[str, Any]]:
    """What the shim answers to ``data``, handled here and now, to a client that ``reads`` the answers or does not."""
    ours, theirs = socket.socketpair()
    connection = Connection(shim, theirs)
    said = bytearray()

    def send() -> None:
        with contextlib.suppress(OSError):
            ours.sendall(data)
        with contextlib.suppress(OSError):
            ours.shutdown(socket.SHUT_WR)

    def receive() -> None:
        with contextlib.suppress(OSError):
            while part := ours.recv(1 << 16):
                said.extend(part)

    threads = [threading.Thread(target=send), *([threading.Thread(target=receive)] if reads else [])]
    for thread in threads:
        thread.start()
    while theirs.fileno() >= 0:
        connection.read()
    for thread in threads:
        thread.join()
    ours.close()
    return [json.loads(line) for line in said.splitlines()]


def test_a_client_that_asks_and_never_reads_does_not_keep_the_shim_from_the_lease(shim: Shim) -> None:
    started = time.monotonic()
    ask(shim, b'{"op": "status"}\n' * 20_000, reads=False)
    assert time.monotonic() - started < 60
    assert "exit" in ask(shim, b'{"op": "status"}\n')[0]


@few
@given(
    st.one_of(
        damaged(START), damaged(LEASE), anything, st.dictionaries(st.text(max_size=9), anything, max_size=4)
    )
)
@example({**LEASE, "deadline": float("nan")})
@example({**LEASE, "deadline": float("inf")})
@example({**LEASE, "deadline": 10**400})
@example({**LEASE, "term": float("inf")})
@example({**START, "env": [1]})
@example({**START, "argv": []})
@example({**START, "argv": "/bin/sh"})
@example({**START, "status_file": "/a\0b"})
@example({**START, "state_file": 7})
@example({**START, "positions": {"stdout": -1, "stderr": 1e308}})
def test_no_request_ends_the_shim_or_gives_a_lease_without_end(tmp_path_factory: Any, document: Any) -> None:
    shim = Shim(tmp_path_factory.mktemp("shim"), NOTHING)
    shim.deadline = None
    (answer,) = ask(shim, json.dumps(document).encode() + b"\n")
    assert isinstance(answer, dict)
    assert shim.starter is None  # there is no lease under which anything could be started
    deadline: float | None = getattr(shim, "deadline", None)  # changed behind the checker's back
    assert deadline is None or deadline < lease_clock() + 1e7
    assert shim.enforce() > 0
    (status,) = ask(shim, b'{"op": "status"}\n')
    assert status["exit"] is None
    shim.selector.close()


@few
@given(damaged(START))
def test_under_a_lease_a_start_runs_the_words_that_it_was_given_or_nothing(
    tmp_path_factory: Any, document: Any
) -> None:
    shim = Shim(tmp_path_factory.mktemp("shim"), NOTHING)
    shim.deadline, shim.term = lease_clock() + 100, 100.0
    if isinstance(document, dict) and document.get("argv"):
        document = {**document, "argv": ["/bin/true"]}
    ask(shim, json.dumps(document).encode() + b"\n")
    until = time.monotonic() + 10
    while shim.starter is not None and time.monotonic() < until:
        shim.reap()
        time.sleep(0.002)
    assert shim.starter is None
    assert ask(shim, b'{"op": "status"}\n')[0]["worker_pid"] is None
    for spool in shim.spools.values():
        os.close(spool.file)
        os.close(spool.read_end)
        os.close(spool.write_end)
    shim.selector.close()


@pytest.mark.parametrize(
    "data",
    [
        b"\n" * 1000,
        b"[" * 200_000 + b"\n",
        b'{"op":' * 100_000 + b"\n",
        b"\xff\xfe\n",
        b"9" * 10_000 + b"\n",
        b"null\n",
    ],
    ids=["empty lines", "deep list", "deep mapping", "no text", "huge number", "null"],
)
def test_what_is_no_request_is_answered_as_such(shim: Shim, data: bytes) -> None:
    assert all("error" in answer for answer in ask(shim, data))
    assert "exit" in ask(shim, b'{"op": "status"}\n')[0]


def test_a_request_without_end_is_hung_up_on(shim: Shim) -> None:
    assert ask(shim, b"x" * (9 << 20)) == []
    assert "exit" in ask(shim, b'{"op": "status"}\n')[0]


def test_a_state_file_of_any_content_does_not_end_the_shim(tmp_path: Path) -> None:
    for n, content in enumerate(
        [b"[]", b"null", b"[" * 100_000, b'{"init_process_pid": 1e999}', b"\xff", b'{"init_process_pid": []}']
    ):
        folder = tmp_path / str(n)
        folder.mkdir()
        (folder / "state").write_bytes(content)
        shim = Shim(folder, NOTHING)
        shim.deadline, shim.term = lease_clock() + 100, 100.0
        ask(shim, json.dumps({**START, "state_file": str(folder / "state")}).encode() + b"\n")
        until = time.monotonic() + 10
        while shim.starter is not None and time.monotonic() < until:
            shim.reap()
        assert shim.starter is None
        assert shim.worker_pid is None
        shim.selector.close()


def exited(code: int) -> int:
    return code << 8


@pytest.mark.parametrize(("status", "line", "believed"), [
    (exited(3), b"exit 3\n", "exit 3"),
    (exited(3), b"exit 0\n", ""),
    (exited(137), b"signal 9\n", "signal 9"),
    (exited(1), b"signal 9\n", ""),
    (9, b"exit 0\n", ""),
    (0, b"exit 7\n", "exit 7"),
    (0, b"exit 0\nexit 1\n", "exit 0"),
    (0, b"signal 999\n", ""),
    (0, b"exit 99999999999999999999\n", ""),
    (exited(3), b"exit 3; rm -rf /\n", ""),
    (exited(3), "exit ٣\n".encode(), ""),
    (exited(3), b"\0" * 64, ""),
])  # fmt: skip
def test_a_report_is_believed_only_where_inits_own_exit_agrees(
    tmp_path: Path, status: int, line: bytes, believed: str
) -> None:
    (tmp_path / "status").write_bytes(line)
    assert _report(tmp_path / "status", status) == believed


def test_a_worker_that_writes_its_own_report_does_not_turn_a_failure_into_a_success(tmp_path: Path) -> None:
    (tmp_path / "status").write_text("exit 0\n")
    for status in (exited(3), exited(137), 9, 15):
        end = ending(WorkerExit(status, _report(tmp_path / "status", status), 0))
        assert end.exit_code != 0
        assert end.reason is not None


@pytest.mark.parametrize(
    "what", ["link", "fifo", "socket", "device", "folder", "nothing", "linked folder", "huge"]
)
def test_nothing_in_place_of_the_status_file_is_followed_opened_or_waited_for(
    tmp_path: Path, what: str
) -> None:
    secret = tmp_path / "secret"
    secret.mkdir()
    (secret / "status").write_text("exit 0\n")
    folder = tmp_path / ".savedworker"
    status = folder / "status"
    if what == "linked folder":
        folder.symlink_to(secret)
    else:
        folder.mkdir()
    if what == "link":
        status.symlink_to(secret / "status")
    elif what == "fifo":
        os.mkfifo(status)
    elif what == "socket":
        socket.socket(socket.AF_UNIX).bind(str(status))
    elif what == "device":
        os.mknod(status, stat.S_IFCHR | 0o600, os.makedev(1, 5))  # /dev/zero
    elif what == "folder":
        status.mkdir()
    elif what == "huge":
        status.touch()
        os.truncate(status, 1 << 40)
    started = time.monotonic()
    assert _report(status, 0) == ""
    assert time.monotonic() - started < 20  # waiting for it, or reading it to its end, has none
