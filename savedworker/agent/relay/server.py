"""The HTTP server that a worker reaches at a fixed inner address: one thread per connection."""

from __future__ import annotations

import logging
import socket
import sys
import threading
from collections.abc import Callable, Mapping
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from savedworker.agent.relay.gate import Gate, Pass, Shut
from savedworker.agent.relay.upstream import HOP, MAX_BODY, Answer

log = logging.getLogger(__name__)

_IP_FREEBIND = 15

Respond = Callable[[Pass, str, str, Mapping[str, str], bytes], Answer]
"""Answers (method, path with query, headers, body); goes in and out of the gate by the Pass. Raises Shut."""


class InnerServer:
    """Serves ``respond`` on ``address``, to ``only`` that peer (any, if None). The address may come to be later."""

    def __init__(self, address: tuple[str, int], gate: Gate, respond: Respond, only: str | None) -> None:
        class Handler(_Handler):
            pass

        Handler.gate, Handler.respond, Handler.only = gate, staticmethod(respond), only
        self._server = _Server(address, Handler)
        self.address: tuple[str, int] = self._server.server_address[:2]  # type: ignore[assignment]
        self._thread = threading.Thread(
            target=self._server.serve_forever, args=(0.1,), name="relay", daemon=True
        )

    def start(self) -> None:
        """Serve in the background."""
        self._thread.start()

    def stop(self) -> None:
        """Stop listening, and break every connection that is open."""
        if self._thread.is_alive():
            self._server.shutdown()
        self._server.server_close()
        self._server.break_connections()


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    block_on_close = False
    request_queue_size = 64

    def __init__(self, address: tuple[str, int], handler: type[BaseHTTPRequestHandler]) -> None:
        self._open: set[socket.socket] = set()
        self._lock = threading.Lock()
        super().__init__(address, handler)

    def server_bind(self) -> None:
        # The worker's link, and so its address, is made after this and unmade before.
        self.socket.setsockopt(socket.IPPROTO_IP, _IP_FREEBIND, 1)
        self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        socket.socket.bind(self.socket, self.server_address)
        self.server_address = self.socket.getsockname()
        self.server_name, self.server_port = "relay", self.server_address[1]

    def process_request(self, request: Any, client_address: Any) -> None:
        with self._lock:
            self._open.add(request)
        super().process_request(request, client_address)

    def shutdown_request(self, request: Any) -> None:
        with self._lock:
            self._open.discard(request)
        super().shutdown_request(request)

    def break_connections(self) -> None:
        with self._lock:
            for connection in self._open:
                try:
                    connection.shutdown(socket.SHUT_RDWR)
                except OSError:
                    continue

    def handle_error(self, request: Any, client_address: Any) -> None:
        log.debug("a connection of the worker broke: %s", sys.exc_info()[1])


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server_version, sys_version = "savedworker-relay", ""
    gate: Gate
    respond: Respond
    only: str | None

    def do_request(self) -> None:
        if self.only is not None and self.client_address[0] != self.only:
            self.close_connection = True
            return
        length = self.headers.get("Content-Length", "0")
        if not length.isdecimal() or "Transfer-Encoding" in self.headers:
            self._send(Answer(411, {"content-type": "text/plain"}, b"a length is needed\n"))
            self.close_connection = True
            return
        if int(length) > MAX_BODY:
            self._send(Answer(413, {"content-type": "text/plain"}, b"too long\n"))
            self.close_connection = True
            return
        body = self.rfile.read(int(length))
        if len(body) < int(length):
            self.close_connection = True
            return
        with Pass(self.gate) as way:
            try:
                answer = type(self).respond(way, self.command, self.path, dict(self.headers.items()), body)
            except Shut:
                self.close_connection = True  # no answer: who asked asks again, elsewhere
                return
            self._send(answer)

    do_GET = do_HEAD = do_POST = do_PUT = do_PATCH = do_DELETE = do_request

    def _send(self, answer: Answer) -> None:
        self.send_response(answer.status)
        for name, value in answer.headers.items():
            if name.lower() not in HOP and name.lower() not in ("date", "server"):
                self.send_header(name, value)
        empty = answer.status in (204, 304) or answer.status < 200
        if not empty:
            self.send_header("Content-Length", str(len(answer.body)))
        self.end_headers()
        if not empty and self.command != "HEAD":
            self.wfile.write(answer.body)
        self.wfile.flush()

    def log_message(self, format: str, *args: Any) -> None:  # noqa: A002
        log.debug(format, *args)
