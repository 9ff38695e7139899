"""What an agent may use of its instance's memory, and what that allows."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from savedworker.model import defaults
from savedworker.model.budget import _AGENT, _THREAD, MOST_THREADS, choose_budget, shares
from savedworker.model.errors import BadSpec, Refused
from savedworker.model.spec import parse_spec

MIB, GIB = 1 << 20, 1 << 30


def test_the_default_is_a_gib_and_less_on_a_small_instance() -> None:
    assert choose_budget(None, None, 64 * GIB) == GIB
    assert choose_budget(None, None, 2 * GIB) == 512 * MIB
    assert choose_budget(None, None, 512 * MIB) == 256 * MIB


def test_the_specification_goes_before_the_instance() -> None:
    assert choose_budget(300 * MIB, 2 * GIB, 8 * GIB) == 300 * MIB
    assert choose_budget(None, 2 * GIB, 8 * GIB) == 2 * GIB


@pytest.mark.parametrize(
    ("size", "words"),
    [(0, "too small"), (1, "too small"), (255 * MIB, "too small"), (9 * GIB, "more than this instance has")],
)
def test_a_budget_that_cannot_be_is_refused(size: int, words: str) -> None:
    for wanted, here in ((size, None), (None, size)):
        with pytest.raises(Refused, match=words) as refused:
            choose_budget(wanted, here, 8 * GIB)
        assert refused.value.fix
    with pytest.raises(BadSpec, match=r"checkpoint\.memory_budget"):
        parse_spec({"id": "w", "command": ["x"], "checkpoint": {"memory_budget": -size}})


@given(st.integers(defaults.MEMORY_BUDGET_LEAST, 1 << 40))
def test_what_a_budget_allows_fits_into_it(budget: int) -> None:
    share = shares(budget)
    assert 1 <= share.threads <= MOST_THREADS
    assert _AGENT + share.threads * _THREAD <= budget
    assert _AGENT + share.waiting + share.threads * 3 * 4 * MIB <= budget
    assert shares(budget * 2).threads >= share.threads


def test_the_default_budget_is_for_all_threads_and_the_least_for_one() -> None:
    assert shares(defaults.MEMORY_BUDGET).threads == MOST_THREADS
    assert shares(defaults.MEMORY_BUDGET_LEAST).threads == 1
