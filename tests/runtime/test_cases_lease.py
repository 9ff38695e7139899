"""Once: whoever does not prove that it owns the lease is stopped by the shim, and what it does afterwards counts for nothing."""

from __future__ import annotations

import os
import signal
import time

from savedworker.checkpoint.cgroups import Cgroup
from savedworker.model import defaults
from savedworker.model.record import State
from savedworker.store.worker import WorkerStore
from tests.runtime.counter import Counter
from tests.runtime.stories import Program, is_the_same_process, split
from tests.runtime.world import World

TERM = defaults.LEASE_TERM_LOCAL


def test_a_worker_whose_agent_stands_still_is_frozen_at_the_term_and_never_runs_again(
    world: World, counter: Counter
) -> None:
    """The agent is stopped and cannot renew. Shim: freeze. New incarnation: after that. Old agent, awake again: nothing."""
    program = Program("random_walk.py", 700)
    worker = program.submit(world, counter)
    counter.until(10)
    world.checkpoint(worker)
    host = world.host(worker)
    old = Cgroup(f"{host.cgroup}/worker")
    assert host.agent_pid is not None
    os.kill(host.agent_pid, signal.SIGSTOP)
    stopped = time.monotonic()
    while not old.frozen():
        assert time.monotonic() < stopped + TERM + 2, "the shim did not freeze the worker at its deadline"
        time.sleep(0.02)
    used = old.cpu_seconds()
    assert used > 0
    # From here on no controller may end the old host: only the lease protects the worker.
    world.until(worker, lambda r: len(r.launches) == 2, "have a second instance")
    world.pause_controller(worker)
    record = world.until(
        worker, lambda r: len(r.incarnations) == 2 and r.state is State.RUNNING, "run elsewhere"
    )
    # A little goes into its end, when the shim kills it; running on it would have used many times that.
    assert old.cpu_seconds() - used < 0.05
    assert record.migrations == 1
    assert world.host_of_launch(record.launches[0].id).agent_pid == host.agent_pid
    os.kill(host.agent_pid, signal.SIGCONT)
    ended = time.monotonic()
    while old.pids():
        assert time.monotonic() < ended + 20, "the old agent did not give its worker up"
        time.sleep(0.02)
    world.resume_controller(worker)
    is_the_same_process(world, worker, counter, program, moves=1)
    taken_at = record.incarnations[1].taken_at
    written = [e.event for e in WorkerStore(world.client.store, worker).events()]
    late = [e for e in written if getattr(e, "incarnation", None) == 1 and e.at >= taken_at]
    assert late == [], "the old agent wrote something after it had lost the lease"
    runs = split(counter.arrivals)
    assert len(runs) == 2
    assert counter.arrivals[len(runs[0]) - 1].at < taken_at, (
        "the old worker ran on after the new one had the lease"
    )
    assert [x.end_reason for x in world.report(worker).incarnations] == ["no_notice", "finished"]


def test_a_short_standstill_of_the_agent_is_survived_in_place(world: World, counter: Counter) -> None:
    """Frozen at the term, but nobody took the lease: the agent proves that it still owns it, and the worker is thawed."""
    program = Program("random_walk.py", 700)
    worker = program.submit(world, counter)
    counter.until(10)
    world.pause_controller(worker)
    host = world.host(worker)
    group = Cgroup(f"{host.cgroup}/worker")
    assert host.agent_pid is not None
    os.kill(host.agent_pid, signal.SIGSTOP)
    until = time.monotonic() + TERM + 2
    while not group.frozen():
        assert time.monotonic() < until, "the shim did not freeze the worker at its deadline"
        time.sleep(0.02)
    os.kill(host.agent_pid, signal.SIGCONT)
    counter.until_arrivals(len(counter.arrivals) + 5, seconds=60)
    world.resume_controller(worker)
    record = is_the_same_process(world, worker, counter, program, moves=0)
    assert len(record.incarnations) == 1
    assert sorted(set(counter.steps)) == list(range(700))
