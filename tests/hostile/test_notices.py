"""What the metadata service, or the drill's file, answers: a notice, or a problem that is told; the watching goes on."""

from __future__ import annotations

import contextlib
import json
import math
import os
import socket
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from savedworker.model import events as ev
from savedworker.notice.base import Notice
from savedworker.notice.drill import DrillMonitor
from savedworker.notice.ec2 import Ec2Monitor
from savedworker.store.documents import dump
from savedworker.store.worker import StoredEvent
from tests.hostile.material import AT, anything, damaged, few

ACTION = {"action": "terminate", "time": "2026-01-02T03:04:05Z"}


class Answers(Ec2Monitor):
    """The monitor with the wire taken out: each path has the text that a test gives it."""

    def __init__(self, texts: dict[str, str]) -> None:
        super().__init__("http://127.0.0.1:1")
        self.texts = texts

    def _request(self, method: str, path: str, headers: dict[str, str]) -> tuple[int, str]:
        text = self.texts.get(path.rpartition("/")[2])
        return (404, "") if text is None else (200, text)


def usable(notice: Notice) -> None:
    """It can be recorded and waited for."""
    left = None if notice.deadline is None else max(0.0, notice.deadline - time.monotonic())
    assert left is None or math.isfinite(left)
    event = ev.NoticeReceived(
        at=AT,
        incarnation=1,
        holder="h",
        id=notice.id,
        source=notice.source,
        seconds_left=left,
        detail=notice.detail,
    )
    dump(StoredEvent(incarnation=1, n=1, event=event))
    assert notice.detail.isprintable()
    assert len(notice.detail) < 200


@few
@given(
    st.one_of(st.one_of(damaged(ACTION), anything).map(json.dumps), st.text(max_size=40)),
    st.text(max_size=20),
)
@example("[" * 60_000, "i-1")
@example('{"action": "\\ud800", "time": "2026-01-02T03:04:05Z"}', "i-1")
@example(json.dumps({**ACTION, "time": "0001-01-01T00:00:00+23:59"}), "i-1")
@example(json.dumps({**ACTION, "time": "9999-12-31T23:59:59-23:59"}), "i-1")
@example(json.dumps({**ACTION, "action": "x" * 60_000}), "i-1")
@example(json.dumps({**ACTION, "action": "stop\n\x1b[2J"}), "i-1")
def test_any_answer_of_the_metadata_service_is_a_usable_notice_or_a_problem(text: str, instance: str) -> None:
    monitor = Answers({"token": "t", "instance-id": instance, "instance-action": text})
    found = list(monitor.look())
    assert len(found) == (0 if monitor.problem() else 1)
    for notice in found:
        usable(notice)
    monitor.texts["instance-action"] = json.dumps(ACTION)
    monitor.texts["instance-id"] = "i-1"
    list(monitor.look())
    assert monitor.problem() is None


@few
@given(st.text(max_size=50))
@example("Mon, 01 Jan 0001 00:00:00 +9999")
@example("Fri, 31 Dec 9999 23:59:59 -9999")
@example("Mon, 99999999999999999999 Jan 2026 00:00:00 GMT")
@example("x" * 10_000)
@example(", , ,")
def test_any_date_header_is_a_time_or_is_not_heard(date: str) -> None:
    monitor = Answers({})
    monitor._hear(date)
    monitor._now()


@contextlib.contextmanager
def raw_service(answer: Callable[[socket.socket], None]) -> Iterator[str]:
    """A server that says what a test says, as bytes."""
    server = socket.create_server(("127.0.0.1", 0))

    def serve() -> None:
        with contextlib.suppress(OSError):
            while True:
                connection, _ = server.accept()
                with connection, contextlib.suppress(OSError):
                    connection.recv(4096)
                    answer(connection)

    threading.Thread(target=serve, daemon=True).start()
    yield f"http://127.0.0.1:{server.getsockname()[1]}"
    server.close()


@pytest.mark.parametrize("said", [
    b"",
    b"\x00" * 100,
    b"HTTP/1.1 999999 x\r\n\r\n",
    b"HTTP/1.1 200 OK\r\n" + b"a: b\r\n" * 500 + b"\r\n",
    b"HTTP/1.1 200 OK\r\nContent-Length: 99999999999999999999\r\n\r\nx",
    b"HTTP/1.1 200 OK\r\nContent-Length: -1\r\n\r\nx",
    b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\nZZZ\r\n",
    b"HTTP/1.1 200 OK\r\n\r\nto\x01ken\nX-Evil: 1",
    "HTTP/1.1 200 OK\r\n\r\nt\u00f6ken\u2028".encode(),
    b"HTTP/1.1 200 OK\r\n\r\n" + b"t" * 200_000,
    b"HTTP/1.1 302 Found\r\nLocation: file:///etc/passwd\r\n\r\n",
    b"HTTP/1.1 302 Found\r\nLocation: http://[::1\r\n\r\n",
    b"HTTP/1.1 301 Found\r\nLocation: \xff\r\n\r\n",
], ids=range(13))  # fmt: skip
def test_a_service_that_talks_nonsense_is_a_problem_and_no_more(said: bytes) -> None:
    with raw_service(lambda connection: connection.sendall(said)) as url:
        monitor = Ec2Monitor(url, timeout=0.3)
        assert list(monitor.look()) == []
        assert monitor.problem()


def test_a_service_that_answers_drop_by_drop_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    def drip(connection: socket.socket) -> None:
        connection.sendall(b"HTTP/1.1 200 OK\r\nContent-Length: 60000\r\n\r\n")
        for _ in range(300):
            connection.sendall(b"x")
            time.sleep(0.05)

    with raw_service(drip) as url:
        monitor = Ec2Monitor(url, timeout=0.2)
        started = time.monotonic()
        assert list(monitor.look()) == []
        assert monitor.problem()
        assert time.monotonic() - started < 6


@few
@given(st.one_of(damaged({"notice": 30}).map(json.dumps), anything.map(json.dumps), st.text(max_size=30)))
@example("[" * 4000)
@example('{"notice": 1' + "0" * 400 + "}")
@example('{"notice": 1e308}')
@example('{"notice": NaN}')
def test_any_drill_file_is_a_usable_notice_or_a_problem(tmp_path_factory: Any, text: str) -> None:
    path = tmp_path_factory.mktemp("drill") / "drill.json"
    path.write_bytes(text.encode(errors="surrogatepass"))
    monitor = DrillMonitor(path)
    found = list(monitor.look())
    assert len(found) == (0 if monitor.problem() else 1)
    for notice in found:
        usable(notice)


@pytest.mark.parametrize("what", ["fifo", "folder", "socket", "endless"])
def test_what_is_no_file_in_place_of_the_drill_is_a_problem_and_not_waited_for(
    tmp_path: Path, what: str
) -> None:
    path = tmp_path / "drill.json"
    if what == "fifo":
        os.mkfifo(path)
    elif what == "folder":
        path.mkdir()
    elif what == "socket":
        socket.socket(socket.AF_UNIX).bind(str(path))
    else:
        path.symlink_to("/dev/zero")
    monitor = DrillMonitor(path)
    assert list(monitor.look()) == []
    assert monitor.problem()
