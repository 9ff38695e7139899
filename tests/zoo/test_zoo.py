"""What people run survives three moves in a row, mixed with and without notice, or is refused by name beforehand."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest

from savedworker.model.errors import SavedWorkerError
from savedworker.model.record import State, WorkerRecord
from savedworker.model.spec import Volume
from tests.runtime.gate import Gate
from tests.runtime.world import World
from tests.zoo import zoo
from tests.zoo.zoo import ZOO, Animal, FallsBack, Refused, Survives

FEW = 3
"""Checks that every animal makes after a move before the next one."""


def herds() -> list[object]:
    """For CI the light animals in groups; for the sweep the others, and these once more, each alone."""
    groups: dict[str, list[Animal]] = {}
    for animal in ZOO:
        if animal.herd:
            groups.setdefault(animal.herd, []).append(animal)
    found: list[object] = [
        pytest.param(tuple(x), id=f"herd-{name.replace(' ', '-')}") for name, x in groups.items()
    ]
    for animal in ZOO:
        name = f"alone-{animal.name}" if animal.herd else animal.name
        found.append(pytest.param((animal,), id=name, marks=pytest.mark.sweep))
    return found


class Keeper:
    """One worker with the animals of a herd in it."""

    def __init__(self, world: World, gate: Gate, built: Path, herd: tuple[Animal, ...]) -> None:
        self.world, self.gate, self.herd = world, gate, herd
        commands = {a: tuple(word.replace("{built}", str(built)) for word in a.command) for a in herd}
        self.alone = len(herd) == 1
        if self.alone:
            command = commands[herd[0]]
        else:
            pairs = [word for a in herd for word in (a.name, json.dumps(commands[a]))]
            command = (zoo.PYTHON, "-B", str(zoo.PROGRAMS / "herd.py"), *pairs)
        self.worker = world.submit(
            *command,
            volumes=(gate.volume, Volume(source="/dev/fuse", target="/dev/fuse")),
            user=herd[0].user,
            env={"PYTHONUNBUFFERED": "1", "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"},
        )

    def count(self, animal: Animal, line: str = r"ok \d+") -> int:
        mark = "" if self.alone else re.escape(f"{animal.name}: ")
        return len(re.findall(rf"^{mark}{line}$", self.world.output(self.worker), re.MULTILINE))

    def wait(self, animal: Animal, line: str, more: int, what: str, seconds: float = 120.0) -> None:
        """Wait until there are ``more`` such lines of this animal; fail when it ends before."""
        until = time.monotonic() + seconds
        while self.count(animal, line) < more:
            record = self.world.record(self.worker)
            ended = record.state.terminal or self.count(animal, r"exit \d+")
            if ended or time.monotonic() > until:
                raise AssertionError(
                    f"{animal.name} did not {what}\n{self.words()}\n{self.world.story(self.worker)}"
                )
            time.sleep(0.1)

    def all_go_on(self, what: str) -> None:
        before = {animal: self.count(animal) for animal in self.herd}
        for animal in self.herd:
            few = 1 if animal.slow else FEW
            self.wait(animal, r"ok \d+", before[animal] + few, what, 120 + 2 * animal.slow)

    def forgotten(self, animal: Animal) -> set[str]:
        """What the animal says it has lost."""
        mark = "" if self.alone else re.escape(f"{animal.name}: ")
        return set(re.findall(rf"^{mark}forgotten: (.+)$", self.world.output(self.worker), re.MULTILINE))

    def words(self) -> str:
        lines = [x for x in self.world.output(self.worker).splitlines() if not re.search(r"(^|: )ok \d+$", x)]
        return "\n".join(
            ["-- stdout", *lines[-20:], "-- stderr", self.world.output(self.worker, "stderr")[-3000:]]
        )

    def ends_well(self) -> None:
        self.gate.open("end")
        record = self.world.until_settled(self.worker)
        assert record.state is State.SUCCEEDED, f"{self.words()}\n{self.world.story(self.worker)}"
        assert record.cold_starts == 0, self.world.story(self.worker)


@pytest.mark.timeout(1500)
@pytest.mark.parametrize("herd", herds())
def test_what_people_run_survives_three_moves_or_is_refused_by_name_beforehand(
    world: World, gate: Gate, built: Path, outside: None, note: Callable[..., None], herd: tuple[Animal, ...]
) -> None:
    missing = sorted({a.needs for a in herd if a.needs and not zoo.NEEDS[a.needs]()})
    herd = tuple(a for a in herd if a.needs not in missing)
    if not herd:
        pytest.skip(f"{', '.join(missing)} is not on this machine: tests/zoo/install gets it")
    for animal in herd:
        note(name=animal.name)  # without a second line it has failed
    keeper = Keeper(world, gate, built, herd)
    for animal in herd:
        keeper.wait(animal, "ready", 1, "get ready", 120)
    keeper.all_go_on("work before its first move")
    began = time.monotonic()
    refused = [a for a in herd if isinstance(a.expected, Refused)]
    reasons = is_refused(keeper, refused) if refused else moves(keeper, max(a.moves for a in herd))
    for animal in herd:
        if isinstance(animal.expected, FallsBack):
            assert keeper.count(animal, re.escape(animal.expected.says)) == 1, keeper.words()
    keeper.ends_well()
    for animal in herd:
        if isinstance(animal.expected, Survives):
            assert keeper.forgotten(animal) <= set(animal.expected.forgets), keeper.words()
    seconds = round(time.monotonic() - began, 1)
    for animal in herd:
        lost = sorted(keeper.forgotten(animal))
        note(name=animal.name, reason=reasons.get(animal.name, ""), forgotten=lost, seconds=seconds)


def preempt(world: World, worker: str, notice: float | None) -> None:
    """As ``World.preempt``, however long the notice."""
    before = len(world.record(worker).incarnations)
    world.client.preempt(worker, notice)
    world.until(
        worker,
        lambda r: r.state.terminal or (len(r.incarnations) > before and r.state is State.RUNNING),
        "run on elsewhere",
        120 + (notice or 0),
    )


def moves(keeper: Keeper, count: int) -> dict[str, str]:
    """With notice, without (from a checkpoint that was asked for), with notice, and so on."""
    world, worker = keeper.world, keeper.worker
    for move in range(1, count + 1):
        if move % 3 == 2:
            world.checkpoint(worker)
            keeper.all_go_on("run on after a checkpoint")
            preempt(world, worker, None)
        else:
            preempt(world, worker, max(a.notice for a in keeper.herd))
        keeper.all_go_on(f"go on after move {move}")
        record = world.record(worker)
        assert (record.migrations, record.cold_starts) == (move, 0), (
            f"{keeper.words()}\n{world.story(worker)}"
        )
    return {}


def _names(reason: str, record: WorkerRecord) -> bool:
    return reason in str(record.unprotected_reasons)


def is_refused(keeper: Keeper, herd: list[Animal]) -> dict[str, str]:
    """Each is named before a checkpoint is tried, the checkpoint is refused for it, and everything runs on."""
    world, worker = keeper.world, keeper.worker
    found: dict[str, str] = {}
    for animal in herd:
        assert isinstance(animal.expected, Refused)
        reason = animal.expected.reason
        record = world.until(worker, partial(_names, reason), f"name {reason!r}", 60)
        said = [x for x in record.unprotected_reasons if reason in x]
        found[animal.name] = next((x for x in said if x not in found.values()), said[0])
        assert not record.protected
        with pytest.raises(SavedWorkerError, match=re.escape(reason)):
            world.checkpoint(worker)
    keeper.all_go_on("run on after a refused checkpoint")
    return found


def test_a_unix_connection_that_waits_to_be_accepted_is_named_and_in_the_way_only_until_it_is(
    world: World, gate: Gate
) -> None:
    command = (zoo.PYTHON, "-B", str(zoo.PROGRAMS / "unaccepted_unix.py"))
    worker = world.submit(*command, volumes=(gate.volume,))
    world.until_output(worker, "ok 2\n")
    with pytest.raises(SavedWorkerError, match="a unix connection inside the worker waits to be accepted"):
        world.checkpoint(worker)
    gate.open("accept")
    seen = world.output(worker).count("ok ")
    world.until_output(worker, f"ok {seen + 3}\n")
    preempt(world, worker, 40.0)
    gate.open("end")
    record = world.until_settled(worker)
    assert (record.state, record.cold_starts) == (State.SUCCEEDED, 0), world.story(worker)
