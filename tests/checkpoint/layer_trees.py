"""Trees for the layer's tests: a chunk store in memory, everything that stat and xattrs say about a tree, overlay mounts."""

from __future__ import annotations

import hashlib
import os
import stat
import subprocess
import threading
from dataclasses import dataclass, field
from pathlib import Path


@dataclass
class Chunks:
    """A content-addressed store in memory, with what was asked of it."""

    stored: dict[str, bytes] = field(default_factory=dict)
    sunk: list[int] = field(default_factory=list)
    lock: threading.Lock = field(default_factory=threading.Lock)

    def sink(self, data: bytes) -> str:
        key = hashlib.sha256(data).hexdigest()
        self.stored[key] = bytes(data)
        self.sunk.append(len(data))
        return key

    def fetch(self, key: str) -> bytes:
        with self.lock:
            return self.stored[key]

    @property
    def bytes_sunk(self) -> int:
        return sum(self.sunk)


DROPPED = {"trusted.overlay.origin", "trusted.overlay.uuid"}


def described(root: Path, raw: bool = True, holes: bool = True) -> dict[bytes, object]:
    """Everything a program can see of a tree, by path; sockets are left out. ``raw`` False leaves out what a mounted overlay
    shows differently from its upper directory (link counts, hole layout). ``holes`` False allows for small holes that were filled."""
    out: dict[bytes, object] = {}
    names: dict[tuple[int, int], bytes] = {}

    def add(path: bytes, relative: bytes) -> None:
        status = os.lstat(path)
        if stat.S_ISSOCK(status.st_mode):
            return
        entry: dict[str, object] = {
            "mode": oct(status.st_mode),
            "owner": (status.st_uid, status.st_gid),
            "mtime": status.st_mtime_ns,
            "xattrs": {
                name: os.getxattr(path, name, follow_symlinks=False)
                for name in sorted(os.listxattr(path, follow_symlinks=False))
                if name not in DROPPED
            },
        }
        if stat.S_ISREG(status.st_mode):
            with open(path, "rb") as file:
                entry["content"] = hashlib.file_digest(file, "sha256").hexdigest()
            entry["size"] = status.st_size
            entry["first name"] = names.setdefault((status.st_dev, status.st_ino), relative)
            if raw:
                entry["nlink"] = status.st_nlink
                if holes:
                    entry["sparse"] = status.st_blocks * 512 < status.st_size
        elif stat.S_ISLNK(status.st_mode):
            entry["target"] = os.readlink(path)
        elif stat.S_ISCHR(status.st_mode):
            entry["device"] = status.st_rdev
        out[relative] = entry
        if stat.S_ISDIR(status.st_mode):
            for name in sorted(os.listdir(path)):
                add(path + b"/" + name, relative + b"/" + name)

    add(os.fsencode(root), b"")
    return out


def mounted_overlay(lower: Path, upper: Path, scratch: Path, name: str) -> Path:
    """Mount an overlay; unmount it with ``unmount``."""
    work, merged = scratch / f"{name}-work", scratch / f"{name}-merged"
    work.mkdir()
    merged.mkdir()
    options = f"lowerdir={lower},upperdir={upper},workdir={work},redirect_dir=on,metacopy=off"
    subprocess.run(["mount", "-t", "overlay", "overlay", "-o", options, str(merged)], check=True)
    return merged


def unmount(path: Path) -> None:
    subprocess.run(["umount", str(path)], check=True)
