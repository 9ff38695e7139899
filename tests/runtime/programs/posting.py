"""For the programs that tests run in a worker: posts steps and files to a counter outside, again and again until it answers.

A program knows nothing of checkpoints; like any client it opens a new connection when the old one breaks.
"""

import contextlib
import os
import socket
import time
from pathlib import Path


class Posting:
    """The nonce is drawn once, when the process begins: a cold start would show another one."""

    def __init__(self, address: str) -> None:
        host, _, port = address.rpartition(":")
        self._address = host, int(port)
        self._socket: socket.socket | None = None
        self.nonce = os.urandom(8).hex()
        self.connections = 0

    def step(self, number: int) -> None:
        self._say(f"step {self.nonce} {number}")

    def file(self, path: Path) -> None:
        self._say(f"file {path.name} {path.read_bytes().hex()}")

    def _say(self, message: str) -> None:
        while True:
            try:
                if self._socket is None:
                    self._socket = socket.create_connection(self._address)
                    self.connections += 1
                self._socket.sendall(message.encode() + b"\n")
                if self._socket.recv(16) == b"ok\n":
                    return
                raise ConnectionError("no answer")
            except OSError:
                if self._socket is not None:
                    with contextlib.suppress(OSError):
                        self._socket.close()
                self._socket = None
                time.sleep(0.02)
