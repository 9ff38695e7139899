"""Reads this instance's side of a fingerprint: CPU, tools, and the files that the worker has mapped."""

from __future__ import annotations

import os
import platform
import stat
from collections.abc import Iterable
from pathlib import Path

import blake3

from savedworker.checkpoint import processes
from savedworker.checkpoint.tools import Tools
from savedworker.model.fingerprint import Fingerprint

_IGNORED_FLAGS = frozenset({"hypervisor", "nopl", "constant_tsc", "nonstop_tsc", "tsc_known_freq"})


_MADE_UP = frozenset(
    {"proc", "sysfs", "debugfs", "tracefs", "cgroup", "cgroup2", "configfs", "securityfs", "pstore", "bpf"}
)


class FileDigests:
    """blake3 digests of files, kept by identity so that each is read once."""

    def __init__(self) -> None:
        self._known: dict[tuple[int, int, int, int], str] = {}

    def of(self, path: Path) -> str | None:
        """The digest of ``path``; None when it cannot be read or is no regular file of a disk.

        Paths come from manifests and from the worker, and a fifo, a device or a file of /proc can take for ever to read.
        """
        try:
            opened = os.open(path, os.O_PATH)
        except (OSError, ValueError):
            return None
        try:
            found = os.fstat(opened)
            key = (found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns)
            if key not in self._known:
                if not stat.S_ISREG(found.st_mode) or found.st_dev in _devices_of_the_kernel():
                    return None
                self._known[key] = blake3.blake3().update_mmap(f"/proc/self/fd/{opened}").hexdigest()
            return self._known[key]
        except OSError:
            return None
        finally:
            os.close(opened)


def instance_fingerprint(tools: Tools, image: str) -> Fingerprint:
    """What can be known of this instance before any worker runs on it."""
    return Fingerprint(
        machine=platform.machine(),
        cpu_flags=_cpu_flags(),
        criu=tools.criu_version,
        runc=tools.runc_version,
        image="host" if image == "host" else "given",
    )


def mapped_outside_layer(
    pids: Iterable[int], lower: Path, upper: Path, digests: FileDigests
) -> dict[str, str]:
    """Path and digest of every file of the image that is mapped by ``pids`` and not replaced in the writable layer."""
    paths = {m.path for pid in pids for m in processes.mappings(pid)}
    found = {}
    for path in paths:
        relative = path.lstrip("/")
        if path.endswith(" (deleted)") or os.path.lexists(upper / relative):
            continue
        digest = digests.of(lower / relative)
        if digest is not None:
            found[path] = digest
    return found


def same_files_here(wanted: Fingerprint, lower: Path, digests: FileDigests) -> dict[str, str]:
    """The digests on this instance of the files that ``wanted`` names."""
    found = {}
    for path in wanted.mapped_files:
        if ".." in Path(path).parts:
            continue  # a manifest is untrusted: nothing outside the image is looked at
        digest = digests.of(lower / path.lstrip("/"))
        if digest is not None:
            found[path] = digest
    return found


def _devices_of_the_kernel() -> set[int]:
    """Device numbers of the file systems whose files are made up as they are read."""
    found = set()
    for line in Path("/proc/self/mountinfo").read_text(errors="replace").splitlines():
        left, _, right = line.partition(" - ")
        if right.split(" ", 1)[0] in _MADE_UP:
            major, _, minor = left.split(" ")[2].partition(":")
            found.add(os.makedev(int(major), int(minor)))
    return found


def _cpu_flags() -> tuple[str, ...]:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        name, _, value = line.partition(":")
        if name.strip() in ("flags", "Features"):
            return tuple(sorted(set(value.split()) - _IGNORED_FLAGS))
    return ()
