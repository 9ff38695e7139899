"""What the engines above are shown for each state: a worker that moves is a task that runs."""

from __future__ import annotations

from typing import Literal

from savedworker.model.record import State

AirflowView = Literal["waiting", "running", "success", "failed", "cancelled"]
NextflowView = Literal["SUBMITTED", "RUNNING", "COMPLETED", "CANCELLED"]

_AIRFLOW: dict[State, AirflowView] = {
    State.PENDING: "waiting",
    State.STARTING: "waiting",
    State.RUNNING: "running",
    State.CHECKPOINTING: "running",
    State.MIGRATING: "running",
    State.RESTORING: "running",
    State.SUCCEEDED: "success",
    State.FAILED: "failed",
    State.CANCELLED: "cancelled",
}

_NEXTFLOW: dict[State, NextflowView] = {
    State.PENDING: "SUBMITTED",
    State.STARTING: "SUBMITTED",
    State.RUNNING: "RUNNING",
    State.CHECKPOINTING: "RUNNING",
    State.MIGRATING: "RUNNING",
    State.RESTORING: "RUNNING",
    State.SUCCEEDED: "COMPLETED",
    State.FAILED: "COMPLETED",
    State.CANCELLED: "CANCELLED",
}


def airflow_view(state: str) -> tuple[AirflowView, bool]:
    """What Airflow shows for ``state``, and whether the state is known. An unknown one is running, never failed."""
    try:
        return _AIRFLOW[State(state)], True
    except ValueError:
        return "running", False


def nextflow_view(state: str) -> tuple[NextflowView, bool]:
    """What Nextflow shows for ``state``, and whether the state is known. An unknown one is running, never failed."""
    try:
        return _NEXTFLOW[State(state)], True
    except ValueError:
        return "RUNNING", False
