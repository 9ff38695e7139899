"""What each event does to a record: fencing, ends that are final, counting what was lost and what was kept."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import pytest

from savedworker.model import attempts, defaults
from savedworker.model import events as ev
from savedworker.model.decisions import Record, RequestLaunch
from savedworker.model.record import Reason, State, WorkerRecord
from savedworker.model.report import report, status
from savedworker.model.transitions import PROGRESS_SECONDS, RECENT_EVENTS, apply
from tests.model.life import BIRTH, Life

# Fencing --------------------------------------------------------------------------------------------------------------


def fenced_events(incarnation: int, holder: str) -> list[ev.Event]:
    token: dict[str, Any] = {"at": BIRTH, "incarnation": incarnation, "holder": holder}
    return [
        ev.LeaseRenewed(**token),
        ev.Started(**token),
        ev.Restored(**token, number="1-1"),
        ev.RestoreFailed(**token, number="1-1", detail="x"),
        ev.NoticeReceived(**token, id="n", source="s", seconds_left=5),
        ev.NoticeWithdrawn(**token, id="n"),
        ev.CheckpointStarted(**token, number="1-2", cause="periodic"),
        ev.CheckpointCommitted(
            **token, number="1-2", cause="notice", frozen_at=BIRTH, bytes_image=1, bytes_uploaded=1
        ),
        ev.CheckpointFailed(**token, number="1-2", detail="x"),
        ev.ProtectionChanged(**token, unprotected_reasons=()),
        ev.HandedOver(**token, number="1-1"),
        ev.Yielded(**token),
        ev.Concluded(**token, outcome="success"),
        ev.Finished(**token, exit_code=0),
        ev.LeaseReleased(**token, end_reason="finished"),
    ]


def test_every_event_of_an_incarnation_is_in_the_table_above() -> None:
    assert {type(x) for x in fenced_events(1, "h1")} == set(ev._Fenced.__subclasses__())


@pytest.mark.parametrize("wrong", ["holder", "number", "released"])
@pytest.mark.parametrize("n", range(len(fenced_events(1, "h1"))))
def test_who_does_not_hold_the_lease_changes_nothing(n: int, wrong: str) -> None:
    life = Life()
    life.run()
    life.checkpoint("1-1")
    number, holder = 1, "h1"
    if wrong == "holder":
        holder = "somebody"
    elif wrong == "number":
        life.lose()
        life.run(restore="1-1")
    else:
        life.fenced(ev.Yielded)
    assert apply(life.record, fenced_events(number, holder)[n]) is life.record


def test_incarnations_are_numbered_one_by_one() -> None:
    life = Life()
    life.run()
    for wrong in (1, 3, 0):
        taken = ev.LeaseTaken(at=life.now, incarnation=wrong, holder="x", launch="l1", instance="i")
        assert apply(life.record, taken) is life.record


@pytest.mark.parametrize("launch", ["never heard of", "ended", "ending", "used"])
def test_only_a_launch_that_is_expected_takes_the_lease(launch: str) -> None:
    life = Life()
    if launch == "ended":
        life.launch()
        life.tell(ev.LaunchEnded, launch="l1", outcome="gone")
    elif launch == "ending":
        life.launch()
        life.tell(ev.LaunchEnding, launch="l1", outcome="surplus")
    elif launch == "used":
        life.run()
        life.fenced(ev.Yielded)
    before = life.record
    life.take("l1" if launch != "never heard of" else "l9")
    assert life.record is before


def test_a_take_over_closes_the_incarnation_before_it() -> None:
    life = Life()
    life.run()
    spare = life.launch()
    life.take(spare)
    assert [x.end_reason for x in life.record.incarnations] == ["no_notice", None]
    assert life.record.lease is not None
    assert life.record.lease.incarnation == 2


def test_a_renewal_in_the_meantime_makes_an_expired_lease_void() -> None:
    life = Life()
    life.run()
    seen = life.record
    life.renew()
    assert seen.lease is not None
    expired = ev.LeaseExpired(at=life.now, incarnation=1, renewal=seen.lease.renewal)
    assert apply(life.record, expired) is life.record
    assert apply(seen, expired).state is State.MIGRATING


def test_a_launch_that_won_the_lease_cannot_be_dropped() -> None:
    life = Life()
    life.take(life.launch())
    before = life.record
    life.tell(ev.LaunchEnding, launch="l1", outcome="surplus")
    life.tell(ev.LaunchEnded, launch="l1", outcome="surplus")
    assert life.record is before


def test_nobody_gives_up_or_sets_aside_while_the_lease_is_held() -> None:
    life = Life()
    life.run()
    life.checkpoint("1-1")
    before = life.record
    life.tell(ev.GaveUp, reason=Reason.NO_CAPACITY, detail="late")
    life.tell(ev.CheckpointsSetAside, detail="late")
    assert life.record is before


# Ends -----------------------------------------------------------------------------------------------------------------

ENDS: dict[str, tuple[State, Reason | None]] = {
    "success": (State.SUCCEEDED, None),
    "exit": (State.FAILED, Reason.EXIT),
    "signal": (State.FAILED, Reason.SIGNAL),
    "oom": (State.FAILED, Reason.OOM),
    "unknown": (State.FAILED, Reason.INTERNAL),
    "cancel": (State.CANCELLED, Reason.CANCELLED),
}


def ended(how: str) -> Life:
    life = Life()
    life.run()
    life.checkpoint("1-1")
    life.pass_time(100)
    match how:
        case "success":
            life.fenced(ev.Finished, exit_code=0)
        case "exit":
            life.fenced(ev.Finished, exit_code=143)
        case "signal":
            life.fenced(ev.Finished, exit_code=143, signal=15)
        case "oom":
            life.fenced(ev.Finished, exit_code=137, signal=9, reason=Reason.OOM)
        case "unknown":
            life.fenced(ev.Finished)
        case _:
            life.tell(ev.CancelRequested, by="ann")
    return life


@pytest.mark.parametrize("how", ENDS)
def test_each_end_has_its_own_state_and_reason(how: str) -> None:
    life = ended(how)
    assert (life.record.state, life.record.reason) == ENDS[how]
    assert life.record.ended_at == life.now


@pytest.mark.parametrize("how", ENDS)
def test_an_end_is_final(how: str) -> None:
    life = ended(how)
    before = life.record
    life.launch()
    for event in fenced_events(1, "h1"):
        life.record = apply(life.record, event)
    life.tell(ev.CancelRequested, by="bob")
    life.tell(ev.GaveUp, reason=Reason.LOST, detail="x")
    life.tell(ev.InstanceLost, incarnation=1)
    life.tell(ev.CheckpointRequested)
    life.take("l1")
    final = (
        "state",
        "reason",
        "exit_code",
        "signal",
        "ended_at",
        "detail",
        "cancel",
        "migrations",
        "launches",
    )
    for field in final:
        assert getattr(life.record, field) == getattr(before, field), field
    assert not life.record.lease_held


@pytest.mark.parametrize(
    ("how", "reason"), [("success", "finished"), ("exit", "failed"), ("cancel", "cancelled")]
)
def test_the_last_incarnation_ends_as_its_worker_did(how: str, reason: str) -> None:
    for close in (ev.HandedOver, ev.Yielded, ev.InstanceLost):
        life = ended(how)
        if close is ev.InstanceLost:
            life.tell(close, incarnation=1)
        else:
            life.fenced(close, **({"number": "1-1"} if close is ev.HandedOver else {}))
        assert [x.end_reason for x in life.record.incarnations] == [reason]


@pytest.mark.parametrize(
    "state", ["pending", "starting", "running", "checkpointing", "migrating", "restoring"]
)
def test_cancel_ends_a_worker_in_every_state(state: str) -> None:
    life = in_state(state)
    assert life.record.state == state
    life.tell(ev.CancelRequested, by="ann")
    assert (life.record.state, life.record.reason) == (State.CANCELLED, Reason.CANCELLED)
    assert life.record.cancel is not None
    assert life.record.cancel.by == "ann"
    assert life.record.detail == "cancelled by ann"


def in_state(state: str) -> Life:
    life = Life()
    if state == "pending":
        return life
    life.take()
    if state == "starting":
        return life
    life.fenced(ev.Started)
    life.checkpoint("1-1")
    if state == "checkpointing":
        life.fenced(ev.CheckpointStarted, number="1-2", cause="periodic")
    if state in ("migrating", "restoring"):
        life.lose()
    if state == "restoring":
        life.take(restore="1-1")
    return life


@pytest.mark.parametrize(("seconds", "marked"), [(2, True), (59, True), (61, False)])
def test_a_failure_soon_after_a_restore_is_marked(seconds: float, marked: bool) -> None:
    life = Life()
    life.run()
    life.checkpoint("1-1")
    life.lose()
    life.run(restore="1-1")
    life.pass_time(seconds)
    life.fenced(ev.Finished, exit_code=1)
    assert life.record.after_restore is marked


def test_a_failure_soon_after_a_start_from_nothing_is_not_marked() -> None:
    life = Life()
    life.run()
    life.fenced(ev.Finished, exit_code=1)
    assert life.record.after_restore is False


# What was lost and what was kept --------------------------------------------------------------------------------------


def numbers(record: WorkerRecord) -> tuple[int, int, list[float], list[float]]:
    return (
        record.migrations,
        record.cold_starts,
        [x.lost_seconds for x in record.incarnations],
        [x.away_seconds for x in record.incarnations],
    )


def test_with_notice_nothing_is_lost_and_the_way_is_counted_from_the_freeze() -> None:
    life = Life()
    life.run()
    life.pass_time(100)
    life.notice(30)
    life.pass_time(3)
    life.hand_over("1-1")
    life.pass_time(7)
    life.run(restore="1-1")
    assert numbers(life.record) == (1, 0, [0, 0], [0, 7])
    assert life.record.incarnations[0].end_reason == "notice"


def test_with_notice_the_upload_after_the_freeze_is_part_of_the_way() -> None:
    life = Life()
    life.run()
    life.pass_time(100)
    frozen = life.now
    life.pass_time(12)
    life.checkpoint("1-1", "notice", frozen_at=frozen)
    life.fenced(ev.HandedOver, number="1-1")
    life.pass_time(8)
    life.run(restore="1-1")
    assert numbers(life.record) == (1, 0, [0, 0], [0, 20])


def test_without_notice_the_work_since_the_checkpoint_is_lost() -> None:
    life = Life()
    life.run()
    life.pass_time(60)
    life.checkpoint("1-1")
    life.pass_time(25)
    life.renew()
    life.pass_time(15)  # nobody knows when in these it died; after 10 its lease was over
    life.lose()
    life.pass_time(5)
    life.run(restore="1-1")
    assert numbers(life.record) == (1, 0, [35, 0], [0, 10])
    assert life.record.incarnations[0].end_reason == "no_notice"


def test_a_worker_that_yields_without_a_checkpoint_loses_the_work_since_the_last_one() -> None:
    life = Life()
    life.run()
    life.checkpoint("1-1")
    life.pass_time(40)
    life.fenced(ev.Yielded)
    life.pass_time(10)
    life.run(restore="1-1")
    assert numbers(life.record) == (1, 0, [40, 0], [0, 10])


def test_falling_back_to_an_older_checkpoint_loses_more() -> None:
    life = Life()
    life.run()
    life.pass_time(50)
    life.checkpoint("1-1")
    life.pass_time(40)
    life.checkpoint("1-2")
    life.pass_time(10)
    life.fenced(ev.Yielded)
    life.run(restore="1-2")
    assert numbers(life.record)[2] == [10, 0]
    life.pass_time(5)
    life.fenced(ev.Yielded)
    life.run(restore="1-1")
    assert numbers(life.record) == (2, 0, [50, 5, 0], [0, 0, 0])


def test_a_cold_start_loses_everything_and_is_no_migration() -> None:
    life = Life()
    life.run()
    life.pass_time(30)
    life.checkpoint("1-1")
    life.pass_time(30)
    life.fenced(ev.Yielded)
    life.run(restore="1-1")
    life.pass_time(20)
    life.fenced(ev.Yielded)
    life.pass_time(4)
    life.run()
    assert numbers(life.record) == (1, 1, [60, 20, 0], [0, 0, 4])


def test_incarnations_that_never_ran_lose_nothing_and_lengthen_the_way() -> None:
    life = Life()
    life.run()
    life.pass_time(100)
    life.hand_over("1-1")
    for _ in range(3):
        life.pass_time(10)
        life.take(restore="1-1")
        life.pass_time(10)
        life.lose()
    life.pass_time(10)
    life.run(restore="1-1")
    assert numbers(life.record) == (1, 0, [0] * 5, [0, 0, 0, 0, 70])


def test_first_starts_that_failed_are_neither_migrations_nor_cold_starts() -> None:
    life = Life()
    for _ in range(2):
        life.take()
        life.pass_time(10)
        life.lose()
        assert life.record.state is State.PENDING
    life.run()
    assert numbers(life.record) == (0, 0, [0, 0, 0], [0, 0, 0])


def test_a_clock_behind_makes_no_negative_seconds() -> None:
    life = Life()
    life.run()
    life.pass_time(100)
    life.hand_over("1-1")
    life.pass_time(-50)
    life.run(restore="1-1")
    life.pass_time(-50)
    life.lose()
    life.run(restore="1-1")
    assert all(x >= 0 for part in numbers(life.record)[2:] for x in part)


def test_a_checkpoint_after_the_last_renewal_shows_that_the_worker_still_ran() -> None:
    life = Life()
    life.run()
    life.pass_time(60)
    life.checkpoint("1-1")
    life.pass_time(25)
    life.lose()
    life.pass_time(5)
    life.run(restore="1-1")
    assert numbers(life.record) == (1, 0, [10, 0], [0, 20])


def test_work_is_lost_until_the_loss_is_noticed_while_the_lease_lasted() -> None:
    life = Life()
    life.run()
    life.pass_time(60)
    life.checkpoint("1-1")
    life.pass_time(4)
    life.lose()
    life.pass_time(5)
    life.run(restore="1-1")
    assert numbers(life.record) == (1, 0, [4, 0], [0, 5])


def test_what_no_engine_looks_after_waits_for_one_anywhere() -> None:
    """Its place was not reclaimed, so it is not avoided; whoever looks after it next has it launched."""
    life = Life(orphan_after=80.0)
    life.run()
    life.pass_time(100)
    life.checkpoint("1-1", "orphaned")
    life.fenced(ev.HandedOver, number="1-1", why="orphaned")
    assert (life.state(), life.record.protected) == (State.MIGRATING, False)
    assert life.record.incarnations[0].end_reason == "orphaned"
    assert "no engine looks after it" in life.record.recent[-1].detail
    done = life.settle()
    assert [x for x in done if isinstance(x, RequestLaunch)] == [RequestLaunch((), "the instance is gone")]
    life.run(life.spares()[0], restore="1-1")
    assert numbers(life.record) == (1, 0, [0, 0], [0, 0])


def test_who_looks_after_a_worker_says_so_now_and_then_and_not_in_its_history() -> None:
    life = Life(orphan_after=80.0)
    life.run()
    heard = []
    for _ in range(100):
        life.pass_time(1)
        before = life.record.events
        if any(isinstance(x, Record) and isinstance(x.event, ev.EngineHeard) for x in life.settle()):
            heard.append(life.now)
            assert (life.record.engine_heard_at, life.record.events) == (life.now, before)
    assert len(heard) == 10
    life.fenced(ev.Finished, exit_code=0)
    life.pass_time(100)
    assert not any(isinstance(x, Record) and isinstance(x.event, ev.EngineHeard) for x in life.settle())


def test_the_sums_are_in_status_and_report() -> None:
    life = Life()
    life.run()
    life.pass_time(60)
    life.checkpoint("1-1")
    life.pass_time(25)
    life.fenced(ev.Yielded)
    life.pass_time(5)
    life.run(restore="1-1")
    life.pass_time(10)
    now = status(life.record, life.now)
    assert (now.migrations, now.cold_starts, now.lost_seconds, now.away_seconds) == (1, 0, 25, 5)
    assert now.last_checkpoint is not None
    assert (now.last_checkpoint.number, now.last_checkpoint.age_seconds) == ("1-1", 40)
    whole = report(life.record, [], life.now)
    assert [x.lost_seconds for x in whole.incarnations] == [25, 0]
    assert whole.timeline[-1].event == "restored"


# Engines never see a worker go back -----------------------------------------------------------------------------------


def test_a_cold_start_of_a_worker_that_ran_is_migrating_never_starting() -> None:
    life = Life()
    life.take()
    assert life.state() is State.STARTING
    life.fenced(ev.Started)
    life.lose()
    life.take()
    assert life.state() is State.MIGRATING
    life.fenced(ev.Started, why="there is no checkpoint")
    assert life.state() is State.RUNNING
    assert life.record.cold_starts == 1


# Checkpoints ----------------------------------------------------------------------------------------------------------


def test_a_restore_counts_until_the_worker_has_come_on() -> None:
    life = Life()
    life.run()
    life.checkpoint("1-1")
    life.lose()
    life.run(restore="1-1")
    assert life.record.checkpoints[0].failed_restores == 1
    life.pass_time(PROGRESS_SECONDS - 1)
    life.renew()
    assert life.record.checkpoints[0].failed_restores == 1
    life.pass_time(1)
    life.renew()
    assert life.record.checkpoints[0].failed_restores == 0


def test_a_new_checkpoint_shows_that_the_restore_was_good() -> None:
    life = Life()
    life.run()
    life.checkpoint("1-1")
    life.lose()
    life.run(restore="1-1")
    life.checkpoint("2-1")
    assert [c.failed_restores for c in life.record.checkpoints] == [0, 0]


def test_a_restore_that_took_its_instance_along_counts() -> None:
    life = Life()
    life.run()
    life.checkpoint("1-1")
    life.lose()
    life.take(restore="1-1")
    life.lose()
    assert life.record.checkpoints[0].failed_restores == 1


def test_a_restore_cut_off_by_a_notice_is_not_the_checkpoints_fault() -> None:
    life = Life()
    life.run()
    life.checkpoint("1-1")
    life.lose()
    life.take(restore="1-1")
    life.fenced(ev.Yielded)
    assert life.record.checkpoints[0].failed_restores == 0


def test_a_restore_that_failed_and_said_so_counts_once() -> None:
    life = Life()
    life.run()
    life.checkpoint("1-1")
    life.lose()
    life.take(restore="1-1")
    life.fenced(ev.RestoreFailed, number="1-1", detail="criu")
    life.fenced(ev.LeaseReleased, end_reason="failed")
    assert life.record.checkpoints[0].failed_restores == 1
    assert life.record.state is State.MIGRATING


def lost_with(*numbers: str) -> Life:
    """A worker that was lost after these checkpoints."""
    life = Life()
    life.run()
    for number in numbers:
        life.checkpoint(number)
    life.lose()
    return life


def finds_damage(life: Life, *numbers: str, detail: str = "a chunk is missing") -> None:
    """One more instance reads these checkpoints, finds all of them damaged, and ends."""
    life.take(restore=numbers[0])
    for number in numbers:
        life.fenced(ev.RestoreFailed, number=number, detail=detail, unusable=True)
    life.fenced(ev.LeaseReleased, end_reason="failed")


def test_what_one_instance_finds_damaged_is_given_up_when_a_second_one_does() -> None:
    life = lost_with("1-1")
    finds_damage(life, "1-1", "1-1")
    entry = life.record.checkpoints[0]
    assert (entry.unusable, entry.failed_restores, entry.sound) == (None, 0, False)
    assert entry.damage_seen is not None
    assert (entry.damage_seen.incarnation, entry.damage_seen.instance) == (2, "i-l2")
    finds_damage(life, "1-1", detail="it is missing here too")
    assert life.record.checkpoints[0].unusable == "it is missing here too"


def test_a_damaged_checkpoint_says_why_for_ever() -> None:
    life = lost_with("1-1")
    for detail in ("first", "second", "third"):
        finds_damage(life, "1-1", detail=detail)
    assert life.record.checkpoints[0].unusable == "second"


def test_the_same_instance_has_no_second_word_but_comes_to_an_end() -> None:
    life = lost_with("1-1")
    for _ in range(3):
        launch = life.launch()
        life.tell(
            ev.LeaseTaken,
            incarnation=len(life.record.incarnations) + 1,
            holder=f"h{len(life.record.incarnations) + 1}",
            launch=launch,
            instance="always-this",
            restore_from="1-1",
        )
        life.fenced(ev.RestoreFailed, number="1-1", detail="a chunk is missing", unusable=True)
        life.fenced(ev.LeaseReleased, end_reason="failed")
    entry = life.record.checkpoints[0]
    assert (entry.unusable, entry.failed_restores) == (None, 2)


def test_a_restore_elsewhere_shows_that_an_instance_read_badly_and_nothing_that_it_said_alone_stands() -> (
    None
):
    life = lost_with("1-1", "1-2", "1-3")
    finds_damage(life, "1-3", "1-2", "1-1")
    finds_damage(life, "1-3")
    life.run(restore="1-2")
    assert [(x.number, x.sound) for x in life.record.checkpoints] == [
        ("1-1", True),
        ("1-2", True),
        ("1-3", False),
    ]
    assert life.record.checkpoints[2].unusable is not None


def test_a_restore_of_what_nobody_doubted_says_nothing_of_the_others() -> None:
    life = lost_with("1-1", "1-2")
    life.take(restore="1-2")
    life.fenced(ev.RestoreFailed, number="1-2", detail="a chunk is missing", unusable=True)
    life.fenced(ev.Restored, number="1-1")
    assert [x.sound for x in life.record.checkpoints] == [True, False]


def test_the_last_checkpoint_that_is_told_of_is_a_sound_one_if_there_is_any() -> None:
    life = lost_with("1-1", "1-2")
    assert life.record.last_checkpoint == life.record.checkpoints[1]
    finds_damage(life, "1-2")
    assert life.record.last_checkpoint == life.record.checkpoints[0]
    finds_damage(life, "1-1")
    assert life.record.last_checkpoint == life.record.checkpoints[1]
    finds_damage(life, "1-2", "1-1")
    assert life.record.last_checkpoint is None


def test_a_commit_proves_that_the_worker_runs_although_its_agent_died_before_saying_so() -> None:
    life = Life()
    life.run()
    life.checkpoint("1-1")
    life.lose()
    life.take(restore="1-1")
    life.checkpoint("2-1")
    assert life.record.state is State.RUNNING
    assert life.record.migrations == 1
    assert life.record.incarnations[-1].restored_from == "1-1"


def test_a_failed_checkpoint_answers_the_request_and_lets_the_worker_run() -> None:
    life = Life()
    life.run()
    life.tell(ev.CheckpointRequested)
    life.fenced(ev.CheckpointStarted, number="1-1", cause="requested")
    life.fenced(ev.CheckpointFailed, number="1-1", detail="no space", answered=1)
    assert life.record.state is State.RUNNING
    assert life.record.checkpoint_answered == 1
    assert life.record.checkpoints == ()


def test_a_checkpoint_is_committed_once() -> None:
    life = Life()
    life.run()
    life.checkpoint("1-1")
    before = life.record.checkpoints
    life.checkpoint("1-1")
    assert life.record.checkpoints == before


# Notices --------------------------------------------------------------------------------------------------------------


def test_a_rebalance_does_not_hide_an_interruption() -> None:
    life = Life()
    life.run()
    life.notice(30, "interruption")
    life.notice(None, "rebalance")
    assert life.record.notice is not None
    assert life.record.notice.id == "interruption"
    assert life.last() == "notice_received"


def test_an_interruption_takes_the_place_of_a_rebalance() -> None:
    life = Life()
    life.run()
    life.notice(None, "same")
    life.notice(30, "same")
    assert life.record.notice is not None
    assert life.record.notice.seconds_left == 30


def test_the_same_notice_again_is_one_notice() -> None:
    life = Life()
    life.run()
    life.notice(30)
    before = life.record
    life.notice(20)
    assert life.record is before


def test_a_withdrawn_notice_is_gone_and_another_ones_withdrawal_is_not_ours() -> None:
    life = Life()
    life.run()
    life.notice(30)
    before = life.record
    life.fenced(ev.NoticeWithdrawn, id="other")
    assert life.record is before
    life.fenced(ev.NoticeWithdrawn, id="n")
    assert life.record.notice is None


def test_a_notice_is_about_one_instance() -> None:
    life = Life()
    life.run()
    life.notice(30)
    life.hand_over("1-1")
    assert life.record.notice is None


# The record -----------------------------------------------------------------------------------------------------------


def test_the_history_in_the_record_is_bounded_and_numbered_without_gaps() -> None:
    life = Life()
    life.run()
    for n in range(3 * RECENT_EVENTS):
        life.tell(ev.Noted, event="preflight", detail=str(n))
    numbers_seen = [x.number for x in life.record.recent]
    assert numbers_seen == list(range(life.record.events - RECENT_EVENTS + 1, life.record.events + 1))


def test_renewals_leave_no_line_in_the_history() -> None:
    life = Life()
    life.run()
    before = life.record
    life.renew()
    assert life.record.events == before.events
    assert life.record.lease is not None
    assert life.record.lease.renewal == 1


def test_every_kind_of_event_has_a_rule_and_a_line_of_history() -> None:
    life = Life()
    life.run()
    life.checkpoint("1-1")
    for event in fenced_events(1, "h1"):
        if not isinstance(event, ev.LeaseRenewed):
            assert "\n" not in apply_line(life, event)


def apply_line(life: Life, event: ev.Event) -> str:
    from savedworker.model.transitions import summary

    return summary(1, 1, event).detail


def test_launches_from_which_nothing_came_are_forgotten_when_there_are_many() -> None:
    life = Life()
    life.run()
    life.lose()
    life.refuse = "capacity"
    first = len(life.record.launches)
    for _ in range(5 * attempts.LAUNCHES_KEPT):
        life.launch()
        life.pass_time(120)
    assert len(life.record.launches) <= attempts.LAUNCHES_KEPT
    row = attempts.fruitless(life.record)
    assert len(row) >= attempts.ROW_KEPT
    assert row[-1].id == f"l{first + 1}"  # since when it has been waiting
    assert row[0].id == f"l{life.launches}"
    assert life.record.launches[0].outcome == "used"


def test_hundreds_of_migrations_are_kept_in_a_record_of_bounded_size() -> None:
    life = Life()
    life.run()
    for n in range(1, 301):
        life.pass_time(300)
        life.checkpoint(f"{n}-1", "notice", dropped=tuple(c.number for c in life.record.checkpoints))
        life.launch()
        life.tell(ev.LaunchEnded, launch=f"l{life.launches}", outcome="surplus")
        life.fenced(ev.HandedOver, number=f"{n}-1")
        old = life.record.incarnations[-1].launch
        life.tell(ev.LaunchEnded, launch=old, outcome="gone")
        life.run(restore=f"{n}-1")
    assert life.record.migrations == 300
    assert len(life.record.incarnations) == 301
    assert len(life.record.model_dump_json()) < 400_000
    assert {x.outcome for x in life.record.launches} == {"used", None}


def test_a_record_comes_back_from_json_as_it_was() -> None:
    life = in_state("restoring")
    life.notice(30)
    again = WorkerRecord.model_validate_json(life.record.model_dump_json())
    assert again == life.record


@pytest.mark.parametrize("kind", ev.Event.__args__[0].__args__)  # type: ignore[attr-defined]
def test_no_event_can_be_applied_without_a_rule(kind: type) -> None:
    from savedworker.model.transitions import _RULES

    assert kind in _RULES


def test_defaults_are_consistent() -> None:
    assert defaults.LAUNCH_RETRY <= defaults.LAUNCH_RETRY_MAX
    assert timedelta(seconds=defaults.LAUNCH_PATIENCE) < timedelta(seconds=defaults.BOOT_LIMIT)
