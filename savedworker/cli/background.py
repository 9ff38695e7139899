"""A controller of its own for one worker, in the background: it goes on when the command that began it has ended."""

from __future__ import annotations

import os
import sys
from pathlib import Path

from savedworker.model.errors import Fatal


def log_file(worker: str) -> Path:
    """Where the background controller of ``worker`` writes what it has to say."""
    state = os.environ.get("XDG_STATE_HOME", "")
    home = Path(state) if Path(state).is_absolute() else Path.home() / ".local/state"
    return home / "savedworker" / "controllers" / f"{worker}.log"


def start_controller(store_url: str, worker: str) -> int:
    """Start ``savedworker controller --until-idle --worker ID`` in a session of its own. Returns its pid. Raises Fatal."""
    log = log_file(worker)
    command = [
        sys.executable,
        "-m",
        "savedworker.cli",
        "controller",
        "--until-idle",
        "--store",
        store_url,
        "--worker",
        worker,
    ]
    try:
        log.parent.mkdir(parents=True, exist_ok=True)
        # Every descriptor is replaced: `id=$(savedworker submit …)` must not wait for the controller to end.
        return os.posix_spawn(
            sys.executable,
            command,
            dict(os.environ),
            setsid=True,
            file_actions=[
                (os.POSIX_SPAWN_OPEN, 0, os.devnull, os.O_RDONLY, 0),
                (os.POSIX_SPAWN_OPEN, 1, str(log), os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600),
                (os.POSIX_SPAWN_DUP2, 1, 2),
            ],
        )
    except OSError as error:
        raise Fatal(
            f"the controller of {worker} could not be started: {error}",
            f"run: savedworker controller --until-idle --worker {worker} --store {store_url}",
        ) from error
