"""What an error means for a worker: one that could not be started is released with the reason, one that runs is never killed for it."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from savedworker.agent.incarnation import Incarnation
from savedworker.model.errors import Fatal


class Story:
    """An incarnation of which only ``begin`` is real."""

    def __init__(self, bring_up: Any, keep: Any) -> None:
        self.released: list[tuple[str, ...]] = []
        self.incarnation = object.__new__(Incarnation)
        vars(self.incarnation).update(
            _saw=lambda record: None,
            _keeper=SimpleNamespace(start=lambda: None),
            _open_relay=lambda: None,
            _bring_up=bring_up,
            _keep=keep,
            _release=self._release,
        )

    def _release(self, *words: str) -> int:
        self.released.append(words)
        return 0

    def begin(self) -> int:
        return self.incarnation.begin(None, None)  # type: ignore[arg-type]


def fails(error: Exception) -> Any:
    def call(*_: object) -> None:
        raise error

    return call


@pytest.mark.parametrize("error", [Fatal("the disk is full"), OSError(28, "No space left on device")])
def test_an_error_after_the_start_does_not_end_the_worker(error: Exception) -> None:
    for story in (Story(lambda *_: lambda: None, fails(error)), Story(lambda *_: fails(error), lambda: 0)):
        with pytest.raises(type(error)):
            story.begin()  # the agent dies of it and is started again
        assert story.released == []


@pytest.mark.parametrize("error", [Fatal("the disk is full"), OSError(28, "No space left on device")])
def test_an_error_before_the_start_says_why(error: Exception) -> None:
    story = Story(fails(error), fails(AssertionError()))
    assert story.begin() == 0
    assert story.released == [("failed", f"the worker could not be started here: {error}")]
