"""SavedWorkerExecutor: every Airflow task as a saved worker, with no change to its DAG.

Imported in the scheduler, in the API server (for logs), and, as ``entry``, in the worker itself: nothing heavy is imported here.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from airflow_provider_savedworker.executors.saved_worker_executor import SavedWorkerExecutor

__all__ = ["SavedWorkerExecutor"]


def __getattr__(name: str) -> Any:
    if name == "SavedWorkerExecutor":
        from airflow_provider_savedworker.executors.saved_worker_executor import SavedWorkerExecutor

        return SavedWorkerExecutor
    raise AttributeError(name)
