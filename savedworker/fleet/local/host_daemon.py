"""The program behind one host: owns its namespaces, serves its metadata, keeps its agent running, and ends the host.

Started by LocalFleet, detached from it. It has one thread that decides and one set of threads for the metadata service; it
imports neither pydantic nor any model but the errors, so that a host is up in a fraction of a second.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import logging
import os
import selectors
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from savedworker.checkpoint.allocator import in_huge_pages
from savedworker.fleet.local import namespaces, network
from savedworker.fleet.local.cgroup import HostCgroup
from savedworker.fleet.local.destroy import destroy, dismantle, unmount_below
from savedworker.fleet.local.files import Lock, read_json
from savedworker.fleet.local.host import Ended, HostDir, HostRecord, Outcome
from savedworker.fleet.local.metadata import Metadata, MetadataServer, Role, Told
from savedworker.fleet.local.process import ProcessId
from savedworker.model.errors import Fatal, SavedWorkerError, Temporary

log = logging.getLogger("savedworker.host")

LOG_LIMIT = 32 << 20
"""The log is emptied when it gets longer than this, in bytes."""
LOOK_EVERY = 2.0
METADATA = "SAVEDWORKER_LOCAL_METADATA"
"""For drills and tests: a JSON file with what a host's metadata service tells besides, or instead: see ``Told``."""
MAX_PAUSE = 30.0


class HostDaemon:
    """One host, from its boot to its end."""

    def __init__(self, host: HostDir, record: HostRecord) -> None:
        self._host = host
        self._record = record
        self._metadata = Metadata(record.instance, record.zone, record.address, self._told)
        self._control: socket.socket | None = None
        self._outside: list[tuple[int, int]] = []
        self._agent: subprocess.Popen[bytes] | None = None
        self._crashes = 0
        self._restart_at: float | None = None
        self._deadline: float | None = None
        self._notice: float | None = None
        self._end: tuple[Outcome, str] | None = None

    def _told(self) -> Told:
        """What the file says that a test names, where there is one. Every host has an access key of its own."""
        given = (read_json(Path(os.environ[METADATA])) if METADATA in os.environ else None) or {}
        role = given.get("role")
        if role is not None:
            role = Role(**{**role, "access_key": f"{role['access_key']}.{self._record.instance}"})
        return Told(role, given.get("documents", {}))

    def boot(self) -> None:
        """Enter the host and start its agent; the caller holds the host's lock. Raises SavedWorkerError or OSError."""
        me = ProcessId.of(os.getpid())
        self._update(daemon=me)
        network.note_claim(self._record.address, self._host.path, me)
        HostCgroup(self._record.cgroup).join()
        self._enter_namespaces()
        namespaces.become_subreaper()
        self._control = self._host.listen()
        MetadataServer(self._metadata, (network.METADATA_ADDRESS, 80))
        self._start_agent()

    def _enter_namespaces(self) -> None:
        """The host's network, and a mount namespace whose mounts end with the host."""
        for name, kind in (("mnt", namespaces.CLONE_NEWNS), ("net", namespaces.CLONE_NEWNET)):
            self._outside.append((os.open(f"/proc/self/ns/{name}", os.O_RDONLY), kind))
        netns = os.open(f"/run/netns/{self._record.netns}", os.O_RDONLY)
        namespaces.setns(netns, namespaces.CLONE_NEWNET)
        os.close(netns)
        namespaces.unshare(namespaces.CLONE_NEWNS)
        namespaces.mount("", Path("/"), None, namespaces.MS_REC | namespaces.MS_PRIVATE)
        # Namespaces that the agent names are visible to it alone, and ours does not pin those of other hosts.
        namespaces.mount("tmpfs", Path("/run/netns"), "tmpfs", data="mode=755,size=1m")
        own = os.open(self._host.path, os.O_PATH | os.O_DIRECTORY)
        namespaces.mount(
            "tmpfs", self._host.path.parent, "tmpfs", data="mode=700,size=1m"
        )  # hides the other hosts
        self._host.path.mkdir(mode=0o700)
        namespaces.mount(f"/proc/self/fd/{own}", self._host.path, None, namespaces.MS_BIND)
        os.close(own)

    def _step_outside(self) -> None:
        """Back to the namespaces of the launcher, so that the host's can die and its scratch be removed without its mounts."""
        unmount_below(self._host.scratch)
        namespaces.unshare(
            namespaces.CLONE_FS
        )  # setns(2) refuses while threads share our root and working directory
        while self._outside:
            fd, kind = self._outside.pop()
            namespaces.setns(fd, kind)
            os.close(fd)

    def _update(self, **changes: Any) -> None:
        self._record = replace(self._record, **changes)
        self._host.write_record(self._record)

    def _start_agent(self) -> None:
        self._restart_at = None
        self._agent = subprocess.Popen(
            self._record.agent_command,
            cwd=self._host.scratch,
            stdin=subprocess.DEVNULL,
            env=in_huge_pages(os.environ),
            start_new_session=True,
        )
        log.info("agent started as pid %d", self._agent.pid)
        self._update(agent=ProcessId.of(self._agent.pid), agent_starts=self._record.agent_starts + 1)

    def serve(self) -> None:
        """Act on requests, deadlines and the agent's end until the host is destroyed."""
        assert self._control is not None
        waker, woken = socket.socketpair()
        waker.setblocking(False)
        woken.setblocking(False)
        signal.set_wakeup_fd(waker.fileno(), warn_on_full_buffer=False)
        signal.signal(signal.SIGCHLD, lambda *_: None)
        signal.signal(signal.SIGTERM, self._on_sigterm)
        with selectors.DefaultSelector() as selector:
            selector.register(self._control, selectors.EVENT_READ)
            selector.register(woken, selectors.EVENT_READ)
            while True:
                self._reap()
                self._look()
                if self._end is not None:
                    break
                now = time.monotonic()
                times = [t for t in (self._restart_at, self._deadline, now + LOOK_EVERY) if t is not None]
                for key, _ in selector.select(max(0.0, min(times) - now)):
                    if key.fileobj is woken:
                        with contextlib.suppress(BlockingIOError):
                            woken.recv(4096)
                    else:
                        self._answer()
        self._destroy(*self._end)

    def _on_sigterm(self, *_: object) -> None:
        self._end = self._end or ("gone", "the host daemon was told to stop")

    def _reap(self) -> None:
        """Collect ended children, among them orphans of the agent."""
        while True:
            try:
                pid, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                return
            if pid == 0:
                return
            if self._agent is not None and pid == self._agent.pid:
                code = os.waitstatus_to_exitcode(status)
                self._agent.returncode = code
                self._agent = None
                self._agent_ended(code)

    def _agent_ended(self, code: int) -> None:
        how = f"exit status {code}" if code >= 0 else f"signal {-code}"
        log.info("agent ended with %s", how)
        if code == 0:
            text = (
                "ended itself" if self._notice is None else f"{self._preempted()}; its agent was done before"
            )
            self._end = self._end or ("gone", text)
            return
        self._crashes += 1
        if self._crashes > self._record.restart_limit:
            self._end = self._end or (
                "failed",
                f"its agent crashed {self._crashes} times, at last with {how}",
            )
            return
        pause = min(self._record.restart_pause * 2 ** (self._crashes - 1), MAX_PAUSE)
        self._restart_at = time.monotonic() + pause
        log.warning("agent crashed, restart %d in %.1f s", self._crashes, pause)

    def _look(self) -> None:
        """What is due: the end of the notice, a restart, an overlong log, a directory that somebody removed."""
        now = time.monotonic()
        if self._deadline is not None and now >= self._deadline:
            self._end = self._end or ("gone", self._preempted())
        elif self._restart_at is not None and now >= self._restart_at:
            try:
                self._start_agent()
            except OSError as error:
                log.exception("the agent cannot be started")
                self._restart_at = None
                self._end = self._end or ("failed", f"its agent cannot be started: {error}")
        elif not self._host.present:
            self._end = self._end or ("gone", "its directory was removed")
        elif os.fstat(2).st_size > LOG_LIMIT:
            os.ftruncate(2, 0)

    def _preempted(self) -> str:
        return (
            "preempted without notice" if self._notice is None else f"preempted with {self._notice:g}s notice"
        )

    def _answer(self) -> None:
        """One request from the control socket. Root only can connect, and is not kept waiting for."""
        assert self._control is not None
        connection, _ = self._control.accept()
        with connection:
            connection.settimeout(1.0)
            try:
                request = json.loads(connection.makefile("rb").readline(65536))
                answer = self._act(request)
                connection.sendall(json.dumps(answer).encode() + b"\n")
            except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
                log.warning("a bad request: %r", error)

    def _act(self, request: dict[str, Any]) -> dict[str, Any]:
        action = request["do"]
        log.info("asked to %s", request)
        if action == "terminate":
            self._end = self._end or ("gone", "terminated")
        elif action == "preempt" and request["notice"] is None:
            self._notice = None
            self._end = self._end or ("gone", self._preempted())
        elif action == "preempt":
            self._notice = float(request["notice"])
            self._deadline = time.monotonic() + self._metadata.interrupt(self._notice)
        elif action == "rebalance":
            self._metadata.rebalance()
        elif action == "withdraw":
            self._metadata.withdraw()
            self._deadline = self._notice = None
        else:
            return {"ok": False, "error": f"unknown request {action!r}"}
        return {"ok": True}

    def _destroy(self, outcome: Outcome, detail: str) -> None:
        """Destroy the host, this process last."""
        log.info("host ends: %s", detail)
        ended = Ended(outcome, detail, datetime.now(UTC).isoformat(timespec="milliseconds"))
        HostCgroup(self._record.cgroup).leave()
        for _ in range(5):
            try:
                lock = self._host.lock(30.0) if self._host.present else None
                if lock is not None:
                    with lock:
                        destroy(self._host, self._record, ended, self._step_outside)
                    return
                if not self._host.present:
                    HostCgroup(self._record.cgroup).kill_all()
                    self._step_outside()
                    dismantle(self._record, self._host.path)
                    return
            except (Temporary, OSError):
                log.exception("not destroyed yet")
            time.sleep(1.0)
        log.error("given up: the next describe() or sweep() of any process goes on")


def main(argv: Sequence[str] | None = None) -> int:
    """``host_daemon --host DIR --lock-fd N --ready-fd N``. The answer goes to the ready pipe as one line of JSON."""
    parser = argparse.ArgumentParser(prog="host_daemon")
    parser.add_argument("--host", type=Path, required=True)
    parser.add_argument("--lock-fd", type=int, required=True)
    parser.add_argument("--ready-fd", type=int, required=True)
    given = parser.parse_args(argv)
    for fd in (given.lock_fd, given.ready_fd):
        os.set_inheritable(fd, False)
    if os.fork():
        os._exit(0)  # the launcher has nobody to wait for
    signal.pthread_sigmask(signal.SIG_SETMASK, [])
    for number in (signal.SIGHUP, signal.SIGINT, signal.SIGQUIT, signal.SIGUSR1, signal.SIGUSR2):
        signal.signal(number, signal.SIG_DFL)
    os.umask(0o022)
    logging.basicConfig(stream=sys.stderr, level=logging.INFO, format="%(asctime)s %(name)s %(message)s")
    lock = Lock(given.lock_fd)
    try:
        host = HostDir(given.host)
        record = host.record()
        if record is None:
            raise Fatal(f"{given.host} has no host.json")
        daemon = HostDaemon(host, record)
        daemon.boot()
    except (SavedWorkerError, OSError) as error:
        log.exception("the host does not boot")
        fix = error.fix if isinstance(error, SavedWorkerError) else ""
        os.write(given.ready_fd, json.dumps({"error": str(error), "fix": fix}).encode() + b"\n")
        # The lock goes with the launcher, which undoes all, or with this process if the launcher is gone.
        os._exit(1)
    lock.release()
    with contextlib.suppress(OSError):  # the launcher may be dead: the host lives
        os.write(given.ready_fd, b'{"ok": true}\n')
    os.close(given.ready_fd)
    daemon.serve()
    return 0


if __name__ == "__main__":
    code = main()
    logging.shutdown()
    os._exit(code)  # the metadata threads have nothing to finish
