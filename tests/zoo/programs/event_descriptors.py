"""eventfd, timerfd, signalfd, pidfd and nested epoll with edge and one-shot triggers."""

import ctypes
import os
import select
import signal
import struct
import time

from common import called, libc, run

CLOEXEC = os.O_CLOEXEC
counter = called(libc.eventfd(5, CLOEXEC | os.O_NONBLOCK), "eventfd")
timer = called(libc.timerfd_create(time.CLOCK_MONOTONIC, CLOEXEC), "timerfd_create")
far = called(libc.timerfd_create(time.CLOCK_REALTIME, CLOEXEC), "timerfd_create")
called(libc.timerfd_settime(far, 0, struct.pack("qqqq", 0, 0, 100_000, 0), None), "timerfd_settime")
mask = struct.pack("Q", 1 << (signal.SIGUSR2 - 1))
signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGUSR2])
signals = called(libc.signalfd(-1, mask, CLOEXEC), "signalfd")
os.kill(os.getpid(), signal.SIGUSR2)  # pending over every move
child = os.fork()
if child == 0:
    while True:
        time.sleep(1)
process = os.pidfd_open(child)
read, write = os.pipe()
inner = select.epoll()
inner.register(read, select.EPOLLIN | select.EPOLLET)
inner.register(process, select.EPOLLIN)
outer = select.epoll()
outer.register(inner.fileno(), select.EPOLLIN)
outer.register(signals, select.EPOLLIN | select.EPOLLONESHOT)
outer.register(timer, select.EPOLLIN)


def check(n: int) -> None:
    assert struct.unpack("Q", os.read(counter, 8))[0] == 5 + n - 1, "the eventfd's count"
    os.write(counter, struct.pack("Q", 5 + n))
    assert os.read(signals, 128)[0] == signal.SIGUSR2, "the pending signal"
    os.kill(os.getpid(), signal.SIGUSR2)
    called(libc.timerfd_settime(timer, 0, struct.pack("qqqq", 0, 0, 0, 50_000_000), None), "timerfd_settime")
    os.write(write, b"x")
    outer.modify(signals, select.EPOLLIN | select.EPOLLONESHOT)
    seen = set()
    until = time.monotonic() + 10
    while seen != {inner.fileno(), signals, timer}:
        assert time.monotonic() < until, f"epoll told only of {seen}"
        for fd, _ in outer.poll(1):
            seen.add(fd)
            if fd == inner.fileno():
                assert inner.poll(0) == [(read, select.EPOLLIN)], "the inner epoll"
                assert os.read(read, 10) == b"x"
            if fd == timer:
                assert struct.unpack("Q", os.read(timer, 8))[0] == 1, "the timer's expiries"
    buffer = ctypes.create_string_buffer(32)
    called(libc.timerfd_gettime(far, buffer), "timerfd_gettime")
    left = struct.unpack("qqqq", buffer.raw)[2]
    assert 90_000 < left <= 100_000, f"the far timer has {left} s left"
    assert not select.select([process], [], [], 0)[0], "the pidfd says that the child has ended"


run(check)
signal.pidfd_send_signal(process, signal.SIGKILL)
assert os.waitid(os.P_PIDFD, process, os.WEXITED).si_pid == child
