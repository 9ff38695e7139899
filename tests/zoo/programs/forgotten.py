"""Settings of processes and sockets: says which of them are not what they were. None of them changes what is computed."""

import fcntl
import os
import signal
import socket
import struct
import time

from common import ctypes, libc, run, say

BY_PROCESS, PR_SET_TIMERSLACK, PR_GET_TIMERSLACK, PR_MCE_KILL, PR_MCE_KILL_GET = 1, 29, 30, 33, 34
SYS = (
    {"ioprio_set": 251, "ioprio_get": 252, "set_mempolicy": 238, "get_mempolicy": 239}
    if os.uname().machine == "x86_64"
    else {}
)

libc.prctl(PR_SET_TIMERSLACK, 123456, 0, 0, 0)
libc.prctl(PR_MCE_KILL, 1, 1, 0, 0)
libc.personality(0x0040000)
with open("/proc/self/coredump_filter", "w") as file:
    file.write("0x7")
if SYS:
    libc.syscall(SYS["ioprio_set"], BY_PROCESS, 0, 2 << 13 | 6)
    libc.syscall(SYS["set_mempolicy"], 2, ctypes.byref(ctypes.c_ulong(1)), 8)
listener = socket.create_server(("127.0.0.1", 0))
client = socket.create_connection(listener.getsockname())
accepted, _ = listener.accept()
listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_DEFER_ACCEPT, 5)
OPTIONS = {
    "TCP_USER_TIMEOUT": (socket.IPPROTO_TCP, 18, 5000),
    "TCP_KEEPIDLE": (socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, 77),
    "TCP_QUICKACK": (socket.IPPROTO_TCP, socket.TCP_QUICKACK, 0),
    "TCP_SYNCNT": (socket.IPPROTO_TCP, socket.TCP_SYNCNT, 3),
    "TCP_LINGER2": (socket.IPPROTO_TCP, socket.TCP_LINGER2, 9),
    "TCP_NOTSENT_LOWAT": (socket.IPPROTO_TCP, 25, 1000),
    "IP_TTL": (socket.IPPROTO_IP, socket.IP_TTL, 33),
    "IP_TOS": (socket.IPPROTO_IP, socket.IP_TOS, 16),
    "SO_RCVBUF": (socket.SOL_SOCKET, socket.SO_RCVBUF, 40000),
    "SO_PRIORITY": (socket.SOL_SOCKET, socket.SO_PRIORITY, 3),
    "SO_TIMESTAMP": (socket.SOL_SOCKET, 29, 1),
    "SO_BUSY_POLL": (socket.SOL_SOCKET, 46, 10),
    "SO_RCVLOWAT": (socket.SOL_SOCKET, socket.SO_RCVLOWAT, 2),
}
for level, option, value in OPTIONS.values():
    client.setsockopt(level, option, value)
client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, struct.pack("qq", 3, 5))
other = (
    b"reno"
    if not client.getsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, 16).startswith(b"reno")
    else b"cubic"
)
client.setsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, other)
group = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
group.bind(("", 0))
group.setsockopt(
    socket.IPPROTO_IP, socket.IP_ADD_MEMBERSHIP, socket.inet_aton("224.1.1.1") + socket.inet_aton("127.0.0.1")
)
group.setsockopt(socket.IPPROTO_IP, socket.IP_MULTICAST_IF, socket.inet_aton("127.0.0.1"))
sender = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
group.settimeout(0.3)
read, write = os.pipe()
signalled = 0


def count(*_: object) -> None:
    global signalled
    signalled += 1


signal.signal(signal.SIGUSR2, count)
fcntl.fcntl(read, fcntl.F_SETOWN, os.getpid())
fcntl.fcntl(read, 10, signal.SIGUSR2)  # F_SETSIG
fcntl.fcntl(read, fcntl.F_SETFL, os.O_ASYNC | os.O_NONBLOCK)


def look() -> dict[str, object]:
    found: dict[str, object] = {
        "timer slack": libc.prctl(PR_GET_TIMERSLACK, 0, 0, 0, 0),
        "machine check policy": libc.prctl(PR_MCE_KILL_GET, 0, 0, 0, 0),
        "personality": libc.personality(-1),
        "coredump_filter": open("/proc/self/coredump_filter").read(),
        "TCP_CONGESTION": client.getsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, 16),
        "TCP_DEFER_ACCEPT": listener.getsockopt(socket.IPPROTO_TCP, socket.TCP_DEFER_ACCEPT),
        "SO_RCVTIMEO": client.getsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, 16)[:8],
    }
    if SYS:
        found["I/O priority"] = libc.syscall(SYS["ioprio_get"], BY_PROCESS, 0)
        policy = ctypes.c_int()
        libc.syscall(SYS["get_mempolicy"], ctypes.byref(policy), None, 0, 0, 0)
        found["NUMA memory policy"] = policy.value
    for name, (level, option, _) in OPTIONS.items():
        found[name] = client.getsockopt(level, option)
    sender.setsockopt(socket.IPPROTO_IP, socket.IP_MULTICAST_IF, socket.inet_aton("127.0.0.1"))
    sender.sendto(b"x", ("224.1.1.1", group.getsockname()[1]))
    try:
        found["multicast membership"] = group.recv(10)
    except TimeoutError:
        found["multicast membership"] = None
    before = signalled
    os.write(write, b"x")
    time.sleep(0.05)
    found["signal-driven I/O (O_ASYNC)"] = signalled > before
    os.read(read, 10)
    return found


first = look()
told: set[str] = set()


def check(n: int) -> None:
    now = look()
    for name, value in first.items():
        if now[name] != value and name not in told:
            told.add(name)
            say(f"forgotten: {name}")


run(check)
