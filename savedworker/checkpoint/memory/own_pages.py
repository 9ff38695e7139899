"""Which pages of a process are its own: in memory, and not of a file.

A program may reserve terabytes and use a few pages of them (sanitizers, Go, the JVM), so what is not there must cost nothing:
PAGEMAP_SCAN (Linux 6.7; Documentation/admin-guide/mm/pagemap.rst) skips it. Older kernels are asked page by page.
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import os
from collections.abc import Callable, Iterator

import numpy as np

from savedworker.checkpoint.memory.pagemap import PAGE

PAGEMAP_SCAN = 0xC0606610
"""_IOWR('f', 16, struct pm_scan_arg)"""
_IS_FILE, _IS_PRESENT, _IS_PFNZERO = 1 << 2, 1 << 3, 1 << 5
_PRESENT, _FILE = np.uint64(1 << 63), np.uint64(1 << 61)
_REGIONS = 4096
_READ = 64 << 20
"""Bytes of address space that are asked for at once where the kernel has to be asked page by page."""


class _Region(ctypes.Structure):
    _fields_ = tuple((name, ctypes.c_uint64) for name in ("start", "end", "categories"))


class _Scan(ctypes.Structure):
    _fields_ = tuple(
        (name, ctypes.c_uint64)
        for name in (
            "size",
            "flags",
            "start",
            "end",
            "walk_end",
            "vec",
            "vec_len",
            "max_pages",
            "category_inverted",
            "category_mask",
            "category_anyof_mask",
            "return_mask",
        )
    )


def own_pages(
    pagemap: int, start: int, end: int, still_wanted: Callable[[], None]
) -> Iterator[tuple[int, int]]:
    """Start and end of each run of own pages between two addresses. ``pagemap``: a descriptor of /proc/PID/pagemap. Raises OSError.

    What is swapped out does not count: reading it would bring it back.
    """
    try:
        yield from _scan(pagemap, start, end, still_wanted)
    except OSError as error:
        if error.errno not in (errno.ENOTTY, errno.EINVAL):
            raise
        yield from _ask_each(pagemap, start, end, still_wanted)


def _scan(pagemap: int, start: int, end: int, still_wanted: Callable[[], None]) -> Iterator[tuple[int, int]]:
    regions = (_Region * _REGIONS)()
    done = start
    while start < end:
        still_wanted()
        scan = _Scan(
            size=ctypes.sizeof(_Scan),
            start=start,
            end=end,
            vec=ctypes.addressof(regions),
            vec_len=_REGIONS,
            category_inverted=_IS_FILE | _IS_PFNZERO,
            category_mask=_IS_FILE | _IS_PFNZERO | _IS_PRESENT,
            return_mask=_IS_PRESENT,
        )
        found = fcntl.ioctl(pagemap, PAGEMAP_SCAN, scan)
        for region in regions[:found]:
            if region.end > done:  # a scan that goes on begins with what it had told before the list was full
                yield max(region.start, done), region.end
                done = region.end
        if scan.walk_end <= start:
            return
        start = scan.walk_end


def _ask_each(
    pagemap: int, start: int, end: int, still_wanted: Callable[[], None]
) -> Iterator[tuple[int, int]]:
    while start < end:
        still_wanted()
        stop = min(end, start + _READ)
        data = os.pread(pagemap, (stop - start) // PAGE * 8, start // PAGE * 8)
        entries = np.frombuffer(data, dtype=np.uint64)
        own = (entries & (_PRESENT | _FILE)) == _PRESENT
        edges = np.flatnonzero(np.diff(np.concatenate(([False], own, [False])).astype(np.int8)))
        for first, last in zip(edges[::2].tolist(), edges[1::2].tolist(), strict=True):
            yield start + first * PAGE, start + last * PAGE
        start = stop
