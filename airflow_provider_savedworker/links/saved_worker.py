"""The button "Saved Worker" of a task: where its worker's report stands."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any
from urllib.parse import quote

from airflow.sdk import BaseOperatorLink

if TYPE_CHECKING:
    from airflow.sdk import BaseOperator


class SavedWorkerLink(BaseOperatorLink):
    """Opens the task's XCom page: ``saved_worker`` names worker and store, ``return_value`` or ``report`` is the report.

    The report is a document in the store, and a store need not have a page that a browser can open; Airflow has one,
    behind its own login. Airflow computes the link when the task process ends, that is, also when the task defers.
    """

    @property
    def name(self) -> str:
        """The label of the button."""
        return "Saved Worker"

    def get_link(self, operator: BaseOperator, *, ti_key: Any) -> str:
        """The page's address. ``ti_key`` is anything with dag_id, run_id, task_id and map_index."""
        from airflow.sdk.configuration import conf

        base = (conf.get("api", "base_url", fallback="") or "").rstrip("/")
        page = f"{base}/dags/{quote(ti_key.dag_id)}/runs/{quote(ti_key.run_id)}/tasks/{quote(ti_key.task_id)}"
        map_index = getattr(ti_key, "map_index", -1)
        if map_index is not None and map_index >= 0:
            page += f"/mapped/{map_index}"
        return f"{page}/xcom"
