"""The same stories over S3 (moto stands in for it): hosts reach it over their own network."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from pathlib import Path

import boto3
import pytest
from moto.server import ThreadedMotoServer

from savedworker.fleet.local import network
from savedworker.model.errors import NoKey
from savedworker.model.record import State
from savedworker.store.backend import open_store
from savedworker.store.sealing import NO_KEY, Sealed
from savedworker.store.worker import WorkerStore
from tests.runtime.gate import Gate
from tests.runtime.test_first_light import COUNTER
from tests.runtime.world import BRIDGE, World
from tests.store.keys import key, text
from tests.store.test_chunks import HEADER


@pytest.fixture
def store_url(monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """A moto server on the bridge, where every host can reach it."""
    network.ensure_bridge()
    logging.getLogger("werkzeug").setLevel(logging.ERROR)
    server = ThreadedMotoServer(ip_address=BRIDGE, port=0, verbose=False)
    server.start()
    host, port = server.get_host_and_port()
    for name, value in {
        "AWS_ENDPOINT_URL": f"http://{host}:{port}",
        "AWS_ACCESS_KEY_ID": "test",
        "AWS_SECRET_ACCESS_KEY": "test",
        "AWS_REGION": "us-east-1",
    }.items():
        monkeypatch.setenv(name, value)
    client = boto3.client("s3", endpoint_url=f"http://{host}:{port}")
    client.create_bucket(Bucket="workers")
    client.close()
    yield "s3://workers/tests"
    server.stop()


@pytest.fixture(params=["plain", "sealed"])
def sealed(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> bool:
    """Whether a key is configured, for this process and so for the agents."""
    if request.param == "sealed":
        monkeypatch.setenv("SAVEDWORKER_KEY", text(key()))
    return bool(request.param == "sealed")


def test_a_worker_moves_over_an_object_store_with_and_without_notice(
    sealed: bool, world: World, tmp_path: Path
) -> None:
    """Sealed or not: saved, moved, restored; what is in the bucket opens with the key, and only where there is one."""
    gate = Gate(tmp_path / "gate")
    worker = world.python(COUNTER, "300", "0", "/gate/end", volumes=(gate.volume,))
    world.until_output(worker, " 5\n")
    world.preempt(worker, notice=20)
    world.checkpoint(worker)
    world.preempt(worker, notice=None)
    gate.open("end")
    record = world.until_settled(worker)
    assert record.state is State.SUCCEEDED, world.story(worker)
    assert (record.migrations, record.cold_starts) == (2, 0)
    lines = [line.split() for line in world.output(worker).splitlines()]
    assert len({line[0] for line in lines if line[1].isdigit() and line[0] != "file"}) == 1
    assert "file 300\n" in world.output(worker)
    documents = WorkerStore(world.client.store, worker)
    assert isinstance(documents.sealer, Sealed) == sealed
    assert documents.load_spec().id == worker
    without = WorkerStore(open_store(world.client.store.url, sealing=NO_KEY), worker)
    stored = [
        world.client.store.get(info.key).data
        for info in world.client.store.list(f"workers/{worker}")
        if "/chunks/" in info.key
    ]
    assert stored
    assert all(HEADER.unpack_from(data)[3] == sealed for data in stored), "flags of chunks"
    if sealed:
        with pytest.raises(NoKey):
            without.load_spec()
        with pytest.raises(NoKey):
            without.load_manifest(documents.list_checkpoints()[-1])
    else:
        assert without.load_spec().id == worker
