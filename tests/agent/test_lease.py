"""What counts as proof of the lease: the last renewal that was answered, for one term from the moment it was sent, and no longer."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest

from savedworker.agent import lease as module
from savedworker.agent.lease import LeaseKeeper
from savedworker.model import events as ev
from savedworker.model.errors import Fenced
from savedworker.model.record import WorkerRecord
from savedworker.store.backend import open_store
from savedworker.store.worker import WorkerStore
from tests.hostile.material import AT


def take(worker: WorkerStore, incarnation: int, holder: str) -> None:
    worker.record_event(ev.LaunchRequested(at=AT, launch=f"l{incarnation}"))
    worker.record_event(ev.LaunchAccepted(at=AT, launch=f"l{incarnation}", instance="i"))
    worker.record_event(
        ev.LeaseTaken(at=AT, incarnation=incarnation, holder=holder, launch=f"l{incarnation}", instance="i")
    )


def test_a_lease_is_proven_for_one_term_and_not_after_it_was_lost(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    worker = WorkerStore(open_store(str(tmp_path)), "w")
    worker.store.ensure()
    worker.create_record(WorkerRecord(id="w", created_at=AT))
    take(worker, 1, "me")
    clock = SimpleNamespace(now=100.0)
    monkeypatch.setattr(module, "lease_clock", lambda: clock.now)
    lost: list[bool] = []
    shim = SimpleNamespace(lease=lambda deadline, term: None)
    keeper = LeaseKeeper(worker, 1, "me", 10.0, shim, lambda record: None, lambda: lost.append(True))  # type: ignore[arg-type]
    seen = [keeper.proven]
    for passed in (0.0, 9.9, 0.2, 0.0):
        clock.now += passed
        if passed == 0.0:
            keeper.renew()
        seen.append(keeper.proven)
    assert seen == [False, True, True, False, True]
    worker.record_event(ev.InstanceLost(at=AT, incarnation=1, detail="gone"))
    take(worker, 2, "another")
    with pytest.raises(Fenced):
        keeper.renew()
    keeper._run()
    assert lost == [True]
    assert not keeper.proven
