"""``@task.saved_worker``: what the function returns is what the worker runs."""

from __future__ import annotations

from typing import Any

import pytest
from airflow.sdk import DAG, task
from airflow.sdk.exceptions import AirflowFailException, TaskDeferred

from airflow_provider_savedworker.hooks.saved_worker import SavedWorkerHook
from savedworker.controller.client import Client
from tests.airflow.conftest import States, make_context
from tests.model.policies import WRITTEN, as_read, as_written, of, refusal


@pytest.fixture(autouse=True)
def this_client(client: Client, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(SavedWorkerHook, "store", property(lambda self: client.store.url))
    monkeypatch.setattr(SavedWorkerHook, "get_client", lambda self: client)
    monkeypatch.setattr(SavedWorkerHook, "_fields", property(lambda self: {}))


def submitted(client: Client, function: Any, *arguments: Any, **fields: Any) -> Any:
    """The specification that a task of ``function`` submits."""
    with DAG("Some.DAG"):
        decorate: Any = task.saved_worker(**fields)
        output = decorate(function)(*arguments)
    made = output.operator
    with pytest.raises(TaskDeferred) as caught:
        type(made).execute.__wrapped__(made, {**make_context(), "ds": "2026-01-02"})
    return client.spec(caught.value.trigger.worker)


def test_the_list_that_a_function_returns_is_the_workers_command(client: Client) -> None:
    def train(rate: float, ds: str | None = None) -> list[str]:
        return ["train", f"--rate={rate}", f"--day={ds}", "--run={{ ti.run_id }}"]

    spec = submitted(client, train, 0.1, env={"DAY": "{{ ds }}"}, memory="1GiB")
    assert spec.command == ("train", "--rate=0.1", "--day=2026-01-02", "--run=manual__1")
    assert (spec.env, spec.memory) == ({"DAY": "2026-01-02"}, 1 << 30)
    assert spec.engine["task_id"] == "train"


def test_a_string_that_a_function_returns_is_run_by_the_shell(client: Client) -> None:
    def train() -> str:
        return "echo a | cat"

    assert submitted(client, train).command == ("/bin/sh", "-c", "echo a | cat")


def test_every_field_of_the_policies_can_be_given_and_texts_in_them_are_templated(client: Client) -> None:
    def train() -> list[str]:
        return ["train"]

    checkpoint = as_written("checkpoint") | {"interval": "{{ ti.try_number * 90 }}s"}
    spec = submitted(client, train, checkpoint=checkpoint, placement=as_written("placement"))
    for group in WRITTEN:
        assert of(spec, group) == as_read(group)


def test_a_policy_that_is_wrong_is_one_line_with_task_field_and_fix(client: Client) -> None:
    def train() -> list[str]:
        return ["train"]

    with pytest.raises(AirflowFailException) as caught:
        submitted(client, train, placement={"spare_for": "5 min"})
    assert refusal(
        caught.value, "task train", "placement.spare_for: '5 min' is not a duration", "write it as 30s"
    )
    assert client.list() == []


@pytest.mark.parametrize("returned", [None, "", " ", [], 3, ["train", 3], {"command": "x"}])
def test_a_function_that_returns_no_command_fails_and_submits_nothing(returned: Any, client: Client) -> None:
    def train() -> Any:
        return returned

    with pytest.raises(TypeError, match=r"@task.saved_worker runs what the function returns"):
        submitted(client, train)
    assert client.list() == []


def test_the_function_is_not_called_on_the_way_back_from_a_deferral(client: Client) -> None:
    calls = []

    def train() -> list[str]:
        calls.append(1)
        return ["train"]

    with DAG("Some.DAG"):
        decorated: Any = task.saved_worker(train)
        made = decorated().operator
    context = make_context(States())
    with pytest.raises(TaskDeferred) as caught:
        type(made).execute.__wrapped__(made, context)
    event = {"worker": caught.value.trigger.worker, "store": client.store.url}
    with pytest.raises(TaskDeferred):
        made.resume_execution("execute_complete", {"event": event}, context)
    assert calls == [1]


def test_the_function_can_be_mapped() -> None:
    with DAG("Some.DAG") as dag:

        @task.saved_worker(checkpoint_interval="1m", skip_on_exit_code=3, placement={"spare_for": None})
        def train(rate: float) -> list[str]:
            return ["train", str(rate)]

        train.expand(rate=[0.1, 0.2])
    mapped: Any = dag.get_task("train")
    made = mapped.unmap({"op_kwargs": {"rate": 0.2}})
    assert (made.checkpoint_interval, made.skip_on_exit_code) == ("1m", 3)
    assert made.placement == {"spare_for": None}
    assert made.python_callable(**made.op_kwargs) == ["train", "0.2"]
