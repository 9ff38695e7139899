"""Predicting a checkpoint from those before, and choosing an interval by that: plain numbers."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from savedworker.checkpoint.pace import (
    FREEZE_SHARE,
    Pace,
    Work,
    next_interval,
)
from savedworker.model.defaults import CHECKPOINT_INTERVAL, INTERVAL_MOST

MIB, GIB = 1 << 20, 1 << 30
RATE = st.floats(MIB, 1 << 36)
REAL = st.builds(Pace, RATE, RATE, RATE, st.floats(0.01, 20))
SIZE = st.integers(64 * MIB, 64 * GIB)


def work(real: Pace, new: int, known: int) -> Work:
    """What an instance of that pace measures."""
    return Work(new, known, (new + known) / real.dump, new / real.new + known / real.known, real.rest)


@given(REAL, SIZE, SIZE)
def test_the_same_checkpoint_again_is_predicted(real: Pace, first: int, again: int) -> None:
    """A young worker stores everything; later ones compare."""
    pace = Pace().learnt(work(real, first, 0))
    assert pace.seconds(first, 0) == pytest.approx(real.seconds(first, 0), rel=1e-6)
    for _ in range(12):
        pace = pace.learnt(work(real, 0, again))
    assert pace.seconds(0, again) == pytest.approx(real.seconds(0, again), rel=0.02)


@given(REAL, SIZE, SIZE)
def test_a_mixed_one_is_predicted_when_it_comes_again(real: Pace, new: int, known: int) -> None:
    pace = Pace()
    for _ in range(20):
        pace = pace.learnt(work(real, new, known))
    assert pace.seconds(new, known) == pytest.approx(real.seconds(new, known), rel=0.05)


def test_what_was_never_measured_is_no_reason_to_give_up() -> None:
    """Neither kind is, before one checkpoint had enough of it."""
    pace = Pace().learnt(Work(0, 0, 0.1, 0.1, 0.2))
    assert pace.measured_seconds(GIB, GIB) == pytest.approx(0.2, abs=0.01)
    pace = pace.learnt(Work(GIB, 0, 1.0, 10.0, 0.2))
    assert (pace.stored, pace.compared) == (1, 0)
    assert pace.measured_seconds(GIB, 64 * GIB) == pytest.approx(pace.seconds(GIB, 0))
    pace = pace.learnt(Work(0, GIB, 1.0, None, 0.2))
    assert (pace.stored, pace.compared, pace.measured) == (1, 0, 3), "what was sent was limited"
    pace = pace.learnt(Work(0, GIB, 1.0, 0.5, 0.2))
    assert pace.measured_seconds(GIB, GIB) == pace.seconds(GIB, GIB)


def test_a_tiny_checkpoint_says_nothing_about_gibibytes() -> None:
    pace = Pace().learnt(Work(4096, 0, 0.1, 0.05, 0.2))
    assert pace.seconds(GIB, 0) == pytest.approx(Pace().seconds(GIB, 0), rel=0.1)


@given(st.floats(1, 4000), st.floats(0, 60), st.floats(0, 600), st.sampled_from([30.0, 120.0]))
def test_an_interval_changes_for_a_reason_and_comes_to_rest(
    now: float, frozen: float, to_safe: float, notice: float
) -> None:
    seen = [now]
    for _ in range(40):
        following, why = next_interval(seen[-1], frozen, to_safe, notice)
        assert (following != seen[-1]) == bool(why)
        seen.append(following)
        if not why:
            break
    assert seen[-1] == seen[-2], "it does not come to rest"
    assert frozen / seen[-1] <= FREEZE_SHARE * 1.001
    if to_safe > notice / 2:
        assert seen[-1] <= max(30.0, frozen / FREEZE_SHARE, 1.0) or seen[-1] == now


def test_more_often_when_a_notice_would_be_short_and_less_often_when_it_is_ample() -> None:
    assert next_interval(CHECKPOINT_INTERVAL, 0.5, 20.0, 30.0)[0] == CHECKPOINT_INTERVAL / 2
    assert next_interval(CHECKPOINT_INTERVAL, 0.5, 2.0, 30.0)[0] == CHECKPOINT_INTERVAL * 2
    assert next_interval(INTERVAL_MOST, 0.5, 2.0, 30.0) == (INTERVAL_MOST, "")
    assert next_interval(CHECKPOINT_INTERVAL, 0.5, 10.0, 30.0) == (CHECKPOINT_INTERVAL, "")
    slower, why = next_interval(CHECKPOINT_INTERVAL, 9.0, 20.0, 30.0)
    assert (slower, "freeze" in why) == (900.0, True)
