"""A base read from the running worker, with no freeze: the first checkpoint is then told against it.

What is read need not be of one moment. It is only a base: a checkpoint stores what differs from it, whatever it is.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

import numpy as np

from savedworker.checkpoint.layer import ChangedWhileFrozen
from savedworker.checkpoint.memory.base import Base
from savedworker.checkpoint.memory.by_offset import ByOffset
from savedworker.checkpoint.memory.capture import Chunks, Group
from savedworker.checkpoint.memory.files import opened
from savedworker.checkpoint.memory.own_pages import own_pages
from savedworker.checkpoint.memory.pagemap import PAGE, PAGES, WINDOW
from savedworker.checkpoint.memory.records import Mask, Words, as_bytes, blank, mask_of
from savedworker.checkpoint.processes import inner_pid

_DENSE = PAGES // 8
"""Pages below which a window is left to the checkpoint: libraries' and stacks' few."""
_KERNEL = {"[vvar]", "[vdso]", "[vsyscall]", "[vvar_vclock]"}


def warm(pids: Iterable[int], base: Base, chunks: Chunks, still_wanted: Callable[[], None]) -> int:
    """Add windows of the private memory of ``pids`` that ``base`` does not have yet; how many bytes were read.

    ``still_wanted`` is called before every window and may raise, as may ``chunks``; what was added stays. Processes that end
    meanwhile, and pages that cannot be read, are left out. Raises OSError when the base cannot be written.
    """
    content = blank()
    total = 0
    for pid in pids:
        name = f"pagemap-{inner_pid(pid)}.img"
        total += _warm(pid, name, base, Group(name, chunks, base), content, still_wanted)
    return total


def warm_shm(
    sources: Iterable[ByOffset], base: Base, chunks: Chunks, still_wanted: Callable[[], None]
) -> int:
    """The same for the files of ``/dev/shm`` that ``sources`` are. Files that are gone or have another size meanwhile are left out."""
    content = blank()
    total = 0
    for source in sources:
        name = source.space.name
        group = Group(name, chunks, base)
        with contextlib.suppress(ChangedWhileFrozen):
            for window in source.space.windows:
                still_wanted()
                if base.find(name, window.number) is not None or window.size < _DENSE * PAGE:
                    continue
                source.read(window, content)
                group.add(window.number, mask_of(window.segments), content)
                group.store_full()
                total += window.size
        group.finish()
    return total


def _warm(
    pid: int, name: str, base: Base, group: Group, content: Words, still_wanted: Callable[[], None]
) -> int:
    total = 0
    try:
        maps = list(_mappings(pid))
        with opened(Path(f"/proc/{pid}/mem"), os.O_RDONLY) as memory:
            windows = list(_windows(pid, maps, still_wanted))
            for number, mask in windows:
                still_wanted()
                if base.find(name, number) is not None or int(mask.sum()) < _DENSE:
                    continue
                if not _read(memory, number * WINDOW, mask, content):
                    continue
                group.add(number, mask, content)
                group.store_full()
                total += int(mask.sum()) * PAGE
    except (FileNotFoundError, ProcessLookupError, PermissionError):
        return total  # it ended
    group.finish()
    return total


def _mappings(pid: int) -> Iterator[tuple[int, int]]:
    """Start and end of the mappings that may have pages of the process's own; not of those that are only reserved."""
    for line in Path(f"/proc/{pid}/maps").read_text().splitlines():
        place, rights, _, _, _, *path = line.split(maxsplit=5)
        if rights[3] == "p" and rights != "---p" and not (path and path[0] in _KERNEL):
            start, _, end = place.partition("-")
            yield int(start, 16), int(end, 16)


def _windows(
    pid: int, maps: list[tuple[int, int]], still_wanted: Callable[[], None]
) -> Iterator[tuple[int, Mask]]:
    """The windows that have pages of the process's own, and which, in order."""
    masks: dict[int, Mask] = {}
    with opened(Path(f"/proc/{pid}/pagemap"), os.O_RDONLY) as pagemap:
        for start, end in maps:
            for first, last in own_pages(pagemap, start, end, still_wanted):
                at = first
                while at < last:
                    number = at // WINDOW
                    stop = min(last, (number + 1) * WINDOW)
                    mask = masks.setdefault(number, np.zeros(PAGES, dtype=np.bool_))
                    mask[at % WINDOW // PAGE : at % WINDOW // PAGE + (stop - at) // PAGE] = True
                    at = stop
    yield from sorted(masks.items())


def _read(memory: int, address: int, mask: Mask, content: Words) -> bool:
    """Read the pages in ``mask`` of the window at ``address``. False when some of them are not there any more."""
    into = as_bytes(content)
    edges = np.flatnonzero(np.diff(np.concatenate(([False], mask, [False])).astype(np.int8)))
    for first, last in zip(edges[::2].tolist(), edges[1::2].tolist(), strict=True):
        at, end = first * PAGE, last * PAGE
        while at < end:
            try:
                got = os.preadv(memory, [into[at:end]], address + at)
            except OSError:
                return False
            if not got:
                return False
            at += got
    return True
