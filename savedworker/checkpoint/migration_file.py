"""``/.savedworker/migrations.json`` and ``/.savedworker/incarnation``: tell the worker itself how often, and for how long, it was
away, and the number of its present incarnation, which it can hand on as a fencing token.

Its monotonic clock does not show the gap and its wall clock leaps, so a program that cares (a watchdog, a token with a life
time) can look here. The file is written while the worker is still frozen and belongs to its writable layer.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import stat
from collections.abc import Callable
from datetime import datetime
from pathlib import Path
from typing import Any

from savedworker.checkpoint.bundle import RUNTIME_FOLDER

log = logging.getLogger(__name__)

NAME = "migrations.json"
INCARNATION = "incarnation"
_KEPT = 100
_MAX_BYTES = 1 << 20


def add_migration(rootfs: Path, checkpoint: str, frozen_at: datetime, restored_at: datetime) -> None:
    """Add one entry; the last hundred are kept. Never raises: the worker may have done anything to the file.

    The worker may also have put symbolic links in the way, so none is followed. An open old file stays as it is.
    """
    entry = {
        "checkpoint": checkpoint,
        "frozen_at": frozen_at.isoformat(),
        "restored_at": restored_at.isoformat(),
        "seconds_away": round(max(0.0, (restored_at - frozen_at).total_seconds()), 3),
    }
    _in_folder(
        rootfs,
        lambda folder: _write(folder, NAME, json.dumps([*_entries(folder), entry][-_KEPT:], indent=1) + "\n"),
    )


def tell_incarnation(rootfs: Path, number: int) -> None:
    """Write the number of the incarnation that begins now. As for ``add_migration``, it never raises."""
    _in_folder(rootfs, lambda folder: _write(folder, INCARNATION, f"{number}\n"))


def _in_folder(rootfs: Path, tell: Callable[[int], None]) -> None:
    """``tell`` with the runtime's folder open. The worker may have removed it, or put something else in its place."""
    try:
        folder = os.open(rootfs / RUNTIME_FOLDER, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
        try:
            tell(folder)
        finally:
            os.close(folder)
    except OSError as error:
        log.warning("the worker is not told of its migration: %s", error)


def _write(folder: int, name: str, text: str) -> None:
    new = f".{name}.new"
    with contextlib.suppress(FileNotFoundError):
        os.unlink(new, dir_fd=folder)
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW
    with os.fdopen(os.open(new, flags, 0o644, dir_fd=folder), "w") as file:
        file.write(text)
    os.rename(new, name, src_dir_fd=folder, dst_dir_fd=folder)


def _entries(folder: int) -> list[Any]:
    """The entries that are there, as far as they are ours: the worker may have written anything into the file."""
    try:
        # A worker's root can make device nodes, and to open one can do something.
        if not stat.S_ISREG(os.stat(NAME, dir_fd=folder, follow_symlinks=False).st_mode):
            return []
        descriptor = os.open(NAME, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK, dir_fd=folder)
        with os.fdopen(descriptor, "rb") as file:
            found = json.loads(file.read(_MAX_BYTES))
    except (OSError, ValueError, RecursionError):
        return []
    return [x for x in found if _is_entry(x)] if isinstance(found, list) else []


def _is_entry(found: Any) -> bool:
    return (
        isinstance(found, dict)
        and found.keys() == {"checkpoint", "frozen_at", "restored_at", "seconds_away"}
        and all(isinstance(x, int | float) or (isinstance(x, str) and len(x) <= 64) for x in found.values())
    )
