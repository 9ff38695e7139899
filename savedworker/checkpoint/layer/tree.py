"""Walking a tree that somebody else may be changing: by directory descriptors, never through a symlink."""

from __future__ import annotations

import errno
import os
import stat
import sys
from collections.abc import Iterator
from pathlib import Path

from savedworker.checkpoint.layer.index import MAX_DEPTH, ROOT, XATTR_NAMESPACES
from savedworker.model.errors import Fatal, Refused

_DIRECTORY = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
_KEPT_OPEN = 128
"""Levels whose descriptors are kept; deeper ones are walked again from there, so that depth costs no descriptors."""

_DROPPED_XATTRS = frozenset(
    {
        # They name inodes and file systems of this instance (kernel: Documentation/filesystems/overlayfs.rst); a copy that
        # carries them is treated as stale or foreign. Seen: drop these two, keep the rest (PLATFORM.md, hazards).
        "trusted.overlay.origin",
        "trusted.overlay.uuid",
        "user.overlay.origin",
        "user.overlay.uuid",
    }
)

if sys.getfilesystemencoding().lower() not in ("utf-8", "utf8"):
    raise Fatal(
        f"file names would be read as {sys.getfilesystemencoding()}", "start the program with PYTHONUTF8=1"
    )


class DirectoryCursor:
    """Opens directories below one root, component by component with O_NOFOLLOW, keeping what neighbours share."""

    def __init__(self, root: Path) -> None:
        self._open = [os.open(root, _DIRECTORY)]
        self._names: list[str] = []
        self._deep = -1
        self._path: str | None = ROOT

    def __enter__(self) -> DirectoryCursor:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def root(self) -> int:
        """The root's descriptor, valid until ``close``."""
        return self._open[0]

    def open(self, path: str) -> int:
        """A descriptor of the directory ``path``, valid until the next call. Raises OSError, ELOOP/ENOTDIR for a symlink."""
        if path == self._path:
            return self._deep if self._deep >= 0 else self._open[-1]
        self._path = None
        if self._deep >= 0:
            os.close(self._deep)
            self._deep = -1
        names = [] if path == ROOT else path.split("/")
        shared = 0
        while shared < len(self._names) and shared < len(names) and self._names[shared] == names[shared]:
            shared += 1
        while len(self._names) > shared:
            self._names.pop()
            os.close(self._open.pop())
        for name in names[shared:_KEPT_OPEN]:
            self._open.append(os.open(name, _DIRECTORY, dir_fd=self._open[-1]))
            self._names.append(name)
        for name in names[_KEPT_OPEN:]:
            below = os.open(name, _DIRECTORY, dir_fd=self._deep if self._deep >= 0 else self._open[-1])
            if self._deep >= 0:
                os.close(self._deep)
            self._deep = below
        self._path = path
        return self._deep if self._deep >= 0 else self._open[-1]

    def close(self) -> None:
        """Close every descriptor."""
        while self._open:
            os.close(self._open.pop())
        if self._deep >= 0:
            os.close(self._deep)
            self._deep = -1


def walk(
    cursor: DirectoryCursor, tolerant: bool, ordered: bool = False
) -> Iterator[tuple[str, int, str, os.stat_result]]:
    """Every name below the cursor's root but not the root itself: path, parent's descriptor, name, lstat.

    ``ordered``: by name within a directory. ``tolerant`` skips what vanishes meanwhile. The caller must not move the
    cursor. Raises OSError, and Refused for a tree that is too deep to be extracted again.
    """
    pending = [ROOT]
    while pending:
        directory = pending.pop()
        if directory.count("/") >= MAX_DEPTH:
            raise Refused(
                f"the directory tree below {directory[:200]!r} is more than {MAX_DEPTH} levels deep",
                "flatten it",
            )
        try:
            here = cursor.open(directory)
            listing = os.scandir(here)
        except OSError:
            if tolerant:
                continue
            raise
        prefix = "" if directory == ROOT else directory + "/"
        with listing:
            for item in sorted(listing, key=lambda found: found.name) if ordered else listing:
                try:
                    status = item.stat(follow_symlinks=False)
                except OSError:
                    if tolerant:
                        continue
                    raise
                path = prefix + item.name
                yield path, here, item.name, status
                if stat.S_ISDIR(status.st_mode):
                    pending.append(path)


def by_descriptor(directory: int, name: str) -> str:
    """A path for calls that take no directory descriptor (the xattr family); the name itself is not followed by l-calls."""
    return f"/proc/self/fd/{directory}/{name}"


def read_xattrs(directory: int, name: str) -> dict[str, bytes]:
    """The attributes that belong to a layer. Raises OSError."""
    path = by_descriptor(directory, name)
    try:
        names = os.listxattr(path, follow_symlinks=False)
    except OSError as error:
        if error.errno in (errno.EOPNOTSUPP, errno.EPERM, errno.EACCES):
            return {}
        raise
    out: dict[str, bytes] = {}
    for attribute in sorted(names):
        if attribute.startswith(XATTR_NAMESPACES) and attribute not in _DROPPED_XATTRS:
            try:
                out[attribute] = os.getxattr(path, attribute, follow_symlinks=False)
            except OSError as error:
                if error.errno != errno.ENODATA:
                    raise
    return out
