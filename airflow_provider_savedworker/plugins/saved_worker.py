"""A listener in Airflow's API server: a user who marks a task ends its worker, whoever else is there to do it.

Usually the task's trigger does. But when its triggerer has just died, any other triggerer deletes a trigger whose task was
marked without running it, and then nobody is left to tell.
"""

from __future__ import annotations

import logging
import threading
from typing import Any

from airflow.listeners import hookimpl
from airflow.plugins_manager import AirflowPlugin

log = logging.getLogger(__name__)

COMMITTED_WITHIN = 3.0
"""Seconds after which the transaction that marked the task has taken place, or never will."""
MARKED = frozenset({"success", "failed", "skipped"})


class MarkedByUser:
    """Hears of every task instance; only a user's act in the API has no ``previous_state``."""

    @hookimpl
    def on_task_instance_success(self, previous_state: Any, task_instance: Any) -> None:
        """Marked success."""
        self._heard(previous_state, task_instance)

    @hookimpl
    def on_task_instance_failed(self, previous_state: Any, task_instance: Any, error: Any) -> None:
        """Marked failed."""
        self._heard(previous_state, task_instance)

    @hookimpl
    def on_task_instance_skipped(self, previous_state: Any, task_instance: Any) -> None:
        """Marked skipped."""
        self._heard(previous_state, task_instance)

    def _heard(self, previous_state: Any, ti: Any) -> None:
        if previous_state is None:
            key = (str(ti.dag_id), str(ti.run_id), str(ti.task_id), int(ti.map_index))
            threading.Thread(target=_end_worker, args=key, daemon=True, name=f"marked {ti.task_id}").start()


class SavedWorkerPlugin(AirflowPlugin):
    """Registers the listener."""

    name = "savedworker"
    listeners = [MarkedByUser()]  # noqa: RUF012


def _end_worker(dag_id: str, run_id: str, task_id: str, map_index: int) -> None:
    """Cancel the task instance's worker, if it has one and if the task instance really is marked."""
    threading.Event().wait(COMMITTED_WITHIN)
    try:
        note = _note(dag_id, run_id, task_id, map_index)
        if note is None:
            return
        from airflow_provider_savedworker.follow import cancel
        from savedworker.controller.client import Client

        client = Client(note["store"])
        if not client.record(note["worker"]).state.terminal:
            log.info(
                "%s.%s of %s was marked: worker %s is cancelled", dag_id, task_id, run_id, note["worker"]
            )
            cancel(client, note["worker"], f"Airflow: {dag_id}.{task_id} of {run_id} was marked").join()
    except Exception:
        log.exception("the worker of %s.%s of %s was not looked for", dag_id, task_id, run_id)


def _note(dag_id: str, run_id: str, task_id: str, map_index: int) -> dict[str, str] | None:
    """What the operator pushed as XCom, if the task instance is in a state that a user gave it.

    Not from the task state store: marking success may empty that (``[state_store] clear_on_success``).
    """
    from airflow.models.taskinstance import TaskInstance
    from airflow.models.xcom import XComModel
    from airflow.utils.session import create_session
    from sqlalchemy import select

    from airflow_provider_savedworker.operators.saved_worker import STATE_KEY

    def of(model: Any) -> Any:
        wanted = {"dag_id": dag_id, "run_id": run_id, "task_id": task_id, "map_index": map_index}
        return [getattr(model, name) == value for name, value in wanted.items()]

    with create_session() as session:
        state = session.scalar(select(TaskInstance.state).where(*of(TaskInstance)))
        if str(getattr(state, "value", state)) not in MARKED:
            return None
        row = session.scalar(select(XComModel).where(*of(XComModel), XComModel.key == STATE_KEY))
        found = XComModel.deserialize_value(row) if row is not None else None
    return found if isinstance(found, dict) and {"worker", "store"} <= set(found) else None
