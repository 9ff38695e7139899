"""A store, the double fleet as an installed entry point, and ways to run the command."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from savedworker.cli.application import cli
from savedworker.cli.options import open_client
from savedworker.controller.client import Client
from savedworker.model.record import WorkerRecord
from savedworker.model.spec import WorkerSpec
from savedworker.store.worker import WorkerStore
from tests.cli.fake_fleet import ROOT, FakeFleet, FakeLocalFleet


@dataclass
class Shell:
    """Runs ``savedworker``: in this process, or as one of its own."""

    store: Path
    env: dict[str, str]
    started: list[subprocess.Popen[bytes]] = field(default_factory=list)

    def __call__(self, *words: str, **more: str) -> Result:
        """In this process."""
        return CliRunner(env={**self.env, **more}).invoke(cli, list(words))

    def json(self, *words: str):
        """The JSON document that a command prints."""
        result = self(*words, "--json")
        assert result.exit_code == 0, result.output
        return json.loads(result.stdout)

    def command(self, *words: str) -> list[str]:
        return [sys.executable, "-m", "savedworker.cli", *words]

    def run(self, *words: str, timeout: float = 120, **more: str) -> subprocess.CompletedProcess[bytes]:
        """As a process, to its end."""
        env = {**os.environ, **self.env, **more}
        return subprocess.run(
            self.command(*words), env=env, capture_output=True, timeout=timeout, stdin=subprocess.DEVNULL
        )

    def start(self, *words: str, **options) -> subprocess.Popen[bytes]:
        """As a process that goes on."""
        options = {
            "stdout": subprocess.PIPE,
            "stderr": subprocess.PIPE,
            "stdin": subprocess.DEVNULL,
            **options,
        }
        before = signal.signal(signal.SIGHUP, signal.SIG_DFL)  # also where the tests run under nohup
        try:
            process = subprocess.Popen(self.command(*words), env={**os.environ, **self.env}, **options)
        finally:
            signal.signal(signal.SIGHUP, before)
        self.started.append(process)
        return process

    @property
    def client(self) -> Client:
        return open_client(str(self.store))

    def record(self, worker: str) -> WorkerRecord:
        return self.client.record(worker)

    def until(self, worker: str, true: Callable[[WorkerRecord], bool], timeout: float = 90) -> WorkerRecord:
        """Wait for the record to say so."""
        end = time.monotonic() + timeout
        while time.monotonic() < end:
            with contextlib.suppress(Exception):
                record = self.record(worker)
                if true(record):
                    return record
            time.sleep(0.05)
        raise AssertionError(f"{worker} never got there: {self.record(worker)!r}")

    def put(self, record: WorkerRecord) -> None:
        """A worker with this record, made by hand."""
        self.client.store.ensure()
        documents = WorkerStore(self.client.store, record.id)
        documents.create_spec(WorkerSpec(id=record.id, command=("true",), fleet=record.fleet))
        documents.create_record(record)

    def nothing_created(self) -> bool:
        return not self.store.exists() or not [
            p for p in self.store.rglob("*") if p.is_file() and ".savedworker" not in str(p)
        ]


@pytest.fixture
def shell(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Shell]:
    """The command with the double fleets ``fake`` and ``fake-local`` installed, ``fake`` as the default."""
    installed = tmp_path / "installed"
    info = installed / "fake_fleet-1.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: fake-fleet\nVersion: 1\n")
    (info / "entry_points.txt").write_text(
        "[savedworker.fleets]\nfake = tests.cli.fake_fleet:FakeFleet\nfake-local = tests.cli.fake_fleet:FakeLocalFleet\n"
    )
    fleet = tmp_path / "fleet"
    fleet.mkdir()
    env = {
        "SAVEDWORKER_STORE": str(tmp_path / "store"),
        "SAVEDWORKER_FLEET": "fake",
        "XDG_STATE_HOME": str(tmp_path / "state"),
        "XDG_DATA_HOME": str(tmp_path / "data"),
        "FAKE_FLEET_DIR": str(fleet),
        "PYTHONPATH": os.pathsep.join(
            filter(None, [str(installed), str(ROOT), os.environ.get("PYTHONPATH")])
        ),
    }
    for name, value in env.items():
        monkeypatch.setenv(name, value)
    monkeypatch.syspath_prepend(str(installed))
    made = Shell(tmp_path / "store", env)
    assert (FakeFleet.name, FakeLocalFleet.name) == ("fake", "fake-local")
    yield made
    for process in made.started:
        if process.poll() is None:
            process.kill()
        process.communicate()
    for file in fleet.glob("*.pid"):
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(int(file.read_text()), signal.SIGKILL)
