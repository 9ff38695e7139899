"""What every program of the zoo does: say ``ready``, check its own state over and over, say ``ok N``, end when told to."""

from __future__ import annotations

import ctypes
import os
import sys
import time
from collections.abc import Callable

libc = ctypes.CDLL(None, use_errno=True)


def say(*words: object) -> None:
    """One write: lines of several threads and processes do not mix."""
    os.write(1, (" ".join(map(str, words)) + "\n").encode())


def told_to_end() -> bool:
    return os.path.exists("/gate/end")


def run(check: Callable[[int], object], pause: float = 0.1) -> None:
    """Call ``check`` until told to end. What it raises ends the program with a traceback and status 1."""
    say("ready")
    number = 0
    while not told_to_end():
        number += 1
        check(number)
        say("ok", number)
        time.sleep(pause)
    say("done")


def called(result: int, what: str) -> int:
    """The result of a C function, or the error that errno tells."""
    if result < 0:
        number = ctypes.get_errno()
        raise OSError(number, f"{what}: {os.strerror(number)}")
    return result


def within(seconds: float, condition: Callable[[], object], what: str) -> None:
    """Wait until ``condition`` holds; fail saying ``what`` did not happen."""
    until = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > until:
            sys.exit(f"{what} did not happen within {seconds} s")
        time.sleep(0.01)
