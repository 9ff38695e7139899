"""Two controllers over the same hundred workers, both of them dying again and again: one instance each, and none left."""

from __future__ import annotations

import random
import threading
from collections import Counter
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path

import pytest

from savedworker.controller.reconcile import Controller
from savedworker.fleet.base import Launched, LaunchRequest
from savedworker.model import events as ev
from savedworker.model.decisions import InstanceView, Take, may_take, settled
from savedworker.model.record import State, WorkerRecord
from savedworker.model.spec import WorkerSpec
from savedworker.store.backend import Store, open_store
from savedworker.store.worker import WorkerStore
from tests.controller.conftest import MemoryFleet

WORKERS = 100
DEATHS = 0.04
"""Share of fleet calls in which the controller dies, half of them when the call has been carried out."""


class Killed(BaseException):
    """The controller's process dies here."""


class DeadlyFleet(MemoryFleet):
    """One for every controller, all of them over the same instances."""

    def __init__(self, instances: dict[str, InstanceView], dice: random.Random) -> None:
        super().__init__()
        self.instances = instances
        self.dice = dice

    def launch(self, request: LaunchRequest) -> Launched:
        before, after = self.dice.random() < DEATHS / 2, self.dice.random() < DEATHS / 2
        if before:
            raise Killed
        answer = super().launch(request)
        if after:
            raise Killed
        return answer

    def terminate(self, launch: str) -> None:
        if self.dice.random() < DEATHS / 2:
            raise Killed
        super().terminate(launch)
        if self.dice.random() < DEATHS / 2:
            raise Killed


class Hundred:
    """The workers, their store and instances, and two controllers on a clock that the test moves."""

    def __init__(self, folder: Path, seed: int) -> None:
        self.store: Store = open_store(folder.as_uri())
        self.store.ensure()
        self.instances: dict[str, InstanceView] = {}
        self.time = 0.0
        self.dice = [random.Random(f"{seed} {number}") for number in range(2)]
        self.controllers = [self._controller(number) for number in range(2)]
        self.ids = [f"w{n}" for n in range(WORKERS)]
        self.specs = {}
        for name in self.ids:
            spec = WorkerSpec(id=name, command=("true",), fleet="memory", lease_term=10.0)
            self.specs[name] = spec
            self.documents(name).create_spec(spec)
            self.documents(name).create_record(
                WorkerRecord(id=name, created_at=datetime.now(UTC), fleet="memory")
            )

    def documents(self, name: str) -> WorkerStore:
        return WorkerStore(self.store, name)

    def record(self, name: str) -> WorkerRecord:
        return self.documents(name).load_record().record

    def records(self) -> dict[str, WorkerRecord]:
        return {name: self.record(name) for name in self.ids}

    def both(self) -> None:
        """Two controllers go over all workers at once, each begun again when it has died."""
        failures: list[BaseException] = []

        def work(number: int) -> None:
            try:
                for name in self.dice[number].sample(self.ids, WORKERS):
                    try:
                        self.controllers[number].reconcile(name)
                    except Killed:
                        self.controllers[number] = self._controller(number)
            except BaseException as error:
                failures.append(error)

        threads = [threading.Thread(target=work, args=(n,)) for n in range(2)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert failures == []

    def _controller(self, number: int) -> Controller:
        fleet = DeadlyFleet(self.instances, self.dice[number])
        return Controller(self.store, lambda _: fleet, clock=lambda: self.time)

    def until(self, condition: Callable[[WorkerRecord], bool], what: str) -> None:
        for _ in range(30):
            self.both()
            self.time += 6.0
            if all(condition(record) for record in self.records().values()):
                return
        late = [name for name, record in self.records().items() if not condition(record)]
        raise AssertionError(f"{late} did not {what}")

    def has_instance(self, record: WorkerRecord) -> bool:
        """The launch may be known to the fleet alone: then its agent tells the record."""
        return bool(self.running(record.id))

    def agents(self) -> None:
        """Every instance that runs boots its agent, which asks for the lease as agents do."""
        for name, record in self.records().items():
            for launch in record.launches:
                view = self.instances.get(launch.id)
                answer = may_take(record, self.specs[name], launch.id, 0.0)
                if view is None or view.state != "running" or not isinstance(answer, Take):
                    continue
                number = len(record.incarnations) + 1
                taken = ev.LeaseTaken(
                    at=datetime.now(UTC),
                    incarnation=number,
                    holder=f"h{number}",
                    launch=launch.id,
                    instance="i",
                )
                started = ev.Started(at=datetime.now(UTC), incarnation=number, holder=f"h{number}")
                self.documents(name).record_event(taken)
                record = self.documents(name).record_event(started).record

    def running(self, name: str) -> list[str]:
        return [
            x.id
            for x in self.record(name).launches
            if (view := self.instances.get(x.id)) is not None and view.state == "running"
        ]


@pytest.mark.parametrize("seed", [1, 2])
def test_two_controllers_that_keep_dying_give_a_hundred_workers_one_instance_each(
    tmp_path: Path, seed: int
) -> None:
    world = Hundred(tmp_path / "store", seed)
    world.until(world.has_instance, "get an instance")
    world.agents()
    assert all(r.state is State.RUNNING for r in world.records().values())
    assert Counter(len(world.running(name)) for name in world.ids) == {1: WORKERS}
    assert Counter(len(r.launches) for r in world.records().values()) == {1: WORKERS}

    for launch in list(world.instances)[::2]:
        world.instances[launch] = InstanceView("ended", detail="reclaimed")
    world.until(world.has_instance, "be replaced")
    world.agents()
    assert all(r.state is State.RUNNING for r in world.records().values())
    assert Counter(len(world.running(name)) for name in world.ids) == {1: WORKERS}
    assert Counter(len(r.launches) for r in world.records().values()) == {1: WORKERS // 2, 2: WORKERS // 2}

    for name in world.ids:
        record = world.record(name)
        assert record.lease is not None
        done = ev.Finished(
            at=datetime.now(UTC),
            incarnation=record.lease.incarnation,
            holder=record.lease.holder,
            exit_code=0,
        )
        released = ev.LeaseReleased(
            at=datetime.now(UTC),
            incarnation=record.lease.incarnation,
            holder=record.lease.holder,
            end_reason="finished",
        )
        world.documents(name).record_event(done)
        world.documents(name).record_event(released)
    world.until(settled, "settle")
    assert [x for x, view in world.instances.items() if view.state == "running"] == []
