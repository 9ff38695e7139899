"""epoll with a descriptor that was closed here but lives on in a child: the kernel still watches it."""

import os
import select
import time

from common import run

read, write = os.pipe()
poll = select.epoll()
poll.register(read, select.EPOLLIN)
child = os.fork()
if child == 0:
    while True:
        time.sleep(1)
os.close(read)


def check(n: int) -> None:
    os.write(write, b"x")
    assert poll.poll(1), "epoll told nothing"


run(check)
os.kill(child, 9)
