"""The shim enforces the lease and keeps the worker's lines and exit status, with nobody else alive."""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from savedworker.agent.shim import lease_clock
from savedworker.agent.shim_client import ShimClient, ShimGone
from savedworker.checkpoint.cgroups import Cgroup
from savedworker.model.errors import Fatal
from savedworker.model.manifest import StreamPosition

pytestmark = pytest.mark.criu

TICKER = "while :; do echo tick; sleep 0.02; done"


class Bed:
    """A shim and a stand-in for ``runc run --detach``: a shell that leaves its child in the cgroup and ends."""

    def __init__(self, folder: Path, cgroup: str) -> None:
        self.folder = folder
        self.cgroup = Cgroup(cgroup)
        self.client = ShimClient(folder / "shim")
        self.client.launch(cgroup)
        self.pid = int((folder / "shim/shim.pid").read_text())

    def start(self, script: str, position: StreamPosition = StreamPosition(), status: int = 0) -> None:
        state, report = self.folder / "state.json", self.folder / "status"
        report.write_text("")
        joined = "; ".join(
            f"echo $$ > /sys/fs/cgroup/{c}{self.cgroup.path}/cgroup.procs"
            for c in ("freezer", "cpuacct", "memory")
        )
        starter = (
            f"(exec setsid /bin/sh -c '{joined}; {script}') & "
            f'echo "{{\\"init_process_pid\\": $!}}" > {state}; exit {status}'
        )
        for controller in ("freezer", "cpuacct", "memory"):
            Path(f"/sys/fs/cgroup/{controller}{self.cgroup.path}").mkdir(parents=True, exist_ok=True)
        self.client.start(["/bin/sh", "-c", starter], dict(os.environ), position, report, state)

    def size(self) -> int:
        return self.client.status().position.stdout


@pytest.fixture
def bed(tmp_path: Path) -> Iterator[Bed]:
    made = Bed(tmp_path, f"/savedworker-test/{os.getpid()}-{time.monotonic_ns()}")
    try:
        yield made
    finally:
        made.cgroup.kill()
        with contextlib.suppress(ProcessLookupError):
            os.kill(made.pid, signal.SIGKILL)
        made.cgroup.remove()


def eventually(condition: Callable[[], object], seconds: float = 30.0) -> bool:
    until = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > until:
            return False
        time.sleep(0.01)
    return True


def test_nothing_starts_without_a_lease(bed: Bed) -> None:
    with pytest.raises(Fatal, match="no lease"):
        bed.start(TICKER)
    bed.client.lease(lease_clock() - 1, 1)
    with pytest.raises(Fatal, match="no lease"):
        bed.start(TICKER)


def test_the_worker_is_frozen_at_the_deadline_thawed_by_a_proof_and_killed_a_term_later(bed: Bed) -> None:
    bed.client.lease(lease_clock() + 4.0, 30.0)
    bed.start(TICKER)
    assert eventually(lambda: bed.size() > 0)
    assert eventually(bed.cgroup.frozen)
    time.sleep(0.1)  # what counts as stopped may be on its last microseconds
    used = bed.cgroup.cpu_seconds()
    seen = bed.client.drain()
    time.sleep(0.3)
    assert bed.cgroup.cpu_seconds() == used
    assert bed.client.drain() == seen
    assert bed.client.status().frozen_by_lease
    bed.client.lease(lease_clock() + 4.0, 0.5)
    assert eventually(lambda: bed.size() > seen.stdout)
    assert not bed.client.status().killed_by_lease
    assert eventually(lambda: not bed.cgroup.pids())
    assert bed.client.status().killed_by_lease


def test_after_a_pause_of_the_whole_machine_a_busy_worker_gets_no_more_than_milliseconds(
    tmp_path: Path,
) -> None:
    """Shim and worker stand still for longer than lease and grace, and go on in the same moment: whoever is first."""
    host = Cgroup(f"/savedworker-test/{os.getpid()}-{time.monotonic_ns()}")
    bed = Bed(tmp_path, f"{host.path}/worker")
    try:
        Path(f"/sys/fs/cgroup/freezer{host.path}").mkdir(parents=True, exist_ok=True)
        Path(f"/sys/fs/cgroup/freezer{host.path}/cgroup.procs").write_text(str(bed.pid))
        bed.client.lease(lease_clock() + 4.0, 0.5)
        bed.start("for i in 1 2 3 4 5 6 7 8; do (while :; do :; done) & done; wait")
        assert eventually(lambda: len(bed.cgroup.pids()) >= 9)
        host.freeze()
        assert eventually(host.frozen)
        until = lease_clock() + 5.0
        assert eventually(lambda: lease_clock() > until)
        used = bed.cgroup.cpu_seconds()
        host.thaw()
        assert eventually(lambda: not bed.cgroup.pids())
        assert bed.cgroup.cpu_seconds() - used < 0.03
        assert bed.client.status().killed_by_lease
    finally:
        host.thaw()
        bed.cgroup.kill()
        with contextlib.suppress(ProcessLookupError):
            os.kill(bed.pid, signal.SIGKILL)
        bed.cgroup.remove()
        assert eventually(lambda: not host.pids())
        host.remove()


def test_the_shim_comes_before_everything_else_and_its_worker_does_not(bed: Bed) -> None:
    bed.client.lease(lease_clock() + 60, 60)
    bed.start(TICKER)
    assert eventually(lambda: bed.size() > 0)
    wanted = os.SCHED_FIFO
    try:
        os.sched_setscheduler(0, os.SCHED_FIFO | os.SCHED_RESET_ON_FORK, os.sched_param(1))
    except PermissionError:
        wanted = os.SCHED_OTHER  # nobody may come first here: the shim goes on as it is
    os.sched_setscheduler(0, os.SCHED_OTHER, os.sched_param(0))
    assert os.sched_getscheduler(bed.pid) & ~os.SCHED_RESET_ON_FORK == wanted
    bed.cgroup.freeze()  # else the one that sleeps may be another one by then
    assert eventually(bed.cgroup.frozen)
    policies = {os.sched_getscheduler(pid) & ~os.SCHED_RESET_ON_FORK for pid in bed.cgroup.pids()}
    assert policies == {os.SCHED_OTHER}


def test_a_thaw_by_somebody_else_after_the_deadline_does_not_last(bed: Bed) -> None:
    bed.client.lease(lease_clock() + 3.0, 30.0)
    bed.start(TICKER)
    assert eventually(bed.cgroup.frozen)
    bed.cgroup.thaw()  # as CRIU does at the end of a dump
    assert eventually(bed.cgroup.frozen)


def test_an_older_proof_never_shortens_or_extends_a_newer_deadline(bed: Bed) -> None:
    bed.client.lease(lease_clock() + 60, 60)
    bed.start(TICKER)
    bed.client.lease(lease_clock() - 5, 60)
    assert eventually(lambda: bed.size() > 20)
    assert not bed.client.status().frozen_by_lease


def test_the_lines_and_the_exit_status_outlive_whoever_started_the_worker(bed: Bed) -> None:
    bed.client.lease(lease_clock() + 60, 60)
    bed.start("echo out; echo err >&2; exit 7", StreamPosition(stdout=100, stderr=50))
    status = bed.client.wait()
    assert status.exit is not None
    assert os.waitstatus_to_exitcode(status.exit.wait_status) == 7
    assert status.position == StreamPosition(stdout=104, stderr=54)
    assert bed.client.spool("stdout").read_bytes() == b"out\n"
    assert bed.client.spool("stderr").read_bytes() == b"err\n"


def test_a_failed_start_leaves_no_lines_and_the_next_one_has_its_own_position(bed: Bed) -> None:
    bed.client.lease(lease_clock() + 60, 60)
    with pytest.raises(Fatal, match="status 5"):
        bed.client.start(
            ["/bin/sh", "-c", "echo noise; echo noise >&2; exit 5"],
            dict(os.environ),
            StreamPosition(stdout=500),
            bed.folder / "status",
            bed.folder / "state.json",
        )
    bed.start("echo out; exit 0", StreamPosition(stdout=30))
    assert bed.client.wait().position == StreamPosition(stdout=34)
    assert bed.client.spool("stdout").read_bytes() == b"out\n"


def test_a_worker_that_was_reaped_by_its_starter_is_known_by_inits_report(bed: Bed) -> None:
    bed.client.lease(lease_clock() + 60, 60)
    state, report = bed.folder / "state.json", bed.folder / "status"
    report.write_text("exit 4\n")
    script = f'/bin/true & pid=$!; wait $pid; echo "{{\\"init_process_pid\\": $pid}}" > {state}'
    bed.client.start(["/bin/sh", "-c", script], dict(os.environ), StreamPosition(), report, state)
    end = bed.client.wait().exit
    assert end is not None
    assert end.report == "exit 4"


def test_ten_megabytes_of_lines_are_spooled_without_anybody_reading_them(bed: Bed) -> None:
    bed.client.lease(lease_clock() + 60, 60)
    bed.start("head -c 10000000 /dev/zero; exit 0")
    assert bed.client.wait().position.stdout == 10_000_000


def test_a_stopped_clients_connection_does_not_stop_the_shim(bed: Bed) -> None:
    import socket

    bed.client.lease(lease_clock() + 60, 60)
    idle = socket.socket(socket.AF_UNIX)
    idle.connect(str(bed.folder / "shim/shim.sock"))
    idle.sendall(b'{"op": "sta')
    garbage = socket.socket(socket.AF_UNIX)
    garbage.connect(str(bed.folder / "shim/shim.sock"))
    garbage.sendall(b"\xff\xfe nonsense\n[]\n{}\n")
    assert b"error" in garbage.recv(4096)
    assert bed.client.alive()


def test_a_shim_that_is_gone_is_told_from_one_that_refuses(bed: Bed) -> None:
    os.kill(bed.pid, signal.SIGKILL)
    assert eventually(lambda: not bed.client.alive())
    with pytest.raises(ShimGone):
        bed.client.status()


def test_signals_of_a_shutdown_do_not_end_the_shim(bed: Bed) -> None:
    for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGINT):
        os.kill(bed.pid, number)
    assert bed.client.alive()
