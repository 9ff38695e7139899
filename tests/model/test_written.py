"""Policies are read as people write them, field by field, and can be laid over one another."""

from __future__ import annotations

from typing import Any

import pytest

from savedworker.model.errors import BadSpec
from savedworker.model.spec import POLICIES, parse_spec
from savedworker.model.written import read_checkpoint, read_placement, read_policy
from tests.model.policies import FIELDS, NULLS, WRITTEN, WRONG, as_read, as_written, of, refusal


def parsed(fields: dict[str, Any]) -> Any:
    read = {group: read_policy(group, given, "here") for group, given in fields.items()}
    return parse_spec({"id": "w", "command": ["true"], **read}, "here")


def test_every_field_is_read() -> None:
    spec = parsed({group: as_written(group) for group in WRITTEN})
    assert {group: of(spec, group) for group in WRITTEN} == {group: as_read(group) for group in WRITTEN}


@pytest.mark.parametrize(("group", "field"), FIELDS)
def test_no_value_of_these_tests_is_a_default(group: str, field: str) -> None:
    assert POLICIES[group].model_fields[field].default != WRITTEN[group][field][1]


@pytest.mark.parametrize(("group", "field"), FIELDS)
def test_a_field_that_is_not_given_stays_away(group: str, field: str) -> None:
    given, read = WRITTEN[group][field]
    assert read_policy(group, {field: given}, "here") == {field: read}


@pytest.mark.parametrize(("group", "field"), NULLS)
def test_null_is_a_value(group: str, field: str) -> None:
    assert of(parsed({group: {field: None}}), group)[field] is None


@pytest.mark.parametrize(
    ("group", "field"),
    [x for x in FIELDS if "float" in str(POLICIES[x[0]].model_fields[x[1]].annotation)],
)
def test_every_duration_has_its_written_form(group: str, field: str) -> None:
    assert of(parsed({group: {field: "1h30m"}}), group)[field] == 5400.0
    assert of(parsed({group: {field: 61}}), group)[field] == 61.0


@pytest.mark.parametrize(("fields", "message", "fix"), WRONG, ids=[ascii(x[0])[:60] for x in WRONG])
def test_what_is_wrong_is_one_line_with_place_and_fix(fields: dict[str, Any], message: str, fix: str) -> None:
    with pytest.raises(BadSpec) as caught:
        parsed(fields)
    assert refusal(caught.value, "here", message, fix), str(caught.value)


def test_the_short_form_of_the_interval_is_that_field() -> None:
    assert read_checkpoint(None, None, "here") == {}
    assert read_checkpoint(None, "2m", "here") == {"interval": 120.0}
    assert read_checkpoint({"keep": 3}, "off", "here") == {"keep": 3, "interval": None}
    assert read_checkpoint({"interval": "auto"}, None, "here") == {"interval": "auto"}
    assert read_placement(None, "here") == {}


@pytest.mark.parametrize("given", ["5m", None])
def test_the_interval_cannot_be_given_twice(given: str | None) -> None:
    with pytest.raises(BadSpec) as caught:
        read_checkpoint({"interval": given}, "5m", "here")
    assert refusal(
        caught.value,
        "here",
        "checkpoint_interval and checkpoint.interval are one field",
        "give one of them",
    )


def test_what_was_given_is_not_changed() -> None:
    given = {"interval": "5m"}
    read_checkpoint(given, None, "here")
    assert given == {"interval": "5m"}
