"""TCP and UDP inside the worker, v4 and v6: listening, connected, half closed, with unread data; options stay."""

import socket

from common import run

pairs, listeners = {}, {}
for family, host in ((socket.AF_INET, "127.0.0.1"), (socket.AF_INET6, "::1")):
    listeners[family] = socket.create_server((host, 0), family=family)
    client = socket.create_connection(listeners[family].getsockname()[:2])
    server, _ = listeners[family].accept()
    client.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    client.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    server.sendall(b"u" * 5000)  # stays unread over every move
    half = socket.create_connection(listeners[family].getsockname()[:2])
    other, _ = listeners[family].accept()
    half.sendall(b"last words")
    half.shutdown(socket.SHUT_WR)
    pairs[family] = (client, server, half, other)
udp = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
udp.bind(("127.0.0.1", 0))
connected = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
connected.connect(udp.getsockname())
udp6 = socket.socket(socket.AF_INET6, socket.SOCK_DGRAM)
udp6.bind(("::1", 0))
fresh = socket.socket()
bound = socket.socket()
bound.bind(("127.0.0.1", 0))
port = bound.getsockname()[1]


def check(n: int) -> None:
    for family, (client, server, half, other) in pairs.items():
        assert client.recv(10000, socket.MSG_PEEK | socket.MSG_DONTWAIT) == b"u" * 5000, "unread data"
        client.sendall(b"%d" % n)
        assert server.recv(100) == b"%d" % n, "from client to server"
        assert client.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY) == 1, "TCP_NODELAY"
        assert client.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE) == 1, "SO_KEEPALIVE"
        other.sendall(b"half %d" % n)
        assert half.recv(100) == b"half %d" % n, "a half-closed connection"
        if n == 1:
            assert other.recv(100) == b"last words"
        assert other.recv(100) == b"", "the other half's end"
        new = socket.create_connection(listeners[family].getsockname()[:2], timeout=10)
        accepted, _ = listeners[family].accept()
        accepted.close()
        assert new.recv(10) == b""
        new.close()
    connected.send(b"%d" % n)
    assert udp.recv(100) == b"%d" % n, "UDP"
    udp6.sendto(b"%d" % n, udp6.getsockname()[:2])
    assert udp6.recv(100) == b"%d" % n, "UDP over v6"
    assert bound.getsockname()[1] == port, "a bound socket's port"
    assert fresh.getsockname() == ("0.0.0.0", 0)


run(check)
