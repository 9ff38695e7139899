"""SavedWorkerExecutor without an Airflow around it: real client, controller and store; instances by hand; the database is a dictionary."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import uuid
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import sqlalchemy
from airflow import sdk
from airflow.configuration import conf
from airflow.executors.workloads.base import BundleInfo
from airflow.executors.workloads.callback import CallbackDTO, CallbackFetchMethod, ExecuteCallback
from airflow.executors.workloads.task import ExecuteTask, TaskInstanceDTO
from airflow.jobs.scheduler_job_runner import SchedulerJobRunner
from airflow.models.log import Log
from airflow.providers.standard.operators.python import PythonOperator
from airflow.serialization.serialized_objects import DagSerialization
from airflow.utils.state import CallbackState, TaskInstanceState
from sqlalchemy.orm import Session

from airflow_provider_savedworker.executors import database, outcome, saved_worker_executor
from airflow_provider_savedworker.executors.environment import worker_environment
from airflow_provider_savedworker.executors.outcome import Row
from airflow_provider_savedworker.executors.saved_worker_executor import SavedWorkerExecutor
from airflow_provider_savedworker.executors.settings import Settings, read_settings, task_options
from airflow_provider_savedworker.executors.tracker import Task, Tracker
from airflow_provider_savedworker.executors.workload import NO_TOKEN, worker_id
from airflow_provider_savedworker.log import archive
from savedworker.agent.relay import airflow as relay
from savedworker.agent.relay.tokens import TokenNote
from savedworker.controller.client import Client
from savedworker.model import events as ev
from savedworker.model.errors import BadSpec, Refused, SavedWorkerError
from savedworker.model.record import Reason, WorkerRecord
from savedworker.model.spec import CheckpointPolicy, PlacementPolicy, WorkerSpec
from tests.agent.fake_execution_api import FakeApi
from tests.airflow.conftest import Hand, HandFleet
from tests.airflow.engine import eventually
from tests.certificates import make_certificates
from tests.model.policies import WRITTEN, WRONG, as_read, as_written, of


class Bed:
    """An executor whose threads are the test: ``round`` lets it look at everything once."""

    def __init__(self, client: Client, fleet: HandFleet, monkeypatch: pytest.MonkeyPatch) -> None:
        self.client, self.fleet = client, fleet
        self.api = FakeApi()
        self.rows: dict[str, Row] = {}
        self.kept_alive: list[str] = []
        self.patch = monkeypatch
        monkeypatch.setenv("AIRFLOW__API_AUTH__JWT_SECRET", "a secret of these tests" * 4)
        monkeypatch.setenv("SAVEDWORKER_STORE", client.store.url)
        monkeypatch.setattr(
            database, "rows", lambda ids: {x: self.rows[x] for x in set(ids) if x in self.rows}
        )
        monkeypatch.setattr(database, "heartbeat", self.kept_alive.extend)
        self.executor = self.scheduler()

    def scheduler(self) -> SavedWorkerExecutor:
        """One more scheduler's executor, as after the death of the one before."""
        self.executor = SavedWorkerExecutor(parallelism=8)
        self.executor.client = self.client  # type: ignore[misc]
        self.executor.settings = Settings(  # type: ignore[misc]
            store=self.client.store.url, fleet="local", upstream=self.api.url, poll_interval=0.2
        )
        self.executor._tracker = Tracker(
            self.client, 0.2, 1, 600.0, self.executor._mint, self.executor._keep_log
        )
        return self.executor

    def workload(
        self, task_id: str = "t", ti_id: str = "", external: str | None = "e1", **config: Any
    ) -> Any:
        ti = TaskInstanceDTO(
            id=uuid.UUID(ti_id) if ti_id else uuid.uuid4(),
            task_id=task_id,
            dag_id="d",
            run_id="r",
            try_number=1,
            map_index=-1,
            dag_version_id=uuid.uuid4(),
            pool_slots=1,
            queue="default",
            priority_weight=1,
            external_executor_id=external,
            executor_config=config,
        )
        return ExecuteTask(
            ti=ti,
            dag_rel_path=Path("d.py"),
            token="the workload's token",
            log_path="dag_id=d/run_id=r/task_id=t/attempt=1.log",
            bundle_info=BundleInfo(name="dags-folder"),
        )

    def queue(self, workload: Any) -> Any:
        """Airflow queues the task instance, and hands it to the executor."""
        self.rows[str(workload.ti.id)] = Row("queued", workload.ti.external_executor_id, None)
        self.executor.queued_tasks[workload.key] = workload
        self.executor._process_workloads([workload])
        return workload

    def runs(self, workload: Any, heard: float = 1.0) -> None:
        self.rows[str(workload.ti.id)] = Row("running", workload.ti.external_executor_id, heard)

    def hand(self, workload: Any) -> Hand:
        """The worker's agent."""
        name = worker_id("d", workload.ti.task_id, -1, str(workload.ti.id), workload.ti.external_executor_id)
        return Hand(self.client, self.fleet, self.client.spec(name))

    def begin(self, **config: Any) -> tuple[Any, Hand]:
        """A task that runs."""
        workload = self.queue(self.workload(**config))
        self.round()
        hand = self.hand(workload)
        hand.begin()
        self.runs(workload)
        self.round()
        return workload, hand

    def task(self) -> Task:
        return next(iter(self.executor._tasks.values()))

    def round(self, times: int = 1) -> None:
        for _ in range(times):
            for task in list(self.executor._tasks.values()):
                if not task.done:
                    with contextlib.suppress(SavedWorkerError):
                        assert self.executor._tracker is not None
                        self.executor._tracker.visit(task)
            self.executor._looked = float("-inf")
            self.executor.sync()

    def events(self) -> list[str]:
        """The states of all events since the last time."""
        return [str(state) for state, _ in self.executor.get_event_buffer().values()]


@pytest.fixture
def bed(client: Client, fleet: HandFleet, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Bed]:
    monkeypatch.setenv("AIRFLOW__LOGGING__BASE_LOG_FOLDER", str(tmp_path / "logs"))
    bed = Bed(client, fleet, monkeypatch)
    yield bed
    bed.api.stop()


# Queueing -------------------------------------------------------------------------------------------------------------


def test_each_queueing_is_a_worker_of_its_own(bed: Bed) -> None:
    first = bed.queue(bed.workload(external="e1"))
    bed.queue(bed.workload(ti_id=str(first.ti.id), external="e2"))
    bed.round()
    assert len(bed.client.list()) == 2


def test_an_id_that_airflow_did_not_assign_is_made_and_told(bed: Bed) -> None:
    workload = bed.queue(bed.workload(external=None))
    ((key, (state, info)),) = bed.executor.get_event_buffer().items()
    assert (key, state) == (workload.key, TaskInstanceState.RUNNING)
    bed.rows[str(workload.ti.id)] = Row("queued", info, None)
    bed.round()
    assert bed.client.list()[0].id == worker_id("d", "t", -1, str(workload.ti.id), info)
    assert workload.key in bed.executor.running


def test_the_worker_s_memory_and_specification_hold_no_usable_token(bed: Bed) -> None:
    workload = bed.queue(bed.workload())
    bed.round()
    spec = bed.hand(workload).spec
    assert json.loads(spec.command[-1])["token"] == NO_TOKEN
    note = bed.client.engine_note(spec.id, relay.TOKEN)
    assert note is not None
    token = TokenNote.model_validate_json(note).token
    assert token not in spec.model_dump_json()
    assert "the workload's token" not in spec.model_dump_json()
    assert spec.relay is not None
    assert (spec.relay.task, spec.relay.upstream) == (str(workload.ti.id), bed.api.url)


def test_a_token_is_there_before_the_first_instance_and_renewed_in_time(
    bed: Bed, monkeypatch: pytest.MonkeyPatch
) -> None:
    workload = bed.queue(bed.workload())
    bed.round()
    name = bed.hand(workload).id
    first = bed.client.engine_note(name, relay.TOKEN)
    bed.round()
    assert bed.client.engine_note(name, relay.TOKEN) == first
    bed.task().token_until -= 301.0
    bed.round()
    assert bed.client.engine_note(name, relay.TOKEN) != first


@pytest.mark.parametrize(
    ("config", "why"),
    [
        ({"memory": "much"}, "task d.t: memory: 'much' is not a size"),
        (
            {"memroy": "1GiB"},
            "task d.t: executor_config: memroy: there is no such field. Fix: use one of: memory, ",
        ),
        ({"fleet": "moon"}, "task d.t: fleet: there is no fleet 'moon'. Fix: use one of: "),
        ({"image": "relative/folder"}, "task d.t: image: image 'relative/folder'"),
        ({"savedworker": {"cpus": "two"}}, "task d.t: executor_config: cpus: Input should be a valid number"),
        ({"savedworker": 5}, "task d.t: executor_config['savedworker'] is a int"),
        ({"checkpoint_interval": "often"}, "task d.t: checkpoint_interval: 'often' is not a duration"),
        ({"volumes": ["/a"]}, "task d.t: volumes: volume '/a' is not SRC:DST"),
        (
            {"checkpoint_interval": "5m", "checkpoint": {"interval": "off"}},
            "task d.t: checkpoint_interval and checkpoint.interval are one field. Fix: give one of them",
        ),
        (
            {"wait_for_capacity": "1h"},
            "task d.t: executor_config: wait_for_capacity: there is no such field. "
            "Fix: it is a field of placement: {'placement': {'wait_for_capacity': …}}",
        ),
        *((fields, f"task d.t: {message}") for fields, message, _ in WRONG),
    ],
)
def test_wrong_options_fail_the_task_at_once_with_a_clear_line(
    bed: Bed, config: dict[str, Any], why: str
) -> None:
    if "fleet" in config:
        from savedworker.fleet.base import get_fleet

        bed.executor.client.controller._fleets = get_fleet
    bed.queue(bed.workload(**config))
    ((state, info),) = bed.executor.get_event_buffer().values()
    assert state == TaskInstanceState.FAILED
    assert str(info).startswith(why)
    assert ". Fix: " in str(info)
    assert "\n" not in str(info)
    assert not bed.executor.running
    assert [x.event for x in bed.executor._task_event_logs] == ["saved worker refused"]
    assert bed.client.list() == []


def test_the_reason_of_a_refusal_stands_in_airflow_s_event_log(bed: Bed) -> None:
    """As the scheduler stores it: rows that nobody else refers to are lost on the way there."""
    bed.queue(bed.workload(memory="lots"))
    engine = sqlalchemy.create_engine("sqlite://")
    Log.__table__.create(engine)  # type: ignore[attr-defined]
    with Session(engine) as session:
        SchedulerJobRunner._process_task_event_logs(bed.executor._task_event_logs, session)
        ((event, task, extra),) = session.execute(sqlalchemy.select(Log.event, Log.task_id, Log.extra))
    assert (event, task) == ("saved worker refused", "t")
    assert str(extra).startswith("task d.t: memory: 'lots' is not a size. Fix: ")


@pytest.mark.parametrize("when", ["queued", "submitted"])
def test_the_reason_of_a_refusal_stands_in_the_task_s_log(bed: Bed, when: str) -> None:
    workload = bed.workload(**({"memory": "lots"} if when == "queued" else {}))
    if when == "submitted":
        bed.patch.setattr(bed.client, "submit", refuse)
    bed.queue(workload)
    bed.round()
    assert bed.executor._tracker is not None
    bed.executor._tracker.start()
    try:
        parts = eventually(
            lambda: list(archive.parts(bed.client.store, workload.log_path)),
            60,
            "the log of the task is there",
        )
    finally:
        bed.executor._tracker.stop()
    ((_, text),) = parts
    line = json.loads(text)
    assert line["event"].startswith("[savedworker] refused: ")
    assert line["event"].endswith(
        "Fix: write it as 512MiB, 4GiB or a number of bytes" if when == "queued" else "not here"
    )
    assert line["level"] == "error"


def refuse(spec: WorkerSpec) -> None:
    raise Refused("not here")


def queued_spec(bed: Bed, **config: Any) -> WorkerSpec:
    """The specification of a task that is queued with this ``executor_config``."""
    workload = bed.queue(bed.workload(**config))
    bed.round()
    return bed.hand(workload).spec


def test_options_of_one_task_go_before_those_of_all(bed: Bed) -> None:
    bed.executor.settings = dataclasses.replace(  # type: ignore[misc]
        bed.executor.settings,
        memory="2GiB",
        cpus=1.0,
        max_migrations=9,
        checkpoint_interval="10m",
        max_cold_starts=4,
        wait_for_capacity="1h",
    )
    spec = queued_spec(bed)
    assert (spec.memory, spec.cpus, spec.max_migrations) == (2 << 30, 1.0, 9)
    assert spec.checkpoint == CheckpointPolicy(interval=600.0, max_cold_starts=4)
    assert spec.placement == PlacementPolicy(wait_for_capacity=3600.0)
    spec = queued_spec(
        bed,
        memory="1GiB",
        cpus=2,
        max_migrations=4,
        checkpoint_interval="7s",
        checkpoint={"max_cold_starts": 0},
        placement={"wait_for_capacity": "1m"},
    )
    assert (spec.memory, spec.cpus, spec.max_migrations) == (1 << 30, 2.0, 4)
    assert spec.checkpoint == CheckpointPolicy(interval=7.0, max_cold_starts=0)
    assert spec.placement == PlacementPolicy(wait_for_capacity=60.0)


def test_null_in_a_policy_goes_before_the_setting_of_all(bed: Bed) -> None:
    bed.executor.settings = dataclasses.replace(  # type: ignore[misc]
        bed.executor.settings, checkpoint_interval="10m", max_cold_starts=4
    )
    spec = queued_spec(bed, checkpoint={"interval": None, "max_cold_starts": None})
    assert (spec.checkpoint.interval, spec.checkpoint.max_cold_starts) == (None, None)


def test_without_options_the_policies_are_the_defaults_but_for_cold_starts(bed: Bed) -> None:
    spec = queued_spec(bed)
    assert spec.checkpoint == CheckpointPolicy(max_cold_starts=3)
    assert spec.placement == PlacementPolicy()


def test_every_field_of_the_policies_can_be_given(bed: Bed) -> None:
    spec = queued_spec(bed, **{group: as_written(group) for group in WRITTEN})
    for group in WRITTEN:
        assert of(spec, group) == as_read(group)


def test_the_documented_example_of_both_policies_is_an_executor_config(bed: Bed) -> None:
    page = (Path(__file__).parents[2] / "docs/executor.md").read_text()
    example = page.partition("`checkpoint` and `placement` are mappings")[2].split("```")[1]
    names: dict[str, Any] = {"task": sdk.task}
    with sdk.DAG("d") as dag:
        exec(example.removeprefix("python\n") + "build()", names)
    spec = queued_spec(bed, **(dag.get_task("build").executor_config or {}))
    assert spec.checkpoint == CheckpointPolicy(interval=600, keep=3, max_cold_starts=0)
    assert spec.placement == PlacementPolicy(on_demand_after_losses=2, wait_for_capacity=7200)


def test_policies_come_through_the_serialized_dag_as_they_were_given() -> None:
    given = {group: as_written(group) for group in WRITTEN}
    with sdk.DAG("d") as dag:
        PythonOperator(task_id="t", python_callable=print, executor_config={"savedworker": given})
    stored = json.loads(json.dumps(DagSerialization.to_dict(dag)))
    options = task_options(DagSerialization.from_dict(stored).get_task("t").executor_config)
    assert {group: getattr(options, group) for group in WRITTEN} == given


def test_options_beside_those_of_other_executors() -> None:
    assert task_options({"savedworker": {"cpus": 1}, "pod_override": object()}).cpus == 1


@pytest.mark.parametrize(
    "others",
    [{"pod_override": object()}, {"pod_template_file": "/x.yaml"}, {"KubernetesExecutor": {"image": "x"}}],
)
def test_options_of_other_executors_are_left_to_them(others: dict[str, Any]) -> None:
    """A DAG that was written for another executor runs as it is."""
    assert task_options(others) == task_options({})
    assert task_options({**others, "memory": "1GiB"}).memory == "1GiB"


def test_a_task_that_cannot_be_begun_does_not_end_the_scheduler(bed: Bed) -> None:
    bed.executor.settings = None  # type: ignore[misc,assignment]
    bed.queue(bed.workload())
    assert bed.events() == ["failed"]


def test_slots_are_taken_by_workers_that_have_not_ended(bed: Bed) -> None:
    bed.begin()
    assert bed.executor.slots_available == 7


# The environment ------------------------------------------------------------------------------------------------------


def test_the_worker_gets_what_was_set_and_no_secret() -> None:
    config = {
        "core": {
            "dags_folder": ("/dags", "airflow.cfg"),
            "fernet_key": ("f", "env var"),
            "parallelism": ("4", "env var"),
            "load_examples": ("True", "default"),
        },
        "database": {"sql_alchemy_conn": ("postgresql://u:p@h/db", "env var")},
        "api_auth": {"jwt_secret": ("s", "env var")},
        "workers": {"secrets_backend_kwargs": ("< hidden >", "env var"), "x": ("1", "airflow.cfg")},
        "logging": {"logging_config_class": ("airflow_provider_savedworker.log.config.X", "env var")},
        "smtp": {"smtp_password": ("p", "airflow.cfg")},
    }
    found = worker_environment(config, "/home", {"MINE": "1"}, as_here=False)
    assert found["AIRFLOW__CORE__DAGS_FOLDER"] == "/dags"
    assert found["AIRFLOW__WORKERS__X"] == "1"
    assert found["MINE"] == "1"
    assert found["AIRFLOW__CORE__EXECUTION_API_SERVER_URL"] == relay.INNER_URL
    names = " ".join(found).lower()
    for secret in ("sql_alchemy", "jwt", "fernet", "kwargs", "password", "logging_config"):
        assert secret not in names


def test_the_worker_gets_what_tasks_use_of_other_sections(monkeypatch: pytest.MonkeyPatch) -> None:
    """As Airflow itself reads it: the address of its pages for links, and options of XCom's object storage."""
    monkeypatch.setenv("AIRFLOW__API__BASE_URL", "https://airflow.example")
    monkeypatch.setenv("AIRFLOW__API__SECRET_KEY", "a secret")
    monkeypatch.setenv("AIRFLOW__COMMON_IO__XCOM_OBJECTSTORAGE_PATH", "s3://bucket/xcom")
    found = worker_environment(
        conf.as_dict(display_source=True, display_sensitive=False), "/h", {}, as_here=False
    )
    assert found["AIRFLOW__API__BASE_URL"] == "https://airflow.example"
    assert found["AIRFLOW__COMMON_IO__XCOM_OBJECTSTORAGE_PATH"] == "s3://bucket/xcom"
    assert "AIRFLOW__COMMON_IO__XCOM_OBJECTSTORAGE_THRESHOLD" not in found, "nobody set it"
    assert not [x for x in found if "SECRET_KEY" in x]
    from_file = {"common.io": {"xcom_objectstorage_path": ("file:///xcom", "airflow.cfg")}}
    found = worker_environment(from_file, "/h", {}, as_here=False)
    assert found["AIRFLOW__COMMON_IO__XCOM_OBJECTSTORAGE_PATH"] == "file:///xcom"


@pytest.mark.parametrize(("section", "option"), [("SECRETS", "BACKEND"), ("WORKERS", "SECRETS_BACKEND")])
def test_a_secrets_backend_is_not_given_without_its_options(
    section: str, option: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It would ask its service as nobody, or refuse to begin at all. The API server asks it for the task."""
    name = f"AIRFLOW__{section}__{option}"
    monkeypatch.setenv(name, "a.Backend")
    config = conf.as_dict(display_source=True, display_sensitive=False)
    assert worker_environment(config, "/h", {}, as_here=False)[name] == "a.Backend"
    monkeypatch.setenv(f"{name}_KWARGS", '{"token": "secret"}')
    config = conf.as_dict(display_source=True, display_sensitive=False)
    assert name not in worker_environment(config, "/h", {}, as_here=False)
    given = {name: "a.Backend", f"{name}_KWARGS": "{}"}
    assert worker_environment(config, "/h", given, as_here=False).items() >= given.items()


@pytest.mark.parametrize(
    "variable", ["AWS_SECRET_ACCESS_KEY", "SAVEDWORKER_KEY", "AIRFLOW_CONN_X", "DATABASE_URL"]
)
def test_nothing_of_the_scheduler_s_environment_leaks(variable: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(variable, "secret")
    assert variable not in worker_environment({}, "/home", {}, as_here=True)


def test_settings_that_are_wrong_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    class Conf(dict[str, str]):
        def get(self, section: str, key: str, **kwargs: Any) -> Any:  # type: ignore[override]
            return super().get(key, kwargs.get("fallback"))

    monkeypatch.delenv("SAVEDWORKER_STORE", raising=False)
    with pytest.raises(BadSpec, match="no store"):
        read_settings(Conf(), "")
    wrong = (
        ("poll_interval", "often"),
        ("poll_interval", "inf"),
        ("executor_threads", "nan"),
        ("cpus", "-1"),
        ("max_cold_starts", "-1"),
        ("max_migrations", "2.5"),
        ("environment", "[1]"),
        ("environment", "{"),
        ("memory", "much"),
        ("checkpoint_interval", "often"),
        ("wait_for_capacity", "long"),
    )
    for name, value in wrong:
        with pytest.raises(BadSpec, match=name):
            read_settings(Conf({"store": "/s", name: value}), "")
    found = read_settings(Conf({"store": "/s", "max_migrations": "unlimited", "max_cold_starts": "1"}), "u")
    assert (found.max_migrations, found.max_cold_starts, found.upstream) == (None, 1, "u")


@pytest.mark.parametrize(
    ("url", "here"),
    [
        ("http://localhost:8080/execution/", True),
        ("http://127.0.0.1:8080/execution/", True),
        ("http://[::1]:8080/execution/", True),
        ("http://198.18.0.1:8080/execution/", False),
        ("https://airflow.example/execution/", False),
    ],
)
def test_an_address_that_no_instance_reaches_is_warned_of(
    bed: Bed, url: str, here: bool, caplog: pytest.LogCaptureFixture
) -> None:
    bed.executor.settings = dataclasses.replace(bed.executor.settings, upstream=url)  # type: ignore[misc]
    warned: list[str] = []
    bed.patch.setattr(bed.executor.log, "warning", lambda text, *values: warned.append(text % values))
    bed.executor.start()
    bed.executor.end()
    assert [url in x for x in warned] == [True] * here


def test_tasks_trust_the_api_server_that_airflow_s_own_tasks_would_trust(tmp_path: Path) -> None:
    made, other = make_certificates(tmp_path, "127.0.0.1"), make_certificates(tmp_path / "o", "127.0.0.1")
    both = tmp_path / "with-key.pem"
    both.write_text(made.key.read_text() + made.server.read_text())

    class Conf(dict[str, str]):
        def get(self, section: str, key: str, **kwargs: Any) -> Any:  # type: ignore[override]
            return super().get(f"{section}.{key}", kwargs.get("fallback"))

    given = {"savedworker.store": "/s", "api.ssl_cert": str(both), "api.ssl_ca_file": str(other.authority)}
    found = read_settings(Conf(given), "u").authorities
    assert made.server.read_text().strip() in found
    assert other.authority.read_text().strip() in found
    assert "KEY" not in found
    assert read_settings(Conf({"savedworker.store": "/s"}), "u").authorities == ""
    for bad in (made.key, tmp_path / "missing"):
        with pytest.raises(BadSpec, match="ssl_cert"):
            read_settings(Conf({"savedworker.store": "/s", "api.ssl_cert": str(bad)}), "u")


# How tasks end --------------------------------------------------------------------------------------------------------


def conclude(hand: Hand, state: str) -> None:
    note = relay.ConclusionNote(
        path=f"/task-instances/{hand.spec.engine['ti_id']}/state", body=json.dumps({"state": state})
    )
    hand.client.keep_engine_note(hand.id, relay.CONCLUSION, note.model_dump_json().encode())
    hand.fenced(ev.Concluded, outcome=state)


@pytest.mark.parametrize("state", ["success", "failed", "up_for_retry", "skipped"])
def test_a_task_that_told_airflow_how_it_ends(bed: Bed, state: str) -> None:
    workload, hand = bed.begin()
    conclude(hand, state)
    bed.rows[str(workload.ti.id)] = Row(state, "e1", 1.0)
    bed.round()
    assert bed.events() == [], "its process has not ended"
    hand.end()
    bed.round(2)
    assert bed.events() == ["success"]
    assert not bed.executor.running
    assert not bed.api.requests, "Airflow heard it from the worker itself"


@pytest.mark.parametrize("state", sorted(outcome.WAITS))
def test_a_task_that_will_be_queued_again_ends_without_an_event(bed: Bed, state: str) -> None:
    workload, hand = bed.begin()
    conclude(hand, state)
    bed.rows[str(workload.ti.id)] = Row(state, "e1", 1.0)
    hand.end()
    bed.round(2)
    assert bed.events() == []
    assert not bed.executor.running


def test_the_end_of_one_queueing_is_no_event_for_the_next(bed: Bed) -> None:
    workload, hand = bed.begin()
    conclude(hand, "success")
    bed.queue(bed.workload(ti_id=str(workload.ti.id), external="e2"))
    hand.end()
    bed.round(2)
    assert bed.events() == []
    assert workload.key in bed.executor.running


def test_a_task_that_died_without_a_word_fails_with_its_reason(bed: Bed) -> None:
    _, hand = bed.begin()
    hand.fenced(ev.Finished, exit_code=137, signal=9, reason=Reason.OOM, detail="killed at its memory limit")
    hand.fenced(ev.LeaseReleased, end_reason="failed")
    bed.round(2)
    ((state, info),) = bed.executor.get_event_buffer().values()
    assert state == TaskInstanceState.FAILED
    assert "oom" in info
    assert "memory limit" in info


def test_no_event_while_its_last_process_may_execute(bed: Bed) -> None:
    _, hand = bed.begin()
    hand.fenced(ev.Finished, exit_code=1)
    bed.round(2)
    assert bed.events() == []


def test_lost_after_it_concluded_what_it_said_is_delivered(bed: Bed) -> None:
    workload, hand = bed.begin()
    conclude(hand, "success")
    hand.vanish()
    bed.api.status["state"] = 503
    bed.round(3)
    assert bed.events() == []
    assert str(workload.ti.id) in bed.kept_alive, "until Airflow has it"
    bed.api.status.clear()
    bed.rows[str(workload.ti.id)] = Row("success", "e1", 1.0)  # as the API server does when it gets it
    bed.round(2)
    assert bed.api.calls("state")[-1][2] == {"state": "success"}
    assert bed.client.record(hand.id).reason is Reason.LOST
    assert len(bed.fleet.launches) == 1, "it is not restored"
    assert "failed" not in bed.events()


@pytest.mark.parametrize("state", ["success", "deferred"])
def test_one_that_ended_well_and_was_answered_nothing_but_errors_is_delivered(bed: Bed, state: str) -> None:
    """Airflow's supervisor tries some times, gives up, and ends with status 0."""
    workload, hand = bed.begin()
    conclude(hand, state)
    hand.end()
    bed.api.status["state"] = 500
    bed.round(4)
    assert bed.events() == []
    assert str(workload.ti.id) in bed.kept_alive
    bed.api.status.clear()
    bed.executor._tracker.visit(bed.task())  # type: ignore[union-attr]
    bed.rows[str(workload.ti.id)] = Row(state, "e1", 1.0)
    assert bed.api.calls("state")[-1][2] == {"state": state}
    bed.round(2)
    assert bed.events() == (["success"] if state == "success" else [])
    assert not bed.executor.running


@pytest.mark.parametrize("row", [Row("deferred", "e1", 1.0), Row("running", "e2", 1.0), None])
def test_what_airflow_has_heard_is_not_delivered_to_who_runs_next(bed: Bed, row: Row | None) -> None:
    """Lost right after a deferral that was over at once: the same task instance runs again, and must not be deferred again."""
    workload, hand = bed.begin()
    conclude(hand, "deferred")
    hand.vanish()
    bed.rows.pop(str(workload.ti.id))
    if row is not None:
        bed.rows[str(workload.ti.id)] = row
    bed.round(4)
    assert not bed.api.calls("state")
    assert bed.events() == []
    assert workload.key not in bed.executor.running


def test_what_was_delivered_is_no_failure_of_who_runs_next(bed: Bed) -> None:
    workload, hand = bed.begin()
    conclude(hand, "deferred")
    hand.vanish()
    bed.round()
    assert bed.task().deliver
    bed.executor._tracker.visit(bed.task())  # type: ignore[union-attr]
    assert len(bed.api.calls("state")) == 1
    bed.rows[str(workload.ti.id)] = Row("running", "e2", 1.0)
    bed.round(2)
    assert bed.events() == []


def test_what_airflow_refuses_is_not_delivered_for_ever(bed: Bed) -> None:
    _, hand = bed.begin()
    conclude(hand, "success")
    hand.vanish()
    bed.api.status["state"] = 409
    bed.round(4)
    assert len(bed.api.calls("state")) == 1


# Moves ----------------------------------------------------------------------------------------------------------------


def test_a_move_is_no_event_and_the_task_is_kept_alive(bed: Bed) -> None:
    workload, hand = bed.begin()
    hand.fenced(ev.NoticeReceived, id="n", source="spot", seconds_left=30.0)
    hand.fenced(ev.CheckpointStarted, number="1-1", cause="notice")
    bed.round()
    assert bed.kept_alive[-1:] == [str(workload.ti.id)]
    now = bed.client.record(hand.id).created_at
    hand.fenced(
        ev.CheckpointCommitted, number="1-1", cause="notice", frozen_at=now, bytes_image=1, bytes_uploaded=1
    )
    hand.fenced(ev.HandedOver, number="1-1")
    hand.vanish()
    for _ in range(50):
        bed.round()
    assert bed.events() == []
    assert bed.kept_alive.count(str(workload.ti.id)) >= 50
    hand.begin(restore="1-1")
    bed.kept_alive.clear()
    bed.round()
    assert bed.kept_alive == [], "it speaks for itself again"
    assert bed.events() == []


def test_a_queued_task_whose_instance_does_not_come_is_no_failure(bed: Bed) -> None:
    """C01: 50 rounds while a machine is sought, past any time-out of Airflow's, and no FAILED event."""
    workload = bed.queue(bed.workload())
    for _ in range(50):
        bed.round()
        for launch in bed.fleet.launches:
            bed.fleet.launches[launch] = "pending"
    assert bed.events() == []
    assert workload.key in bed.executor.running


def test_a_silent_lease_is_covered(bed: Bed) -> None:
    """Its instance may be gone, which is known only once the lease is dead: until then nobody else speaks for the task."""
    workload, hand = bed.begin()
    task = bed.task()
    assert not bed.kept_alive
    lease = bed.client.record(hand.id).lease
    assert lease is not None
    task.lease_since -= lease.term
    bed.executor._looked = float("-inf")
    bed.executor.sync()
    assert bed.kept_alive == [str(workload.ti.id)]


def test_a_worker_that_is_truly_lost_is_left_to_airflow_s_heartbeat_limit(bed: Bed) -> None:
    """It runs, its agent is well, and its supervisor says nothing: nobody speaks for it."""
    workload, _ = bed.begin()
    bed.runs(workload, heard=100.0)
    bed.round(3)
    assert bed.kept_alive == []


def test_a_task_whose_heartbeats_nobody_takes_is_kept_alive(bed: Bed) -> None:
    workload, hand = bed.begin()
    bed.runs(workload, heard=20.0)
    for count in (1, 2):
        note = relay.HeartbeatNote(incarnation=1, count=count).model_dump_json().encode()
        bed.client.keep_engine_note(hand.id, relay.HEARTBEAT, note)
        bed.round(2)
    assert str(workload.ti.id) in bed.kept_alive
    bed.kept_alive.clear()
    bed.task().unheard_at -= 100.0
    bed.round(2)
    assert bed.kept_alive == [], "an old note says nothing"


def test_a_task_is_kept_alive_while_the_store_is_away(bed: Bed) -> None:
    workload, _ = bed.begin()
    bed.task().read_at -= 120.0
    bed.executor._looked = float("-inf")
    bed.executor.sync()
    assert bed.kept_alive == [str(workload.ti.id)]
    bed.task().read_at -= outcome.STORE_PATIENCE
    bed.kept_alive.clear()
    bed.executor._looked = float("-inf")
    bed.executor.sync()
    assert bed.kept_alive == []


# What users do --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "row", [None, Row("success", "e1", 1.0), Row("failed", "e1", 1.0), Row("running", "e2", 1.0)]
)
@pytest.mark.parametrize("moving", [False, True])
def test_a_task_that_nobody_wants_any_more_is_dropped(bed: Bed, row: Row | None, moving: bool) -> None:
    """C18: cleared, marked, or queued anew; also in the moment when it is between two instances."""
    workload, hand = bed.begin()
    if moving:
        hand.vanish()
        bed.round()
    bed.rows.pop(str(workload.ti.id))
    if row is not None:
        bed.rows[str(workload.ti.id)] = row
    bed.round(5)
    if not moving:
        assert bed.client.record(hand.id).cancel is None, "it may end by itself"
        bed.task().doubted_at -= bed.executor._on_kill
        bed.round(2)
    record = bed.client.record(hand.id)
    assert record.state == "cancelled"
    if record.lease_held:
        assert bed.events() == [], "nothing new begins while the old one may execute"
        hand.fenced(ev.LeaseReleased, end_reason="cancelled")
    bed.round(3)
    assert bed.events() == ["success"]
    assert all(x == "ended" for x in bed.fleet.launches.values())


@pytest.mark.parametrize(
    ("row", "event"),
    [
        (None, ["success"]),
        (Row("restarting", "e1", 1.0), ["success"]),
        (Row("failed", "e1", 1.0), []),
        (Row("success", "e1", 1.0), []),
        (Row("running", "e2", 1.0), []),
        (Row("queued", "e2", 1.0), []),
    ],
)
def test_one_that_airflow_told_to_end_ends_as_that(bed: Bed, row: Row | None, event: list[str]) -> None:
    """It was cleared, marked or queued anew, and its supervisor has ended it, after its ``on_kill``."""
    workload, hand = bed.begin()
    bed.rows.pop(str(workload.ti.id))
    if row is not None:
        bed.rows[str(workload.ti.id)] = row
    bed.round(2)
    hand.end(exit_code=1)
    bed.round(3)
    assert bed.client.record(hand.id).cancel is None
    assert bed.events() == event
    assert not bed.executor.running


def test_a_task_that_concludes_just_now_is_not_dropped(bed: Bed) -> None:
    """The database knows it before the executor's copy of the record does."""
    workload, hand = bed.begin()
    bed.rows[str(workload.ti.id)] = Row("success", "e1", 1.0)
    bed.executor._looked = float("-inf")
    bed.executor.sync()
    conclude(hand, "success")
    bed.round(3)
    assert bed.client.record(hand.id).cancel is None


def test_a_revoked_task_is_cancelled_without_a_word(bed: Bed) -> None:
    workload = bed.queue(bed.workload())
    bed.round()
    ti = workload.ti.model_copy()
    bed.executor.revoke_task(ti=ti)
    bed.round(2)
    assert bed.client.record(bed.hand(workload).id).state == "cancelled"
    assert bed.events() == []
    assert not bed.executor.running


# Another scheduler ----------------------------------------------------------------------------------------------------


def adopted(bed: Bed, workloads: Sequence[Any]) -> list[Any]:
    from types import SimpleNamespace

    tis = [
        SimpleNamespace(
            id=x.ti.id,
            dag_id="d",
            task_id=x.ti.task_id,
            map_index=-1,
            key=x.key,
            state="running",
            external_executor_id=x.ti.external_executor_id,
            last_heartbeat_at=None,
        )
        for x in workloads
    ]
    return list(bed.executor.try_adopt_task_instances(tis))  # type: ignore[arg-type]


def test_a_new_scheduler_goes_on_with_the_workers_of_the_old_one(bed: Bed) -> None:
    """C15: adopted, and there is one instance all the time."""
    workload, hand = bed.begin()
    bed.scheduler()
    stranger = bed.workload(task_id="unknown")
    lost = adopted(bed, [workload, stranger])
    assert [x.task_id for x in lost] == ["unknown"]
    bed.round(2)
    assert len(bed.fleet.launches) == 1
    conclude(hand, "success")
    bed.rows[str(workload.ti.id)] = Row("success", "e1", 1.0)
    hand.end()
    bed.round(2)
    assert bed.events() == ["success"]


def test_a_worker_that_no_scheduler_adopts_is_looked_after(bed: Bed) -> None:
    """Its task was cleared while there was no scheduler: nobody hands it over, and yet it must end."""
    workload, hand = bed.begin()
    bed.rows.clear()
    bed.scheduler()
    bed.executor._sweep()
    bed.round(2)
    bed.task().doubted_at -= bed.executor._on_kill
    bed.round(2)
    assert bed.client.record(hand.id).state == "cancelled"
    hand.fenced(ev.LeaseReleased, end_reason="cancelled")
    bed.round(2)
    assert bed.events() == []
    assert workload.key not in bed.executor.running


def test_the_workers_of_another_airflow_are_left_alone(bed: Bed) -> None:
    bed.begin()
    bed.scheduler()
    bed.executor.deployment = "another"  # type: ignore[misc]
    bed.executor._sweep()
    assert bed.executor._tasks == {}


def test_a_store_that_is_away_costs_no_try_at_adoption(bed: Bed, monkeypatch: pytest.MonkeyPatch) -> None:
    from savedworker.model.errors import Unreachable

    workload, _ = bed.begin()
    bed.scheduler()

    def away(worker: str) -> WorkerRecord:
        raise Unreachable("the store is away")

    with monkeypatch.context() as patch:
        patch.setattr(bed.client, "record", away)
        assert adopted(bed, [workload]) == []
    bed.round()
    assert bed.task().record is not None


def test_a_worker_that_is_not_in_the_store_any_more_fails_the_task_in_the_end(bed: Bed) -> None:
    workload, _ = bed.begin()
    bed.client.store.delete([x.key for x in bed.client.store.list("workers")])
    task = bed.task()
    assert bed.executor._tracker is not None
    bed.executor._tracker._work(task)
    bed.executor.sync()
    assert bed.events() == []
    assert task.missing_since is not None
    task.missing_since -= 61.0
    bed.executor._tracker._work(task)
    bed.executor.sync()
    ((state, info),) = bed.executor.get_event_buffer().values()
    assert (state, "there is no worker" in info) == (TaskInstanceState.FAILED, True)
    assert workload.key not in bed.executor.running


# Flags ----------------------------------------------------------------------------------------------------------------


def test_other_workloads_are_refused_by_flag() -> None:
    assert not SavedWorkerExecutor.supports_callbacks
    assert not SavedWorkerExecutor.supports_connection_test
    assert not SavedWorkerExecutor.supports_multi_team
    assert not SavedWorkerExecutor.serve_logs
    assert SavedWorkerExecutor.pre_assigns_external_executor_id
    longest = saved_worker_executor.LOOK_EVERY * 4 + SavedWorkerExecutor(parallelism=1)._on_kill
    assert longest < 60, "what nobody wants is dropped within a minute"


def test_a_callback_fails_with_the_reason_and_does_not_end_the_scheduler(bed: Bed) -> None:
    """As Airflow queues the callback of a deadline that was missed."""
    callback = ExecuteCallback(
        callback=CallbackDTO(
            id=str(uuid.uuid4()), fetch_method=CallbackFetchMethod.IMPORT_PATH, data={"path": "dags.missed"}
        ),
        dag_rel_path=Path("d.py"),
        token="t",
        log_path=None,
        bundle_info=BundleInfo(name="dags-folder"),
    )
    with Session(sqlalchemy.create_engine("sqlite://")) as session:
        bed.executor.queue_workload(callback, session)
    assert not bed.executor.queued_callbacks
    ((key, (state, info)),) = bed.executor.get_event_buffer().items()
    assert (key, state) == (callback.key, CallbackState.FAILED)
    assert "Fix: name another executor" in str(info)
