"""What an engine or a person asks of a worker: each call is idempotent, or says why not."""

from __future__ import annotations

import threading

import pytest

from savedworker.model import events as ev
from savedworker.model.errors import AlreadyExists, NotFound, Refused, SavedWorkerError
from savedworker.model.record import State
from tests.controller.conftest import World


def test_submitting_the_same_worker_again_finds_it(world: World) -> None:
    client = world.client()
    assert [client.submit(world.spec) for _ in range(3)] == ["w"] * 3
    assert client.record("w").state is State.PENDING
    client.reconcile("w")
    assert client.submit(world.spec) == "w"
    assert len(client.record("w").launches) == 1


def test_a_submit_that_died_between_spec_and_record_is_completed_by_the_next(world: World) -> None:
    world.store.ensure()
    world.documents.create_spec(world.spec)
    with pytest.raises(NotFound):
        world.client().record("w")
    world.client().submit(world.spec)
    assert world.client().record("w").state is State.PENDING


def test_another_worker_of_that_name_is_refused(world: World) -> None:
    world.client().submit(world.spec)
    with pytest.raises(AlreadyExists, match="its specification differs in command"):
        world.client().submit(world.spec.model_copy(update={"command": ("false",)}))


def test_a_damaged_record_hides_no_other_worker(world: World) -> None:
    client = world.client()
    client.submit(world.spec)
    client.submit(world.spec.model_copy(update={"id": "other"}))
    version = world.store.get("workers/other/record.json").version
    world.store.swap("workers/other/record.json", b'{"a": 1}', version)
    damaged: list[str] = []
    assert [
        x.id for x in client.list(unreadable=lambda worker, error: damaged.append(f"{worker}: {error}"))
    ] == ["w"]
    assert len(damaged) == 1
    assert damaged[0].startswith("other: ")


def test_what_was_cancelled_is_not_preempted_any_more(world: World) -> None:
    world.submit()
    world.run()
    client = world.client()
    client.cancel("w", "ann")
    assert client.record("w").lease_held
    with pytest.raises(Refused, match=r"w has ended: cancelled.*savedworker report w"):
        client.preempt("w", 30.0)


def test_a_cancel_counts_at_once_and_only_once(world: World) -> None:
    client = world.client()
    client.submit(world.spec)
    first = client.cancel("w", "ann")
    assert first.state is State.CANCELLED
    assert client.cancel("w", "bob") == first


def test_a_cancel_does_not_touch_a_worker_that_has_ended(world: World) -> None:
    world.submit()
    world.run()
    world.fenced(ev.Finished, exit_code=0)
    assert world.client().cancel("w", "ann").state is State.SUCCEEDED


@pytest.mark.parametrize("state", ["pending", "starting", "ended"])
def test_a_checkpoint_needs_a_running_worker(world: World, state: str) -> None:
    world.submit()
    if state == "starting":
        world.take(world.reconcile().launches[0].id)
    elif state == "ended":
        world.tell(ev.CancelRequested, by="ann")
    with pytest.raises(Refused, match=r"worker w (is|has ended)"):
        world.client().checkpoint("w", timeout=1)


@pytest.mark.parametrize("works", [True, False])
def test_a_checkpoint_on_request_has_its_number_or_its_reason(world: World, works: bool) -> None:
    world.submit()
    world.run()

    def agent() -> None:
        while world.record.checkpoint_requests == 0:
            pass
        if works:
            world.checkpoint("1-1", "requested")
            world.fenced(ev.CheckpointFailed, number="1-2", detail="", answered=1)
        else:
            world.fenced(ev.CheckpointFailed, number="1-1", detail="pid 7 holds /dev/fuse", answered=1)

    thread = threading.Thread(target=agent)
    thread.start()
    if works:
        assert world.client().checkpoint("w", timeout=20, poll=0.01) == "1-1"
    else:
        with pytest.raises(SavedWorkerError, match="pid 7 holds /dev/fuse"):
            world.client().checkpoint("w", timeout=20, poll=0.01)
    thread.join()


def test_a_drill_needs_an_instance(world: World) -> None:
    world.submit()
    with pytest.raises(Refused, match="wait until it runs"):
        world.client().preempt("w", 30)
    launch = world.run()
    assert world.client().preempt("w", 30) == f"i-{launch}"
    assert world.fleet.preempted == [(launch, 30)]


def test_workers_are_listed_by_state_and_an_unknown_state_is_refused(world: World) -> None:
    world.submit()
    assert [x.id for x in world.client().list()] == ["w"]
    assert world.client().list("running") == []
    with pytest.raises(Refused, match="there is no state 'fine'"):
        world.client().list("fine")


def test_the_report_has_every_event_although_the_record_keeps_few(world: World) -> None:
    world.submit()
    world.run()
    for n in range(50):
        world.tell(ev.Noted, event="preflight", detail=str(n))
    timeline = world.client().report("w").timeline
    assert len(timeline) == world.record.events == 54
    assert [x.event for x in timeline[:3]] == ["launch_requested", "launch_accepted", "lease_taken"]
