"""The paths behind inotify watches on the worker's own files, which CRIU cannot find by itself.

A watch is saved by its path, because inode numbers differ on the next instance. CRIU gets it from the watch's file handle,
which the overlay does not decode. But since Linux 6.6 that handle carries the one of the file below, in the writable layer or
in the image, and those file systems do. CRIU reads the result from the file in which it keeps what its own (slow) search of
the tree found before: ``irmap-cache``, CRIU 4.2.1, criu/irmap.c.
"""

from __future__ import annotations

import ctypes
import errno
import os
import re
import struct
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from savedworker.checkpoint import criu_image, processes
from savedworker.checkpoint.mountinfo import plain
from savedworker.checkpoint.processes import OpenFile

_MAGIC = criu_image.magic(criu_image.SERVICE, 0x57004059)
_NAME = "irmap-cache"
_WATCH = re.compile(
    r"^inotify wd:\S+ ino:(\w+) sdev:(\w+) .*?(?:fhandle-bytes:\S+ fhandle-type:(\w+) f_handle:(\w+))?$"
)
_OVERLAY_HANDLE = 0xF8
_OVERLAY_HEADER = struct.Struct(
    "3xBBBBB16x"
)  # fs/overlayfs/overlayfs.h: version, magic, length, flags, type, uuid
_OVERLAY_MAGIC = 0xFB
_IN_UPPER = 4
_libc = ctypes.CDLL(None, use_errno=True)


@dataclass(frozen=True)
class Watch:
    """One watch: on the inode ``inode`` of the file system ``device`` (as the kernel writes it), by the descriptor ``file``."""

    file: OpenFile
    device: int
    inode: int
    handle_type: int
    handle: bytes


@dataclass(frozen=True)
class Found:
    """A watch and the path that it watches, as the worker sees it; or why that cannot be told."""

    watch: Watch
    path: str | None
    problem: str = ""


def find_paths(pids: Iterable[int]) -> list[Found]:
    """Every watch of the processes ``pids``, with its path."""
    places: _Places | None = None
    found = []
    for pid in pids:
        for file in processes.open_files(pid, lambda target: target == "anon_inode:inotify"):
            for watch in _watches(file):
                places = places or _Places(pid)
                found.append(places.find(watch))
    return found


def write_map(folder: Path, found: Iterable[Found]) -> None:
    """Put the paths where CRIU, working in ``folder``, looks for them. It looks at each again before it believes it."""
    entries = [
        criu_image.number_field(1, each.watch.device)
        + criu_image.number_field(2, each.watch.inode)
        + criu_image.bytes_field(3, os.fsencode(each.path))
        for each in found
        if each.path is not None
    ]
    file = folder / _NAME
    file.unlink(missing_ok=True)
    if entries:
        file.write_bytes(criu_image.pack(_MAGIC, dict.fromkeys(entries)))


def _watches(file: OpenFile) -> Iterator[Watch]:
    try:
        lines = Path(f"/proc/{file.pid}/fdinfo/{file.fd}").read_text().splitlines()
    except OSError:
        return
    for line in lines:
        match = _WATCH.match(line)
        if match:
            inode, device, kind, handle = match.groups()
            yield Watch(
                file, int(device, 16), int(inode, 16), int(kind or "0", 16), bytes.fromhex(handle or "")
            )


class _Places:
    """Where the file systems of a worker's processes can be reached."""

    def __init__(self, pid: int) -> None:
        self._root = f"/proc/{pid}/root"
        self._mounts: list[tuple[int, str]] = []
        """Device and mount point, as the worker sees it."""
        self._layers: dict[int, tuple[str, str]] = {}
        """Upper and lower directory of the overlay that is the root, by its device."""
        try:
            lines = Path(f"/proc/{pid}/mountinfo").read_text().splitlines()
        except OSError:
            lines = []
        for line in lines:
            left, _, right = line.partition(" - ")
            words = left.split()
            major, minor = map(int, words[2].split(":"))
            device = major << 20 | minor
            point = plain(words[4])
            self._mounts.append((device, point))
            kind, _, options = right.split(maxsplit=2)
            if point == "/" and kind == "overlay":
                given = dict(x.partition("=")[::2] for x in options.split(","))
                self._layers[device] = (plain(given.get("upperdir", "")), plain(given.get("lowerdir", "")))

    def find(self, watch: Watch) -> Found:
        """The path of what ``watch`` watches."""
        try:
            return Found(watch, self._path(watch))
        except OSError as error:
            if error.errno in (errno.ESTALE, errno.ENOENT):
                return Found(watch, None, "a file that was deleted")
            return Found(
                watch,
                None,
                f"the file with inode {watch.inode}, whose name cannot be found ({error.strerror})",
            )

    def _path(self, watch: Watch) -> str:
        if watch.device not in self._layers:
            for device, point in self._mounts:
                if device == watch.device:
                    found = _by_handle(f"{self._root}{point}", watch.handle_type, watch.handle)
                    return self._checked(watch, found)
            raise OSError(errno.EXDEV, "it is on no file system of the worker's")
        if watch.handle_type != _OVERLAY_HANDLE or len(watch.handle) <= _OVERLAY_HEADER.size:
            raise OSError(errno.EOPNOTSUPP, "this kernel does not tell: Linux 6.6 does")
        _, magic, length, flags, kind = _OVERLAY_HEADER.unpack_from(watch.handle)
        if magic != _OVERLAY_MAGIC:
            raise OSError(errno.EOPNOTSUPP, "this kernel tells it in another way")
        layer = self._layers[watch.device][0 if flags & _IN_UPPER else 1]
        found = _by_handle(layer, kind, watch.handle[_OVERLAY_HEADER.size : length + 3])
        if found.endswith(" (deleted)"):
            raise OSError(errno.ENOENT, "deleted")
        return self._checked(watch, "/" + os.path.relpath(found, layer) if found != layer else "/")

    def _checked(self, watch: Watch, path: str) -> str:
        if path.endswith(" (deleted)"):
            raise OSError(errno.ENOENT, "deleted")
        if os.stat(f"{self._root}{path}", follow_symlinks=False).st_ino != watch.inode:
            raise OSError(errno.EXDEV, f"{path} is another file now")
        return path


class _Handle(ctypes.Structure):
    _fields_ = (("bytes", ctypes.c_uint), ("type", ctypes.c_int), ("handle", ctypes.c_ubyte * 128))


def _by_handle(mount: str, kind: int, handle: bytes) -> str:
    """The path of the file that ``handle`` names in the file system of ``mount``. Raises OSError."""
    if not 0 < len(handle) <= 128:
        raise OSError(errno.EOPNOTSUPP, "its handle is too long")
    wanted = _Handle(len(handle), kind, (ctypes.c_ubyte * 128)(*handle))
    folder = os.open(mount, os.O_RDONLY)
    try:
        file = _libc.open_by_handle_at(folder, ctypes.byref(wanted), os.O_PATH)
        if file < 0:
            code = ctypes.get_errno()
            raise OSError(code, os.strerror(code))
    finally:
        os.close(folder)
    try:
        return os.readlink(f"/proc/self/fd/{file}")
    finally:
        os.close(file)
