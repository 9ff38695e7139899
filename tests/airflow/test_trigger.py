"""When the trigger fires, and when it ends a worker: only if the task does not wait for it any more."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest

from airflow_provider_savedworker.triggers import saved_worker
from airflow_provider_savedworker.triggers.saved_worker import SavedWorkerTrigger
from savedworker.controller.client import Client
from tests.airflow.conftest import Hand, make_context


@pytest.fixture
def trigger(hand: Hand, client: Client, monkeypatch: pytest.MonkeyPatch) -> SavedWorkerTrigger:
    monkeypatch.setattr(SavedWorkerTrigger, "_client", lambda self: client)
    monkeypatch.setattr(saved_worker, "LEAST_DEFERRAL", 0.0)
    found = SavedWorkerTrigger(hand.id, client.store.url, poll_interval=0.02)
    found.task_instance = make_context()["ti"]
    return found


def say_state(monkeypatch: pytest.MonkeyPatch, state: object) -> None:
    """Airflow's database says ``state`` from now on; an exception means that it cannot be asked."""

    def task_state(_: object) -> object:
        if isinstance(state, Exception):
            raise state
        return state

    monkeypatch.setattr(saved_worker, "task_state", task_state)


async def until(condition: Callable[[], bool], seconds: float = 60.0) -> None:
    async with asyncio.timeout(seconds):
        while not condition():  # noqa: ASYNC110 what is waited for happens in a store
            await asyncio.sleep(0.01)


async def first_event(trigger: SavedWorkerTrigger) -> Any:
    async for event in trigger.run():
        return event
    return None


def run(work: Callable[[], Awaitable[None]]) -> None:
    asyncio.run(work())  # type: ignore[arg-type]


def test_what_is_stored_of_a_trigger_makes_the_same_trigger(trigger: SavedWorkerTrigger) -> None:
    path, arguments = trigger.serialize()
    assert path == f"{SavedWorkerTrigger.__module__}.{SavedWorkerTrigger.__name__}"
    assert SavedWorkerTrigger(**arguments).serialize() == trigger.serialize()


def test_it_fires_once_when_the_worker_has_ended(
    trigger: SavedWorkerTrigger, hand: Hand, client: Client
) -> None:
    async def work() -> None:
        task = asyncio.create_task(first_event(trigger))
        await until(lambda: bool(client.record(hand.id).launches))  # the trigger launches it
        await asyncio.to_thread(hand.begin)
        await asyncio.sleep(0.1)
        assert not task.done()
        await asyncio.to_thread(hand.end)
        event = await asyncio.wait_for(task, 60)
        assert event.payload == {"worker": hand.id, "store": client.store.url}

    run(work)


def test_a_task_stays_deferred_long_enough_for_the_scheduler_to_notice(
    trigger: SavedWorkerTrigger, hand: Hand, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(saved_worker, "LEAST_DEFERRAL", 0.5)
    hand.begin()
    hand.end()

    async def work() -> None:
        began = asyncio.get_running_loop().time()
        await first_event(trigger)
        assert asyncio.get_running_loop().time() - began >= 0.5

    run(work)


def test_a_triggerer_that_stops_leaves_the_worker_alone(
    trigger: SavedWorkerTrigger, hand: Hand, client: Client
) -> None:
    async def work() -> None:
        task = asyncio.create_task(first_event(trigger))
        await until(lambda: bool(client.record(hand.id).launches))
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        await trigger.cleanup()

    run(work)
    assert client.record(hand.id).state == "pending"


@pytest.mark.parametrize("state", ["failed", "success", None, "scheduled", "queued", "running", "removed"])
def test_a_task_that_left_the_deferred_state_ends_its_worker(
    state: str | None,
    trigger: SavedWorkerTrigger,
    hand: Hand,
    client: Client,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    say_state(monkeypatch, state)
    hand.client.reconcile(hand.id)
    run(trigger.on_kill)
    assert client.record(hand.id).state == "cancelled"
    assert set(hand.fleet.launches.values()) == {"ended"}


def test_a_worker_between_two_instances_is_ended_too(
    trigger: SavedWorkerTrigger, hand: Hand, client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    hand.begin()
    hand.vanish()
    assert client.reconcile(hand.id).state == "migrating"
    say_state(monkeypatch, "failed")
    run(trigger.on_kill)
    assert client.record(hand.id).state == "cancelled"
    assert len(hand.fleet.launches) == 2
    assert set(hand.fleet.launches.values()) == {"ended"}


@pytest.mark.parametrize("state", ["deferred", ConnectionError("no database"), KeyError("no such thing")])
def test_a_trigger_that_was_only_taken_away_or_cannot_ask_leaves_the_worker_alone(
    state: object,
    trigger: SavedWorkerTrigger,
    hand: Hand,
    client: Client,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    say_state(monkeypatch, state)
    run(trigger.on_kill)
    assert client.record(hand.id).state == "pending"


def test_killing_a_worker_that_has_ended_changes_nothing(
    trigger: SavedWorkerTrigger, hand: Hand, client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    hand.begin()
    hand.end()
    client.reconcile(hand.id)
    say_state(monkeypatch, "running")
    run(trigger.on_kill)
    assert client.record(hand.id).state == "succeeded"


def test_a_cleared_task_ends_its_worker_also_if_airflow_says_nothing(
    trigger: SavedWorkerTrigger, hand: Hand, client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A task that is cleared while its DAG is paused keeps its trigger."""
    say_state(monkeypatch, None)
    monkeypatch.setattr(saved_worker, "STATE_CHECK_EVERY", 0.1)

    async def work() -> None:
        task = asyncio.create_task(first_event(trigger))
        await until(lambda: client.record(hand.id).state == "cancelled")
        await asyncio.sleep(0.3)
        assert not task.done()  # no event: Airflow would start it again and again
        task.cancel()

    run(work)


def test_a_trigger_tells_a_timeout_from_a_cleared_task() -> None:
    trigger = SavedWorkerTrigger("w", "file:///nowhere")
    assert trigger._why("scheduled") == "the task is scheduled"
    trigger.timeout_after = datetime.now(UTC) + timedelta(minutes=1)
    assert trigger._why("scheduled") == "the task is scheduled"
    trigger.timeout_after = datetime.now(UTC) - timedelta(seconds=1)
    assert trigger._why("scheduled") == "TaskDeferralTimeout"
