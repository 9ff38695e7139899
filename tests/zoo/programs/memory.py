"""Memory of every kind: memfd with seals, anonymous shared between processes, locked, huge pages, guard pages, growing stack."""

import ctypes
import fcntl
import hashlib
import mmap
import os
import time

from common import called, libc, run

MIB = 1 << 20
memory = os.memfd_create("zoo", os.MFD_ALLOW_SEALING)
os.truncate(memory, 4 * MIB)
os.pwrite(memory, b"sealed", 100)
fcntl.fcntl(memory, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW)
mapped = mmap.mmap(memory, 4 * MIB)
shared = mmap.mmap(-1, MIB)  # shared with the child
locked = mmap.mmap(-1, MIB, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
address = ctypes.addressof(ctypes.c_char.from_buffer(locked))
called(libc.mlock(ctypes.c_void_p(address), ctypes.c_size_t(64 << 10)), "mlock")
huge = mmap.mmap(-1, 16 * MIB, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
huge.madvise(mmap.MADV_HUGEPAGE)
block = os.urandom(16 * MIB)
huge[:] = block
dontfork = mmap.mmap(-1, MIB, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
dontfork.madvise(mmap.MADV_DONTFORK)
dontfork[:4] = b"mine"
readonly = mmap.mmap(-1, MIB, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
readonly[:4] = b"fix!"
called(
    libc.mprotect(
        ctypes.c_void_p(ctypes.addressof(ctypes.c_char.from_buffer(readonly))), ctypes.c_size_t(MIB), 1
    ),
    "mprotect",
)
child = os.fork()
if child == 0:
    while True:
        shared[8:16] = shared[0:8]
        time.sleep(0.005)


def flags_of(start: int) -> set[str]:
    """The VmFlags of the mapping that begins at ``start``."""
    here = False
    for line in open("/proc/self/smaps"):
        if line.startswith(f"{start:x}-"):
            here = True
        if here and line.startswith("VmFlags:"):
            return set(line.split()[1:])
    return set()


def start_of(map_: mmap.mmap) -> int:
    return ctypes.addressof(ctypes.c_char.from_buffer(map_))


def check(n: int) -> None:
    assert os.pread(memory, 6, 100) == b"sealed"
    assert fcntl.fcntl(memory, fcntl.F_GET_SEALS) == fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW, (
        "a memfd's seals"
    )
    mapped[0:8] = n.to_bytes(8, "little")
    assert os.pread(memory, 8, 0) == n.to_bytes(8, "little"), "memfd and its mapping are two"
    shared[0:8] = n.to_bytes(8, "little")
    for _ in range(1000):
        if shared[8:16] == n.to_bytes(8, "little"):
            break
        time.sleep(0.005)
    else:
        raise AssertionError("memory that was shared with a child is shared no more")
    assert "lo" in flags_of(address), "locked memory is not locked any more"
    assert hashlib.sha256(huge).digest() == hashlib.sha256(block).digest(), "huge pages"
    assert "hg" in flags_of(start_of(huge)), "the advice to use huge pages is lost"
    assert "dc" in flags_of(start_of(dontfork)), "MADV_DONTFORK is lost"
    assert readonly[:4] == b"fix!"
    assert "wr" not in flags_of(ctypes.addressof(ctypes.c_char.from_buffer(readonly))), (
        "read-only memory can be written"
    )


run(check)
os.kill(child, 9)
