"""Ends a CRIU restore that makes no end: a damaged image can make it loop for ever and write gigabytes of log (PLATFORM hazard 5)."""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import threading
import time
from collections.abc import Iterator
from pathlib import Path

log = logging.getLogger(__name__)

_LOOK_EVERY = 0.1


class Ended:
    """Why the watchdog stepped in; empty when it did not."""

    def __init__(self) -> None:
        self.why = ""


@contextlib.contextmanager
def watching(log_file: Path, max_log: int, patience: float) -> Iterator[Ended]:
    """During the block, kill whoever has CRIU's ``log_file`` open once it has ``max_log`` bytes or ``patience`` seconds are over.

    The log is cut then, so that its disk is free again for what the worker needs.
    """
    ended = Ended()
    done = threading.Event()

    def watch() -> None:
        until = time.monotonic() + patience
        while not done.wait(_LOOK_EVERY):
            size = log_file.stat().st_size if log_file.exists() else 0
            if size > max_log:
                ended.why = f"its log has {size} bytes"
            elif time.monotonic() > until:
                ended.why = f"it has taken {patience:.0f} s"
            else:
                continue
            log.error("stopping CRIU: %s", ended.why)
            _kill_writers(log_file)
            with contextlib.suppress(OSError):
                os.truncate(log_file, min(size, max_log))
            return

    thread = threading.Thread(target=watch, name="criu-watchdog", daemon=True)
    thread.start()
    try:
        yield ended
    finally:
        done.set()
        thread.join(timeout=10)


def _kill_writers(file: Path) -> None:
    """SIGKILL for every process that has ``file`` open: CRIU, and what it has restored so far."""
    try:
        wanted = os.stat(file)
    except OSError:
        return
    for pid in (int(x) for x in os.listdir("/proc") if x.isdigit() and int(x) != os.getpid()):
        with contextlib.suppress(OSError):
            for name in os.listdir(f"/proc/{pid}/fd"):
                with contextlib.suppress(OSError):
                    found = os.stat(f"/proc/{pid}/fd/{name}")
                    if (found.st_dev, found.st_ino) == (wanted.st_dev, wanted.st_ino):
                        os.kill(pid, signal.SIGKILL)
                        break
