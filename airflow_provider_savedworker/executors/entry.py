"""What a task's worker runs: Airflow's own supervisor for one workload, its task log copied to stdout as it is written.

The log file lies in the worker's writable layer and stdout is the worker's own log in the store: both are of the same moment in
every checkpoint, so that each line of the file comes exactly once on stdout. What the supervisor itself says goes to stderr.

    python -m airflow_provider_savedworker.executors.entry WORKLOAD

WORKLOAD is JSON, with no token that anybody would accept: the relay of the worker's agent has one.
"""

from __future__ import annotations

import logging
import os
import sys
import threading
from pathlib import Path

POLL = 0.2
"""Seconds between two looks for new lines."""
_PIECE = 1 << 20


class Copier:
    """Copies what is appended to ``file`` to the descriptor ``out``, from where the file ends now."""

    def __init__(self, file: Path, out: int) -> None:
        self._file = file
        self._out = out
        self._at = file.stat().st_size if file.exists() else 0
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name="log-copier", daemon=True)

    def start(self) -> None:
        """Copy in the background."""
        self._thread.start()

    def finish(self) -> None:
        """Copy the rest, and end."""
        self._stop.set()
        self._thread.join()

    def _run(self) -> None:
        while not self._stop.wait(POLL):
            self._copy()
        self._copy()

    def _copy(self) -> None:
        try:
            source = os.open(self._file, os.O_RDONLY)
        except FileNotFoundError:
            return
        try:
            while data := os.pread(source, _PIECE, self._at):
                view = memoryview(data)
                while view:
                    view = view[os.write(self._out, view) :]
                self._at += len(data)
        finally:
            os.close(source)


def run(workload_json: str) -> int:
    """Run the workload to its end; the exit status of the task's process, -n for signal n."""
    out = os.dup(1)
    os.set_inheritable(out, False)
    os.dup2(2, 1)  # the supervisor's own lines, and what libraries print

    from airflow.executors import workloads
    from airflow.executors.base_executor import BaseExecutor
    from airflow.sdk.configuration import conf
    from airflow.sdk.log import configure_logging
    from pydantic import TypeAdapter

    workload = TypeAdapter[workloads.All](workloads.All).validate_json(workload_json)
    configure_logging(output=sys.stderr.buffer, json_output=True)
    log_path = getattr(workload, "log_path", None)
    copier = None
    if log_path:
        copier = Copier(Path(conf.get("logging", "base_log_folder"), log_path), out)
        copier.start()
    try:
        return BaseExecutor.run_workload(workload)  # type: ignore[arg-type]
    finally:
        if copier is not None:
            copier.finish()


def exit_status(status: int) -> int:
    """The worker's own, for the status of the task's process: a signal, which is negative there, as shells say it."""
    return status if status >= 0 else 128 - status


if __name__ == "__main__":
    status = run(sys.argv[1])
    logging.shutdown()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(exit_status(status))  # taking down two seconds' worth of imported modules does nobody any good
