"""What is done next: exactly one replacement, budgets and limits that hold, and no instance left over."""

from __future__ import annotations

import itertools
from typing import Any

import pytest

from savedworker.model import defaults
from savedworker.model import events as ev
from savedworker.model.decisions import (
    CallFleet,
    InstanceView,
    Leave,
    Record,
    RequestLaunch,
    Take,
    Terminate,
    Wait,
    checkpoints_to_drop,
    launch_pause,
    lease_dead,
    lease_wait,
    may_take,
    settled,
)
from savedworker.model.placement import reclaimed_places
from savedworker.model.record import Reason, State, WorkerRecord
from tests.model.life import Life
from tests.model.test_transitions import in_state


def requests(actions: list[Any]) -> list[RequestLaunch]:
    return [x for x in actions if isinstance(x, RequestLaunch)]


def gave_up(life: Life) -> Reason | None:
    return life.record.reason if life.record.state is State.FAILED else None


def running(**spec: Any) -> Life:
    life = Life(**spec)
    life.settle()
    life.run("l1")
    life.fleet["l1"] = InstanceView("running")
    return life


# One launch -----------------------------------------------------------------------------------------------------------


def test_a_new_worker_gets_one_launch_and_no_second() -> None:
    life = Life()
    assert len(requests(life.settle())) == 1
    assert life.settle() == []
    life.pass_time(10)
    assert life.settle() == []
    assert life.calls == ["l1"]


def test_a_running_worker_needs_nothing() -> None:
    life = running()
    assert life.decide() == []


def test_a_lost_instance_is_replaced_by_one() -> None:
    life = running()
    life.fleet["l1"] = InstanceView("ended", detail="reclaimed")
    assert len(requests(life.settle())) == 1
    assert life.record.state is State.MIGRATING
    assert life.spares() == ["l2"]


def test_what_was_learned_is_recorded_before_anything_is_decided_from_it() -> None:
    life = running()
    life.fleet["l1"] = InstanceView("ended")
    kinds = [type(x.event) for x in life.decide()]
    assert kinds == [ev.InstanceLost, ev.LaunchEnded]


def test_a_launch_that_the_fleet_never_heard_of_is_called_again_under_its_own_name() -> None:
    life = Life()
    life.tell(ev.LaunchRequested, launch="l1")
    life.watched = 0.0
    assert life.decide() == []  # another controller may be calling just now
    life.watched = defaults.LAUNCH_RETRY
    actions = life.decide()
    assert [type(x) for x in actions] == [CallFleet]
    assert actions[0].launch.id == "l1"


def test_an_accepted_launch_that_the_fleet_has_forgotten_is_replaced() -> None:
    life = Life()
    life.settle()
    life.fleet.clear()
    assert life.decide() == []
    life.pass_time(defaults.LAUNCH_PATIENCE)
    assert len(requests(life.settle())) == 1
    assert life.record.launches[0].outcome == "gone"


# Notices --------------------------------------------------------------------------------------------------------------


def test_a_notice_with_a_deadline_launches_the_replacement_early() -> None:
    life = running()
    life.notice(30)
    actions = life.settle()
    assert [x.why for x in requests(actions)] == ["notice"]
    assert life.record.state is State.RUNNING


def recommended(**spec: Any) -> Life:
    """A worker that runs on an instance which it was recommended to leave; its spare has booted."""
    life = running(**spec)
    life.notice(None, "r")
    life.settle()
    for spare in life.spares():
        life.fleet[spare] = InstanceView("running")
    return life


def test_a_recommendation_to_leave_launches_a_spare_that_waits_while_the_worker_runs_on() -> None:
    life = running()
    life.notice(None, "r")
    (asked,) = requests(life.settle())
    assert (asked.spare_of, asked.why) == ("r", "leaving was recommended; it waits 10m00s for a notice")
    assert asked.avoid == ("z-l1",)
    assert "launch l2, a spare" in [x.detail for x in life.record.recent if x.event == "launch_requested"][-1]
    assert life.spares() == ["l2"]
    assert life.state() is State.RUNNING
    assert isinstance(may_take(life.record, life.spec, "l2", 0.0, 599.0), Wait)
    assert life.settle() == []


def test_the_notice_that_follows_uses_the_spare_and_no_other_launch() -> None:
    life = recommended()
    life.pass_time(300)
    life.notice(120, "n")
    assert life.settle() == []
    # However long that takes: it is needed now.
    life.pass_time(1000)
    assert life.settle() == []
    assert isinstance(may_take(life.record, life.spec, "l2", 0.0, 5000.0), Wait)
    life.hand_over("1-1")
    assert may_take(life.record, life.spec, "l2", 0.0, 0.0) == Take(life.record.checkpoints[0])
    life.run("l2", "1-1")
    life.settle()
    assert life.calls == ["l1", "l2"]
    assert (life.record.migrations, life.record.launches[1].outcome) == (1, None)


def test_an_instance_that_goes_without_a_notice_is_replaced_by_the_spare() -> None:
    life = recommended()
    life.checkpoint("1-1")
    life.lose()
    assert requests(life.settle()) == []
    assert isinstance(may_take(life.record, life.spec, "l2", 0.0), Take)


def test_a_spare_that_no_notice_comes_to_need_ends_and_no_second_follows_it() -> None:
    life = recommended()
    life.pass_time(599)
    assert life.settle() == []
    life.pass_time(1)
    actions = life.settle()
    (ending,) = [x.event for x in actions if isinstance(x, Record) and isinstance(x.event, ev.LaunchEnding)]
    assert ending.outcome == "surplus"
    assert ending.detail == "not needed: no notice came within 10m00s of the recommendation to leave"
    assert [x.launch.id for x in actions if isinstance(x, Terminate)] == ["l2"]
    for _ in range(50):
        life.pass_time(600)
        assert requests(life.settle()) == []
    assert life.calls == ["l1", "l2"]
    # What that spare came to says nothing about the launch that is needed after all.
    assert launch_pause(life.record) == 0
    life.notice(120, "n")
    assert len(requests(life.settle())) == 1


def test_a_spare_whose_controller_has_gone_ends_by_itself() -> None:
    life = recommended()
    answer = may_take(life.record, life.spec, "l2", 0.0, 600.0)
    assert answer == Leave("no notice came within 10m00s of the recommendation to leave")
    life.notice(120, "n")
    assert isinstance(may_take(life.record, life.spec, "l2", 0.0, 600.0), Wait)
    life.fenced(ev.NoticeWithdrawn, id="n")
    assert isinstance(may_take(life.record, life.spec, "l2", 0.0, 600.0), Leave)


def test_a_replacement_of_a_withdrawn_notice_whose_controller_has_gone_ends_by_itself() -> None:
    life = running()
    life.notice(120, "n")
    life.settle()
    life.fenced(ev.NoticeWithdrawn, id="n")
    assert isinstance(may_take(life.record, life.spec, "l2", 0.0, 10.0), Wait)
    answer = may_take(life.record, life.spec, "l2", 0.0, 600.0)
    assert answer == Leave("nothing says any more that it will be needed")
    # The holder's silence is a reason to wait, however long it has been waited before.
    assert isinstance(may_take(life.record, life.spec, "l2", lease_wait(10.0) + 1, 600.0), Take)


def test_a_withdrawn_recommendation_ends_its_spare() -> None:
    life = recommended()
    life.fenced(ev.NoticeWithdrawn, id="r")
    life.settle()
    assert life.spares() == []
    assert life.record.launches[1].detail == "not needed: the recommendation to leave was withdrawn"
    assert life.record.launches[1].state == "ended"


def test_a_spare_that_comes_to_nothing_is_tried_once_more_and_not_at_once() -> None:
    life = running()
    life.refuse = "capacity"
    life.notice(None, "r")
    assert len(requests(life.settle())) == 1
    life.pass_time(defaults.LAUNCH_RETRY_MAX - 1)
    assert life.settle() == []
    life.pass_time(1)
    assert len(requests(life.settle())) == 1
    for _ in range(20):
        life.pass_time(defaults.LAUNCH_RETRY_MAX)
        assert life.settle() == []
    assert life.state() is State.RUNNING
    assert life.calls == ["l1", "l2", "l3"]


def test_a_spare_is_of_no_use_to_a_worker_that_may_not_move_and_is_none_by_policy() -> None:
    life = running(max_migrations=0)
    life.notice(None, "r")
    assert life.settle() == []
    life = running(placement={"spare_for": None})
    life.notice(None, "r")
    assert life.settle() == []


def test_the_end_of_the_worker_ends_its_spare() -> None:
    life = recommended()
    life.fenced(ev.Finished, exit_code=0)
    assert isinstance(may_take(life.record, life.spec, "l2", 0.0), Leave)
    life.settle()
    assert life.fleet["l2"].state == "ended"
    assert life.record.launch("l2").outcome == "surplus"  # type: ignore[union-attr]


def test_a_worker_that_has_moved_very_often_remembers_the_spare_it_had() -> None:
    """Launches are forgotten one day; the standing recommendation's are not, or it would be launched for again and again."""
    life = running()
    for number in range(1, 121):
        life.checkpoint(f"{number}-1")
        life.lose()
        life.settle()
        life.run(life.spares()[0], f"{number}-1")
    life.notice(None, "r")
    assert len(requests(life.settle())) == 1
    life.pass_time(600)
    life.settle()
    for _ in range(5):
        life.pass_time(600)
        assert requests(life.settle()) == []


def test_the_end_of_a_spare_is_decided_on_the_record_that_was_looked_at() -> None:
    """A notice may come at this very moment."""
    life = recommended()
    life.pass_time(600)
    (action,) = life.decide()
    assert isinstance(action, Record)
    assert action.only_now


def test_a_rebalance_after_the_notice_does_not_take_the_replacement_away() -> None:
    life = running()
    life.notice(30, "interruption")
    life.settle()
    life.notice(None, "rebalance")
    assert life.settle() == []
    assert life.spares() == ["l2"]


def test_a_withdrawn_notice_ends_the_replacement() -> None:
    life = running()
    life.notice(30)
    life.settle()
    life.fenced(ev.NoticeWithdrawn, id="n")
    actions = life.settle()
    kinds = [type(x.event if isinstance(x, Record) else x) for x in actions]
    assert kinds == [ev.LaunchEnding, Terminate]
    assert (life.record.launches[1].state, life.record.launches[1].outcome) == ("ended", "surplus")
    assert life.fleet["l1"].state == "running"


def test_while_its_instance_is_being_ended_an_agent_cannot_win_the_lease() -> None:
    life = running()
    life.notice(30)
    life.settle()
    life.fenced(ev.NoticeWithdrawn, id="n")
    for action in life.decide():
        life.act(action)
    assert life.record.launches[1].state == "ending"
    assert isinstance(may_take(life.record, life.spec, "l2", 0), Leave)
    life.notice(30, "again")
    life.hand_over("1-1")
    before = life.record
    life.take("l2", "1-1")
    assert life.record is before


def test_after_the_hand_over_the_waiting_replacement_is_used() -> None:
    life = running()
    life.notice(30)
    life.settle()
    life.fleet["l2"] = InstanceView("running")
    life.hand_over("1-1")
    actions = life.settle()
    assert requests(actions) == []
    assert [x.launch.id for x in actions if isinstance(x, Terminate)] == ["l1"]
    assert may_take(life.record, life.spec, "l2", 0.0) == Take(life.record.checkpoints[0])
    life.run("l2", "1-1")
    assert life.settle() == []


def test_of_two_replacements_the_one_that_is_up_is_kept() -> None:
    life = running()
    life.lose()
    life.launch("pending")
    life.launch("running")
    life.settle()
    assert life.spares() == ["l3"]
    assert life.fleet["l2"].state == "ended"


def test_a_lease_that_falls_silent_gets_a_replacement_and_is_closed_once_the_shim_has_killed() -> None:
    life = running()
    life.silent = lease_wait(10.0)
    assert life.settle() == []
    life.silent += 0.1
    assert len(requests(life.settle())) == 1
    assert life.state() is State.RUNNING
    life.silent = lease_dead(10.0) + 0.1
    life.settle()
    assert life.record.state is State.MIGRATING
    assert life.record.lease is not None
    assert life.record.lease.released
    assert life.fleet["l1"].state == "ended"
    assert life.spares() == ["l2"]


def test_the_silent_holder_that_comes_back_keeps_the_worker() -> None:
    life = running()
    life.silent = lease_wait(10.0) + 1
    life.settle()
    life.renew()
    life.silent = 0
    life.settle()
    assert life.spares() == []
    assert life.record.lease_held


def test_a_silent_holder_whose_budget_is_used_up_does_not_hang_for_ever() -> None:
    life = running(max_migrations=0)
    life.silent = lease_wait(10.0) + 1
    assert life.settle() == []
    life.silent = lease_dead(10.0) + 1
    life.settle()
    assert gave_up(life) is Reason.MIGRATION_BUDGET


# Budgets --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("budget", [0, 1, 3])
def test_a_budget_of_migrations_allows_exactly_so_many(budget: int) -> None:
    life = running(max_migrations=budget)
    for n in range(1, budget + 2):
        assert gave_up(life) is None
        life.pass_time(300)
        life.hand_over(f"{n}-1")
        life.settle()
        if life.record.state.terminal:
            break
        life.run(life.spares()[0], f"{n}-1")
    assert gave_up(life) is Reason.MIGRATION_BUDGET
    assert life.record.migrations == budget
    assert life.record.exit_code is None


def test_with_a_budget_of_none_a_notice_launches_nothing() -> None:
    life = running(max_migrations=0)
    life.notice(30)
    assert life.settle() == []


def test_cold_starts_count_against_the_budget() -> None:
    life = running(max_migrations=1)
    life.lose()
    life.settle()
    life.run(life.spares()[0])
    life.lose()
    life.settle()
    assert gave_up(life) is Reason.MIGRATION_BUDGET


def test_first_starts_that_fail_are_free() -> None:
    life = Life(max_migrations=0)
    life.settle()
    life.take("l1")
    life.fleet["l1"] = InstanceView("ended")
    life.settle()
    assert len(life.spares()) == 1


def test_five_preemptions_and_one_error_end_as_the_users_own_error() -> None:
    """C12: engine retries are for the worker's own exit, which no migration hides and no budget of ours answers."""
    life = running(max_migrations=5)
    for n in range(1, 6):
        life.hand_over(f"{n}-1")
        life.settle()
        life.run(life.spares()[0], f"{n}-1")
    life.pass_time(2)
    life.fenced(ev.Finished, exit_code=1)
    life.fenced(ev.LeaseReleased, end_reason="failed")
    life.settle()
    assert (life.record.reason, life.record.exit_code) == (Reason.EXIT, 1)
    assert life.record.after_restore
    assert len(life.record.launches) == 6
    assert settled(life.record)


# Capacity -------------------------------------------------------------------------------------------------------------


def test_refused_launches_come_slower_and_slower_and_then_no_capacity_is_reported() -> None:
    life = Life(placement={"wait_for_capacity": 1800})
    life.refuse = "capacity"
    asked = []
    for _ in range(4000):
        if requests(life.settle()):
            asked.append((life.now - life.record.created_at).total_seconds())
        if life.record.state.terminal:
            break
        life.pass_time(1)
    gaps = [b - a for a, b in itertools.pairwise(asked)]
    assert gaps[:5] == [5, 10, 20, 40, 80]
    assert set(gaps[5:]) == {120}
    assert gave_up(life) is Reason.NO_CAPACITY
    assert life.record.detail == "refused: capacity"
    assert 1800 <= (life.now - life.record.created_at).total_seconds() <= 1930


def test_no_wait_for_capacity_means_that_one_refusal_is_enough() -> None:
    life = Life(placement={"wait_for_capacity": 0})
    life.refuse = "capacity"
    life.settle()
    assert gave_up(life) is Reason.NO_CAPACITY


def test_waiting_counts_from_the_first_try_not_from_the_submission() -> None:
    life = Life(placement={"wait_for_capacity": 60})
    life.pass_time(7200)
    life.refuse = "capacity"
    life.settle()
    assert gave_up(life) is None


def test_an_instance_that_stays_pending_is_given_up_as_no_capacity() -> None:
    """C58: a queue that never starts a job."""
    life = Life(placement={"wait_for_capacity": 60})
    life.settle()
    life.fleet["l1"] = InstanceView("pending", detail="RUNNABLE: no room in spot")
    life.pass_time(59)
    (told,) = life.settle()
    assert "no room in spot" in told.event.detail  # visible while it waits, and told once
    assert life.settle() == []
    life.pass_time(1)
    life.settle()
    assert gave_up(life) is Reason.NO_CAPACITY
    assert "no room in spot" in life.record.detail
    assert life.fleet["l1"].state == "ended"
    assert settled(life.record)


def test_refusals_of_an_earlier_notice_do_not_stop_the_early_launch_of_the_next() -> None:
    life = running(placement={"wait_for_capacity": 60})
    life.notice(30, "first")
    life.refuse = "capacity"
    life.settle()
    life.fenced(ev.NoticeWithdrawn, id="first")
    life.pass_time(7200)
    life.refuse = None
    life.notice(30, "second")
    assert len(requests(life.settle())) == 1


def test_the_pause_stays_finite_after_thousands_of_refusals() -> None:
    life = Life()
    life.refuse = "capacity"
    for _ in range(50):
        life.launch()
    assert launch_pause(life.record) == defaults.LAUNCH_RETRY_MAX


def test_a_first_instance_that_vanished_is_replaced_at_once_and_a_second_one_later() -> None:
    life = Life()
    life.settle()
    life.fleet["l1"] = InstanceView("ended")
    life.settle()
    assert life.spares() == ["l2"]
    life.fleet["l2"] = InstanceView("ended")
    life.settle()
    assert life.spares() == []
    life.pass_time(launch_pause(life.record))
    life.settle()
    assert life.spares() == ["l3"]


# Instances that never execute the worker ------------------------------------------------------------------------------


def keep_failing(life: Life, fail: Any, limit: int = 40) -> int:
    """Let every launch that is made fail in the same way; returns how many there were."""
    tried = 0
    while not life.record.state.terminal:
        life.settle()
        for launch in life.spares():
            tried += 1
            fail(launch)
        assert tried < limit, "it goes on for ever"
        life.pass_time(defaults.LAUNCH_RETRY_MAX)
    return tried


def test_boots_without_a_lease_are_bounded() -> None:
    life = Life()

    def vanish(launch: str) -> None:
        life.fleet[launch] = InstanceView("ended", outcome="failed", detail="no agent")

    assert keep_failing(life, vanish) == defaults.BOOTS_WITHOUT_LEASE
    assert gave_up(life) is Reason.INTERNAL
    assert "no agent" in life.record.detail


def test_leases_without_a_start_are_bounded() -> None:
    life = Life()

    def crash(launch: str) -> None:
        life.take(launch)
        life.fleet[launch] = InstanceView("ended", detail="the agent crashed")

    assert keep_failing(life, crash) == defaults.BOOTS_WITHOUT_LEASE
    assert gave_up(life) is Reason.INTERNAL
    assert "the agent crashed" in life.record.detail


def test_boots_with_and_without_a_lease_are_counted_together() -> None:
    life = Life()

    def fail(launch: str) -> None:
        if int(launch[1:]) % 2:
            life.take(launch)
        life.fleet[launch] = InstanceView("ended")

    assert keep_failing(life, fail) == defaults.BOOTS_WITHOUT_LEASE


def test_an_agent_that_takes_the_lease_and_hangs_is_bounded_too() -> None:
    life = Life()

    def hang(launch: str) -> None:
        life.take(launch)
        life.fleet[launch] = InstanceView("running")
        life.silent = lease_dead(10.0) + 1

    assert keep_failing(life, hang) <= defaults.BOOTS_WITHOUT_LEASE + 1
    assert gave_up(life) is Reason.INTERNAL


def test_agents_that_take_over_from_each_other_and_hang_are_bounded() -> None:
    life = Life()
    for _ in range(3 * defaults.BOOTS_WITHOUT_LEASE):
        life.silent = lease_wait(10.0) + 1
        life.settle()
        for launch in life.spares():
            life.fleet[launch] = InstanceView("running")
            life.take(launch)
        life.pass_time(defaults.LAUNCH_RETRY_MAX)
    assert len(life.record.incarnations) == defaults.BOOTS_WITHOUT_LEASE + 1
    life.silent = lease_dead(10.0) + 1
    life.settle()
    assert gave_up(life) is Reason.INTERNAL


def test_a_start_in_between_begins_the_count_again() -> None:
    life = Life()
    for _ in range(3):
        for _ in range(defaults.BOOTS_WITHOUT_LEASE - 1):
            life.take()
            life.lose()
        life.run()
        life.lose()
    life.pass_time(1000)
    assert len(requests(life.settle())) == 1


def test_starts_that_fail_come_slower_and_slower() -> None:
    life = Life()
    pauses = []
    for _ in range(4):
        life.take()
        life.lose()
        pauses.append(launch_pause(life.record))
    assert pauses == [0, 10, 20, 40]


def test_a_running_instance_whose_agent_never_begins_is_ended_and_counted() -> None:
    life = Life()
    life.settle()
    life.pass_time(1000)
    life.fleet["l1"] = InstanceView("running")
    life.settle()
    life.pass_time(defaults.BOOT_LIMIT - 1)
    life.settle()
    assert life.spares() == ["l1"]
    life.pass_time(1)
    life.settle()
    assert life.record.launches[0].outcome == "failed"
    assert life.fleet["l1"].state == "ended"
    assert life.spares() == ["l2"]


# Restores -------------------------------------------------------------------------------------------------------------


def with_two_checkpoints(**checkpoint: Any) -> Life:
    life = Life(checkpoint=checkpoint)
    life.settle()
    life.run("l1")
    life.fleet["l1"] = InstanceView("running")
    life.checkpoint("1-1")
    life.checkpoint("1-2")
    life.fleet["l1"] = InstanceView("ended")
    return life


def trying(life: Life, how: str, tried: list[str | None]) -> Any:
    def fail(launch: str) -> None:
        answer = may_take(life.record, life.spec, launch, 0.0)
        assert isinstance(answer, Take)
        number = answer.checkpoint.number if answer.checkpoint else None
        tried.append(number)
        life.take(launch, number)
        if number and how == "said":
            life.fenced(ev.RestoreFailed, number=number, detail="criu failed")
            life.fenced(ev.LeaseReleased, end_reason="failed")
        elif number and how == "died after":
            life.fenced(ev.Restored, number=number)
        life.fleet[launch] = InstanceView("ended", detail="crashed")

    return fail


@pytest.mark.parametrize("how", ["said", "died during", "died after"])
def test_three_restores_of_the_newest_then_of_the_older_then_policy_fails(how: str) -> None:
    life = with_two_checkpoints(when_unrestorable="fail")
    tried: list[str | None] = []
    keep_failing(life, trying(life, how, tried))
    assert tried == ["1-2"] * 3 + ["1-1"] * 3
    assert gave_up(life) is Reason.CRASH_LOOP


@pytest.mark.parametrize("how", ["said", "died during", "died after"])
def test_three_restores_of_the_newest_then_of_the_older_then_a_bounded_number_of_cold_starts(
    how: str,
) -> None:
    life = with_two_checkpoints()
    tried: list[str | None] = []
    keep_failing(life, trying(life, how, tried))
    assert tried == ["1-2"] * 3 + ["1-1"] * 3 + [None] * defaults.BOOTS_WITHOUT_LEASE
    assert gave_up(life) is Reason.CRASH_LOOP
    assert life.record.cold_starts == 0


def test_more_restores_than_boots_may_be_allowed() -> None:
    life = with_two_checkpoints(restores_without_progress=8, when_unrestorable="fail")
    tried: list[str | None] = []
    keep_failing(life, trying(life, "said", tried))
    assert tried == ["1-2"] * 8 + ["1-1"] * 8


def test_a_damaged_checkpoint_is_not_tried_again() -> None:
    life = with_two_checkpoints()
    life.settle()
    life.take(life.spares()[0], "1-2")
    life.fenced(ev.RestoreFailed, number="1-2", detail="chunk missing", unusable=True)
    assert life.choice() == "1-1"


def test_a_worker_lost_before_its_first_checkpoint_starts_over_or_fails_by_policy() -> None:
    for policy, reason in (("cold_start", None), ("fail", Reason.LOST)):
        life = running(checkpoint={"when_unrestorable": policy})
        life.fleet["l1"] = InstanceView("ended")
        life.settle()
        assert gave_up(life) is reason


def test_a_worker_that_must_not_start_over_still_gets_its_replacement_on_a_notice() -> None:
    life = running(checkpoint={"when_unrestorable": "fail"})
    life.notice(30)
    life.settle()
    assert life.spares() == ["l2"]
    life.hand_over("1-1")
    assert isinstance(may_take(life.record, life.spec, "l2", 0), Take)


def test_a_waiting_agent_leaves_when_the_worker_must_not_start_over() -> None:
    life = running(checkpoint={"when_unrestorable": "fail"})
    life.notice(30)
    life.settle()
    life.fenced(ev.Yielded)
    assert isinstance(may_take(life.record, life.spec, "l2", 0), Leave)


# Incompatible instances -----------------------------------------------------------------------------------------------


def refusing(policy: str) -> Life:
    life = Life(checkpoint={"when_unrestorable": policy, "wait_for_match": 600})
    life.settle()
    life.run("l1")
    life.checkpoint("1-1")
    life.fleet["l1"] = InstanceView("ended")
    life.settle()
    life.refuse = "incompatible"
    life.tell(ev.LaunchEnded, launch="l2", outcome="incompatible", detail="CPU features missing: avx512f")
    return life


@pytest.mark.parametrize("policy", ["cold_start", "fail"])
def test_incompatible_instances_are_waited_out_and_then_policy_decides(policy: str) -> None:
    life = refusing(policy)
    while life.choice() and not life.record.state.terminal:
        life.settle()
        life.pass_time(10)
    waited = (life.now - life.record.launches[0].requested_at).total_seconds()
    assert 600 <= waited <= 620
    if policy == "fail":
        assert gave_up(life) is Reason.INCOMPATIBLE
        return
    assert gave_up(life) is None
    assert life.record.checkpoints[0].unusable is not None
    life.refuse = None
    life.pass_time(120)
    life.settle()
    assert may_take(life.record, life.spec, life.spares()[0], 0) == Take(None)


def test_a_match_in_time_is_restored() -> None:
    life = refusing("cold_start")
    life.refuse = None
    life.pass_time(300)
    life.settle()
    answer = may_take(life.record, life.spec, life.spares()[0], 0)
    assert isinstance(answer, Take)
    assert answer.checkpoint is not None
    assert answer.checkpoint.number == "1-1"


def test_time_spent_without_capacity_is_not_time_spent_on_a_match() -> None:
    life = refusing("cold_start")
    life.refuse = "capacity"
    life.record = WorkerRecord.model_validate_json(life.record.model_dump_json())
    life.tell(ev.LaunchRequested, launch="l9")
    life.tell(ev.LaunchEnded, launch="l9", outcome="capacity")
    life.pass_time(599)
    life.settle()
    assert life.choice() == "1-1"


# Places ---------------------------------------------------------------------------------------------------------------


def test_a_reclaimed_place_is_avoided_for_the_stated_time_by_default() -> None:
    life = running()
    life.hand_over("1-1")
    assert reclaimed_places(life.record, life.now, life.spec.placement.avoid_reclaimed) == ("z-l1",)
    assert requests(life.settle())[0].avoid == ("z-l1",)
    life.pass_time(1799)
    assert reclaimed_places(life.record, life.now, 1800) == ("z-l1",)
    life.pass_time(1)
    assert reclaimed_places(life.record, life.now, 1800) == ()


def test_refusals_elsewhere_shorten_the_time() -> None:
    life = running()
    life.lose()
    life.refuse = "capacity"
    life.launch()
    life.pass_time(899)
    assert reclaimed_places(life.record, life.now, 1800) == ("z-l1",)
    life.pass_time(1)
    assert reclaimed_places(life.record, life.now, 1800) == ()


def test_the_place_of_the_present_instance_is_not_avoided() -> None:
    life = running()
    assert reclaimed_places(life.record, life.now, 1800) == ()


# The end --------------------------------------------------------------------------------------------------------------

STATES = ["pending", "starting", "running", "checkpointing", "migrating", "restoring"]


@pytest.mark.parametrize("state", STATES)
def test_after_a_cancel_nothing_is_left_running(state: str) -> None:
    life = in_state(state)
    life.tell(ev.CancelRequested, by="ann")
    life.settle()
    life.pass_time(defaults.STOP_GRACE + 1)  # the agent does not answer
    life.settle()
    assert settled(life.record)
    assert all(x.state == "ended" for x in life.fleet.values())
    assert life.record.state is State.CANCELLED
    assert life.settle() == []


def test_an_agent_has_time_to_end_its_worker_well() -> None:
    life = running()
    life.tell(ev.CancelRequested, by="ann")
    assert life.settle() == []
    life.fenced(ev.LeaseReleased, end_reason="cancelled")
    assert [type(x) for x in life.settle()] == [Terminate]
    assert settled(life.record)


def test_a_replacement_on_its_way_ends_with_the_worker() -> None:
    life = running()
    life.notice(30)
    life.settle()
    life.tell(ev.CancelRequested, by="ann")
    life.settle()
    assert life.fleet["l2"].state == "ended"
    assert life.fleet["l1"].state == "running"


def test_a_launch_that_another_controller_may_be_making_is_not_forgotten_at_once() -> None:
    life = Life()
    life.tell(ev.LaunchRequested, launch="l1")
    life.tell(ev.CancelRequested, by="ann")
    assert life.settle() == []
    assert not settled(life.record)
    life.fleet["l1"] = InstanceView("pending")  # the call was made after all
    life.settle()
    assert life.fleet["l1"].state == "ended"
    assert settled(life.record)


def test_a_launch_that_was_never_made_settles_after_a_while() -> None:
    life = Life()
    life.tell(ev.LaunchRequested, launch="l1")
    life.tell(ev.CancelRequested, by="ann")
    life.pass_time(defaults.LAUNCH_PATIENCE)
    life.settle()
    assert settled(life.record)


def test_a_lease_whose_launch_has_ended_does_not_keep_a_worker_from_settling() -> None:
    life = running()
    gone = life.record.launches[0].model_copy(update={"state": "ended", "outcome": "used"})
    life.record = life.record.model_copy(update={"launches": (gone,)})
    life.tell(ev.CancelRequested, by="ann")
    life.settle()
    assert settled(life.record)


def test_a_worker_that_has_ended_is_left_alone() -> None:
    life = running()
    life.fenced(ev.Finished, exit_code=0)
    life.fenced(ev.LeaseReleased, end_reason="finished")
    life.settle()
    assert settled(life.record)
    life.pass_time(1e6)
    assert life.decide() == []


# Clocks ---------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("jump", [-3600.0, -86400.0])
def test_a_clock_that_is_put_back_does_not_stop_relaunches(jump: float) -> None:
    life = Life()
    life.refuse = "capacity"
    life.settle()
    life.pass_time(jump)
    life.refuse = None
    assert len(requests(life.settle())) == 1


def test_a_clock_that_is_put_back_does_not_keep_an_instance_after_the_end() -> None:
    life = running()
    life.tell(ev.CancelRequested, by="ann")
    life.pass_time(-3600)
    life.settle()
    assert settled(life.record)


def test_a_clock_that_is_put_back_ends_no_worker() -> None:
    for state in STATES:
        life = in_state(state)
        life.pass_time(-86400)
        life.settle()
        assert not life.record.state.terminal


# may_take -------------------------------------------------------------------------------------------------------------


def test_a_taker_waits_for_the_whole_term_and_the_margin_on_its_own_clock() -> None:
    life = running()
    spare = life.launch()
    term = life.spec.lease_term
    for silent in (0, term, term * (1 + defaults.LEASE_MARGIN)):
        assert isinstance(may_take(life.record, life.spec, spare, silent), Wait)
    assert isinstance(
        may_take(life.record, life.spec, spare, term * (1 + defaults.LEASE_MARGIN) + 0.01), Take
    )


def test_nobody_waits_after_a_hand_over() -> None:
    life = running()
    spare = life.launch()
    life.hand_over("1-1")
    assert isinstance(may_take(life.record, life.spec, spare, 0.0), Take)


@pytest.mark.parametrize("why", ["unknown", "ended", "ending", "used", "terminal", "budget"])
def test_an_agent_that_is_not_expected_leaves(why: str) -> None:
    life = running(max_migrations=0)
    spare = life.launch()
    asking = spare
    if why == "unknown":
        asking = "somebody"
    elif why == "ended":
        life.tell(ev.LaunchEnded, launch=spare, outcome="gone")
    elif why == "ending":
        life.tell(ev.LaunchEnding, launch=spare, outcome="surplus")
    elif why == "used":
        asking = "l1"
    elif why == "terminal":
        life.tell(ev.CancelRequested, by="ann")
    elif why == "budget":
        life.fenced(ev.Yielded)
    assert isinstance(may_take(life.record, life.spec, asking, 1e6), Leave)


# Which checkpoints are kept -------------------------------------------------------------------------------------------


def test_the_newest_checkpoints_are_kept() -> None:
    life = running()
    for n in range(1, 4):
        life.checkpoint(f"1-{n}")
    assert checkpoints_to_drop(life.record, 2) == ("1-1", "1-2")
    assert checkpoints_to_drop(life.record, 1) == ("1-1", "1-2", "1-3")
    assert checkpoints_to_drop(life.record, 9) == ()


def test_the_checkpoint_that_was_restored_is_kept_rather_than_the_newer_one_that_was_not() -> None:
    life = with_two_checkpoints()
    life.settle()
    for _ in range(3):
        life.take(restore="1-2")
        life.lose()
    life.run(restore="1-1")
    assert checkpoints_to_drop(life.record, 2) == ("1-2",)


def test_known_bad_checkpoints_are_dropped() -> None:
    life = with_two_checkpoints()
    life.settle()
    life.take(life.spares()[0], "1-2")
    life.fenced(ev.RestoreFailed, number="1-2", detail="x", unusable=True)
    assert checkpoints_to_drop(life.record, 5) == ("1-2",)
