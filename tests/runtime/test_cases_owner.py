"""Who ends a worker and who does not (cases C18, C19): a cancel ends all of it, the death of its agent nothing of it."""

from __future__ import annotations

import contextlib
import os
import signal
import time
from pathlib import Path

from savedworker.fleet.local import HostInfo
from savedworker.fleet.local.cgroup import HostCgroup
from savedworker.model.errors import SavedWorkerError
from savedworker.model.record import Reason, State
from tests.runtime.conftest import HELD, Pace
from tests.runtime.counter import Counter
from tests.runtime.stories import Program, held, is_the_same_process, steps_are_once
from tests.runtime.world import World

NOTICE = 25.0
STOP_LIMIT = 60.0
"""Case C18: so soon nothing is left after a cancel."""


def cancel_and_look(world: World, worker: str, pace: Pace | None = None) -> None:
    """Cancel; within the limit no process, namespace, mount or host is left, and no restore has begun since.

    What a ``pace`` held goes on then.
    """
    hosts = living_hosts(world, worker)
    before = world.client.cancel(worker, "a test")
    until = time.monotonic() + STOP_LIMIT
    assert before.state is State.CANCELLED
    if pace is not None:
        pace(0.0)
    record = world.until_settled(worker, STOP_LIMIT)
    assert (record.state, record.reason) == (State.CANCELLED, Reason.CANCELLED)
    assert len(record.incarnations) == len(before.incarnations)
    # A host has ended when its processes have; its daemon then removes the rest.
    while left := [what for host in hosts for what in left_of(host)]:
        assert time.monotonic() < until, left
        time.sleep(0.1)
    assert living_hosts(world, worker) == []


def left_of(host: HostInfo) -> list[str]:
    places = {"namespace": Path(f"/run/netns/{host.netns}"), "scratch": host.scratch}
    found = [f"{what} of {host.instance}" for what, place in places.items() if place.exists()]
    return [*found, host.cgroup] if HostCgroup(host.cgroup).exists() else found


def living_hosts(world: World, worker: str) -> list[HostInfo]:
    found = []
    for launch in world.record(worker).launches:
        try:
            found.append(world.host_of_launch(launch.id))
        except SavedWorkerError:
            continue
    return found


def catch(world: World, worker: str, state: State, seconds: float = 60.0) -> None:
    """Wait for a state that passes quickly."""
    until = time.monotonic() + seconds
    while (seen := world.record(worker).state) is not state:
        assert time.monotonic() < until, f"{worker} was never {state}, it is {seen}\n{world.story(worker)}"
        time.sleep(0.01)


def test_a_worker_that_waits_for_capacity_is_cancelled(world: World) -> None:
    """C18, state pending."""
    world.fleet._capacity = 0
    worker = world.submit("/bin/sleep", "1000")
    world.until(worker, lambda r: any(x.outcome == "capacity" for x in r.launches), "wait for capacity")
    assert world.record(worker).state is State.PENDING
    cancel_and_look(world, worker)


def test_a_worker_whose_instance_is_booting_is_cancelled(world: World) -> None:
    """C18, state pending with an instance."""
    worker = world.submit("/bin/sleep", "1000")
    world.until(worker, lambda r: any(x.state == "accepted" for x in r.launches), "have an instance")
    cancel_and_look(world, worker)


def test_a_worker_that_starts_is_cancelled(world: World, pace: Pace) -> None:
    """C18, state starting."""
    pace(HELD)
    worker = world.submit("/bin/sleep", "1000")
    catch(world, worker, State.STARTING)
    cancel_and_look(world, worker, pace)


def test_a_running_worker_is_cancelled_with_all_of_its_processes(world: World, counter: Counter) -> None:
    """C18, state running."""
    worker = Program("pipeline.sh", 1000).submit(world, counter)
    counter.until(3)
    world.until(worker, lambda _: len(world.pids(worker)) > 3, "have the processes of its pipeline")
    pids = world.pids(worker)
    cancel_and_look(world, worker)
    seen = len(counter.arrivals)
    assert [pid for pid in pids if Path(f"/proc/{pid}").exists()] == []
    assert len(counter.arrivals) == seen


def test_a_worker_is_cancelled_while_it_is_checkpointed(world: World, counter: Counter, pace: Pace) -> None:
    """C18, state checkpointing, both with a worker that runs on meanwhile and with one that is held."""
    worker = Program("random_walk.py", 1000, extra=("64",)).submit(world, counter)
    counter.until(3)
    pace(HELD)
    world.client.request_checkpoint(worker)
    catch(world, worker, State.CHECKPOINTING)
    cancel_and_look(world, worker, pace)


def test_a_worker_is_cancelled_while_it_is_held_before_its_reclaim(
    world: World, counter: Counter, pace: Pace
) -> None:
    """C18, state checkpointing with a notice: the worker is frozen."""
    worker = Program("random_walk.py", 1000, extra=("64",)).submit(world, counter)
    counter.until(3)
    pace(HELD)
    world.client.preempt(worker, NOTICE)
    catch(world, worker, State.CHECKPOINTING)
    cancel_and_look(world, worker, pace)


def test_a_worker_is_cancelled_between_two_instances(world: World, counter: Counter) -> None:
    """C18, state migrating."""
    worker = Program("random_walk.py", 1000).submit(world, counter)
    counter.until(3)
    world.pause_controller(worker)
    world.client.preempt(worker, NOTICE)
    catch(world, worker, State.MIGRATING)
    world.resume_controller(worker)
    cancel_and_look(world, worker)
    assert len(world.record(worker).incarnations) == 1


def test_a_worker_is_cancelled_while_it_is_restored(world: World, counter: Counter, pace: Pace) -> None:
    """C18, state restoring."""
    worker = Program("random_walk.py", 1000, extra=("64",)).submit(world, counter)
    counter.until(3)
    pace(0.0, HELD)
    world.client.preempt(worker, NOTICE)
    catch(world, worker, State.RESTORING)
    cancel_and_look(world, worker, pace)
    assert world.record(worker).migrations == 0


def kill_agent(world: World, worker: str, number: int = signal.SIGKILL) -> HostInfo:
    host = world.host(worker)
    assert host.agent_pid is not None
    os.kill(host.agent_pid, number)
    return host


def until_restarted(world: World, worker: str, before: HostInfo) -> None:
    """Wait until the host has a new agent and that agent has taken the worker up: it renews the lease."""

    def renewed(seconds: float = 30.0) -> None:
        until = time.monotonic() + seconds
        while (now := world.host(worker)).agent_starts == before.agent_starts or now.agent_pid is None:
            assert time.monotonic() < until, world.story(worker)
            time.sleep(0.05)

    renewed()
    lease = world.record(worker).lease
    assert lease is not None
    world.until(worker, lambda r: r.lease is not None and r.lease.renewal > lease.renewal, "renew its lease")


def test_an_agent_that_is_killed_comes_back_to_the_same_worker_and_nothing_is_lost(
    world: World, counter: Counter
) -> None:
    """C19. The agent dies, the worker does not: same pids, same incarnation, every step and every line once."""
    program = Program("random_walk.py", 300)
    counter.hold_at(280)
    worker = program.submit(world, counter)
    counter.until(10)
    pids = world.pids(worker)
    until_restarted(world, worker, kill_agent(world, worker))
    assert world.pids(worker) == pids
    counter.hold_at(300)
    record = is_the_same_process(world, worker, counter, program, moves=0)
    assert len(record.incarnations) == 1
    assert counter.steps == list(range(300))
    assert world.output(worker).split() == [str(step) for step in range(300)]


def test_a_worker_that_ends_while_its_agent_is_dead_is_reported_with_its_own_exit_status(
    world: World, counter: Counter
) -> None:
    """C19. The shim keeps the exit status until an agent asks for it."""
    worker = world.submit(
        "/bin/bash",
        "-c",
        f"exec 3<>/dev/tcp/{counter.address.replace(':', '/')}; echo step a 1 >&3; read x <&3; echo last; exit 7",
    )
    counter.hold_at(0)
    counter.until(1)
    world.until_running(worker)
    kill_agent(world, worker)
    counter.hold_at(1)
    record = world.until_settled(worker)
    assert (record.state, record.reason, record.exit_code) == (State.FAILED, Reason.EXIT, 7), world.story(
        worker
    )
    assert len(record.incarnations) == 1
    assert world.output(worker) == "last\n"


def test_an_agent_that_is_killed_during_a_checkpoint_leaves_a_worker_that_runs_and_can_be_saved(
    world: World, counter: Counter, pace: Pace
) -> None:
    """C19. Killed while the worker is frozen: it runs on at once, the next agent can save and move it."""
    program = Program("random_walk.py", 400, extra=("64",))
    worker = program.submit(world, counter)
    counter.until(10)
    pace(0.5)
    world.client.preempt(worker, 60.0)
    world.until(worker, lambda _: held(world, worker), "be held")
    pace(HELD)
    before = len(counter.arrivals)
    host = kill_agent(world, worker)
    counter.until_arrivals(before + 2, seconds=30)
    pace(0.0)
    until_gone_from(world, worker, host)
    is_the_same_process(world, worker, counter, program, moves=1)
    steps_are_once(counter, program, in_flight=2)


def until_gone_from(world: World, worker: str, host: HostInfo) -> None:
    world.until(
        worker,
        lambda r: r.state is State.RUNNING and r.lease is not None and r.lease.launch != host.launch,
        "move",
    )


def test_sigterm_to_the_agent_is_a_notice(world: World, counter: Counter) -> None:
    """C19. Whoever stops the instance without more words still gets the worker saved and moved."""
    program = Program("random_walk.py", 150)
    counter.hold_at(60)
    worker = program.submit(world, counter)
    counter.until(10)
    host = kill_agent(world, worker, signal.SIGTERM)
    until_gone_from(world, worker, host)
    counter.hold_at(150)
    is_the_same_process(world, worker, counter, program, moves=1)
    steps_are_once(counter, program, in_flight=1)
    report = world.report(worker)
    assert report.incarnations[0].end_reason == "notice"
    assert report.lost_seconds == 0
    assert any("sigterm" in e.detail.lower() for e in report.timeline if e.event == "notice_received"), (
        world.story(worker)
    )


def test_sigterm_to_the_agent_of_a_cancelled_worker_saves_nothing(world: World, counter: Counter) -> None:
    """C18. A cancel is final: what stops the instance afterwards is no notice."""
    worker = Program("random_walk.py", 1000).submit(world, counter)
    counter.until(3)
    agent = world.host(worker).agent_pid
    assert agent is not None
    world.client.cancel(worker, "a test")
    with contextlib.suppress(ProcessLookupError):
        os.kill(agent, signal.SIGTERM)
    record = world.until_settled(worker, STOP_LIMIT)
    assert record.state is State.CANCELLED
    assert record.checkpoints == ()
    assert len(record.launches) == 1
