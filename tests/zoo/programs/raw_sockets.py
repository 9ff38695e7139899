"""Raw and packet sockets, and a socket for ping: what tcpdump and ping open."""

import os
import socket

from common import run

raw = socket.socket(socket.AF_INET, socket.SOCK_RAW, socket.IPPROTO_ICMP)
packet = socket.socket(socket.AF_PACKET, socket.SOCK_RAW, socket.htons(3))
packet.bind(("lo", 3))
packet.setblocking(False)
netlink = socket.socket(socket.AF_NETLINK, socket.SOCK_RAW, 0)
netlink.bind((0, 1))


def checksum(data: bytes) -> int:
    total = sum(int.from_bytes(data[i : i + 2], "big") for i in range(0, len(data), 2))
    total = (total >> 16) + (total & 0xFFFF)
    return ~(total + (total >> 16)) & 0xFFFF


def check(n: int) -> None:
    head = bytes([8, 0, 0, 0]) + os.getpid().to_bytes(2, "big") + (n & 0xFFFF).to_bytes(2, "big")
    sent = head[:2] + checksum(head).to_bytes(2, "big") + head[4:]
    raw.sendto(sent, ("127.0.0.1", 0))
    for _ in range(50):
        answer = raw.recv(100)[20:]
        if answer[0] == 0 and answer[4:8] == head[4:8]:
            break
    else:
        raise AssertionError("no answer to a ping")
    seen = 0
    while True:
        try:
            seen += len(packet.recv(200)) > 0
        except BlockingIOError:
            break
    assert seen, "the packet socket sees nothing"
    assert netlink.getsockname()[1] == 1, "a netlink socket's groups"


run(check)
