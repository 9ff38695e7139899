"""Work beside a running worker that gives way to it: low CPU and I/O priority, by thread.

A thread's priorities are inherited by the threads that it starts, so it is enough to begin the work on a thread that gives way. They
are never raised again (that would need CAP_SYS_NICE): a thread that gave way ends with its work.
"""

from __future__ import annotations

import ctypes
import logging
import os
import platform
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

log = logging.getLogger(__name__)

NICE = 19
IO_PRIORITY = 2 << 13 | 7
"""The lowest of the best-effort class (ioprio_set(2)). Not the idle class: on a disk that is never idle no checkpoint would end."""

_SYS_IOPRIO = {"x86_64": (251, 252), "aarch64": (30, 31)}
"""Numbers of ioprio_set and ioprio_get, for which the C library has no names."""
_BY_THREAD = 1
_T = TypeVar("_T")


def give_way() -> None:
    """Let this thread run, and use the disk, only where the worker leaves room. Disks without an I/O scheduler know no priorities."""
    os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), NICE)
    numbers = _SYS_IOPRIO.get(platform.machine())
    if numbers is not None and _syscall(numbers[0], IO_PRIORITY) < 0:
        log.warning("the I/O priority cannot be lowered: %s", os.strerror(ctypes.get_errno()))


def own() -> tuple[int, int]:
    """CPU and I/O priority of this thread: its nice value, and what ioprio_get(2) answers (0: none was set)."""
    numbers = _SYS_IOPRIO.get(platform.machine())
    return (
        os.getpriority(os.PRIO_PROCESS, threading.get_native_id()),
        0 if numbers is None else _syscall(numbers[1]),
    )


def _syscall(number: int, *more: int) -> int:
    libc = ctypes.CDLL(None, use_errno=True)
    libc.syscall.restype = ctypes.c_long
    return int(libc.syscall(ctypes.c_long(number), _BY_THREAD, 0, *more))


def beside(worker_runs: bool, action: Callable[[], _T]) -> _T:
    """What ``action`` returns or raises; while ``worker_runs``, it and the threads that it starts give way."""
    if not worker_runs:
        return action()
    with ThreadPoolExecutor(1, thread_name_prefix="beside", initializer=give_way) as pool:
        return pool.submit(action).result()
