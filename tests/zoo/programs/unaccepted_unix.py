"""A unix connection that waits to be accepted, with data in it, until /gate/accept is there."""

import os
import socket

from common import run

listener = socket.socket(socket.AF_UNIX)
listener.bind("\0zoo-unaccepted")
listener.listen()
client = socket.socket(socket.AF_UNIX)
client.connect("\0zoo-unaccepted")
client.sendall(b"sent before it was accepted")
accepted: list[socket.socket] = []


def check(n: int) -> None:
    if not accepted and os.path.exists("/gate/accept"):
        accepted.append(listener.accept()[0])
        assert accepted[0].recv(100) == b"sent before it was accepted"
    if accepted:
        client.sendall(b"%d" % n)
        assert accepted[0].recv(100) == b"%d" % n


run(check)
