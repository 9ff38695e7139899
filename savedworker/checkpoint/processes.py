"""What /proc says of the worker's processes: open files, mappings, sockets. Reads only."""

from __future__ import annotations

import os
import re
import signal
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

_PF_EXITING = 4
_SIGKILL = 1 << (signal.SIGKILL - 1)


@dataclass(frozen=True)
class OpenFile:
    """One descriptor. ``target`` is the link's text, ``pid`` the pid outside, ``inner_pid`` as the worker sees it."""

    pid: int
    inner_pid: int
    fd: int
    target: str
    position: int
    flags: int
    mount: int


def inner_pid(pid: int) -> int:
    """The pid of a process in its own (innermost) pid namespace; 0 when it is gone."""
    try:
        for line in Path(f"/proc/{pid}/status").read_text().splitlines():
            if line.startswith("NSpid:"):
                return int(line.split()[-1])
    except (OSError, ValueError):
        pass
    return 0


def state_of(pid: int) -> str:
    """The state letter of a process (R, S, D, T, t, Z …); empty when it is gone."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return ""
    return text.rpartition(")")[2].split()[0]


def tracer_of(pid: int) -> int:
    """The pid of the process that traces ``pid``; 0 when nobody does, or it is gone."""
    try:
        for line in Path(f"/proc/{pid}/status").read_text().splitlines():
            if line.startswith("TracerPid:"):
                return int(line.split()[1])
    except (OSError, ValueError):
        pass
    return 0


def runs_untraced(pid: int | None) -> bool:
    """Whether the process is alive and nobody traces it: no dump is at work on it, and none has killed it.

    Its tracer is gone before a process that was killed is: it counts as dead when the signal waits for it, or it is on its way out.
    """
    try:
        status = Path(f"/proc/{pid}/status").read_text()
        stat = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return False
    found = {name: value.strip() for name, _, value in (line.partition(":") for line in status.splitlines())}
    waiting = int(found["SigPnd"], 16) | int(found["ShdPnd"], 16)
    if found["State"][0] in "ZX" or int(stat[6]) & _PF_EXITING or waiting & _SIGKILL:
        return False
    return found["TracerPid"] == "0"


def uninterruptible(pids: Iterable[int]) -> set[int]:
    """The threads of ``pids`` that wait in the kernel and cannot be stopped now (state D)."""
    found = set()
    for folder in threads(pids):
        try:
            text = (folder / "stat").read_text()
        except OSError:
            continue
        if text.rpartition(")")[2].split()[0] == "D":
            found.add(int(folder.name))
    return found


def threads(pids: Iterable[int]) -> Iterator[Path]:
    """The folder in /proc of every thread of ``pids``, whose name is the thread's id. Any may end at any time."""
    for pid in pids:
        folder = Path(f"/proc/{pid}/task")
        try:
            names = os.listdir(folder)
        except OSError:
            continue
        yield from (folder / name for name in names)


def name_of(pid: int) -> str:
    """The command name."""
    try:
        return Path(f"/proc/{pid}/comm").read_text().strip()
    except OSError:
        return "?"


def open_files(pid: int, wanted: Callable[[str], object] = lambda _target: True) -> Iterator[OpenFile]:
    """The descriptors of a process whose target is ``wanted``; those that vanish meanwhile are left out.

    A process may have thousands. Looking at the target costs one call, the rest three.
    """
    inner = inner_pid(pid)
    try:
        names = os.listdir(f"/proc/{pid}/fd")
    except OSError:
        return
    for name in names:
        try:
            target = os.readlink(f"/proc/{pid}/fd/{name}")
            if not wanted(target):
                continue
            info = dict(
                line.split(":", 1)
                for line in Path(f"/proc/{pid}/fdinfo/{name}").read_text().splitlines()
                if line.startswith(("pos:", "flags:", "mnt_id:"))
            )
            yield OpenFile(
                pid=pid,
                inner_pid=inner,
                fd=int(name),
                target=target,
                position=int(info.get("pos", "0")),
                flags=int(info.get("flags", "0"), 8),
                mount=int(info.get("mnt_id", "0")),
            )
        except (OSError, ValueError):
            continue


def mounts_seen_by(pids: Iterable[int]) -> set[int]:
    """The ids of all mounts in the mount namespaces of these processes."""
    found: set[int] = set()
    namespaces = set()
    for pid in pids:
        try:
            namespace = os.stat(f"/proc/{pid}/ns/mnt").st_ino
            if namespace in namespaces:
                continue
            lines = Path(f"/proc/{pid}/mountinfo").read_text(errors="replace").splitlines()
        except OSError:
            continue
        namespaces.add(namespace)
        found |= {int(line.split(" ", 1)[0]) for line in lines}
    return found


_MAP = re.compile(r"^([0-9a-f]+-[0-9a-f]+) (\S{4}) \S+ (\S+) (\d+)\s*(.*)$")


@dataclass(frozen=True)
class Mapping:
    """One mapped file: address range as /proc writes it, permissions, and what is mapped."""

    address: str
    permissions: str
    device: str
    inode: int
    path: str


def mappings(pid: int) -> list[Mapping]:
    """The file mappings of a process."""
    found = []
    try:
        lines = Path(f"/proc/{pid}/maps").read_text(errors="surrogateescape").splitlines()
    except OSError:
        return []
    for line in lines:
        match = _MAP.match(line)
        if match and match.group(4) != "0" and match.group(5).startswith("/"):
            found.append(
                Mapping(match.group(1), match.group(2), match.group(3), int(match.group(4)), match.group(5))
            )
    return found
