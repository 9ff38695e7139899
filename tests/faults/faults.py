"""Everything that can go wrong, by name. Each fault is done to a running Bed and waits until it has come about."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import time
import uuid
from collections.abc import Callable, Iterator
from datetime import UTC, datetime
from pathlib import Path

from savedworker.fleet.base import LaunchRequest
from savedworker.fleet.local import HostInfo
from savedworker.fleet.local.cgroup import HostCgroup
from savedworker.model import events as ev
from savedworker.model.errors import SavedWorkerError
from savedworker.model.record import State
from savedworker.store.worker import WorkerStore
from tests.faults.bed import TERM, Bed, this_python
from tests.faults.proxy import Rule

Act = Callable[[Bed, str], None]
"""Does a fault. The word is its variant: a crash point, a signal, seconds."""

FAULTS: dict[str, Act] = {}


def fault(act: Act) -> Act:
    FAULTS[act.__name__] = act
    return act


def _send(pid: int | None, number: int) -> None:
    if pid is not None:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, number)


def _running(bed: Bed) -> HostInfo | None:
    """The host on which the worker runs, once it does."""
    bed.wait(lambda: bed.latest is not None and bed.latest.state is State.RUNNING, 30)
    return bed.holder()


def _moved_from(bed: Bed, host: HostInfo | None, seconds: float = 40) -> None:
    """Wait until the worker has another host, and runs there."""

    def moved() -> bool:
        record = bed.latest
        lease = record.lease if record else None
        return (
            record is not None
            and lease is not None
            and (host is None or lease.launch != host.launch)
            and record.state in (State.RUNNING, State.CHECKPOINTING)
        )

    bed.wait(moved, seconds)


def _processes(host: HostInfo, name: str) -> list[int]:
    found = []
    for pid in HostCgroup(host.cgroup).processes():
        with contextlib.suppress(OSError):
            if Path(f"/proc/{pid}/comm").read_text().strip() == name:
                found.append(pid)
    return found


def _preempt(bed: Bed, host: HostInfo | None, notice: float | None) -> None:
    if host is not None:
        with contextlib.suppress(SavedWorkerError):
            bed.fleet.preempt(host.launch, notice)


# The instance goes ---------------------------------------------------------------------------------------------


@fault
def notice(bed: Bed, seconds: str) -> None:
    host = _running(bed)
    _preempt(bed, host, float(seconds))
    _moved_from(bed, host)


@fault
def no_notice(bed: Bed, _: str) -> None:
    host = _running(bed)
    _preempt(bed, host, None)
    _moved_from(bed, host)


@fault
def notice_then_none(bed: Bed, milliseconds: str) -> None:
    """The host goes long before its announced end."""
    host = _running(bed)
    _preempt(bed, host, 20)
    time.sleep(int(milliseconds) / 1000)
    _preempt(bed, host, None)
    _moved_from(bed, host)


@fault
def withdrawn(bed: Bed, milliseconds: str) -> None:
    """A notice that is taken back, at any moment between its arrival and the hand-over."""
    host = _running(bed)
    if host is None:
        return
    _preempt(bed, host, 20)
    time.sleep(int(milliseconds) / 1000)
    with contextlib.suppress(SavedWorkerError):
        bed.fleet.withdraw(host.launch)
    time.sleep(1.0)


@fault
def notice_during_restore(bed: Bed, seconds: str) -> None:
    """A second notice while the next instance restores."""
    host = _running(bed)
    _preempt(bed, host, 15)
    bed.wait(lambda: bed.record(bed.worker).state is State.RESTORING, 20)
    new = bed.holder()
    if new is None or host is None or new.launch == host.launch:
        return
    _preempt(bed, new, float(seconds))
    _moved_from(bed, new)


@fault
def daemon_killed(bed: Bed, _: str) -> None:
    """What stands for the hypervisor dies; the fleet finds out and ends the host."""
    host = _running(bed)
    if host is not None:
        _send(host.daemon_pid, signal.SIGKILL)
    _moved_from(bed, host)


@fault
def host_stands_still(bed: Bed, seconds: str) -> None:
    """The whole host is paused, and goes on later."""
    host = _running(bed)
    if host is None:
        return
    group = HostCgroup(host.cgroup)
    pids = group.processes() - {host.daemon_pid}
    for pid in pids:
        _send(pid, signal.SIGSTOP)
    time.sleep(float(seconds))
    for pid in pids:
        _send(pid, signal.SIGCONT)
    time.sleep(0.5)


# Processes die or stop -----------------------------------------------------------------------------------------


@fault
def agent_killed(bed: Bed, _: str) -> None:
    host = _running(bed)
    if host is not None:
        _send(host.agent_pid, signal.SIGKILL)
    time.sleep(1.5)


@fault
def agent_stopped(bed: Bed, seconds: str) -> None:
    """The agent stands still for a while, perhaps past its lease; a successor may be at work when it comes back."""
    host = _running(bed)
    if host is None:
        return
    _send(host.agent_pid, signal.SIGSTOP)
    time.sleep(float(seconds))
    _send(host.agent_pid, signal.SIGCONT)
    time.sleep(0.5)


@fault
def agent_stopped_for_good(bed: Bed, _: str) -> None:
    """Only the lease protects the worker now."""
    host = _running(bed)
    if host is not None:
        _send(host.agent_pid, signal.SIGSTOP)
    _moved_from(bed, host)


@fault
def shim_killed(bed: Bed, _: str) -> None:
    host = _running(bed)
    if host is not None:
        _send(bed.shim_pid(host), signal.SIGKILL)
    _moved_from(bed, host)


@fault
def agent_and_shim_killed(bed: Bed, _: str) -> None:
    host = _running(bed)
    if host is not None:
        _send(host.agent_pid, signal.SIGKILL)
        _send(bed.shim_pid(host), signal.SIGKILL)
    _moved_from(bed, host)


@fault
def shim_killed_beside_a_stopped_agent(bed: Bed, _: str) -> None:
    """Nobody is left to freeze the worker: it must end with its shim."""
    host = _running(bed)
    if host is not None:
        _send(host.agent_pid, signal.SIGSTOP)
        _send(bed.shim_pid(host), signal.SIGKILL)
    _moved_from(bed, host)


@fault
def tool_killed_in_dump(bed: Bed, name: str) -> None:
    """CRIU or runc is killed while it takes a checkpoint."""
    host = _running(bed)
    if host is None:
        return
    with contextlib.suppress(SavedWorkerError):
        bed.client.request_checkpoint(bed.worker)
    _kill_when_seen(host, name, 5)
    time.sleep(0.5)


@fault
def tool_killed_in_last_dump(bed: Bed, name: str) -> None:
    host = _running(bed)
    if host is None:
        return
    _preempt(bed, host, 12)
    _kill_when_seen(host, name, 5)
    _moved_from(bed, host)


@fault
def tool_killed_in_restore(bed: Bed, name: str) -> None:
    host = _running(bed)
    _preempt(bed, host, None)
    bed.wait(lambda: bed.record(bed.worker).state is State.RESTORING, 20)
    new = bed.holder()
    if new is not None:
        _kill_when_seen(new, name, 5)
    _moved_from(bed, host)


def _kill_when_seen(host: HostInfo, name: str, seconds: float) -> None:
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        pids = _processes(host, name)
        for pid in pids:
            _send(pid, signal.SIGKILL)
        if pids:
            return
        time.sleep(0.002)


# Crash points --------------------------------------------------------------------------------------------------

_DOES = "kill"


def _split(word: str) -> tuple[str, str]:
    point, _, action = word.partition("=")
    return point, action or _DOES


@fault
def crash_in_checkpoint(bed: Bed, word: str) -> None:
    point, action = _split(word)
    host = _running(bed)
    if host is None:
        return
    bed.arm(point, action, host)
    with contextlib.suppress(SavedWorkerError):
        bed.client.request_checkpoint(bed.worker)
    bed.wait(lambda: bed.was_hit(point), 6)
    time.sleep(1.0)


@fault
def crash_in_leaving(bed: Bed, word: str) -> None:
    point, action = _split(word)
    host = _running(bed)
    if host is None:
        return
    bed.arm(point, action, host)
    _preempt(bed, host, 12)
    bed.wait(lambda: bed.was_hit(point), 8)
    _moved_from(bed, host)


@contextlib.contextmanager
def _no_chunks(bed: Bed) -> Iterator[None]:
    """No chunk can be stored meanwhile."""
    if bed.proxy is not None:
        rule = bed.proxy.add(Rule("503", "PUT", KEYS["chunk"], times=10**6))
        yield
        rule.times = 0
        return
    chunks = bed.folder / "store/workers" / bed.worker / "chunks"
    aside = chunks.with_name("aside")
    aside.mkdir(exist_ok=True) if not chunks.exists() else chunks.rename(aside)
    chunks.touch()
    try:
        yield
    finally:
        chunks.unlink()
        aside.rename(chunks)


@fault
def crash_in_yielding(bed: Bed, word: str) -> None:
    """No checkpoint can be stored before the reclaim, so the worker is stopped without one; that is interrupted."""
    point, action = _split(word)
    host = _running(bed)
    if host is None:
        return
    bed.arm(point, action, host)
    with _no_chunks(bed):
        _preempt(bed, host, 6)
        bed.wait(lambda: bed.was_hit(point), 9)
    _moved_from(bed, host)


@fault
def agent_stuck_when_not_wanted(bed: Bed, _: str) -> None:
    """The agent of a launch that is not needed says so and then does not end: the controller has to."""
    _running(bed)
    bed.arm("agent.left", "stop")
    stray_launch(bed, "known")
    bed.wait(lambda: bed.was_hit("agent.left"), 60)


@fault
def crash_in_move(bed: Bed, word: str) -> None:
    """On the next host, from its boot until the worker runs there; the last one goes with notice or without."""
    point, action = _split(word)
    host = _running(bed)
    if host is None:
        return
    bed.arm(point, action)
    _preempt(bed, host, None if bed.seed % 2 else 12)
    bed.wait(lambda: bed.was_hit(point), 15)
    _moved_from(bed, host)


@fault
def crash_while_running(bed: Bed, word: str) -> None:
    point, action = _split(word)
    host = _running(bed)
    if host is None:
        return
    bed.arm(point, action, host)
    bed.wait(lambda: bed.was_hit(point), 4)
    time.sleep(1.0)


@fault
def host_lost_at(bed: Bed, point: str) -> None:
    """The host is destroyed at this very point of a checkpoint before a reclaim, or of a move."""
    host = _running(bed)
    if host is None:
        return
    moving = point.startswith(("restore.", "agent.restored", "agent.runc", "agent.take"))
    bed.arm(point, "hang:20", None if moving else host)
    _preempt(bed, host, 12)
    bed.wait(lambda: bed.was_hit(point), 12)
    _preempt(bed, bed.holder(), None)
    _moved_from(bed, host)


@fault
def crash_at_the_end(bed: Bed, word: str) -> None:
    """When the worker's own process has ended."""
    point, action = _split(word)
    bed.arm(point, action)


# Controllers ---------------------------------------------------------------------------------------------------


@fault
def controller_killed(bed: Bed, word: str) -> None:
    """A controller of its own process dies at a crash point while it replaces an instance; ours comes back after it."""
    point, action = _split(word)
    host = _running(bed)
    bed.pause_controller(bed.worker)
    command = [this_python(), "-m", "savedworker.cli", "controller", "--store", bed.client.store.url]
    said = bed.folder / "controller.log"
    with (
        said.open("w") as log,
        subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=log) as other,
    ):
        try:
            bed.wait(lambda: said.stat().st_size or other.poll() is not None, 90)
            bed.arm(point, action)
            _preempt(bed, host, 12 if "terminate" in point else None)
            bed.wait(lambda: bed.was_hit(point) or other.poll() is not None, 60)
        finally:
            time.sleep(0.3)
            other.kill()
    bed.resume_controller(bed.worker)
    _moved_from(bed, host)


@fault
def controller_away(bed: Bed, seconds: str) -> None:
    """Nobody reconciles while an instance is lost."""
    host = _running(bed)
    bed.pause_controller(bed.worker)
    _preempt(bed, host, 12 if bed.seed % 2 else None)
    time.sleep(float(seconds))
    bed.resume_controller(bed.worker)
    _moved_from(bed, host)


@fault
def stray_launch(bed: Bed, known: str) -> None:
    """Another instance boots for the worker: one that the record knows, or one that it does not."""
    _running(bed)
    launch = f"l-{uuid.uuid4().hex[:16]}"
    spec = bed.client.spec(bed.worker)
    if known == "known":
        event = ev.LaunchRequested(at=datetime.now(UTC), launch=launch, avoid=(), detail="a stale controller")
        WorkerStore(bed.client.store, bed.worker).record_event(event)
    with contextlib.suppress(SavedWorkerError):
        bed.fleet.launch(
            LaunchRequest(launch=launch, worker=bed.worker, store_url=bed.client.store.url, spec=spec)
        )
    bed.stray = launch


# The network (an object store makes it matter) -----------------------------------------------------------------


def link(host: HostInfo, state: str) -> None:
    """Take the host's cable out, or put it back."""
    name = f"swv{host.instance.removeprefix('host-')}"
    subprocess.run(["ip", "link", "set", name, state], check=False, capture_output=True)


@fault
def partition(bed: Bed, seconds: str) -> None:
    """The host loses its network while the worker computes on; 0: for good."""
    host = _running(bed)
    if host is None:
        return
    link(host, "down")
    if float(seconds):
        time.sleep(float(seconds))
        link(host, "up")
        time.sleep(0.5)
    else:
        _moved_from(bed, host)


KEYS = {
    "record": r"/record\.json",
    "chunk": "/chunks/",
    "manifest": r"/manifest\.json",
    "event": "/events/",
    "log": "/logs/",
    "list": "list-type",
}


@fault
def store_trouble(bed: Bed, word: str) -> None:
    """Requests of the worker's host to the store go wrong. ``word``: trouble:method:key:times."""
    assert bed.proxy is not None
    host = _running(bed)
    if host is None:
        return
    trouble, method, key, times = word.split(":")
    rule = Rule(trouble, method, KEYS[key], host.address, int(times))  # type: ignore[arg-type]
    bed.proxy.add(rule)
    if key in ("chunk", "manifest"):
        with contextlib.suppress(SavedWorkerError):
            bed.client.request_checkpoint(bed.worker)
    bed.wait(lambda: rule.times <= 0, 6)
    time.sleep(1.0)


@fault
def store_trouble_in_move(bed: Bed, word: str) -> None:
    """The same, for everybody, while the worker leaves, moves and is restored."""
    assert bed.proxy is not None
    host = _running(bed)
    trouble, method, key, times = word.split(":")
    rule = Rule(trouble, method, KEYS[key], None, int(times))  # type: ignore[arg-type]
    bed.proxy.add(rule)
    _preempt(bed, host, 15)
    _moved_from(bed, host)
    rule.times = 0


# The end -------------------------------------------------------------------------------------------------------


@fault
def crash_in_cancel(bed: Bed, word: str) -> None:
    """The agent dies while it ends a cancelled worker."""
    point, action = _split(word)
    host = _running(bed)
    if host is not None:
        bed.arm(point, action, host)
    bed.client.cancel(bed.worker, "a schedule")


@fault
def cancel(bed: Bed, state: str) -> None:
    """In the state named: the worker is brought there and cancelled."""
    host = _running(bed)
    if state == "checkpointing":
        with contextlib.suppress(SavedWorkerError):
            bed.client.request_checkpoint(bed.worker)
    elif state in ("leaving", "migrating", "restoring"):
        _preempt(bed, host, 12)
    wanted = State.CHECKPOINTING if state == "leaving" else State(state)
    until = time.monotonic() + 10
    while bed.record(bed.worker).state is not wanted and time.monotonic() < until:
        time.sleep(0.005)
    bed.client.cancel(bed.worker, "a schedule")


PAST_LEASE = TERM * 1.6
