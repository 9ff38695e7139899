"""A small HTTP server on a listener that exists already, for what the worker asks over HTTP.

The other side is the worker, which may be anything: there are only so many connections at a time, and only so long a body.
"""

from __future__ import annotations

import contextlib
import logging
import socket
import sys
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler
from socketserver import BaseServer, ThreadingMixIn
from typing import Any, Protocol

log = logging.getLogger(__name__)

AT_ONCE = 64
"""Connections at a time; a further one is closed."""
PATIENCE = 10.0
"""Seconds in which a request has to come."""
MAX_BODY = 4 << 20
"""Bytes of a request's body."""
_IP_FREEBIND = 15
_OWN = frozenset({"connection", "content-length", "date", "server", "transfer-encoding"})
"""Headers of an answer that the server sets itself."""


class NoAnswer(Exception):
    """There is no answer to this request: its connection is broken."""


@dataclass(frozen=True)
class Request:
    """What was asked. Names in ``headers`` are in lower case."""

    method: str
    path: str
    headers: Mapping[str, str] = field(default_factory=dict)
    body: bytes = b""


def _nothing() -> None:
    return


@dataclass(frozen=True)
class Answer:
    """What is answered. Names in ``headers`` are in lower case."""

    status: int
    body: bytes = b""
    headers: Mapping[str, str] = field(default_factory=dict)
    afterwards: Callable[[], None] = _nothing
    """Called once the answer is sent, or cannot be."""


class Site(Protocol):
    """Who answers. May be called by several threads at once."""

    def answer(self, request: Request) -> Answer:
        """The answer to ``request``. Raises NoAnswer; anything else that it raises is logged and answered with 500."""
        ...


@dataclass(frozen=True)
class Limits:
    """What one server allows."""

    body: int = MAX_BODY
    patience: float | None = PATIENCE
    """Seconds in which a request has to come; None: a connection may rest for as long as it wants."""
    reuse: bool = False
    """Whether a connection may bring one request after the other. Otherwise none is left open that a checkpoint would have to
    carry or a move to cut."""
    only: str | None = None
    """The one address that is served; None: any."""


def listen(address: tuple[str, int]) -> socket.socket:
    """A listener on an address that may come to be later: the worker's link is made after it and unmade before. Raises OSError."""
    listener = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
    try:
        listener.setsockopt(socket.IPPROTO_IP, _IP_FREEBIND, 1)
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(address)
        listener.listen(128)
    except OSError:
        listener.close()
        raise
    return listener


class WebServer(ThreadingMixIn, BaseServer):
    """Serves ``site`` on ``listener`` until ``close``, each connection in a thread of its own."""

    daemon_threads = True
    block_on_close = False

    def __init__(self, listener: socket.socket, site: Site, name: str, limits: Limits | None = None) -> None:
        self.limits = limits or Limits()
        handler = type("Handler", (_Handler,), {"site": site, "timeout": self.limits.patience})
        super().__init__(listener.getsockname(), handler)
        self.socket = listener
        self._free = threading.BoundedSemaphore(AT_ONCE)
        self._lock = threading.Lock()
        self._open: set[socket.socket] = set()
        self._thread = threading.Thread(
            target=self.serve_forever, args=(0.1,), daemon=True, name=f"inner-{name}"
        )
        self._thread.start()

    def close(self) -> None:
        """Take no further connection; those that are open go on. The listener is its owner's to close."""
        self.shutdown()
        self._thread.join()

    def break_connections(self) -> None:
        """Have every connection that is open end now."""
        with self._lock:
            for connection in self._open:
                with contextlib.suppress(OSError):  # gone already
                    connection.shutdown(socket.SHUT_RDWR)

    # What socketserver asks of a server ------------------------------------------------------------------------

    def fileno(self) -> int:
        return self.socket.fileno()

    def get_request(self) -> tuple[socket.socket, Any]:
        return self.socket.accept()

    def verify_request(self, request: Any, client_address: Any) -> bool:
        if self.limits.only not in (None, client_address[0]) or not self._free.acquire(blocking=False):
            return False
        with self._lock:
            self._open.add(request)
        return True

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        try:
            super().process_request_thread(request, client_address)
        finally:
            self._free.release()

    def shutdown_request(self, request: Any) -> None:
        with self._lock:
            self._open.discard(request)
        with contextlib.suppress(OSError):  # gone already
            request.shutdown(socket.SHUT_WR)
        request.close()

    def handle_error(self, request: Any, client_address: Any) -> None:
        log.debug("a connection of the worker broke: %s", sys.exc_info()[1])


class _Handler(BaseHTTPRequestHandler):
    server: WebServer
    site: Site
    protocol_version = "HTTP/1.1"
    server_version = "savedworker"
    sys_version = ""

    def _serve(self) -> None:
        limits = self.server.limits
        if not limits.reuse:
            self.close_connection = True
        length = self.headers.get("Content-Length", "0")
        if not (length.isascii() and length.isdigit()) or "Transfer-Encoding" in self.headers:
            self._refuse(HTTPStatus.LENGTH_REQUIRED)
            return
        if int(length) > limits.body:
            self._refuse(HTTPStatus.REQUEST_ENTITY_TOO_LARGE)
            return
        body = self.rfile.read(int(length))
        if len(body) < int(length):
            self.close_connection = True
            return
        headers = {name.lower(): value for name, value in self.headers.items()}
        try:
            answer = self.site.answer(Request(self.command, self.path, headers, body))
        except NoAnswer:
            self.close_connection = True
            return
        except Exception:  # whatever it is, the worker gets an answer and the agent lives
            log.exception("%s %s could not be answered", self.command, self.path)
            answer = Answer(HTTPStatus.INTERNAL_SERVER_ERROR)
        try:
            self._send(answer)
        finally:
            answer.afterwards()

    do_GET = do_HEAD = do_POST = do_PUT = do_PATCH = do_DELETE = _serve

    def _refuse(self, status: HTTPStatus) -> None:
        self.close_connection = True  # what follows is the body, or what passes for one
        self._send(Answer(status))

    def _send(self, answer: Answer) -> None:
        self.send_response(answer.status)
        for name, value in answer.headers.items():
            if name.lower() not in _OWN:
                self.send_header(name, value)
        if self.close_connection:
            self.send_header("Connection", "close")
        empty = answer.status in (HTTPStatus.NO_CONTENT, HTTPStatus.NOT_MODIFIED) or answer.status < 200
        if not empty:
            self.send_header("Content-Length", str(len(answer.body)))
        self.end_headers()
        if not empty and self.command != "HEAD":
            self.wfile.write(answer.body)

    def log_message(self, format: str, *args: object) -> None:  # noqa: A002 - the base class's name
        log.debug(format, *args)
