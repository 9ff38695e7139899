"""One whole Airflow on this machine, for the demo and for the tests: its own home, database and free loopback ports.

Every component is a process of its own in a session of its own, so that it can be ended (or frozen, or killed) by its
id without touching anything else. The REST API wants a password, also on loopback: DAGs run as this user.
"""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import signal
import socket
import sqlite3
import ssl
import subprocess
import sys
import time
import urllib.error
import urllib.request
from base64 import urlsafe_b64encode
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any
from urllib.parse import quote

COMPONENTS = {
    "api-server": ["api-server", "--workers", "1"],
    "scheduler": ["scheduler", "--skip-serve-logs"],
    "dag-processor": ["dag-processor"],
    "triggerer": ["triggerer", "--skip-serve-logs"],
}
MORE = {"scheduler-2": COMPONENTS["scheduler"]}
"""Started by name only."""


class AirflowTrouble(Exception):
    """A component did not come up, or the API refused a request. Says which, and where its log is."""


def free_port(host: str = "127.0.0.1") -> int:
    """A TCP port on ``host`` that nothing listens on right now."""
    with socket.socket() as listener:
        listener.bind((host, 0))
        return int(listener.getsockname()[1])


class LocalAirflow:
    """``start`` it, use the calls below, and ``stop`` it in the end. ``home`` stays; whoever made it removes it.

    With ``AIRFLOW__API__SSL_CERT``, ``…_KEY`` and ``…_CA_FILE`` in ``environment`` its API is served over TLS.
    """

    def __init__(
        self,
        home: Path,
        dags: Path,
        environment: Mapping[str, str] | None = None,
        host: str = "127.0.0.1",
    ) -> None:
        self.home = home
        self.port = free_port(host)
        authority = (environment or {}).get("AIRFLOW__API__SSL_CA_FILE")
        self._tls = ssl.create_default_context(cafile=authority) if authority else None
        self.url = f"http{'s' if authority else ''}://{host}:{self.port}"
        self._processes: dict[str, subprocess.Popen[bytes]] = {}
        self._token = ""
        self._password = secrets.token_urlsafe(16)
        home.mkdir(parents=True, exist_ok=True)
        (home / "passwords.json").write_text(json.dumps({"admin": self._password}))
        (home / "passwords.json").chmod(0o600)
        settings = {
            "CORE__DAGS_FOLDER": str(dags),
            "CORE__EXECUTOR": "LocalExecutor",
            "CORE__LOAD_EXAMPLES": "False",
            "CORE__PARALLELISM": "4",
            "CORE__FERNET_KEY": urlsafe_b64encode(secrets.token_bytes(32)).decode(),
            "CORE__EXECUTION_API_SERVER_URL": f"{self.url}/execution/",
            "CORE__SIMPLE_AUTH_MANAGER_USERS": "admin:admin",
            "CORE__SIMPLE_AUTH_MANAGER_PASSWORDS_FILE": str(home / "passwords.json"),
            "CORE__TEST_CONNECTION": "Enabled",
            "DATABASE__SQL_ALCHEMY_CONN": f"sqlite:///{home / 'airflow.db'}",
            "LOGGING__BASE_LOG_FOLDER": str(home / "logs"),
            "API__HOST": host,
            "API__PORT": str(self.port),
            "API__BASE_URL": self.url,
            "API__SECRET_KEY": secrets.token_hex(32),
            "API_AUTH__JWT_SECRET": secrets.token_hex(32),
            "DAG_PROCESSOR__REFRESH_INTERVAL": "5",
            "DAG_PROCESSOR__MIN_FILE_PROCESS_INTERVAL": "30",
            "SCHEDULER__SCHEDULER_IDLE_SLEEP_TIME": "0.5",
            "SCHEDULER__ENABLE_HEALTH_CHECK": "False",
        }
        self.environment = {
            **{k: v for k, v in os.environ.items() if not k.startswith("AIRFLOW")},
            "AIRFLOW_HOME": str(home),
            "PATH": f"{Path(sys.executable).parent}:{os.environ.get('PATH', '/usr/bin:/bin')}",
            "PYTHONUNBUFFERED": "1",
            **{f"AIRFLOW__{name}": value for name, value in settings.items()},
            **(environment or {}),
        }

    # -- processes --

    def start(self, timeout: float = 120.0) -> None:
        """Make the database, start all components and wait until the API answers and the scheduler is healthy."""
        with (self.home / "database.out").open("ab") as out:
            made = subprocess.run(
                self._command("db", "migrate"), env=self.environment, stdout=out, stderr=out, check=False
            )
        if made.returncode:
            raise AirflowTrouble(f"airflow db migrate failed: see {self.home / 'database.out'}")
        if self.environment["AIRFLOW__DATABASE__SQL_ALCHEMY_CONN"].startswith("sqlite"):
            # Otherwise readers block writers, for up to five seconds at a time: the scheduler falls behind.
            with contextlib.closing(sqlite3.connect(self.home / "airflow.db")) as database:
                database.execute("PRAGMA journal_mode=WAL")
        for name in COMPONENTS:
            self.start_component(name)
        self.wait(self._ready, timeout, "Airflow to come up")

    def _command(self, *arguments: str) -> list[str]:
        return [sys.executable, "-m", "airflow", *arguments]

    def _ready(self) -> bool:
        for name, process in self._processes.items():
            if process.poll() is not None:
                raise AirflowTrouble(f"the {name} ended with {process.returncode}: see {self.output(name)}")
        with contextlib.suppress(OSError, AirflowTrouble, ValueError):
            health = self.call("GET", "/api/v2/monitor/health")
            return all(health[x]["status"] == "healthy" for x in ("scheduler", "triggerer", "dag_processor"))
        return False

    def start_component(self, name: str) -> subprocess.Popen[bytes]:
        """Start one of COMPONENTS or MORE; its output goes to ``output(name)``."""
        with self.output(name).open("ab") as out:
            self._processes[name] = subprocess.Popen(
                self._command(*(COMPONENTS | MORE)[name]),
                env=self.environment,
                cwd=self.home,
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=out,
                start_new_session=True,
            )
        return self._processes[name]

    def output(self, name: str) -> Path:
        """Where the component's stdout and stderr go."""
        return self.home / f"{name}.out"

    def pids(self, name: str) -> list[int]:
        """The processes of the component's session, the component itself first."""
        leader = self._processes[name].pid
        return sorted(_session(leader), key=lambda pid: (pid != leader, pid))

    def kill_component(self, name: str, signum: int = signal.SIGKILL) -> None:
        """Send ``signum`` to every process of the component at once; after a SIGKILL, wait for it."""
        for pid in self.pids(name):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signum)
        if signum == signal.SIGKILL:
            self._processes.pop(name).wait()

    def stop(self, grace: float = 10.0) -> None:
        """End everything that was started here: SIGTERM, then SIGKILL after ``grace`` seconds for all together."""
        sessions = {process.pid for process in self._processes.values()}
        for process in self._processes.values():
            with contextlib.suppress(ProcessLookupError):
                process.terminate()
        until = time.monotonic() + grace
        for process in self._processes.values():
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(max(0.1, until - time.monotonic()))
        for leader in sessions:
            for pid in _session(leader):
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)
        for process in self._processes.values():
            process.wait()
        self._processes.clear()

    # -- the REST API --

    def call(self, method: str, path: str, body: Any = None, *, timeout: float = 90.0) -> Any:
        """One request to the REST API; returns the decoded answer. Raises AirflowTrouble, OSError."""
        if not self._token:
            answer = self._request(
                "POST", "/auth/token", {"username": "admin", "password": self._password}, timeout
            )
            self._token = answer["access_token"]
        return self._request(method, path, body, timeout)

    def _request(self, method: str, path: str, body: Any, timeout: float) -> Any:
        headers = {"Content-Type": "application/json", "Accept": "application/json"}
        if self._token:
            headers["Authorization"] = f"Bearer {self._token}"
        data = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(self.url + path, data=data, headers=headers, method=method)
        try:
            with urllib.request.urlopen(request, timeout=timeout, context=self._tls) as answer:
                content = answer.read()
        except urllib.error.HTTPError as error:
            text = error.read().decode("utf-8", "replace")[:500]
            raise AirflowTrouble(f"{method} {path}: {error.code} {text}") from error
        return json.loads(content) if content else None

    def wait(self, condition: Callable[[], Any], timeout: float, what: str, every: float = 0.5) -> Any:
        """Call ``condition`` until it returns something true, and return that. Raises AirflowTrouble after ``timeout``."""
        until = time.monotonic() + timeout
        while not (value := condition()):
            if time.monotonic() > until:
                raise AirflowTrouble(f"waited {timeout:.0f} s in vain for {what}; logs are in {self.home}")
            time.sleep(every)
        return value

    def has_dag(self, dag: str) -> bool:
        """Whether the DAG processor has parsed ``dag``. Raises AirflowTrouble for a DAG that cannot be imported."""
        try:
            self.call("GET", f"/api/v2/dags/{dag}")
        except AirflowTrouble:
            errors = self.call("GET", "/api/v2/importErrors")["import_errors"]
            if errors:
                raise AirflowTrouble(f"{errors[0]['filename']}: {errors[0]['stack_trace']}") from None
            return False
        return True

    def trigger(self, dag: str, conf: Mapping[str, Any] | None = None, timeout: float = 60.0) -> str:
        """Unpause and trigger ``dag``; returns the run's id."""
        self.wait(lambda: self.has_dag(dag), timeout, f"the DAG {dag} to be parsed")
        self.call("PATCH", f"/api/v2/dags/{dag}", {"is_paused": False})
        answer = self.call(
            "POST", f"/api/v2/dags/{dag}/dagRuns", {"logical_date": None, "conf": dict(conf or {})}
        )
        return str(answer["dag_run_id"])

    def run_state(self, dag: str, run: str) -> str:
        """The state of the DAG run."""
        return str(self.call("GET", f"/api/v2/dags/{dag}/dagRuns/{quote(run)}")["state"])

    def task(self, dag: str, run: str, task: str, map_index: int | None = None) -> dict[str, Any]:
        """The task instance, as the REST API describes it."""
        suffix = "" if map_index is None else f"/{map_index}"
        answer: dict[str, Any] = self.call(
            "GET", f"/api/v2/dags/{dag}/dagRuns/{quote(run)}/taskInstances/{task}{suffix}"
        )
        return answer

    def tries(self, dag: str, run: str, task: str) -> list[dict[str, Any]]:
        """The task instance's tries, the present one last."""
        answer = self.call("GET", f"/api/v2/dags/{dag}/dagRuns/{quote(run)}/taskInstances/{task}/tries")
        return list(answer["task_instances"])

    def xcom(self, dag: str, run: str, task: str, key: str = "return_value", map_index: int = -1) -> Any:
        """The task's XCom value, decoded; None if there is none."""
        try:
            path = f"/api/v2/dags/{dag}/dagRuns/{quote(run)}/taskInstances/{task}/xcomEntries/{key}"
            return self.call("GET", f"{path}?deserialize=false&map_index={map_index}")["value"]
        except AirflowTrouble:
            return None

    def log(self, dag: str, run: str, task: str, try_number: int = 1, map_index: int = -1) -> list[str]:
        """The lines of the task's log, worker's and triggerer's together."""
        return [line for _, line in self.log_by_logger(dag, run, task, try_number, map_index)]

    def log_by_logger(
        self, dag: str, run: str, task: str, try_number: int = 1, map_index: int = -1
    ) -> list[tuple[str, str]]:
        """The same, each line with the name of its logger: ``task.stdout`` for what the task printed."""
        path = f"/api/v2/dags/{dag}/dagRuns/{quote(run)}/taskInstances/{task}/logs/{try_number}"
        content = self.call("GET", f"{path}?full_content=true&map_index={map_index}")["content"]
        return [
            (str(x.get("logger", "")), str(x["event"])) if isinstance(x, dict) else ("", str(x))
            for x in content
        ]


def _session(leader: int) -> list[int]:
    """Pids whose session is ``leader``: the process, its children, and what they left behind."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            with contextlib.suppress(OSError, IndexError, ValueError):
                fields = (entry / "stat").read_text().rpartition(")")[2].split()
                if int(fields[3]) == leader and fields[0] != "Z":
                    found.append(int(entry.name))
    return found
