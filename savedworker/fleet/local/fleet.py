"""LocalFleet: launches, describes and destroys hosts of this machine, from any number of processes at once."""

from __future__ import annotations

import contextlib
import json
import logging
import os
import re
import select
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from savedworker.fleet.base import Launched, LaunchRequest, NoCapacity
from savedworker.fleet.local import network
from savedworker.fleet.local.cgroup import HostCgroup
from savedworker.fleet.local.destroy import destroy, remove_abandoned, undo
from savedworker.fleet.local.files import Lock
from savedworker.fleet.local.host import Ended, HostDir, HostRecord
from savedworker.fleet.local.process import boot_id
from savedworker.model import defaults
from savedworker.model.decisions import InstanceView
from savedworker.model.errors import Refused, Temporary

log = logging.getLogger(__name__)

DIRECTORY = Path("/var/lib/savedworker/local")
RUNTIME_PREFIX = "/opt/savedworker/bin"
ZONES = ("local-a", "local-b", "local-c")
TOMBSTONE_AGE = 24 * 3600.0
SWEEP_EVERY = 10.0
BOOT_LIMIT = 60.0
END_LIMIT = 60.0

_LAUNCH = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,127}")
_PASSED_ON = re.compile(
    r"SAVEDWORKER_.*|PYTHONPATH|TZ|SSL_CERT_(FILE|DIR)|(HTTPS?|NO|ALL)_PROXY|(https?|no|all)_proxy"
)
_CLOUD_VARIABLES = {"s3": "AWS_", "gs": "GOOGLE_"}
_KEYS = ("SAVEDWORKER_KEY_FILE", "SAVEDWORKER_KEY", "SAVEDWORKER_ALLOW_PLAIN")


@dataclass(frozen=True)
class HostInfo:
    """What is behind one launch that is alive: for tests, drills and ``doctor``."""

    launch: str
    instance: str
    zone: str
    daemon_pid: int
    agent_pid: int | None
    agent_starts: int
    netns: str
    address: str
    cgroup: str
    directory: Path
    scratch: Path


class LocalFleet:
    """Hosts on this machine. All arguments are for tests and drills.

    Args:
        directory: State directory; default ``$SAVEDWORKER_LOCAL_DIR``, else ``/var/lib/savedworker/local``.
        capacity: Most hosts at a time; default ``$SAVEDWORKER_LOCAL_CAPACITY``, else without limit.
        agent: Argument vector that is run instead of the agent; default ``$SAVEDWORKER_LOCAL_AGENT`` (a JSON array).
            ``{store} {worker} {launch} {instance} {zone} {state_dir} {cgroup}`` in it are filled in.
        restart_pause: Seconds before the first restart of a crashed agent; doubles with each.
        restart_limit: Crashes after which the host is given up.
    """

    name = "local"
    lease_term = defaults.LEASE_TERM_LOCAL
    embedded = True

    def __init__(
        self,
        directory: Path | None = None,
        *,
        capacity: int | None = None,
        agent: Sequence[str] | None = None,
        restart_pause: float = 1.0,
        restart_limit: int = 20,
    ) -> None:
        # The real path: it is compared with mount points.
        self.directory = (directory or Path(os.environ.get("SAVEDWORKER_LOCAL_DIR") or DIRECTORY)).resolve()
        self._capacity = capacity if capacity is not None else _capacity_from_environment()
        self._agent = tuple(agent) if agent else _agent_from_environment()
        self._restart_pause = restart_pause
        self._restart_limit = restart_limit
        self._hosts = self.directory / "hosts"
        self._names = self.directory / "names"

    def launch(self, request: LaunchRequest) -> Launched:
        """Boot a host with the agent of ``request``. Raises NoCapacity, Refused or Temporary."""
        if not _LAUNCH.fullmatch(request.launch):
            raise Refused(
                f"launch id {request.launch!r} is not usable", "use 1 to 128 letters, digits, '.', '_' or '-'"
            )
        self._prepare()
        host = HostDir(self._hosts / request.launch)
        end = time.monotonic() + BOOT_LIMIT
        while time.monotonic() < end:
            host.path.mkdir(mode=0o700, exist_ok=True)
            # No release() on the way out: the host daemon inherits the lock and releases it when it has booted.
            lock = host.lock(1.0)
            if lock is None:
                continue
            try:
                record = host.record()
                if record is not None and host.ended() is None and not record.daemon_alive:
                    self._reclaim(host, record)
                    record = host.record()
                if record is None:
                    if not host.path.exists():
                        continue
                    record = self._boot(host, request, lock)
                return Launched(record.instance, record.zone)
            finally:
                os.close(lock.fd)
        raise Temporary(f"another process has been launching {request.launch} for {BOOT_LIMIT:.0f} s")

    def describe(self, launches: Sequence[str]) -> Mapping[str, InstanceView]:
        """What is known of each launch. Destroys hosts whose daemon died. Raises Refused without root, or Temporary."""
        self._require_root()
        if self._sweep_is_due():
            self.sweep()
        return {launch: self._view(launch) for launch in launches}

    def terminate(self, launch: str) -> None:
        """End the host of ``launch`` at once; returns when it is gone. Raises Temporary."""
        self._require_root()
        self._end(launch, {"do": "terminate"}, Ended("gone", "terminated", _now()))

    def preempt(self, launch: str, notice: float | None) -> None:
        """Reclaim the host: ``notice`` seconds after its metadata says so, or now and without a word for None.

        The format of the notice has whole seconds: the end comes up to one second later. Raises Refused or Temporary.
        """
        if notice is not None and not 0 <= notice <= 86400:
            raise Refused(f"a notice of {notice} seconds is not possible", "give 0 to 86400 seconds")
        self._require_root()
        self.host(launch)
        request = {"do": "preempt", "notice": notice}
        if notice is None:
            self._end(launch, request, Ended("gone", "preempted without notice", _now()))
        else:
            self._ask(launch, request)

    def rebalance(self, launch: str) -> None:
        """Drill: have the metadata recommend to leave, without a deadline. Raises Refused or Temporary."""
        self._ask(launch, {"do": "rebalance"})

    def withdraw(self, launch: str) -> None:
        """Drill: take back notice and recommendation. Raises Refused or Temporary."""
        self._ask(launch, {"do": "withdraw"})

    def host(self, launch: str) -> HostInfo:
        """The host of ``launch``. Raises Refused when there is none, or it is gone."""
        self._require_root()
        host = self._known(launch)
        record = host.record() if host else None
        ended = host.ended() if host else None
        if (
            host is None
            or record is None
            or record.daemon is None
            or ended is not None
            or not record.daemon_alive
        ):
            why = ended.detail if ended else "unknown here" if record is None else "not running"
            raise Refused(
                f"launch {launch} has no host: {why}",
                "give the launch of a worker that runs on the local fleet",
            )
        return HostInfo(
            launch=record.launch,
            instance=record.instance,
            zone=record.zone,
            daemon_pid=record.daemon.pid,
            agent_pid=record.agent.pid if record.agent and record.agent.alive else None,
            agent_starts=record.agent_starts,
            netns=record.netns,
            address=record.address,
            cgroup=record.cgroup,
            directory=host.path,
            scratch=host.scratch,
        )

    def sweep(self) -> tuple[str, ...]:
        """Destroy what is left of hosts whose daemon is dead, prune old tombstones; returns the launches destroyed."""
        self._require_root()
        swept = []
        for path in sorted(self._hosts.glob("*")):
            host = HostDir(path)
            try:
                if self._tidy(host):
                    swept.append(host.launch)
            except Temporary as error:
                log.warning("leftover of launch %s stays for now: %s", host.launch, error)
        with contextlib.suppress(FileNotFoundError), contextlib.ExitStack() as stack:
            lock = Lock.take(network.SHARED / "sweep.lock", 0.0)
            if lock is not None:
                stack.enter_context(lock)
                for address in network.abandoned_addresses():
                    log.info("destroying what is left at %s, whose directory was removed", address)
                    remove_abandoned(address)
        return tuple(swept)

    # How a host comes to be

    def _require_root(self) -> None:
        if sys.platform != "linux":
            raise Refused("the local fleet needs Linux", "use another fleet, or a Linux machine")
        if os.geteuid() != 0:
            raise Refused("the local fleet needs root", "run it with sudo, or use another fleet")

    def _prepare(self) -> None:
        self._require_root()
        if shutil.which("ip") is None:
            raise Refused("the local fleet needs the program ip", "apt-get install iproute2 nftables")
        self.directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        for path in (self.directory, self._hosts, self._names):
            path.mkdir(mode=0o700, exist_ok=True)
        self.directory.chmod(0o700)
        network.ensure_bridge()

    def _boot(self, host: HostDir, request: LaunchRequest, lock: Lock) -> HostRecord:
        record: HostRecord | None = None
        try:
            record = self._plan(host, request)
            host.scratch.mkdir(mode=0o700)
            network.create(record)
            self._start_daemon(host, request, lock)
        except BaseException:
            # What failed decides what the caller hears, also when the undoing fails: a sweep then goes on with that.
            with contextlib.suppress(Temporary):
                self._undo(host, host.record() or record)
            raise
        return record

    def _plan(self, host: HostDir, request: LaunchRequest) -> HostRecord:
        """Choose zone, name and address, and write them down before anything is made."""
        lock = Lock.take(self.directory / "lock", BOOT_LIMIT)
        if lock is None:
            raise Temporary("the local fleet's state directory stays locked")
        with lock:
            self._check_capacity()
            zone = self._choose_zone(request.avoid)
            while True:
                address = network.claim_address(host.path)
                short = network.short_name(address)
                try:
                    (self._names / short).touch(mode=0o600, exist_ok=False)
                    break
                except FileExistsError:  # a tombstone has that name
                    network.release_address(address)
            instance = f"host-{short}"
            record = HostRecord(
                launch=request.launch,
                worker=request.worker,
                instance=instance,
                zone=zone,
                address=address,
                boot=boot_id(),
                created=_now(),
                agent_command=self._agent_command(host, request, instance, zone),
                restart_pause=self._restart_pause,
                restart_limit=self._restart_limit,
            )
            host.write_record(record)
        return record

    def _check_capacity(self) -> None:
        if self._capacity is None:
            return
        living = [
            x for x in self._hosts.glob("*") if (x / "host.json").exists() and not (x / "ended.json").exists()
        ]
        if len(living) >= self._capacity:
            raise NoCapacity(
                f"all {self._capacity} hosts are in use", "wait, or raise SAVEDWORKER_LOCAL_CAPACITY"
            )

    def _choose_zone(self, avoid: Sequence[str]) -> str:
        counter = self.directory / "next-zone"
        try:
            following = int(counter.read_text())
        except (FileNotFoundError, ValueError):
            following = 0
        rotation = [ZONES[(following + i) % len(ZONES)] for i in range(len(ZONES))]
        zone = next((z for z in rotation if z not in avoid), rotation[0])
        counter.write_text(str(ZONES.index(zone) + 1))
        return zone

    def _agent_command(
        self, host: HostDir, request: LaunchRequest, instance: str, zone: str
    ) -> tuple[str, ...]:
        values = {
            "store": request.store_url,
            "worker": request.worker,
            "launch": request.launch,
            "fleet": self.name,
            "instance": instance,
            "zone": zone,
            "state_dir": str(host.scratch / "agent"),
            "cgroup": f"/savedworker/{instance}",
        }
        if self._agent:
            return tuple(_fill_in(word, values) for word in self._agent)
        command = [sys.executable, "-m", "savedworker.cli", "agent"]
        for option in ("store", "worker", "launch", "fleet", "instance", "zone"):
            command += [f"--{option}", values[option]]
        return (*command, "--state-dir", values["state_dir"], "--cgroup-parent", values["cgroup"])

    def _start_daemon(self, host: HostDir, request: LaunchRequest, lock: Lock) -> None:
        """Start the host daemon and wait until it has booted. Raises Refused or Temporary."""
        read_end, write_end = os.pipe()
        try:
            with open(host.log, "ab") as output:
                started = subprocess.run(
                    [
                        *(
                            sys.executable,
                            "-m",
                            "savedworker.fleet.local.host_daemon",
                            "--host",
                            str(host.path),
                        ),
                        *("--lock-fd", str(lock.fd), "--ready-fd", str(write_end)),
                    ],
                    cwd="/",
                    env=_environment(_clouds(request), request.environment),
                    stdin=subprocess.DEVNULL,
                    stdout=output,
                    stderr=output,
                    start_new_session=True,
                    pass_fds=(lock.fd, write_end),
                    check=False,
                )
            os.close(write_end)
            write_end = -1
            said = _read_line(read_end, BOOT_LIMIT)
        finally:
            os.close(read_end)
            if write_end >= 0:
                os.close(write_end)
        answer: dict[str, Any] = json.loads(said) if said else {}
        if answer.get("ok"):
            return
        if said is None:
            record = host.record()
            if record is not None:
                _kill(record)
        tail = host.log.read_text(errors="replace").strip().splitlines()[-1:]
        reason = (
            answer.get("error")
            or f"the host daemon ended ({started.returncode}): {' '.join(tail) or 'no message'}"
        )
        if answer.get("fix"):
            raise Refused(f"host {host.launch} does not boot: {reason}", answer["fix"])
        raise Temporary(f"host {host.launch} does not boot: {reason}", retry_after=defaults.LAUNCH_RETRY)

    # How a host is watched and ended

    def _known(self, launch: str) -> HostDir | None:
        host = HostDir(self._hosts / launch)
        return host if _LAUNCH.fullmatch(launch) and host.path.is_dir() else None

    def _view(self, launch: str) -> InstanceView:
        host = self._known(launch)
        if host is None:
            return InstanceView("unknown")
        self._tidy(host)
        record, ended = host.record(), host.ended()
        if record is None:
            return InstanceView("pending" if host.path.exists() else "unknown")
        if ended is not None:
            return InstanceView("ended", record.instance, record.zone, ended.outcome, ended.detail)
        return InstanceView("running" if record.agent_starts else "pending", record.instance, record.zone)

    def _tidy(self, host: HostDir) -> bool:
        """Destroy the host if its daemon is dead, prune its tombstone if it is old. True if something was destroyed."""
        record, ended = host.record(), host.ended()
        if ended is not None and ended.cleaned:
            if (datetime.now(UTC) - datetime.fromisoformat(ended.at)).total_seconds() < TOMBSTONE_AGE:
                return False
        elif record is not None and record.daemon_alive:
            return False
        lock = host.lock(0.0)
        if lock is None:
            return False  # somebody is launching or destroying it
        with lock:
            record, ended = host.record(), host.ended()
            if ended is not None and ended.cleaned:
                self._undo(host, record)
                return False
            if record is not None and record.daemon_alive:
                return False
            self._reclaim(host, record)
            return True

    def _reclaim(self, host: HostDir, record: HostRecord | None) -> None:
        """Destroy a host whose daemon is dead, under its lock. One that never ran leaves no trace. Raises Temporary."""
        if record is None or record.daemon is None:
            self._undo(host, record)
            return
        if not record.this_boot:
            ended = Ended("gone", "the machine restarted", _now())
        elif not record.agent_starts:
            ended = Ended("failed", "the host daemon died while the host booted", _now())
        else:
            ended = Ended("gone", "the host daemon died", _now())
        log.info("destroying host %s of launch %s: %s", record.instance, host.launch, ended.detail)
        destroy(host, record, ended)

    def _undo(self, host: HostDir, record: HostRecord | None) -> None:
        pruned = host.ended() is not None
        if record is not None:
            (self._names / record.short).unlink(missing_ok=True)
        undo(host, None if pruned else record)

    def _ask(self, launch: str, request: dict[str, Any]) -> None:
        self.host(launch)
        try:
            HostDir(self._hosts / launch).ask(request)
        except (OSError, ValueError) as error:
            raise Temporary(f"the host daemon of launch {launch} does not answer: {error}") from error

    def _end(self, launch: str, request: dict[str, Any], ended: Ended) -> None:
        """Have the daemon destroy its host; do it from outside when it cannot. Returns when the host is gone."""
        host = self._known(launch)
        if host is None:
            return
        end = time.monotonic() + END_LIMIT
        asked = None
        while time.monotonic() < end:
            present, record = host.ended(), host.record()
            if (present is not None and present.cleaned) or not host.path.exists():
                return
            if record is not None and record.daemon_alive:
                if asked is None:
                    try:
                        host.ask(request)
                    except (OSError, ValueError):
                        # It is stopped, broken, or just ending: a moment for the last, then no more waiting.
                        if not _wait(lambda: host.ended() is not None, 1.0):
                            _kill(record)
                    asked = time.monotonic()
                elif time.monotonic() - asked > END_LIMIT / 2:
                    _kill(record)
                time.sleep(0.01)
                continue
            lock = host.lock(0.05)
            if lock is None:
                continue
            with lock:
                record = host.record()
                if record is not None and record.daemon is not None and not record.daemon_alive:
                    destroy(host, record, ended)
                elif record is None or record.daemon is None:
                    self._undo(host, record)
        raise Temporary(f"the host of launch {launch} does not end; see {host.log}", retry_after=5.0)

    def _sweep_is_due(self) -> bool:
        marker = self.directory / "swept"
        try:
            if 0 <= time.time() - marker.stat().st_mtime < SWEEP_EVERY:
                return False
            marker.touch()
        except FileNotFoundError:
            if not self.directory.is_dir():
                return False
            marker.touch(mode=0o600)
        return True


def _kill(record: HostRecord) -> None:
    """End the host's daemon and with it all that runs there. Raises Temporary.

    In a host that somebody froze nothing dies of a SIGKILL, the daemon included; ``kill_all`` thaws what it has killed.
    """
    if record.daemon is not None:
        record.daemon.kill()
        HostCgroup(record.cgroup).kill_all()


def _now() -> str:
    return datetime.now(UTC).isoformat(timespec="milliseconds")


def _wait(condition: Callable[[], bool], seconds: float) -> bool:
    end = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > end:
            return False
        time.sleep(0.02)
    return True


def _fill_in(word: str, values: Mapping[str, str]) -> str:
    for name, value in values.items():
        word = word.replace(f"{{{name}}}", value)
    return word


def _read_line(fd: int, seconds: float) -> str | None:
    """What comes through a pipe until its end or a line feed; None when neither comes in time."""
    end = time.monotonic() + seconds
    said = b""
    while not said.endswith(b"\n"):
        if not select.select([fd], [], [], max(0.0, end - time.monotonic()))[0]:
            return None
        part = os.read(fd, 65536)
        if not part:
            break
        said += part
    return said.decode(errors="replace")


def _clouds(request: LaunchRequest) -> tuple[str, ...]:
    """Beginnings of the names of the variables that lead to what the agent has to reach, or hands on."""
    spec = request.spec
    urls = [request.store_url, *(x.url for x in spec.inputs), *(x.url for x in spec.outputs)]
    schemes = {url.partition(":")[0] for url in urls} | ({"s3"} if spec.credentials == "instance" else set())
    return tuple(name for scheme, name in _CLOUD_VARIABLES.items() if scheme in schemes)


def _environment(clouds: tuple[str, ...], given: Mapping[str, str] | None = None) -> dict[str, str]:
    """A small environment for daemon and agent: ours, that of ``clouds``, and the ``given`` keys."""
    environment = {
        name: value
        for name, value in os.environ.items()
        if _PASSED_ON.fullmatch(name) or (clouds and name.startswith(clouds))
    }
    environment.pop("SAVEDWORKER_LOCAL_AGENT", None)
    if given:  # what the caller's store was opened with, wherever that was from
        for name in _KEYS:
            environment.pop(name, None)
        environment |= given
    if "PYTHONPATH" in environment:
        parts = [str(Path(part).resolve()) for part in environment["PYTHONPATH"].split(os.pathsep) if part]
        environment["PYTHONPATH"] = os.pathsep.join(parts)
    return environment | {
        "PATH": f"{RUNTIME_PREFIX}:/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin",
        "HOME": "/root",
        "LANG": "C.UTF-8",
        "PYTHONSAFEPATH": "1",
    }


def _capacity_from_environment() -> int | None:
    text = os.environ.get("SAVEDWORKER_LOCAL_CAPACITY")
    if not text:
        return None
    if not (text.isascii() and text.isdigit()):
        raise Refused(
            f"SAVEDWORKER_LOCAL_CAPACITY={text!r} is not a number of hosts",
            "set it to 0 or more, or unset it",
        )
    return int(text)


def _agent_from_environment() -> tuple[str, ...] | None:
    text = os.environ.get("SAVEDWORKER_LOCAL_AGENT")
    if not text:
        return None
    try:
        words = json.loads(text)
    except json.JSONDecodeError:
        words = None
    if not isinstance(words, list) or not words or not all(isinstance(word, str) for word in words):
        raise Refused(
            "SAVEDWORKER_LOCAL_AGENT is not a JSON array of strings", "unset it, unless you test the fleet"
        )
    return tuple(words)
