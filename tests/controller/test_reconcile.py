"""reconcile: idempotent, anywhere, any number of times at once; whatever fails in between, nothing is lost or made twice."""

from __future__ import annotations

import threading
from contextlib import suppress
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from savedworker.fleet.base import NoCapacity
from savedworker.model import defaults
from savedworker.model import events as ev
from savedworker.model.decisions import InstanceView, settled
from savedworker.model.errors import NotFound, Refused, Temporary, Unreachable
from savedworker.model.record import Reason, State
from tests.controller.conftest import World


class Killed(BaseException):
    """The controller's process dies here."""


def test_an_instance_that_was_waited_for_long_has_the_whole_time_to_boot(world: World) -> None:
    """It is counted from the moment at which it runs, also when its fleet does not answer for a while."""
    world.submit(placement={"wait_for_capacity": 6 * 3600.0})
    world.reconcile()
    (launch,) = world.record.launches
    world.fleet.instances[launch.id] = InstanceView("pending", detail="RUNNABLE")
    for _ in range(20):
        world.pass_time(600)
        world.reconcile()
    world.fleet.instances[launch.id] = InstanceView("running")
    world.reconcile()
    world.pass_time(defaults.BOOT_LIMIT / 2)
    world.fleet.trouble["describe"] = [Temporary("AWS asks to slow down")]
    world.reconcile()
    world.fleet.trouble.clear()
    world.pass_time(defaults.BOOT_LIMIT / 2 - 1)
    assert [(x.id, x.state) for x in world.reconcile().launches] == [(launch.id, "accepted")]
    world.pass_time(1)
    first, *_ = world.reconcile().launches
    assert (first.outcome, first.detail) == ("failed", "its agent did not begin within 15m00s")


def test_a_notice_that_comes_while_a_spare_is_about_to_be_ended_keeps_it(world: World) -> None:
    """The controller has read a record in which nothing needs it any more."""
    world.submit()
    first = world.run()
    world.fenced(ev.NoticeReceived, id="r", source="ec2", seconds_left=None)
    world.reconcile()
    spare = world.record.launches[1].id
    for _ in range(int(world.spec.placement.spare_for or 0) // 10):
        world.reconcile()
        world.pass_time(10)
        world.fenced(ev.LeaseRenewed)
    swap = type(world.documents).swap_event

    def notice_first(self: Any, held: Any, event: ev.Event) -> Any:
        if isinstance(event, ev.LaunchEnding):
            world.fenced(ev.NoticeReceived, id="n", source="ec2", seconds_left=120.0)
        return swap(self, held, event)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(type(world.documents), "swap_event", notice_first)
        world.reconcile()
    world.reconcile()
    assert [(x.id, x.state) for x in world.record.launches] == [(first, "accepted"), (spare, "accepted")]
    assert len(world.fleet.made()) == 2
    world.checkpoint("1-1", "notice")
    world.fenced(ev.HandedOver, number="1-1")
    world.take(spare, "1-1")
    world.fenced(ev.Restored, number="1-1")
    world.reconcile()
    assert world.fleet.running() == [spare]


# Launching ------------------------------------------------------------------------------------------------------------


def test_a_launch_is_in_the_record_before_the_fleet_is_called(world: World) -> None:
    world.submit()
    seen: list[Any] = []
    world.fleet.during = lambda: seen.extend(world.record.launches)
    record = world.reconcile()
    assert [(x.id, x.state) for x in seen] == [(record.launches[0].id, "requested")]
    assert record.launches[0].state == "accepted"
    assert record.launches[0].zone == "zone-a"


def test_reconciling_again_changes_nothing(world: World) -> None:
    world.submit()
    first = world.reconcile()
    assert [world.reconcile() for _ in range(5)] == [first] * 5
    assert len(world.fleet.made()) == 1


def test_a_controller_that_dies_before_the_call_leaves_a_launch_that_the_next_one_makes(world: World) -> None:
    world.submit()
    world.fleet.trouble["launch"] = [Killed()]  # type: ignore[list-item]
    with pytest.raises(Killed):
        world.reconcile()
    successor = world.another_controller()
    successor.reconcile("w")
    assert len(world.fleet.made()) == 1  # the one before may be in the middle of its call
    world.pass_time(defaults.LAUNCH_RETRY)
    record = successor.reconcile("w")
    assert world.fleet.made() == [record.launches[0].id] * 2
    assert len(record.launches) == 1
    assert len(world.fleet.running()) == 1


def test_a_controller_that_dies_after_the_call_leaves_an_instance_that_the_next_one_knows(
    world: World,
) -> None:
    world.submit()

    def die() -> None:
        launch = world.record.launches[0].id
        world.fleet.instances[launch] = InstanceView("running")
        raise Killed

    world.fleet.during = die
    with pytest.raises(Killed):
        world.reconcile()
    successor = world.another_controller()
    for _ in range(3):
        world.pass_time(10)
        successor.reconcile("w")
    record = world.record
    assert len(record.launches) == 1
    assert len(world.fleet.running()) == 1
    world.take(record.launches[0].id)
    assert world.record.state is State.STARTING


def test_of_many_controllers_one_launches(world: World) -> None:
    world.submit()
    ready = threading.Barrier(6)
    failed: list[BaseException] = []

    def work() -> None:
        controller = world.another_controller()
        ready.wait()
        try:
            for _ in range(3):
                controller.reconcile("w")
        except BaseException as error:
            failed.append(error)

    threads = [threading.Thread(target=work) for _ in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failed == []
    assert len(world.record.launches) == 1
    assert len(world.fleet.running()) == 1


def test_a_controller_with_an_old_record_does_not_launch_a_second_time(world: World) -> None:
    world.submit()
    other = world.another_controller()
    documents = world.documents
    load = type(documents).load_record
    first: list[Any] = []

    def slow(self: Any) -> Any:
        held = load(self)
        if not first:
            first.append(held)
            other.reconcile("w")
        return held

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(type(documents), "load_record", slow)
        world.reconcile()
    assert len(world.record.launches) == 1
    assert len(set(world.fleet.made())) == 1


def test_two_controllers_that_end_the_old_instance_at_once_make_one_replacement(world: World) -> None:
    world.submit()
    world.run()
    world.checkpoint("1-1", "notice")
    world.fenced(ev.HandedOver, number="1-1")
    other = world.another_controller()
    world.fleet.during_end = lambda: other.reconcile("w")
    world.reconcile()
    assert len(world.record.launches) == 2
    assert len(set(world.fleet.made())) == 2
    assert len(world.fleet.running()) == 1


# What the fleet answers -----------------------------------------------------------------------------------------------


def test_temporary_trouble_at_the_launch_loses_nothing(world: World) -> None:
    world.submit()
    world.fleet.trouble["launch"] = [Temporary("throttled")] * 3
    for _ in range(4):
        record = world.reconcile()
        world.pass_time(defaults.LAUNCH_RETRY)
    record = world.reconcile()
    assert set(world.fleet.made()) == {record.launches[0].id}
    assert (len(record.launches), record.launches[0].state) == (1, "accepted")


def test_no_capacity_is_the_launchs_end_and_is_tried_again_later(world: World) -> None:
    world.submit()
    world.fleet.trouble["launch"] = [NoCapacity("no spot in zone-a", "wait")]
    record = world.reconcile()
    assert [(x.state, x.outcome) for x in record.launches] == [("ended", "capacity")]
    assert "no spot in zone-a" in record.launches[0].detail
    assert world.reconcile() == record
    world.pass_time(defaults.LAUNCH_RETRY)
    assert len(world.reconcile().launches) == 2
    assert len(world.fleet.running()) == 1


def test_no_capacity_for_too_long_is_the_workers_end(world: World) -> None:
    world.submit(placement={"wait_for_capacity": 60})
    world.fleet.trouble["launch"] = [NoCapacity("none left")] * 100
    for _ in range(100):
        world.reconcile()
        world.pass_time(1)
    record = world.record
    assert (record.state, record.reason) == (State.FAILED, Reason.NO_CAPACITY)
    assert "none left" in record.detail
    assert settled(record)


def test_a_refused_launch_is_not_repeated_for_ever(world: World) -> None:
    world.submit()
    world.fleet.trouble["launch"] = [Refused("no such subnet", "correct it")] * 100
    for _ in range(100):
        world.reconcile()
        world.pass_time(10)
    record = world.record
    assert (record.state, record.reason) == (State.FAILED, Reason.INTERNAL)
    assert "no such subnet" in record.detail
    assert len(world.fleet.made()) == defaults.BOOTS_WITHOUT_LEASE


def test_a_fleet_that_does_not_answer_is_not_a_fleet_without_instances(world: World) -> None:
    world.submit()
    world.run()
    before = world.record
    world.fleet.trouble["describe"] = [Temporary("api is down")] * 5
    for _ in range(5):
        world.fenced(ev.LeaseRenewed)
        world.pass_time(5)
        world.reconcile()
    assert world.record.state is State.RUNNING
    assert world.record.launches == before.launches
    assert len(world.fleet.made()) == 1


def test_an_unreachable_store_is_said_and_changes_nothing(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    world.submit()
    monkeypatch.setattr(
        type(world.documents),
        "swap_record",
        lambda *_: (_ for _ in ()).throw(Unreachable("the store is away")),
    )
    with pytest.raises(Unreachable):
        world.reconcile()
    assert world.fleet.made() == []


def test_a_worker_that_is_not_there_is_not_found(world: World) -> None:
    world.store.ensure()
    with pytest.raises(NotFound):
        world.controller.reconcile("nobody")


# Losing and ending ----------------------------------------------------------------------------------------------------


def test_an_instance_that_is_gone_is_replaced_within_one_call(world: World) -> None:
    world.submit()
    launch = world.run()
    world.checkpoint("1-1")
    world.fleet.instances[launch] = InstanceView("ended", detail="reclaimed")
    record = world.reconcile()
    assert record.state is State.MIGRATING
    assert record.incarnations[0].end_reason == "no_notice"
    assert [x.outcome for x in record.launches] == ["used", None]
    assert len(world.fleet.running()) == 1
    assert record.launches[1].avoid == (record.incarnations[0].zone or record.incarnations[0].instance,)


def test_a_lease_that_falls_silent_is_replaced_by_the_observers_own_clock(world: World) -> None:
    world.submit()
    world.run()
    world.reconcile()
    world.pass_time(11)
    assert len(world.reconcile().launches) == 1
    world.pass_time(1)
    assert len(world.reconcile().launches) == 2
    newcomer = world.another_controller()
    world.pass_time(100)
    assert newcomer.reconcile("w").lease_held  # it has watched for no time at all


def test_a_lease_of_a_dead_agent_ends_although_its_instance_runs_on(world: World) -> None:
    world.submit()
    launch = world.run()
    world.reconcile()
    world.pass_time(23)
    record = world.reconcile()
    assert record.state is State.MIGRATING
    assert world.fleet.instances[launch].state == "ended"
    assert len(world.fleet.running()) == 1


def test_after_the_hand_over_the_old_instance_goes_and_the_waiting_one_stays(world: World) -> None:
    world.submit()
    old = world.run()
    world.fenced(ev.NoticeReceived, id="n", source="spot", seconds_left=30)
    world.reconcile()
    assert len(world.fleet.running()) == 2
    world.checkpoint("1-1", "notice")
    world.fenced(ev.HandedOver, number="1-1")
    record = world.reconcile()
    assert old not in world.fleet.running()
    assert len(world.fleet.running()) == 1
    assert len(record.launches) == 2
    world.run("1-1")
    assert world.record.migrations == 1
    assert len(world.fleet.made()) == 2


def test_a_launch_that_is_not_wanted_is_ended_in_the_fleet_and_then_in_the_record(world: World) -> None:
    world.submit()
    world.run()
    world.fenced(ev.NoticeReceived, id="n", source="spot", seconds_left=30)
    spare = world.reconcile().launches[1].id
    world.fenced(ev.NoticeWithdrawn, id="n")
    world.fleet.trouble["terminate"] = [Temporary("api is down")]
    record = world.reconcile()
    assert record.launches[1].state == "ending"
    assert spare in world.fleet.running()
    record = world.reconcile()
    assert (record.launches[1].state, record.launches[1].outcome) == ("ended", "surplus")
    assert spare not in world.fleet.running()
    assert record.state is State.RUNNING


def test_a_controller_that_dies_while_it_ends_an_instance_leaves_it_to_the_next(world: World) -> None:
    world.submit()
    world.run()
    world.fenced(ev.NoticeReceived, id="n", source="spot", seconds_left=30)
    world.reconcile()
    world.fenced(ev.NoticeWithdrawn, id="n")
    world.fleet.trouble["terminate"] = [Killed()]  # type: ignore[list-item]
    with pytest.raises(Killed):
        world.reconcile()
    world.another_controller().reconcile("w")
    assert len(world.fleet.running()) == 1


def test_a_replacement_that_wins_the_lease_while_it_is_being_dropped_is_not_ended(world: World) -> None:
    world.submit()
    world.run()
    world.fenced(ev.NoticeReceived, id="n", source="spot", seconds_left=30)
    spare = world.reconcile().launches[1].id
    world.fenced(ev.NoticeWithdrawn, id="n")
    documents = world.documents
    load = type(documents).load_record
    first: list[Any] = []

    def slow(self: Any) -> Any:
        held = load(self)
        if not first:
            first.append(held)
            world.fenced(ev.Yielded)
            world.take(spare)
        return held

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(type(documents), "load_record", slow)
        record = world.reconcile()
    assert spare in world.fleet.running()
    assert record.lease is not None
    assert (record.lease.launch, record.lease.released) == (spare, False)


# Cancel ---------------------------------------------------------------------------------------------------------------


def test_a_worker_cancelled_before_its_first_launch_never_gets_an_instance(world: World) -> None:
    world.submit()
    world.tell(ev.CancelRequested, by="ann")
    assert settled(world.reconcile())
    assert world.fleet.made() == []


def test_a_worker_cancelled_while_its_instance_boots_leaves_nothing(world: World) -> None:
    world.submit()
    world.reconcile()
    world.tell(ev.CancelRequested, by="ann")
    assert settled(world.reconcile())
    assert world.fleet.running() == []


def test_a_worker_cancelled_while_the_fleet_is_called_leaves_nothing(world: World) -> None:
    world.submit()
    other = world.another_controller()

    def cancel() -> None:
        world.tell(ev.CancelRequested, by="ann")
        assert not settled(other.reconcile("w"))

    world.fleet.during = cancel
    record = world.reconcile()
    for _ in range(3):
        record = other.reconcile("w")
    assert settled(record)
    assert world.fleet.running() == []


def test_a_worker_cancelled_after_a_call_that_never_was_settles_in_the_end(world: World) -> None:
    world.submit()
    world.fleet.trouble["launch"] = [Killed()]  # type: ignore[list-item]
    with pytest.raises(Killed):
        world.reconcile()
    world.tell(ev.CancelRequested, by="ann")
    successor = world.another_controller()
    successor.reconcile("w")
    world.pass_time(defaults.LAUNCH_PATIENCE)
    assert settled(successor.reconcile("w"))


def test_a_running_worker_that_is_cancelled_has_time_and_then_none(world: World) -> None:
    world.submit()
    launch = world.run()
    world.tell(ev.CancelRequested, by="ann")
    assert world.reconcile().state is State.CANCELLED
    assert launch in world.fleet.running()
    world.pass_time(defaults.STOP_GRACE + 1)
    record = world.reconcile()
    assert settled(record)
    assert world.fleet.running() == []
    assert record.incarnations[0].end_reason == "cancelled"


def test_a_worker_that_lets_go_is_ended_at_once(world: World) -> None:
    world.submit()
    world.run()
    world.tell(ev.CancelRequested, by="ann")
    world.fenced(ev.LeaseReleased, end_reason="cancelled")
    assert settled(world.reconcile())
    assert world.fleet.running() == []


def test_a_migrating_worker_that_is_cancelled_leaves_nothing(world: World) -> None:
    world.submit()
    launch = world.run()
    world.fleet.instances[launch] = InstanceView("ended")
    world.reconcile()
    world.tell(ev.CancelRequested, by="ann")
    assert settled(world.reconcile())
    assert world.fleet.running() == []


def test_reconciling_a_settled_worker_does_nothing_at_all(world: World) -> None:
    world.submit()
    world.run()
    world.fenced(ev.Finished, exit_code=0)
    world.fenced(ev.LeaseReleased, end_reason="finished")
    record = world.reconcile()
    assert (record.state, settled(record)) == (State.SUCCEEDED, True)
    calls = list(world.fleet.calls)
    world.pass_time(1e6)
    assert world.another_controller().reconcile("w") == record
    assert world.reconcile() == record
    assert world.fleet.calls == calls


def test_what_happened_is_in_the_store_event_by_event(world: World) -> None:
    world.submit()
    world.run()
    world.fenced(ev.Finished, exit_code=0)
    kinds = [x.event.kind for x in world.documents.events()]
    assert kinds == ["launch_requested", "launch_accepted", "lease_taken", "started", "finished"]
    assert [x.n for x in world.documents.events()] == list(range(1, 6))


# Damage --------------------------------------------------------------------------------------------------------------


def reads_damage(world: World, *numbers: str) -> str:
    """The next instance finds these checkpoints damaged and ends. Returns its launch."""
    world.reconcile()
    had = {x.launch for x in world.record.incarnations}
    launch = next(x.id for x in world.record.launches if x.state == "accepted" and x.id not in had)
    world.take(launch, numbers[0])
    for number in numbers:
        world.fenced(ev.RestoreFailed, number=number, detail="altered", unusable=True)
    world.fenced(ev.LeaseReleased, end_reason="failed")
    world.fleet.instances[launch] = InstanceView("ended")
    return launch


@settings(
    max_examples=20,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
@given(
    policy=st.sampled_from(["cold_start", "fail"]),
    dies=st.sampled_from([None, "launch", "terminate"]),
    whole_at=st.sampled_from([1, 2, None]),
)
def test_damage_costs_one_more_instance_at_most_and_the_first_word_ends_no_worker(
    tmp_path_factory: pytest.TempPathFactory, policy: str, dies: str | None, whole_at: int | None
) -> None:
    """Also when the controller dies in the middle. ``whole_at``: which instance reads the newest checkpoint whole."""
    world = World(tmp_path_factory.mktemp("store") / "store")
    world.submit(checkpoint={"when_unrestorable": policy})
    first = world.run()
    world.checkpoint("1-1")
    world.checkpoint("1-2")
    world.fleet.instances[first] = InstanceView("ended")
    for n in (1, 2):
        world.reconcile()
        if whole_at == n:
            world.run("1-2")
            break
        before = len(world.record.launches)
        reads_damage(world, "1-2", "1-1")
        if dies:
            world.fleet.trouble[dies] = [Killed()]  # type: ignore[list-item]
            with suppress(Killed):
                world.reconcile()
            world.fleet.trouble.clear()
            world.controller = world.another_controller()
        world.pass_time(defaults.LAUNCH_RETRY)
        record = world.reconcile()
        world.pass_time(defaults.LAUNCH_RETRY)
        record = world.reconcile()
        if n == 1:
            assert record.state is State.MIGRATING
            assert len(record.launches) == before + 1
            assert f"i-{record.incarnations[-1].launch}" in record.launches[-1].avoid
    record = world.reconcile()
    if whole_at:
        assert (record.state, record.cold_starts) == (State.RUNNING, 0)
        assert record.incarnations[-1].restored_from == "1-2"
    elif policy == "fail":
        assert (record.state, record.reason) == (State.FAILED, Reason.CRASH_LOOP)
        assert record.detail == "no checkpoint can be restored (newest 1-2: altered)"
    else:
        world.run()
        assert (world.record.cold_starts, world.record.migrations) == (1, 0)
