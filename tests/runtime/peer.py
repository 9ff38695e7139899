"""A TCP server outside every worker and every host, which remembers how each of its connections went."""

from __future__ import annotations

import contextlib
import socket
import threading
from dataclasses import dataclass, field

IP_FREEBIND = 15


@dataclass
class Talk:
    """One connection. ``end``: how the server learned of its end (``EOF``, or the name of an error)."""

    number: int
    lines: list[str] = field(default_factory=list)
    end: str | None = None


class Peer:
    """Answers every line with the same line."""

    def __init__(self, address: str) -> None:
        self._listener = socket.socket()
        self._listener.setsockopt(socket.IPPROTO_IP, IP_FREEBIND, 1)  # the bridge may not be there yet
        self._listener.bind((address, 0))
        self._listener.listen()
        self.port: int = self._listener.getsockname()[1]
        self.talks: list[Talk] = []
        self._connections: list[socket.socket] = []
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self) -> None:
        while True:
            try:
                connection, _ = self._listener.accept()
            except OSError:
                return
            talk = Talk(len(self.talks))
            self.talks.append(talk)
            self._connections.append(connection)
            threading.Thread(target=self._serve, args=(connection, talk), daemon=True).start()

    @staticmethod
    def _serve(connection: socket.socket, talk: Talk) -> None:
        buffer = b""
        try:
            while data := connection.recv(65536):
                buffer += data
                *lines, buffer = buffer.split(b"\n")
                for line in lines:
                    talk.lines.append(line.decode())
                    connection.sendall(line + b"\n")
            talk.end = "EOF"
        except OSError as error:
            talk.end = type(error).__name__

    def close(self) -> None:
        for connection in (self._listener, *self._connections):
            with contextlib.suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)
            connection.close()
