"""Preflight names what cannot be saved by pid, descriptor and path, and stays silent about what can."""

from __future__ import annotations

import ctypes
import os
import re
import signal
import socket
import subprocess
import textwrap
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from savedworker.checkpoint import processes
from savedworker.checkpoint.preflight import preflight
from savedworker.model.spec import WorkerSpec

SPEC = WorkerSpec(id="w", command=("true",))
PRELUDE = "import ctypes, os, socket, struct, sys, time\nlibc = ctypes.CDLL(None, use_errno=True)\n"
Start = Callable[..., int]


@pytest.fixture
def start(tmp_path: Path) -> Iterator[Start]:
    """Runs a program until it waits; returns its pid."""
    running: list[subprocess.Popen[str]] = []

    def run(program: str, *args: str) -> int:
        text = PRELUDE + textwrap.dedent(program) + "\nprint('ready', flush=True)\nsys.stdin.read()\n"
        process = subprocess.Popen(
            ["/usr/bin/python3", "-c", text, *args],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            cwd=tmp_path,
            start_new_session=True,
        )
        running.append(process)
        assert process.stdout is not None
        line = process.stdout.readline()
        assert line == "ready\n", process.communicate()[1]
        return process.pid

    yield run
    for process in reversed(running):  # a tracer before what it traces
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        for stream in (process.stdin, process.stdout, process.stderr):
            if stream is not None:
                stream.close()


def problems(pid: int) -> list[str]:
    """What preflight says of one process tree."""
    children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    return preflight([pid, *map(int, children)], SPEC)


REFUSED = {
    "io_uring": ("assert libc.syscall(425, 8, ctypes.create_string_buffer(120)) >= 0", "io_uring"),
    "userfaultfd": ("assert libc.syscall(323, 1) >= 0", "userfaultfd"),
    "memfd_secret": ("assert libc.syscall(447, 0) >= 0", "memfd_secret"),
    "landlock": ("assert libc.syscall(444, struct.pack('Q', 1), 8, 0) >= 0", "a Landlock ruleset"),
    "message queue": ("assert libc.syscall(240, b'sw-test', 0o102, 0o600, None) >= 0; libc.syscall(241, b'sw-test')", "/sw-test open, which is a message queue"),
    "device": ("os.open('/dev/loop-control', os.O_RDWR)", "the device /dev/loop-control open"),
    "vsock": ("kept = socket.socket(40, socket.SOCK_STREAM)", "a socket of kind AF_VSOCK"),
    "mptcp": ("kept = socket.socket(socket.AF_INET, socket.SOCK_STREAM, 262)", "a socket of kind MPTCP"),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_saved_is_named_with_pid_and_descriptor(start: Start, name: str) -> None:
    program, text = REFUSED[name]
    pid = start(program)
    found = problems(pid)
    assert len(found) == 1, found
    assert re.match(rf"pid {pid} \(python3\) fd \d+ has {re.escape(text)}", found[0]), found


SAVED = {
    "pipes": "r, w = os.pipe()",
    "memfd": "kept = os.memfd_create('x')",
    "event objects": "import select; e = select.epoll(); f = os.eventfd(1); p = os.pidfd_open(os.getpid())",
    "timers": "kept = libc.timerfd_create(1, 0); libc.inotify_init1(0); libc.signalfd(-1, bytes(128), 0)",
    "sockets": "a = socket.create_server(('127.0.0.1', 0)); b = socket.create_connection(a.getsockname()); u = socket.socket(2, 2); n = socket.socket(16, 3, 0)",
    "fresh socket": "kept = socket.socket()",
    "unix pair": "a, b = socket.socketpair()",
    "unix path": "s = socket.socket(1); s.bind('sock'); s.listen(); c = socket.socket(1); c.connect('sock')",
    "unix in flight": "import array; a, b = socket.socketpair(); c, d = socket.socketpair(); a.sendmsg([b'x'], [(1, 1, array.array('i', [d.fileno()]).tobytes())]); d.close()",
    "devices": "kept = [open(x, 'rb') for x in ('/dev/null', '/dev/zero', '/dev/urandom')]",
    "terminal": "import pty; a, b = pty.openpty()",
    "deleted file": "kept = open('gone', 'w'); os.unlink('gone')",
    "sparse deleted file": "kept = open('gone', 'wb'); kept.truncate(8 << 30); os.unlink('gone')",
    "shared memory": "import mmap; f = open('/dev/shm/sw-test-preflight', 'wb+'); f.truncate(4096); m = mmap.mmap(f.fileno(), 4096); os.unlink('/dev/shm/sw-test-preflight'); n = mmap.mmap(-1, 4096)",
    "locks": "import fcntl; f = open('l', 'w'); fcntl.flock(f, 2)",
    "proc and sys": "kept = [open('/proc/self/status'), open('/sys/kernel/uevent_seqnum'), open('/proc/self/ns/net')]",
    "zombie": "os.fork() or os._exit(0); time.sleep(0.1)",
}  # fmt: skip


@pytest.mark.parametrize("name", SAVED)
def test_what_can_be_saved_is_not_complained_about(start: Start, name: str) -> None:
    assert problems(start(SAVED[name])) == []


def test_a_stopped_process_is_named(start: Start) -> None:
    pid = start("")
    os.kill(pid, signal.SIGSTOP)
    try:
        os.waitid(os.P_PID, pid, os.WSTOPPED | os.WNOWAIT)
        assert problems(pid) == [
            f"pid {pid} (python3) is stopped by a signal: it has to continue before it can be saved"
        ]
    finally:
        os.kill(pid, signal.SIGCONT)


def test_a_traced_process_is_named_whoever_traces_it(start: Start) -> None:
    inner = start(
        "child = os.fork()\nif child == 0:\n    time.sleep(1000)\nassert libc.ptrace(0x4206, child, 0, 0) == 0"
    )
    (found,) = problems(inner)
    assert "is being traced (debugger or strace) by another process of the worker" in found
    traced = start("")
    start("assert libc.ptrace(0x4206, int(sys.argv[1]), 0, 0) == 0", str(traced))
    (found,) = problems(traced)
    assert (
        found
        == f"pid {traced} (python3) is being traced (debugger or strace) by a process outside the worker"
    )


def test_a_nested_user_namespace_is_named(start: Start) -> None:
    program = """
    r, w = os.pipe()
    child = os.fork()
    if child == 0:
        os.write(w, b"y" if libc.unshare(0x10000000) == 0 else b"n")
        time.sleep(1000)
    assert os.read(r, 1) == b"y"
    """
    pid = start(program)
    (found,) = problems(pid)
    assert found.endswith("(python3) made a user namespace of its own")


@pytest.mark.parametrize("kind", [socket.SOCK_STREAM, socket.SOCK_SEQPACKET, socket.SOCK_DGRAM])
def test_a_unix_socket_that_leaves_the_worker_is_named_because_only_the_restore_would_fail(
    start: Start, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: int
) -> None:
    monkeypatch.chdir(tmp_path)
    with socket.socket(socket.AF_UNIX, kind) as server:
        server.bind("outside")
        if kind != socket.SOCK_DGRAM:
            server.listen()
        pid = start(f"kept = socket.socket(socket.AF_UNIX, {int(kind)}); kept.connect('outside')")
        accepted = server.accept()[0] if kind != socket.SOCK_DGRAM else server
        with accepted:
            # Within one network namespace the peer is known to be outside only if another process has it.
            (found,) = problems(pid)
        assert re.fullmatch(
            rf"pid {pid} \(python3\) fd \d+ has a unix socket open that is connected to a process outside the worker",
            found,
        )


def test_a_mapped_device_is_named(start: Start) -> None:
    pid = start("import mmap; f = os.open('/dev/zero', os.O_RDWR); m = mmap.mmap(f, 4096, mmap.MAP_PRIVATE)")
    assert problems(pid) == []


def test_a_file_of_a_mount_that_the_worker_does_not_see_is_named(start: Start, tmp_path: Path) -> None:
    hidden = tmp_path / "hidden"
    hidden.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "tmpfs", hidden], check=True)
    try:
        (hidden / "file").write_text("x")
        pid = start("kept = open(sys.argv[1])", str(hidden / "file"))
    finally:
        subprocess.run(["umount", "-l", hidden], check=True)
    (found,) = problems(pid)
    assert "lies on a mount that the worker cannot see" in found


def test_no_more_than_eight_reasons_are_given_at_a_time(start: Start) -> None:
    pid = start("kept = [os.open('/dev/loop-control', os.O_RDWR) for _ in range(12)]")
    found = problems(pid)
    assert len(found) == 9
    assert found[-1] == "and 4 more"


def test_processes_that_are_gone_are_no_problem() -> None:
    process = subprocess.Popen(["/bin/true"])
    process.wait()
    assert preflight([process.pid], SPEC) == []


def test_a_process_runs_untraced_until_it_is_traced_or_killed() -> None:
    child = subprocess.Popen(["sleep", "60"])
    try:
        assert processes.runs_untraced(child.pid)
        libc = ctypes.CDLL(None)
        assert libc.ptrace(0x4206, child.pid, 0, 0) == 0  # PTRACE_SEIZE
        assert not processes.runs_untraced(child.pid)
        assert libc.ptrace(0x4207, child.pid, 0, 0) == 0  # PTRACE_INTERRUPT
        os.waitpid(child.pid, 0)
        assert libc.ptrace(17, child.pid, 0, 0) == 0  # PTRACE_DETACH
        assert processes.runs_untraced(child.pid)
        child.kill()
        os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)
        assert not processes.runs_untraced(child.pid), "a zombie does not run"
    finally:
        child.kill()
        child.wait()
    assert not processes.runs_untraced(child.pid)
    assert not processes.runs_untraced(None)
