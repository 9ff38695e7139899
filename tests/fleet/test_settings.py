"""Fleets by name: one file, variables before it, and no credential in either."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

from savedworker.fleet import base, settings
from savedworker.fleet.aws_batch import BatchFleet
from savedworker.fleet.aws_batch.settings import BatchSettings
from savedworker.fleet.base import OWN_KINDS, get_fleet, keeping_fleets
from savedworker.fleet.ec2 import Ec2Fleet
from savedworker.fleet.ec2.settings import Ec2Settings
from savedworker.fleet.local import LocalFleet
from savedworker.model.errors import Refused

SPOT = {"kind": "ec2", "image": "ami-0123", "instance_types": ["m5.large", "m6i.*"], "region": "eu-west-1"}
JOBS = {"kind": "aws-batch", "image": "agent:1", "queues": ["spot", {"queue": "od", "market": "on-demand"}]}


@pytest.fixture
def file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    path = tmp_path / "fleets.yaml"
    path.write_text(yaml.safe_dump({"fleets": {"cheap": SPOT, "jobs": JOBS}}))
    monkeypatch.setenv("SAVEDWORKER_FLEETS", str(path))
    return path


def write(file: Path, name: str, fields: Any) -> None:
    file.write_text(yaml.safe_dump({"fleets": {name: fields}}))


def test_a_name_of_the_file_is_a_fleet_of_its_kind(file: Path):
    cheap, jobs = get_fleet("cheap"), get_fleet("jobs")
    assert isinstance(cheap, Ec2Fleet)
    assert isinstance(jobs, BatchFleet)
    assert (cheap.name, cheap.settings.instance_types) == ("cheap", ("m5.large", "m6i.*"))
    assert [(x.name, x.market) for x in jobs.settings.queues] == [("spot", "spot"), ("od", "on-demand")]
    assert isinstance(get_fleet("local"), LocalFleet)
    assert [x.name for x in keeping_fleets(("local", "nobody", "cheap"))] == ["cheap", "jobs"]


def test_variables_go_before_the_file_and_can_stand_alone(file: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("SAVEDWORKER_FLEET_CHEAP_INSTANCE_TYPES", "c5.large, c5.xlarge")
    monkeypatch.setenv("SAVEDWORKER_FLEET_CHEAP_HOP_LIMIT", "2")
    monkeypatch.setenv("SAVEDWORKER_FLEET_CHEAP_MEMORY_RESERVE", "2GiB")
    found = settings.load("cheap", Ec2Settings)
    assert (found.instance_types, found.hop_limit, found.memory_reserve) == (
        ("c5.large", "c5.xlarge"),
        2,
        2 << 30,
    )
    assert found.image == "ami-0123"
    monkeypatch.setenv("SAVEDWORKER_FLEET_AWS_BATCH_QUEUES", "[{queue: a, market: on-demand, price: 0.5}]")
    monkeypatch.setenv("SAVEDWORKER_FLEET_AWS_BATCH_IMAGE", "agent:2")
    alone = get_fleet("aws-batch")
    assert isinstance(alone, BatchFleet)
    assert (alone.settings.queues[0].price, alone.settings.image) == (0.5, "agent:2")
    assert "aws-batch" in [x.name for x in keeping_fleets(())]


def test_a_single_value_may_stand_for_a_list(file: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("SAVEDWORKER_FLEET_CHEAP_SUBNETS", "subnet-1")
    assert settings.load("cheap", Ec2Settings).subnets == ("subnet-1",)
    write(file, "jobs", {**JOBS, "queues": "one"})
    assert [x.name for x in settings.load("jobs", BatchSettings).queues] == ["one"]


def test_words_are_taken_as_written(file: Path):
    digits = "1234567890" * 6 + "1234"
    file.write_text(
        "fleets: {cheap: {kind: ec2, image: ami-0123, instance_types: m5.large, hop_limit: 2, max_price: 0.5, key_name: null,"
        f" bundle: 's3://b/x', bundle_sha256: {digits}, tags: {{answer: 042, yes: no}}}}}}"
    )
    found = settings.load("cheap", Ec2Settings)
    assert (found.bundle_sha256, found.tags) == (digits, {"answer": "042", "yes": "no"})
    assert (found.hop_limit, found.max_price, found.key_name) == (2, 0.5, None)


@pytest.mark.parametrize(
    ("fields", "text"),
    [
        (
            {**SPOT, "instance_types": []},
            r"fleet cheap: instance_types: .*Fix: correct it in .*fleets.yaml, or set SAVEDWORKER_FLEET_CHEAP_INSTANCE_TYPES",
        ),
        ({**SPOT, "instence_types": []}, "fleet cheap: instence_types: there is no such setting"),
        ({**SPOT, "hop_limit": "many"}, "fleet cheap: hop_limit: "),
        ({"kind": "ec2", "image": "ami-0123"}, "fleet cheap: instance_types: this is missing"),
        ({**SPOT, "image": None}, "fleet cheap: image is missing"),
        ({**SPOT, "key_from": "my-key"}, "fleet cheap: key_from: "),
        ({**SPOT, "bundle": "/tmp/x"}, "fleet cheap: bundle: "),
        ({**SPOT, "kind": "ec3"}, "fleet 'cheap' is of kind 'ec3', and there is none"),
        ({"image": "ami-0123"}, "fleet cheap has no kind"),
        ("ec2", "fleet cheap has no kind"),
    ],
)
def test_what_is_wrong_is_said_in_one_line_with_its_place(file: Path, fields: Any, text: str):
    write(file, "cheap", fields)
    with pytest.raises(Refused, match=text) as caught:
        get_fleet("cheap")
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    "fields",
    [
        {"aws_access_key_id": "x"},
        {"aws_secret_access_key": "x"},
        {"session_token": "x"},
        {"environment": {"AWS_SECRET_ACCESS_KEY": "x"}},
        {"environment": {"MY_PASSWORD": "x"}},
        {"tags": {"note": "AKIAIOSFODNN7EXAMPLE"}},
        {"environment": {"SAVEDWORKER_KEY": "x"}},
    ],
)
def test_a_credential_is_refused_wherever_it_stands_and_not_repeated(file: Path, fields: dict[str, Any]):
    write(file, "cheap", {**SPOT, **fields})
    with pytest.raises(Refused, match=r"is a credential.*use roles") as caught:
        get_fleet("cheap")
    assert "AKIA" not in str(caught.value)


@pytest.mark.parametrize(
    ("content", "text"),
    [
        ("fleets: [", "is not YAML"),
        ("[]", "no mapping with the one member 'fleets'"),
        ("fleets: {a: {kind: ec2}}\nmore: 1", "no mapping with the one member 'fleets'"),
        ("fleets: {Big: {kind: ec2}}", "'Big' cannot name a fleet"),
        ("fleets: {local: {kind: ec2}}", "'local' cannot name a fleet"),
        ("fleets: {ec2: {kind: aws-batch}}", "choose another name"),
        ("\xff\xfe", "is not YAML"),
    ],
)
def test_a_file_that_cannot_be_used_is_refused_by_name(file: Path, content: str, text: str):
    file.write_bytes(content.encode("latin-1"))
    with pytest.raises(Refused, match=text) as caught:
        get_fleet("cheap")
    assert str(file) in str(caught.value)


def test_a_file_that_is_named_and_not_there_is_refused(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    monkeypatch.setenv("SAVEDWORKER_FLEETS", str(tmp_path / "none.yaml"))
    with pytest.raises(Refused, match=r"none.yaml cannot be read: No such file"):
        get_fleet("cheap")


def test_without_any_configuration_only_the_kinds_are_known(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    monkeypatch.delenv("SAVEDWORKER_FLEETS", raising=False)
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    monkeypatch.setattr(settings, "DEFAULT_FILE", tmp_path / "none")
    with pytest.raises(Refused, match=r"there is no fleet 'cheap'.*use one of: aws-batch, ec2, local"):
        get_fleet("cheap")
    with pytest.raises(Refused, match="fleet ec2: instance_types: this is missing"):
        get_fleet("ec2")
    own = tmp_path / "savedworker/fleets.yaml"
    own.parent.mkdir()
    own.write_text(yaml.safe_dump({"fleets": {"cheap": SPOT}}))
    assert get_fleet("cheap").name == "cheap"


def test_without_boto3_the_extra_is_named(file: Path, monkeypatch: pytest.MonkeyPatch):
    def missing(module: str) -> Any:
        raise ModuleNotFoundError("No module named 'boto3'", name="boto3")

    monkeypatch.setattr(base, "import_module", missing)
    with pytest.raises(Refused, match=r"needs boto3.*airflow-provider-savedworker\[aws\]"):
        get_fleet("cheap")


def test_the_kinds_are_the_distributions_entry_points():
    import tomllib

    project = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text())
    assert project["project"]["entry-points"]["savedworker.fleets"] == OWN_KINDS
