"""What Airflow reads of the provider, and that a DAG file may import it anywhere and at little cost."""

from __future__ import annotations

import importlib
import inspect
import json
import re
import subprocess
import sys
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any

import airflow
import jsonschema  # type: ignore[import-untyped]
import pytest

from airflow_provider_savedworker import get_provider_info
from airflow_provider_savedworker.hooks.saved_worker import SavedWorkerHook
from airflow_provider_savedworker.links.saved_worker import SavedWorkerLink
from airflow_provider_savedworker.operators.saved_worker import SavedWorkerOperator
from airflow_provider_savedworker.triggers.saved_worker import SavedWorkerTrigger
from savedworker.controller.client import Client
from tests.airflow.conftest import make_context
from tests.store.keys import key, key_file, sealing, text

PACKAGE = Path(importlib.import_module("airflow_provider_savedworker").__file__ or "").parent


def schema(name: str) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((Path(airflow.__file__).parent / name).read_text())
    return found


def test_provider_info_is_what_airflow_expects_when_it_runs() -> None:
    jsonschema.validate(get_provider_info(), schema("provider_info.schema.json"))


def test_the_connection_type_and_the_options_are_what_airflow_expects_of_a_provider() -> None:
    full = schema("provider.yaml.schema.json")
    for part in (
        "connection-types",
        "config",
        "hooks",
        "operators",
        "triggers",
        "extra-links",
        "task-decorators",
    ):
        wanted = {**full["properties"][part], "definitions": full.get("definitions", {})}
        jsonschema.validate(get_provider_info()[part], wanted)


def test_airflow_does_not_warn_of_the_provider_at_every_command() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "airflow", "version"], capture_output=True, text=True, check=True, timeout=120
    )
    assert "SavedWorkerExecutor" not in done.stdout + done.stderr


def test_everything_that_provider_info_names_exists() -> None:
    info = get_provider_info()
    for kind in ("operators", "hooks", "triggers"):
        for entry in info[kind]:
            for module in entry["python-modules"]:
                importlib.import_module(module)
    classes = [*info["extra-links"], *(x["hook-class-name"] for x in info["connection-types"])]
    (decorator,) = info["task-decorators"]
    module, _, name = decorator["class-name"].rpartition(".")
    assert callable(getattr(importlib.import_module(module), name))
    for path in classes:
        module, _, name = path.rpartition(".")
        assert isinstance(getattr(importlib.import_module(module), name), type)


def test_the_options_that_are_read_are_the_ones_that_are_documented() -> None:
    source = "\n".join(path.read_text() for path in PACKAGE.rglob("*.py"))
    read = set(re.findall(r"conf\.get\w*\(\s*(?:SECTION|\"savedworker\"),\s*\"(\w+)\"", source))
    settings = (PACKAGE / "executors" / "settings.py").read_text()
    read |= set(re.findall(r"\b(?:text|number|count|written)\(\"(\w+)\"", settings))
    assert read == set(get_provider_info()["config"]["savedworker"]["options"])


def test_the_entry_point_leads_here() -> None:
    (point,) = [
        x
        for x in entry_points(group="apache_airflow_provider")
        if x.value.startswith("airflow_provider_saved")
    ]
    assert point.load() is get_provider_info


def test_the_plugin_is_an_entry_point_since_plugins_of_provider_info_are_not_loaded_by_default() -> None:
    (point,) = [
        x for x in entry_points(group="airflow.plugins") if x.value.startswith("airflow_provider_saved")
    ]
    assert point.load().name == "savedworker"


IMPORT = """
import airflow.sdk, builtins, sys
ABSENT = {"fcntl", "grp", "pwd", "resource", "termios", "pty", "spwd", "syslog", "nis", "posix", "crypt"}
real = builtins.__import__
def guarded(name, globals=None, locals=None, fromlist=(), level=0):
    importer = (globals or {}).get("__name__", "")
    if name.partition(".")[0] in ABSENT and importer.startswith(("savedworker", "airflow_provider_savedworker")):
        raise ModuleNotFoundError(name)
    return real(name, globals, locals, fromlist, level)
builtins.__import__ = guarded
before = set(sys.modules)
import airflow_provider_savedworker, airflow_provider_savedworker.operators.saved_worker
import airflow_provider_savedworker.hooks.saved_worker, airflow_provider_savedworker.links.saved_worker
light = set(sys.modules) - before
import airflow_provider_savedworker.triggers.saved_worker
print(sorted(x for x in light if x.partition(".")[0] in ("savedworker", "obstore", "blake3", "zstandard", "boto3")))
"""


def test_a_dag_file_can_be_parsed_without_linux_and_without_loading_the_runtime() -> None:
    done = subprocess.run([sys.executable, "-c", IMPORT], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip().splitlines()[-1] == "[]"


def test_the_link_opens_the_page_with_the_report(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AIRFLOW__API__BASE_URL", "https://airflow.example.org/")
    ti = make_context(run_id="manual__2026-01-01T00:00:00+00:00")["ti"]
    address = SavedWorkerLink().get_link(None, ti_key=ti)  # type: ignore[arg-type]
    assert address == (
        "https://airflow.example.org/dags/Some.DAG/runs/manual__2026-01-01T00%3A00%3A00%2B00%3A00/tasks/train/xcom"
    )
    ti.map_index = 3
    assert SavedWorkerLink().get_link(None, ti_key=ti).endswith("/tasks/train/mapped/3/xcom")  # type: ignore[arg-type]


CONNECTION = "AIRFLOW_CONN_SAVEDWORKER_DEFAULT"


@pytest.fixture
def no_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in (CONNECTION, "SAVEDWORKER_STORE", "AIRFLOW__SAVEDWORKER__STORE"):
        monkeypatch.delenv(name, raising=False)


def connection(**extra: str) -> str:
    return json.dumps({"conn_type": "savedworker", "extra": extra})


@pytest.mark.usefixtures("no_settings")
def test_the_store_comes_from_argument_connection_environment_or_configuration_in_this_order(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("AIRFLOW__SAVEDWORKER__STORE", "file:///from-configuration")
    assert SavedWorkerHook().store == "file:///from-configuration"
    monkeypatch.setenv("SAVEDWORKER_STORE", "file:///from-environment")
    assert SavedWorkerHook().store == "file:///from-environment"
    monkeypatch.setenv(CONNECTION, connection(store="file:///from-connection", fleet="slurm"))
    assert SavedWorkerHook().store == "file:///from-connection"
    assert SavedWorkerHook().fleet == "slurm"
    assert SavedWorkerHook(store="file:///given", fleet="ec2").store == "file:///given"


@pytest.mark.usefixtures("no_settings")
def test_without_any_store_the_error_says_where_to_set_one() -> None:
    with pytest.raises(Exception, match=r"no store is set. Fix: .*SAVEDWORKER_STORE.*\[savedworker\] store"):
        _ = SavedWorkerHook().store


@pytest.mark.usefixtures("no_settings")
def test_a_connection_can_be_tested(tmp_path: Path, client: Client, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(CONNECTION, connection(store=f"file://{tmp_path}/store"))
    good, message = SavedWorkerHook().test_connection()
    assert good, message
    monkeypatch.setenv(CONNECTION, connection(store=f"file://{tmp_path}/store", fleet="abacus"))
    good, message = SavedWorkerHook().test_connection()
    assert not good
    assert "there is no fleet 'abacus'" in message
    monkeypatch.setenv(CONNECTION, connection(store="ftp://nowhere"))
    assert SavedWorkerHook().test_connection()[0] is False


@pytest.mark.usefixtures("no_settings")
def test_the_key_file_of_the_connection_goes_before_the_environment_and_to_the_trigger(
    tmp_path: Path, client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = key_file(tmp_path / "key", key())
    store = f"file://{tmp_path}/store"
    monkeypatch.setenv("SAVEDWORKER_KEY", text(key(2)))
    monkeypatch.setenv(CONNECTION, connection(store=store))
    assert SavedWorkerHook().get_client().store.sealing == sealing(key(2))
    monkeypatch.setenv(CONNECTION, connection(store=store, key_file=str(file)))
    found = SavedWorkerHook().get_client().store.sealing
    assert found.environment() == {"SAVEDWORKER_KEY_FILE": str(file)}
    trigger = SavedWorkerTrigger("w", store, key_file=SavedWorkerHook().key_file)
    again = SavedWorkerTrigger(**trigger.serialize()[1])
    assert again._client().store.sealing == found
    file.chmod(0o644)
    good, message = SavedWorkerHook().test_connection()
    assert (good, "chmod 600" in message) == (False, True)


def documented(heading: str, page: str = "airflow") -> set[str]:
    """The names in the first column of the table below ``heading`` of a page."""
    text = (PACKAGE.parent / f"docs/{page}.md").read_text()
    section = text.partition(f"## {heading}\n")[2].partition("\n## ")[0]
    cells = [x.split("|")[1] for x in section.splitlines() if x.startswith("| `")]
    return {name for cell in cells for name in re.findall(r"`(\w+)`", cell)}


def test_every_parameter_and_option_is_documented_and_no_other() -> None:
    described = set(re.findall(r":param (\w+):", SavedWorkerOperator.__doc__ or ""))
    assert documented("Parameters of the operator") == described
    assert set(inspect.signature(inspect.unwrap(SavedWorkerOperator.__init__)).parameters) - {
        "self",
        "kwargs",
    } == described - {"durable"}
    options = set(get_provider_info()["config"]["savedworker"]["options"])
    of_the_executor = documented("Options", "executor")
    assert documented("Where workers go") | of_the_executor == options
    assert not documented("Where workers go") & of_the_executor


def test_every_option_of_a_task_is_documented() -> None:
    from airflow_provider_savedworker.executors.settings import TaskOptions

    text = (PACKAGE.parent / "docs/executor.md").read_text()
    section = text.partition("`executor_config` of a task")[2].partition("They mean")[0]
    assert set(re.findall(r"`(\w+)`", section)) - {"savedworker"} == set(TaskOptions.model_fields)
