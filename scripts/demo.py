"""The demo: Airflow trains a model in one task while its instance is reclaimed twice, and nobody can tell afterwards.

    scripts/demo [--json FILE] [--keep]

Starts an Airflow of its own on loopback, runs example_dags/digits.py as a saved worker on the local fleet, reclaims its
instance with notice and then without, trains the same model once more undisturbed, and compares. Exit status 0 only if
both models are the same to the last bit and the task was one try. Removes everything that it made; --keep leaves the
directory.
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from types import FrameType
from typing import Any

from local_airflow import AirflowTrouble, LocalAirflow

from savedworker.controller.client import Client
from savedworker.fleet.local import LocalFleet
from savedworker.model.decisions import settled
from savedworker.model.errors import NotFound, SavedWorkerError
from savedworker.model.record import State, WorkerRecord
from savedworker.store import logs
from savedworker.store.backend import open_store

ROOT = Path(__file__).resolve().parent.parent
DAG = "digits"
TASK = "train"
SHOWN = frozenset(
    {
        "started",
        "restored",
        "restore_failed",
        "notice_received",
        "checkpoint_committed",
        "checkpoint_failed",
        "handed_over",
        "yielded",
        "instance_lost",
        "protection_changed",
        "gave_up",
        "finished",
    }
)
NOTICE = 20.0
LIMIT = 420.0
"""Seconds for all of it; on two idle cores it needs about 100."""


class DemoFailed(Exception):
    """Something was not as promised."""


class Demo:
    """One demonstration in its own directory ``home``."""

    def __init__(self, home: Path) -> None:
        self.home = home
        self.began = time.monotonic()
        self.output = home / "output"
        self.output.mkdir()
        store = f"file://{home}/store"
        environment = {"SAVEDWORKER_STORE": store, "SAVEDWORKER_LOCAL_DIR": str(home / "hosts")}
        self.fleet = LocalFleet(home / "hosts")
        self.client = Client(open_store(store), fleets=lambda _: self.fleet)
        self.airflow = LocalAirflow(home / "airflow", ROOT / "example_dags", environment)
        self.worker = ""
        self._shown = 0

    def say(self, text: str) -> None:
        """One line for people, with the seconds since the beginning."""
        print(f"{time.monotonic() - self.began:6.1f}s  {text}", flush=True)

    # -- the story --

    def tell(self) -> dict[str, Any]:
        """The whole demonstration; returns the document that --json writes."""
        self.say(f"starting Airflow on {self.airflow.url}")
        self.airflow.start()
        run = self.airflow.trigger(DAG, {"output": str(self.output)})
        self.say(f"Airflow runs; DAG {DAG} is triggered")
        self.worker = self._wait_for_worker(run)
        self.say(f"its task is worker {self.worker}")
        self._follow(run, lambda r: bool(r.checkpoints) and r.state is State.RUNNING, "a first checkpoint")
        self._preempt(NOTICE)
        self._follow(run, lambda r: r.migrations == 1 and r.state is State.RUNNING, "the first move")
        self._follow(
            run,
            lambda r: r.checkpoints[-1].number.startswith("2-") and r.state is State.RUNNING,
            "a checkpoint there",
        )
        self._pause(3.0)
        self._preempt(None)
        self._follow(run, lambda r: r.migrations == 2 and r.state is State.RUNNING, "the second move")
        self._follow(run, lambda r: r.state.terminal, "the end of the training")
        state = self._wait_for_run(run)
        self.say(f"Airflow says: DAG run {state}")
        return self._compare(run, state)

    def _wait_for_worker(self, run: str) -> str:
        def found() -> str | None:
            if self.airflow.run_state(DAG, run) == "failed":
                raise DemoFailed("the DAG run failed before its worker was there")
            with contextlib.suppress(NotFound):
                return next((x.id for x in self.client.list()), None)
            return None

        return str(self.airflow.wait(found, 90, "the task to submit its worker"))

    def _follow(self, run: str, condition: Any, what: str) -> WorkerRecord:
        """Print what happens until ``condition`` holds of the record. Airflow does the rest; this only looks."""
        while True:
            record = self.client.record(self.worker)
            self._show(record)
            if condition(record):
                return record
            if record.state in (State.FAILED, State.CANCELLED) or (
                record.state.terminal and "end" not in what
            ):
                raise DemoFailed(
                    f"waited for {what}, but the worker is {record.state}: {record.reason} {record.detail}"
                )
            if time.monotonic() - self.began > LIMIT:
                raise DemoFailed(
                    f"waited in vain for {what}, {LIMIT:.0f} s in all; the worker is {record.state}"
                )
            self._pause(0.2)

    def _show(self, record: WorkerRecord) -> None:
        for event in record.recent:
            if event.number > self._shown and event.event in SHOWN:
                where = record.incarnations[event.incarnation - 1].instance if event.incarnation else ""
                self.say(f"{where:<12} {event.detail or event.event}")
        self._shown = max(self._shown, record.events)

    def _preempt(self, notice: float | None) -> None:
        instance = self.client.preempt(self.worker, notice)
        how = f"with {notice:.0f} s of notice" if notice is not None else "without notice"
        self.say(f"{'':<12} --- {instance} is reclaimed {how} ---")

    def _pause(self, seconds: float) -> None:
        threading.Event().wait(seconds)

    def _wait_for_run(self, run: str) -> str:
        def ended() -> str | None:
            state = self.airflow.run_state(DAG, run)
            return state if state in ("success", "failed") else None

        return str(self.airflow.wait(ended, 60, "the DAG run to end"))

    def _compare(self, run: str, state: str) -> dict[str, Any]:
        task = self.airflow.task(DAG, run, TASK)
        report = self.client.report(self.worker)
        lines = self._stdout()
        nonces = [found[1] for line in lines if (found := re.match(r"nonce (\w+)", line))]
        seed = next((found[1] for line in lines if (found := re.search(r"seed (\d+)", line))), "")
        if not nonces or not seed:
            raise DemoFailed("the training's output is not in the store")
        self.say(f"training once more, undisturbed, in plain Python with seed {seed}")
        return {
            "dag_state": state,
            "try_number": task["try_number"],
            "migrations": report.migrations,
            "cold_starts": report.cold_starts,
            "lost_seconds": round(report.lost_seconds, 3),
            "away_seconds": round(report.away_seconds, 3),
            "nonce_start": nonces[0],
            "nonce_end": nonces[-1],
            "sha256_moved": _sha256(self.output / "digits-model.bin"),
            "sha256_undisturbed": self._undisturbed(seed),
        }

    def _stdout(self) -> list[str]:
        pieces = self.client.logs(self.worker, "stdout")
        data = b"".join(piece.data for piece in pieces if isinstance(piece, logs.Text))
        return data.decode("utf-8", "replace").splitlines()

    def _undisturbed(self, seed: str) -> str:
        model = self.home / "undisturbed.bin"
        # What the worker had, and nothing of this shell's: a variable for the numerical libraries gives another model.
        given = {"PATH": os.environ["PATH"], "LANG": "C.UTF-8", **self.client.spec(self.worker).env}
        environment = {**given, "SEED": seed, "OUTPUT": str(model), "PAUSE": "0"}
        program = ROOT / "example_dags" / "train_digits.py"
        done = subprocess.run(
            [sys.executable, str(program)],
            env=environment,
            capture_output=True,
            text=True,
            timeout=120,
            check=False,
        )
        if done.returncode:
            raise DemoFailed(f"the undisturbed training failed: {done.stderr[-500:]}")
        return _sha256(model)

    # -- the end --

    def clean(self) -> None:
        """End every process and instance that was started here."""
        self.airflow.stop(grace=5.0)
        if not (self.home / "store").exists():
            return
        until = time.monotonic() + 45
        for worker in [x.id for x in self.client.list()]:
            while time.monotonic() < until:
                with contextlib.suppress(SavedWorkerError):
                    self.client.cancel(worker, "the end of the demo")
                    if settled(self.client.reconcile(worker)):
                        break
                self._pause(0.5)
            else:
                self.say(
                    f"worker {worker} is not gone: see `savedworker --store file://{self.home}/store list`"
                )

    def print_logs(self, lines: int = 15) -> None:
        """The ends of the logs that may tell why."""
        found = [self.home / "airflow" / name for name in ("scheduler.out", "triggerer.out")]
        found += sorted((self.home / "airflow" / "logs").glob("dag_id=*/**/attempt=*.log*"))[-2:]
        found += sorted((self.home / "hosts").glob("hosts/*/*.log"), key=lambda x: x.stat().st_mtime)[-2:]
        for path in found:
            if path.exists():
                print(f"--- the end of {path.relative_to(self.home)} ---", file=sys.stderr)
                for line in path.read_text("utf-8", "replace").splitlines()[-lines:]:
                    print(_readable(line)[:200], file=sys.stderr)


def _readable(line: str) -> str:
    """A line of a task's log, which is JSON, as time and text; any other line as it is."""
    with contextlib.suppress(ValueError, KeyError, TypeError):
        entry = json.loads(line)
        return (
            f"{entry['timestamp'][11:23]} {entry['level']:<8}{entry['event']} {entry.get('error_detail', '')}"
        )
    return line


def _sha256(path: Path) -> str:
    if not path.exists():
        raise DemoFailed(f"there is no {path.name}")
    return hashlib.sha256(path.read_bytes()).hexdigest()


def differences(found: dict[str, Any]) -> list[str]:
    """What is not as promised; empty if all is."""
    wrong = []
    if found["dag_state"] != "success":
        wrong.append(f"the DAG run is {found['dag_state']}")
    if found["try_number"] != 1:
        wrong.append(f"Airflow counts {found['try_number']} tries")
    if found["migrations"] != 2:
        wrong.append(f"there were {found['migrations']} migrations, not 2")
    if found["cold_starts"] != 0:
        wrong.append(f"the worker began from nothing {found['cold_starts']} times")
    if found["nonce_start"] != found["nonce_end"]:
        wrong.append("it was not the same process at the end")
    if found["sha256_moved"] != found["sha256_undisturbed"]:
        wrong.append("the models differ")
    return wrong


def table(found: dict[str, Any]) -> str:
    """The document as people read it."""
    rows = [
        ("DAG run", found["dag_state"]),
        ("tries", found["try_number"]),
        ("migrations", found["migrations"]),
        ("cold starts", found["cold_starts"]),
        ("work done again", f"{found['lost_seconds']:.1f} s"),
        ("away in all", f"{found['away_seconds']:.1f} s"),
        ("nonce at the start", found["nonce_start"]),
        ("nonce at the end", found["nonce_end"]),
        ("sha256, moved twice", found["sha256_moved"]),
        ("sha256, undisturbed", found["sha256_undisturbed"]),
    ]
    return "\n".join(f"  {name:<21}{value}" for name, value in rows)


@contextlib.contextmanager
def ending_on_signals() -> Iterator[None]:
    """SIGINT, SIGTERM and SIGHUP end the demo, also when it was started with some of them ignored (by a shell, with &)."""

    def end(signum: int, frame: FrameType | None) -> None:
        raise KeyboardInterrupt

    for signum in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(signum, end)
    yield


def remove(home: Path) -> bool:
    """Remove ``home``, unless something is still mounted in it: what is mounted there is not ours to delete."""
    mounts = [line.split()[4] for line in Path("/proc/self/mountinfo").read_text().splitlines()]
    if any(x == str(home) or x.startswith(f"{home}/") for x in mounts):
        return False
    shutil.rmtree(home, ignore_errors=True)
    return not home.exists()


def main() -> int:
    """Run the demo; the exit status is 0 if everything was as promised, 130 when it was interrupted."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the numbers to FILE")
    parser.add_argument(
        "--keep", action="store_true", help="keep the directory with the store and Airflow's home"
    )
    options = parser.parse_args()
    home = Path(tempfile.mkdtemp(prefix="savedworker-demo-"))
    found: dict[str, Any] | None = None
    status = 1
    demo = Demo(home)
    try:
        with ending_on_signals():
            found = demo.tell()
        wrong = differences(found)
        status = 1 if wrong else 0
        print(f"\n{table(found)}\n")
        for text in wrong:
            print(f"demo: {text}", file=sys.stderr)
    except KeyboardInterrupt:
        status = 130
        demo.say("interrupted")
    except (DemoFailed, AirflowTrouble, SavedWorkerError, OSError) as error:
        print(f"demo: {error}", file=sys.stderr)
        demo.print_logs()
    finally:
        for signum in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            signal.signal(signum, signal.SIG_IGN)
        demo.say("cleaning up")
        demo.clean()
    if found is not None and options.json:
        options.json.write_text(json.dumps(found, indent=2) + "\n")
    if options.keep or status not in (0, 130):
        print(f"demo: everything is in {home}", file=sys.stderr)
    elif not remove(home):
        print(f"demo: {home} could not be removed: something is mounted there", file=sys.stderr)
    if status == 0:
        demo.say("the same process, the same model to the last bit, one try")
    return status


if __name__ == "__main__":
    sys.exit(main())
