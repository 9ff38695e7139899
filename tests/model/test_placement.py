"""Where the next launch goes: what was reclaimed is left, what is cheap and quick goes first, on-demand by stated rules."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from savedworker.model import defaults
from savedworker.model import events as ev
from savedworker.model.decisions import InstanceView, RequestLaunch, Terminate, decide, settled
from savedworker.model.fingerprint import Fingerprint
from savedworker.model.placement import (
    Choice,
    Pool,
    best_pools,
    choose,
    cpu_probably_fits,
    fit,
    leftover,
    pool_name,
    reclaimed_places,
)
from savedworker.model.record import Reason, State
from savedworker.model.spec import PlacementPolicy
from tests.model.life import Life

QUEUES = (Choice("spot-a"), Choice("spot-b"), Choice("demand", "on-demand"))


class Placed(Life):
    """A life on a fleet with choices: ``full`` are those that have no instance, ``slow`` those whose launches stay pending."""

    def __init__(self, choices: tuple[Choice, ...] = QUEUES, **spec: Any) -> None:
        super().__init__(**spec)
        self.offered = choices
        self.full: set[str] = set()
        self.slow: set[str] = set()

    def act(self, action: Any) -> None:
        if not isinstance(action, RequestLaunch):
            super().act(action)
            return
        self.launches += 1
        launch = f"l{self.launches}"
        self.tell(
            ev.LaunchRequested,
            launch=launch,
            avoid=action.avoid,
            choice=action.choice,
            spare_of=action.spare_of,
            detail=action.why,
        )
        if self.record.launch(launch) is None:
            return
        if action.choice in self.full:
            self.tell(ev.LaunchEnded, launch=launch, outcome="capacity", detail="none left")
            return
        state = "pending" if action.choice in self.slow else "running"
        detail = "RUNNABLE: CAPACITY" if action.choice in self.slow else ""
        self.fleet[launch] = InstanceView(state, detail=detail)  # type: ignore[arg-type]
        self.tell(ev.LaunchAccepted, launch=launch, instance=f"i-{launch}")

    def newest(self) -> str:
        return self.record.launches[-1].id

    def choice_now(self) -> str | None:
        return self.record.launches[-1].choice

    def begin(self, zone: str | None = None, kind: str | None = None) -> None:
        """The newest launch's agent executes the worker."""
        number = len(self.record.incarnations) + 1
        self.tell(
            ev.LeaseTaken,
            incarnation=number,
            holder=f"h{number}",
            launch=self.newest(),
            instance=f"i-{self.newest()}",
            zone=zone,
            instance_type=kind,
            term=self.spec.lease_term,
        )
        self.fenced(ev.Started)


def on(*places: tuple[str | None, str | None], **spec: Any) -> Placed:
    """A worker that was reclaimed in each of these zones and types, one after the other."""
    life = Placed(**spec)
    for zone, kind in places:
        life.settle()
        life.begin(zone, kind)
        life.lose()
    return life


# Places ---------------------------------------------------------------------------------------------------------------


def test_zone_type_and_pool_are_avoided_for_half_an_hour_by_default():
    """C56."""
    life = on(("eu-a", "m5.large"))
    places = ("eu-a", "m5.large", "m5.large@eu-a")
    avoid_for = life.spec.placement.avoid_reclaimed
    assert avoid_for == 1800
    assert reclaimed_places(life.record, life.now, avoid_for) == places
    (asked,) = [x for x in life.settle() if isinstance(x, RequestLaunch)]
    assert asked.avoid == places
    assert reclaimed_places(life.record, life.now + timedelta(seconds=1799), avoid_for) == places
    assert reclaimed_places(life.record, life.now + timedelta(seconds=1800), avoid_for) == ()


def test_the_place_that_a_notice_is_about_is_avoided_by_the_launch_that_it_causes():
    """C56: the replacement is launched before anything was lost."""
    life = on()
    life.settle()
    life.begin("eu-a", "m5.large")
    assert reclaimed_places(life.record, life.now, 1800) == ()
    life.fenced(ev.NoticeReceived, id="r", source="ec2", seconds_left=None)
    (spare,) = [x for x in life.settle() if isinstance(x, RequestLaunch)]  # it takes nothing yet, but it may
    assert spare.avoid == ("eu-a", "m5.large", "m5.large@eu-a")
    assert (life.record.launches[0].choice, spare.choice, spare.spare_of) == ("spot-a", "spot-b", "r")
    assert "leaving spot-a was recommended" in spare.why


def test_a_spare_that_waits_too_long_in_a_queue_or_is_refused_there_goes_to_the_next_one():
    life = Placed((Choice("a"), Choice("b"), Choice("c"), Choice("demand", "on-demand")))
    life.settle()
    life.begin("eu-a", "m5.large")
    life.slow = {"b"}
    life.fenced(ev.NoticeReceived, id="r", source="ec2", seconds_left=None)
    life.settle()
    assert life.choice_now() == "b"
    life.pass_time(life.spec.placement.wait_per_choice)
    life.settle()
    assert life.record.launches[1].outcome == "capacity"
    assert "c is next" in life.record.launches[1].detail
    assert [x.choice for x in life.record.launches] == ["a", "b", "c"]
    # What the spares found says nothing later on.
    life.fenced(ev.NoticeWithdrawn, id="r")
    life.settle()
    life.lose()
    life.settle()
    assert life.choice_now() == "b"


@pytest.mark.parametrize("left", [120.0, None])
def test_an_interruption_counts_as_a_loss_and_a_recommendation_does_not(left: float | None):
    life = on(placement={"on_demand_after_losses": 1})
    life.settle()
    life.begin("eu-a", "m5.large")
    life.fenced(ev.NoticeReceived, id="n", source="ec2", seconds_left=left)
    (asked,) = [x for x in life.settle() if isinstance(x, RequestLaunch)]
    assert asked.avoid == ("eu-a", "m5.large", "m5.large@eu-a")
    assert asked.choice == ("demand" if left else "spot-b")


def test_every_refusal_halves_the_time_for_which_a_place_is_avoided():
    life = on(("eu-a", "m5.large"))
    life.full = {"spot-a", "spot-b", "demand"}
    life.settle()
    life.pass_time(10)
    life.settle()
    refused = sum(x.outcome == "capacity" for x in life.record.launches)
    assert refused >= 2
    left = 1800 / 2**refused
    lost_at = life.record.incarnations[0].ended_at
    assert lost_at is not None
    assert reclaimed_places(life.record, lost_at + timedelta(seconds=left - 1), 1800)
    assert reclaimed_places(life.record, lost_at + timedelta(seconds=left), 1800) == ()


def test_the_first_restart_goes_to_another_queue_by_default():
    """C56, where a queue is the place: three pools, the worker is reclaimed in the first."""
    life = Placed((Choice("a"), Choice("b"), Choice("c")))
    life.settle()
    assert life.choice_now() == "a"
    life.begin()
    life.lose()
    life.settle()
    assert life.choice_now() == "b"
    assert "a was reclaimed" in life.record.recent[-2].detail
    life.begin()
    life.lose()
    life.settle()
    assert life.choice_now() == "c"
    life.begin()
    life.pass_time(1800)
    life.lose()
    life.settle()
    assert life.choice_now() == "a"  # after the stated time it is welcome again


def test_a_queue_all_of_whose_zones_were_reclaimed_is_left():
    life = Placed((Choice("near", zones=("eu-a",)), Choice("far", zones=("eu-a", "eu-b"))))
    life.settle()
    life.begin("eu-a")
    life.lose()
    life.settle()
    assert life.choice_now() == "far"


names = st.sampled_from(["m5.large", "m5.xlarge", "c5.large", "m6i.large"])
zones = st.sampled_from(["eu-a", "eu-b", "eu-c"])
pools = st.lists(st.builds(Pool, names, zones, st.booleans()), unique=True, max_size=12)
avoided = st.sets(st.one_of(names, zones, st.builds(pool_name, names, zones)))


@given(pools, avoided)
def test_pools_are_ordered_and_none_is_lost_or_tried_twice(offered: list[Pool], avoid: set[str]):
    groups = best_pools(offered, avoid)
    assert sorted(map(repr, [pool for group in groups for pool in group])) == sorted(map(repr, offered))
    assert all(groups)


@given(pools, avoided)
def test_what_is_avoided_is_first_only_when_everything_is(offered: list[Pool], avoid: set[str]):
    def free(pool: Pool) -> bool:
        return pool.probable and not avoid & {pool.name, pool.zone, pool.type}

    groups = best_pools(offered, avoid)
    if any(map(free, offered)):
        assert all(map(free, groups[0]))
        assert set(groups[0]) == set(filter(free, offered))
    if offered and any(pool.probable for pool in offered):
        assert groups[0][0].probable  # another zone is of no use with a processor that does not fit
    same_place = [pool for pool in offered if pool.probable and pool.name in avoid]
    elsewhere = [
        pool for pool in offered if pool.probable and pool.name not in avoid and pool.zone not in avoid
    ]
    if same_place and elsewhere:
        order = [pool for group in groups for pool in group]
        assert max(map(order.index, elsewhere)) < min(map(order.index, same_place))


# Choices --------------------------------------------------------------------------------------------------------------


def test_a_fleet_without_choices_is_asked_for_none():
    life = Placed(())
    (asked,) = life.settle()
    assert (asked.choice, asked.why) == (None, "first start")


def test_the_cheapest_goes_first_then_the_one_that_came_quickest_then_the_order_given():
    dear, cheap = Choice("dear", price=0.3), Choice("cheap", price=0.1)
    unknown, other = Choice("unknown"), Choice("other")
    life = Placed()

    def best(*choices: Choice) -> str | None:
        return choose(life.record, PlacementPolicy(), choices, life.now, 0.0).choice

    assert best(dear, cheap) == "cheap"
    assert best(unknown, dear) == "dear"  # a known price goes before an unknown one
    assert best(unknown, other) == "unknown"
    life = Placed((Choice("unknown"), Choice("other")), placement={"avoid_reclaimed": 0})
    for wait, full in ((100, {"other"}), (5, {"unknown"})):
        life.full = full
        life.settle()
        life.pass_time(defaults.LAUNCH_RETRY)
        life.settle()
        life.pass_time(wait)
        life.begin()
        life.lose()
    assert [x.choice for x in life.record.launches if x.outcome == "used"] == ["unknown", "other"]
    assert best(unknown, other) == "other"


def test_on_demand_is_used_after_three_losses_within_an_hour_and_not_for_ever():
    life = Placed((Choice("spot"), Choice("demand", "on-demand")))
    for _ in range(3):
        life.settle()
        assert life.choice_now() == "spot"
        life.begin()
        life.pass_time(600)
        life.lose()
    life.settle()
    assert life.choice_now() == "demand"
    assert "reclaimed 3 times within 1h00m" in life.record.recent[-2].detail
    life.begin()
    life.pass_time(3600)
    life.lose()
    life.settle()
    assert life.choice_now() == "spot"


def test_losses_on_demand_do_not_count_as_reclaims():
    life = Placed((Choice("spot"), Choice("demand", "on-demand")), placement={"on_demand_after_losses": 1})
    life.settle()
    life.begin()
    life.lose()
    for _ in range(3):
        life.settle()
        assert life.choice_now() == "demand"
        life.begin()
        life.lose()
    life.settle()
    life.begin()
    life.pass_time(3600)
    life.lose()
    life.settle()
    assert life.choice_now() == "spot"


@pytest.mark.parametrize(("losses", "first"), [(0, "demand"), (None, "spot"), (1, "spot")])
def test_the_policy_can_say_always_and_never(losses: int | None, first: str):
    policy = {"on_demand_after_losses": losses, "on_demand_after_wait": None}
    life = Placed((Choice("spot"), Choice("demand", "on-demand")), placement=policy)
    life.settle()
    assert life.choice_now() == first
    life.begin()
    life.lose()
    life.settle()
    assert life.choice_now() == {0: "demand", None: "spot", 1: "demand"}[losses]


def test_without_spot_capacity_on_demand_is_used_after_ten_minutes():
    life = Placed((Choice("spot"), Choice("demand", "on-demand")))
    life.full = {"spot"}
    for _ in range(60):
        life.settle()
        if life.choice_now() == "demand":
            break
        life.pass_time(30)
    assert (life.now - life.record.created_at).total_seconds() == 600
    assert "no spot capacity for 10m00s" in life.record.recent[-2].detail


def test_a_launch_that_does_not_come_is_moved_on_with_a_reason_and_uses_no_try():
    """C58: a queue that never starts jobs, then the next, then on-demand."""
    life = Placed()
    life.slow = {"spot-a", "spot-b"}
    life.settle()
    seen = [life.choice_now()]
    for _ in range(200):
        life.pass_time(5)
        life.settle()
        if life.choice_now() != seen[-1]:
            seen.append(life.choice_now())
            assert (life.now - life.record.created_at).total_seconds() == 300 * (len(seen) - 1)
    assert seen == ["spot-a", "spot-b", "demand"]
    told = [x.detail for x in life.record.recent]
    assert any("RUNNABLE: CAPACITY" in x for x in told if x.startswith("launch l1"))  # while it waits
    assert any("no instance within 5m00s: RUNNABLE: CAPACITY; spot-b is next" in x for x in told)
    assert any("demand: no spot capacity for 10m00s" in x for x in told)
    assert [life.fleet[x].state for x in ("l1", "l2")] == ["ended", "ended"]  # nothing is left in the queues
    life.begin()
    assert (life.record.state, life.record.moves) == (State.RUNNING, 0)


def test_when_every_choice_is_used_up_the_worker_ends_with_no_capacity():
    """C58: not with a time limit of the user's code."""
    life = Placed(placement={"wait_per_choice": 60, "on_demand_after_wait": 120, "wait_for_capacity": 300})
    life.slow = {"spot-a", "spot-b", "demand"}
    while life.record.state is State.PENDING:
        life.settle()
        life.pass_time(5)
        assert (life.now - life.record.created_at).total_seconds() < 400
    life.settle()
    assert (life.record.state, life.record.reason) == (State.FAILED, Reason.NO_CAPACITY)
    assert "RUNNABLE: CAPACITY" in life.record.detail
    assert {x.choice for x in life.record.launches} == {"spot-a", "spot-b", "demand"}
    assert settled(life.record)


def test_one_queue_is_waited_for_as_long_as_is_waited_at_all():
    life = Placed((Choice("spot"),), placement={"wait_per_choice": 60, "wait_for_capacity": 300})
    life.slow = {"spot"}
    life.settle()
    life.pass_time(299)
    life.settle()
    assert life.launches == 1
    life.pass_time(1)
    life.settle()
    assert life.record.reason is Reason.NO_CAPACITY


def test_a_launch_is_not_given_up_for_a_choice_that_may_not_be_used_yet():
    life = Placed((Choice("spot"), Choice("demand", "on-demand")), placement={"wait_per_choice": 60})
    life.slow = {"spot"}
    life.settle()
    life.pass_time(599)
    life.settle()
    assert life.launches == 1  # ending it would only lose its place in the queue
    life.pass_time(1)
    life.settle()
    assert life.choice_now() == "demand"


CHOICES = st.lists(
    st.builds(
        Choice,
        st.sampled_from("abcdef"),
        st.sampled_from(["spot", "on-demand"]),
        st.one_of(st.none(), st.floats(0, 10)),
    ),
    unique_by=lambda x: x.name,
    min_size=1,
    max_size=5,
)
STEPS = st.lists(st.sampled_from(["run", "lose", "refuse", "wait", "long"]), max_size=25)


@given(CHOICES, STEPS, st.sampled_from([None, 0, 1, 3]), st.sampled_from([None, 60.0, 600.0]))
def test_whatever_happens_a_choice_is_one_of_the_fleets_and_follows_the_policy(
    choices: list[Choice], steps: list[str], losses: int | None, wait: float | None
):
    policy = PlacementPolicy(on_demand_after_losses=losses, on_demand_after_wait=wait)
    life = Placed(tuple(choices), placement=policy.model_dump())
    for step in steps:
        life.full = {x.name for x in choices} if step == "refuse" else set()
        if life.record.state.terminal:
            break
        life.settle()
        if step == "run" and not life.record.lease_held and life.record.launches[-1].state == "accepted":
            life.begin()
        elif step == "lose" and life.record.lease_held:
            life.lose()
        life.pass_time({"wait": 61.0, "long": 4000.0}.get(step, 5.0))
    markets = {x.name: x.market for x in choices}
    asked = list(life.record.launches)
    assert all(x.choice in markets for x in asked)
    if "spot" in markets.values() and losses is None and wait is None:
        assert all(markets[str(x.choice)] == "spot" for x in asked)
    if losses == 0 and "on-demand" in markets.values() and asked:
        assert markets[str(asked[0].choice)] == "on-demand"
    chosen = choose(life.record, policy, choices, life.now, 0.0)
    assert chosen == choose(life.record, policy, choices, life.now, 0.0)
    cheapest = min(choices, key=lambda x: float("inf") if x.price is None else x.price)
    if not asked and losses != 0 and cheapest.market == "spot" and cheapest.price is not None:
        assert markets[str(chosen.choice)] == "spot"


# Fit ------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("source", "target", "fits"),
    [
        ("m5.large", "m5.large", True),
        ("m5.large", "m5.4xlarge", True),
        ("m5.large", "c5.large", True),
        ("m5.large", "m6i.large", True),
        ("m6i.large", "m5.large", False),
        ("m6i.large", "m6a.large", False),
        ("m6a.large", "c7a.large", True),
        ("m6g.large", "m7g.large", True),
        ("m6g.large", "m6i.large", False),
        ("m5.metal", "m5dn.24xlarge", True),
        ("p4d.24xlarge", "p5.48xlarge", True),
        ("u-6tb1.metal", "m5.large", False),
        ("odd", "m5.large", False),
    ],
)
def test_what_names_tell_of_processors(source: str, target: str, fits: bool):
    assert cpu_probably_fits(source, target) is fits


def test_declared_families_are_alike():
    assert cpu_probably_fits("m6i.large", "m6a.large", [("m6i", "m6a")])
    assert not cpu_probably_fits("m6i.large", "m5.large", [("m6i", "m6a")])


def test_what_agents_found_is_remembered_as_long_as_there_is_a_checkpoint():
    """C43: a type that did not fit is not tried again, and is welcome for a cold start."""
    life = on(("eu-a", "m6i.large"))
    life.settle()
    life.tell(
        ev.LaunchAccepted, launch="l9", instance="i", instance_type="m5.large"
    )  # unknown: changes nothing
    life.record = life.record.model_copy(
        update={
            "launches": tuple(
                x.model_copy(update={"instance_type": "m5.large"}) if x.id == life.newest() else x
                for x in life.record.launches
            )
        }
    )
    life.tell(ev.LaunchEnding, launch=life.newest(), outcome="incompatible", detail="CPU features missing")
    found = fit(life.record, Fingerprint(machine="x86_64"))
    assert (found.ran_on, found.unfit) == (("m6i.large",), ("m5.large",))
    assert fit(life.record, None).unfit == ()


def test_the_type_that_the_checkpoint_is_of_comes_first():
    life = on(("eu-a", "m6i.large"), ("eu-b", "m7i.large"))
    assert fit(life.record, Fingerprint(machine="x86_64"), "1-4").ran_on == ("m6i.large", "m7i.large")
    assert fit(life.record, Fingerprint(machine="x86_64"), "2-1").ran_on == ("m7i.large", "m6i.large")
    assert fit(life.record, None).ran_on == ("m7i.large", "m6i.large")


def test_an_instance_that_did_not_fit_has_the_next_queue_tried():
    life = Placed((Choice("a"), Choice("b")))
    life.settle()
    life.tell(ev.LaunchEnding, launch="l1", outcome="incompatible", detail="CPU features missing")
    life.pass_time(60)
    life.settle()
    assert life.choice_now() == "b"


# Ends that are meant --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("final", "state", "reason"),
    [
        (Reason.CANCELLED, State.CANCELLED, Reason.CANCELLED),
        (Reason.OOM, State.FAILED, Reason.OOM),
        (Reason.TIMEOUT, State.FAILED, Reason.TIMEOUT),
    ],
)
@pytest.mark.parametrize("running", [True, False])
def test_an_end_that_is_meant_ends_the_worker_and_nothing_is_launched(
    final: Reason, state: State, reason: Reason, running: bool
):
    life = Placed()
    life.settle()
    if running:
        life.begin()
    life.fleet["l1"] = InstanceView("ended", detail="whoever ended job 1", final=final)
    actions = life.settle()
    assert (life.record.state, life.record.reason) == (state, reason)
    assert "whoever ended job 1" in life.record.detail
    assert not [x for x in actions if isinstance(x, RequestLaunch | Terminate)]
    assert settled(life.record)


def test_what_we_end_ourselves_is_never_meant_as_the_workers_end():
    life = Placed()
    life.settle()
    life.tell(ev.LaunchEnding, launch="l1", outcome="surplus", detail="not needed")
    life.fleet["l1"] = InstanceView("ended", detail="whoever ended job 1", final=Reason.CANCELLED)
    life.settle()
    assert life.record.state is State.PENDING


def test_a_person_who_ends_the_instance_is_heard_although_the_agent_took_it_for_a_notice():
    life = Placed()
    life.settle()
    life.begin()
    life.notice(25)
    life.settle()
    life.hand_over("1-1")
    assert life.record.state is State.MIGRATING
    life.fleet["l1"] = InstanceView("ended", detail="whoever ended job 1", final=Reason.CANCELLED)
    life.settle()
    assert (life.record.state, life.record.reason) == (State.CANCELLED, Reason.CANCELLED)
    assert life.fleet["l2"].state == "ended"


def test_memory_that_ran_out_after_a_hand_over_is_no_matter():
    life = Placed()
    life.settle()
    life.begin()
    life.notice(25)
    life.hand_over("1-1")
    life.fleet["l1"] = InstanceView("ended", detail="out of memory", final=Reason.OOM)
    life.settle()
    assert life.record.state is State.MIGRATING


def test_a_fleet_that_refuses_ends_a_new_worker_soon_and_a_saved_one_late():
    """A permission that is missing for a minute costs no work; one that is missing from the beginning is said at once."""

    def until_it_ends(life: Placed) -> float:
        began = life.now
        while not life.record.state.terminal:
            life.settle()
            life.pass_time(5)
        return (life.now - began).total_seconds()

    class Refusing(Placed):
        def act(self, action: Any) -> None:
            if isinstance(action, RequestLaunch):
                self.launches += 1
                launch = f"l{self.launches}"
                self.tell(ev.LaunchRequested, launch=launch, choice=action.choice)
                self.tell(ev.LaunchEnded, launch=launch, outcome="failed", detail="not permitted")
            else:
                super().act(action)

    fresh = Refusing()
    assert until_it_ends(fresh) < 120
    assert (fresh.record.reason, "not permitted" in fresh.record.detail) == (Reason.INTERNAL, True)
    saved = Placed()
    saved.settle()
    saved.begin()
    saved.checkpoint("1-1")
    saved.lose()
    saved.__class__ = Refusing
    assert 1800 <= until_it_ends(saved) < 2000
    assert "not permitted" in saved.record.detail


# Left over ------------------------------------------------------------------------------------------------------------


def test_what_is_left_over_and_what_is_not():
    life = Placed()
    assert leftover(None, "l1") == "its worker is not in the store"
    life.settle()
    assert leftover(life.record, "l1") is None  # it is on its way
    assert leftover(life.record, "l7") == "its worker knows nothing of this launch"
    life.begin()
    assert leftover(life.record, "l1") is None
    life.tell(ev.CancelRequested, by="ann")
    assert leftover(life.record, "l1") is None  # its agent still has to let go
    life.fenced(ev.LeaseReleased, end_reason="cancelled")
    assert leftover(life.record, "l1") == "its worker has ended: cancelled"
    lost = on(("eu-a", None))
    assert leftover(lost.record, "l1") == "its launch has ended: used"


@given(st.lists(st.sampled_from(["settle", "begin", "lose", "cancel", "pass"]), max_size=20))
def test_what_decide_still_wants_is_never_left_over(steps: list[str]):
    life = Placed()
    for step in steps:
        if step == "settle":
            life.settle()
        elif (
            step == "begin"
            and life.spares()
            and not life.record.lease_held
            and not life.record.state.terminal
        ):
            life.begin()
        elif step == "lose" and life.record.lease_held:
            life.lose()
        elif step == "cancel":
            life.tell(ev.CancelRequested, by="ann")
        else:
            life.pass_time(60)
        if not life.record.state.terminal:
            assert all(leftover(life.record, launch) is None for launch in life.spares())
        if life.record.lease is not None and life.record.lease_held:
            assert leftover(life.record, life.record.lease.launch) is None
    assert decide(life.record, life.spec, life.seen(), life.now) is not None
