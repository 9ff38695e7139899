"""docs/aws.md, the policies and the examples are those of the code."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from savedworker.fleet import settings
from savedworker.fleet.aws.agent_command import AwsSettings
from savedworker.fleet.aws_batch.settings import BatchSettings
from savedworker.fleet.base import get_fleet
from savedworker.fleet.ec2.settings import Ec2Settings
from savedworker.model import defaults
from tests.fleet.aws import permissions
from tests.fleet.aws.permissions import Need

ROOT = Path(__file__).parents[3]
FOLDER = ROOT / "docs/aws"
DOCS = (ROOT / "docs/aws.md").read_text()


def documented(begin: str, end: str) -> set[str]:
    """The settings in the table between two headings."""
    part = DOCS.partition(begin)[2].partition(end)[0]
    rows = [line.split("|")[1] for line in part.splitlines() if line.startswith("| `")]
    return {name for row in rows for name in re.findall(r"`([a-z_0-9]+)`", row)}


def test_every_setting_is_documented_and_every_documented_one_exists():
    shared = set(AwsSettings.model_fields)
    assert documented("Both kinds:", "`kind: ec2`:") == shared
    assert documented("`kind: ec2`:", "`kind: aws-batch`:") == set(Ec2Settings.model_fields) - shared
    assert documented("`kind: aws-batch`:", "## 5.") == set(BatchSettings.model_fields) - shared


def test_the_stated_limits_are_the_defaults():
    assert (defaults.ON_DEMAND_AFTER_LOSSES, defaults.LOSSES_WITHIN) == (3, 3600)
    assert (defaults.ON_DEMAND_AFTER_WAIT, defaults.WAIT_PER_CHOICE, defaults.SPARE_FOR) == (600, 300, 600)
    assert (defaults.WAIT_FOR_CAPACITY, defaults.AVOID_RECLAIMED_PLACE, defaults.REAP_EVERY) == (
        1800,
        1800,
        600,
    )
    for text in ("(3) losses within an hour", "(10 min)", "(5 min;", "(30 min)", "every 10 min"):
        assert text in DOCS


def policies() -> dict[str, Any]:
    return {path.name: json.loads(path.read_text()) for path in sorted(FOLDER.glob("*.json"))}


def actions(policy: Any) -> set[str]:
    found: set[str] = set()
    for statement in policy["Statement"]:
        listed = statement["Action"]
        found |= {listed} if isinstance(listed, str) else set(listed)
    return found


def test_every_call_of_the_fleets_is_permitted_and_nothing_else():
    """Each operation that the code calls, and what those need besides."""
    source = "".join(path.read_text() for path in (ROOT / "savedworker/fleet").rglob("*.py"))
    called = {
        f"{service}:{''.join(word.capitalize() for word in operation.split('_'))}"
        for service, operation in re.findall(r'"(ec2|batch|ecr|iam)",\s*"([a-z_]+)"', source)
    }
    called |= {"iam:GetRole", "iam:GetInstanceProfile"}  # named by variables
    assert len(called) > 15
    besides = {"ec2:RunInstances", "iam:PassRole", "batch:TagResource", "ssm:GetParameters"}
    store = {f"s3:{x}Object" for x in ("Get", "Put", "Delete")}
    store |= {"s3:AbortMultipartUpload", "s3:ListBucket", "s3:GetBucketLocation"}
    assert actions(policies()["controller-policy.json"]) == called | besides | store


TAGGED = {"aws:ResourceTag/savedworker:launch": "l-1"}
S3 = "arn:aws:s3:::my-bucket"
EC2 = f"arn:aws:ec2:{permissions.REGION}:{permissions.ACCOUNT}"
KEY = f"arn:aws:ssm:{permissions.REGION}:{permissions.ACCOUNT}:parameter/savedworker/key"


@pytest.mark.parametrize(
    ("policy", "need", "allowed"),
    [
        # What every call of the product needs is looked at in every test with moto (conftest); this is the rest.
        ("controller", Need("ec2:TerminateInstances", f"{EC2}:instance/i-1", TAGGED), True),
        ("controller", Need("ec2:TerminateInstances", f"{EC2}:instance/i-1"), False),
        ("controller", Need("ec2:CreateTags", f"{EC2}:instance/i-1"), False),
        ("controller", Need("ec2:DeleteLaunchTemplate", f"{EC2}:launch-template/lt-1"), False),
        ("controller", Need("ec2:CreateLaunchTemplate", f"{EC2}:launch-template/lt-1"), False),
        ("controller", Need("ec2:RunInstances", f"{EC2}:instance/i-1"), False),
        ("controller", Need("ssm:GetParameters", KEY), False),
        ("controller", Need("s3:PutObject", f"{S3}/store/workers/w/spec.json"), True),
        ("controller", Need("s3:PutObject", f"{S3}/savedworker-bundle.tar.gz"), False),
        ("instance", Need("s3:PutObject", f"{S3}/store/workers/w/record.json"), True),
        ("instance", Need("s3:GetObject", f"{S3}/savedworker-bundle.tar.gz"), True),
        ("instance", Need("s3:PutObject", f"{S3}/savedworker-bundle.tar.gz"), False),
        ("instance", Need("ssm:GetParameter", KEY), True),
        ("instance", Need("ec2:TerminateInstances", f"{EC2}:instance/i-1", TAGGED), False),
        ("execution", Need("ssm:GetParameters", KEY), True),
    ],
)
def test_the_policies_allow_what_is_needed_and_not_its_neighbour(policy: str, need: Need, allowed: bool):
    assert permissions.permitted(permissions.policy(f"{policy}-policy.json"), need) is allowed


def test_the_bundle_is_where_instances_may_read_it_and_none_may_write_it():
    """The steps, the example file and the policy name one place, and it is not within the store."""
    (uploaded,) = re.findall(r"aws s3 cp \S+ s3://\$BUCKET/(\S+)", DOCS)
    example = yaml.safe_load((FOLDER / "fleets.yaml").read_text())["fleets"]["spot"]["bundle"]
    assert example == f"s3://my-bucket/{uploaded}"
    assert KEY.endswith("parameter/savedworker/key")
    assert "--name /savedworker/key " in DOCS
    need = Need("s3:GetObject", f"{S3}/{uploaded}")
    assert permissions.permitted(permissions.policy("instance-policy.json"), need)


def test_the_policies_are_narrow():
    for name, policy in policies().items():
        for statement in policy["Statement"]:
            assert statement["Effect"] == "Allow"
            assert not [x for x in actions({"Statement": [statement]}) if "*" in x], name
            changes = [
                x
                for x in actions({"Statement": [statement]})
                if not re.search(r":(Describe|List|Get)|^sts:", x)
            ]
            assert not changes or statement["Resource"] != "*", (name, statement["Sid"])
    by_sid = {x["Sid"]: x for x in policies()["controller-policy.json"]["Statement"]}
    assert "aws:ResourceTag/savedworker:launch" in by_sid["EndOurInstancesOnly"]["Condition"]["StringLike"]
    assert "aws:ResourceTag/savedworker:launch" in by_sid["EndOurJobsOnly"]["Condition"]["StringLike"]
    assert "iam:PassedToService" in by_sid["GiveInstancesTheirRole"]["Condition"]["StringEquals"]


def test_the_steps_name_files_that_are_there():
    for name in re.findall(r"(?:file://|\(fill |docs/aws/)([a-z-]+\.(?:json|yaml))", DOCS):
        assert (FOLDER / name).is_file(), name
    for text in re.findall(r"docs/aws/[a-z-]+\.json", (ROOT / "savedworker/fleet/aws/errors.py").read_text()):
        assert (ROOT / text).is_file()


def test_the_example_fleet_file_is_one(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("SAVEDWORKER_FLEETS", str(FOLDER / "fleets.yaml"))
    assert settings.kinds() == {"spot": "ec2", "batch": "aws-batch"}
    for name in settings.kinds():
        assert get_fleet(name).name == name
    assert "AKIA" not in yaml.safe_dump(yaml.safe_load((FOLDER / "fleets.yaml").read_text()))
