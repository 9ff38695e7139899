"""Finished parts of task logs in the store, kept for as long as the store keeps them: workers are deleted after their retention.

``airflow/logs/<try>/<part>``: ``try`` is a digest of the path that Airflow gives the log of one try. A part is the log of one worker, or
a file that another executor or the triggerer wrote. Where a key is configured, each is sealed by itself.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterator
from datetime import datetime

from savedworker.model.errors import AlreadyExists, NotFound
from savedworker.model.record import WorkerRecord
from savedworker.store.backend import Store
from savedworker.store.sealing import PLAIN

_TRIGGER = re.compile(r"\.trigger\.(\d+)\.log$")


def _folder(relative_path: str) -> str:
    base = _TRIGGER.sub("", relative_path)
    return f"airflow/logs/{hashlib.sha256(base.encode()).hexdigest()[:40]}"


def worker_part(record: WorkerRecord) -> str:
    """The name of a worker's part: they sort in the order in which the task instance was queued."""
    return _part(record.created_at, record.id)


def refusal_part(at: datetime) -> str:
    """The name of the part that stands for a worker which could not be made at ``at``."""
    return _part(at, "refused")


def _part(at: datetime, name: str) -> str:
    return f"{int(at.timestamp() * 1000):015d}~{name}"


def file_part(relative_path: str) -> str:
    """The name of the part that is a whole file."""
    match = _TRIGGER.search(relative_path)
    return f"file~trigger-{match[1]}" if match else "file~task"


def keep(store: Store, relative_path: str, part: str, text: str) -> None:
    """Store a part, in place of an earlier version of it."""
    key = f"{_folder(relative_path)}/{part}"
    store.put(key, _sealed(store, key, part, text))


def keep_first(store: Store, relative_path: str, part: str, text: str) -> bool:
    """Store a part that is not there yet. False when somebody has done so before."""
    key = f"{_folder(relative_path)}/{part}"
    try:
        store.create(key, _sealed(store, key, part, text))
    except AlreadyExists:
        return False
    return True


def kept_at(store: Store, relative_path: str, part: str) -> datetime | None:
    """When the part was stored, by the store's clock; None if it is not there."""
    info = store.head(f"{_folder(relative_path)}/{part}")
    return None if info is None else info.modified


def _sealed(store: Store, key: str, part: str, text: str) -> bytes:
    sealer = store.sealing.begin(_owner(part))
    return sealer.seal("spec", key, text.encode("utf-8", "replace"))


def parts(store: Store, relative_path: str) -> Iterator[tuple[str, str]]:
    """Names and texts of the parts of one try, in order."""
    folder = _folder(relative_path)
    for info in sorted(store.list(folder), key=lambda x: x.key):
        part = info.key.removeprefix(f"{folder}/")
        try:
            data = store.get(info.key).data
        except NotFound:
            continue
        sealer = store.sealing.find(_owner(part), info.key, data) if data[:4] == b"SWSE" else PLAIN
        yield part, sealer.open("spec", info.key, data).decode("utf-8", "replace")


def _owner(part: str) -> str:
    """By which name a part is sealed."""
    return "log-" + hashlib.sha256(part.encode()).hexdigest()[:16]
