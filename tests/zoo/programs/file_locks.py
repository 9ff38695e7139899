"""flock, POSIX and open-file-description locks, shared and exclusive, held and waited for by two processes."""

import errno
import fcntl
import os
import struct
import time

from common import run

OFD_SETLK = 37
os.makedirs("/srv/zoo", exist_ok=True)


def record(kind: int, start: int, length: int) -> bytes:
    return struct.pack("hhqqi4x", kind, os.SEEK_SET, start, length, 0)


def taken(attempt) -> bool:
    try:
        attempt()
    except OSError as error:
        assert error.errno in (errno.EAGAIN, errno.EACCES), error
        return True
    return False


files = {
    kind: os.open(f"/srv/zoo/lock-{kind}", os.O_RDWR | os.O_CREAT)
    for kind in ("flock", "shared", "posix", "ofd", "waited")
}
fcntl.flock(files["flock"], fcntl.LOCK_EX)
fcntl.flock(files["shared"], fcntl.LOCK_SH)
fcntl.lockf(files["posix"], fcntl.LOCK_EX, 10, 5)
fcntl.fcntl(files["ofd"], OFD_SETLK, record(fcntl.F_WRLCK, 20, 10))
fcntl.flock(files["waited"], fcntl.LOCK_EX)
ask_read, ask_write = os.pipe()
answer_read, answer_write = os.pipe()
waiting = os.fork()
if waiting == 0:
    mine = os.open("/srv/zoo/lock-waited", os.O_RDWR)
    fcntl.flock(mine, fcntl.LOCK_EX)
    os._exit(0)
other = os.fork()
if other == 0:
    mine = {kind: os.open(f"/srv/zoo/lock-{kind}", os.O_RDWR) for kind in files}
    while os.read(ask_read, 1):
        seen = [
            taken(lambda: fcntl.flock(mine["flock"], fcntl.LOCK_EX | fcntl.LOCK_NB)),
            taken(lambda: fcntl.flock(mine["shared"], fcntl.LOCK_EX | fcntl.LOCK_NB)),
            not taken(lambda: fcntl.flock(mine["shared"], fcntl.LOCK_SH | fcntl.LOCK_NB)),
            taken(lambda: fcntl.lockf(mine["posix"], fcntl.LOCK_EX | fcntl.LOCK_NB, 1, 7)),
            not taken(lambda: fcntl.lockf(mine["posix"], fcntl.LOCK_EX | fcntl.LOCK_NB, 1, 70)),
            taken(lambda: fcntl.fcntl(mine["ofd"], OFD_SETLK, record(fcntl.F_RDLCK, 25, 1))),
        ]
        os.write(answer_write, bytes(seen))
    os._exit(0)
time.sleep(0.2)


def check(n: int) -> None:
    os.write(ask_write, b"?")
    assert os.read(answer_read, 10) == bytes([1] * 6), "a lock is lost, or there is one too many"
    assert os.waitpid(waiting, os.WNOHANG) == (0, 0), "the process that waits for a lock got it"


run(check)
fcntl.flock(files["waited"], fcntl.LOCK_UN)
assert os.waitpid(waiting, 0) == (waiting, 0), "the process that waited never got the lock"
os.kill(other, 9)
