"""Logging with task logs in the store: ``[logging] logging_config_class = airflow_provider_savedworker.log.config.LOGGING_CONFIG``.

Airflow 3.3.2 asks providers for a handler by the scheme of ``remote_base_log_folder``, but its default logging configuration raises for
every scheme that it does not know itself. Hence this way; ``remote_logging`` stays off, since that is what raises.
"""

from __future__ import annotations

from typing import Any

from airflow.config_templates.airflow_local_settings import DEFAULT_LOGGING_CONFIG

from airflow_provider_savedworker.log.saved_worker_task_handler import SavedWorkerRemoteLogIO

LOGGING_CONFIG: dict[str, Any] = DEFAULT_LOGGING_CONFIG
REMOTE_TASK_LOG = SavedWorkerRemoteLogIO.from_config()
DEFAULT_REMOTE_CONN_ID = None
