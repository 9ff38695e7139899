"""The world outside: what the truth workload did, as seen from where no checkpoint reaches."""

from __future__ import annotations

import socketserver
import threading
import time
from dataclasses import dataclass

from savedworker.fleet.local import network
from tests.runtime.world import BRIDGE


@dataclass(frozen=True)
class Seen:
    """One step as it arrived: by the wall and the monotonic clock, from which host."""

    wall: float
    at: float
    host: str
    step: int
    digits: str
    incarnation: int
    nonce: str


class Tracker:
    """Listens where hosts reach it."""

    def __init__(self) -> None:
        network.ensure_bridge()
        self.seen: list[Seen] = []
        self.proof: str | None = None
        self.file: list[str] = []
        self.connections = 0
        self._limit: float = float("inf")
        self._changed = threading.Condition()
        self._server = _Server((BRIDGE, 0), _Handler)
        self._server.tracker = self
        self.address = f"{BRIDGE}:{self._server.server_address[1]}"
        threading.Thread(target=self._server.serve_forever, args=(0.05,), daemon=True).start()

    def close(self) -> None:
        self.hold_at(float("inf"))
        self._server.shutdown()
        self._server.server_close()

    @property
    def last(self) -> int:
        """The step that arrived last; -1 before the first."""
        return self.seen[-1].step if self.seen else -1

    def hold_at(self, step: float) -> None:
        """From now on the workload gets no further than this step, however slowly the test goes on; it posts it again and again."""
        with self._changed:
            self._limit = step
            self._changed.notify_all()

    def hear(self, host: str, words: list[str]) -> None:
        with self._changed:
            match words:
                case ["step", step, digits, incarnation, nonce]:
                    now = time.time(), time.monotonic()
                    number = int(step)
                    self.seen.append(Seen(*now, host, number, digits, int(incarnation), nonce))
                    self._changed.notify_all()
                    self._changed.wait_for(lambda: number <= self._limit)
                case ["end", proof, content]:
                    self.proof = proof
                    self.file = bytes.fromhex(content).decode().splitlines()
                case _:
                    raise ValueError(f"not understood: {words}")
            self._changed.notify_all()

    def wait(self, seconds: float) -> None:
        """Until something arrives."""
        with self._changed:
            self._changed.wait(seconds)


class _Handler(socketserver.StreamRequestHandler):
    server: _Server

    def handle(self) -> None:
        tracker = self.server.tracker
        tracker.connections += 1
        try:
            while (line := self.rfile.readline()).endswith(b"\n"):
                tracker.hear(self.client_address[0], line.decode().split())
                self.wfile.write(b"ok\n")
        except OSError:
            return


class _Server(socketserver.ThreadingTCPServer):
    allow_reuse_address = True
    daemon_threads = True
    block_on_close = False
    request_queue_size = 64
    tracker: Tracker
