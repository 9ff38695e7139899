"""A worker that has told its engine how it ends: it is never restored, replaced or saved again, whatever happens to its instance."""

from __future__ import annotations

from savedworker.model import events as ev
from savedworker.model.decisions import Leave, lease_dead, may_take
from savedworker.model.record import Reason, State
from tests.model.life import Life


def concluded(**spec: object) -> Life:
    life = Life(**spec)
    life.settle()
    life.run("l1")
    life.checkpoint("1-1")
    life.fenced(ev.Concluded, outcome="success")
    return life


def test_what_it_said_stands_in_the_record() -> None:
    life = concluded()
    assert life.record.concluded is not None
    assert life.record.concluded.outcome == "success"
    assert not life.record.protected
    assert life.last() == "concluded"


def test_its_end_is_its_own() -> None:
    life = concluded()
    life.fenced(ev.Finished, exit_code=0)
    assert life.state() is State.SUCCEEDED


def test_lost_then_it_is_neither_restored_nor_replaced() -> None:
    life = concluded()
    life.lose()
    life.settle()
    assert (life.state(), life.record.reason) == (State.FAILED, Reason.LOST)
    assert "told its engine: success" in life.record.detail
    assert life.launches == 1


def test_a_notice_launches_nothing() -> None:
    life = concluded()
    life.notice(30)
    life.settle()
    assert life.launches == 1


def test_a_launch_that_is_on_its_way_is_not_wanted_any_more() -> None:
    life = Life()
    life.settle()
    life.run("l1")
    life.notice(30)
    life.settle()
    assert life.spares() == ["l2"]
    life.fenced(ev.Concluded, outcome="deferred")
    assert isinstance(may_take(life.record, life.spec, "l2", 1e6), Leave)
    life.settle()
    assert life.spares() == []
    before = life.record
    life.take("l2", "1-1")
    assert life.record == before


def test_a_silent_lease_ends_it_only_once_it_is_dead() -> None:
    life = concluded()
    life.silent = lease_dead(life.spec.lease_term) - 0.1
    life.settle()
    assert life.state() is State.RUNNING
    life.silent += 0.2
    life.settle()
    assert (life.state(), life.record.reason) == (State.FAILED, Reason.LOST)


def test_no_further_checkpoint_begins() -> None:
    life = concluded()
    before = life.record
    life.fenced(ev.CheckpointStarted, number="1-2", cause="periodic")
    assert life.record is before


def test_the_same_again_changes_nothing_and_another_word_replaces_it() -> None:
    life = concluded()
    before = life.record
    life.fenced(ev.Concluded, outcome="success")
    assert life.record is before
    life.fenced(ev.Concluded, outcome="failed")
    assert life.record.concluded is not None
    assert life.record.concluded.outcome == "failed"


def test_after_the_end_nothing_is_concluded() -> None:
    life = Life()
    life.settle()
    life.run("l1")
    life.tell(ev.CancelRequested, by="ann")
    life.fenced(ev.Concluded, outcome="success")
    assert life.record.concluded is None


def test_so_many_times_it_begins_again_from_nothing_and_no_more() -> None:
    life = Life(checkpoint={"max_cold_starts": 2})
    life.settle()
    life.run("l1")
    for _ in range(2):
        life.lose()
        life.pass_time(300)
        life.settle()
        life.run(life.spares()[0])
    assert life.record.cold_starts == 2
    life.lose()
    life.pass_time(300)
    life.settle()
    assert (life.state(), life.record.reason) == (State.FAILED, Reason.LOST)
