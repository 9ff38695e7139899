"""Where it stopped: after any number of moves it is the same process, and its results are those of an undisturbed run."""

from __future__ import annotations

import random

import pytest

from tests.runtime.counter import Counter
from tests.runtime.stories import Loss, Program, is_the_same_process, lose, steps_are_once
from tests.runtime.world import World

STEPS = 150
ROOM = 36
"""Steps that a program may run on during a move before the counter holds it: usually more than it gets to do."""
NOTICE = 25.0
PROGRAMS = {
    "random walk": Program("random_walk.py", STEPS),
    "digits training": Program("digits.py", STEPS),
    "torch loader": Program("loader.py", STEPS),
    "pipeline": Program("pipeline.sh", STEPS),
    "web server": Program("web.py", STEPS),
}


@pytest.mark.parametrize("name", PROGRAMS)
def test_a_worker_that_is_never_moved_does_what_a_plain_process_does(
    world: World, counter: Counter, name: str
) -> None:
    program = PROGRAMS[name]
    worker = program.submit(world, counter)
    is_the_same_process(world, worker, counter, program, moves=0)
    assert counter.steps == list(range(STEPS))


@pytest.mark.parametrize("name", PROGRAMS)
def test_after_one_move_with_notice_every_step_was_done_once(
    world: World, counter: Counter, name: str
) -> None:
    program = PROGRAMS[name]
    counter.hold_at(30 + ROOM)
    worker = program.submit(world, counter)
    counter.until(30)
    world.preempt(worker, NOTICE)
    counter.hold_at(STEPS)
    is_the_same_process(world, worker, counter, program, moves=1)
    steps_are_once(counter, program, in_flight=1)
    assert world.report(worker).lost_seconds == 0


@pytest.mark.parametrize("name", PROGRAMS)
def test_after_three_moves_only_what_was_lost_without_notice_is_done_again(
    world: World, counter: Counter, name: str
) -> None:
    program = PROGRAMS[name]
    losses: list[Loss] = []
    worker = program.submit(world, counter)
    for at, with_notice in ((20, False), (50, True), (80, False)):
        counter.hold_at(at + ROOM)
        counter.until(at)
        if with_notice:
            world.preempt(worker, NOTICE)
        else:
            losses.append(lose(world, worker, counter))
    counter.hold_at(STEPS)
    is_the_same_process(world, worker, counter, program, moves=3)
    steps_are_once(counter, program, in_flight=3 + len(losses), losses=losses)
    assert [i.end_reason for i in world.report(worker).incarnations] == [
        "no_notice",
        "notice",
        "no_notice",
        "finished",
    ]


@pytest.mark.sweep
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("seed", range(8))
@pytest.mark.parametrize("name", PROGRAMS)
def test_moved_at_random_moments_it_is_still_the_same_process(
    world: World, counter: Counter, name: str, seed: int
) -> None:
    chance = random.Random(f"{name} {seed}")
    moves = chance.randint(3, 8)
    steps = 60 * moves
    program = Program(PROGRAMS[name].file, steps, seed)
    moments = sorted(chance.sample(range(5, steps - 45), moves))
    losses: list[Loss] = []
    worker = program.submit(world, counter)
    for at in moments:
        counter.hold_at(at + ROOM)
        counter.until(at)
        if chance.random() < 0.5:
            world.preempt(worker, NOTICE)
        else:
            losses.append(lose(world, worker, counter, ahead=chance.randint(1, 15)))
    counter.hold_at(steps)
    is_the_same_process(world, worker, counter, program, moves=moves)
    steps_are_once(counter, program, in_flight=moves + len(losses), losses=losses)
