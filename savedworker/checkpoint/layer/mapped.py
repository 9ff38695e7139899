"""Which files of a layer a process tree has mapped shared and writable, so that their time stamps prove nothing."""

from __future__ import annotations

import os
import re
import stat
from collections.abc import Iterable
from pathlib import Path

from savedworker.checkpoint.layer.signature import FileId
from savedworker.checkpoint.layer.tree import DirectoryCursor, walk

_SHARED = re.compile(rb"([0-9a-f]+)-([0-9a-f]+) ..[-x]s [0-9a-f]+ [0-9a-f:]+ [1-9]\d* +(/.*)")
_DELETED = " (deleted)"


def shared_writable_files(pids: Iterable[int], upper: Path, mounted_at: str = "/") -> set[FileId]:
    """Ids, as ``finish`` takes them, of the files below ``upper`` that one of ``pids`` could write to through memory.

    ``mounted_at`` is where the overlay is mounted in the processes' own view: ``/`` for a container. The numbers in
    /proc/PID/maps cannot be used: overlayfs shows its own device number there and, for a copied-up file, the *lower*
    file's inode (seen on 6.18). So files are found by path: /proc/PID/map_files gives the name without the escapes of maps,
    and the link's mode says whether the file was opened for writing, which also covers a mapping made read-only by
    mprotect for the moment. A mapped file that was deleted under the name by which it was opened, but has other names, is
    looked for by its times and size instead, which overlayfs passes on from the upper inode. Needs CAP_SYS_ADMIN or CAP_CHECKPOINT_RESTORE (proc(5)). Processes may end meanwhile.
    """
    found: set[FileId] = set()
    nameless: set[tuple[int, int, int]] = set()
    prefix = mounted_at.rstrip("/") + "/"
    for pid in pids:
        try:
            maps = Path(f"/proc/{pid}/maps").read_bytes()
        except (FileNotFoundError, ProcessLookupError):
            continue
        for match in _SHARED.finditer(maps):
            # maps pads addresses with zeros, map_files does not
            link = f"/proc/{pid}/map_files/{int(match[1], 16):x}-{int(match[2], 16):x}"
            try:
                if not os.lstat(link).st_mode & stat.S_IWUSR:
                    continue
                name = os.readlink(link)
            except (FileNotFoundError, ProcessLookupError):
                continue
            if not name.startswith(prefix):
                continue
            found |= _lookup(upper, name[len(prefix) :])
            if name.endswith(_DELETED):
                nameless |= _signature_of_linked(link)
    if nameless:
        with DirectoryCursor(upper) as cursor:
            for _, _, _, status in walk(cursor, tolerant=True):
                if stat.S_ISREG(status.st_mode) and _signature(status) in nameless:
                    found.add((status.st_dev, status.st_ino))
    return found


def _lookup(upper: Path, relative: str) -> set[FileId]:
    directory, _, name = relative.rpartition("/")
    try:
        with DirectoryCursor(upper) as cursor:
            status = os.stat(name, dir_fd=cursor.open(directory or "."), follow_symlinks=False)
    except OSError:
        return set()  # a lower file that nobody can write to, a volume, something deleted
    return {(status.st_dev, status.st_ino)} if stat.S_ISREG(status.st_mode) else set()


def _signature(status: os.stat_result) -> tuple[int, int, int]:
    return status.st_size, status.st_mtime_ns, status.st_ctime_ns


def _signature_of_linked(link: str) -> set[tuple[int, int, int]]:
    """Should the file change between the two looks, its ctime is younger than the capture, and it is not trusted anyway."""
    try:
        status = os.stat(link)
    except OSError:
        return set()
    return {_signature(status)} if status.st_nlink > 0 else set()
