"""A descriptor on its way through a unix socket (SCM_RIGHTS), not yet received at the move."""

import os
import socket

from common import run

one, two = socket.socketpair()
os.makedirs("/srv/zoo", exist_ok=True)


def send(n: int) -> None:
    with open(f"/srv/zoo/passed-{n}", "w+") as file:
        file.write(f"content {n}")
        file.flush()
        socket.send_fds(one, [b"x"], [file.fileno()])


send(0)


def check(n: int) -> None:
    _, fds, _, _ = socket.recv_fds(two, 10, 1)
    assert len(fds) == 1, "the descriptor got lost"
    assert os.pread(fds[0], 100, 0) == f"content {n - 1}".encode(), "it is another file"
    os.close(fds[0])
    send(n)


run(check, 0.3)
