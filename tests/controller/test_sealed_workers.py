"""Controllers and sealed workers: who has the key brings them on, who has not harms nothing and can still end them."""

from __future__ import annotations

from pathlib import Path

import pytest

from savedworker.controller.reconcile import Controller
from savedworker.fleet.base import Launched, LaunchRequest
from savedworker.model import events as ev
from savedworker.model.decisions import settled
from savedworker.model.errors import NoKey, Refused
from savedworker.model.record import State
from savedworker.store.backend import open_store
from savedworker.store.documents import dump
from savedworker.store.sealing import NO_KEY, Sealing
from savedworker.store.worker import WorkerStore
from tests.controller.conftest import World
from tests.store.keys import key, sealing, text


@pytest.fixture
def keyed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> World:
    monkeypatch.setenv("SAVEDWORKER_KEY", text(key()))
    return World(tmp_path / "store")


def with_other_keys(world: World, how: Sealing) -> None:
    """From now on the world's controller has these keys."""
    world.store = open_store(world.store.url, sealing=how)
    world.documents = WorkerStore(world.store, "w")
    world.controller = Controller(
        world.store, lambda _: world.fleet, clock=lambda: world.time, now=lambda: world.now
    )


def test_the_agent_is_given_the_keys_of_its_controller_and_no_text_shows_them(keyed: World) -> None:
    keyed.submit()
    seen: list[LaunchRequest] = []
    launch = keyed.fleet.launch

    def watched(request: LaunchRequest) -> Launched:
        seen.append(request)
        return launch(request)

    keyed.fleet.launch = watched  # type: ignore[method-assign]
    keyed.reconcile()
    (request,) = seen
    assert request.environment == {"SAVEDWORKER_KEY": text(key())}
    assert text(key()) not in repr(request)


def test_a_controller_without_the_key_says_so_and_changes_nothing(keyed: World) -> None:
    keyed.submit()
    before = keyed.record
    for how in (NO_KEY, sealing(key(2))):
        with_other_keys(keyed, how)
        with pytest.raises(NoKey, match=r"docs/encryption\.md"):
            keyed.reconcile()
        assert keyed.record == before
    assert keyed.fleet.made() == []
    assert [x.id for x in keyed.client().list()] == ["w"]


def test_without_the_key_a_worker_can_be_cancelled_and_its_instance_ends(keyed: World) -> None:
    keyed.submit()
    keyed.run()
    with_other_keys(keyed, NO_KEY)
    assert keyed.client().cancel("w", "ann").state is State.CANCELLED
    for _ in range(4):
        keyed.pass_time(60)
        keyed.reconcile()
    assert keyed.fleet.running() == []
    assert settled(keyed.record)


def test_a_worker_made_without_a_key_is_watched_but_gets_no_new_instance_until_that_is_allowed(
    world: World,
) -> None:
    world.submit()
    launch = world.run()
    with_other_keys(world, sealing(key()))
    assert world.reconcile().state is State.RUNNING
    world.checkpoint("1-1")
    world.fleet.instances.pop(launch, None)
    world.fenced(ev.HandedOver, number="1-1")
    with pytest.raises(Refused, match="SAVEDWORKER_ALLOW_PLAIN=1"):
        world.reconcile()
    assert world.fleet.made() == [launch]
    assert world.record.launch(launch).state == "ended"  # type: ignore[union-attr]  # all else was done
    assert world.record.state is State.MIGRATING
    with_other_keys(world, Sealing(sealing(key()).ring, allow_plain=True))
    world.reconcile()
    assert len(world.fleet.made()) == 2


def test_a_worker_made_without_a_key_finishes_where_a_key_was_configured_meanwhile(world: World) -> None:
    world.submit()
    world.run()
    with_other_keys(world, sealing(key()))
    world.fenced(ev.Finished, exit_code=0)
    world.fenced(ev.LeaseReleased, end_reason="finished")
    for _ in range(3):
        world.pass_time(60)
        world.reconcile()
    assert world.record.state is State.SUCCEEDED
    assert settled(world.record)


def test_a_plain_spec_in_the_place_of_a_sealed_one_gets_no_instance(keyed: World) -> None:
    keyed.submit()
    launch = keyed.run()
    keyed.checkpoint("1-1")
    evil = keyed.spec.model_copy(update={"command": ("/bin/evil",)})
    keyed.store.put("workers/w/spec.json", dump(evil))
    keyed.fenced(ev.HandedOver, number="1-1")
    for controller in (
        keyed.controller,
        keyed.another_controller(),
    ):  # one that knew the spec before, and a new one
        with pytest.raises(Refused, match="made without a key"):
            controller.reconcile("w")
    assert keyed.fleet.made() == [launch]
