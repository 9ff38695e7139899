"""Every way to give a worker's options (operator, decorator, ``executor_config``, ``[savedworker]``) knows all of them."""

from __future__ import annotations

import inspect
import json
from types import SimpleNamespace
from typing import Any, get_args

import pytest
from airflow import sdk
from airflow.providers.standard.operators.python import PythonOperator
from airflow.serialization.serialized_objects import DagSerialization

from airflow_provider_savedworker import get_provider_info
from airflow_provider_savedworker.executors.settings import Settings, TaskOptions, task_options
from airflow_provider_savedworker.executors.workload import worker_spec
from airflow_provider_savedworker.operators.saved_worker import SavedWorkerOperator
from savedworker.cli import spec_file
from savedworker.model.spec import POLICIES, WorkerSpec
from tests.model.policies import WRITTEN, as_read, as_written

FIELDS = set(WorkerSpec.model_fields) - {"format"}
NOT_OF_TASKS = {
    "id": "made from the task instance",
    "engine": "written by the provider",
    "relay": "written by the executor",
    "lease_term": "the fleet's",
}
NOT_OF_EXECUTOR_CONFIG = {
    **NOT_OF_TASKS,
    "command": "Airflow's own",
    "workdir": "Airflow's own",
    "network": "only a private one leads to the relay",
    "inputs": "a task fetches its own",
    "outputs": "a task has told Airflow how it ended before they would be published",
}
OF_AIRFLOW = {
    "store",
    "name",
    "savedworker_conn_id",
    "skip_on_exit_code",
    "deferrable",
    "poll_interval",
    "checkpoint_interval",  # the short form of one field
}
"""What the operator takes beside a specification's fields."""
OF_THE_EXECUTOR = {
    "store",
    "deployment",
    "poll_interval",
    "parallelism",
    "execution_api_server_url",
    "token_lifetime",
    "executor_threads",
}
"""Options of ``[savedworker]`` that are of no single task."""
NAMED_OTHERWISE = {"environment": "env"}

GIVEN: dict[str, tuple[Any, Any]] = {
    "command": (["true", "1"], ("true", "1")),
    "env": ({"A": "1"}, {"A": "1"}),
    "user": ("7:8", "7:8"),
    "workdir": ("/tmp", "/tmp"),
    "image": ("/images/one", "/images/one"),
    "network": ("host", "host"),
    "credentials": ("instance", "instance"),
    "volumes": (["/a:/b:ro"], None),
    "inputs": (["s3://b/a:/a"], None),
    "outputs": (["/a:s3://b/a"], None),
    "memory": ("2GiB", 2 << 30),
    "cpus": (1.5, 1.5),
    "syscalls": ("all", "all"),
    "fleet": ("moon", "moon"),
    "checkpoint": (as_written("checkpoint"), as_read("checkpoint")),
    "placement": (as_written("placement"), as_read("placement")),
    "max_migrations": (5, 5),
    "orphan_after": ("2h", 7200.0),
    "retention": ("30d", 30 * 86400.0),
}
"""A value that is no default, as people write it, and as the specification has it (None: not compared)."""
NULLS = sorted(
    x
    for x in FIELDS - set(NOT_OF_EXECUTOR_CONFIG)
    if type(None) in get_args(WorkerSpec.model_fields[x].annotation)
)


def parameters(kind: Any) -> set[str]:
    return set(inspect.signature(inspect.unwrap(kind.__init__)).parameters) - {"self", "kwargs"}


def of_operator(task: SavedWorkerOperator) -> WorkerSpec:
    ti = SimpleNamespace(
        dag_id="d", run_id="r", task_id="t", map_index=-1, try_number=1, id="i", max_tries=0, start_date=None
    )
    hook: Any = SimpleNamespace(
        fleet=task.fleet or "local", checkpoint_interval=None, lease_term=lambda: 10.0
    )
    context: Any = {"ti": ti}
    return task.worker_spec(context, hook)


def of_executor(config: dict[str, Any], **settings: Any) -> WorkerSpec:
    ti = SimpleNamespace(dag_id="d", run_id="r", task_id="t", map_index=-1, try_number=1, id="i")
    workload = SimpleNamespace(ti=ti, log_path="l", model_dump_json=lambda: "{}")
    given = Settings("file:///s", "local", "http://api:8080/execution/", **settings)
    return worker_spec(workload, "e", given, task_options(config), 10.0, {})


def field(spec: WorkerSpec, name: str) -> Any:
    value = getattr(spec, name)
    return value.model_dump() if name in POLICIES else value


def test_every_field_of_a_specification_is_a_parameter_of_the_operator_or_has_a_reason_not_to_be() -> None:
    assert parameters(SavedWorkerOperator) == (FIELDS - set(NOT_OF_TASKS)) | OF_AIRFLOW


def test_every_field_of_a_specification_can_stand_in_executor_config_or_has_a_reason_not_to() -> None:
    wanted = (FIELDS - set(NOT_OF_EXECUTOR_CONFIG)) | {"python", "checkpoint_interval"}
    assert set(TaskOptions.model_fields) == wanted


def test_every_option_for_all_tasks_can_be_given_for_one() -> None:
    options = get_provider_info()["config"]["savedworker"]["options"]
    of_tasks = {NAMED_OTHERWISE.get(x, x) for x in set(options) - OF_THE_EXECUTOR}
    of_policies = {field for model in POLICIES.values() for field in model.model_fields}
    assert of_tasks <= set(TaskOptions.model_fields) | of_policies
    assert of_tasks <= {NAMED_OTHERWISE.get(x, x) for x in Settings.__dataclass_fields__}


def test_the_values_below_are_all_that_can_be_given() -> None:
    assert set(GIVEN) == FIELDS - set(NOT_OF_TASKS)
    assert all(set(WRITTEN[x]) == set(POLICIES[x].model_fields) for x in POLICIES)


@pytest.mark.parametrize("name", sorted(GIVEN))
def test_what_the_operator_is_given_is_in_the_specification(name: str) -> None:
    given, wanted = GIVEN[name]
    spec = of_operator(SavedWorkerOperator(task_id="t", **({"command": ["true"]} | {name: given})))
    assert field(spec, name) != field(of_operator(SavedWorkerOperator(task_id="t", command=["x"])), name)
    assert wanted is None or field(spec, name) == wanted


@pytest.mark.parametrize("name", sorted(set(GIVEN) - {"command"}))
def test_the_decorator_takes_what_the_operator_takes(name: str) -> None:
    given, wanted = GIVEN[name]

    def command() -> str:
        return "true"

    with sdk.DAG("d"):
        made: Any = sdk.task.saved_worker(command, **{name: given})()
        task = made.operator
    task.command = "true"
    assert wanted is None or field(of_operator(task), name) == wanted
    assert getattr(task, name) == given


@pytest.mark.parametrize("name", sorted(set(GIVEN) - set(NOT_OF_EXECUTOR_CONFIG)))
def test_what_executor_config_gives_is_in_the_specification(name: str) -> None:
    given, wanted = GIVEN[name]
    spec = of_executor({name: given})
    assert field(spec, name) != field(of_executor({}), name)
    if name == "env":
        assert spec.env.items() >= wanted.items()
    else:
        assert wanted is None or field(spec, name) == wanted


@pytest.mark.parametrize("name", sorted(set(GIVEN) & set(spec_file._UNITS)))
def test_what_a_spec_file_reads_as_a_duration_or_size_is_read_so_everywhere(name: str) -> None:
    given, wanted = GIVEN[name]
    assert spec_file._UNITS[name](given) == wanted


@pytest.mark.parametrize("name", NULLS)
def test_none_for_one_task_lifts_what_is_said_for_all(name: str) -> None:
    of_all: dict[str, Any] = {"memory": "1GiB", "cpus": 2.0, "max_migrations": 3, "user": "9"}
    assert set(of_all) == set(NULLS), "a field that may be null has an option for all tasks, or needs no test"
    assert field(of_executor({}, **of_all), name) is not None
    assert field(of_executor({name: None}, **of_all), name) == field(of_executor({}), name) is None


@pytest.mark.parametrize(
    "name", sorted(set(TaskOptions.model_fields) - {"credentials", "syscalls"} - set(NULLS))
)
def test_any_other_none_is_as_not_given(name: str) -> None:
    of_all: dict[str, Any] = {
        "volumes": ("/a:/b",),
        "image": "/images/all",
        "python": "/all/python",
        "environment": {"ALL": "1"},
        "checkpoint_interval": "7m",
        "wait_for_capacity": "7h",
    }
    assert of_executor({name: None}, **of_all) == of_executor({}, **of_all)


@pytest.mark.parametrize("wrap", [lambda x: x, lambda x: {"savedworker": x}])
def test_none_comes_through_the_serialized_dag(wrap: Any) -> None:
    with sdk.DAG("d") as dag:
        PythonOperator(task_id="t", python_callable=print, executor_config=wrap(dict.fromkeys(NULLS)))
    stored = json.loads(json.dumps(DagSerialization.to_dict(dag)))
    config = DagSerialization.from_dict(stored).get_task("t").executor_config
    assert task_options(config).model_fields_set == set(NULLS)
