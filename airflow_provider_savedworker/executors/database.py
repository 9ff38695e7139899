"""What the executor asks of, and tells, Airflow's database: who still waits for a worker, and that its task lives."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from datetime import UTC, datetime
from uuid import UUID

from airflow.models.taskinstance import TaskInstance as TI
from airflow.utils.session import create_session
from airflow.utils.state import TaskInstanceState
from sqlalchemy import select, update

from airflow_provider_savedworker.executors.outcome import Row

_AT_ONCE = 500


def rows(ti_ids: Iterable[str]) -> Mapping[str, Row]:
    """The task instances that are there, by id. Raises what the database raises."""
    wanted = sorted(set(ti_ids))
    found: dict[str, Row] = {}
    now = datetime.now(UTC)
    with create_session() as session:
        for start in range(0, len(wanted), _AT_ONCE):
            ids = [UUID(x) for x in wanted[start : start + _AT_ONCE]]
            query = select(TI.id, TI.state, TI.external_executor_id, TI.last_heartbeat_at).where(
                TI.id.in_(ids)
            )
            for ti_id, state, external_id, heard_at in session.execute(query):
                heard = None if heard_at is None else (now - heard_at).total_seconds()
                text = None if state is None else str(getattr(state, "value", state))
                found[str(ti_id)] = Row(text, external_id, heard)
    return found


def heartbeat(ti_ids: Iterable[str]) -> None:
    """These tasks live, although their supervisors cannot say so. Only a running task instance has a heartbeat."""
    ids = [UUID(x) for x in ti_ids]
    if not ids:
        return
    with create_session() as session:
        session.execute(
            update(TI)
            .where(TI.id.in_(ids), TI.state == TaskInstanceState.RUNNING)
            .values(last_heartbeat_at=datetime.now(UTC))
            .execution_options(synchronize_session=False)
        )
