"""Named fifos, pipes with unread data, a larger size, and one whose reader is gone."""

import fcntl
import os
import signal

from common import run

os.makedirs("/srv/zoo", exist_ok=True)
os.mkfifo("/srv/zoo/fifo")
both = os.open("/srv/zoo/fifo", os.O_RDWR)
reader = os.open("/srv/zoo/fifo", os.O_RDONLY | os.O_NONBLOCK)
read, write = os.pipe()
fcntl.fcntl(write, fcntl.F_SETPIPE_SZ, 1 << 18)
filled = os.urandom(200_000)
os.write(write, filled)
gone_read, gone_write = os.pipe()
os.close(gone_read)
signal.signal(signal.SIGPIPE, signal.SIG_IGN)
os.write(both, b"fifo 0")


def check(n: int) -> None:
    assert os.read(reader, 100) == b"fifo %d" % (n - 1), "the fifo"
    os.write(both, b"fifo %d" % n)
    assert fcntl.fcntl(write, fcntl.F_GETPIPE_SZ) == 1 << 18, "the pipe's size"
    data = os.read(read, 1000)
    global filled
    assert data == filled[:1000], "unread data of a pipe"
    filled = filled[1000:] + data
    os.write(write, data)
    try:
        os.write(gone_write, b"x")
    except BrokenPipeError:
        return
    raise AssertionError("the pipe has a reader again")


run(check)
