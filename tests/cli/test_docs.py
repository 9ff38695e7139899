"""The reference pages say what the program does."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import click
import pytest
from pydantic_core import PydanticUndefined

from savedworker.cli.application import cli
from savedworker.cli.build_spec import ENVIRONMENT, SpecOptions, build_spec
from savedworker.model.base import Frozen
from savedworker.model.report import IncarnationReport, LastCheckpoint, Report, Status, TimelineEntry
from savedworker.model.spec import WorkerSpec
from savedworker.store.sealing import ALLOW_PLAIN, KEY, KEY_FILE
from tests.cli.fake_fleet import ROOT

CLI = (ROOT / "docs/cli.md").read_text()
SPEC = (ROOT / "docs/spec.md").read_text()


def rows() -> dict[str, str]:
    """Field -> default, as docs/spec.md says."""
    found = {}
    for line in SPEC.splitlines():
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        if line.startswith("| `"):
            found[cells[0].strip("`")] = cells[2].strip("`")
    return found


def fields(model: type[Frozen], prefix: str = "") -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, field in model.model_fields.items():
        default = field.get_default(call_default_factory=True, validated_data={})
        if isinstance(default, Frozen):
            found.update(fields(type(default), f"{name}."))
        else:
            found[prefix + name] = default
    return found


def test_docs_spec_lists_exactly_the_fields_of_the_model_with_their_defaults():
    made_by_the_command_line = {"id": "made from the command", "command": "required"}
    wanted = {}
    for name, default in fields(WorkerSpec).items():
        if default is PydanticUndefined:
            wanted[name] = made_by_the_command_line[name]
        elif isinstance(default, float):
            wanted[name] = f"{default:g}" if default < 1e5 else str(int(default))
        elif isinstance(default, str):
            wanted[name] = default
        else:
            wanted[name] = json.dumps(list(default) if isinstance(default, tuple) else default)
    assert rows() == wanted


@pytest.mark.usefixtures("shell")
def test_the_examples_of_docs_spec_are_specs(tmp_path: Path):
    example, more = re.findall(r"```yaml\n(.*?)```", SPEC, re.DOTALL)
    file = tmp_path / "spec.yaml"
    file.write_text(example + more)
    spec, _ = build_spec(SpecOptions(spec=str(file), fleet="fake"), {}, Path("/"))
    assert (len(spec.inputs), len(spec.outputs)) == (2, 2)
    assert (spec.id, spec.env, spec.memory) == ("train-1", {"OMP_NUM_THREADS": "2"}, 4 << 30)


def test_docs_cli_names_every_command_and_every_option():
    for name, command in cli.commands.items():
        if command.hidden and name != "agent":
            continue
        assert re.search(rf"(`|\*\*|savedworker ){name}\b", CLI), name
        for option in command.params:
            if isinstance(option, click.Option) and not option.hidden and name != "agent":
                assert any(word in CLI for word in option.opts), f"{name} {option.opts}"


def test_every_command_takes_store_json_and_help_and_says_what_each_option_is_for():
    for name, command in cli.commands.items():
        if command.hidden:
            continue
        known = {word for option in command.params for word in option.opts}
        assert {"--store", "--json"} <= known, name
        assert command.help, name
        for option in command.params:
            if isinstance(option, click.Option) and not option.hidden:
                assert option.help or isinstance(option.type, click.Choice), f"{name} {option.opts}"


def test_docs_cli_names_every_field_of_the_documents_and_every_environment_variable():
    for model in (Status, Report, IncarnationReport, LastCheckpoint, TimelineEntry):
        for field in model.model_fields:
            assert field == "format" or re.search(rf"\b{field}\b", CLI), f"{model.__name__}.{field}"
    for variable in (
        *ENVIRONMENT.values(),
        "SAVEDWORKER_STORE",
        "SAVEDWORKER_DEBUG",
        KEY_FILE,
        KEY,
        ALLOW_PLAIN,
    ):
        assert variable in CLI


def test_no_line_of_help_is_cut():
    for line in click.Context(cli, info_name="savedworker", terminal_width=80).get_help().splitlines():
        assert not line.endswith("...") or line.startswith("Usage"), line


def test_docs_reports_names_tests_that_there_are_and_every_case_that_a_test_names():
    page = (ROOT / "docs/reports.md").read_text()
    named = re.findall(r"`(tests/[\w/]+\.py)(?:::(\w+))?`", page)
    missing = [
        f"{file}::{test}"
        for file, test in named
        if not (ROOT / file).exists() or f"def {test}" not in (ROOT / file).read_text()
    ]
    assert len(named) > 40
    assert not missing
    cases = {
        case
        for file in (ROOT / "tests").rglob("test_*.py")
        for case in re.findall(r"\bC\d\d\b", file.read_text())
    }
    assert cases <= set(re.findall(r"\| (C\d\d) \|", page))
