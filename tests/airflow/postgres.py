"""A PostgreSQL of Debian's for one test run: on loopback, in a directory of its own, as an ordinary user, gone afterwards."""

from __future__ import annotations

import contextlib
import os
import pwd
import shutil
import signal
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path

from scripts.local_airflow import free_port
from tests.airflow.engine import eventually

USER = "postgres"
"""Made by Debian's package; the server refuses to run as root."""


def _programs() -> Path:
    found = sorted(Path("/usr/lib/postgresql").glob("*/bin/initdb"), key=lambda x: int(x.parts[4]))
    assert found, "PostgreSQL is missing: apt-get install postgresql"
    return found[-1].parent


@contextlib.contextmanager
def postgres() -> Iterator[dict[str, str]]:
    """Settings for Airflow to use a fresh database."""
    programs, account = _programs(), pwd.getpwnam(USER)
    home = Path(tempfile.mkdtemp(prefix="savedworker-postgres-"))
    os.chown(home, account.pw_uid, account.pw_gid)
    port = free_port()
    as_user = {"user": account.pw_uid, "group": account.pw_gid, "extra_groups": [], "cwd": home}
    server = None
    try:
        made = [programs / "initdb", "-D", home / "data", "-U", "airflow", "-A", "trust", "--no-sync"]
        subprocess.run(made, check=True, capture_output=True, **as_user)  # type: ignore[call-overload]
        options = [
            "-c",
            "listen_addresses=127.0.0.1",
            "-c",
            f"unix_socket_directories={home}",
            "-c",
            "fsync=off",
        ]
        with (home / "log").open("wb") as log:
            server = subprocess.Popen(
                [
                    programs / "postgres",
                    "-D",
                    home / "data",
                    "-p",
                    str(port),
                    "-c",
                    "max_connections=200",
                    *options,
                ],
                stdout=log,
                stderr=log,
                **as_user,  # type: ignore[call-overload]
            )
        ready: list[str | Path] = [programs / "pg_isready", "-q", "-h", "127.0.0.1", "-p", str(port)]
        eventually(lambda: subprocess.run(ready).returncode == 0, 60, f"PostgreSQL is up: {home}/log")
        create: list[str | Path] = [
            programs / "createdb",
            "-h",
            "127.0.0.1",
            "-p",
            str(port),
            "-U",
            "airflow",
            "airflow",
        ]
        subprocess.run(create, check=True, capture_output=True)
        url = f"postgresql+psycopg://airflow@127.0.0.1:{port}/airflow"
        yield {"AIRFLOW__DATABASE__SQL_ALCHEMY_CONN": url, "AIRFLOW__DATABASE__SQL_ALCHEMY_CONN_ASYNC": url}
    finally:
        if server is not None:
            server.send_signal(signal.SIGINT)  # a fast end: connections are broken off
            try:
                server.wait(30)
            except subprocess.TimeoutExpired:
                server.kill()
                server.wait()
        shutil.rmtree(home, ignore_errors=True)
