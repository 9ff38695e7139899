"""A counter outside every worker: programs post each step to it, so that what was done, again or never, is known for certain."""

from __future__ import annotations

import socketserver
import threading
import time
from dataclasses import dataclass
from datetime import UTC, datetime

from savedworker.fleet.local import network
from tests.runtime.world import BRIDGE


@dataclass(frozen=True)
class Arrival:
    """One step as it arrived. ``nonce`` was drawn when the posting process began."""

    at: datetime
    nonce: str
    step: int


class Counter:
    """Listens where hosts reach it. A step's answer is held back while the step is beyond ``hold_at``: the program waits."""

    def __init__(self) -> None:
        network.ensure_bridge()
        self.arrivals: list[Arrival] = []
        self.files: dict[str, bytes] = {}
        self._limit: float = float("inf")
        self._changed = threading.Condition()
        self._server = _Server((BRIDGE, 0), _Handler)
        self._server.counter = self
        self.address = f"{BRIDGE}:{self._server.server_address[1]}"
        threading.Thread(target=self._server.serve_forever, args=(0.05,), daemon=True).start()

    def close(self) -> None:
        """Stop listening; programs that still wait are let go."""
        self.hold_at(float("inf"))
        self._server.shutdown()
        self._server.server_close()

    @property
    def steps(self) -> list[int]:
        """The steps in the order in which they arrived."""
        with self._changed:
            return [arrival.step for arrival in self.arrivals]

    @property
    def nonces(self) -> set[str]:
        with self._changed:
            return {arrival.nonce for arrival in self.arrivals}

    def discard(self, after: int) -> list[Arrival]:
        """Take all arrivals but the first ``after`` out of the count, and return them."""
        with self._changed:
            late, self.arrivals[after:] = self.arrivals[after:], []
        return late

    def hold_at(self, step: float) -> None:
        """From now on programs get no further than this step."""
        with self._changed:
            self._limit = step
            self._changed.notify_all()

    def until(self, step: int, seconds: float = 180.0) -> None:
        """Wait until ``step`` was the last one to arrive, or a later one."""
        self.wait(lambda arrivals: bool(arrivals) and arrivals[-1].step >= step, f"step {step}", seconds)

    def until_arrivals(self, number: int, seconds: float = 180.0) -> None:
        """Wait until that many steps have arrived, repeated ones counted."""
        self.wait(lambda arrivals: len(arrivals) >= number, f"{number} steps in all", seconds)

    def wait(self, condition: object, what: str, seconds: float) -> None:
        assert callable(condition)
        until = time.monotonic() + seconds
        with self._changed:
            while not condition(self.arrivals):
                left = until - time.monotonic()
                if left <= 0:
                    last = self.arrivals[-1] if self.arrivals else None
                    raise AssertionError(f"{what} did not arrive within {seconds:.0f} s; the last was {last}")
                self._changed.wait(left)

    def hear(self, words: list[str]) -> bool:
        """Take one message in. False when the answer is not wanted any more."""
        match words:
            case ["step", nonce, number]:
                step = int(number)
                with self._changed:
                    self.arrivals.append(Arrival(datetime.now(UTC), nonce, step))
                    self._changed.notify_all()
                    self._changed.wait_for(lambda: step <= self._limit)
            case ["file", name, content]:
                with self._changed:
                    self.files[name] = bytes.fromhex(content)
            case _:
                return False
        return True


class _Handler(socketserver.StreamRequestHandler):
    server: _Server

    def handle(self) -> None:
        try:
            while line := self.rfile.readline():
                if not self.server.counter.hear(line.decode().split()):
                    return
                self.wfile.write(b"ok\n")
        except OSError:
            return  # the worker moved: it comes back on another connection


class _Server(socketserver.ThreadingTCPServer):
    allow_reuse_address = True
    daemon_threads = True
    block_on_close = False
    request_queue_size = 64
    counter: Counter
