"""Name resolution for the worker: whatever resolver the present instance has, over UDP and TCP, and a plain answer when none has one."""

from __future__ import annotations

import contextlib
import socket
import struct
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from savedworker.agent.inner import dns
from savedworker.agent.inner.dns import DnsForwarder, present_resolvers, server_failure
from savedworker.checkpoint.network import GATEWAY


def question(name: str, number: int = 7) -> bytes:
    labels = b"".join(bytes([len(x)]) + x.encode() for x in name.split("."))
    return struct.pack("!HHHHHH", number, 0x0100, 1, 0, 0, 0) + labels + b"\0" + struct.pack("!HH", 1, 1)


def answer_to(message: bytes, whose: bytes) -> bytes:
    """Not what a resolver says, but what a forwarder must bring back unchanged."""
    return message[:2] + b"\x81\x80" + message[4:] + whose


class Resolver:
    """Answers on a loopback port, over UDP and TCP; ``silent`` hears and says nothing, ``wrong`` has another number."""

    def __init__(self, whose: bytes, silent: bool = False) -> None:
        self.whose, self.silent, self.heard = whose, silent, 0
        while True:
            self.tcp = socket.create_server(("127.0.0.1", 0))
            self.udp = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
            try:
                self.udp.bind(self.tcp.getsockname())
                break
            except OSError:
                self.tcp.close()
                self.udp.close()
        self.address = self.tcp.getsockname()
        for target in (self._udp, self._tcp):
            threading.Thread(target=target, daemon=True).start()

    def _udp(self) -> None:
        while True:
            try:
                message, peer = self.udp.recvfrom(65535)
            except OSError:
                return
            self.heard += 1
            if self.silent or not message:
                continue
            self.udp.sendto(b"\xff\xff" + answer_to(message, b"forged")[2:], peer)
            self.udp.sendto(answer_to(message, self.whose), peer)

    def _tcp(self) -> None:
        while True:
            try:
                connection, _ = self.tcp.accept()
            except OSError:
                return
            with connection, contextlib.suppress(OSError, struct.error):  # who asked has given up
                size = struct.unpack("!H", connection.recv(2))[0]
                answer = answer_to(connection.recv(size), self.whose * 300)
                connection.sendall(struct.pack("!H", len(answer)) + answer)

    def close(self) -> None:
        for sock in (self.udp, self.tcp):
            sock.shutdown(socket.SHUT_RDWR) if sock is self.tcp else sock.close()
        self.tcp.close()


@pytest.fixture
def resolvers() -> Iterator[list[Resolver]]:
    made = [Resolver(b"one"), Resolver(b"two")]
    yield made
    for each in made:
        each.close()


class Forwarder:
    """A forwarder on loopback, and somebody who asks it."""

    def __init__(self, known: list[tuple[str, int]]) -> None:
        self.known = known
        self.listeners = {
            "udp": socket.socket(socket.AF_INET, socket.SOCK_DGRAM),
            "tcp": socket.create_server(("127.0.0.1", 0)),
        }
        self.listeners["udp"].bind(("127.0.0.1", 0))
        self.service = DnsForwarder(lambda: list(self.known))
        self.service.serve(self.listeners)

    def ask(self, message: bytes) -> bytes:
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock:
            sock.settimeout(20)
            sock.connect(self.listeners["udp"].getsockname())
            sock.send(message)
            return sock.recv(65535)

    def ask_over_tcp(self, *messages: bytes) -> list[bytes]:
        answers = []
        with socket.create_connection(self.listeners["tcp"].getsockname(), timeout=20) as sock:
            stream = sock.makefile("rb")
            for message in messages:
                sock.sendall(struct.pack("!H", len(message)) + message)
                answers.append(stream.read(struct.unpack("!H", stream.read(2))[0]))
        return answers

    def close(self) -> None:
        self.service.close()
        for listener in self.listeners.values():
            listener.close()


@pytest.fixture
def forwarder(resolvers: list[Resolver]) -> Iterator[Forwarder]:
    made = Forwarder([x.address for x in resolvers])
    yield made
    made.close()


def dead() -> tuple[str, int]:
    """An address where nothing listens."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock:
        sock.bind(("127.0.0.1", 0))
        address: tuple[str, int] = sock.getsockname()
        return address


def test_an_answer_comes_back_unchanged_over_both_protocols_and_forged_ones_do_not(
    forwarder: Forwarder,
) -> None:
    asked = question("example.org")
    assert forwarder.ask(asked) == answer_to(asked, b"one")
    both = [question("a.example.org", 1), question("b.example.org", 2)]
    assert forwarder.ask_over_tcp(*both) == [answer_to(x, b"one" * 300) for x in both]


def test_the_next_resolver_is_asked_when_one_is_dead_or_silent_and_the_good_one_is_asked_first_then(
    forwarder: Forwarder, resolvers: list[Resolver], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(dns, "PER_RESOLVER", 1.5)
    silent = Resolver(b"", silent=True)
    forwarder.known[:] = [dead(), silent.address, resolvers[1].address]
    assert forwarder.ask(question("x.org")).endswith(b"two")
    assert forwarder.ask_over_tcp(question("x.org"))[0].endswith(b"two")
    assert forwarder.ask(question("y.org")).endswith(b"two")
    assert silent.heard == 1
    silent.close()


def test_the_resolvers_of_the_present_instance_count_at_every_question(
    forwarder: Forwarder, resolvers: list[Resolver]
) -> None:
    assert forwarder.ask(question("x.org")).endswith(b"one")
    forwarder.known[:] = [resolvers[1].address]
    assert forwarder.ask(question("x.org")).endswith(b"two")


@pytest.mark.parametrize("known", [[], ["dead"]])
def test_when_nobody_answers_the_worker_hears_so(forwarder: Forwarder, known: list[str]) -> None:
    forwarder.known[:] = [dead() for _ in known]
    asked = question("x.org", 99)
    for answer in (forwarder.ask(asked), *forwarder.ask_over_tcp(asked)):
        number, flags, questions, answers = struct.unpack("!HHHH", answer[:8])
        assert (number, flags & 0x800F, questions, answers) == (99, 0x8002, 1, 0)
        assert answer[12:] == asked[12:]


@pytest.mark.parametrize("rubbish", [b"", b"x", b"\0" * 11, b"\xff" * 12, b"\xff" * 500])
def test_rubbish_does_no_harm(forwarder: Forwarder, rubbish: bytes) -> None:
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock:
        sock.sendto(rubbish, forwarder.listeners["udp"].getsockname())
    with socket.create_connection(forwarder.listeners["tcp"].getsockname(), timeout=20) as sock:
        sock.sendall(rubbish)
    assert forwarder.ask(question("x.org")).endswith(b"one")
    if len(rubbish) >= 12:
        assert len(server_failure(rubbish)) == 12


def test_it_can_be_closed_and_serve_again(forwarder: Forwarder) -> None:
    forwarder.service.close()
    forwarder.service.serve(forwarder.listeners)
    assert forwarder.ask(question("x.org")).endswith(b"one")


def test_which_resolvers_an_instance_has(tmp_path: Path) -> None:
    conf, systemd = tmp_path / "resolv.conf", tmp_path / "systemd.conf"
    assert present_resolvers(conf, systemd) == []
    conf.write_text(
        f"search x\nnameserver 10.0.0.2 # first\nnameserver bogus\nnameserver {GATEWAY}\nnameserver ::2\n"
    )
    systemd.write_text("nameserver 10.9.9.9\n")
    assert present_resolvers(conf, systemd) == [("10.0.0.2", 53), ("::2", 53)]
    conf.write_text("nameserver 127.0.0.53\n")
    assert present_resolvers(conf, systemd) == [("127.0.0.53", 53), ("10.9.9.9", 53)]
