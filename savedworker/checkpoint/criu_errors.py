"""What CRIU and runc mean by their messages: one table, from a pattern in the log to one line with a fix."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

from savedworker.model.errors import Fatal, Refused, SavedWorkerError, Temporary

_LOG_TAIL = 512 * 1024


@dataclass(frozen=True)
class Explanation:
    """One row of the table. ``kind`` says whether another try can succeed."""

    pattern: re.Pattern[str]
    kind: type[Refused] | type[Temporary] | type[Fatal]
    message: str
    fix: str


def _row(
    pattern: str, kind: type[Refused] | type[Temporary] | type[Fatal], message: str, fix: str
) -> Explanation:
    return Explanation(re.compile(pattern), kind, message, fix)


TABLE: tuple[Explanation, ...] = (
    _row(r"unix: Non-empty write queue on an in-flight socket", Temporary, "a unix connection inside the worker waits to be accepted, with data in it", "accept connections at once, or use TCP"),
    _row(r"tun: Unable to create tun", Fatal, "this instance has no /dev/net/tun, without which CRIU saves nothing", "modprobe tun, and give a container the device (a privileged one has it)"),
    _row(r'execvp\("(tar|gzip)"|(tar) \(child\): Error is not recoverable', Fatal, "CRIU cannot run tar and gzip, with which it saves a worker's /dev", "install tar, gzip and a shell, or use the agent's bundle"),
    _row(r"No space left on device|write.*ENOSPC", Fatal, "the disk for checkpoint images is full", "free space or give a larger disk"),
    _row(r"Can't dump ghost file (.+?) of (\d+) size", Refused, "the deleted file {0}, which is still open, is larger than the limit ({1} bytes)", "close it, or give it a name"),
    _row(r"Can't lookup mount=\S+ for fd=\S+ path=(.+)|Unsupported file system type", Refused, "{0} is open or mapped and lies on a file system that the worker cannot see, so that it cannot be saved", "use the worker's own files or a volume"),
    _row(r"send_fds failed \(-22\)|anon_inode:\[io_uring\]", Refused, "a process has a descriptor that cannot be handed on, as that of an io_uring", "keep --syscalls guarded, so that libraries fall back"),
    _row(r"Can't dump file \d+ of that type \[\d+\] \(anon anon_inode:\[?([^\])\n]+)", Refused, "a process has a kernel object open that CRIU cannot save ({0})", "keep --syscalls guarded; see docs/compatibility.md"),
    _row(r"Can't dump file \d+ of that type \[\d+\] \(((?:chr|blk) \d+:\d+)", Refused, "a process has a device open that CRIU cannot save ({0})", "close it before a checkpoint"),
    _row(r"fsnotify:\s+(?:Can't dump that handle|Can't find suitable path for handle|Can't add watch)", Refused, "a process watches a file of its writable layer (inotify), which CRIU cannot find again", "watch a volume, or poll"),
    _row(r"unix: (?:External socket is used|FATAL: Peer \d+ unresolved|Can't dump half of stream unix|Can't dump name-less external|Unix socket \d+ with(?:out| unreachable) peer)", Refused, "a unix socket is connected to a process outside the worker", "run both ends inside, or use TCP"),
    _row(r"Unknown socket collected \(family (\d+)\)|Unsupported proto (\d+) for socket|Only stream, dgram and raw are supported", Refused, "a process has a socket of a kind that CRIU cannot save ({0})", "use TCP, UDP or unix sockets (Go: GODEBUG=multipathtcp=0)"),
    _row(r"Can't dump corked dgram socket", Temporary, "a process is in the middle of composing a datagram", "another try will do"),
    _row(r"Can't dump nested (\w+) namespace", Refused, "a process made a {0} namespace of its own, which CRIU cannot save", "keep --syscalls guarded"),
    _row(r"Can't make VM id for (\d+)", Refused, "a process shares its memory with another one (clone with CLONE_VM and no CLONE_THREAD), which CRIU cannot save", "use threads, fork or posix_spawn"),
    _row(r"running in 32-bit mode", Refused, "a process is a 32-bit program, which CRIU cannot save", "use a 64-bit build"),
    _row(r"zombie \d+ .*found while seizing|is already traced|SEIZE \d+: (?:task not stopped|can't)|Can't seize", Temporary, "a process of the worker is being traced, or was ending", "end the debugger"),
    _row(r"Timeout reached|Unable to freeze cgroup", Temporary, "the worker's processes could not be stopped in time", "a process waits in the kernel, on a network file system perhaps"),
    _row(r"Can't get rlimit", Fatal, "a process of another user than root cannot be saved here", "the agent needs CAP_SYS_RESOURCE"),
    _row(r"CPU (?:instruction )?capabilities do not match", Refused, "this instance's CPU lacks features that the worker uses", "restore on the same or a newer CPU family"),
    _row(r"File /?(.+?) has bad (?:size|build-ID|mode|checksum)", Refused, "/{0} is another file here than the one that the worker has open", "use the same image on every instance"),
    _row(r"Can't open file /?(.+?) on restore|Can't open mapped \[/?(.+?)\]", Refused, "the file /{0} that the worker has open is missing here", "use the same image and volumes on every instance"),
    _row(r"Can't bind .*(?:inet|socket).*: (?:Address already in use|Cannot assign)", Refused, "an address that the worker listens on is taken or missing here", "use the private network"),
    _row(r"Can't fork for (\d+): File exists", Refused, "the pid {0} of the worker is taken", "the worker needs its own pid namespace"),
    _row(r"Unknown option|unrecognized option|errno 56", Fatal, "CRIU does not know an option of ours", "install CRIU 4.1 or newer"),
    _row(r"read unixpacket .*EOF", Temporary, "CRIU ended in the middle of its work: something killed it, or it crashed", "see whether anything kills processes here"),
    _row(r"Can't setgroups", Fatal, "user identities cannot be restored here", "the agent needs CAP_SETGID, and no user namespace of its own"),
)  # fmt: skip


def explain(log: Path, words: str) -> SavedWorkerError:
    """The error for a failed dump or restore: from CRIU's ``log`` and what runc said (``words``)."""
    lines = error_lines(log)
    text = "\n".join(lines) or words
    for row in TABLE:
        match = row.pattern.search(text)
        if match:
            names = [group for group in match.groups() if group] or ["unknown"]
            detail = f" [{lines[0]}]" if lines else ""
            return row.kind(row.message.format(*names) + detail, fix=row.fix)
    first = lines[0] if lines else words.strip()[-300:] or "no reason given"
    return Fatal(f"CRIU failed: {first}", f"its log is {log}")


def error_lines(log: Path) -> list[str]:
    """The error lines in the last part of a CRIU log, without those known to be harmless."""
    try:
        with log.open("rb") as file:
            file.seek(0, 2)
            file.seek(max(0, file.tell() - _LOG_TAIL))
            text = file.read().decode(errors="replace")
    except OSError:
        return []
    found = [
        re.sub(r"^\(\d+\.\d+\)\s*(?:\d+:\s*)?", "", line).strip()
        for line in text.splitlines()
        if "Error" in line
    ]
    return [line for line in found if "RLIMIT_NOFILE" not in line][:20]
