"""Connections inside the worker that are not accepted yet at the move: the client gets an error at once, and connects again."""

import contextlib
import os
import socket
import sys
import threading
import time

from common import run, say

listener = socket.create_server(("127.0.0.1", 0))
rounds = 0


def client() -> None:
    global rounds
    while True:
        sock = socket.socket()
        try:
            sock.connect(listener.getsockname())
            sock.sendall(b"sent before it was accepted")
            answer = sock.recv(100)
        except OSError as error:
            say("again", type(error).__name__)
            continue
        if answer != b"answer":
            say("wrong: a clean end instead of an error:", answer)
            os._exit(1)
        sock.close()
        rounds += 1


threading.Thread(target=client, daemon=True).start()


def check(n: int) -> None:
    time.sleep(0.3)  # in which the connection waits to be accepted
    before = rounds
    until = time.monotonic() + 10
    while rounds == before:
        if time.monotonic() > until:
            sys.exit("the client waits for ever")
        listener.settimeout(1)
        with contextlib.suppress(OSError):
            accepted, _ = listener.accept()
            accepted.settimeout(1)
            if accepted.recv(100) == b"sent before it was accepted":
                accepted.sendall(b"answer")
            accepted.close()


run(check)
