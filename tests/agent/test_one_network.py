"""Two agents on one instance, as two jobs of AWS Batch on one machine: there is one private network, and the second one waits for it."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest

from savedworker.agent import main
from savedworker.checkpoint import network
from savedworker.checkpoint.tools import Tools
from savedworker.model import events as ev
from savedworker.model.errors import Fatal
from savedworker.model.record import WorkerRecord
from savedworker.model.spec import WorkerSpec
from savedworker.store.backend import open_store
from savedworker.store.worker import WorkerStore
from tests.agent.test_keys import config
from tests.hostile.material import AT

SPEC = WorkerSpec(id="w", command=("true",))


HOST = SPEC.model_copy(update={"network": "host"})


@pytest.mark.parametrize(
    ("spec", "waits", "fails"),
    [(SPEC, 3, False), (HOST, 0, False), (SPEC, 0, True)],
    ids=["private", "host", "nobody knows"],
)
def test_an_agent_takes_no_lease_while_another_worker_has_the_private_network(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    spec: WorkerSpec,
    waits: int,
    fails: bool,
) -> None:
    """To fail with the checkpoint in its hands would count against that. Where it cannot be seen, whoever begins the worker says so."""
    worker = WorkerStore(open_store(str(tmp_path / "store")), "w")
    worker.store.ensure()
    worker.create_spec(spec)
    worker.create_record(WorkerRecord(id="w", created_at=AT))
    worker.record_event(ev.LaunchRequested(at=AT, launch="l"))
    agent = main._Agent(config(tmp_path))
    slept: list[float] = []

    def sleep(seconds: float) -> None:
        assert worker.load_record().record.lease is None
        slept.append(seconds)

    monkeypatch.setattr("time.sleep", sleep)

    def claim() -> bool:
        if fails:
            raise Fatal("ip is not installed")
        return len(slept) == waits

    monkeypatch.setattr(network, "claim", claim)
    with caplog.at_level(logging.WARNING):
        taken = agent._win(spec, Tools(Path("criu"), Path("runc"), "4.2", "1.3"), Path("/"))
    assert taken is not None
    assert worker.load_record().record.lease is not None
    assert len(slept) == waits
    assert [x.message for x in caplog.records if "waiting" in x.message] == [
        "another worker has the private network of this instance: waiting for its end"
    ] * bool(waits)
