"""C04: every state has a place in Airflow and in Nextflow; one that nobody knows is running, never failed."""

from __future__ import annotations

import pytest

from savedworker.model.engine import airflow_view, nextflow_view
from savedworker.model.record import State

TABLE = {
    State.PENDING: ("waiting", "SUBMITTED"),
    State.STARTING: ("waiting", "SUBMITTED"),
    State.RUNNING: ("running", "RUNNING"),
    State.CHECKPOINTING: ("running", "RUNNING"),
    State.MIGRATING: ("running", "RUNNING"),
    State.RESTORING: ("running", "RUNNING"),
    State.SUCCEEDED: ("success", "COMPLETED"),
    State.FAILED: ("failed", "COMPLETED"),
    State.CANCELLED: ("cancelled", "CANCELLED"),
}


@pytest.mark.parametrize("state", State)
def test_every_state_is_mapped_for_both_engines(state: State) -> None:
    assert airflow_view(state) == (TABLE[state][0], True)
    assert nextflow_view(state) == (TABLE[state][1], True)


@pytest.mark.parametrize("state", ["uploading", "", "RUNNING", "failed ", "terminated"])
def test_an_unknown_state_is_running_and_said_to_be_unknown(state: str) -> None:
    assert airflow_view(state) == ("running", False)
    assert nextflow_view(state) == ("RUNNING", False)
