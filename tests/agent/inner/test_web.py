"""The server behind the worker's inner addresses: whom it serves, how much it takes, and how it ends."""

from __future__ import annotations

import contextlib
import http.client
import logging
import socket
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from savedworker.agent.inner.web import AT_ONCE, Answer, Limits, NoAnswer, Request, WebServer, listen

REUSE = Limits(patience=None, reuse=True)


class Served:
    """A server on loopback; ``respond`` answers."""

    def __init__(self, respond: Callable[[Request], Answer], limits: Limits | None = None) -> None:
        self.respond = respond
        self.listener = listen(("127.0.0.1", 0))
        self.address: tuple[str, int] = self.listener.getsockname()
        self.server = WebServer(self.listener, self, "test", limits)

    def answer(self, request: Request) -> Answer:
        return self.respond(request)

    def connect(self) -> http.client.HTTPConnection:
        return http.client.HTTPConnection(*self.address, timeout=10)

    def get(self, path: str = "/") -> http.client.HTTPResponse:
        connection = self.connect()
        connection.request("GET", path)
        return connection.getresponse()

    def raw(self, text: bytes) -> bytes:
        """All that comes back for ``text``, until the server ends the connection."""
        with socket.create_connection(self.address, timeout=10) as connection:
            with contextlib.suppress(OSError):  # it may end the connection before it has heard all
                connection.sendall(text)
                connection.shutdown(socket.SHUT_WR)
            found = b""
            with contextlib.suppress(ConnectionError):
                while part := connection.recv(65536):
                    found += part
            return found

    def __enter__(self) -> Served:
        return self

    def __exit__(self, *_: object) -> None:
        self.server.close()
        self.server.break_connections()
        self.listener.close()


def echo(request: Request) -> Answer:
    return Answer(200, request.body, {"content-type": "text/plain", "x-path": request.path})


def eventually(condition: Callable[[], Any], what: str) -> None:
    until = time.monotonic() + 10
    while not condition():
        assert time.monotonic() < until, what
        time.sleep(0.01)


@pytest.mark.parametrize("method", ["GET", "POST", "PUT", "PATCH", "DELETE"])
def test_a_request_is_given_whole_to_the_site_and_its_answer_back(method: str) -> None:
    seen = []

    def respond(request: Request) -> Answer:
        seen.append(request)
        return Answer(201, b"made", {"content-type": "text/x", "date": "never", "content-length": "99"})

    with Served(respond) as served:
        connection = served.connect()
        connection.request(method, "/a?b=c", body=b"body", headers={"X-Name": "value"})
        answer = connection.getresponse()
        assert (answer.status, answer.read(), answer.headers.get_all("Content-Type")) == (
            201,
            b"made",
            ["text/x"],
        )
        assert answer.headers.get_all("Content-Length") == ["4"], "what the server sets, it sets itself"
        assert len(answer.headers.get_all("Date", [])) == 1
    (request,) = seen
    assert (request.method, request.path, request.body) == (method, "/a?b=c", b"body")
    assert request.headers["x-name"] == "value"


@pytest.mark.parametrize(("limits", "requests"), [(Limits(), 1), (REUSE, 3)])
def test_a_connection_brings_one_request_or_many(limits: Limits, requests: int) -> None:
    with Served(echo, limits) as served:
        text = b"".join(b"GET /%d HTTP/1.1\r\nHost: x\r\n\r\n" % i for i in range(3))
        assert served.raw(text).count(b"HTTP/1.1 200") == requests


def test_an_answer_without_a_body_leaves_the_connection_usable() -> None:
    with Served(lambda _: Answer(204, b"not sent"), REUSE) as served:
        found = served.raw(b"GET / HTTP/1.1\r\n\r\nGET / HTTP/1.1\r\n\r\n")
        assert found.count(b"HTTP/1.1 204") == 2
        assert b"not sent" not in found
        assert b"Content-Length" not in found


@pytest.mark.parametrize("limits", [Limits(body=10), Limits(body=10, reuse=True)])
@pytest.mark.parametrize(
    ("header", "status"),
    [
        ("Content-Length: 11", 413),
        ("Content-Length: -1", 411),
        ("Content-Length: \u00b2", 411),
        ("Content-Length: ten", 411),
        ("Transfer-Encoding: chunked", 411),
    ],
)
def test_what_is_too_long_or_of_unknown_length_is_refused_unread(
    header: str, status: int, limits: Limits
) -> None:
    def respond(request: Request) -> Answer:
        raise AssertionError("it is not asked")

    with Served(respond, limits) as served:
        found = served.raw(f"POST / HTTP/1.1\r\n{header}\r\n\r\n0123456789\r\n".encode("latin-1"))
        assert found.startswith(b"HTTP/1.1 %d" % status)
        assert found.count(b"HTTP/1.1") == 1, "what follows is no request"


def test_a_body_that_is_cut_off_is_no_request() -> None:
    with Served(echo, REUSE) as served:
        assert served.raw(b"POST / HTTP/1.1\r\nContent-Length: 5\r\n\r\n123") == b""


def test_only_the_one_peer_is_served() -> None:
    with Served(echo, Limits(only="127.0.0.1")) as served:
        assert served.get().status == 200
    with Served(echo, Limits(only="198.19.255.2")) as served:
        assert served.raw(b"GET / HTTP/1.1\r\n\r\n") == b""


def test_an_address_may_come_to_be_after_the_listener() -> None:
    with contextlib.closing(listen(("198.19.77.1", 0))) as listener:
        assert listener.getsockname()[0] == "198.19.77.1"


def test_there_are_only_so_many_connections_at_a_time_also_where_they_rest() -> None:
    before = threading.active_count()
    with Served(echo, REUSE) as served, contextlib.ExitStack() as stack:
        for _ in range(AT_ONCE):
            connection = stack.enter_context(contextlib.closing(served.connect()))
            connection.request("GET", "/")
            connection.getresponse().read()
        assert served.raw(b"GET / HTTP/1.1\r\n\r\n") == b""
        assert threading.active_count() - before <= AT_ONCE + 1
        stack.close()
        eventually(lambda: served.raw(b"GET / HTTP/1.1\r\n\r\n"), "there is room again")


def test_who_does_not_ask_in_time_is_not_waited_for() -> None:
    with Served(echo, Limits(patience=0.2)) as served, socket.create_connection(served.address, 10) as silent:
        assert silent.recv(1) == b""


def test_a_site_that_gives_no_answer_has_the_connection_broken() -> None:
    def respond(request: Request) -> Answer:
        raise NoAnswer

    with Served(respond, REUSE) as served, pytest.raises(http.client.RemoteDisconnected):
        served.get()


def test_a_site_that_fails_is_answered_for(caplog: pytest.LogCaptureFixture) -> None:
    def respond(request: Request) -> Answer:
        raise ValueError("a defect")

    with caplog.at_level(logging.ERROR), Served(respond) as served:
        assert served.get().status == 500
    assert "a defect" in caplog.text


def test_what_comes_afterwards_comes_once_the_answer_is_sent() -> None:
    order: list[str] = []
    sent = threading.Event()

    def afterwards() -> None:
        assert sent.wait(10)
        order.append("afterwards")

    def respond(request: Request) -> Answer:
        return Answer(200, b"x", {}, afterwards)

    with Served(respond) as served:
        answer = served.get()
        assert answer.read() == b"x"
        order.append("read")
        sent.set()
        eventually(lambda: len(order) == 2, "called")
    assert order == ["read", "afterwards"]


def test_what_comes_afterwards_comes_also_when_nobody_reads_the_answer() -> None:
    called, gone = threading.Event(), threading.Event()

    def respond(request: Request) -> Answer:
        assert gone.wait(10)
        return Answer(200, b"x" * (64 << 20), {}, called.set)

    with Served(respond) as served:
        with socket.create_connection(served.address, timeout=10) as connection:
            connection.sendall(b"GET / HTTP/1.1\r\n\r\n")
        gone.set()
        assert called.wait(10)


def test_the_end_takes_no_connection_and_breaks_those_that_are_open() -> None:
    asked, go = threading.Event(), threading.Event()

    def respond(request: Request) -> Answer:
        if request.path == "/slow":
            asked.set()
            assert go.wait(10)
        return Answer(200)

    with Served(respond, REUSE) as served, contextlib.closing(served.connect()) as resting:
        resting.request("GET", "/")
        resting.getresponse().read()
        slow = served.connect()
        slow.request("GET", "/slow")
        assert asked.wait(10)
        served.server.close()
        served.server.break_connections()
        served.listener.close()
        with pytest.raises(OSError):
            socket.create_connection(served.address, timeout=1)
        assert resting.sock.recv(1) == b""
        with pytest.raises((http.client.HTTPException, OSError)):
            slow.getresponse()
        go.set()


@pytest.fixture(autouse=True)
def _no_thread_is_left() -> Iterator[None]:
    before = set(threading.enumerate())
    yield
    eventually(lambda: not [x for x in threading.enumerate() if x not in before], "all threads have ended")
