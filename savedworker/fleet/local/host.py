"""What is written down about one host, in ``<state directory>/hosts/<launch>/``."""

from __future__ import annotations

import contextlib
import ipaddress
import json
import os
import re
import socket
from dataclasses import asdict, dataclass
from datetime import datetime
from pathlib import Path
from typing import Any, Literal

from savedworker.fleet.local.files import Lock, read_json, write_json
from savedworker.fleet.local.process import ProcessId, boot_id

Outcome = Literal["failed", "gone"]


@dataclass(frozen=True)
class HostRecord:
    """``host.json``: everything that is needed to watch a host and to destroy it from any process."""

    launch: str
    worker: str
    instance: str
    zone: str
    address: str
    boot: str
    created: str
    agent_command: tuple[str, ...]
    restart_pause: float
    restart_limit: int
    daemon: ProcessId | None = None
    agent: ProcessId | None = None
    agent_starts: int = 0

    @property
    def sound(self) -> bool:
        """Whether the parts that name namespaces, links, cgroups and addresses name those of one host."""
        address: object = self.address  # from a file: not what it says it is until it was looked at
        texts: tuple[object, ...] = (
            self.launch,
            self.worker,
            self.zone,
            self.boot,
            self.created,
            *self.agent_command,
        )
        processes = [x for x in (self.daemon, self.agent) if x is not None]
        return (
            re.fullmatch(r"host-[a-z0-9]{1,32}", self.instance) is not None
            and isinstance(address, str)
            and isinstance(ipaddress.ip_address(address), ipaddress.IPv4Address)
            and all(isinstance(x, str) for x in texts)
            and all(type(x.pid) is int and x.pid > 1 and type(x.start) is int for x in processes)
            and type(self.agent_starts) is int
            and type(self.restart_limit) is int
            and isinstance(self.restart_pause, int | float)
        )

    @property
    def short(self) -> str:
        """The part that the names of all its resources share."""
        return self.instance.removeprefix("host-")

    @property
    def netns(self) -> str:
        """Name of its network namespace."""
        return f"sw-{self.short}"

    @property
    def link(self) -> str:
        """Name of the outer end of its veth pair."""
        return f"swv{self.short}"

    @property
    def cgroup(self) -> str:
        """Path of its cgroup in every hierarchy."""
        return f"/savedworker/{self.instance}"

    @property
    def this_boot(self) -> bool:
        """False when the machine restarted since: its processes, namespaces and cgroups are gone, its names may be reused."""
        return self.boot == boot_id()

    @property
    def daemon_alive(self) -> bool:
        """True while its daemon executes."""
        return self.daemon is not None and self.this_boot and self.daemon.alive

    def to_json(self) -> dict[str, Any]:
        """The document."""
        return {"format": 1, **asdict(self)}

    @classmethod
    def from_json(cls, document: dict[str, Any]) -> HostRecord:
        """The record in ``document``."""
        data = {key: value for key, value in document.items() if key != "format"}
        for name in ("daemon", "agent"):
            data[name] = ProcessId(**data[name]) if data[name] else None
        data["agent_command"] = tuple(data["agent_command"])
        return cls(**data)


@dataclass(frozen=True)
class Ended:
    """``ended.json``: why a host is gone. Written once none of its processes is left."""

    outcome: Outcome
    detail: str
    at: str
    cleaned: bool = False
    """True once its namespace, cgroups, scratch directory and address are gone as well."""


class HostDir:
    """The directory of one host."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.launch = path.name
        self.scratch = path / "scratch"
        self.log = path / "daemon.log"
        self._record = path / "host.json"
        self._ended = path / "ended.json"
        self._control = path / "control"

    def lock(self, wait: float | None = None) -> Lock | None:
        """The right to create or destroy this host; None when it stays taken for ``wait`` seconds or there is no host."""
        return Lock.take(self.path / "lock", wait)

    def record(self) -> HostRecord | None:
        """What is known of the host."""
        document = read_json(self._record)
        with contextlib.suppress(KeyError, TypeError, ValueError, AttributeError):
            record = HostRecord.from_json(document) if document else None
            if record is not None and record.sound and record.launch == self.launch:
                return record
        return None

    def write_record(self, record: HostRecord) -> None:
        """Replace the record."""
        write_json(self._record, record.to_json())

    @property
    def present(self) -> bool:
        """False once somebody removed the directory by hand."""
        return self._record.exists()

    def ended(self) -> Ended | None:
        """How the host ended; None while it has not."""
        document = read_json(self._ended) or {}
        with contextlib.suppress(TypeError, ValueError):
            ended = Ended(**{key: value for key, value in document.items() if key != "format"})
            if ended.outcome in ("failed", "gone") and datetime.fromisoformat(ended.at).tzinfo is not None:
                return ended
        return None

    def write_ended(self, ended: Ended) -> None:
        """Write the tombstone."""
        write_json(self._ended, {"format": 1, **asdict(ended)})

    def listen(self) -> socket.socket:
        """The daemon's end of the control socket, reachable by root only."""
        self._control.unlink(missing_ok=True)
        server = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        before = os.umask(0o177)
        try:
            self._with_short_path(server.bind)
        finally:
            os.umask(before)
        server.listen(16)
        return server

    def ask(self, request: dict[str, Any], timeout: float = 2.0) -> dict[str, Any]:
        """Send ``request`` to the daemon and return its answer. Raises OSError when it does not answer."""
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as client:
            client.settimeout(timeout)
            self._with_short_path(client.connect)
            client.sendall(json.dumps(request).encode() + b"\n")
            answer = b""
            while not answer.endswith(b"\n"):
                part = client.recv(65536)
                if not part:
                    raise ConnectionResetError(f"the daemon of {self.launch} hung up")
                answer += part
        document: dict[str, Any] = json.loads(answer)
        return document

    def _with_short_path(self, call: Any) -> None:
        """``call`` with a path to the control socket that fits into sun_path, however long the directory's is."""
        directory = os.open(self.path, os.O_PATH | os.O_DIRECTORY)
        try:
            call(f"/proc/self/fd/{directory}/{self._control.name}")
        finally:
            os.close(directory)

    def remove_control(self) -> None:
        """Remove the socket of a daemon that is gone."""
        self._control.unlink(missing_ok=True)
