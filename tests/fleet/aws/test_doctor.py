"""``doctor --fleet``: each thing that can be wrong is found, with its fix. AWS is moto, a stand-in."""

from __future__ import annotations

import base64
import json
from pathlib import Path
from typing import Any

import boto3
import pytest
import yaml
from click.testing import CliRunner

from savedworker.cli.application import cli
from savedworker.fleet.finding import Finding
from tests.fleet.aws.conftest import ACCOUNT, REGION, Cloud, refusal

MANIFEST = {
    "schemaVersion": 2,
    "mediaType": "application/vnd.docker.distribution.manifest.v2+json",
    "config": {
        "digest": "sha256:0",
        "size": 1,
        "mediaType": "application/vnd.docker.container.image.v1+json",
    },
    "layers": [],
}
IMAGE = f"{ACCOUNT}.dkr.ecr.{REGION}.amazonaws.com/agent:1"


@pytest.fixture
def ready(cloud: Cloud) -> Cloud:
    """An account that is set up for EC2 as docs/aws.md says."""
    cloud.iam.create_role(RoleName="worker", AssumeRolePolicyDocument="{}")
    cloud.iam.create_instance_profile(InstanceProfileName="worker")
    cloud.iam.add_role_to_instance_profile(InstanceProfileName="worker", RoleName="worker")
    cloud.s3.create_bucket(Bucket="workers", CreateBucketConfiguration={"LocationConstraint": REGION})
    return cloud


@pytest.fixture
def batch(ready: Cloud) -> Cloud:
    """The same for AWS Batch."""
    ready.queues("spot", "on-demand")
    ecr = ready.aws.client("ecr")
    ecr.create_repository(repositoryName="agent")
    ecr.put_image(repositoryName="agent", imageManifest=json.dumps(MANIFEST), imageTag="1")
    return ready


def of(findings: list[Finding], check: str) -> list[tuple[str, str, str]]:
    return [(x.level, x.detail, x.fix) for x in findings if x.check == check]


def one(findings: list[Finding], check: str, level: str) -> tuple[str, str]:
    ((detail, fix),) = [(d, f) for found, d, f in of(findings, check) if found == level]
    assert fix or level == "OK"
    return detail, fix


def look(fleet: Any, store: str = "s3://workers/prefix") -> list[Finding]:
    found = list(fleet.diagnose(store))
    assert all(x.fix for x in found if x.level == "FAIL"), found
    assert all("\n" not in f"{x.detail}{x.fix}" for x in found)
    return found


# EC2 ------------------------------------------------------------------------------------------------------------------


def test_an_ec2_fleet_that_is_ready(ready: Cloud):
    found = look(ready.ec2_fleet())
    assert [x for x in found if x.level != "OK"] == []
    checks = {x.check for x in found}
    assert checks >= {
        "credentials",
        "permissions",
        "types",
        "image",
        "instance_profile",
        "metadata",
        "bucket",
    }
    assert "hop limit 1" in one(found, "metadata", "OK")[0]
    assert ready.instances() == []
    assert ready.ec2.describe_launch_templates()["LaunchTemplates"] == []  # nothing is made


def test_without_credentials_nothing_else_is_said(ready: Cloud, monkeypatch: pytest.MonkeyPatch):
    def expired(**_: Any) -> Any:
        raise refusal("ExpiredToken")

    monkeypatch.setattr(ready.aws.client("sts"), "get_caller_identity", expired)
    for fleet in (ready.ec2_fleet(), ready.batch_fleet()):
        (only,) = look(fleet)
        assert (only.check, only.level) == ("credentials", "FAIL")
        assert "have run out" in only.detail


def test_a_permission_that_is_missing_is_named(ready: Cloud, monkeypatch: pytest.MonkeyPatch):
    def denied(**parameters: Any) -> Any:
        assert parameters["DryRun"] is True
        raise refusal("UnauthorizedOperation", 403)

    monkeypatch.setattr(ready.aws.client("ec2"), "create_fleet", denied)
    detail, fix = one(look(ready.ec2_fleet()), "permissions", "FAIL")
    assert detail == "ec2:CreateFleet is not permitted"
    assert "docs/aws/controller-policy.json" in fix


def test_the_permissions_that_a_launch_needs_besides_are_tried_without_making_anything(
    ready: Cloud, monkeypatch: pytest.MonkeyPatch
):
    """RunInstances, tags and the role are what CreateFleet itself is asked for only when it makes an instance."""
    said = [d for _, d, _ in of(look(ready.ec2_fleet(tags={"team": "a"})), "permissions")]
    assert "ec2:RunInstances, with ec2:CreateTags and iam:PassRole, is permitted" in said
    (asked,) = ready.made("run_instances")
    assert (asked["DryRun"], asked["IamInstanceProfile"]) == (True, {"Name": "worker"})
    assert asked["TagSpecifications"][0]["ResourceType"] == "instance"

    def denied(**_: Any) -> Any:
        raise refusal("UnauthorizedOperation", 403)

    monkeypatch.setattr(ready.aws.client("ec2"), "run_instances", denied)
    detail, _ = one(look(ready.ec2_fleet()), "permissions", "FAIL")
    assert detail == "ec2:RunInstances, with ec2:CreateTags and iam:PassRole, is not permitted"
    assert ready.instances() == []


@pytest.mark.parametrize(
    ("settings", "check", "level", "text"),
    [
        ({"image": "ami-00000000"}, "image", "FAIL", "ami-00000000"),
        ({"instance_profile": "nobodys"}, "instance_profile", "FAIL", "no instance profile nobodys"),
        ({"instance_profile": None}, "instance_profile", "FAIL", "would have no role"),
        ({"security_groups": ["sg-00000000"]}, "security groups", "FAIL", "no such security group"),
        ({"instance_types": ["x9.huge"]}, "types", "FAIL", "no types x9.huge"),
        ({"instance_types": ["m5.large"]}, "types", "WARN", "nowhere else to go"),
        ({"hop_limit": 2}, "metadata", "WARN", "workers can reach it"),
        ({"bundle": "s3://workers/agent.tar.gz"}, "user data", "WARN", "decides what instances execute"),
        ({"subnets": ["subnet-00000000"]}, "types", "FAIL", "no such subnet"),
    ],
)
def test_what_is_wrong_with_an_ec2_fleet_is_found(
    ready: Cloud, settings: dict[str, Any], check: str, level: str, text: str
):
    found = look(ready.ec2_fleet(**settings))
    assert text in one(found, check, level)[0]
    assert [x.check for x in found if x.level == "FAIL"] == ([check] if level == "FAIL" else [])


def test_an_instance_profile_without_a_role(ready: Cloud):
    ready.iam.create_instance_profile(InstanceProfileName="empty")
    assert (
        "has no role" in one(look(ready.ec2_fleet(instance_profile="empty")), "instance_profile", "FAIL")[0]
    )


def test_the_bucket(ready: Cloud):
    fleet = ready.ec2_fleet()
    far = boto3.client("s3", region_name="ap-south-1")
    far.create_bucket(Bucket="far", CreateBucketConfiguration={"LocationConstraint": "ap-south-1"})
    far.close()
    assert "workers is in eu-west-1" in one(look(fleet), "bucket", "OK")[0]
    assert "crosses regions" in one(look(fleet, "s3://far/x"), "bucket", "WARN")[0]
    assert "nobodys" in one(look(fleet, "s3://nobodys/x"), "bucket", "FAIL")[0]
    assert "cannot be reached" in one(look(fleet, "file:///tmp/store"), "bucket", "FAIL")[0]


def test_a_users_template_that_hides_the_metadata_service(ready: Cloud):
    ready.ec2.create_launch_template(
        LaunchTemplateName="mine",
        LaunchTemplateData={"ImageId": ready.image, "MetadataOptions": {"HttpEndpoint": "disabled"}},
    )
    found = look(ready.ec2_fleet(launch_template="mine", image=None))
    assert "it is turned on" in of(found, "metadata")[0][1]


# AWS Batch ------------------------------------------------------------------------------------------------------------


def test_a_batch_fleet_that_is_ready_but_for_what_no_interface_tells(batch: Cloud):
    found = look(batch.batch_fleet(image=IMAGE))
    assert [x.check for x in found if x.level != "OK"] == ["draining"]
    assert [d for _, d, _ in of(found, "queue")] == [
        "spot is enabled and valid (spot)",
        "on-demand is enabled and valid (on-demand)",
    ]
    assert "1 is enough" in of(found, "metadata")[0][1]


def test_draining_and_the_time_after_sigterm_are_seen_in_the_launch_template_of_the_hosts(batch: Cloud):
    """C28: a job definition cannot set that time."""
    script = "#!/bin/bash\necho ECS_ENABLE_SPOT_INSTANCE_DRAINING=true >> /etc/ecs/ecs.config\n"
    longer = script + "echo ECS_CONTAINER_STOP_TIMEOUT=110s >> /etc/ecs/ecs.config\n"
    for name, text in (("short", script), ("long", longer)):
        data = base64.b64encode(text.encode()).decode()
        batch.ec2.create_launch_template(LaunchTemplateName=name, LaunchTemplateData={"UserData": data})
        template = {"launchTemplateName": name, "version": "1"}
        _queue(batch, name, _environment(batch, name, "SPOT", template))

    def look_at(queue: str, **settings: Any) -> list[Finding]:
        return look(batch.batch_fleet(queues=[queue], image=IMAGE, **settings))

    assert "30 s from SIGTERM" in one(look_at("short"), "draining", "OK")[0]
    assert "110 s from SIGTERM" in one(look_at("long", stop_timeout=110), "draining", "OK")[0]
    assert one(look_at("short", stop_timeout=110), "draining", "WARN")[1] == "set stop_timeout: 30"


@pytest.mark.parametrize(
    ("settings", "check", "level", "text"),
    [
        ({"queues": ["nobodys"]}, "queue", "FAIL", "no queue nobodys"),
        (
            {"queues": [{"queue": "spot", "market": "on-demand"}]},
            "environment",
            "WARN",
            "says that spot is on-demand",
        ),
        ({"job_role": None}, "job_role", "WARN", "role of their host"),
        ({"job_role": f"arn:aws:iam::{ACCOUNT}:role/nobodys"}, "job_role", "FAIL", "no role nobodys"),
        ({"image": f"{ACCOUNT}.dkr.ecr.{REGION}.amazonaws.com/agent:9"}, "image", "FAIL", "there is no"),
        ({"image": f"{ACCOUNT}.dkr.ecr.{REGION}.amazonaws.com/other:1"}, "image", "FAIL", "there is no"),
        ({"image": "docker.io/agent"}, "image", "WARN", "not in ECR"),
    ],
)
def test_what_is_wrong_with_a_batch_fleet_is_found(
    batch: Cloud, settings: dict[str, Any], check: str, level: str, text: str
):
    assert text in one(look(batch.batch_fleet(**{"image": IMAGE, **settings})), check, level)[0]


def test_a_queue_that_is_off_and_hosts_that_cannot_checkpoint(batch: Cloud):
    batch.batch.update_job_queue(jobQueue="spot", state="DISABLED")
    assert "spot is DISABLED" in one(look(batch.batch_fleet(image=IMAGE)), "queue", "FAIL")[0]
    _queue(batch, "serverless", _environment(batch, "serverless", "FARGATE_SPOT"))
    found = look(batch.batch_fleet(queues=["serverless"], image=IMAGE))
    assert "no privileges" in one(found, "environment", "FAIL")[0]


def _environment(cloud: Cloud, name: str, kind: str, template: dict[str, str] | None = None) -> str:
    resources: dict[str, Any] = {
        "type": kind,
        "maxvCpus": 8,
        "subnets": cloud.subnets("a"),
        "securityGroupIds": [cloud.ec2.describe_security_groups()["SecurityGroups"][0]["GroupId"]],
    }
    if not kind.startswith("FARGATE"):
        profile = cloud.iam.get_instance_profile(InstanceProfileName="hosts")["InstanceProfile"]["Arn"]
        resources |= {"minvCpus": 0, "instanceTypes": ["m5.large"], "instanceRole": profile}
    if template:
        resources["launchTemplate"] = template
    made = cloud.batch.create_compute_environment(
        computeEnvironmentName=f"{name}-environment",
        type="MANAGED",
        state="ENABLED",
        serviceRole=cloud.iam.get_role(RoleName="service")["Role"]["Arn"],
        computeResources=resources,  # type: ignore[arg-type]
    )
    return made["computeEnvironmentArn"]


def _queue(cloud: Cloud, name: str, environment: str) -> None:
    cloud.batch.create_job_queue(
        jobQueueName=name,
        state="ENABLED",
        priority=1,
        computeEnvironmentOrder=[{"order": 1, "computeEnvironment": environment}],
    )


# The command ----------------------------------------------------------------------------------------------------------


def test_the_command_checks_fleet_store_and_conditional_writes(
    ready: Cloud, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
):
    file = tmp_path / "fleets.yaml"
    fields = ready.ec2_fleet().settings.model_dump(mode="json", exclude_defaults=True)
    file.write_text(yaml.safe_dump({"fleets": {"cheap": {"kind": "ec2", **fields}}}))
    monkeypatch.setenv("SAVEDWORKER_FLEETS", str(file))
    done = CliRunner().invoke(cli, ["doctor", "--fleet", "cheap", "--store", "s3://workers/prefix", "--json"])
    found = json.loads(done.stdout)
    assert done.exit_code == 0, done.output
    assert "create-only and compare-and-swap hold" in next(
        x["detail"] for x in found if x["check"] == "store"
    )
    assert {"credentials", "types", "bucket", "encryption"} <= {x["check"] for x in found}
    assert "kernel" not in {x["check"] for x in found}  # this machine is not an instance
    monkeypatch.setenv("SAVEDWORKER_FLEET_CHEAP_IMAGE", "ami-00000000")
    done = CliRunner().invoke(cli, ["doctor", "--fleet", "cheap", "--store", "s3://workers/prefix"])
    assert done.exit_code == 1
    assert "FAIL  image" in done.output
    done = CliRunner().invoke(cli, ["doctor", "--fleet", "other", "--store", "s3://workers/prefix"])
    assert done.exit_code == 2
