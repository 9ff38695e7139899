"""A small HTTP proxy in front of an object store, which answers as broken networks and overloaded stores do.

One thread per connection, one connection to the store per request. ``Rule``s say which requests suffer what, by client
address, method and path.
"""

from __future__ import annotations

import contextlib
import re
import socket
import socketserver
import struct
import threading
import time
from dataclasses import dataclass, field
from typing import Literal

Trouble = Literal[
    "503",  # Service Unavailable; the store did not see the request
    "slow_down",  # S3's throttling
    "500_after",  # done, and reported as failed
    "reset",  # the connection is reset; the store did not see the request
    "reset_after",  # done, and the connection is reset before the answer
    "hang",  # no answer; the store did not see the request
    "hang_after",  # done, and no answer: what is known as a success reported as a time-out
    "truncate",  # the answer breaks off in the middle of its body
    "altered",  # one byte in the middle of the answer's body is another one
    "missing",  # there is no such object
    "slow",  # the answer comes after ``seconds``
    "full",  # no space is left there; the store did not see the request
    "denied",  # the credentials do not allow it (any more)
]
TROUBLES: tuple[Trouble, ...] = (
    "503", "slow_down", "500_after", "reset", "reset_after", "hang", "hang_after", "truncate", "slow",
)  # fmt: skip
_AFTER = ("500_after", "reset_after", "hang_after", "truncate", "altered", "slow")


@dataclass
class Rule:
    """The next ``times`` requests that match suffer ``trouble``; the first ``skip`` of them are left alone."""

    trouble: Trouble
    method: str = ".*"
    path: str = ".*"
    client: str | None = None
    spared: frozenset[str] = frozenset()
    """Clients that nothing is done to."""
    times: int = 1
    skip: int = 0
    seconds: float = 20.0
    """How long ``hang`` and ``slow`` take."""
    hits: list[str] = field(default_factory=list)

    def applies(self, client: str, method: str, path: str) -> bool:
        if self.times <= 0 or client in self.spared or (self.client is not None and self.client != client):
            return False
        if not re.fullmatch(self.method, method) or not re.search(self.path, path):
            return False
        if self.skip > 0:
            self.skip -= 1
            return False
        self.times -= 1
        self.hits.append(f"{method} {path}")
        return True


class Proxy:
    """Listens on ``address`` (any port) and passes on to ``behind``. ``down`` makes it refuse to answer anybody listed."""

    def __init__(self, address: str, behind: tuple[str, int]) -> None:
        self.behind = behind
        self.rules: list[Rule] = []
        self.requests: list[tuple[str, str, str]] = []
        self.lock = threading.Lock()
        self._server = _Server((address, 0), _Handler)
        self._server.proxy = self
        self.url = f"http://{address}:{self._server.server_address[1]}"
        threading.Thread(target=self._server.serve_forever, args=(0.05,), daemon=True).start()

    def add(self, rule: Rule) -> Rule:
        with self.lock:
            self.rules.append(rule)
        return rule

    def clear(self) -> None:
        with self.lock:
            self.rules.clear()

    def trouble(self, client: str, method: str, path: str) -> Rule | None:
        with self.lock:
            self.requests.append((client, method, path))
            return next((rule for rule in self.rules if rule.applies(client, method, path)), None)

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()


class _Handler(socketserver.StreamRequestHandler):
    server: _Server

    def handle(self) -> None:
        with contextlib.suppress(OSError, ValueError):
            while self._one():
                pass

    def _one(self) -> bool:
        """One request and its answer; False when the connection is over."""
        head = self._head(self.rfile)
        if not head:
            return False
        first, *_ = head.split(b"\r\n", 1)
        method, path, _ = first.decode("latin-1").split(" ", 2)
        if re.search(rb"(?im)^expect: *100-continue", head):
            self.wfile.write(b"HTTP/1.1 100 Continue\r\n\r\n")
        body = self._body(self.rfile, head)
        rule = self.server.proxy.trouble(self.client_address[0], method, path)
        if rule is not None and rule.trouble not in _AFTER:
            return self._fail(rule, b"")
        answer, content = self._ask(head, body, method)
        if rule is not None:
            return self._fail(rule, answer + content, content)
        self.wfile.write(answer + content)
        return True

    def _ask(self, head: bytes, body: bytes, method: str) -> tuple[bytes, bytes]:
        with socket.create_connection(self.server.proxy.behind, timeout=60) as store:
            head = re.sub(rb"(?im)^connection:.*\r\n", b"", head)
            head = re.sub(rb"(?im)^expect:.*\r\n", b"", head)
            store.sendall(head.replace(b"\r\n", b"\r\nConnection: close\r\n", 1) + body)
            file = store.makefile("rb")
            answer = self._head(file)
            bodyless = method == "HEAD" or b" 304 " in answer[:20] or b" 204 " in answer[:20]
            content = b"" if bodyless else self._body(file, answer, answers=True)
        return re.sub(rb"(?im)^connection:.*\r\n", b"", answer), content

    def _fail(self, rule: Rule, answer: bytes, content: bytes = b"") -> bool:
        match rule.trouble:
            case "503":
                self._refuse(503, "ServiceUnavailable")
            case "slow_down":
                self._refuse(503, "SlowDown")
            case "full":
                self._refuse(507, "InsufficientStorage")
            case "denied":
                self._refuse(403, "AccessDenied")
            case "missing":
                self._refuse(404, "NoSuchKey")
            case "500_after":
                self._refuse(500, "InternalError")
            case "hang" | "hang_after":
                time.sleep(rule.seconds)
                return False
            case "reset" | "reset_after":
                linger = struct.pack("ii", 1, 0)
                self.connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, linger)
                self.connection.close()
                return False
            case "truncate":
                self.wfile.write(answer[: len(answer) - (len(content) + 1) // 2])
                return False
            case "altered":
                middle = len(answer) - (len(content) + 1) // 2
                self.wfile.write(answer[:middle] + bytes([answer[middle] ^ 1]) + answer[middle + 1 :])
            case "slow":
                time.sleep(rule.seconds)
                self.wfile.write(answer)
        return True

    def _refuse(self, status: int, code: str) -> None:
        text = f"<Error><Code>{code}</Code><Message>a test says so</Message></Error>"
        self.wfile.write(f"HTTP/1.1 {status} No\r\nContent-Length: {len(text)}\r\n\r\n{text}".encode())

    @staticmethod
    def _head(file: object) -> bytes:
        head = b""
        while True:
            line: bytes = file.readline(65536)  # type: ignore[attr-defined]
            if not line:
                return b""
            head += line
            if line in (b"\r\n", b"\n"):
                if head.startswith(b"HTTP/1.1 100"):
                    head = b""
                    continue
                return head

    @staticmethod
    def _body(file: object, head: bytes, answers: bool = False) -> bytes:
        read = file.read  # type: ignore[attr-defined]
        length = re.search(rb"(?im)^content-length: *(\d+)", head)
        if length:
            return bytes(read(int(length[1])))
        if re.search(rb"(?im)^transfer-encoding: *chunked", head):
            raw = b""
            while True:
                line = file.readline(1024)  # type: ignore[attr-defined]
                raw += line
                size = int(line.split(b";")[0], 16)
                raw += read(size + 2)
                if size == 0:
                    return raw
        return bytes(read()) if answers else b""


class _Server(socketserver.ThreadingTCPServer):
    allow_reuse_address = True
    daemon_threads = True
    block_on_close = False
    request_queue_size = 128
    proxy: Proxy
