"""The agent's side of the shim: starting one, finding one again, and one method for each request."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from savedworker.agent.shim import STREAMS
from savedworker.model.errors import Fatal, SavedWorkerError
from savedworker.model.manifest import StreamPosition


@dataclass(frozen=True)
class WorkerExit:
    """How the worker's pid 1 ended, as the shim saw it."""

    wait_status: int
    report: str
    oom_kills: int


@dataclass(frozen=True)
class ShimStatus:
    """What the shim knows. ``exit`` is None while the worker runs or never ran; ``starting`` while runc is at work."""

    worker_pid: int | None
    exit: WorkerExit | None
    position: StreamPosition
    start: StreamPosition
    frozen_by_lease: bool
    killed_by_lease: bool
    problems: tuple[str, ...]
    starting: bool
    returncode: int | None = None


class ShimGone(SavedWorkerError):
    """The shim does not answer: it died, or was never there."""

    code = "shim_gone"


class ShimClient:
    """Calls a shim. Each call has its own connection, so any thread may make one."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def spool(self, stream: str) -> Path:
        """The file with the bytes of ``stream`` that came on this instance."""
        return self.folder / f"{stream}.spool"

    def launch(self, cgroup: str) -> None:
        """Start the shim; returns when it listens."""
        self.folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        done = subprocess.run(
            [sys.executable, "-m", "savedworker.agent.shim", str(self.folder), cgroup],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            timeout=30,
            check=False,
        )
        if done.returncode:
            raise Fatal(f"the shim did not start: {done.stderr.decode(errors='replace').strip()[-300:]}")

    def alive(self) -> bool:
        """True when a shim answers."""
        try:
            self.status()
        except ShimGone:
            return False
        return True

    def lease(self, deadline: float, term: float) -> ShimStatus:
        """Prove ownership until ``deadline`` (lease_clock seconds). Thaws a worker that the shim froze."""
        return self._status(self._ask({"op": "lease", "deadline": deadline, "term": term}))

    def start(
        self,
        argv: list[str],
        env: dict[str, str],
        position: StreamPosition,
        status_file: Path,
        state_file: Path,
    ) -> ShimStatus:
        """Run runc with the worker's stdio, until it has ended. Raises Fatal when it fails."""
        request = {
            "op": "start",
            "argv": argv,
            "env": env,
            "positions": {stream: getattr(position, stream) for stream in STREAMS},
            "status_file": str(status_file),
            "state_file": str(state_file),
        }
        status = self._status(self._ask(request, timeout=None))
        if status.returncode:
            raise Fatal(f"runc ended with status {status.returncode}")
        return status

    def status(self) -> ShimStatus:
        """What the shim knows now."""
        return self._status(self._ask({"op": "status"}))

    def drain(self) -> StreamPosition:
        """Move all that the worker wrote into the spools, and the positions after it."""
        return self._status(self._ask({"op": "drain"})).position

    def wait(self) -> ShimStatus:
        """Block until the worker has ended. Raises ShimGone."""
        return self._status(self._ask({"op": "wait"}, timeout=None))

    def kill(self) -> bool:
        """Kill every process of the worker; True when none is left."""
        return bool(self._ask({"op": "kill"}).get("killed"))

    def quit(self) -> None:
        """End the shim, whose worker has ended."""
        self._ask({"op": "quit"})

    def _ask(self, request: dict[str, Any], timeout: float | None = 30.0) -> dict[str, Any]:
        try:
            with socket.socket(socket.AF_UNIX) as connection:
                connection.settimeout(timeout)
                folder = os.open(self.folder, os.O_PATH)
                try:
                    connection.connect(f"/proc/self/fd/{folder}/shim.sock")
                finally:
                    os.close(folder)
                connection.sendall(json.dumps(request).encode() + b"\n")
                line = connection.makefile("rb").readline()
        except OSError as error:
            raise ShimGone(f"the shim in {self.folder} does not answer: {error}") from error
        if not line:
            raise ShimGone(f"the shim in {self.folder} went away")
        answer: dict[str, Any] = json.loads(line)
        if "error" in answer:
            raise Fatal(f"the shim refused {request['op']}: {answer['error']}")
        return answer

    @staticmethod
    def _status(answer: dict[str, Any]) -> ShimStatus:
        return ShimStatus(
            worker_pid=answer["worker_pid"],
            exit=WorkerExit(**answer["exit"]) if answer["exit"] else None,
            position=StreamPosition(**answer["positions"]),
            start=StreamPosition(**answer["starts"]),
            frozen_by_lease=answer["frozen_by_lease"],
            killed_by_lease=answer["killed_by_lease"],
            problems=tuple(answer["problems"]),
            starting=answer["starting"],
            returncode=answer.get("returncode"),
        )
