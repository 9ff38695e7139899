"""Preflight: names what cannot be saved by pid, descriptor and path, before it matters.

Looks only at /proc, so it may run at any time beside the worker. What it cannot see CRIU may still refuse; such a refusal
is explained by ``criu_errors``.
"""

from __future__ import annotations

import ctypes
import errno
import os
import platform
import re
import stat
import struct
from collections.abc import Iterable
from pathlib import Path

from savedworker.checkpoint import processes, watches
from savedworker.checkpoint.processes import OpenFile
from savedworker.checkpoint.unix_sockets import unix_peers
from savedworker.model import defaults
from savedworker.model.spec import WorkerSpec
from savedworker.model.units import format_size

_ANON_REFUSED = {
    "[io_uring]": "io_uring",
    "[userfaultfd]": "userfaultfd",
    "[perf_event]": "perf_event",
    "[fanotify]": "fanotify",
    "bpf-map": "a BPF map",
    "bpf-prog": "a BPF program",
    "[landlock-ruleset]": "a Landlock ruleset",
}
_SAVED_DEVICES = {(1, 3), (1, 5), (1, 7), (1, 8), (1, 9), (1, 11), (5, 0), (5, 2), (10, 200)}
"""Character devices that CRIU restores by path: null, zero, full, random, urandom, kmsg, tty, ptmx, net/tun."""
_PTS_MAJORS = range(136, 144)
_MAX_REPORTED = 8
_SYS_KCMP = 312 if platform.machine() == "x86_64" else 272
_KCMP_EPOLL_TFD = 7
_libc = ctypes.CDLL(None, use_errno=True)


def preflight(pids: Iterable[int], spec: WorkerSpec) -> list[str]:
    """Why the worker cannot be saved now, one line each; empty when nothing is known to be in the way."""
    found: list[str] = []
    known = list(pids)
    sockets: dict[str, OpenFile] = {}
    mounts = processes.mounts_seen_by(known)
    for pid in known:
        found += _process(pid, set(known))
        for file in processes.open_files(pid):
            if file.target.startswith("socket:["):
                sockets.setdefault(file.target[8:-1], file)
                continue
            problem = _descriptor(file, mounts) or _kernel_object(file) or _on_a_volume(file, spec)
            if problem:
                found.append(f"{_who(file)} has {problem}")
    for watch in watches.find_paths(known):
        if watch.path is None:
            found.append(f"{_who(watch.watch.file)} watches {watch.problem} (inotify), which cannot be saved")
    if known and sockets:
        found += _sockets(known[0], sockets)
        found += _unix_peers_outside(known, sockets)
    unique = list(dict.fromkeys(found))
    if len(unique) > _MAX_REPORTED:
        unique = [*unique[:_MAX_REPORTED], f"and {len(unique) - _MAX_REPORTED} more"]
    return unique


def _who(file: OpenFile) -> str:
    return f"pid {file.inner_pid} ({processes.name_of(file.pid)}) fd {file.fd}"


def _process(pid: int, tree: set[int]) -> list[str]:
    inner, name = processes.inner_pid(pid), processes.name_of(pid)
    found = []
    state = processes.state_of(pid)
    if state == "T":
        found.append(
            f"pid {inner} ({name}) is stopped by a signal: it has to continue before it can be saved"
        )
    try:
        text = Path(f"/proc/{pid}/status").read_text()
    except OSError:
        return []
    tracer = re.search(r"^TracerPid:\s+(\d+)", text, re.MULTILINE)
    if tracer and tracer.group(1) != "0":
        who = (
            "another process of the worker"
            if int(tracer.group(1)) in tree
            else "a process outside the worker"
        )
        found.append(f"pid {inner} ({name}) is being traced (debugger or strace) by {who}")
    try:
        root = os.stat(f"/proc/{pid}/ns/user").st_ino
        if root != os.stat(f"/proc/{min(tree)}/ns/user").st_ino:
            found.append(f"pid {inner} ({name}) made a user namespace of its own")
    except OSError:
        pass
    for mapping in processes.mappings(pid):
        if mapping.path.startswith("/dev/") and not mapping.path.startswith(
            ("/dev/shm/", "/dev/zero", "/dev/null")
        ):
            found.append(f"pid {inner} ({name}) has {mapping.path} mapped: a device's memory cannot be saved")
    return found


def _descriptor(file: OpenFile, mounts: set[int]) -> str | None:
    """What is wrong with one open descriptor that is not a socket."""
    target = file.target
    if target.startswith("anon_inode:"):
        kind = target.removeprefix("anon_inode:")
        what = _ANON_REFUSED.get(kind)
        return f"{what} open, which cannot be saved" if what else None
    try:
        found = os.stat(f"/proc/{file.pid}/fd/{file.fd}")
    except OSError:
        return None
    if stat.S_ISCHR(found.st_mode):
        number = (os.major(found.st_rdev), os.minor(found.st_rdev))
        if number not in _SAVED_DEVICES and number[0] not in _PTS_MAJORS:
            return f"the device {target} open, which cannot be saved"
    if stat.S_ISBLK(found.st_mode):
        return f"the block device {target} open, which cannot be saved"
    if target.startswith("/secretmem"):
        return "memfd_secret open, which cannot be saved"
    if mounts and target.startswith("/") and not target.startswith("/memfd:") and file.mount not in mounts:
        # Also POSIX message queues, whose path is of a mount of the kernel's own.
        what = target.removesuffix(" (deleted)")
        return f"{what} open, which is a message queue or lies on a mount that the worker cannot see: it cannot be saved"
    if stat.S_ISREG(found.st_mode) and not found.st_nlink and found.st_blocks * 512 > defaults.GHOST_LIMIT:
        return (
            f"the deleted file {target.removesuffix(' (deleted)')} open with {format_size(found.st_blocks * 512)}: "
            f"more than the limit of {format_size(defaults.GHOST_LIMIT)}"
        )
    return None


def _kernel_object(file: OpenFile) -> str | None:
    """What CRIU does not know, or forgets, about a kernel object that it does save (seen with 4.2.1)."""
    if file.target.startswith("pipe:[") and file.flags & os.O_DIRECT:
        return "a pipe in packet mode (O_DIRECT) open, which cannot be saved"
    kind = file.target.removeprefix("anon_inode:")
    if kind not in ("[eventfd]", "[eventpoll]"):
        return None
    try:
        lines = Path(f"/proc/{file.pid}/fdinfo/{file.fd}").read_text().splitlines()
    except OSError:
        return None
    # It would come back as an ordinary one, whose read returns the whole count. Old kernels do not tell (before 6.5).
    if kind == "[eventfd]" and any(re.fullmatch(r"eventfd-semaphore:\s*1", line) for line in lines):
        return "an eventfd that counts as a semaphore (EFD_SEMAPHORE) open, which cannot be saved"
    watched: list[int] = []
    for line in lines:
        match = re.match(r"tfd:\s*(\d+) ", line)
        if match is None:
            continue
        number = int(match.group(1))
        if not _has_open(file, number, watched.count(number)):
            return (
                f"an epoll that still watches fd {number}, closed here and open elsewhere: it cannot be saved"
            )
        watched.append(number)
    return None


def _has_open(epoll: OpenFile, number: int, index: int) -> bool:
    """Whether the process has what ``epoll`` watches as descriptor ``number`` (the ``index``-th such): kcmp(2)."""
    slot = struct.pack("=III", epoll.fd, number, index)
    try:
        others = sorted(map(int, os.listdir(f"/proc/{epoll.pid}/fd")), key=lambda x: x != number)
    except OSError:
        return True  # it ends just now
    for fd in others:
        result = _libc.syscall(_SYS_KCMP, epoll.pid, epoll.pid, _KCMP_EPOLL_TFD, ctypes.c_ulong(fd), slot)
        if result == 0:
            return True
        if result < 0 and ctypes.get_errno() != errno.EBADF:
            return True  # changed meanwhile, or this kernel does not tell
    return False


def _on_a_volume(file: OpenFile, spec: WorkerSpec) -> str | None:
    """A volume's file that is open by a deleted name and has another one: CRIU's own name for it does not stay there."""
    path = file.target.removesuffix(" (deleted)")
    if path == file.target or not any(path.startswith(volume.target + "/") for volume in spec.volumes):
        return None
    try:
        found = os.stat(f"/proc/{file.pid}/fd/{file.fd}")
    except OSError:
        return None
    if stat.S_ISREG(found.st_mode) and found.st_nlink:
        return f"{path} open, a deleted name of a volume's file that has other names: it cannot be saved"
    return None


def _sockets(pid: int, sockets: dict[str, OpenFile]) -> list[str]:
    """Sockets of kinds that cannot be saved, and unix stream sockets whose other end is outside the worker."""
    found = []
    listed: set[str] = set()
    for table, column in (
        ("tcp", 9),
        ("tcp6", 9),
        ("udp", 9),
        ("udp6", 9),
        ("udplite", 9),
        ("raw", 9),
        ("raw6", 9),
    ):
        listed |= set(_column(pid, table, column))
    unix = set(_column(pid, "unix", 6))
    netlink, packet = set(_column(pid, "netlink", 9)), set(_column(pid, "packet", 8))
    for inode, file in sockets.items():
        # Unconnected TCP sockets are in no table: only what names itself otherwise is refused. Multipath TCP is in TCP's.
        kind = _socket_kind(file)
        if kind != "a socket of kind MPTCP" and (inode in listed | unix | netlink | packet):
            continue
        if kind is not None:
            found.append(f"{_who(file)} has {kind} open, which cannot be saved")
    return found


def _unix_peers_outside(pids: list[int], sockets: dict[str, OpenFile]) -> list[str]:
    """Unix sockets connected to a process outside: CRIU saves some of them, and cannot restore them (seen with 4.2.1)."""
    peers = unix_peers(pids[0])
    suspects: dict[int, OpenFile] = {}
    for inode, file in sockets.items():
        peer = peers.get(int(inode), 0)  # 0: not connected, or not accepted yet
        if peer and str(peer) not in sockets:
            suspects[peer] = file
    # One that is in the worker's network and in no process is on its way through another socket (SCM_RIGHTS).
    outside = {x for x in suspects if x not in peers} | (
        _held_by_others(pids, suspects) if suspects else set()
    )
    return [
        f"{_who(suspects[peer])} has a unix socket open that is connected to a process outside the worker"
        for peer in outside
    ]


def _held_by_others(pids: list[int], inodes: Iterable[int]) -> set[int]:
    """Which of these sockets a process that is not of the worker has open."""
    wanted = {f"socket:[{inode}]": inode for inode in inodes}
    found = set()
    for pid in (int(x) for x in os.listdir("/proc") if x.isdigit()):
        if pid not in pids:
            found |= {wanted[file.target] for file in processes.open_files(pid, wanted.__contains__)}
    return found


def _socket_kind(file: OpenFile) -> str | None:
    try:
        kind = os.getxattr(f"/proc/{file.pid}/fd/{file.fd}", "system.sockprotoname").rstrip(b"\0").decode()
    except OSError:
        return None
    saved = {"TCP", "TCPv6", "UDP", "UDPv6", "UDP-Lite", "UDPLITEv6", "RAW", "RAWv6", "NETLINK", "PACKET"}
    if kind in saved or kind.startswith(("UNIX", "unix")) or kind == "PING":
        return None
    return f"a socket of kind {kind}"


def _column(pid: int, table: str, column: int) -> list[str]:
    try:
        lines = Path(f"/proc/{pid}/net/{table}").read_text(errors="replace").splitlines()[1:]
    except OSError:
        return []
    return [words[column] for words in map(str.split, lines) if len(words) > column]
