"""Unix sockets: stream, datagram and seqpacket, by path, abstract and as pairs, with unread messages."""

import os
import socket

from common import run

os.makedirs("/srv/zoo", exist_ok=True)
pairs = {}
for kind in (socket.SOCK_STREAM, socket.SOCK_DGRAM, socket.SOCK_SEQPACKET):
    pairs[kind.name, "pair"] = socket.socketpair(socket.AF_UNIX, kind)
    for name in (f"/srv/zoo/{kind.name}", f"\0zoo-{kind.name}"):
        server = socket.socket(socket.AF_UNIX, kind)
        server.bind(name)
        client = socket.socket(socket.AF_UNIX, kind)
        if kind == socket.SOCK_DGRAM:
            client.connect(name)
            pairs[kind.name, name] = (client, server)
        else:
            server.listen()
            client.connect(name)
            accepted, _ = server.accept()
            pairs[kind.name, name] = (client, accepted)
            pairs[kind.name, name, "listener"] = (client, server)
messages = {}
for key, (client, server) in pairs.items():
    if "listener" not in key:
        client.send(b"message 0")
pairs["SOCK_STREAM", "pair"][0].setsockopt(socket.SOL_SOCKET, socket.SO_PASSCRED, 1)


def check(n: int) -> None:
    for key, (client, server) in pairs.items():
        if "listener" in key:
            new = socket.socket(socket.AF_UNIX, client.type)
            new.settimeout(10)
            new.connect(key[1])
            accepted, _ = server.accept()
            accepted.send(b"new")
            assert new.recv(100) == b"new", key
            new.close()
            accepted.close()
            continue
        assert server.recv(100) == b"message %d" % (n - 1), key
        client.send(b"message %d" % n)  # unread until the next round
    assert pairs["SOCK_STREAM", "pair"][0].getsockopt(socket.SOL_SOCKET, socket.SO_PASSCRED) == 1


run(check)
