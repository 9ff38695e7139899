"""How old objects are: by the store's own clock, never by this machine's wall clock, which may be wrong by days."""

from __future__ import annotations

import time
from datetime import datetime

from savedworker.model.errors import Fatal
from savedworker.store.backend import Store


def running_clock() -> float:
    """Seconds on a clock that nobody sets, for how long something took. Where it can, it goes on while the machine is suspended."""
    if hasattr(time, "CLOCK_BOOTTIME"):
        return time.clock_gettime(time.CLOCK_BOOTTIME)
    return time.monotonic()


def store_time(store: Store, key: str) -> datetime:
    """The time on the store's clock, a little in the past: when the object ``key``, which is overwritten, was written.

    Raises what ``Store`` does, and Fatal when somebody deletes the object at once.
    """
    store.put(key, b"")
    info = store.head(key)
    if info is None:
        raise Fatal(f"{key} vanished as soon as it was written", "see what else deletes objects in the store")
    return info.modified
