"""Name resolution for the worker: a forwarder at a fixed address, to the resolvers of the instance it is on at present.

A worker's libraries may have read ``resolv.conf`` long ago on another instance, and a resolver on the instance's own loopback
(systemd-resolved's 127.0.0.53) cannot be reached from inside. So the file names an address that is the same everywhere.
"""

from __future__ import annotations

import contextlib
import ipaddress
import logging
import selectors
import socket
import struct
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from savedworker.checkpoint.network import GATEWAY, NAMESERVER

log = logging.getLogger(__name__)

DNS_PORT = 53
RESOLV_CONF = Path("/etc/resolv.conf")
SYSTEMD_RESOLV_CONF = Path("/run/systemd/resolve/resolv.conf")
"""What systemd-resolved itself asks: used where its own address does not answer, as in another network namespace."""
PER_RESOLVER = 1.5
"""Seconds that one resolver has; libraries ask again after 5."""
PENDING_MOST = 512
"""Questions under way over UDP; further ones are dropped, and asked again by whoever asked."""
CONNECTIONS_MOST = 64
TCP_PATIENCE = 10.0
_MAX_MESSAGE = 65535
_HEADER = 12

Resolver = tuple[str, int]
"""Address and port."""


def present_resolvers(resolv_conf: Path = RESOLV_CONF, systemd: Path = SYSTEMD_RESOLV_CONF) -> list[Resolver]:
    """The resolvers of this instance, in order. Read at every question: an instance may change them."""
    found = _nameservers(resolv_conf)
    if not found or any(ipaddress.ip_address(x.split("%")[0]).is_loopback for x in found):
        found += [x for x in _nameservers(systemd) if x not in found]
    return [(address, DNS_PORT) for address in found if address != GATEWAY]


def _nameservers(file: Path) -> list[str]:
    try:
        lines = file.read_text(errors="replace").splitlines()
    except OSError:
        return []
    found = []
    for line in lines:
        words = line.split()
        if len(words) > 1 and words[0] == "nameserver":
            with contextlib.suppress(ValueError):
                ipaddress.ip_address(words[1].split("%")[0])
                found.append(words[1])
    return found


@dataclass
class _Question:
    """One question over UDP that is under way."""

    client: tuple[str, int]
    message: bytes
    left: list[Resolver]
    asked: Resolver | None = None
    deadline: float = 0.0


@dataclass
class _Open:
    """What has to be closed, of one stretch of serving."""

    stop: threading.Event = field(default_factory=threading.Event)
    threads: list[threading.Thread] = field(default_factory=list)
    wake: socket.socket | None = None


class DnsForwarder:
    """Forwards questions as they are, over UDP and TCP; answers SERVFAIL when no resolver answers."""

    name = "name resolution"
    endpoint = NAMESERVER

    def __init__(self, resolvers: Callable[[], list[Resolver]] = present_resolvers) -> None:
        self._resolvers = resolvers
        self._good: Resolver | None = None
        self._open: _Open | None = None

    def serve(self, listeners: Mapping[str, socket.socket]) -> None:
        """See ``Service``."""
        opened = self._open = _Open()
        woken, opened.wake = socket.socketpair()
        listeners["udp"].setblocking(False)
        for name, target, arguments in (
            ("udp", self._serve_udp, (listeners["udp"], woken, opened.stop)),
            ("tcp", self._serve_tcp, (listeners["tcp"], opened.stop)),
        ):
            thread = threading.Thread(target=target, args=arguments, daemon=True, name=f"inner-dns-{name}")
            opened.threads.append(thread)
            thread.start()

    def close(self) -> None:
        """See ``Service``."""
        opened, self._open = self._open, None
        if opened is None:
            return
        opened.stop.set()
        if opened.wake is not None:
            opened.wake.close()
        for thread in opened.threads:
            thread.join()

    def _in_order(self) -> list[Resolver]:
        """The resolvers, the one that answered last before the others."""
        known = self._resolvers()
        if self._good in known:
            known.remove(self._good)
            known.insert(0, self._good)
        return known

    # UDP ------------------------------------------------------------------------------------------------------

    def _serve_udp(self, listener: socket.socket, woken: socket.socket, stop: threading.Event) -> None:
        pending: dict[socket.socket, _Question] = {}
        with selectors.DefaultSelector() as selector:
            selector.register(listener, selectors.EVENT_READ)
            selector.register(woken, selectors.EVENT_READ)
            while not stop.is_set():
                soonest = min((x.deadline for x in pending.values()), default=None)
                wait = None if soonest is None else max(0.0, soonest - time.monotonic())
                for key, _ in selector.select(wait):
                    if key.fileobj is listener:
                        self._hear(listener, selector, pending)
                    elif key.fileobj is not woken:
                        assert isinstance(key.fileobj, socket.socket)
                        self._answered(listener, selector, pending, key.fileobj)
                now = time.monotonic()
                for sock in [x for x, question in pending.items() if question.deadline <= now]:
                    self._ask_next(listener, selector, pending, self._drop(selector, pending, sock))
            for sock in list(pending):
                self._drop(selector, pending, sock)
        woken.close()

    def _hear(
        self,
        listener: socket.socket,
        selector: selectors.BaseSelector,
        pending: dict[socket.socket, _Question],
    ) -> None:
        with contextlib.suppress(OSError):
            message, client = listener.recvfrom(_MAX_MESSAGE)
            if len(message) >= _HEADER and len(pending) < PENDING_MOST:
                self._ask_next(listener, selector, pending, _Question(client, message, self._in_order()))

    def _ask_next(
        self,
        listener: socket.socket,
        selector: selectors.BaseSelector,
        pending: dict[socket.socket, _Question],
        question: _Question,
    ) -> None:
        while question.left:
            question.asked = question.left.pop(0)
            try:
                # A socket of its own for every question: the kernel chooses a port that cannot be guessed.
                sock = _connected(question.asked, socket.SOCK_DGRAM)
            except OSError:
                continue
            try:
                sock.send(question.message)
                sock.setblocking(False)
            except OSError:
                sock.close()
                continue
            question.deadline = time.monotonic() + PER_RESOLVER
            pending[sock] = question
            selector.register(sock, selectors.EVENT_READ)
            return
        with contextlib.suppress(OSError):
            listener.sendto(server_failure(question.message), question.client)

    def _answered(
        self,
        listener: socket.socket,
        selector: selectors.BaseSelector,
        pending: dict[socket.socket, _Question],
        sock: socket.socket,
    ) -> None:
        question = pending.get(sock)
        if question is None:
            return
        try:
            message = sock.recv(_MAX_MESSAGE)
        except BlockingIOError:
            return
        except OSError:  # nothing listens there
            self._ask_next(listener, selector, pending, self._drop(selector, pending, sock))
            return
        if message[:2] != question.message[:2] or len(message) < _HEADER:
            return  # an answer to something else
        self._drop(selector, pending, sock)
        self._good = question.asked
        with contextlib.suppress(OSError):
            listener.sendto(message, question.client)

    @staticmethod
    def _drop(
        selector: selectors.BaseSelector, pending: dict[socket.socket, _Question], sock: socket.socket
    ) -> _Question:
        selector.unregister(sock)
        sock.close()
        return pending.pop(sock)

    # TCP ------------------------------------------------------------------------------------------------------

    def _serve_tcp(self, listener: socket.socket, stop: threading.Event) -> None:
        free = threading.BoundedSemaphore(CONNECTIONS_MOST)
        listener.settimeout(0.2)
        while not stop.is_set():
            try:
                connection, _ = listener.accept()
            except TimeoutError:
                continue
            except OSError:
                if stop.is_set():
                    return
                time.sleep(0.1)
                continue
            if not free.acquire(blocking=False):
                connection.close()
                continue
            threading.Thread(
                target=self._talk, args=(connection, free), daemon=True, name="inner-dns-tcp"
            ).start()

    def _talk(self, connection: socket.socket, free: threading.BoundedSemaphore) -> None:
        try:
            with connection, contextlib.suppress(OSError):
                connection.settimeout(TCP_PATIENCE)
                while message := _read_message(connection):
                    answer = self._ask_over_tcp(message) or server_failure(message)
                    connection.sendall(struct.pack("!H", len(answer)) + answer)
        finally:
            free.release()

    def _ask_over_tcp(self, message: bytes) -> bytes | None:
        for resolver in self._in_order():
            with contextlib.suppress(OSError), _connected(resolver, socket.SOCK_STREAM) as sock:
                sock.settimeout(TCP_PATIENCE)
                sock.sendall(struct.pack("!H", len(message)) + message)
                answer = _read_message(sock)
                if answer is not None and answer[:2] == message[:2]:
                    return answer
        return None


def _connected(resolver: Resolver, kind: socket.SocketKind) -> socket.socket:
    family, _, _, _, address = socket.getaddrinfo(*resolver, type=kind, flags=socket.AI_NUMERICHOST)[0]
    sock = socket.socket(family, kind)
    try:
        sock.settimeout(PER_RESOLVER)
        sock.connect(address)
    except OSError:
        sock.close()
        raise
    return sock


def _read_message(connection: socket.socket) -> bytes | None:
    """One message of DNS over TCP; None at the end of the stream."""
    size = _read_exactly(connection, 2)
    if size is None:
        return None
    message = _read_exactly(connection, struct.unpack("!H", size)[0])
    return message if message is not None and len(message) >= _HEADER else None


def _read_exactly(connection: socket.socket, size: int) -> bytes | None:
    found = b""
    while len(found) < size:
        part = connection.recv(size - len(found))
        if not part:
            return None
        found += part
    return found


def server_failure(message: bytes) -> bytes:
    """The answer SERVFAIL to a question: its header and its question section alone (RFC 1035, 4.1)."""
    number, flags, questions = struct.unpack("!HHH", message[:6])
    end = _question_end(message) if questions == 1 else None
    kept = message[_HEADER:end] if end is not None else b""
    # QR, the question's opcode and RD, RA, and 2: server failure
    flags = 0x8000 | (flags & 0x7900) | 0x0080 | 2
    return struct.pack("!HHHHHH", number, flags, 1 if kept else 0, 0, 0, 0) + kept


def _question_end(message: bytes) -> int | None:
    place = _HEADER
    while place < len(message):
        length = message[place]
        if length == 0:
            end = place + 5  # the root label, type and class
            return end if end <= len(message) else None
        if length > 63:
            return None
        place += length + 1
    return None
