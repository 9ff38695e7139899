"""A pipe in packet mode (O_DIRECT)."""

import os

from common import run

read, write = os.pipe2(os.O_DIRECT | os.O_NONBLOCK)


def check(n: int) -> None:
    os.write(write, b"one")
    os.write(write, b"two")
    assert os.read(read, 100) == b"one"
    assert os.read(read, 100) == b"two"


run(check)
