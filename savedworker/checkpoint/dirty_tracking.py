"""What this kernel can tell of pages that were written to: for a freeze as long as what changed, not as what there is.

Nothing uses it yet; ``savedworker doctor`` shows it. Two ways: soft-dirty bits (CONFIG_MEM_SOFT_DIRTY), which CRIU's pre-dumps need; or
from outside of the worker, userfaultfd in asynchronous write-protect mode and PAGEMAP_SCAN (both since Linux 6.7).
"""

from __future__ import annotations

import ctypes
import fcntl
import mmap
import os
import platform
import struct
from dataclasses import dataclass

from savedworker.checkpoint.memory.own_pages import PAGEMAP_SCAN

_USERFAULTFD = {"x86_64": 323, "aarch64": 282}
_USER_MODE_ONLY = 1
_UFFDIO_API, _UFFD_API = 0xC018AA3F, 0xAA
_WP_UNPOPULATED, _WP_ASYNC = 1 << 13, 1 << 15
_SCAN_SIZE = 96
_SOFT_DIRTY = 1 << 55
"""Bit of an entry of /proc/PID/pagemap (kernel documentation, admin-guide/mm/pagemap)."""


@dataclass(frozen=True)
class DirtyTracking:
    """What there is."""

    soft_dirty: bool
    write_protect: bool
    """userfaultfd with WP_ASYNC."""
    scan: bool
    """PAGEMAP_SCAN."""

    @property
    def from_outside(self) -> bool:
        """Whether dirty pages can be told from outside of the worker."""
        return self.write_protect and self.scan


def look() -> DirtyTracking:
    """Ask this kernel. Raises OSError when /proc cannot be read."""
    return DirtyTracking(_soft_dirty(), _write_protect(), _scan())


def _soft_dirty() -> bool:
    """A page that was just written to has the bit where the kernel keeps it."""
    with mmap.mmap(-1, mmap.PAGESIZE) as page:
        page[0] = 1
        address = ctypes.addressof(ctypes.c_char.from_buffer(page))
        with open("/proc/self/pagemap", "rb", buffering=0) as pagemap:
            entry = os.pread(pagemap.fileno(), 8, address // mmap.PAGESIZE * 8)
        return bool(struct.unpack("<Q", entry)[0] & _SOFT_DIRTY)


def _write_protect() -> bool:
    number = _USERFAULTFD.get(platform.machine())
    if number is None:
        return False
    libc = ctypes.CDLL(None, use_errno=True)
    fd = libc.syscall(ctypes.c_long(number), ctypes.c_int(os.O_CLOEXEC | os.O_NONBLOCK | _USER_MODE_ONLY))
    if fd < 0:
        return False
    try:
        fcntl.ioctl(fd, _UFFDIO_API, struct.pack("<QQQ", _UFFD_API, _WP_ASYNC | _WP_UNPOPULATED, 0))
    except OSError:
        return False
    finally:
        os.close(fd)
    return True


def _scan() -> bool:
    """An empty scan is refused only by a kernel that does not know it."""
    with open("/proc/self/pagemap", "rb", buffering=0) as pagemap:
        try:
            fcntl.ioctl(
                pagemap.fileno(), PAGEMAP_SCAN, struct.pack("<Q", _SCAN_SIZE).ljust(_SCAN_SIZE, b"\0")
            )
        except OSError:
            return False
    return True
