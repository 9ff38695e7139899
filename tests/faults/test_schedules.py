"""Real workers under schedules of faults: no promise is broken, whatever happens and wherever it happens.

``scripts/savedworker-chaos`` plays any number of other seeds; ``--seed N`` plays one of these with its whole story.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path

import pytest

from savedworker.crashpoints import POINTS
from savedworker.model.record import State
from tests.faults.chaos import Result, one, play
from tests.faults.schedule import Schedule, Step

SEEDS = (1, 2, 5, 9, 10, 12, 105, 2017)
JOBS = 3
pytestmark = pytest.mark.xdist_group("schedules")
"""One process of the test run plays all of them; each further one that took some of these tests would play all of them again."""


def case(*faults: tuple[str, str], expected: State = State.SUCCEEDED, length: int = 110) -> Schedule:
    steps = tuple(Step(20, fault, word) for fault, word in faults)
    return Schedule(sum(len(w) for _, w in faults), "file", steps, expected, length, 1.5)


CASES = {
    "a worker that its last dump killed is handed over by the agent that comes after": case(
        ("crash_in_leaving", "agent.hand_over.before")
    ),
    "a worker that was to be killed and is not, as its agent died, runs on and leaves again": case(
        ("crash_in_leaving", "agent.leaving.noted")
    ),
    "a worker stopped without a new checkpoint is not taken for failed": case(
        ("crash_in_yielding", "agent.yield.killed"), ("crash_in_yielding", "agent.yield.after"), length=500
    ),
    "a restored worker whose agent dies before it says so is kept, and said": case(
        ("crash_in_move", "agent.restored.before"), ("crash_in_move", "agent.runc.after"), length=150
    ),
    "an instance whose agent is stuck after declining is ended all the same": case(
        ("agent_stuck_when_not_wanted", ""), length=200
    ),
    "a lease that is taken by an agent that dies at once costs nothing but time": case(
        ("crash_in_move", "agent.take.after"), ("crash_in_move", "agent.attached"), length=150
    ),
    "a worker frozen at its deadline whose shim dies there is never run twice": case(
        ("agent_stopped", "5"), ("agent_stopped_for_good", ""), length=250
    ),
    "a worker whose shim dies while its agent stands still ends with its shim": case(
        ("shim_killed_beside_a_stopped_agent", ""), length=300
    ),
    "a cancel is carried through by the agent that comes after": case(
        ("crash_in_cancel", "agent.cancel.killed"), expected=State.CANCELLED, length=400
    ),
    "a controller that dies between record and fleet is made up for": case(
        ("controller_killed", "controller.launch.recorded"),
        ("controller_killed", "controller.terminate.after"),
        length=200,
    ),
}


def _play(schedule: Schedule) -> Result:
    with tempfile.TemporaryDirectory(prefix="sw-", dir="/var/tmp", ignore_cleanup_errors=True) as folder:
        return play(schedule, Path(folder))


Played = dict[object, "Future[Result]"]


@pytest.fixture(scope="module")
def played() -> Iterator[Played]:
    """All of them, a few at a time."""
    with ProcessPoolExecutor(JOBS, mp_context=get_context("forkserver")) as pool:
        by_hand: Played = {name: pool.submit(_play, schedule) for name, schedule in CASES.items()}
        drawn: Played = {seed: pool.submit(one, seed, "file", None) for seed in SEEDS}
        yield by_hand | drawn


@pytest.mark.criu
@pytest.mark.timeout(600)
@pytest.mark.parametrize("name", [*CASES, *SEEDS])
def test_no_schedule_breaks_a_promise(played: Played, name: object) -> None:
    result = played[name].result()
    assert not result.complaints, f"{result.line()}\n{result.story}"


@pytest.mark.criu
@pytest.mark.timeout(600)
def test_every_crash_point_is_reached_by_some_schedule(played: Played) -> None:
    reached = {point for future in played.values() for point in future.result().reached}
    # Nothing in a schedule is old enough for a collection, nor has it inputs or outputs: tests/store/test_collect.py and
    # tests/runtime/test_inputs_outputs.py get to each of those points.
    elsewhere = ("collect.", "inputs.", "outputs.")
    assert sorted(point for point in POINTS - reached if not point.startswith(elsewhere)) == []
