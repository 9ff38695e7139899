"""Which CPUs a thread may use (sched_setaffinity): CRIU neither saves nor restores it (seen with 4.2.1).

Kept in a file beside the images, for threads that differ from what this instance gives everybody.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
from collections.abc import Iterable, Iterator
from pathlib import Path

from savedworker.checkpoint import processes

log = logging.getLogger(__name__)

NAME = "affinity.json"
_MAX_BYTES = 64 << 20


def remember(pids: Iterable[int], folder: Path) -> None:
    """Write the affinities of the threads of ``pids`` into ``folder``; no file when nobody asked for any."""
    usual = os.sched_getaffinity(0)
    found = {}
    for inner, thread in _threads(pids):
        with contextlib.suppress(OSError):
            cpus = os.sched_getaffinity(thread)
            if cpus != usual:
                found[inner] = sorted(cpus)
    if found:
        (folder / NAME).write_text(json.dumps(found))


def bring_back(pids: Iterable[int], folder: Path) -> list[str]:
    """Give the threads of ``pids`` what ``folder`` tells; notes on what this instance cannot give. Never raises for that."""
    try:
        with (folder / NAME).open("rb") as file:
            found = json.loads(file.read(_MAX_BYTES))
        wanted = {int(inner): {int(cpu) for cpu in cpus} for inner, cpus in found.items()}
    except FileNotFoundError:
        return []
    except (OSError, ValueError, TypeError, AttributeError, OverflowError, RecursionError) as error:
        log.warning("the affinities of the worker's threads are lost: %s", error)
        return ["the CPU affinities of the worker's threads are lost"]
    here = os.sched_getaffinity(0)
    missed = 0
    for inner, thread in _threads(pids):
        if inner not in wanted:
            continue
        try:
            os.sched_setaffinity(thread, wanted[inner] & here)
        except (OSError, ValueError):
            missed += 1
    return [f"{missed} threads run on any CPU: those that they asked for are not here"] if missed else []


def _threads(pids: Iterable[int]) -> Iterator[tuple[int, int]]:
    """Inner and outer thread id of every thread."""
    for folder in processes.threads(pids):
        with contextlib.suppress(OSError, ValueError):
            for line in (folder / "status").read_text().splitlines():
                if line.startswith("NSpid:"):
                    yield int(line.split()[-1]), int(folder.name)
                    break
