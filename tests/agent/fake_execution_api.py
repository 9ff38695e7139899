"""A stand-in for Airflow's Execution API: what the relay needs of it, with failures on demand. The real one is in tests/airflow."""

from __future__ import annotations

import base64
import json
import ssl
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

TASK = "0190c0de-0000-7000-8000-000000000001"


def jwt(seconds: float = 600.0, name: str = "t") -> str:
    """A token in the form of a JSON web token that expires so many seconds from now; unsigned."""
    claims = json.dumps({"exp": time.time() + seconds, "sub": TASK, "name": name}).encode()
    return f"h.{base64.urlsafe_b64encode(claims).decode().rstrip('=')}.{name}"


class FakeApi:
    """Records every request; answers by ``status`` per kind of call, and refuses tokens not in ``accepted`` (if any are)."""

    def __init__(self, tls: ssl.SSLContext | None = None) -> None:
        self.tls = tls
        self.requests: list[tuple[str, str, Any, str]] = []
        """Method, path below /execution, decoded body, token."""
        self.status: dict[str, int] = {}
        self.variables: dict[str, Any] = {}
        """What was put under /variables; a GET answers with what is there, and 404 without it."""
        self.stuck: set[str] = set()
        """See ``hold_up``."""
        self.accepted: set[str] = set()
        self.refresh = ""
        self.paused = threading.Event()
        self.paused.set()
        self.arrived = threading.Event()
        api = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_any(self) -> None:
                body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
                token = self.headers.get("Authorization", "").removeprefix("Bearer ")
                path = self.path.removeprefix("/execution")
                api.requests.append((self.command, path, json.loads(body) if body else None, token))
                api.arrived.set()
                kind = path.partition("?")[0].rsplit("/", 1)[-1]
                if not api.stuck or kind in api.stuck:
                    api.paused.wait(20)
                refused = bool(api.accepted) and token not in api.accepted
                default = 200 if kind == "run" or self.command == "GET" else 204
                status = 403 if refused else api.status.get(kind, default)
                answer = b"" if status == 204 else json.dumps({"kind": kind}).encode()
                if path.startswith("/variables/kept") and status < 300:
                    if self.command == "GET":
                        status = 200 if kind in api.variables else 404
                        answer = json.dumps(api.variables.get(kind)).encode()
                    elif self.command == "PUT":
                        api.variables[kind] = json.loads(body)
                    else:
                        api.variables.pop(kind, None)
                self.send_response(status)
                self.send_header("Content-Type", "application/json")
                if self.command == "HEAD":
                    self.send_header("Content-Range", f"map_indexes {len(api.variables)}")
                if api.refresh:
                    self.send_header("Refreshed-API-Token", api.refresh)
                if status != 204:
                    self.send_header("Content-Length", str(len(answer)))
                self.end_headers()
                if self.command != "HEAD":
                    self.wfile.write(answer)

            do_GET = do_HEAD = do_PUT = do_PATCH = do_POST = do_DELETE = do_any

            def log_message(self, *_: Any) -> None:
                return

        self._handler = Handler
        self._server = self._serve(("127.0.0.1", 0))
        self.port = int(self._server.server_address[1])

    def _serve(self, address: tuple[str, int]) -> ThreadingHTTPServer:
        server = ThreadingHTTPServer(address, self._handler)
        server.daemon_threads = True
        if self.tls is not None:
            server.socket = self.tls.wrap_socket(server.socket, server_side=True)
        threading.Thread(target=server.serve_forever, args=(0.02,), daemon=True).start()
        return server

    def hold_up(self, kind: str) -> None:
        """Have calls of this kind, and only those, answered once ``paused`` is set again."""
        self.stuck = {kind}
        self.paused.clear()

    @property
    def url(self) -> str:
        return f"http{'s' if self.tls else ''}://127.0.0.1:{self.port}/execution/"

    def calls(self, kind: str) -> list[tuple[str, str, Any, str]]:
        return [x for x in self.requests if x[1].partition("?")[0].endswith(f"/{kind}")]

    def stop(self) -> None:
        self._server.shutdown()
        self._server.server_close()

    def start_again(self) -> None:
        self._server = self._serve(("127.0.0.1", self.port))
