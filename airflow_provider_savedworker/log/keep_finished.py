"""Puts a finished worker's log where Airflow looks for it: the store, the user's own remote logging, or this machine's folder."""

from __future__ import annotations

import logging
import os
import secrets
from collections.abc import Callable
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

from airflow_provider_savedworker.log import archive
from airflow_provider_savedworker.log.saved_worker_task_handler import SavedWorkerRemoteLogIO
from airflow_provider_savedworker.log.text import refusal_log, worker_log
from savedworker.controller.client import Client
from savedworker.model.errors import Temporary
from savedworker.model.record import WorkerRecord
from savedworker.store.backend import Store

log = logging.getLogger(__name__)


PATIENCE = timedelta(seconds=60)
"""For how long another scheduler that looks after the same worker may be about to hand its log on."""


def keep(client: Client, record: WorkerRecord, log_path: str, base: Path) -> None:
    """Once for each worker; again does no harm.

    Raises what the store and the user's remote logging raise, and Temporary while another scheduler may be doing it.
    """
    part = archive.worker_part(record)
    _keep(client.store, log_path, part, lambda: worker_log(client, record), base)


def keep_refusal(client: Client, at: datetime, why: str, log_path: str, base: Path) -> None:
    """The same for a task for which no worker could be made: its log says why."""
    _keep(client.store, log_path, archive.refusal_part(at), lambda: refusal_log(at, why), base)


def _keep(store: Store, log_path: str, part: str, read: Callable[[], str], base: Path) -> None:
    """``read`` gives the text, which may be long."""
    from airflow.logging_config import get_remote_task_log

    remote = get_remote_task_log()
    if remote is not None and not isinstance(remote, SavedWorkerRemoteLogIO):
        _hand_on(store, log_path, part, read, remote, base)
        return
    archive.keep(store, log_path, part, read())
    if remote is None:
        found = archive.parts(store, log_path)
        _write(base / log_path, "".join(text for part, text in found if not part.startswith("file~")))


def _hand_on(
    store: Store, log_path: str, part: str, read: Callable[[], str], remote: Any, base: Path
) -> None:
    """To the user's own remote logging, which appends. Whoever stores the part first does it; if he has ended before he did, another one."""
    kept = archive.kept_at(store, log_path, part)
    if kept is not None and datetime.now(UTC) - kept < PATIENCE:
        raise Temporary("another scheduler may be about to hand its log on")
    text = read()
    if kept is None and not archive.keep_first(store, log_path, part, text):
        raise Temporary("another scheduler is about to hand its log on")
    if kept is not None and _holds(remote, log_path, text):
        return
    _write(base / log_path, text)
    remote.upload(log_path, None)


def _holds(remote: Any, log_path: str, text: str) -> bool:
    """Whether the remote log has ``text`` already; False where that cannot be told."""
    try:
        _, found = remote.read(log_path, None)
        return text.strip() in "".join(x for x in found or () if isinstance(x, str))
    except Exception as error:  # whatever a provider's client raises
        log.warning("%s in the remote log cannot be read: %s", log_path, error, exc_info=True)
        return False


def _write(file: Path, text: str) -> None:
    """All or nothing."""
    file.parent.mkdir(parents=True, exist_ok=True)
    scratch = file.with_name(f".{file.name}.{secrets.token_hex(4)}")
    try:
        scratch.write_text(text, "utf-8")
        os.replace(scratch, file)
    finally:
        scratch.unlink(missing_ok=True)
