"""The few system calls on namespaces and mounts that Python 3.11 does not have (setns(2), unshare(2), mount(2))."""

from __future__ import annotations

import ctypes
import os
from pathlib import Path

CLONE_FS = 0x200
CLONE_NEWNS = 0x20000
CLONE_NEWNET = 0x40000000
MS_BIND = 4096
MS_REC = 16384
MS_PRIVATE = 1 << 18
MNT_DETACH = 2
PR_SET_CHILD_SUBREAPER = 36

_libc = ctypes.CDLL(None, use_errno=True)


def _check(result: int, what: str) -> None:
    if result != 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{what}: {os.strerror(number)}")


def setns(fd: int, kind: int) -> None:
    """Move the calling thread into the namespace behind ``fd``. Raises OSError."""
    _check(_libc.setns(fd, kind), "setns")


def unshare(flags: int) -> None:
    """Give the calling thread its own copy of what ``flags`` name. Raises OSError."""
    _check(_libc.unshare(flags), "unshare")


def mount(source: str, target: Path, kind: str | None, flags: int = 0, data: str | None = None) -> None:
    """mount(2). Raises OSError."""
    _check(
        _libc.mount(
            source.encode(),
            os.fsencode(target),
            kind.encode() if kind else None,
            ctypes.c_ulong(flags),
            data.encode() if data else None,
        ),
        f"mount {target}",
    )


def detach(target: Path) -> None:
    """Lazy unmount: the mount leaves the tree at once and dies with its last user. Raises OSError."""
    _check(_libc.umount2(os.fsencode(target), MNT_DETACH), f"umount {target}")


def become_subreaper() -> None:
    """Have orphans among the descendants become children of this process (prctl(2)). Raises OSError."""
    _check(_libc.prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0), "prctl")
