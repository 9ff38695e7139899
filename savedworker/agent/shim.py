"""The shim: a small process beside the worker that outlives a crash of the agent.

It is the parent of the worker's pid 1, so it alone learns its exit status; it holds the read ends of the worker's stdout and
stderr and spools them to files; and it enforces the lease: when the deadline that the agent last proved has passed, it freezes
the worker's cgroup, and a term later kills it. It needs neither agent, store nor network. One thread, standard library
only.

Requests are one JSON line on a unix socket, answers likewise (see ``shim_client``).
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import math
import os
import re
import selectors
import signal
import socket
import stat
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

from savedworker.checkpoint.cgroups import Cgroup
from savedworker.crashpoints import crash_point

_PR_SET_CHILD_SUBREAPER = 36
_PIPE_SIZE = 1 << 20
_SEND_LIMIT = 0.5
"""Seconds that one client can keep the shim from everything else."""
_MAX_REQUEST = 4 << 20
"""Bytes of one request."""
_MAX_TERM = 1e7
"""Seconds; a lease that runs for longer would never be enforced."""
_ENFORCE_EVERY = 0.01
"""Seconds between two freezes past the deadline: what ends meanwhile (a dump, a restore) thaws the worker."""
STREAMS: Final = ("stdout", "stderr")


def lease_clock() -> float:
    """Seconds on the clock that lease deadlines are told in: it goes on while the machine is suspended."""
    return time.clock_gettime(time.CLOCK_BOOTTIME)


class Spool:
    """One stream: the pipe's read end and the file that keeps what came out. Positions count from the worker's birth."""

    def __init__(self, path: Path, start: int) -> None:
        self.start = start
        self.file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_TRUNC, 0o600)
        self.read_end, self.write_end = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
        with contextlib.suppress(OSError):
            import fcntl

            fcntl.fcntl(self.read_end, fcntl.F_SETPIPE_SZ, _PIPE_SIZE)
        os.set_blocking(self.write_end, True)
        self.size = 0
        self.problem = ""

    @property
    def position(self) -> int:
        """Bytes of the stream in the worker's life so far."""
        return self.start + self.size

    def drain(self) -> None:
        """Move everything that is in the pipe into the file."""
        while True:
            try:
                data = os.read(self.read_end, _PIPE_SIZE)
            except BlockingIOError:
                return
            if not data:
                return
            self._write(data)

    def _write(self, data: bytes) -> None:
        view = memoryview(data)
        while view:
            try:
                written = os.pwrite(self.file, view, self.size)
            except OSError as error:
                # The disk is full: the lines are lost, which is said; the worker must not be blocked by it.
                self.problem = f"lines were lost: {error.strerror}"
                return
            self.size += written
            view = view[written:]

    def cut_to(self, size: int) -> None:
        """Forget what came after ``size`` bytes: runc's own words about a start that failed."""
        os.ftruncate(self.file, size)
        self.size = size


class Shim:
    """The state of one worker on this instance."""

    def __init__(self, folder: Path, cgroup: str) -> None:
        self.folder = folder
        self.cgroup = Cgroup(cgroup)
        self.deadline: float | None = None
        self.term = 0.0
        self.frozen_by_lease = False
        self.killed_by_lease = False
        self.starter: subprocess.Popen[bytes] | None = None
        self.starter_marks: dict[str, int] = {}
        self.start_request: tuple[Connection, Path] | None = None
        """Who asked for the start under way, and where runc will leave its state."""
        self.worker_pid: int | None = None
        self.early_ends: dict[int, int] = {}
        self.status_file: Path | None = None
        self.exit: dict[str, Any] | None = None
        self.waiting: list[Connection] = []
        self.spools: dict[str, Spool] = {}
        self.selector = selectors.DefaultSelector()
        self.quit = False

    # Requests -------------------------------------------------------------------------------------------------

    def handle(self, connection: Connection, request: dict[str, Any]) -> dict[str, Any] | None:
        """The answer to one request; None when it comes later."""
        operations: dict[str, Callable[[Connection, dict[str, Any]], dict[str, Any] | None]] = {
            "lease": self._lease,
            "start": self._start,
            "status": lambda _c, _r: self._status(),
            "drain": self._drain,
            "wait": self._wait,
            "kill": self._kill,
            "quit": self._quit,
        }
        operation = operations.get(str(request.get("op")))
        if operation is None:
            return {"error": f"unknown request {str(request.get('op'))[:80]!a}"}
        return operation(connection, request)

    def _lease(self, _: Connection, request: dict[str, Any]) -> dict[str, Any]:
        """A new proof of ownership: executing is allowed until ``deadline`` (lease_clock seconds)."""
        deadline, term = float(request["deadline"]), float(request["term"])
        if not (math.isfinite(deadline) and 0 < term < _MAX_TERM and deadline < lease_clock() + _MAX_TERM):
            return {"error": "such a lease is never given"}
        crash_point("shim.lease")
        if self.deadline is None or deadline > self.deadline:
            self.deadline, self.term = deadline, term
        if self.frozen_by_lease and lease_clock() < self.deadline:
            self.frozen_by_lease = False
            self.cgroup.thaw()
        return self._status()

    def _start(self, connection: Connection, request: dict[str, Any]) -> dict[str, Any] | None:
        """Run ``argv`` (runc run or restore, detached) with the worker's stdio. Answered when it has ended."""
        if self.starter is not None or self.worker_pid is not None:
            return {"error": "a worker was started already"}
        if self.deadline is None or lease_clock() >= self.deadline:
            return {"error": "no lease"}
        try:
            argv, env = _words(request["argv"]), request["env"]
            _words([*env.keys(), *env.values()])
            files = [Path(x) for x in _words([request["status_file"], request["state_file"]])]
            starts = {stream: request["positions"][stream] for stream in STREAMS}
            if not argv or not all(type(x) is int and 0 <= x < 1 << 63 for x in starts.values()):
                raise ValueError("no command, or a position that no stream can have")
        except (KeyError, TypeError, AttributeError, ValueError) as error:
            return {"error": f"not a start: {str(error)[:300]}"}
        for stream in STREAMS:
            start = starts[stream]
            if stream not in self.spools:
                spool = Spool(self.folder / f"{stream}.spool", start)
                self.spools[stream] = spool
                self.selector.register(spool.read_end, selectors.EVENT_READ, spool.drain)
            elif self.spools[stream].size == 0:
                self.spools[stream].start = start  # the try before failed: this is another checkpoint perhaps
        self.starter_marks = {stream: spool.size for stream, spool in self.spools.items()}
        self.status_file = files[0]
        self.exit = None
        self.start_request = (connection, files[1])
        crash_point("shim.start")
        self.starter = subprocess.Popen(
            argv,
            stdin=subprocess.DEVNULL,
            stdout=self.spools["stdout"].write_end,
            stderr=self.spools["stderr"].write_end,
            env=env,
            cwd="/",
        )
        return None

    def _status(self) -> dict[str, Any]:
        return {
            "worker_pid": self.worker_pid,
            "exit": self.exit,
            "positions": {stream: spool.position for stream, spool in self.spools.items()},
            "starts": {stream: spool.start for stream, spool in self.spools.items()},
            "frozen_by_lease": self.frozen_by_lease,
            "killed_by_lease": self.killed_by_lease,
            "problems": [spool.problem for spool in self.spools.values() if spool.problem],
            "starting": self.starter is not None,
        }

    def _drain(self, _: Connection, __: dict[str, Any]) -> dict[str, Any]:
        for spool in self.spools.values():
            spool.drain()
        return self._status()

    def _wait(self, connection: Connection, _: dict[str, Any]) -> dict[str, Any] | None:
        """Answered when the worker has ended."""
        if self.exit is not None:
            return self._status()
        self.waiting.append(connection)
        return None

    def _kill(self, _: Connection, __: dict[str, Any]) -> dict[str, Any]:
        return {**self._status(), "killed": self.cgroup.kill()}

    def _quit(self, _: Connection, __: dict[str, Any]) -> dict[str, Any]:
        if self.worker_pid is not None or self.starter is not None:
            return {"error": "the worker still runs"}
        self.quit = True
        return self._status()

    # Events ---------------------------------------------------------------------------------------------------

    def reap(self) -> None:
        """Collect children that ended: the starter, the worker's pid 1, and strays that were handed to us."""
        if self.starter is not None and self.starter.poll() is not None:
            self._started(self.starter.returncode)
        while True:
            try:
                found = os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
            except ChildProcessError:
                return
            if found is None:
                return
            if self.starter is not None and found.si_pid == self.starter.pid:
                self.starter.wait()
                self._started(self.starter.returncode)
                continue
            pid, status = os.waitpid(found.si_pid, 0)
            if pid == self.worker_pid:
                self._ended(status)
            elif self.starter is not None:
                # The worker can end before the command that starts it has: remember, it may turn out to be pid 1.
                self.early_ends[pid] = status

    def _started(self, returncode: int) -> None:
        assert self.starter is not None
        self.starter = None
        crash_point("shim.started")
        connection, state_file = self.start_request or (None, self.folder / "none")
        self.start_request = None
        if returncode != 0:
            for stream, spool in self.spools.items():
                spool.drain()
                spool.cut_to(self.starter_marks[stream])
            self.early_ends.clear()
            if connection is not None:
                connection.answer({**self._status(), "returncode": returncode})
            return
        try:
            self.worker_pid = int(json.loads(state_file.read_bytes())["init_process_pid"])
        except (OSError, ValueError, KeyError, TypeError, OverflowError, RecursionError) as error:
            if connection is not None:
                connection.answer({"error": f"runc left no state: {error}"})
            return
        if connection is not None:
            connection.answer({**self._status(), "returncode": 0})
        if self.worker_pid in self.early_ends:
            self._ended(self.early_ends[self.worker_pid])
        elif not _is_child(self.worker_pid):
            self._ended(0)  # reaped by whoever started it: init's own report is all there is
        self.early_ends.clear()

    def _ended(self, status: int) -> None:
        crash_point("shim.ended")
        for spool in self.spools.values():
            spool.drain()
        report = _report(self.status_file, status) if self.status_file is not None else ""
        self.exit = {"wait_status": status, "report": report, "oom_kills": self.cgroup.oom_kills()}
        self.worker_pid = None
        for connection in tuple(self.waiting):
            connection.answer(self._status())
        self.waiting.clear()

    def enforce(self) -> float:
        """Freeze or kill a worker whose lease ran out. Returns seconds until this must be looked at again."""
        if self.deadline is None or (self.worker_pid is None and self.starter is None):
            return 3600.0
        late = lease_clock() - self.deadline
        if late < 0:
            return -late
        if late >= self.term and not self.killed_by_lease:
            self.killed_by_lease = True
            self.cgroup.freeze()  # at once, however many there are to be killed
            self.cgroup.kill()
        elif not self.killed_by_lease:
            # Again and again: a checkpoint that ends now thaws what we froze.
            self.frozen_by_lease = True
            self.cgroup.freeze()
            crash_point("shim.freeze")
        return _ENFORCE_EVERY

    def run(self, listener: socket.socket) -> None:
        """Serve until told to quit."""
        reader, writer = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
        signal.set_wakeup_fd(writer, warn_on_full_buffer=False)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        for ignored in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            signal.signal(ignored, signal.SIG_IGN)  # the instance's shutdown is the agent's business
        self.selector.register(reader, selectors.EVENT_READ, lambda: os.read(reader, 4096))
        self.selector.register(listener, selectors.EVENT_READ, lambda: self._accept(listener))
        while not self.quit:
            for key, _ in self.selector.select(timeout=min(self.enforce(), 3600.0)):
                key.data()
            self.reap()

    def _accept(self, listener: socket.socket) -> None:
        with contextlib.suppress(OSError):
            Connection(self, listener.accept()[0])


def _words(found: Any) -> list[str]:
    """``found`` as what can be handed to a program. Raises TypeError, ValueError."""
    if not isinstance(found, list) or not all(isinstance(word, str) for word in found):
        raise TypeError("a list of words is wanted")
    if any("\0" in word for word in found):
        raise ValueError("a word with a NUL character")
    return found


def _report(file: Path, status: int) -> str:
    """What init wrote into its status file: ``exit N``, ``signal N`` or nothing.

    The file lies in the worker's own layer, so the worker may have put anything in its place: links are not followed, devices
    and fifos not opened, and what init's own wait status contradicts is not believed. A status of 0 is also that of an init
    whose end somebody else saw.
    """
    try:
        folder = os.open(file.parent, os.O_PATH | os.O_DIRECTORY | os.O_NOFOLLOW)
        try:
            if not stat.S_ISREG(os.stat(file.name, dir_fd=folder, follow_symlinks=False).st_mode):
                return ""
            opened = os.open(file.name, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK, dir_fd=folder)
        finally:
            os.close(folder)
        with os.fdopen(opened, "rb") as content:
            line = content.read(64).partition(b"\n")[0].decode(errors="replace")
    except OSError:
        return ""
    match = re.fullmatch(r"(exit|signal) ([0-9]{1,3})", line)
    if match is None or os.WIFSIGNALED(status):
        return ""
    said = int(match[2]) + (128 if match[1] == "signal" else 0)
    return line if said <= 255 and (status == 0 or os.WEXITSTATUS(status) == said) else ""


def _is_child(pid: int) -> bool:
    try:
        os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG | os.WNOWAIT)
    except ChildProcessError:
        return False
    return True


class Connection:
    """One client. A request is a JSON line."""

    def __init__(self, shim: Shim, connection: socket.socket) -> None:
        self.shim = shim
        self.socket = connection
        connection.setblocking(False)
        self.buffer = b""
        shim.selector.register(connection, selectors.EVENT_READ, self.read)

    def read(self) -> None:
        """Take what came; answer complete requests."""
        try:
            data = self.socket.recv(1 << 16)
        except BlockingIOError:
            return
        except OSError:
            data = b""
        if not data:
            self.close()
            return
        self.buffer += data
        if len(self.buffer) > _MAX_REQUEST:
            self.close()
            return
        while b"\n" in self.buffer:
            line, self.buffer = self.buffer.split(b"\n", 1)
            try:
                request = json.loads(line)
                answer = (
                    self.shim.handle(self, request)
                    if isinstance(request, dict)
                    else {"error": "not a request"}
                )
            except Exception as error:  # noqa: BLE001 - whatever a request holds, the worker's keeper outlives it
                answer = {"error": f"{type(error).__name__}: {str(error)[:300]}"}
            if answer is not None:
                crash_point("shim.answer")
                self.answer(answer)

    def answer(self, document: dict[str, Any]) -> None:
        """Send one answer. A client that is gone does not matter; one that does not read keeps us once, not again."""
        try:
            self.socket.settimeout(_SEND_LIMIT)
            self.socket.sendall(json.dumps(document).encode() + b"\n")
            self.socket.setblocking(False)
        except OSError:
            self.close()

    def close(self) -> None:
        """Forget the client."""
        with contextlib.suppress(KeyError, ValueError):
            self.shim.selector.unregister(self.socket)
        if self in self.shim.waiting:
            self.shim.waiting.remove(self)
        self.buffer = b""
        self.socket.close()


def _come_first() -> None:
    """Run before everything else on this instance, if that is allowed: a deadline does not wait for a worker that uses every CPU.

    Not so what is started from here.
    """
    with contextlib.suppress(OSError):
        os.sched_setscheduler(0, os.SCHED_FIFO | os.SCHED_RESET_ON_FORK, os.sched_param(1))


def main(argv: list[str]) -> int:
    """``python -m savedworker.agent.shim FOLDER CGROUP``: daemonize and serve ``FOLDER/shim.sock``."""
    folder, cgroup = Path(argv[1]), argv[2]
    os.chdir(folder)  # a relative path keeps the socket's name within the 107 bytes it may have
    Path("shim.sock").unlink(missing_ok=True)
    listener = socket.socket(socket.AF_UNIX)
    listener.bind("shim.sock")
    os.chmod("shim.sock", 0o600)
    listener.listen(16)
    if child := os.fork():
        Path("shim.pid").write_text(str(child))  # there when whoever launched it goes on
        return 0
    os.setsid()
    log = os.open("shim.log", os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
    null = os.open(os.devnull, os.O_RDONLY)
    os.dup2(null, 0)
    os.dup2(log, 1)
    os.dup2(log, 2)
    crash_point("shim.begin")
    ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    _come_first()
    Shim(folder, cgroup).run(listener)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv))
