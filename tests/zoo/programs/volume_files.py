"""On a volume: a file mapped shared, one locked, one deleted but open, a fifo."""

import fcntl
import mmap
import os

from common import run

os.makedirs("/gate/files", exist_ok=True)
mapped_file = os.open("/gate/files/mapped", os.O_RDWR | os.O_CREAT)
os.truncate(mapped_file, 1 << 16)
mapped = mmap.mmap(mapped_file, 1 << 16)
locked = os.open("/gate/files/locked", os.O_RDWR | os.O_CREAT)
fcntl.flock(locked, fcntl.LOCK_EX)
gone = os.open("/gate/files/gone", os.O_RDWR | os.O_CREAT)
os.write(gone, b"gone")
os.unlink("/gate/files/gone")
os.mkfifo("/gate/files/fifo")
fifo = os.open("/gate/files/fifo", os.O_RDWR)
os.write(fifo, b"fifo 0")


def check(n: int) -> None:
    mapped[0:8] = n.to_bytes(8, "little")
    assert os.pread(mapped_file, 8, 0) == n.to_bytes(8, "little")
    other = os.open("/gate/files/locked", os.O_RDWR)
    try:
        fcntl.flock(other, fcntl.LOCK_EX | fcntl.LOCK_NB)
        raise AssertionError("a lock on a volume's file is lost")
    except BlockingIOError:
        os.close(other)
    assert os.pread(gone, 10, 0) == b"gone"
    assert os.read(fifo, 100) == b"fifo %d" % (n - 1)
    os.write(fifo, b"fifo %d" % n)
    assert sorted(os.listdir("/gate/files")) == ["fifo", "locked", "mapped"], os.listdir("/gate/files")


run(check)
