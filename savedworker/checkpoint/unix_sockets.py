"""Who a unix socket is connected to: the kernel says so only by sock_diag(7), for one network namespace at a time."""

from __future__ import annotations

import contextlib
import ctypes
import os
import socket
import struct
import threading

_NETLINK_SOCK_DIAG = 4
_SOCK_DIAG_BY_FAMILY = 20
_NLM_F_REQUEST, _NLM_F_DUMP = 1, 0x300
_NLMSG_ERROR, _NLMSG_DONE = 2, 3
_UDIAG_SHOW_PEER = 4
_UNIX_DIAG_PEER = 2
_HEADER = struct.Struct("=IHHII")
_MESSAGE = struct.Struct("=BBBBIII")
_ATTRIBUTE = struct.Struct("=HH")
_CLONE_NEWNET = 0x40000000
_libc = ctypes.CDLL(None, use_errno=True)


def unix_peers(pid: int) -> dict[int, int]:
    """Inode of every unix socket in the network namespace of ``pid``, and its peer's (0: none). Empty when that is unknown."""
    found: dict[int, int] = {}

    def look() -> None:
        with contextlib.suppress(OSError):
            namespace = os.open(f"/proc/{pid}/ns/net", os.O_RDONLY)
            try:
                if _libc.setns(namespace, _CLONE_NEWNET):  # this thread alone, which ends with this
                    return
            finally:
                os.close(namespace)
            found.update(_dump())

    thread = threading.Thread(target=look, name="unix-peers")
    thread.start()
    thread.join()
    return found


def _dump() -> dict[int, int]:
    found: dict[int, int] = {}
    request = struct.pack("=BBHIIIII", socket.AF_UNIX, 0, 0, 0xFFFFFFFF, 0, _UDIAG_SHOW_PEER, 0, 0)
    header = _HEADER.pack(
        _HEADER.size + len(request), _SOCK_DIAG_BY_FAMILY, _NLM_F_REQUEST | _NLM_F_DUMP, 1, 0
    )
    with socket.socket(socket.AF_NETLINK, socket.SOCK_DGRAM, _NETLINK_SOCK_DIAG) as netlink:
        netlink.settimeout(5)
        netlink.send(header + request)
        while True:
            data = netlink.recv(1 << 18)
            at = 0
            while at + _HEADER.size <= len(data):
                length, kind, *_ = _HEADER.unpack_from(data, at)
                if kind in (_NLMSG_DONE, _NLMSG_ERROR) or length < _HEADER.size:
                    return found
                inode, peer = _socket(data[at + _HEADER.size : at + length])
                found[inode] = peer
                at += (length + 3) & ~3


def _socket(message: bytes) -> tuple[int, int]:
    _, _, _, _, inode, _, _ = _MESSAGE.unpack_from(message)
    at, peer = _MESSAGE.size, 0
    while at + _ATTRIBUTE.size <= len(message):
        length, kind = _ATTRIBUTE.unpack_from(message, at)
        if kind == _UNIX_DIAG_PEER:
            (peer,) = struct.unpack_from("=I", message, at + _ATTRIBUTE.size)
        at += max(4, (length + 3) & ~3)
    return int(inode), int(peer)
