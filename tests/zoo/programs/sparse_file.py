"""A file of 5 GB with a few written pages: its size, its data and its holes."""

import hashlib
import os

from common import run

os.makedirs("/srv/zoo", exist_ok=True)
SIZE = 5 << 30
file = os.open("/srv/zoo/sparse", os.O_RDWR | os.O_CREAT)
os.truncate(file, SIZE)
written = {at: os.urandom(4096) for at in (0, 1 << 20, 3 << 30, SIZE - 4096)}
for at, data in written.items():
    os.pwrite(file, data, at)


def check(n: int) -> None:
    found = os.fstat(file)
    assert found.st_size == SIZE
    assert found.st_blocks * 512 < 1 << 20, f"the holes are filled: {found.st_blocks * 512} bytes on disk"
    for at, data in written.items():
        assert hashlib.sha256(os.pread(file, 4096, at)).digest() == hashlib.sha256(data).digest(), f"at {at}"
    at = (n % 4) << 30 | 1 << 29
    written[at] = os.urandom(4096)
    os.pwrite(file, written[at], at)


run(check)
