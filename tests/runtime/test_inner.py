"""What a worker finds at fixed addresses: credentials and name resolution, of whatever instance it is on, also after a move."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path

import pytest

from savedworker.checkpoint.network import GATEWAY
from savedworker.model.record import State
from tests.runtime.gate import PRELUDE, Gate
from tests.runtime.world import VENV_PYTHON, World

SESSION = (
    PRELUDE
    + """
import socket, struct, boto3
session = boto3.Session(region_name="us-east-1").get_credentials()
udp = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
udp.settimeout(30)
def look(when):
    # the session is the same one for life; what it has ends soon, so that it asks before each use
    keys = session.get_frozen_credentials()
    server = open("/etc/resolv.conf").read().split()[1]
    query = struct.pack("!HHHHHH", 4711, 0x0100, 1, 0, 0, 0) + b"\\7example\\7invalid\\0" + struct.pack("!HH", 1, 1)
    udp.sendto(query, (server, 53))
    number, flags = struct.unpack("!HH", udp.recv(4096)[:4])
    say(when, keys.access_key, keys.token, server, number, "answered" if flags & 0x8000 else "not answered")
look("before")
wait_for("after")
while True:
    try:
        look("after")
        break
    except Exception:
        if sys.argv[1:] != ["patient"]:
            raise
        time.sleep(0.1)
"""
)


@pytest.fixture
def gate(tmp_path: Path) -> Gate:
    return Gate(tmp_path / "gate")


@pytest.fixture
def role(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every host has a role, each with another access key."""
    file = tmp_path / "role.json"
    role = {"name": "r", "access_key": "AKIA", "secret_key": "s", "token": "t", "seconds": 300}
    file.write_text(json.dumps({"role": role}))
    monkeypatch.setenv("SAVEDWORKER_LOCAL_METADATA", str(file))


@pytest.mark.usefixtures("role")
@pytest.mark.parametrize("notice", [20.0, None])
def test_a_session_of_boto_goes_on_with_the_role_of_the_next_instance(
    world: World, gate: Gate, notice: float | None
) -> None:
    worker = world.python(SESSION, interpreter=VENV_PYTHON, volumes=(gate.volume,), credentials="instance")
    world.until_output(worker, "before")
    first = world.host(worker).instance
    if notice is None:
        world.checkpoint(worker)
    world.preempt(worker, notice)
    second = world.host(worker).instance
    gate.open("after")
    record = world.until_settled(worker)
    assert record.state is State.SUCCEEDED, f"{world.output(worker, 'stderr')}\n{world.story(worker)}"
    assert (record.migrations, record.cold_starts) == (1, 0)
    before, after = (line.split() for line in world.output(worker).splitlines())
    assert before == ["before", f"AKIA.{first}", "t", GATEWAY, "4711", "answered"]
    assert after == ["after", f"AKIA.{second}", "t", GATEWAY, "4711", "answered"]
    assert first != second


@pytest.mark.usefixtures("role")
def test_a_worker_that_was_not_given_credentials_finds_none(world: World) -> None:
    program = """
    import boto3
    from botocore.utils import ContainerMetadataFetcher
    print("found", boto3.Session().get_credentials())
    try:
        print(ContainerMetadataFetcher(sleep=lambda s: None).retrieve_uri("/savedworker/credentials"))
    except Exception as error:
        print(type(error).__name__)
    """
    worker = world.python(program, interpreter=VENV_PYTHON, env={"AWS_METADATA_SERVICE_TIMEOUT": "1"})
    assert world.until_settled(worker).state is State.SUCCEEDED, world.output(worker, "stderr")
    assert world.output(worker) == "found None\nMetadataRetrievalError\n"


@pytest.mark.usefixtures("role")
def test_they_are_served_again_after_the_agent_died(world: World, gate: Gate) -> None:
    worker = world.python(
        SESSION, "patient", interpreter=VENV_PYTHON, volumes=(gate.volume,), credentials="instance"
    )
    world.until_output(worker, "before")
    host = world.host(worker)
    assert host.agent_pid is not None

    os.kill(host.agent_pid, signal.SIGKILL)
    gate.open("after")
    assert world.until_settled(worker).state is State.SUCCEEDED, world.output(worker, "stderr")
    assert f"after AKIA.{host.instance} t" in world.output(worker)
