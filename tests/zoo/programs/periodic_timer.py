"""A periodic timerfd whose expiries are left unread: says how many there were at every look."""

import os
import select
import struct
import time

from common import called, libc, run

timer = called(libc.timerfd_create(time.CLOCK_MONOTONIC, os.O_NONBLOCK), "timerfd_create")
called(
    libc.timerfd_settime(timer, 0, struct.pack("qqqq", 0, 20_000_000, 0, 20_000_000), None), "timerfd_settime"
)


def check(n: int) -> None:
    assert select.select([timer], [], [], 5)[0], "a periodic timerfd never fired again"
    count = struct.unpack("Q", os.read(timer, 8))[0]
    assert count >= 1
    time.sleep(0.4)  # several expiries stay unread


run(check)
