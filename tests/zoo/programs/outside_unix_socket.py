"""A unix stream connection to a server outside, through a socket on a volume (as to a database or docker)."""

import socket

from common import run

client = socket.socket(socket.AF_UNIX)
client.connect("/gate/outside.socket")


def check(n: int) -> None:
    client.sendall(b"%d\n" % n)
    assert client.recv(100) == b"%d\n" % n


run(check)
