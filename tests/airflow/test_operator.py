"""What the operator submits, when it attaches instead, and what the end of a worker is for Airflow."""

from __future__ import annotations

import threading
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
from airflow.sdk.exceptions import (
    AirflowException,
    AirflowFailException,
    AirflowSkipException,
    AirflowTaskTimeout,
    TaskDeferralTimeout,
    TaskDeferred,
)

from airflow_provider_savedworker.hooks.saved_worker import SavedWorkerHook
from airflow_provider_savedworker.operators import saved_worker
from airflow_provider_savedworker.operators.saved_worker import (
    SavedWorkerOperator,
    bounded,
    mask_values,
    secret_names,
)
from savedworker.controller.client import Client
from savedworker.model import events as ev
from savedworker.model.record import Reason
from savedworker.model.spec import CheckpointPolicy, PlacementPolicy, check_worker_id
from tests.airflow.conftest import Hand, HandFleet, States, make_context
from tests.model.policies import WRITTEN, WRONG, as_read, as_written, of, refusal

Make = Callable[..., SavedWorkerOperator]


@pytest.fixture(autouse=True)
def this_client(client: Client, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every hook leads to the test's store and fleet."""
    monkeypatch.setattr(SavedWorkerHook, "store", property(lambda self: self._store or client.store.url))
    monkeypatch.setattr(SavedWorkerHook, "get_client", lambda self: client)
    monkeypatch.setattr(SavedWorkerHook, "_fields", property(lambda self: {}))


def operator(**fields: Any) -> SavedWorkerOperator:
    wanted: dict[str, Any] = {"task_id": "train", "command": ["train", "--fast"], "poll_interval": 0.02}
    return SavedWorkerOperator(**(wanted | fields))


def execute(task: SavedWorkerOperator, context: Any) -> Any:
    """As the task runner does it, which alone may call ``execute``."""
    return type(task).execute.__wrapped__(task, context)  # type: ignore[attr-defined]


def deferred(task: SavedWorkerOperator, context: Any) -> str:
    """Execute until the deferral; returns the worker's id."""
    with pytest.raises(TaskDeferred) as caught:
        execute(task, context)
    return str(caught.value.trigger.worker)


def test_a_task_becomes_a_worker_with_its_specification(client: Client) -> None:
    task = operator(
        env={"A": "1"},
        user="nobody",
        workdir="/data",
        volumes=["/data:/data:ro"],
        memory="2GiB",
        cpus=1.5,
        network="host",
        checkpoint_interval="2m",
        max_migrations=3,
        syscalls="all",
    )
    spec = client.spec(deferred(task, make_context()))
    assert spec.command == ("train", "--fast")
    assert (spec.env, spec.user, spec.workdir) == ({"A": "1"}, "nobody", "/data")
    assert spec.volumes[0].read_only
    assert (spec.memory, spec.cpus, spec.network, spec.syscalls) == (2 << 30, 1.5, "host", "all")
    assert (spec.checkpoint.interval, spec.max_migrations, spec.lease_term) == (120.0, 3, 10.0)
    assert spec.engine["dag_id"] == "Some.DAG"
    assert spec.engine["try_number"] == "1"


def test_inputs_outputs_and_credentials_are_of_the_specification(client: Client) -> None:
    task = operator(inputs=["s3://b/in/:/in"], outputs=["/out:s3://b/{{ ds }}/"], credentials="instance")
    assert {"inputs", "outputs"} <= set(task.template_fields)
    spec = client.spec(deferred(task, make_context()))
    assert [(i.url, i.path) for i in spec.inputs] == [("s3://b/in/", "/in")]
    assert [o.path for o in spec.outputs] == ["/out"]
    assert spec.credentials == "instance"


def test_a_command_that_is_a_string_is_run_by_the_shell(client: Client) -> None:
    spec = client.spec(deferred(operator(command="echo $HOME | cat"), make_context()))
    assert spec.command == ("/bin/sh", "-c", "echo $HOME | cat")


def test_checkpoints_can_be_off(client: Client) -> None:
    spec = client.spec(deferred(operator(checkpoint_interval="off"), make_context()))
    assert spec.checkpoint.interval is None


def test_the_checkpoint_interval_can_adapt_itself(client: Client) -> None:
    spec = client.spec(deferred(operator(checkpoint_interval="auto"), make_context()))
    assert spec.checkpoint.interval == "auto"


@pytest.mark.parametrize("given", [as_written, as_read])
def test_every_field_of_the_policies_can_be_given(client: Client, given: Callable[[str], Any]) -> None:
    spec = client.spec(
        deferred(operator(checkpoint=given("checkpoint"), placement=given("placement")), make_context())
    )
    for group in WRITTEN:
        assert of(spec, group) == as_read(group)


def test_the_documented_example_of_both_policies_is_a_specification(client: Client) -> None:
    page = (Path(__file__).parents[2] / "docs/airflow.md").read_text()
    example = page.partition("### Checkpoints and placement")[2].split("```")[1].removeprefix("python\n")
    task = eval(example, {"SavedWorkerOperator": SavedWorkerOperator})
    spec = client.spec(deferred(task, make_context()))
    assert spec.checkpoint == CheckpointPolicy(interval=600, keep=3, bandwidth=50 << 20, max_cold_starts=1)
    assert spec.placement == PlacementPolicy(
        on_demand_after_losses=2, on_demand_after_wait=300, wait_for_capacity=7200, spare_for=None
    )


def test_policies_that_are_not_given_are_the_defaults(client: Client) -> None:
    spec = client.spec(deferred(operator(checkpoint={"keep": 3}), make_context()))
    assert spec.checkpoint == CheckpointPolicy(keep=3)
    assert spec.placement == PlacementPolicy()


def test_texts_in_policies_are_templated_and_other_values_stay(client: Client) -> None:
    task = operator(
        checkpoint={"interval": "{{ params.pause }}", "keep": "{{ params.keep }}", "max_cold_starts": None},
        placement={
            "on_demand_after_losses": 1,
            "avoid_reclaimed": "{{ 2 * params.keep }}m",
            "spare_for": None,
        },
    )
    context: Any = make_context()
    context["params"] = {"pause": "7m", "keep": 3}
    task.render_template_fields(context)
    spec = client.spec(deferred(task, context))
    assert (spec.checkpoint.interval, spec.checkpoint.keep, spec.checkpoint.max_cold_starts) == (420, 3, None)
    assert (spec.placement.avoid_reclaimed, spec.placement.on_demand_after_losses) == (360, 1)
    assert spec.placement.spare_for is None


def test_the_interval_comes_from_the_connection_only_if_the_task_names_none(
    client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(SavedWorkerHook, "_fields", property(lambda self: {"checkpoint_interval": "3m"}))
    cases: list[tuple[dict[str, Any], float | None]] = [
        ({}, 180.0),
        ({"checkpoint": {"keep": 3}}, 180.0),
        ({"checkpoint": {"interval": "2m"}}, 120.0),
        ({"checkpoint": {"interval": None}}, None),
        ({"checkpoint_interval": "1m"}, 60.0),
        ({"checkpoint_interval": "1m", "checkpoint": {"keep": 3}}, 60.0),
    ]
    for number, (fields, interval) in enumerate(cases):
        spec = client.spec(deferred(operator(**fields), make_context(id=f"ti-{number}")))
        assert spec.checkpoint.interval == interval


def test_an_interval_of_the_connection_that_is_wrong_is_said_of_the_connection(
    client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(SavedWorkerHook, "_fields", property(lambda self: {"checkpoint_interval": "often"}))
    with pytest.raises(
        AirflowFailException, match="connection savedworker_default: checkpoint_interval: 'oft"
    ):
        execute(operator(), make_context())


@pytest.mark.parametrize(("fields", "message", "fix"), WRONG, ids=[ascii(x[0])[:60] for x in WRONG])
def test_a_policy_that_is_wrong_is_one_line_with_task_field_and_fix(
    client: Client, fields: dict[str, Any], message: str, fix: str
) -> None:
    with pytest.raises(AirflowFailException) as caught:
        execute(operator(**fields), make_context())
    assert refusal(caught.value, "task train", message, fix), str(caught.value)
    assert client.list() == []


def test_the_interval_cannot_be_given_in_both_forms(client: Client) -> None:
    with pytest.raises(AirflowFailException) as caught:
        execute(operator(checkpoint_interval="5m", checkpoint={"interval": "5m"}), make_context())
    assert refusal(
        caught.value,
        "task train",
        "checkpoint_interval and checkpoint.interval are one field",
        "give one of them",
    )


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"command": ""}, "task train: command is empty"),
        ({"memory": "lots"}, "task train: memory: 'lots' is not a size"),
        ({"checkpoint_interval": "often"}, "task train: checkpoint_interval: 'often' is not a duration"),
        (
            {"checkpoint_interval": 0.5},
            "task train: checkpoint_interval: a checkpoint interval of '0.5' is too short",
        ),
        ({"volumes": ["data"]}, "task train: volumes: volume 'data' is not SRC:DST"),
        ({"inputs": ["data"]}, "task train: inputs: input 'data' is not URL:PATH"),
        ({"image": "docker://X"}, "is not docker://"),
        ({"workdir": "here"}, "task train: workdir: "),
        ({"network": "none"}, "task train: network: "),
        ({"cpus": -1}, "task train: cpus: "),
    ],
)
def test_a_wrong_specification_fails_at_once_and_without_a_retry(
    fields: dict[str, Any], message: str, client: Client
) -> None:
    with pytest.raises(AirflowFailException, match=message):
        execute(operator(**fields), make_context())
    assert client.list() == []


def test_the_same_try_has_always_the_same_worker_and_every_other_try_another() -> None:
    ids = {operator().worker_id(make_context(try_number=n)) for n in (1, 1, 2)}
    assert len(ids) == 2
    assert operator().worker_id(make_context()) == operator(command="other").worker_id(make_context())


@pytest.mark.parametrize("name", [None, "ÄÖÜ", "x" * 300, "-..-", "Train/Me now!"])
def test_worker_ids_are_usable_whatever_the_names_are(name: str | None) -> None:
    context = make_context(dag_id="D" * 250, task_id="group.täsk")
    check_worker_id(operator(name=name).worker_id(context))


def test_mapped_tasks_have_workers_of_their_own_whose_labels_say_which_is_which(
    client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AIRFLOW__SAVEDWORKER__DEPLOYMENT", "production")
    contexts = [make_context(id=f"id-{i}", map_index=i, try_number=2) for i in range(3)]
    workers = [deferred(operator(), context) for context in contexts]
    assert workers == [operator().worker_id(context) for context in contexts]
    assert [x.startswith(f"some-dag-train-{i}-") for i, x in enumerate(workers)] == [True] * 3
    assert len(set(workers)) == 3
    assert client.spec(workers[2]).engine == {
        "engine": "airflow",
        "deployment": "production",
        "dag_id": "Some.DAG",
        "run_id": "manual__1",
        "task_id": "train",
        "map_index": "2",
        "try_number": "2",
        "ti_id": "id-2",
    }


def test_executing_the_same_try_again_attaches_to_its_worker(client: Client, fleet: HandFleet) -> None:
    states = States()
    first = deferred(operator(), make_context(states))
    assert deferred(operator(), make_context(states)) == first
    # and also when nothing but the worker itself had been written, or the command is rendered differently now
    assert deferred(operator(command=["train", "--slow"]), make_context()) == first
    assert len(client.list()) == 1


def test_a_retry_after_a_lost_task_process_goes_on_with_the_live_worker(client: Client) -> None:
    states = States()
    first = deferred(operator(), make_context(states))
    second = make_context(states, try_number=2)
    assert deferred(operator(), second) == first
    assert client.record(first).state == "pending"
    assert (
        second["ti"].xcoms["saved_worker"]["worker"] == first
    )  # Airflow deletes a try's XComs before the next one


def test_a_retry_takes_the_result_of_a_worker_that_succeeded_unseen(client: Client, fleet: HandFleet) -> None:
    states = States()
    first = deferred(operator(), make_context(states))
    hand = Hand(client, fleet, client.spec(first))
    hand.begin()
    hand.end()
    report = execute(operator(deferrable=False), make_context(states, try_number=2))
    assert report["id"] == first


def test_a_retry_after_a_failure_starts_a_new_worker(client: Client, fleet: HandFleet) -> None:
    states = States()
    first = deferred(operator(), make_context(states))
    hand = Hand(client, fleet, client.spec(first))
    hand.begin()
    hand.end(exit_code=3)
    assert deferred(operator(), make_context(states, try_number=2)) != first


def test_a_cleared_task_cancels_the_worker_of_the_try_before(client: Client) -> None:
    states = States()
    first = deferred(operator(), make_context(states))
    second = deferred(operator(), make_context(states, try_number=2, max_tries=3))
    assert second != first
    assert client.record(first).state == "cancelled"


def test_a_retry_that_is_not_durable_ends_the_worker_before_and_starts_another(client: Client) -> None:
    states = States()
    first = deferred(operator(durable=False), make_context(states))
    second = deferred(operator(durable=False), make_context(states, try_number=2))
    assert second != first
    assert (client.record(first).state, client.record(second).state) == ("cancelled", "pending")


def test_no_second_worker_starts_while_the_one_before_has_not_ended(
    client: Client, fleet: HandFleet, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An instance that cannot be ended: its worker may still run."""
    monkeypatch.setattr(saved_worker, "OLD_WORKER_PATIENCE", 0.3)
    states = States()
    first = deferred(operator(), make_context(states))
    Hand(client, fleet, client.spec(first)).begin()
    monkeypatch.setattr(fleet, "terminate", lambda launch: None)
    with pytest.raises(AirflowException, match="has not ended: no second one starts"):
        execute(operator(), make_context(states, try_number=2, max_tries=3))
    assert [x.id for x in client.list()] == [first]


def test_a_note_without_its_worker_or_without_sense_is_no_obstacle(client: Client) -> None:
    for note in (
        {"worker": "gone", "store": client.store.url, "try_number": 1, "max_tries": 2},
        {"worker": "of an older release"},
        "nonsense",
    ):
        states = States(saved_worker=note)
        context = make_context(states, id=str(note), try_number=2)
        assert client.record(deferred(operator(), context)).state == "pending"


def finish(client: Client, fleet: HandFleet, end: Callable[[Hand], object], **fields: Any) -> Any:
    """Run a worker to ``end`` while the task is deferred, then resume the task."""
    task, context = operator(**fields), make_context()
    worker = deferred(task, context)
    hand = Hand(client, fleet, client.spec(worker))
    hand.begin()
    end(hand)
    event = {"worker": worker, "store": client.store.url}
    return task.resume_execution("execute_complete", {"event": event}, context), context


def test_success_returns_the_report_document(client: Client, fleet: HandFleet) -> None:
    report, context = finish(client, fleet, lambda hand: hand.end())
    assert report == client.report(report["id"]).model_dump(mode="json")
    assert (report["state"], report["exit_code"], report["migrations"]) == ("succeeded", 0, 0)
    assert context["ti"].xcoms["saved_worker"] == {"worker": report["id"], "store": client.store.url}


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"exit_code": 3}, "failed: exit, exit code 3$"),
        ({"exit_code": 3, "detail": "exit code 3"}, "failed: exit, exit code 3$"),
        ({"exit_code": None, "signal": 11}, "failed: signal, signal 11$"),
        (
            {"exit_code": 137, "reason": Reason.OOM, "detail": "limit 2 GiB"},
            "failed: oom, exit code 137, limit 2 GiB$",
        ),
    ],
)
def test_a_failure_says_reason_exit_code_and_signal_and_leaves_the_retries_to_airflow(
    fields: dict[str, Any], message: str, client: Client, fleet: HandFleet
) -> None:
    with pytest.raises(AirflowException, match=message) as caught:
        finish(client, fleet, lambda hand: hand.end(**fields))
    assert not isinstance(caught.value, AirflowFailException)


def test_a_spec_that_cannot_be_run_is_not_tried_again(client: Client, fleet: HandFleet) -> None:
    with pytest.raises(AirflowFailException, match="spec_error"):
        finish(client, fleet, lambda hand: hand.end(exit_code=None, reason=Reason.SPEC_ERROR))


def test_a_worker_that_a_person_cancelled_is_not_tried_again(client: Client, fleet: HandFleet) -> None:
    with pytest.raises(AirflowFailException, match="cancelled by me"):
        finish(client, fleet, lambda hand: client.cancel(hand.id, "me"))


def test_a_failure_soon_after_a_restore_is_marked(client: Client, fleet: HandFleet) -> None:
    def end(hand: Hand) -> None:
        from datetime import UTC, datetime

        frozen = datetime.now(UTC)
        hand.fenced(
            ev.CheckpointCommitted,
            number="1-1",
            cause="notice",
            frozen_at=frozen,
            bytes_image=1,
            bytes_uploaded=1,
        )
        hand.fenced(ev.HandedOver, number="1-1")
        hand.vanish()
        hand.begin(restore="1-1")
        hand.end(exit_code=1)

    with pytest.raises(AirflowException, match="exit code 1, soon after a restore"):
        finish(client, fleet, end)


FAILED_DUMPS = (
    "No space left on device (/var/lib/savedworker/w/images)",
    "the deadline came before the checkpoint was committed",
    "pid 7 has /dev/fuse open, which cannot be saved",
)


def loses_its_instance_unsaved(hand: Hand, why: str) -> None:
    """A notice, a checkpoint that fails, and the instance is gone."""
    hand.fenced(ev.NoticeReceived, id="n", source="ec2", seconds_left=120)
    hand.fenced(ev.CheckpointFailed, number="1-1", detail=why)
    hand.fenced(ev.Yielded, detail=why)
    hand.vanish()


@pytest.mark.parametrize("why", FAILED_DUMPS)
def test_an_instance_that_goes_after_a_failed_checkpoint_is_replaced_and_the_try_goes_on(
    why: str, client: Client, fleet: HandFleet
) -> None:
    """C31: a preemption without a checkpoint, told as that, and no code of its own."""

    def end(hand: Hand) -> None:
        loses_its_instance_unsaved(hand, why)
        hand.begin()
        hand.end(exit_code=0)

    report, _ = finish(client, fleet, end)
    assert (report["state"], report["exit_code"], report["reason"]) == ("succeeded", 0, None)
    assert (report["migrations"], report["cold_starts"]) == (0, 1)
    assert why in [x["detail"].partition(": ")[2] for x in report["timeline"]]


@pytest.mark.parametrize("why", FAILED_DUMPS)
def test_a_worker_that_may_not_begin_again_after_a_failed_checkpoint_fails_with_a_reason_and_no_code(
    why: str, client: Client, fleet: HandFleet
) -> None:
    """C31: the engine's own retries then apply, as to any failure."""

    def end(hand: Hand) -> None:
        loses_its_instance_unsaved(hand, why)
        client.reconcile(hand.id)

    with pytest.raises(AirflowException, match="failed: migration_budget") as caught:
        finish(client, fleet, end, max_migrations=0)
    assert not isinstance(caught.value, AirflowFailException)
    assert "exit code" not in str(caught.value)
    (worker,) = client.list()
    assert (worker.exit_code, worker.signal) == (None, None)


def test_a_task_that_is_resumed_before_its_worker_ended_defers_again(
    client: Client, fleet: HandFleet
) -> None:
    with pytest.raises(TaskDeferred):
        finish(client, fleet, lambda hand: None)


def test_a_deferral_that_timed_out_ends_the_worker(client: Client) -> None:
    context = make_context()
    task = operator(execution_timeout=timedelta(seconds=5))
    with pytest.raises(TaskDeferred) as caught:
        execute(task, context)
    assert caught.value.timeout == timedelta(seconds=5)
    with pytest.raises(TaskDeferralTimeout):
        task.resume_execution("__fail__", {"error": "Trigger timeout"}, context)
    assert client.record(str(caught.value.trigger.worker)).state == "cancelled"


def test_without_deferring_the_task_follows_its_worker_to_the_end(client: Client, fleet: HandFleet) -> None:
    task, context = operator(deferrable=False), make_context()

    def run_it() -> None:
        while not client.list():
            threading.Event().wait(0.01)
        hand = Hand(client, fleet, client.spec(client.list()[0].id))
        hand.begin()
        hand.end()

    thread = threading.Thread(target=run_it)
    thread.start()
    assert execute(task, context)["state"] == "succeeded"
    thread.join()


def test_without_deferring_execution_timeout_ends_the_worker(
    client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    def time_out(*_: object) -> None:
        raise AirflowTaskTimeout

    task = operator(deferrable=False)
    monkeypatch.setattr(task, "_follow", time_out)
    with pytest.raises(AirflowTaskTimeout):
        execute(task, make_context())
    assert [x.state for x in client.list()] == ["cancelled"]


@pytest.mark.parametrize(
    ("state", "ends"),
    [
        ("failed", True),
        ("success", True),
        ("skipped", True),
        ("removed", True),
        ("restarting", True),
        (None, True),
        ("running", False),
        ("queued", False),
        ("scheduled", False),
        ("deferred", False),
        ("up_for_retry", False),
        ("a state of the future", False),
    ],
)
def test_only_a_user_ends_the_worker_when_the_task_process_is_told_to_stop(
    state: str | None, ends: bool, client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(saved_worker, "task_state", lambda _: state)
    task = operator()
    worker = deferred(task, make_context())
    task.on_kill()
    for _ in range(3000 if ends else 30):
        if client.record(worker).state == "cancelled":
            break
        threading.Event().wait(0.01)
    assert (client.record(worker).state == "cancelled") is ends


def test_a_task_process_that_cannot_ask_for_its_state_leaves_the_worker_alone(
    client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(_: object) -> None:
        raise ConnectionError("the supervisor is gone")

    monkeypatch.setattr(saved_worker, "task_state", fail)
    task = operator()
    worker = deferred(task, make_context())
    task.on_kill()
    threading.Event().wait(0.3)
    assert client.record(worker).state == "pending"


def test_a_store_that_does_not_answer_is_waited_for_at_submission(
    client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    from savedworker.model.errors import Unreachable

    real, calls = client.submit, []

    def flaky(spec: Any) -> str:
        calls.append(spec.id)
        if len(calls) == 1:
            raise Unreachable("not now", retry_after=0.01)
        return real(spec)

    monkeypatch.setattr(client, "submit", flaky)
    assert deferred(operator(), make_context()) == calls[0] == calls[1]


@pytest.mark.parametrize(
    ("codes", "end", "skipped"),
    [
        (99, {"exit_code": 99}, True),
        ([98, 99], {"exit_code": 99}, True),
        (99, {"exit_code": 98}, False),
        (None, {"exit_code": 99}, False),
        (0, {"exit_code": 0}, True),
        (137, {"exit_code": 137, "reason": Reason.OOM}, False),
        (11, {"exit_code": None, "signal": 11}, False),
    ],
)
def test_only_the_given_exit_codes_of_the_program_itself_skip_the_task(
    codes: int | list[int] | None, end: dict[str, Any], skipped: bool, client: Client, fleet: HandFleet
) -> None:
    with pytest.raises((AirflowSkipException, AirflowException)) as caught:
        finish(client, fleet, lambda hand: hand.end(**end), skip_on_exit_code=codes)
    assert isinstance(caught.value, AirflowSkipException) is skipped


def timeline(*kinds: str) -> dict[str, Any]:
    return {"state": "succeeded", "timeline": [{"event": x, "detail": str(i)} for i, x in enumerate(kinds)]}


def test_a_report_for_xcom_leaves_out_the_oldest_routine_checkpoints_and_counts_them() -> None:
    pair = ("checkpoint_started", "checkpoint_committed")
    short = timeline("started", *pair * 3, "finished")
    assert bounded(short, limit=8) == short
    long = bounded(timeline("started", *pair * 500, "notice", *pair * 500, "finished"), limit=200)
    assert long["timeline_omitted"] == 2003 - 200
    kept = [x["event"] for x in long["timeline"]]
    assert (len(kept), kept[0], kept[1], kept[-1]) == (200, "started", "notice", "finished")
    assert long["timeline"][-2]["detail"] == "2001"
    moves = bounded(timeline(*(["restored"] * 300)), limit=200)
    assert moves["timeline"][0]["detail"] == "100"


def test_what_airflow_masks_in_the_task_is_masked_by_whoever_relays_for_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from airflow.sdk._shared.secrets_masker import SecretsMasker, redact
    from airflow.sdk.log import mask_secret

    env = {"KEY": "open-sesame-1", "URL": "postgres://me:open-sesame-2@db/x", "TOKENIZERS": "false"}
    task, triggerer = SecretsMasker(), SecretsMasker()
    masker = "airflow.sdk._shared.secrets_masker.secrets_masker._secrets_masker"
    monkeypatch.setattr("airflow.sdk.log._secrets_masker", lambda: task)
    monkeypatch.setattr(masker, lambda: task)
    mask_secret("open-sesame-1")
    mask_secret("open-sesame-2")
    names = secret_names(env)
    assert names == ("KEY", "URL")
    monkeypatch.setattr("airflow.sdk.log._secrets_masker", lambda: triggerer)
    monkeypatch.setattr(masker, lambda: triggerer)
    mask_values(env, names)
    assert redact("open-sesame-1 and open-sesame-2, false") == "*** and ***, false"
