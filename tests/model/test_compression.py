"""How hard data is compressed follows from what is slower: the CPU or the way to the store."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from savedworker.model.compression import _COST, _SIZE, FIRST_LEVEL, LEVELS, Effect, Measured, choose_level

MIB = 1 << 20


def seen(
    link: float, cpu: float = 700.0, share: float = 0.16, as_is: float = 0.0, senders: int = 8
) -> Measured:
    """``link`` MiB/s of all senders together; ``cpu`` MiB/s of one core at level 1, which leaves ``share`` of the data."""
    plain = 1000 * MIB
    packed = int(plain * share)
    sent = packed + int(as_is * MIB)
    return (
        Measured()
        .compressed(1, plain, packed, 1000 / cpu)
        .stored(int(as_is * MIB), sent, sent / MIB / link * senders)
    )


@pytest.mark.parametrize(
    ("what", "level"),
    [
        (seen(link=5000), -3),  # a local disk: every CPU-second is felt
        (seen(link=250), -1),
        (seen(link=190), 1),
        (seen(link=110), 2),
        (seen(link=20), 5),  # bytes are felt
        (seen(link=1), 5),
        (seen(link=20, cpu=50), -1),  # ... unless the CPU is as slow
        (seen(link=200, as_is=5000), -3),  # most of it does not shrink anyway: the CPU is not worth it
    ],
)
def test_the_level_follows_the_ratio_of_cpu_to_network(what: Measured, level: int) -> None:
    assert choose_level(what, cores=2, senders=8) == level


def test_a_limit_on_what_may_be_sent_is_a_slow_network() -> None:
    fast = seen(link=5000)
    assert choose_level(fast, 2, 8, limit=None) == -3
    assert choose_level(fast, 2, 8, limit=5.0 * MIB) == 5
    assert choose_level(fast, 2, 8, limit=1e15) == -3


def test_a_level_that_does_nothing_for_this_data_is_not_used_however_slow_the_store_is() -> None:
    slow = seen(link=1)
    assert choose_level(slow, 2, 8) == 5
    tried = slow.tried(5, Effect(4.8, 1.01)).tried(2, Effect(1.3, 1.0))
    assert choose_level(tried, 2, 8) == 1
    assert choose_level(tried.faded(), 2, 8) == 1, "trials are not forgotten"
    assert choose_level(tried.tried(-3, Effect(0.5, 1.02)), 2, 8) == -3, "as small, and cheaper"
    assert slow.tried(5, Effect(4, 0.5)).tried(5, Effect(2, 0.7)).effect(5) == Effect(3, 0.6)


def test_where_nothing_was_measured_it_is_the_first_level() -> None:
    nothing = Measured()
    assert choose_level(nothing, 2, 8) == FIRST_LEVEL
    assert choose_level(nothing.stored(10, 10, 1.0), 2, 8) == FIRST_LEVEL
    assert choose_level(nothing.compressed(1, 10, 5, 0.1), 2, 8) == FIRST_LEVEL
    assert choose_level(seen(link=100), 2, 8, limit=0.0) == FIRST_LEVEL


@given(
    st.floats(0.1, 1e4), st.floats(1.0, 100.0), st.floats(10, 5000), st.floats(0.001, 1.0), st.integers(1, 64)
)
def test_a_slower_network_never_means_less_compression_and_a_slower_cpu_never_more(
    link: float, slower: float, cpu: float, share: float, cores: int
) -> None:
    level = choose_level(seen(link, cpu, share), cores, 8)
    assert level in LEVELS
    assert choose_level(seen(link / slower, cpu, share), cores, 8) >= level
    assert choose_level(seen(link, cpu / slower, share), cores, 8) <= level


@given(st.sampled_from(LEVELS), st.floats(0.5, 5000))
def test_what_was_measured_at_another_level_leads_to_the_same(level: int, link: float) -> None:
    plain, packed, cpu = 1000 * MIB, 160 * MIB, 1.4
    sent = int(packed * _SIZE[level])
    other = (
        Measured().compressed(level, plain, sent, cpu * _COST[level]).stored(0, sent, sent / MIB / link * 8)
    )
    same = Measured().compressed(1, plain, packed, cpu).stored(0, packed, packed / MIB / link * 8)
    assert other.packed == pytest.approx(same.packed, rel=1e-6)
    assert choose_level(other.faded(), 2, 8) == choose_level(other, 2, 8)
    assert abs(LEVELS.index(choose_level(other, 2, 8)) - LEVELS.index(choose_level(same, 2, 8))) <= 1
