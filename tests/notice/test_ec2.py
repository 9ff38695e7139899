"""Ec2Monitor against the metadata service of local hosts (the real one, on loopback) and against services that refuse."""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from savedworker.fleet.local.metadata import Metadata, MetadataServer
from savedworker.notice.base import Monitor, Notice
from savedworker.notice.ec2 import Ec2Monitor


@pytest.fixture
def metadata() -> Metadata:
    return Metadata("host-0001", "local-a", "198.18.0.9")


@pytest.fixture
def url(metadata: Metadata) -> Iterator[str]:
    server = MetadataServer(metadata, ("127.0.0.1", 0))
    yield f"http://127.0.0.1:{server.port}"
    server.close()


@contextlib.contextmanager
def service(answer: Callable[[str, str, dict[str, str]], tuple[int, str]]) -> Iterator[str]:
    """An HTTP service that answers ``answer(method, path, headers)``."""

    class Handler(BaseHTTPRequestHandler):
        def _any(self) -> None:
            status, text = answer(self.command, self.path, dict(self.headers))
            with contextlib.suppress(OSError):
                self.send_response(status)
                self.end_headers()
                self.wfile.write(text.encode())

        do_GET = do_PUT = _any

        def log_message(self, *args: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True).start()
    yield f"http://127.0.0.1:{server.server_address[1]}"
    server.shutdown()
    server.server_close()


def test_it_is_a_monitor(url: str) -> None:
    monitor: Monitor = Ec2Monitor(url)
    assert monitor.source == "ec2"


def test_nothing_is_emitted_and_no_problem_seen_while_there_is_no_notice(url: str) -> None:
    monitor = Ec2Monitor(url)
    assert list(monitor.look()) == []
    assert monitor.problem() is None


def test_an_interruption_is_one_notice_with_the_deadline_on_the_monotonic_clock(
    url: str, metadata: Metadata
) -> None:
    monitor = Ec2Monitor(url)
    before = time.monotonic()
    seconds = metadata.interrupt(120)
    [notice] = [*monitor.look(), *monitor.look(), *monitor.look()]
    assert (notice.source, notice.kind, notice.withdrawn) == ("ec2", "interruption", False)
    assert notice.deadline is not None
    assert before - 0.2 < notice.deadline - seconds < time.monotonic() + 0.2


def test_a_notice_has_the_same_id_for_another_monitor_of_the_same_instance_and_another_one_elsewhere(
    url: str, metadata: Metadata
) -> None:
    metadata.interrupt(120)
    [first], [second] = Ec2Monitor(url).look(), Ec2Monitor(url).look()
    assert first.id == second.id
    other = Metadata("host-0002", "local-a", "198.18.0.10")
    other._action = metadata._action
    server = MetadataServer(other, ("127.0.0.1", 0))
    [elsewhere] = Ec2Monitor(f"http://127.0.0.1:{server.port}").look()
    server.close()
    assert elsewhere.id != first.id


def test_a_deadline_that_has_passed_is_now(url: str, metadata: Metadata) -> None:
    metadata.interrupt(-500)
    before = time.monotonic()
    [notice] = Ec2Monitor(url).look()
    assert notice.deadline is not None
    assert before - 0.2 < notice.deadline < time.monotonic() + 0.2


def test_a_rebalance_has_no_deadline_and_can_stand_beside_an_interruption(
    url: str, metadata: Metadata
) -> None:
    monitor = Ec2Monitor(url)
    metadata.rebalance()
    [rebalance] = monitor.look()
    metadata.interrupt(120)
    [interruption] = monitor.look()
    assert (rebalance.kind, rebalance.deadline) == ("rebalance", None)
    assert interruption.kind == "interruption"
    assert rebalance.id != interruption.id


def test_a_notice_that_turns_404_is_withdrawn_once(url: str, metadata: Metadata) -> None:
    monitor = Ec2Monitor(url)
    metadata.interrupt(120)
    [notice] = monitor.look()
    metadata.withdraw()
    [withdrawn] = [*monitor.look(), *monitor.look()]
    assert (withdrawn.id, withdrawn.withdrawn) == (notice.id, True)


def test_another_time_is_another_notice_and_withdraws_the_first(url: str, metadata: Metadata) -> None:
    monitor = Ec2Monitor(url)
    metadata.interrupt(120)
    [first] = monitor.look()
    metadata.interrupt(240)
    gone, second = monitor.look()
    assert (gone.id, gone.withdrawn) == (first.id, True)
    assert not second.withdrawn
    assert second.id != first.id


def test_an_ended_session_is_replaced_without_missing_anything(url: str, metadata: Metadata) -> None:
    monitor = Ec2Monitor(url)
    assert list(monitor.look()) == []
    metadata.drop_tokens()
    metadata.interrupt(120)
    [notice] = monitor.look()
    assert notice.kind == "interruption"
    assert monitor.problem() is None


def test_a_service_that_goes_away_is_a_problem_and_not_a_withdrawal(metadata: Metadata) -> None:
    server = MetadataServer(metadata, ("127.0.0.1", 0))
    monitor = Ec2Monitor(f"http://127.0.0.1:{server.port}")
    metadata.interrupt(120)
    assert len(list(monitor.look())) == 1
    server.close()
    assert list(monitor.look()) == []
    assert "cannot be reached" in (monitor.problem() or "")


def test_watch_ends_when_told_and_emits_from_its_thread(url: str, metadata: Metadata) -> None:
    seen: list[Notice] = []
    stop = threading.Event()
    monitor = Ec2Monitor(url, poll=0.02)
    thread = threading.Thread(target=monitor.watch, args=(stop, seen.append))
    thread.start()
    metadata.interrupt(60)
    end = time.monotonic() + 30
    while not seen and time.monotonic() < end:
        time.sleep(0.01)
    stop.set()
    thread.join(30)
    assert not thread.is_alive()
    assert [n.kind for n in seen] == ["interruption"]


def test_a_service_that_is_not_there_cannot_be_reached() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        monitor = Ec2Monitor(f"http://127.0.0.1:{taken.getsockname()[1]}", timeout=0.3)
        assert list(monitor.look()) == []
    assert "cannot be reached" in (monitor.problem() or "")


def test_a_token_that_does_not_arrive_is_told_from_a_service_that_is_not_there() -> None:
    over = threading.Event()

    def answer(method: str, path: str, headers: dict[str, str]) -> tuple[int, str]:
        if method == "PUT":
            over.wait(60)
        return 401, ""

    with service(answer) as url:
        monitor = Ec2Monitor(url, timeout=1.0)
        assert list(monitor.look()) == []
        over.set()
        assert "hop limit" in (monitor.problem() or "")


def test_a_token_that_does_not_arrive_does_no_harm_where_none_is_needed() -> None:
    over = threading.Event()

    def answer(method: str, path: str, headers: dict[str, str]) -> tuple[int, str]:
        if method == "PUT":
            over.wait(60)
        if path.endswith("instance-action"):
            return 200, '{"action": "stop", "time": "2090-01-01T00:00:00Z"}'
        return (200, "i-1") if path.endswith("instance-id") else (404, "")

    with service(answer) as url:
        monitor = Ec2Monitor(url, timeout=1.0)
        [notice] = monitor.look()
        over.set()
        assert notice.detail == "stop at 2090-01-01T00:00:00Z"
        assert monitor.problem() is None


def test_a_service_without_sessions_is_used_without() -> None:
    def answer(method: str, path: str, headers: dict[str, str]) -> tuple[int, str]:
        assert "X-aws-ec2-metadata-token" not in {name.lower() for name in headers}
        if path.endswith("rebalance"):
            return 200, '{"noticeTime": "2026-01-01T00:00:00Z"}'
        return 404, ""

    with service(answer) as url:
        monitor = Ec2Monitor(url)
        assert [n.kind for n in monitor.look()] == ["rebalance"]


def test_a_service_that_is_turned_off_says_so() -> None:
    with service(lambda method, path, headers: (403, "")) as url:
        monitor = Ec2Monitor(url)
        assert list(monitor.look()) == []
        assert "turned off" in (monitor.problem() or "")


@pytest.mark.parametrize(
    "text", ["", "soon", "{}", '{"action": "terminate", "time": "soon"}', '{"action": 1, "time": 2}', "[]"]
)
def test_a_notice_that_cannot_be_read_is_a_problem(text: str) -> None:
    def answer(method: str, path: str, headers: dict[str, str]) -> tuple[int, str]:
        return (200, "token") if method == "PUT" else (200, text)

    with service(answer) as url:
        monitor = Ec2Monitor(url)
        assert list(monitor.look()) == []
        assert "cannot be read" in (monitor.problem() or "")


def test_proxies_are_not_asked(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:9")
    monitor = Ec2Monitor(url)
    assert list(monitor.look()) == []
    assert monitor.problem() is None


def test_one_look_is_one_connection_and_a_service_that_closes_each_one_is_used_all_the_same() -> None:
    kept, callers = Metadata("host-0001", "local-a", "198.18.0.9"), set[tuple[str, int]]()

    server = MetadataServer(kept, ("127.0.0.1", 0))
    accept = server._server.get_request

    def counted() -> tuple[socket.socket, tuple[str, int]]:
        connection, address = accept()
        callers.add(address)
        return connection, address

    server._server.get_request = counted  # type: ignore[method-assign]
    try:
        monitor = Ec2Monitor(f"http://127.0.0.1:{server.port}")
        for _ in range(3):
            assert list(monitor.look()) == []
        assert (len(callers), monitor.problem()) == (3, None)
    finally:
        server.close()

    def answer(method: str, path: str, headers: dict[str, str]) -> tuple[int, str]:
        return (200, "token") if method == "PUT" else (404, "")

    with service(answer) as url:  # HTTP/1.0
        monitor = Ec2Monitor(url)
        assert [*monitor.look(), *monitor.look()] == []
        assert monitor.problem() is None
