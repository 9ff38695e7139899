"""LocalFleet on this machine: real namespaces, cgroups and processes. The agents are stand-ins, the hosts are not."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from functools import partial
from pathlib import Path

import pytest

from savedworker.fleet.base import Fleet, NoCapacity
from savedworker.fleet.local import HostInfo, LocalFleet, namespaces, network
from savedworker.fleet.local.cgroup import hierarchies
from savedworker.fleet.local.process import ProcessId
from savedworker.model.errors import Refused, Temporary
from savedworker.notice.base import Notice
from savedworker.notice.ec2 import Ec2Monitor
from tests.fleet.conftest import Fleets, leftovers, request_for, wait

pytestmark = pytest.mark.criu

ROOT = Path(__file__).parents[2]


def script(text: str) -> tuple[str, ...]:
    """A stand-in for the agent, in Python."""
    return (sys.executable, "-c", textwrap.dedent(text))


def in_netns(name: str, call: Callable[[], object]) -> None:
    """Run ``call`` in a thread of its own inside a network namespace, and raise what it raises."""

    def enter() -> None:
        with open(f"/run/netns/{name}") as netns:
            namespaces.setns(netns.fileno(), namespaces.CLONE_NEWNET)
        call()

    with ThreadPoolExecutor(1) as pool:
        pool.submit(enter).result(120)


def read(path: Path) -> str:
    """What is in a file that may be gone."""
    try:
        return path.read_text()
    except FileNotFoundError:
        return ""


def read_when_there(path: Path) -> str:
    assert wait(lambda: path.exists() and path.read_text().endswith("\n")), f"{path} does not come"
    return path.read_text()


def launcher(directory: Path, launch: str, then: str = "") -> list[str]:
    """A program that launches a host and then does something else."""
    return [
        sys.executable,
        "-c",
        textwrap.dedent(f"""
            import os, signal, sys
            sys.path.insert(0, {str(ROOT)!r})
            from pathlib import Path
            from savedworker.fleet.local import LocalFleet
            from tests.fleet.conftest import SLEEPER, request_for
            print("ready", flush=True)
            print(LocalFleet(Path({str(directory)!r}), agent=SLEEPER).launch(request_for({launch!r})).instance, flush=True)
            {then}
        """),
    ]


def environment() -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": str(ROOT)}


# Booting


def test_a_host_has_its_agent_in_its_own_network_scratch_and_cgroup(fleets: Fleets) -> None:
    fleet = fleets(
        [
            "/bin/sh",
            "-c",
            "ip -4 -o addr show dev eth0 >net; pwd >where; echo {launch} {zone} {cgroup} >args; exec sleep 600",
        ]
    )
    assert isinstance(fleet, Fleet)
    launched = fleet.launch(request_for("a"))
    host = fleet.host("a")
    assert fleet.describe(["a", "never"])["a"].state == "running"
    assert fleet.describe(["never"])["never"].state == "unknown"
    assert (launched.instance, launched.zone) == (host.instance, host.zone)
    assert read_when_there(host.scratch / "args").split() == ["a", host.zone, host.cgroup]
    assert f" {host.address}/16 " in read_when_there(host.scratch / "net")
    assert read_when_there(host.scratch / "where").strip() == str(host.scratch)
    assert host.agent_pid is not None
    assert f"freezer:{host.cgroup}/system\n" in Path(f"/proc/{host.agent_pid}/cgroup").read_text() or (
        f"0::{host.cgroup}/system\n" in Path(f"/proc/{host.agent_pid}/cgroup").read_text()
    )
    assert (fleet.directory.stat().st_mode & 0o777, host.scratch.stat().st_mode & 0o777) == (0o700, 0o700)


def test_one_launch_id_is_one_host_however_many_ask_at_once(fleets: Fleets) -> None:
    programs = [
        subprocess.Popen(
            launcher(fleets.directory, "same"), stdout=subprocess.PIPE, text=True, env=environment()
        )
        for _ in range(3)
    ]
    with ThreadPoolExecutor(3) as pool:
        names = {x.instance for x in pool.map(fleets().launch, [request_for("same")] * 3)}
    names |= {program.communicate(timeout=60)[0].split()[1] for program in programs}
    assert len(names) == 1
    assert len(list(network.ADDRESSES.glob("*"))) >= 1
    assert [record.launch for record, _ in fleets.records()] == ["same"]
    assert len(list((fleets.directory / "names").iterdir())) == 1


def test_the_same_launch_id_again_brings_nothing_back_from_the_dead(fleets: Fleets) -> None:
    fleet = fleets()
    first = fleet.launch(request_for("a"))
    fleet.terminate("a")
    assert fleet.launch(request_for("a")) == first
    assert fleet.describe(["a"])["a"].state == "ended"


def test_a_host_survives_the_process_that_launched_it(fleets: Fleets) -> None:
    program = launcher(fleets.directory, "a", "os.kill(os.getpid(), signal.SIGKILL)")
    done = subprocess.run(program, capture_output=True, text=True, env=environment())
    assert done.returncode == -signal.SIGKILL
    host = fleets().host("a")
    assert host.instance == done.stdout.split()[1]
    time.sleep(0.3)
    assert fleets().describe(["a"])["a"].state == "running"
    assert host.agent_pid is not None
    assert ProcessId.of(host.agent_pid)


@pytest.mark.parametrize("delay", [0.0, 0.02, 0.05, 0.08, 0.12, 0.2])
def test_a_launcher_killed_half_way_leaves_a_whole_host_or_nothing(fleets: Fleets, delay: float) -> None:
    program = subprocess.Popen(
        launcher(fleets.directory, "a"), stdout=subprocess.PIPE, text=True, env=environment()
    )
    assert program.stdout is not None
    program.stdout.readline()
    time.sleep(delay)
    program.kill()
    program.communicate(timeout=30)
    fleet = fleets()
    assert wait(lambda: fleet.describe(["a"])["a"].state in ("running", "unknown"))
    if fleet.describe(["a"])["a"].state == "unknown":
        assert fleets.records() == []
    fleet.launch(request_for("a"))
    assert fleet.describe(["a"])["a"].state == "running"


def test_a_host_that_cannot_boot_leaves_nothing(fleets: Fleets) -> None:
    with pytest.raises(Temporary, match=r"does not boot.*/no/such/agent"):
        fleets(["/no/such/agent"]).launch(request_for("a"))
    assert fleets.records() == []
    assert list((fleets.directory / "hosts").iterdir()) == list((fleets.directory / "names").iterdir()) == []
    assert [x.name for x in network.ADDRESSES.glob("*") if str(fleets.directory) in read(x)] == []
    fleets().launch(request_for("a"))
    assert fleets().describe(["a"])["a"].state == "running"


def test_hosts_launched_at_once_reach_the_outside_but_not_each_others_files(fleets: Fleets) -> None:
    fleet = fleets(
        script(f"""
            import socket, time, pathlib
            pathlib.Path("secret").write_text("mine")
            with socket.create_connection(("{network.GATEWAY}", int("{{worker}}".removeprefix("port-"))), 10) as s:
                s.sendall(b"{{instance}}")
                answer = s.recv(100)
            hosts = sorted(p.name for p in pathlib.Path("../..").iterdir())
            pathlib.Path("seen").write_text(f"{{answer.decode()}} {{','.join(hosts)}}\\n")
            time.sleep(600)
        """)
    )
    network.ensure_bridge()
    with socket.create_server((network.GATEWAY, 0)) as server:

        def serve() -> None:
            for _ in range(4):
                connection, peer = server.accept()
                with connection:
                    connection.recv(100)
                    connection.sendall(peer[0].encode())

        thread = threading.Thread(target=serve, daemon=True)
        thread.start()
        port = server.getsockname()[1]
        requests = [replace(request_for(f"l{i}"), worker=f"port-{port}") for i in range(4)]
        with ThreadPoolExecutor(4) as pool:
            launched = list(pool.map(fleet.launch, requests))
        hosts = [fleet.host(f"l{i}") for i in range(4)]
        assert len({h.address for h in hosts}) == len({x.instance for x in launched}) == 4
        for host in hosts:
            assert read_when_there(host.scratch / "seen").split() == [host.address, host.launch]
        thread.join(5)


def test_relaunches_leave_the_zone_that_was_reclaimed(fleets: Fleets) -> None:
    fleet = fleets()
    zones = [fleet.launch(request_for(f"l{i}")).zone for i in range(3)]
    assert sorted(zones, key=str) == ["local-a", "local-b", "local-c"]
    assert fleet.launch(request_for("x", ("local-a", "local-c"))).zone == "local-b"
    assert fleet.launch(request_for("y", ("local-a", "local-b", "local-c"))).zone is not None


def test_no_more_hosts_than_the_capacity(fleets: Fleets, monkeypatch: pytest.MonkeyPatch) -> None:
    fleets(capacity=1).launch(request_for("a"))
    monkeypatch.setenv("SAVEDWORKER_LOCAL_CAPACITY", "1")
    with pytest.raises(NoCapacity, match="all 1 hosts"):
        fleets().launch(request_for("b"))
    assert fleets().describe(["b"])["b"].state == "unknown"
    fleets().terminate("a")
    fleets().launch(request_for("b"))


# Notices


def test_the_metadata_of_a_host_gives_notices_that_the_ec2_monitor_understands(fleets: Fleets) -> None:
    fleet = fleets()
    fleet.launch(request_for("a"))
    host = fleet.host("a")
    seen: list[Notice] = []
    monitor = Ec2Monitor(poll=0.05)
    asked: list[float] = []

    def watch() -> None:
        stop = threading.Event()

        def drill() -> None:
            fleet.rebalance("a")
            assert wait(lambda: len(seen) == 1)
            asked.append(time.monotonic())
            fleet.preempt("a", 90)
            asked.append(time.monotonic())
            assert wait(lambda: len(seen) == 2)
            fleet.withdraw("a")
            assert wait(lambda: len(seen) == 4)
            stop.set()

        with ThreadPoolExecutor(1) as pool:
            drilled = pool.submit(drill)
            drilled.add_done_callback(lambda _: stop.set())
            monitor.watch(stop, seen.append)
            drilled.result()

    in_netns(host.netns, watch)
    assert monitor.problem() is None
    assert [(n.kind, n.withdrawn) for n in seen] == [
        ("rebalance", False),
        ("interruption", False),
        ("interruption", True),
        ("rebalance", True),
    ]
    assert seen[1].deadline is not None
    assert asked[0] + 89 < seen[1].deadline < asked[1] + 92  # it is told in whole seconds
    time.sleep(0.2)
    assert fleet.describe(["a"])["a"].state == "running"


SWARM = script("""
    import os, signal, subprocess, time, pathlib

    cgroup, pids = "{cgroup}", []
    def keep(pid):
        pids.append(pid)

    # a daemon: forked twice, in a session of its own, deaf to SIGTERM
    out, into = os.pipe()
    if os.fork() == 0:
        os.setsid()
        if os.fork() == 0:
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
            os.write(into, str(os.getpid()).encode())
            time.sleep(600)
        os._exit(0)
    keep(int(os.read(out, 20)))
    # a stopped one
    stopped = subprocess.Popen(["sleep", "600"])
    stopped.send_signal(signal.SIGSTOP)
    keep(stopped.pid)
    # a frozen one and a stopped frozen one in the container's cgroup, in several hierarchies
    freezer = next(m for m in ("/sys/fs/cgroup/freezer", "/sys/fs/cgroup") if os.path.exists(f"{m}{cgroup}"))
    other = "/sys/fs/cgroup/memory"
    groups = [f"{freezer}{cgroup}/worker/inner"] + ([f"{other}{cgroup}/worker"] if os.path.exists(other + "/tasks") else [])
    for group in groups:
        os.makedirs(group, exist_ok=True)
    for stop in (False, True):
        frozen = subprocess.Popen(["sleep", "600"])
        for group in groups:
            pathlib.Path(group, "cgroup.procs").write_text(str(frozen.pid))
        if stop:
            frozen.send_signal(signal.SIGSTOP)
        keep(frozen.pid)
    name, value = ("freezer.state", "FROZEN") if "freezer" in freezer else ("cgroup.freeze", "1")
    pathlib.Path(f"{freezer}{cgroup}/worker/{name}").write_text(value)
    # mounts, one of them of a user's directory
    for name in ("lower", "upper", "work", "root", "volume", "shm"):
        os.mkdir(name)
    pathlib.Path("lower/file").write_text("x")
    run = lambda *words: subprocess.run(words, check=True)
    run("mount", "-t", "overlay", "overlay", "-o", "lowerdir=lower,upperdir=upper,workdir=work", "root")
    run("mount", "-t", "tmpfs", "tmpfs", "shm")
    run("mount", "--bind", "{worker}", "volume")
    run("ip", "netns", "add", "sw-inner-{instance}")
    for word in pids:
        print(word)
    pathlib.Path("pids.new").write_text(" ".join(map(str, pids)) + "\\n")
    os.rename("pids.new", "pids")
    time.sleep(600)
""")


def swarm(fleets: Fleets, volume: Path) -> tuple[LocalFleet, HostInfo, list[ProcessId]]:
    """A host with all the processes and mounts that are hard to get rid of."""
    (volume / "precious").write_text("mine")
    fleet = fleets(SWARM)
    fleet.launch(replace(request_for("a"), worker=str(volume)))
    host = fleet.host("a")
    pids = [int(word) for word in read_when_there(host.scratch / "pids").split()]
    processes = [p for p in map(ProcessId.of, [*pids, host.agent_pid or 0]) if p]
    assert len(processes) == 5
    return fleet, host, processes


def assert_all_gone(host: HostInfo, processes: list[ProcessId], volume: Path) -> None:
    assert [p for p in processes if p.alive] == []
    daemon = ProcessId.of(host.daemon_pid)
    assert daemon is None or wait(lambda: not daemon.alive)
    assert leftovers(host, host.directory) == []
    assert not Path(f"/run/netns/sw-inner-{host.instance}").exists()
    assert (volume / "precious").read_text() == "mine"


def test_preempted_without_notice_nothing_is_left_when_the_call_returns(
    fleets: Fleets, tmp_path: Path
) -> None:
    fleet, host, processes = swarm(fleets, tmp_path)
    fleet.preempt("a", None)
    view = fleet.describe(["a"])["a"]
    assert (view.state, view.outcome, view.detail) == ("ended", "gone", "preempted without notice")
    assert (view.instance, view.zone) == (host.instance, host.zone)
    assert_all_gone(host, processes, tmp_path)


def test_preempted_with_notice_everything_runs_until_the_deadline_and_nothing_after(
    fleets: Fleets, tmp_path: Path
) -> None:
    fleet, host, processes = swarm(fleets, tmp_path)
    at = time.monotonic()
    fleet.preempt("a", 1.5)
    while (looked := [p.alive for p in processes]) and time.monotonic() < at + 1.5:
        assert all(looked)
        time.sleep(0.02)
    while True:
        looked_at = time.monotonic()
        if fleet.describe(["a"])["a"].state == "ended":
            break
        assert looked_at - at < 4
        time.sleep(0.02)
    assert fleet.describe(["a"])["a"].detail == "preempted with 1.5s notice"
    fleet.terminate("a")  # waits until it is cleaned up
    assert_all_gone(host, processes, tmp_path)
    with pytest.raises(Refused, match="preempted with"):
        fleet.preempt("a", None)


def test_terminate_is_final_repeatable_and_safe_from_several_sides(fleets: Fleets, tmp_path: Path) -> None:
    fleet, host, processes = swarm(fleets, tmp_path)
    with ThreadPoolExecutor(4) as pool:
        list(pool.map(lambda _: fleets().terminate("a"), range(4)))
    assert_all_gone(host, processes, tmp_path)
    fleet.terminate("a")
    fleet.terminate("never")
    assert fleet.describe(["a"])["a"].detail == "terminated"


def test_a_host_whose_daemon_was_killed_is_noticed_and_destroyed(fleets: Fleets, tmp_path: Path) -> None:
    fleet, host, processes = swarm(fleets, tmp_path)
    os.kill(host.daemon_pid, signal.SIGKILL)
    assert wait(lambda: fleet.describe(["a"])["a"].state == "ended")
    view = fleet.describe(["a"])["a"]
    assert (view.outcome, view.detail) == ("gone", "the host daemon died")
    assert_all_gone(host, processes, tmp_path)


def test_a_host_whose_daemon_was_killed_can_be_terminated_from_several_sides(
    fleets: Fleets, tmp_path: Path
) -> None:
    _, host, processes = swarm(fleets, tmp_path)
    os.kill(host.daemon_pid, signal.SIGKILL)
    with ThreadPoolExecutor(3) as pool:
        list(pool.map(lambda _: fleets().terminate("a"), range(3)))
    assert_all_gone(host, processes, tmp_path)


def test_a_stopped_daemon_does_not_save_its_host(fleets: Fleets, tmp_path: Path) -> None:
    fleet, host, processes = swarm(fleets, tmp_path)
    os.kill(host.daemon_pid, signal.SIGSTOP)
    fleet.terminate("a")
    assert_all_gone(host, processes, tmp_path)
    assert fleet.describe(["a"])["a"].state == "ended"


@pytest.mark.parametrize("how", ["terminate", "preempt"])
def test_a_frozen_host_is_ended_too(fleets: Fleets, tmp_path: Path, how: str) -> None:
    """As a checkpoint that was interrupted, or a person, may leave it: nothing in it dies of a signal."""
    fleet, host, processes = swarm(fleets, tmp_path)
    freeze_cgroup(host.cgroup)
    if how == "terminate":
        fleet.terminate("a")
    else:
        fleet.preempt("a", None)
    assert_all_gone(host, processes, tmp_path)
    assert fleet.describe(["a"])["a"].state == "ended"


def freeze_cgroup(path: str) -> None:
    """Freeze all of a host from outside, its daemon included."""
    for hierarchy in hierarchies():
        name, value, state = (
            ("cgroup.freeze", "1", "frozen 1") if hierarchy.v2 else ("freezer.state", "FROZEN", "FROZEN")
        )
        if "freezer" in hierarchy.controllers or hierarchy.v2:
            group = hierarchy.mount / path.lstrip("/")
            if (group / name).exists():
                (group / name).write_text(value)
                asked = group / ("cgroup.events" if hierarchy.v2 else name)
                assert wait(partial(_says, asked, state)), "it does not freeze"


def _says(path: Path, text: str) -> bool:
    return text in path.read_text()


def test_sigterm_to_the_daemon_ends_its_host(fleets: Fleets, tmp_path: Path) -> None:
    fleet, host, processes = swarm(fleets, tmp_path)
    os.kill(host.daemon_pid, signal.SIGTERM)
    assert wait(lambda: fleet.describe(["a"])["a"].state == "ended")
    fleet.terminate("a")
    assert_all_gone(host, processes, tmp_path)


def test_a_process_that_forks_without_end_ends(fleets: Fleets) -> None:
    fleet = fleets(["/bin/sh", "-c", "while :; do (while :; do sleep 0.01 & wait; done) & sleep 0.05; done"])
    fleet.launch(request_for("a"))
    host = fleet.host("a")
    time.sleep(1)
    fleet.preempt("a", None)
    assert leftovers(host, host.directory) == []


# The agent's end


def test_an_agent_that_crashes_is_started_again(fleets: Fleets) -> None:
    fleet = fleets(
        ["/bin/sh", "-c", "echo x >>starts; [ $(wc -l <starts) -ge 4 ] && exec sleep 600; kill -SEGV $$"]
    )
    fleet.launch(request_for("a"))
    first = fleet.host("a")
    assert wait(lambda: fleet.host("a").agent_starts == 4)
    host = fleet.host("a")
    assert host.daemon_pid == first.daemon_pid
    assert fleet.describe(["a"])["a"].state == "running"
    assert "signal 11" in (host.directory / "daemon.log").read_text()


def test_what_the_agent_left_running_survives_its_crash(fleets: Fleets) -> None:
    fleet = fleets(
        ["/bin/sh", "-c", "[ -e shim ] && exec sleep 600; setsid sleep 600 & echo $! >shim; exit 3"]
    )
    fleet.launch(request_for("a"))
    assert wait(lambda: fleet.host("a").agent_starts == 2)
    shim = int(read_when_there(fleet.host("a").scratch / "shim"))
    assert ProcessId.of(shim)


def test_an_agent_that_keeps_crashing_fails_the_host(fleets: Fleets) -> None:
    fleet = fleets(["/bin/sh", "-c", "exit 7"], restart_pause=0.01, restart_limit=3)
    fleet.launch(request_for("a"))
    assert wait(lambda: fleet.describe(["a"])["a"].state == "ended")
    view = fleet.describe(["a"])["a"]
    assert (view.outcome, view.detail) == ("failed", "its agent crashed 4 times, at last with exit status 7")


def test_a_host_whose_agent_is_done_ends_itself(fleets: Fleets) -> None:
    fleet = fleets(["/bin/sh", "-c", "setsid sleep 600 & exit 0"])
    fleet.launch(request_for("a"))
    assert wait(lambda: fleet.describe(["a"])["a"].state == "ended")
    assert fleet.describe(["a"])["a"].detail == "ended itself"
    [(record, path)] = fleets.records()
    assert wait(lambda: leftovers(record, path) == [])


def test_an_agent_that_is_done_before_the_deadline_was_still_preempted(fleets: Fleets) -> None:
    fleet = fleets(["/bin/sh", "-c", "while [ ! -e done ]; do sleep 0.02; done"])
    fleet.launch(request_for("a"))
    fleet.preempt("a", 60)
    (fleet.host("a").scratch / "done").touch()
    assert wait(lambda: fleet.describe(["a"])["a"].state == "ended")
    assert fleet.describe(["a"])["a"].detail == "preempted with 60s notice; its agent was done before"


# Leftovers


def test_a_sweep_takes_what_dead_daemons_left_and_spares_the_living(fleets: Fleets) -> None:
    fleet = fleets()
    for launch in ("dead", "living"):
        fleet.launch(request_for(launch))
    host = fleet.host("dead")
    os.kill(host.daemon_pid, signal.SIGKILL)
    assert wait(lambda: fleet.sweep() == ("dead",))
    assert fleet.sweep() == ()
    assert leftovers(host, host.directory) == []
    assert fleet.describe(["living"])["living"].state == "running"


def test_a_host_whose_directory_is_removed_by_hand_ends(fleets: Fleets) -> None:
    fleet = fleets()
    fleet.launch(request_for("a"))
    host = fleet.host("a")
    subprocess.run(["rm", "-rf", str(host.directory)], check=True)
    assert wait(lambda: leftovers(host, host.directory) == [])
    assert fleet.describe(["a"])["a"].state == "unknown"


def test_a_host_whose_directory_and_daemon_are_gone_is_swept(fleets: Fleets) -> None:
    fleet = fleets()
    fleet.launch(request_for("a"))
    host = fleet.host("a")
    os.kill(host.daemon_pid, signal.SIGKILL)
    subprocess.run(["rm", "-rf", str(host.directory)], check=True)
    fleet.sweep()
    assert wait(lambda: leftovers(host, host.directory) == [])
    assert host.agent_pid is not None
    assert ProcessId.of(host.agent_pid) is None


def test_after_a_restart_of_the_machine_a_host_is_gone_and_nobody_elses_names_are_touched(
    fleets: Fleets,
) -> None:
    fleet = fleets()
    fleet.launch(request_for("a"))
    host = fleet.host("a")
    record_file = host.directory / "host.json"
    document = json.loads(record_file.read_text())
    record_file.write_text(json.dumps(document | {"boot": "an earlier one"}))
    view = fleet.describe(["a"])["a"]
    assert (view.state, view.detail) == ("ended", "the machine restarted")
    assert ProcessId.of(host.daemon_pid)  # stands for whoever has these names now
    assert Path(f"/run/netns/{host.netns}").exists()
    record_file.write_text(json.dumps(document))
    (host.directory / "ended.json").unlink()


def test_a_tombstone_is_kept_for_a_day(fleets: Fleets) -> None:
    fleet = fleets()
    fleet.launch(request_for("a"))
    host = fleet.host("a")
    fleet.terminate("a")
    tombstone = host.directory / "ended.json"
    document = json.loads(tombstone.read_text())
    for hours, state in ((23, "ended"), (25, "unknown")):
        at = datetime.now(UTC) - timedelta(hours=hours)
        tombstone.write_text(json.dumps(document | {"at": at.isoformat()}))
        fleet.sweep()
        assert fleet.describe(["a"])["a"].state == state
    assert not host.directory.exists()
    assert list((fleets.directory / "names").iterdir()) == []


def test_every_hierarchy_is_looked_at_once_whatever_criu_has_mounted_for_a_moment(tmp_path: Path) -> None:
    mounted = {
        line.split()[4]
        for line in Path("/proc/self/mountinfo").read_text().splitlines()
        if " - cgroup" in line and line.split()[4].startswith("/sys/fs/cgroup")
    }
    known = hierarchies()
    assert {str(h.mount) for h in known} == mounted
    subprocess.run(["mount", "--bind", known[0].mount, tmp_path], check=True)
    try:
        assert f" {tmp_path} " in Path("/proc/self/mountinfo").read_text()
        assert hierarchies() == known
    finally:
        subprocess.run(["umount", tmp_path], check=True)
