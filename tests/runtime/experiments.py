"""An experiment tracker outside every host: runs register once and then post their steps, over HTTP connections that are kept."""

from __future__ import annotations

import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

from savedworker.fleet.local import network
from tests.runtime.world import BRIDGE


class Experiments:
    """``runs``: the steps of each registration, in the order in which they came."""

    def __init__(self) -> None:
        network.ensure_bridge()
        self.runs: list[list[int]] = []
        self.connections: set[tuple[str, int]] = set()
        outer = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_POST(self) -> None:
                body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                outer.connections.add(self.client_address)
                answer = outer.take(self.path, body)
                self.send_response(200)
                self.send_header("Content-Length", str(len(answer)))
                self.end_headers()
                self.wfile.write(answer)

            def log_message(self, *_: object) -> None:
                pass

        class Server(ThreadingHTTPServer):
            def handle_error(self, *_: object) -> None:
                """The host of a client is gone."""

        self._lock = threading.Lock()
        self._server = Server((BRIDGE, 0), Handler)
        self.port: int = self._server.server_address[1]
        threading.Thread(target=self._server.serve_forever, args=(0.05,), daemon=True).start()

    def take(self, path: str, body: dict[str, int]) -> bytes:
        with self._lock:
            if path == "/register":
                self.runs.append([])
                return json.dumps({"run": len(self.runs) - 1}).encode()
            self.runs[body["run"]].append(body["step"])
            return b"{}"

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()
