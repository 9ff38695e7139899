"""Whatever happens, in whatever order: what must hold for every record, and at most one incarnation that executes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from savedworker.model import decisions, defaults
from savedworker.model import events as ev
from savedworker.model.decisions import (
    InstanceView,
    Leave,
    Observations,
    Record,
    RequestLaunch,
    Take,
    decide,
    may_take,
    settled,
)
from savedworker.model.engine import nextflow_view
from savedworker.model.record import Reason, State, WorkerRecord
from savedworker.model.transitions import RECENT_EVENTS, apply
from tests.model.life import Life

FINAL = ("state", "reason", "exit_code", "signal", "detail", "ended_at", "after_restore", "migrations")
SETTINGS = settings(
    max_examples=60, stateful_step_count=40, deadline=None, suppress_health_check=[HealthCheck.too_slow]
)


class AnyHistory(RuleBasedStateMachine):
    """Events of every kind, from the holder and from others, between rounds of a controller that acts on its decisions."""

    @initialize(
        budget=st.none() | st.integers(0, 3),
        policy=st.sampled_from(["cold_start", "fail"]),
        capacity=st.sampled_from([0, 60, 1800]),
        spare=st.sampled_from([None, 5, 600]),
    )
    def begin(self, budget: int | None, policy: str, capacity: float, spare: float | None) -> None:
        self.life = Life(
            max_migrations=budget,
            checkpoint={"when_unrestorable": policy},
            placement={"wait_for_capacity": capacity, "spare_for": spare},
        )
        self.numbers = 0
        self.found_damaged: dict[str, set[str]] = {}
        """Which instances said of a checkpoint that it is damaged."""
        self.life.settle()
        self.life.run("l1")
        if budget != 1:
            self.life.checkpoint("1-900")
        self.final: tuple[Any, ...] | None = None
        self.incarnations_then = 0
        self.highest = "RUNNING"
        self.previous = self.life.record

    # Time, controllers and agents that want the lease

    @rule(
        seconds=st.sampled_from([0.1, 3, 12, 200, 2000, -100]),
        controllers=st.booleans(),
        agents=st.sampled_from(["none", "take", "run", "run", "run"]),
        silent=st.sampled_from([0.0, 12.0, 30.0]),
        waited=st.sampled_from([0.0, 0.0, 0.0, 700.0]),
    )
    def the_world_goes_on(
        self, seconds: float, controllers: bool, agents: str, silent: float, waited: float
    ) -> None:
        life = self.life
        life.pass_time(seconds)
        life.silent = silent
        if controllers:
            for action in life.decide():
                life.act(action)
        if agents != "none":
            self.an_agent_asks(silent, agents == "run", waited)

    def an_agent_asks(self, silent: float, begin: bool, waited: float) -> None:
        life = self.life
        for launch in [x.id for x in life.record.launches]:
            answer = may_take(life.record, life.spec, launch, silent, waited)
            if isinstance(answer, Leave):
                life.tell(ev.LaunchEnding, launch=launch, outcome="surplus", detail=answer.why)
            if isinstance(answer, Take):
                number = answer.checkpoint.number if answer.checkpoint else None
                life.take(launch, number)
                assert life.record.lease is not None
                assert life.record.lease.launch == launch
                if begin and number:
                    life.fenced(ev.Restored, number=number)
                elif begin:
                    life.fenced(ev.Started)
                return

    @rule(refuse=st.sampled_from([None, None, None, "capacity", "failed", "incompatible"]))
    def fleet_answers(self, refuse: str | None) -> None:
        self.life.refuse = refuse

    @rule(state=st.sampled_from(["running", "ended", "pending"]), n=st.integers(0, 50))
    def instance_changes(self, state: str, n: int) -> None:
        names = sorted(x for x, view in self.life.fleet.items() if view.state != "ended")
        if names:
            self.life.fleet[names[n % len(names)]] = InstanceView(state)  # type: ignore[arg-type]

    @precondition(lambda self: self.life.record.lease_held)
    @rule(
        kind=st.sampled_from(
            [
                ev.LeaseRenewed,
                ev.Started,
                ev.NoticeReceived,
                ev.NoticeWithdrawn,
                ev.CheckpointStarted,
                ev.Restored,
                ev.CheckpointCommitted,
                ev.CheckpointFailed,
                ev.ProtectionChanged,
                ev.RestoreFailed,
            ]
        ),
        token=st.sampled_from(["right", "right", "right", "holder", "number"]),
        deadline=st.none() | st.floats(0, 120),
        notice=st.sampled_from(["n1", "n2"]),
        damaged=st.booleans(),
    )
    def the_incarnation_reports(
        self, kind: Any, token: str, deadline: float | None, notice: str, damaged: bool
    ) -> None:
        record = self.life.record
        number = len(record.incarnations)
        target = record.incarnations[-1].restore_from or "1-1"
        if kind in (ev.CheckpointStarted, ev.CheckpointCommitted):
            self.numbers += 1
        details: dict[Any, dict[str, Any]] = {
            ev.NoticeReceived: {"id": notice, "source": "s", "seconds_left": deadline},
            ev.NoticeWithdrawn: {"id": notice},
            ev.CheckpointStarted: {"number": f"{number}-{self.numbers}", "cause": "periodic"},
            ev.CheckpointFailed: {"number": f"{number}-{self.numbers}", "detail": "d"},
            ev.CheckpointCommitted: {
                "number": f"{number}-{self.numbers}",
                "cause": "notice" if deadline else "periodic",
                "frozen_at": self.life.now,
                "bytes_image": 1,
                "bytes_uploaded": 1,
            },
            ev.Restored: {"number": target},
            ev.RestoreFailed: {"number": target, "detail": "d", "unusable": damaged},
            ev.ProtectionChanged: {"unprotected_reasons": ("why",) if deadline else ()},
        }
        wrong: Any = {"holder": {"holder": "x"}, "number": {"incarnation": number + 1}}.get(token, {})
        before = self.life.record
        self.life.fenced(kind, **{**details.get(kind, {}), **wrong})
        if wrong:
            assert self.life.record is before
        elif kind is ev.RestoreFailed and damaged and self.life.record is not before:
            self.found_damaged.setdefault(target, set()).add(record.incarnations[-1].instance)

    @precondition(lambda self: self.life.record.lease_held)
    @rule(
        how=st.sampled_from(["hand_over", "yield", "release", "lost", "lost"]),
        release=st.sampled_from(["finished", "failed"]),
    )
    def the_incarnation_ends(self, how: str, release: str) -> None:
        life = self.life
        match how:
            case "hand_over":
                kept = life.record.checkpoints
                life.fenced(ev.HandedOver, number=kept[-1].number if kept else None)
            case "yield":
                life.fenced(ev.Yielded)
            case "release":
                life.fenced(ev.LeaseReleased, end_reason=release)
            case _:
                life.lose()

    @precondition(lambda self: self.life.record.lease_held)
    @rule(how=st.sampled_from([None] * 12 + ["exit", "signal", "success", "conclude"]))
    def the_worker_ends(self, how: str | None) -> None:
        match how:
            case "conclude":
                self.life.fenced(ev.Concluded, outcome="success")
            case "exit":
                self.life.fenced(ev.Finished, exit_code=3)
            case "signal":
                self.life.fenced(ev.Finished, exit_code=143, signal=15)
            case "success":
                self.life.fenced(ev.Finished, exit_code=0)
            case _:
                pass

    @rule(what=st.sampled_from([None] * 30 + ["cancel", "give up", "checkpoint", "checkpoint"]))
    def somebody_else_acts(self, what: str | None) -> None:
        match what:
            case "cancel":
                self.life.tell(ev.CancelRequested, by="ann")
            case "give up":
                self.life.tell(ev.GaveUp, reason=Reason.LOST, detail="a controller with an old record")
            case "checkpoint":
                self.life.tell(ev.CheckpointRequested)
            case _:
                pass

    @rule(n=st.integers(0, 3), outcome=st.sampled_from(["surplus", "incompatible", "failed"]))
    def an_agent_leaves(self, n: int, outcome: str) -> None:
        """Its instance ends with it, or not."""
        open_ones = [x.id for x in self.life.record.launches if x.state != "ended"]
        if open_ones:
            launch = open_ones[n % len(open_ones)]
            self.life.tell(ev.LaunchEnding, launch=launch, outcome=outcome)

    # What must hold

    @invariant()
    def the_record_makes_sense(self) -> None:
        record = self.life.record
        assert [x.number for x in record.incarnations] == list(range(1, len(record.incarnations) + 1))
        assert all(x.ended_at and x.end_reason for x in record.incarnations[:-1])
        if record.incarnation:
            assert record.lease is not None
            assert record.lease.incarnation == len(record.incarnations)
            assert (record.incarnation.ended_at is None) == record.lease_held
        else:
            assert record.lease is None
        ran = [x for x in record.incarnations if x.started_at]
        assert record.migrations == sum(x.restored_from is not None for x in ran)
        assert record.cold_starts == sum(x.restored_from is None for x in ran[1:])
        assert all(x.lost_seconds >= 0 and x.away_seconds >= 0 for x in record.incarnations)
        assert all(x.restored_from is None for x in ran[:1])
        for launch in record.launches:
            assert (launch.state == "ended") <= (launch.outcome is not None)
            if record.lease_held and record.lease and record.lease.launch == launch.id:
                assert launch.state == "accepted"
        budget = self.life.spec.max_migrations
        assert budget is None or record.moves <= budget
        assert record.notice is None or record.lease_held
        assert (record.state in (State.PENDING, State.MIGRATING)) >= (
            not record.lease_held and not record.state.terminal
        )
        assert record.protected == (not record.unprotected_reasons)

    @invariant()
    def a_recommendation_to_leave_costs_a_few_launches_at_most(self) -> None:
        record = self.life.record
        spares = [x for x in record.launches if x.spare_of]
        assert not spares or self.life.spec.placement.spare_for
        for notice in {x.spare_of for x in spares}:
            assert sum(x.spare_of == notice for x in spares) <= defaults.SPARES

    @invariant()
    def no_checkpoint_is_given_up_on_the_word_of_one_instance(self) -> None:
        for entry in self.life.record.checkpoints:
            said = self.found_damaged.get(entry.number, set())
            if entry.unusable is not None and not entry.unusable.startswith("no matching instance"):
                assert len(said) > 1
            if entry.damage_seen is not None:
                assert entry.damage_seen.instance in said

    @invariant()
    def nobody_restores_what_has_told_its_engine_how_it_ends(self) -> None:
        record = self.life.record
        if record.concluded is not None:
            self.incarnations_then = self.incarnations_then or len(record.incarnations)
            assert len(record.incarnations) == self.incarnations_then
        else:
            assert not self.incarnations_then

    @invariant()
    def an_end_is_final(self) -> None:
        record = self.life.record
        if record.state.terminal:
            now = tuple(getattr(record, x) for x in FINAL)
            assert self.final in (None, now)
            self.final = now
            assert (record.state is State.SUCCEEDED) == (record.reason is None)
        else:
            assert self.final is None

    @invariant()
    def an_engine_sees_no_way_back(self) -> None:
        view, known = nextflow_view(self.life.record.state)
        assert known
        assert not (self.highest == "RUNNING" and view == "SUBMITTED")
        self.highest = view

    @invariant()
    def the_history_is_bounded_and_whole(self) -> None:
        record = self.life.record
        assert len(record.recent) <= RECENT_EVENTS
        assert [x.number for x in record.recent] == list(
            range(record.events - len(record.recent) + 1, record.events + 1)
        )
        if self.previous is not record:
            assert record.events >= self.previous.events
        self.previous = record

    @invariant()
    def a_decision_is_the_same_the_second_time(self) -> None:
        assert self.life.decide() == self.life.decide()

    def teardown(self) -> None:
        if not hasattr(self, "life"):
            return
        life = self.life
        assert WorkerRecord.model_validate_json(life.record.model_dump_json()) == life.record
        # Left alone, the decisions come to rest with at most one launch that may still come to something, and a cancel
        # leaves nothing.
        life.refuse = None
        life.silent = 0
        life.settle()
        if not life.record.state.terminal:
            leaving = life.record.notice is not None and life.record.notice.seconds_left is not None
            assert len(life.spares()) <= 1
            recommended = life.record.notice is not None and bool(life.spec.placement.spare_for)
            assert not life.spares() or leaving or recommended or not life.record.lease_held
            # However long the recommendation stands, its spare goes.
            life.pass_time(10_000)
            life.settle()
            assert not life.spares() or leaving or not life.record.lease_held
        life.tell(ev.CancelRequested, by="the end")
        life.settle()
        life.pass_time(10_000)
        life.settle()
        assert settled(life.record)
        assert all(view.state == "ended" for view in life.fleet.values())


TestAnyHistory = AnyHistory.TestCase
TestAnyHistory.settings = SETTINGS


@dataclass
class Agent:
    """One agent with its shim. ``deadline``: until when the shim lets the worker execute, on the one true clock."""

    launch: str
    number: int = 0
    deadline: float = -1.0
    here: bool = False
    """The worker is on this instance and not dead."""
    alive: bool = True
    seen: Any = None
    since: float = 0.0
    read: WorkerRecord | None = None
    sent: float | None = None
    """A renewal is on its way since then."""

    @property
    def holder(self) -> str:
        return f"h-{self.launch}"


@dataclass
class Watcher:
    seen: Any = None
    since: float = 0.0
    read: WorkerRecord | None = None


class Once:
    """Agents that are paused at any moment, delayed renewals, takers and controllers with stale records; no fair timing.

    The world has one clock, which everybody's clock follows; the shim obeys its deadline.
    """

    def __init__(self) -> None:
        self.life = Life(lease_term=10.0, placement={"spare_for": 60})
        self.term = 10.0
        self.time = 0.0
        self.agents: dict[str, Agent] = {}
        self.watcher = Watcher()
        self.controller()

    def swap(self, read: WorkerRecord, event: ev.Event) -> bool:
        """Compare-and-swap: only on the very record that was read."""
        if read is not self.life.record:
            return False
        self.life.record = apply(read, event)
        return True

    @staticmethod
    def lease_of(record: WorkerRecord) -> Any:
        lease = record.lease
        return (lease.incarnation, lease.holder, lease.renewal) if lease else None

    def pass_time(self, seconds: float) -> None:
        self.time += seconds
        self.life.pass_time(seconds)
        for agent in self.agents.values():
            if self.time >= agent.deadline + self.term:
                agent.here = False  # the shim has killed

    def controller_reads(self) -> None:
        watcher, record = self.watcher, self.life.record
        watcher.read = record
        if self.lease_of(record) != watcher.seen:
            watcher.seen, watcher.since = self.lease_of(record), self.time

    def controller_acts(self) -> None:
        """On what it read, however long ago."""
        watcher = self.watcher
        if watcher.read is None:
            return
        views = {x.launch: InstanceView("running" if x.alive else "ended") for x in self.agents.values()}
        silent = self.time - watcher.since if watcher.read.lease_held else 0.0
        for action in decide(watcher.read, self.life.spec, Observations(views, silent, 60.0), self.life.now):
            if isinstance(action, Record) and action.only_now:
                self.swap(watcher.read, action.event)
                return
            if isinstance(action, Record):
                self.life.record = apply(self.life.record, action.event)  # on whatever the record is by now
            elif isinstance(action, RequestLaunch):
                launch = f"l{len(self.agents) + 1}"
                event = ev.LaunchRequested(at=self.life.now, launch=launch, spare_of=action.spare_of)
                if self.swap(watcher.read, event):
                    self.agents[launch] = Agent(launch)
                    self.life.tell(ev.LaunchAccepted, launch=launch, instance=f"i-{launch}")
                return

    def controller(self) -> None:
        self.controller_reads()
        self.controller_acts()

    def pick(self, n: int, wants: bool) -> Agent | None:
        """An agent that lives: one that wants the lease, or one that had it."""
        alive = [x for x in self.agents.values() if x.alive and (x.number == 0) == wants]
        return alive[n % len(alive)] if alive else None

    def agent_reads(self, n: int) -> None:
        agent = self.pick(n, True)
        if agent is not None:
            agent.read = self.life.record
            if self.lease_of(agent.read) != agent.seen:
                agent.seen, agent.since = self.lease_of(agent.read), self.time

    def agent_takes(self, n: int) -> None:
        agent = self.pick(n, True)
        if agent is None or agent.read is None:
            return
        answer = may_take(agent.read, self.life.spec, agent.launch, self.time - agent.since, self.time)
        if isinstance(answer, Leave):
            event = ev.LaunchEnding(at=self.life.now, launch=agent.launch, outcome="surplus")
            agent.alive = not self.swap(agent.read, event)
        if not isinstance(answer, Take):
            return
        number = len(agent.read.incarnations) + 1
        taking = ev.LeaseTaken(
            at=self.life.now,
            incarnation=number,
            holder=agent.holder,
            launch=agent.launch,
            instance=agent.launch,
            restore_from=answer.checkpoint.number if answer.checkpoint else None,
        )
        if self.swap(agent.read, taking) and self.life.record.lease is not None:
            assert self.life.record.lease.holder == agent.holder
            agent.number, agent.deadline, agent.here = number, self.time + self.term, True
            self.tell(agent, ev.Started)

    def tell(self, agent: Agent, kind: Any, **fields: Any) -> bool:
        before = self.life.record
        event = kind(at=self.life.now, incarnation=agent.number, holder=agent.holder, **fields)
        self.life.record = apply(before, event)
        return self.life.record is not before

    def renewal_is_sent(self, n: int) -> None:
        agent = self.pick(n, False)
        if agent is not None:
            agent.sent = self.time

    def renewal_arrives(self, n: int) -> None:
        agent = self.pick(n, False)
        if agent is None or agent.sent is None:
            return
        if self.tell(agent, ev.LeaseRenewed):
            agent.deadline = max(agent.deadline, agent.sent + self.term)
        agent.sent = None

    def hand_over(self, n: int) -> None:
        agent = self.pick(n, False)
        if agent is not None and agent.here:
            agent.here = False  # it is dead before the record says so
            self.tell(agent, ev.HandedOver, number=None)

    def notice(self, n: int) -> None:
        """Its replacement is launched early, and waits for the lease."""
        agent = self.pick(n, False)
        if agent is not None:
            self.tell(agent, ev.NoticeReceived, id="n", source="spot", seconds_left=120)
            self.controller()

    def recommendation(self, n: int) -> None:
        """A spare is launched, which waits for the lease too."""
        agent = self.pick(n, False)
        if agent is not None:
            self.tell(agent, ev.NoticeReceived, id=f"r{agent.number}", source="spot", seconds_left=None)
            self.controller()

    def die(self, n: int) -> None:
        agent = self.pick(n, False)
        if agent is not None:
            agent.alive = agent.here = False

    def executing(self) -> list[str]:
        return [x.launch for x in self.agents.values() if x.here and self.time < x.deadline]


WEIGHTS = {
    "controller": 3,
    "controller_reads": 2,
    "controller_acts": 2,
    "agent_reads": 5,
    "agent_takes": 5,
    "renewal_is_sent": 3,
    "renewal_arrives": 3,
    "notice": 3,
    "recommendation": 2,
    "hand_over": 1,
    "die": 1,
    "pass_time": 6,
}
STEPS = st.tuples(
    st.sampled_from([name for name, weight in WEIGHTS.items() for _ in range(weight)]),
    st.integers(0, 5),
    st.sampled_from([0.1, 1.0, 2.5, 5.0, 9.9, 11.1, 25.0]),
)


@given(st.lists(STEPS, min_size=60, max_size=150))
@settings(SETTINGS, max_examples=150, suppress_health_check=list(HealthCheck))
def test_at_no_moment_two_incarnations_execute(steps: list[tuple[str, int, float]]) -> None:
    once = Once()
    for name, n, seconds in steps:
        if name == "pass_time":
            once.pass_time(seconds)
        elif name.startswith("controller"):
            getattr(once, name)()
        else:
            getattr(once, name)(n)
        assert len(once.executing()) <= 1, once.executing()


def test_the_simulation_finds_two_when_takers_do_not_wait_long_enough(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(decisions, "lease_wait", lambda term: term * 0.3)
    once = Once()
    once.agent_reads(0)
    once.agent_takes(0)
    once.controller_reads()
    once.pass_time(3.1)
    once.controller()
    once.agent_reads(0)
    once.pass_time(3.1)
    once.agent_takes(0)
    assert once.executing() == ["l1", "l2"]
