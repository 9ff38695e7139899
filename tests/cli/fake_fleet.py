"""A double for fleet, agent and runtime, so that the command line can be tried without CRIU, root or namespaces.

The worker's command runs as a plain process that writes to two files. A "checkpoint" stops it, a "restore" lets it go on,
a loss without notice kills it and begins again. Everything else is real: store, records, logs, controller, processes.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path

from savedworker.fleet.base import Launched, LaunchRequest
from savedworker.model import events as ev
from savedworker.model.decisions import InstanceView, Leave, Take, may_take
from savedworker.model.errors import Refused
from savedworker.model.record import Reason
from savedworker.store.backend import open_store
from savedworker.store.logs import LogWriter
from savedworker.store.worker import WorkerStore

ROOT = Path(__file__).parents[2]


def folder() -> Path:
    """Where the doubles keep what they know of instances and processes."""
    return Path(os.environ["FAKE_FLEET_DIR"])


class FakeFleet:
    """Every launch is a process that runs this module."""

    name = "fake"
    lease_term = 2.0
    embedded = False

    def launch(self, request: LaunchRequest) -> Launched:
        instance = f"host-{len(list(folder().glob('l-*.pid'))) + 1}"
        with open(folder() / f"{request.launch}.log", "wb") as log:
            agent = subprocess.Popen(
                [
                    sys.executable,
                    "-m",
                    "tests.cli.fake_fleet",
                    request.store_url,
                    request.worker,
                    request.launch,
                    instance,
                ],
                cwd=ROOT,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )
        _replace(folder() / f"{request.launch}.pid", str(agent.pid))
        agent.returncode = 0  # nobody waits for it here
        return Launched(instance, "zone-a")

    def describe(self, launches: Sequence[str]) -> Mapping[str, InstanceView]:
        return {launch: self._one(launch) for launch in launches}

    def _one(self, launch: str) -> InstanceView:
        file = folder() / f"{launch}.pid"
        if not file.exists():
            return InstanceView("unknown")
        return InstanceView(
            "running" if _alive(int(file.read_text())) else "ended", outcome="gone", detail="the double ended"
        )

    def terminate(self, launch: str) -> None:
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):
            os.kill(int((folder() / f"{launch}.pid").read_text()), signal.SIGKILL)

    def preempt(self, launch: str, notice: float | None) -> None:
        if self._one(launch).state != "running":
            raise Refused(f"launch {launch} has no instance")
        if notice is None:
            self.terminate(launch)
        else:
            _replace(folder() / f"{launch}.notice", str(notice))


class FakeLocalFleet(FakeFleet):
    """The same, as a fleet whose instances are on this machine."""

    name = "fake-local"
    embedded = True


def _replace(file: Path, text: str) -> None:
    new = file.with_name(f".{file.name}-{os.getpid()}")
    new.write_text(text)
    new.rename(file)


def _alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in ("Z", "X")
    except (FileNotFoundError, ProcessLookupError):
        return False


class FakeAgent:
    """One incarnation."""

    def __init__(self, store: str, worker: str, launch: str, instance: str) -> None:
        self.documents = WorkerStore(open_store(store), worker)
        self.spec = self.documents.load_spec()
        self.launch, self.instance = launch, instance
        self.task = folder() / f"task-{worker}"
        self.incarnation, self.holder = 0, uuid.uuid4().hex
        self.checkpoints = 0
        self.pause = float(self.spec.engine.get("pause", "0"))
        """How long starts, restores and checkpoints take, so that people can see them."""

    def tell(self, kind: type, **fields: object):
        event = kind(at=datetime.now(UTC), incarnation=self.incarnation, holder=self.holder, **fields)
        return self.documents.record_event(event).record

    def run(self) -> None:
        seen, since = None, time.monotonic()
        while True:
            record = self.documents.load_record().record
            if record.lease != seen:
                seen, since = record.lease, time.monotonic()
            answer = may_take(record, self.spec, self.launch, time.monotonic() - since)
            if isinstance(answer, Leave):
                return
            if isinstance(answer, Take):
                break
            time.sleep(0.1)
        self.incarnation = len(record.incarnations) + 1
        number = answer.checkpoint.number if answer.checkpoint else None
        taken = self.tell(
            ev.LeaseTaken,
            launch=self.launch,
            instance=self.instance,
            zone="zone-a",
            restore_from=number,
        )
        assert taken.lease is not None
        assert taken.lease.holder == self.holder
        self._take_time()
        position = {"stdout": 0, "stderr": 0}
        if number:
            position = json.loads(self.task.with_suffix(".position").read_text())
            os.killpg(self._pid(), signal.SIGCONT)
            self.tell(ev.Restored, number=number, seconds=self.pause)
        else:
            self._start()
            self.tell(
                ev.Started, why="no usable checkpoint" if self.incarnation > 1 else "", seconds=self.pause
            )
        self.writers = {s: LogWriter(self.documents, s, self.incarnation, position[s]) for s in position}
        for writer in self.writers.values():
            writer.begin()
        self.tell(
            ev.ProtectionChanged,
            unprotected_reasons=tuple(filter(None, [self.spec.engine.get("unprotected")])),
        )
        self._live()

    def _take_time(self) -> None:
        until = time.monotonic() + self.pause
        while (left := until - time.monotonic()) > 0:
            self.tell(ev.LeaseRenewed)
            time.sleep(min(left, 0.4))

    def _pid(self) -> int:
        return int(self.task.with_suffix(".pid").read_text())

    def _start(self) -> None:
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):
            os.killpg(self._pid(), signal.SIGKILL)
        self.task.with_suffix(".status").unlink(missing_ok=True)
        runner = (
            "import json, os, subprocess, sys\n"
            "file, command, env = sys.argv[1], json.loads(sys.argv[2]), json.loads(sys.argv[3])\n"
            "try:\n code = subprocess.run(command, env=env).returncode\n"
            "except OSError as error:\n print(error, file=sys.stderr); code = 127\n"
            "open(file + '.new', 'w').write(str(code)); os.rename(file + '.new', file)\n"
        )
        env = {"PATH": os.environ["PATH"], **self.spec.env}
        status = str(self.task.with_suffix(".status"))
        with (
            open(self.task.with_suffix(".stdout"), "wb") as out,
            open(self.task.with_suffix(".stderr"), "wb") as err,
        ):
            process = subprocess.Popen(
                [sys.executable, "-c", runner, status, json.dumps(self.spec.command), json.dumps(env)],
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=err,
                start_new_session=True,
            )
        _replace(self.task.with_suffix(".pid"), str(process.pid))

    def _ship(self) -> None:
        for stream, writer in self.writers.items():
            with open(self.task.with_suffix(f".{stream}"), "rb") as file:
                file.seek(writer.position)
                if data := file.read():
                    writer.append(data)

    def _live(self) -> None:
        renewed = time.monotonic()
        while True:
            ended = self.task.with_suffix(".status").exists()
            self._ship()
            record = self.documents.load_record().record
            if record.cancel:
                os.killpg(self._pid(), signal.SIGKILL)
                self._ship()
                self.tell(ev.LeaseReleased, end_reason="cancelled")
                return
            if ended:
                self._finish(int(self.task.with_suffix(".status").read_text()))
                return
            if record.checkpoint_requests > record.checkpoint_answered:
                if self.spec.engine.get("checkpoint") == "fails":
                    number = self._number("requested")
                    self.tell(
                        ev.CheckpointFailed,
                        number=number,
                        detail="pid 7 holds /dev/fuse",
                        answered=record.checkpoint_requests,
                    )
                else:
                    self._checkpoint("requested", record.checkpoint_requests)
            notice = folder() / f"{self.launch}.notice"
            if notice.exists():
                self.tell(
                    ev.NoticeReceived,
                    id=self.launch,
                    source=self.spec.fleet,
                    seconds_left=float(notice.read_text()),
                )
                os.killpg(self._pid(), signal.SIGSTOP)
                self._ship()
                number = self._checkpoint("notice", record.checkpoint_requests)
                self.tell(ev.HandedOver, number=number)
                return
            if time.monotonic() - renewed > 0.4:
                renewed = time.monotonic()
                self.tell(ev.LeaseRenewed)
            time.sleep(0.05)

    def _number(self, cause: str) -> str:
        self.checkpoints += 1
        number = f"{self.incarnation}-{self.checkpoints}"
        self.tell(ev.CheckpointStarted, number=number, cause=cause)
        self._take_time()
        return number

    def _checkpoint(self, cause: str, answered: int) -> str:
        frozen_at = datetime.now(UTC)
        number = self._number(cause)
        position = {stream: writer.position for stream, writer in self.writers.items()}
        _replace(self.task.with_suffix(".position"), json.dumps(position))
        self.tell(
            ev.CheckpointCommitted,
            number=number,
            cause=cause,
            frozen_at=frozen_at,
            bytes_image=200 << 20,
            bytes_uploaded=3 << 20,
            seconds=self.pause,
            frozen_seconds=0.2,
            answered=answered,
        )
        return number

    def _finish(self, code: int) -> None:
        if "reason" in self.spec.engine:
            reason = Reason(self.spec.engine["reason"])
            self.tell(
                ev.Finished,
                exit_code=None,
                signal=9 if reason is Reason.OOM else None,
                reason=reason,
                detail="played",
            )
        else:
            self.tell(ev.Finished, exit_code=None if code < 0 else code, signal=-code if code < 0 else None)
        self.tell(ev.LeaseReleased, end_reason="finished")


if __name__ == "__main__":
    FakeAgent(*sys.argv[1:]).run()
