"""Notices that come, are taken back, come twice, come in the wrong moment, or never come (case C26)."""

from __future__ import annotations

import contextlib
import itertools
import os
import signal
import socket
import sys
import time
from datetime import UTC, datetime

import pytest

from savedworker.checkpoint.cgroups import Cgroup
from savedworker.fleet.local import HostInfo, LocalFleet
from savedworker.model import defaults
from savedworker.model.decisions import lease_wait
from savedworker.model.record import State
from savedworker.model.spec import PlacementPolicy
from savedworker.notice import drill
from tests.runtime.conftest import HELD, Pace
from tests.runtime.counter import Counter
from tests.runtime.peer import IP_FREEBIND
from tests.runtime.stories import Program, held, is_the_same_process, split, steps_are_once
from tests.runtime.test_cases_owner import catch
from tests.runtime.world import BRIDGE, World
from tests.timing import Lateness

NOTICE = 25.0
INTERVAL = 2.0
HEARTBEAT_LIMIT = lease_wait(defaults.LEASE_TERM_LOCAL)
"""How long a lease has to be silent before anybody acts on it: the controller first, then the agent that takes it."""
PAUSE = 0.2
"""Between two steps of a program that works: many times what it needs."""
BOOT = 30.0
"""For a host to boot and a small worker to be restored, on a machine that has other things to do."""
A_FEW_MILLISECONDS = 0.05
"""With what it takes until a request is seen by the test; what a busy machine adds to that is measured."""


def saved_at_work(world: World, worker: str, counter: Counter) -> None:
    """Wait for a checkpoint that is later than the first step: on a busy machine the program may take an interval to begin."""
    counter.until_arrivals(1)
    first = counter.arrivals[0].at
    world.until(worker, lambda r: any(c.frozen_at > first for c in r.checkpoints), "commit a checkpoint")


def withdrawal_is_known(host: HostInfo) -> bool:
    """Whether the agent has heard of it. What it is about to store it stores all the same."""
    return "withdrawn=True" in (host.directory / "daemon.log").read_text(errors="replace")


def lost_at(world: World, worker: str) -> datetime:
    """When the first incarnation was declared lost."""
    ended = world.report(worker).incarnations[0].ended_at
    assert ended is not None
    return ended


def went_back_at_most_one_interval(world: World, worker: str, counter: Counter) -> None:
    """The work done again is what happened since the last periodic checkpoint, and not more."""
    runs = split(counter.arrivals)
    assert len(runs) == 2, counter.steps
    resumed = runs[1][0]
    assert resumed > 0
    before = [a for a in counter.arrivals[: len(runs[0])] if a.step >= resumed]
    took = max(
        (e.seconds or 0.0 for e in world.report(worker).timeline if e.event == "checkpoint_committed"),
        default=0,
    )
    # While a machine stands still nothing is done that could be done again: pauses between two steps count up to a limit.
    pauses = [(b.at - a.at).total_seconds() for a, b in itertools.pairwise(before)]
    assert sum(min(pause, PAUSE) for pause in pauses) < INTERVAL + 2 * took + 1.0


def test_a_host_that_is_gone_without_a_word_costs_at_most_one_interval(
    world: World, counter: Counter
) -> None:
    """C26. Agent, shim and worker are killed with the whole host."""
    program = Program("random_walk.py", 400)
    worker = program.submit(world, counter, interval=INTERVAL)
    saved_at_work(world, worker, counter)
    counter.until_arrivals(len(counter.arrivals) + 10)
    killed = datetime.now(UTC)
    world.preempt(worker, notice=None)
    assert (lost_at(world, worker) - killed).total_seconds() < HEARTBEAT_LIMIT
    is_the_same_process(world, worker, counter, program, moves=1)
    went_back_at_most_one_interval(world, worker, counter)
    assert world.report(worker).incarnations[0].end_reason == "no_notice"


def test_agent_shim_and_worker_killed_on_a_living_host_cost_at_most_one_interval(
    world: World, counter: Counter
) -> None:
    """C26. The same when only the processes die and the host lives: its agent is started again and finds nothing."""
    program = Program("random_walk.py", 400)
    worker = program.submit(world, counter, interval=INTERVAL)
    saved_at_work(world, worker, counter)
    counter.until_arrivals(len(counter.arrivals) + 10)
    host = world.host(worker)
    killed = datetime.now(UTC)
    for pid in Cgroup(host.cgroup).pids():
        if pid != host.daemon_pid:
            with contextlib.suppress(ProcessLookupError):  # gone with one of those before
                os.kill(pid, signal.SIGKILL)
    world.until(worker, lambda r: r.migrations == 1, "move")
    assert (lost_at(world, worker) - killed).total_seconds() < HEARTBEAT_LIMIT + 3
    is_the_same_process(world, worker, counter, program, moves=1)
    went_back_at_most_one_interval(world, worker, counter)
    assert world.report(worker).incarnations[0].end_reason == "no_notice"


def test_a_machine_that_stands_still_is_declared_lost_by_its_lease_alone(
    world: World, counter: Counter
) -> None:
    """C26. Nobody tells: the fleet still says that the host runs. When the machine goes on again, its worker does not.

    A few milliseconds it may run (promise 1), in which its client may get the answer that it waited for, or find that it has waited too
    long, and ask once more. What reaches the outside in them is all that promise 1 allows: nothing of it is in the record or the log.
    """
    program = Program("random_walk.py", 400)
    worker = program.submit(world, counter, interval=INTERVAL)
    saved_at_work(world, worker, counter)
    limit = counter.steps[-1] + 20
    counter.hold_at(limit)
    counter.until(limit)
    host = world.host(worker)
    Cgroup(host.cgroup).freeze()
    stopped = datetime.now(UTC)
    world.until(worker, lambda r: len(r.launches) == 2, "have a second instance")
    world.pause_controller(worker)  # or it would end the old host at once
    record = world.until(worker, lambda r: r.migrations == 1, "move")
    moved = record.incarnations[1].started_at
    assert moved is not None
    # Both wait for as long as the lease says; what the machine takes for the rest is its own.
    assert (record.launches[1].requested_at - stopped).total_seconds() < HEARTBEAT_LIMIT + 3
    assert (moved - record.launches[1].requested_at).total_seconds() < HEARTBEAT_LIMIT + BOOT
    old = Cgroup(f"{host.cgroup}/worker")
    world.until(worker, lambda _: counter.steps.count(limit) == 2, "come as far as the old one had")
    seen, used = len(counter.arrivals), old.cpu_seconds()
    with Lateness() as here:
        thawed = datetime.now(UTC)
        Cgroup(host.cgroup).thaw()
        world.until(worker, lambda _: not old.pids(), "end on the old host", 2 * defaults.LEASE_TERM_LOCAL)
    late = counter.discard(seen)
    assert len(late) <= 2, "the old worker went on"
    least = [(arrival.at - thawed).total_seconds() - here.most for arrival in late]
    assert all(seconds < A_FEW_MILLISECONDS for seconds in least), (least, here.most)
    assert all(arrival.step <= limit + 1 for arrival in late)
    assert old.cpu_seconds() - used < A_FEW_MILLISECONDS
    world.resume_controller(worker)
    counter.hold_at(400)
    is_the_same_process(world, worker, counter, program, moves=1)
    went_back_at_most_one_interval(world, worker, counter)
    assert world.report(worker).incarnations[0].end_reason == "no_notice"


def test_a_notice_withdrawn_during_the_hold_leaves_the_worker_where_it_is(
    world: World, counter: Counter, pace: Pace
) -> None:
    """Held and being stored when the notice is taken back: thawed, same incarnation; a later notice moves it."""
    program = Program("random_walk.py", 300, extra=("300",))
    worker = program.submit(world, counter)
    counter.until(10)
    host = world.host(worker)
    worker_pids = world.pids(worker)
    pace(0.5)
    world.client.preempt(worker, 60.0)
    world.until(worker, lambda _: held(world, worker), "be held")
    pace(HELD)
    seen = len(counter.arrivals)
    world.fleet.withdraw(host.launch)
    world.until(worker, lambda _: withdrawal_is_known(host), "learn of it")
    pace(0.0)
    record = world.until(worker, lambda r: r.notice is None and r.state is State.RUNNING, "run on")
    counter.until_arrivals(seen + 5, seconds=60)
    assert world.pids(worker) == worker_pids
    assert (len(record.incarnations), record.checkpoints) == (1, ())
    world.until(worker, lambda r: sum(x.state != "ended" for x in r.launches) == 1, "end the spare instance")
    world.preempt(worker, NOTICE)
    is_the_same_process(world, worker, counter, program, moves=1)
    steps_are_once(counter, program, in_flight=2)


def test_another_notice_that_is_withdrawn_during_the_hold_does_not_keep_the_worker_there(
    world: World, counter: Counter, pace: Pace
) -> None:
    """Two sources warn and one takes it back: the reclaim that still stands is acted upon."""
    program = Program("random_walk.py", 200, extra=("64",))
    counter.hold_at(150)
    worker = program.submit(world, counter)
    counter.until(10)
    host = world.host(worker)
    drill_file = host.scratch / "agent" / "drill.json"
    drill.give_notice(drill_file, None)
    world.until(worker, lambda r: r.checkpoints and r.state is State.RUNNING, "take a checkpoint")
    pace(0.5)
    world.client.preempt(worker, 60.0)
    world.until(worker, lambda _: held(world, worker), "be held")
    pace(HELD)
    drill.withdraw_notice(drill_file)
    world.until(worker, lambda r: r.incarnations[0].ended_at or withdrawal_is_known(host), "learn of it")
    pace(0.0)
    world.until(worker, lambda r: r.migrations == 1, "run on elsewhere")
    counter.hold_at(200)
    is_the_same_process(world, worker, counter, program, moves=1)
    steps_are_once(counter, program, in_flight=2)
    assert world.report(worker).lost_seconds == 0


def waiting_spare(world: World, worker: str) -> str:
    """Recommend to leave the worker's instance, and wait until its agent is ready and that of the spare waits for the lease."""
    world.fleet.rebalance(world.host(worker).launch)
    record = world.until(
        worker,
        lambda r: r.checkpoints and r.state is State.RUNNING and len(r.launches) == 2,
        "take a checkpoint and have a spare",
    )
    spare = record.launches[1]
    assert spare.spare_of is not None
    world.until(
        worker, lambda _: world.fleet.describe([spare.id])[spare.id].state == "running", "boot the spare"
    )
    return spare.id


def test_a_recommendation_to_leave_takes_a_checkpoint_and_has_a_spare_wait_that_the_notice_then_uses(
    world: World, counter: Counter
) -> None:
    """No deadline: be ready, and stay. The interruption that follows finds an instance that has booted."""
    program = Program("random_walk.py", 200)
    counter.hold_at(190)
    worker = program.submit(world, counter)
    counter.until(10)
    spare = waiting_spare(world, worker)
    counter.until_arrivals(len(counter.arrivals) + 5)
    record = world.record(worker)
    assert (len(record.incarnations), record.state) == (1, State.RUNNING)
    world.preempt(worker, NOTICE)
    record = world.record(worker)
    assert [x.launch for x in record.incarnations][1:] == [spare]
    counter.hold_at(200)
    is_the_same_process(world, worker, counter, program, moves=1)
    steps_are_once(counter, program, in_flight=2)
    assert len(world.record(worker).launches) == 2
    told = [e.detail for e in world.report(worker).timeline]
    assert any("a spare" in x and "leaving was recommended" in x for x in told), told


@pytest.mark.parametrize("controller", [True, False])
def test_a_spare_that_is_not_needed_ends_by_policy_and_without_a_controller_by_itself(
    world: World, counter: Counter, controller: bool
) -> None:
    program = Program("random_walk.py", 200)
    counter.hold_at(190)
    worker = program.submit(world, counter, placement=PlacementPolicy(spare_for=4.0))
    counter.until(10)
    spare = waiting_spare(world, worker)
    if not controller:
        world.pause_controller(worker)
    world.until(
        worker, lambda _: world.fleet.describe([spare])[spare].state == "ended", "have the spare end", 30
    )
    record = world.record(worker)
    ended = record.launch(spare)
    assert ended is not None
    assert ended.outcome == "surplus"
    assert "no notice came within 4" in ended.detail
    assert (len(record.incarnations), len(record.launches), record.state) == (1, 2, State.RUNNING)
    world.resume_controller(worker)
    counter.hold_at(200)
    is_the_same_process(world, worker, counter, program, moves=0)
    assert len(world.record(worker).launches) == 2


def test_a_worker_whose_agent_gets_no_answer_of_the_metadata_service_is_not_protected_within_half_a_minute(
    world: World,
) -> None:
    """C22. The service takes connections and its answers do not arrive, as behind a hop limit of 1: nobody waits silently."""
    with socket.socket() as deaf:
        deaf.setsockopt(socket.IPPROTO_IP, IP_FREEBIND, 1)  # the bridge may not be there yet
        deaf.bind((BRIDGE, 0))
        deaf.listen()
        options = ("store", "worker", "launch", "fleet", "instance", "zone")
        words = [word for name in options for word in (f"--{name}", f"{{{name}}}")]
        words += ["--state-dir", "{state_dir}", "--cgroup-parent", "{cgroup}"]
        words += ["--metadata", f"http://{BRIDGE}:{deaf.getsockname()[1]}"]
        world.fleet = LocalFleet(agent=(sys.executable, "-m", "savedworker.cli", "agent", *words))
        worker = world.submit("/bin/sleep", "600")
        started = world.until_running(worker).incarnations[0].started_at
        record = world.until(
            worker,
            lambda r: "notices from ec2 cannot be seen" in str(r.unprotected_reasons),
            "say that it is not protected",
        )
        assert started is not None
        assert (datetime.now(UTC) - started).total_seconds() < 30
        (reason,) = record.unprotected_reasons
        assert "hop limit" in reason or "cannot be reached" in reason
        assert (record.protected, record.state) == (False, State.RUNNING)


def test_two_preemptions_in_quick_succession_lose_nothing(world: World, counter: Counter) -> None:
    """The second notice comes as soon as the worker runs on its second instance."""
    program = Program("random_walk.py", 150)
    counter.hold_at(100)
    worker = program.submit(world, counter)
    counter.until(10)
    world.preempt(worker, NOTICE)
    world.preempt(worker, NOTICE)
    counter.hold_at(150)
    is_the_same_process(world, worker, counter, program, moves=2)
    steps_are_once(counter, program, in_flight=2)
    assert world.report(worker).lost_seconds == 0


def to_the_restore(world: World, worker: str, pace: Pace) -> None:
    """Move with notice as far as the restore, which then waits for another pace."""
    pace(0.0, HELD)
    world.client.preempt(worker, NOTICE)
    catch(world, worker, State.RESTORING)


def test_an_instance_that_is_lost_during_the_restore_loses_no_work(
    world: World, counter: Counter, pace: Pace
) -> None:
    """Nothing ran there: the next one restores the same checkpoint, and it is one migration."""
    program = Program("random_walk.py", 150, extra=("64",))
    counter.hold_at(100)
    worker = program.submit(world, counter)
    counter.until(10)
    to_the_restore(world, worker, pace)
    world.client.preempt(worker, None)
    pace(0.0)
    world.until(
        worker, lambda r: len(r.incarnations) == 3 and r.state is State.RUNNING, "run on the third instance"
    )
    counter.hold_at(150)
    is_the_same_process(world, worker, counter, program, moves=1)
    steps_are_once(counter, program, in_flight=1)
    report = world.report(worker)
    assert [x.restored_from for x in report.incarnations] == [None, None, "1-1"]
    assert report.lost_seconds == 0


def test_a_notice_during_the_restore_is_acted_upon_as_soon_as_the_worker_runs(
    world: World, counter: Counter, pace: Pace
) -> None:
    """It may not be overlooked because nobody watched yet."""
    program = Program("random_walk.py", 150, extra=("64",))
    counter.hold_at(100)
    worker = program.submit(world, counter)
    counter.until(10)
    to_the_restore(world, worker, pace)
    world.client.preempt(worker, 40.0)
    pace(0.0)
    world.until(
        worker, lambda r: len(r.incarnations) == 3 and r.state is State.RUNNING, "run on the third instance"
    )
    counter.hold_at(150)
    is_the_same_process(world, worker, counter, program, moves=2)
    steps_are_once(counter, program, in_flight=2)
    assert world.report(worker).lost_seconds == 0


def test_a_deadline_that_comes_before_the_commit_goes_back_to_the_last_good_checkpoint(
    world: World, counter: Counter, pace: Pace
) -> None:
    """The save does not fit into the notice: the worker stops in time, and nothing half-written is used."""
    program = Program("random_walk.py", 400, extra=("300",))
    worker = program.submit(world, counter)
    counter.until(10)
    good = world.checkpoint(worker)
    counter.until_arrivals(len(counter.arrivals) + 10)
    pace(3.0)
    world.client.preempt(worker, 6.0)
    world.until(worker, lambda r: r.incarnations[0].ended_at, "leave")
    pace(0.0)
    world.until(worker, lambda r: r.migrations == 1, "run on")
    is_the_same_process(world, worker, counter, program, moves=1)
    assert world.report(worker).incarnations[1].restored_from == good
    assert world.report(worker).lost_seconds > 0


def test_periodic_checkpoints_keep_the_two_newest(world: World, counter: Counter) -> None:
    """The record knows two at any time, and they are the last two."""
    worker = Program("random_walk.py", 2000).submit(world, counter, interval=0.5)
    until = time.monotonic() + 60
    seen: list[str] = []
    numbers: list[str] = []
    while len(seen) < 5:
        assert time.monotonic() < until, world.story(worker)
        numbers = [c.number for c in world.record(worker).checkpoints]
        assert len(numbers) <= 2
        seen += [n for n in numbers if n not in seen]
        time.sleep(0.02)
    assert [int(n.partition("-")[2]) for n in numbers] == sorted(int(n.partition("-")[2]) for n in seen)[-2:]


def test_the_report_tells_away_and_lost_seconds_as_clocks_do(world: World, counter: Counter) -> None:
    """What the report says of a move with notice and of one without, against the arrivals of steps outside."""
    program = Program("random_walk.py", 1000)
    worker = program.submit(world, counter)
    counter.until(20)
    world.preempt(worker, NOTICE)
    counter.until_arrivals(len(counter.arrivals) + 10)
    frozen_at, again_at = (
        world.record(worker).checkpoints[-1].frozen_at,
        world.record(worker).incarnations[1].started_at,
    )
    assert again_at is not None
    meanwhile = [
        (a.at, b.at) for a, b in itertools.pairwise(counter.arrivals) if b.at > frozen_at and a.at < again_at
    ]
    gap = max((b - a).total_seconds() for a, b in meanwhile)
    away = world.report(worker).incarnations[1].away_seconds
    assert abs(gap - away) < 0.5, f"steps paused for {gap:.2f} s, the report says {away:.2f} s"
    number = world.checkpoint(worker)
    frozen_at = next(c.frozen_at for c in world.record(worker).checkpoints if c.number == number)
    counter.until_arrivals(len(counter.arrivals) + 60)
    seen = len(counter.arrivals)
    world.preempt(worker, notice=None)
    counter.until_arrivals(seen + 80)
    runs = split(counter.arrivals)
    assert len(runs) == 2
    last = counter.arrivals[len(runs[0]) - 1].at
    first = counter.arrivals[len(runs[0])].at
    report = world.report(worker)
    lost, away = report.incarnations[1].lost_seconds, report.incarnations[2].away_seconds
    renewal = defaults.LEASE_TERM_LOCAL / defaults.LEASE_RENEWALS_PER_TERM
    assert -renewal - 0.5 < lost - (last - frozen_at).total_seconds() < 0.5
    assert -0.5 < away - (first - last).total_seconds() < renewal + 0.5
    assert abs(lost + away - (first - frozen_at).total_seconds()) < 0.5
    status = world.client.status(worker)
    assert (status.lost_seconds, status.migrations, status.incarnation) == (report.lost_seconds, 2, 3)
    assert status.away_seconds == sum(x.away_seconds for x in report.incarnations)
    assert status.last_checkpoint is not None
    age = (datetime.now(UTC) - frozen_at).total_seconds()
    assert abs(status.last_checkpoint.age_seconds - age) < 1.0
