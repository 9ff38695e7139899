"""Damage that one instance alone sees: another one reads the same before it is given up, and a damaged store comes to an end quickly.

Here a few instances, each of which reads well or badly, execute what the decisions say, as an agent does.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from savedworker.model import events as ev
from savedworker.model.decisions import Elsewhere, InstanceView, Nothing, StartOver, Take, may_take, next_try
from savedworker.model.placement import reclaimed_places
from savedworker.model.record import CheckpointEntry, Reason, State
from tests.model.life import Life

NUMBERS = ("1-1", "1-2", "1-3")


class Reading:
    """A worker that was lost after ``checkpoints``; those in ``damaged`` nobody can read, and bad instances can read none."""

    def __init__(
        self,
        checkpoints: Collection[str],
        damaged: Collection[str] = (),
        *,
        refused: Collection[str] = (),
        policy: str = "cold_start",
        tries: int = 3,
    ) -> None:
        self.life = Life(checkpoint={"when_unrestorable": policy, "restores_without_progress": tries})
        self.damaged, self.refused = damaged, refused
        self.said: dict[str, list[str]] = {}
        """Which instances found a checkpoint damaged."""
        self.life.settle()
        self.life.run("l1")
        for number in checkpoints:
            self.life.checkpoint(number)
        self.life.fleet["l1"] = InstanceView("ended")
        self.life.settle()

    def instance(self, bad: bool) -> None:
        """The next instance boots, and does what it is told until the worker runs or it has to leave."""
        life = self.life
        life.settle()
        life.pass_time(200)
        life.settle()
        if life.record.state.terminal:
            return
        (launch,) = life.spares()
        answer = may_take(life.record, life.spec, launch, 0.0)
        assert isinstance(answer, Take)
        number = life.take(launch, answer.checkpoint.number if answer.checkpoint else None)
        life.fleet[launch] = InstanceView("running")
        tried: list[str] = []
        while isinstance(entry := next_try(life.record, life.spec, number, tried), CheckpointEntry):
            tried.append(entry.number)
            if bad or entry.number in self.damaged:
                self.said.setdefault(entry.number, []).append(f"i-{launch}")
                life.fenced(ev.RestoreFailed, number=entry.number, detail="altered", unusable=True)
            elif entry.number in self.refused:
                life.fenced(ev.RestoreFailed, number=entry.number, detail="criu failed")
            else:
                life.fenced(ev.Restored, number=entry.number)
                return
        match entry:
            case StartOver():
                life.fenced(ev.Started)
                return
            case Nothing():
                life.fenced(ev.Finished, reason=Reason.CRASH_LOOP)
            case Elsewhere():
                life.fleet[launch] = InstanceView("ended")
        life.fenced(ev.LeaseReleased, end_reason="failed")

    def runs(self) -> bool:
        return self.life.state() is State.RUNNING

    def go_on(self, bad: Sequence[bool]) -> int:
        """Instances, each bad or not, and then good ones, until the worker runs or has ended. Returns how many."""
        for n in range(30):
            if self.runs() or self.life.record.state.terminal:
                return n
            self.instance(bad[n] if n < len(bad) else False)
        raise AssertionError("it does not come to an end")


def test_one_instance_that_reads_badly_costs_no_checkpoint() -> None:
    reading = Reading(NUMBERS)
    assert reading.go_on([True]) == 2
    current = reading.life.record.incarnation
    assert current is not None
    assert (current.number, current.restored_from) == (3, "1-3")
    assert reading.said == {number: ["i-l2"] for number in NUMBERS}
    assert all(x.sound for x in reading.life.record.checkpoints)
    assert reading.life.record.cold_starts == 0


def test_the_next_instance_is_asked_for_elsewhere_and_at_once() -> None:
    reading = Reading(NUMBERS)
    reading.instance(bad=True)
    life = reading.life
    assert not reading.runs()
    assert "z-l2" in reclaimed_places(life.record, life.now, life.spec.placement.avoid_reclaimed)
    life.settle()
    (launch,) = life.spares()
    assert launch == "l3"
    assert "z-l2" in life.record.launches[-1].avoid


def test_what_the_store_has_damaged_costs_one_more_instance_and_no_more() -> None:
    reading = Reading(NUMBERS, damaged=NUMBERS)
    assert reading.go_on([]) == 2
    assert reading.said == {number: ["i-l2", "i-l3"] for number in NUMBERS}
    assert reading.life.record.cold_starts == 1
    assert all(x.unusable == "altered" for x in reading.life.record.checkpoints)


def test_by_policy_it_fails_only_after_the_second_word() -> None:
    reading = Reading(NUMBERS, damaged=NUMBERS, policy="fail")
    reading.instance(bad=False)
    assert reading.life.state() is State.MIGRATING
    reading.instance(bad=False)
    assert (reading.life.state(), reading.life.record.reason) == (State.FAILED, Reason.CRASH_LOOP)


def test_an_older_checkpoint_that_can_be_read_is_used_at_once() -> None:
    reading = Reading(NUMBERS, damaged=["1-3"])
    assert reading.go_on([]) == 1
    current = reading.life.record.incarnation
    assert current is not None
    assert current.restored_from == "1-2"
    assert [x.sound for x in reading.life.record.checkpoints] == [True, True, False]


def test_what_was_not_given_up_is_tried_when_all_else_is_used_up() -> None:
    """One instance found the newest damaged, and CRIU refuses the older one again and again."""
    reading = Reading(("1-1", "1-2"), refused=["1-1"])
    reading.instance(bad=True)
    reading.life.record = reading.life.record.model_copy(
        update={
            "checkpoints": tuple(
                x.model_copy(update={"damage_seen": None}) if x.number == "1-1" else x
                for x in reading.life.record.checkpoints
            )
        }
    )
    reading.go_on([])
    current = reading.life.record.incarnation
    assert current is not None
    assert current.restored_from == "1-2"


@pytest.mark.parametrize("tries", [1, 3])
def test_the_second_word_does_not_depend_on_how_many_restores_are_allowed(tries: int) -> None:
    reading = Reading(NUMBERS, tries=tries)
    assert reading.go_on([True]) == 2
    assert reading.life.record.cold_starts == 0


SUBSETS = st.sets(st.sampled_from(NUMBERS))


@given(
    checkpoints=st.integers(1, 3).map(lambda n: NUMBERS[:n]),
    damaged=SUBSETS,
    refused=SUBSETS,
    bad=st.lists(st.booleans(), max_size=6),
    policy=st.sampled_from(["cold_start", "fail"]),
    tries=st.integers(1, 4),
)
@settings(max_examples=300, deadline=None)
def test_whatever_is_damaged_and_whoever_reads_badly(
    checkpoints: tuple[str, ...],
    damaged: set[str],
    refused: set[str],
    bad: list[bool],
    policy: str,
    tries: int,
) -> None:
    reading = Reading(checkpoints, damaged, refused=refused, policy=policy, tries=tries)
    instances = reading.go_on(bad)
    record = reading.life.record
    for number, said in reading.said.items():
        assert len(said) <= 2, f"{number} was found damaged {len(said)} times"
        assert len(set(said)) == len(said)
    for entry in record.checkpoints:
        assert (entry.unusable is not None) == (len(reading.said.get(entry.number, ())) == 2)
    whole = [x for x in checkpoints if x not in damaged | refused]
    if sum(bad[:instances]) <= 1 and whole:
        assert reading.runs()
        assert record.cold_starts == 0
        assert record.incarnations[-1].restored_from in whole
    if not refused:
        assert instances <= 2, "every checkpoint has two words at most"
    if record.cold_starts or record.state.terminal:
        left = [x for x in record.checkpoints if x.unusable is None]
        assert all(x.failed_restores >= tries for x in left)
