"""Whether a checkpoint would fit a notice is a matter of sizes and measured rates."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from savedworker.checkpoint.pace import Pace
from savedworker.model.rates import Rates

GIB = 1 << 30
RATES = Rates(dump=2 * GIB, new=GIB / 8, known=GIB, rest=0.5, base=4 * GIB, measured=3)


def test_what_the_base_has_costs_little_and_what_is_new_the_most() -> None:
    assert RATES.seconds(4 * GIB) == pytest.approx(0.5 + 2 + 4)
    assert RATES.seconds(5 * GIB) == pytest.approx(0.5 + 2.5 + 4 + 8)
    assert RATES.model_copy(update={"base": 0}).seconds(4 * GIB) == pytest.approx(0.5 + 2 + 32)


def test_the_largest_worker_that_fits_fits_exactly() -> None:
    nothing_known = RATES.model_copy(update={"base": 0})
    assert nothing_known.seconds(RATES.largest(30.0)) == pytest.approx(30.0, rel=1e-6)
    assert RATES.largest(0.1) == 0


@given(st.integers(0, 64 * GIB), st.integers(0, 64 * GIB))
def test_it_is_what_the_agent_itself_goes_by(image: int, base: int) -> None:
    pace = Pace()
    rates = Rates(
        dump=pace.dump, new=pace.new, known=pace.known, rest=pace.rest, base=base, measured=pace.measured
    )
    known = min(base, image)
    assert rates.seconds(image) == pytest.approx(pace.seconds(image - known, known))
