"""Where a restore's images go: in memory where all of it has room, on disk otherwise, and why is said."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from savedworker.model.room import MARGIN, READ_AHEAD, Room, choose_place, memory_need

GIB = 1 << 30
SIZES = st.integers(0, 1 << 45)


def test_images_are_there_beside_the_worker_only_as_far_as_criu_reads_ahead() -> None:
    assert memory_need(4 * GIB, 2, 0, GIB) == 4 * GIB + 2 * READ_AHEAD + GIB + MARGIN
    assert memory_need(4 * GIB, 500, 0, 0) == 8 * GIB + MARGIN


@pytest.mark.parametrize(
    ("rooms", "in_memory", "why"),
    [
        ([], False, "it is not known how much memory is free"),
        ([Room(6 * GIB, "are available")], True, "5.0 GiB are needed, 6.0 GiB are available"),
        ([Room(5 * GIB, "are available")], True, "5.0 GiB are needed, 5.0 GiB are available"),
        (
            [Room(5 * GIB - 1, "are available")],
            False,
            "in memory 5.0 GiB would be needed, 5.0 GiB are available",
        ),
        (
            [Room(60 * GIB, "are available"), Room(GIB, "are left of the limit of cgroup /job")],
            False,
            "in memory 5.0 GiB would be needed, 1.0 GiB are left of the limit of cgroup /job",
        ),
        (
            [Room(-5, "are left of the limit of cgroup /job")],
            False,
            "in memory 5.0 GiB would be needed, 0 B are left of the limit of cgroup /job",
        ),
    ],
)
def test_the_least_room_decides_and_is_named(rooms: list[Room], in_memory: bool, why: str) -> None:
    place = choose_place(5 * GIB, rooms)
    assert (place.in_memory, place.why) == (in_memory, why)


@given(SIZES, st.integers(0, 10_000), SIZES, SIZES, st.lists(SIZES, min_size=1, max_size=4))
def test_nothing_is_put_in_memory_that_does_not_fit_beside_the_worker(
    images: int, spaces: int, beside: int, budget: int, free: list[int]
) -> None:
    need = memory_need(images, spaces, beside, budget)
    assert need >= images + beside + budget + MARGIN
    assert need <= 2 * images + beside + budget + MARGIN
    place = choose_place(need, [Room(x, "are available") for x in free])
    assert place.in_memory == all(x >= need for x in free)
    assert place.why
