"""How an unchanged file is recognised without reading it, and when that must not be believed.

A file whose inode, mode, size, mtime and ctime equal those of an earlier stat has the content that was read after that stat,
with two exceptions, which ``FileState.settled`` rules out:

- *Racily clean* (git's word). The kernel stamps with a coarse clock, so a change in the same tick as the stat leaves the
  ctime as it was. A state is settled only if its ctime is older than the moment of the stat by more than a tick.
- *Shared writable mappings.* Only the first write to a clean page stamps the file (page_mkwrite); later ones do not (seen
  here: ctime moved only after a sync had cleaned the page). Files mapped so are never settled. A mapping made after the
  capture began stamps the file after it began, so it is enough to look for mappings once, after taking the time.
"""

from __future__ import annotations

import os
import time
from dataclasses import dataclass, field

from savedworker.checkpoint.layer.index import Extent

FileId = tuple[int, int]
"""(st_dev, st_ino) as lstat reports them in the captured directory, not as /proc/PID/maps shows them (see mapped.py)."""

_CLOCK_REALTIME_COARSE = 5
"""clock_gettime(2); Python has no name for it. The very clock of file time stamps: no later change can be stamped before it,
however late the tick. (With multigrain time stamps, Linux 6.13, a stamp can be ahead of it but not behind.)"""
_MARGIN_NS = 20_000_000
"""Nanoseconds, a tick or two; costs nothing and covers file systems that round their time stamps a little."""


@dataclass(slots=True)
class FileState:
    """What one inode was when it was captured. ``data``, ``xattrs`` and ``target`` as in ``Entry``.

    ``digest`` is of the content of a file that shares its chunk: one with the same content, read again, need not be stored again.
    """

    mode: int
    size: int
    mtime_ns: int
    ctime_ns: int
    settled: bool
    data: tuple[Extent, ...] = ()
    xattrs: dict[str, bytes] = field(default_factory=dict)
    target: str | None = None
    digest: bytes = b""

    @classmethod
    def of(cls, status: os.stat_result, settled: bool) -> FileState:
        """The state of a file with that lstat; data and attributes are filled in by who reads them."""
        return cls(status.st_mode, status.st_size, status.st_mtime_ns, status.st_ctime_ns, settled)

    def holds_for(self, status: os.stat_result) -> bool:
        """Whether a file with ``status`` still has this content and these attributes."""
        return (
            self.settled
            and self.ctime_ns == status.st_ctime_ns
            and self.mtime_ns == status.st_mtime_ns
            and self.size == status.st_size
            and self.mode == status.st_mode
        )


@dataclass(slots=True)
class Snapshot:
    """The states of one capture, by inode: plain data, meaningful only on the instance that made it.

    Using it as ``previous`` reuses its chunk keys without calling the sink, so they must still be in the store and stay
    there: ask ``ChunkStore.is_fresh`` for each, in the save that uses it.
    """

    states: dict[FileId, FileState] = field(default_factory=dict)


def settled_before() -> int:
    """Nanoseconds on the clock of file time stamps: a ctime before it cannot belong to a change that is yet to come."""
    return time.clock_gettime_ns(_CLOCK_REALTIME_COARSE) - _MARGIN_NS
