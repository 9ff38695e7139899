"""The table of the zoo: each animal's name, what it shows, its program, what that needs and what is expected of it."""

from __future__ import annotations

import shutil
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

PROGRAMS = Path(__file__).with_name("programs")
PYTHON = "/usr/bin/python3"
VENV_PYTHON = sys.executable
EXTRA = Path("/opt/savedworker/zoo")
"""What ``tests/zoo/install`` makes: a virtual environment with JAX."""


@dataclass(frozen=True)
class Survives:
    """Three moves in a row, then it ends well. ``forgets`` names what it says it has lost on the way, and nothing else."""

    forgets: tuple[str, ...] = ()


@dataclass(frozen=True)
class Refused:
    """Named before a checkpoint is tried; the checkpoint is refused, the worker runs on. ``reason`` is a part of the text."""

    reason: str
    workaround: str


@dataclass(frozen=True)
class FallsBack:
    """It survives because it is told that a system call does not exist; ``says`` is what it writes then."""

    says: str


@dataclass(frozen=True)
class Animal:
    """One entry. ``herd`` is the group in which CI runs it; without one only the sweep does."""

    name: str
    shows: str
    command: tuple[str, ...]
    expected: Survives | Refused | FallsBack = Survives()
    herd: str = ""
    needs: str = ""
    user: str | None = None
    moves: int = 3
    slow: float = 0.0
    """Seconds that one of its checks may take."""
    notice: float = 90.0
    """Seconds. Longer than needed, for busy machines: a host ends as soon as its worker has left."""
    note: str = ""


def _python(program: str, *arguments: str, interpreter: str = PYTHON) -> tuple[str, ...]:
    return (interpreter, "-B", str(PROGRAMS / program), *arguments)


def _c(name: str, *arguments: str) -> tuple[str, ...]:
    return (f"{{built}}/{name}", *arguments)


NEEDS: dict[str, Callable[[], bool]] = {
    "java": lambda: shutil.which("java") is not None and shutil.which("javac") is not None,
    "node": lambda: shutil.which("node") is not None,
    "R": lambda: shutil.which("Rscript") is not None,
    "jax": (EXTRA / "bin/python").exists,
}
"""What is not there after scripts/setup on every machine: ``tests/zoo/install`` gets it."""


def build(folder: Path) -> None:
    """Compile the programs in C and Java into ``folder``."""
    for source in sorted(PROGRAMS.glob("*.c")):
        subprocess.run(["cc", "-O1", "-pthread", "-o", folder / source.stem, source, "-lrt"], check=True)
    if NEEDS["java"]():
        subprocess.run(["javac", "-d", folder, *sorted(PROGRAMS.glob("*.java"))], check=True)


FORGOTTEN = (
    "timer slack", "machine check policy", "personality", "coredump_filter", "TCP_CONGESTION", "TCP_DEFER_ACCEPT", "I/O priority",
    "NUMA memory policy", "TCP_USER_TIMEOUT", "TCP_QUICKACK", "TCP_SYNCNT", "TCP_LINGER2", "TCP_NOTSENT_LOWAT", "SO_TIMESTAMP",
    "SO_BUSY_POLL", "multicast membership",
)  # fmt: skip

ZOO: tuple[Animal, ...] = (
    Animal("threads", "threads with locks, conditions, queues, thread-local storage", _python("threads.py"), herd="processes"),
    Animal("many-threads", "500 threads", _c("many_threads"), herd="processes"),
    Animal("many-processes", "100 processes", _python("many_processes.py"), herd="processes"),
    Animal("sessions", "sessions, process groups, a daemon (double fork), zombies", _python("sessions.py"), herd="processes"),
    Animal("terminals", "pseudo-terminals: a shell with job control, script(1)", _python("terminals.py"), herd="processes"),
    Animal("bash", "bash: pipelines, job control, a coprocess, traps", ("bash", str(PROGRAMS / "jobs.sh")), herd="processes"),
    Animal("signals", "POSIX and interval timers, pending and queued signals, alternate stack", _c("posix_timers"), herd="kernel"),
    Animal("other-users", "setuid children, capabilities, groups, limits, priorities, no_new_privs", _python("other_users.py"), herd="processes"),
    Animal("user-1000", "a worker with --user 1000", _python("plain_user.py"), user="1000"),
    Animal("chroot", "a process in a root directory of its own (chroot)", _python("changed_root.py"), herd="files"),
    Animal("own-seccomp", "a seccomp filter of the program's own; robust locks between processes", _c("nested_seccomp"), herd="kernel"),
    Animal("vfork", "a process that waits in the kernel (state D) for 2 s: parent of a vfork", _c("vfork_parent", "2"), slow=3.0),
    Animal("vfork-20", "a process that waits in the kernel (state D) for 20 s", _c("vfork_parent", "20"), slow=25.0),
    Animal("spawn", "multiprocessing by spawn: pool, shared memory, locks, queue, manager", _python("multiprocessing_spawn.py"), herd="runtimes"),
    Animal("asyncio", "asyncio: timers, TCP and unix streams, a child, signals", _python("asyncio_loop.py"), herd="runtimes"),
    Animal("uvloop", "uvloop: timers, TCP and unix streams, a child, signals", _python("asyncio_loop.py", "uvloop", interpreter=VENV_PYTHON), herd="runtimes"),
    Animal("numpy-memmap", "numpy memory maps, shared and private, layer and /dev/shm", _python("numpy_memmap.py", interpreter=VENV_PYTHON), herd="runtimes"),
    Animal("torch-loader", "PyTorch DataLoader with worker processes", _python("torch_loader.py", interpreter=VENV_PYTHON)),
    Animal("torch-loader-30", "PyTorch DataLoader, 30 moves in a row", _python("torch_loader.py", interpreter=VENV_PYTHON), moves=30),
    Animal("jax", "JAX on the CPU", _python("jax_steps.py", interpreter=str(EXTRA / "bin/python")), needs="jax"),
    Animal("java", "Java: compiled code, garbage collection, thread pools, direct memory, sockets", ("java", "-Xmx256m", "-cp", "{built}", "Threads"), herd="virtual machines", needs="java"),
    Animal("node", "Node: timers, a worker thread, http with keep-alive, a child, thread pool", ("node", str(PROGRAMS / "server.js")), herd="virtual machines", needs="node"),
    Animal("r", "R", ("Rscript", str(PROGRAMS / "steps.R")), needs="R"),
    Animal("sqlite", "a sqlite database (WAL) that is being written and read", _python("sqlite_writer.py"), herd="files"),
    Animal("inet-sockets", "TCP and UDP inside the worker, v4 and v6: listening, connected, half closed, unread data", _python("inet_sockets.py"), herd="sockets"),
    Animal("unaccepted", "TCP connections inside the worker that are not accepted yet", _python("unaccepted.py"), herd="sockets", note="The client's end gets ECONNABORTED at once and connects again."),
    Animal("unix-sockets", "unix sockets: stream, datagram, seqpacket; by path, abstract, pairs", _python("unix_sockets.py"), herd="sockets"),
    Animal("passed-descriptor", "a descriptor in flight through a unix socket (SCM_RIGHTS)", _python("passed_descriptor.py"), herd="sockets"),
    Animal("raw-sockets", "raw, packet and netlink sockets", _python("raw_sockets.py"), herd="sockets"),
    Animal("event-descriptors", "eventfd, timerfd, signalfd, pidfd, nested epoll", _python("event_descriptors.py"), herd="kernel"),
    Animal("periodic-timerfd", "a periodic timerfd with unread expiries", _python("periodic_timer.py"), herd="kernel"),
    Animal("inotify", "inotify on files and directories of the layer and of /dev/shm", _python("watches.py"), Survives(("unread inotify events",)), herd="files"),
    Animal("locks", "flock, POSIX and open-file-description locks, held and waited for", _python("file_locks.py"), herd="files"),
    Animal("fifos", "fifos and pipes with unread data, sizes", _python("fifos_and_pipes.py"), herd="files"),
    Animal("open-things", "open files of /proc and /sys, directories, O_PATH, O_TMPFILE, deleted files and directories", _python("open_things.py"), herd="files"),
    Animal("small-files", "50,000 small files in the layer", _python("small_files.py"), notice=120.0),
    Animal("sparse-file", "a sparse file of 5 GB", _python("sparse_file.py"), herd="files"),
    Animal("volume-files", "on a volume: mapped, locked and deleted files, a fifo", _python("volume_files.py")),
    Animal("memory", "memfd with seals, shared, locked and huge pages, advice", _python("memory.py"), herd="kernel"),
    Animal("sysv-ipc", "System V shared memory, semaphores, message queues", _python("sysv_ipc.py"), Survives(("SEM_UNDO",)), herd="kernel"),
    Animal("aio", "kernel AIO (io_submit)", _c("aio"), herd="kernel"),
    Animal("settings", "settings of processes and sockets that change no result", _python("forgotten.py"), Survives(FORGOTTEN), herd="kernel"),
    Animal("missing-calls", "io_uring, userfaultfd, mqueue and others answer ENOSYS, user namespaces EPERM", _c("missing_calls"), FallsBack("falls back: io_uring_setup: Function not implemented"), herd="kernel"),
    Animal("interrupted", "a program that takes EINTR for an error: poll, epoll_wait and read without a limit, semaphores until a time", _c("interrupted"), herd="kernel", note="Sleeps, and poll and epoll_wait with a time limit, may be interrupted: see the notes."),
    Animal("vsock", "a socket to the hypervisor (AF_VSOCK)", _python("vsock.py"), Refused("a socket of kind AF_VSOCK", "use TCP"), herd="refused"),
    Animal("traced-child", "a process that is being traced (gdb, strace)", _python("traced_child.py"), Refused("is being traced", "end the debugger: the worker is protected again"), herd="refused"),
    Animal("outside-unix-socket", "a unix stream connection to outside, through a socket on a volume", _python("outside_unix_socket.py"), Refused("connected to a process outside the worker", "run both ends inside the worker, or connect over TCP"), herd="refused"),
    Animal("outside-datagram", "a unix datagram socket connected to outside, through a socket on a volume", _python("outside_datagram.py"), Refused("connected to a process outside the worker", "log to stdout or stderr, or over UDP"), herd="refused"),
    Animal("device", "an open device that was handed in as a volume", _python("open_device.py"), Refused("the device /dev/fuse open", "close it before a checkpoint"), herd="refused"),
    Animal("packet-pipe", "a pipe in packet mode (O_DIRECT)", _python("packet_pipe.py"), Refused("a pipe in packet mode", "use a unix datagram or seqpacket socketpair"), herd="refused too"),
    Animal("event-semaphore", "an eventfd that counts as a semaphore (EFD_SEMAPHORE)", _python("event_semaphore.py"), Refused("EFD_SEMAPHORE", "use a POSIX semaphore, or a pipe"), herd="refused too"),
    Animal("volume-link", "a volume's file open by a deleted name while it has another", _python("volume_link.py"), Refused("a deleted name of a volume's file", "keep such files in the layer, or open them by the name that stays"), herd="refused too"),
    Animal("deleted-watch", "inotify on a deleted file", _python("deleted_watch.py"), Refused("watches a file that was deleted", "remove the watch before the file"), herd="refused too"),
    Animal("stale-epoll", "epoll that still watches a descriptor which was closed here and lives on elsewhere", _python("stale_epoll.py"), Refused("an epoll that still watches", "remove a descriptor from epoll before closing it"), herd="refused too"),
)  # fmt: skip
