"""Puts a finished worker's log where Airflow looks for it: the store, the user's own remote logging, or this machine's folder."""

from __future__ import annotations

import os
import secrets
from datetime import datetime
from pathlib import Path

from airflow_provider_savedworker.log import archive
from airflow_provider_savedworker.log.saved_worker_task_handler import SavedWorkerRemoteLogIO
from airflow_provider_savedworker.log.text import refusal_log, worker_log
from savedworker.controller.client import Client
from savedworker.model.record import WorkerRecord
from savedworker.store.backend import Store


def keep(client: Client, record: WorkerRecord, log_path: str, base: Path) -> None:
    """Once for each worker; again does no harm, except that the user's own remote logging may append a second time.

    Raises what the store and the user's remote logging raise.
    """
    _keep(client.store, log_path, archive.worker_part(record), worker_log(client, record), base)


def keep_refusal(client: Client, at: datetime, why: str, log_path: str, base: Path) -> None:
    """The same for a task for which no worker could be made: its log says why."""
    _keep(client.store, log_path, archive.refusal_part(at), refusal_log(at, why), base)


def _keep(store: Store, log_path: str, part: str, text: str, base: Path) -> None:
    archive.keep(store, log_path, part, text)
    from airflow.logging_config import get_remote_task_log

    remote = get_remote_task_log()
    if isinstance(remote, SavedWorkerRemoteLogIO):
        return
    file = base / log_path
    if remote is not None:
        _write(file, text)
        remote.upload(log_path, None)
        return
    found = archive.parts(store, log_path)
    _write(file, "".join(text for part, text in found if not part.startswith("file~")))


def _write(file: Path, text: str) -> None:
    """All or nothing."""
    file.parent.mkdir(parents=True, exist_ok=True)
    scratch = file.with_name(f".{file.name}.{secrets.token_hex(4)}")
    try:
        scratch.write_text(text, "utf-8")
        os.replace(scratch, file)
    finally:
        scratch.unlink(missing_ok=True)
