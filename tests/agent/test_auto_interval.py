"""``--checkpoint-interval auto``: the agent says in the history which interval it chose, and why."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from savedworker.agent.incarnation import Incarnation


@pytest.fixture
def agent(monkeypatch: pytest.MonkeyPatch) -> Any:
    """One whose checkpoints take 20 of the 30 s of a notice; ``noted`` is its history."""
    made: Any = Incarnation.__new__(Incarnation)
    made._config = SimpleNamespace(notice=30.0)
    made._saver = SimpleNamespace(seconds_to_safe=lambda: 20.0)
    made.noted = []
    monkeypatch.setattr(made, "_report_noted", lambda *values: made.noted.append(values))
    return made


def with_interval(agent: Any, wanted: str | float) -> Any:
    agent._spec = SimpleNamespace(checkpoint=SimpleNamespace(interval=wanted))
    return agent


def test_the_choice_of_auto_is_in_the_history_with_its_reason(agent: Any) -> None:
    with_interval(agent, "auto")
    saved = SimpleNamespace(frozen_seconds=0.5)
    assert agent._adapt(300.0, saved) == 150.0
    assert agent.noted == [
        (
            "checkpoint_interval",
            "2m30s from now on: a checkpoint now would take 20 s of the 30 s of a notice",
        )
    ]


def test_an_interval_that_stays_is_not_said_again(agent: Any) -> None:
    with_interval(agent, "auto")
    agent._saver.seconds_to_safe = lambda: 10.0
    assert agent._adapt(300.0, SimpleNamespace(frozen_seconds=0.5)) == 300.0
    assert agent.noted == []


@pytest.mark.parametrize(("wanted", "saved"), [("auto", None), (60.0, SimpleNamespace(frozen_seconds=0.5))])
def test_what_a_user_gave_and_what_failed_change_nothing(agent: Any, wanted: str | float, saved: Any) -> None:
    with_interval(agent, wanted)
    assert agent._adapt(60.0, saved) == 60.0
    assert agent.noted == []
