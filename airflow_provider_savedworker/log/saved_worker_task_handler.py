"""Remote logging on the store: ``[logging] remote_logging = True``, ``remote_base_log_folder = savedworker://``.

Everything that Airflow logs for a task goes there: what workers say, without any upload of theirs, and the files of other executors
and of the triggerer.
"""

from __future__ import annotations

import logging
import os
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import structlog

    from savedworker.controller.client import Client

log = logging.getLogger(__name__)
SCHEME = "savedworker"


class SavedWorkerRemoteLogIO:
    """Airflow's interface for remote logs. ``delete_local`` takes a file away once it is stored."""

    def __init__(self, base_log_folder: Path, delete_local: bool = False) -> None:
        self.base_log_folder = base_log_folder
        self.delete_local = delete_local

    @classmethod
    def from_config(cls) -> SavedWorkerRemoteLogIO:
        """As Airflow's configuration says."""
        from airflow.configuration import conf

        return cls(
            Path(conf.get("logging", "base_log_folder")),
            conf.getboolean("logging", "delete_local_logs", fallback=False),
        )

    @property
    def processors(self) -> tuple[structlog.typing.Processor, ...]:
        """None: lines are not changed on their way."""
        return ()

    @cached_property
    def client(self) -> Client:
        """On the store of ``[savedworker]``."""
        from airflow.configuration import conf

        from airflow_provider_savedworker.executors.settings import read_settings
        from savedworker.controller.client import Client
        from savedworker.store.apart import open_store_apart

        return Client(open_store_apart(read_settings(conf, "").store))  # LocalExecutor's processes fork

    def upload(self, path: os.PathLike[str] | str, ti: Any = None) -> None:
        """Store a log file of this machine; ``path`` is relative to the folder of logs, or below it."""
        from airflow_provider_savedworker.log import archive

        file = self.base_log_folder / path
        relative = file.relative_to(self.base_log_folder).as_posix()
        try:
            text = file.read_text("utf-8", "replace")
        except FileNotFoundError:
            return
        archive.keep(self.client.store, relative, archive.file_part(relative), text)
        if self.delete_local:
            file.unlink(missing_ok=True)

    def read(self, relative_path: str, ti: Any) -> tuple[list[str], list[str] | None]:
        """The sources and texts of one try: the finished parts, and the worker that has ended a moment ago."""
        from airflow_provider_savedworker.executors.workload import worker_id
        from airflow_provider_savedworker.log import archive
        from airflow_provider_savedworker.log.text import worker_log
        from savedworker.model.errors import NotFound, SavedWorkerError

        sources: list[str] = []
        texts: list[str] = []
        try:
            found = dict(archive.parts(self.client.store, relative_path))
            for part, text in found.items():
                sources.append(f"{self.client.store.url}: {part}")
                texts.append(text)
            external = getattr(ti, "external_executor_id", None)
            if external and str(getattr(ti.state, "value", ti.state)) != "running":
                ti_id = str(getattr(ti, "id", None) or getattr(ti, "task_instance_id", ""))
                worker = worker_id(ti.dag_id, ti.task_id, ti.map_index, ti_id, external)
                record = self.client.record(worker)
                if archive.worker_part(record) not in found:
                    sources.append(f"worker {worker}")
                    texts.append(worker_log(self.client, record))
        except NotFound:
            pass
        except SavedWorkerError as error:
            sources.append(f"the store of saved workers cannot be read: {error}")
        return sources, texts or None
