"""A small HTTP server on a listener that exists already, for the services that speak HTTP.

The other side is the worker, which may be anything: connections are few at a time and none is waited for long.
"""

from __future__ import annotations

import contextlib
import logging
import socket
import threading
from dataclasses import dataclass, field
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler
from socketserver import BaseServer, ThreadingMixIn
from typing import Any, Protocol

log = logging.getLogger(__name__)

AT_ONCE = 64
"""Requests that are worked on at a time; a further connection is closed."""
PATIENCE = 10.0
"""Seconds in which a request has to come."""
MAX_BODY = 4 << 20
"""Bytes of a request's body."""


@dataclass(frozen=True)
class Request:
    """What was asked. Names in ``headers`` are in lower case."""

    method: str
    path: str
    headers: dict[str, str] = field(default_factory=dict)
    body: bytes = b""


@dataclass(frozen=True)
class Answer:
    """What is answered."""

    status: HTTPStatus
    body: bytes = b""
    content_type: str = "application/json"


class Site(Protocol):
    """Who answers. May be called by several threads at once."""

    def answer(self, request: Request) -> Answer:
        """The answer to ``request``. What it raises is logged and answered with 500."""
        ...


class WebServer(ThreadingMixIn, BaseServer):
    """Serves ``site`` on ``listener`` until ``close``."""

    daemon_threads = True
    block_on_close = False

    def __init__(self, listener: socket.socket, site: Site, name: str) -> None:
        handler = type("Handler", (_Handler,), {"site": site})
        super().__init__(listener.getsockname(), handler)
        self.socket = listener
        self._free = threading.BoundedSemaphore(AT_ONCE)
        self._thread = threading.Thread(
            target=self.serve_forever, args=(0.1,), daemon=True, name=f"inner-{name}"
        )
        self._thread.start()

    def close(self) -> None:
        """Take no further request; those under way go on. The listener is its owner's to close."""
        self.shutdown()
        self._thread.join()

    # What socketserver asks of a server ------------------------------------------------------------------------

    def fileno(self) -> int:
        return self.socket.fileno()

    def get_request(self) -> tuple[socket.socket, Any]:
        return self.socket.accept()

    def verify_request(self, request: Any, client_address: Any) -> bool:
        return self._free.acquire(blocking=False)

    def process_request_thread(self, request: Any, client_address: Any) -> None:
        try:
            super().process_request_thread(request, client_address)
        finally:
            self._free.release()

    def shutdown_request(self, request: Any) -> None:
        with contextlib.suppress(OSError):  # gone already
            request.shutdown(socket.SHUT_WR)
        request.close()

    def handle_error(self, request: Any, client_address: Any) -> None:
        log.debug("a connection ended before its answer")


class _Handler(BaseHTTPRequestHandler):
    site: Site
    protocol_version = "HTTP/1.1"
    server_version = "savedworker"
    sys_version = ""
    timeout = PATIENCE

    def _serve(self) -> None:
        # One request per connection: none is left open that a checkpoint would have to carry or a move to cut.
        self.close_connection = True
        length = self.headers.get("Content-Length", "0")
        if not (length.isascii() and length.isdigit() and int(length) <= MAX_BODY):
            self._send(Answer(HTTPStatus.REQUEST_ENTITY_TOO_LARGE))
            return
        headers = {name.lower(): value for name, value in self.headers.items()}
        request = Request(self.command, self.path, headers, self.rfile.read(int(length)))
        try:
            answer = self.site.answer(request)
        except Exception:  # whatever it is, the worker gets an answer and the agent lives
            log.exception("%s %s could not be answered", self.command, self.path)
            answer = Answer(HTTPStatus.INTERNAL_SERVER_ERROR)
        self._send(answer)

    do_GET = do_HEAD = do_POST = do_PUT = do_PATCH = do_DELETE = _serve

    def _send(self, answer: Answer) -> None:
        self.send_response(answer.status)
        self.send_header("Content-Type", answer.content_type)
        self.send_header("Content-Length", str(len(answer.body)))
        self.send_header("Cache-Control", "no-store")
        self.send_header("Connection", "close")
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(answer.body)

    def log_message(self, format: str, *args: object) -> None:  # noqa: A002 - the base class's name
        log.debug(format, *args)
