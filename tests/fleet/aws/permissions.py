"""Whether docs/aws/controller-policy.json permits what the code asks AWS for: a small reader of IAM policies.

What an operation is checked against (actions, resources, condition keys) is taken from the service authorization reference and, for
CreateFleet, from what Karpenter's published policy has to allow. A stand-in: IAM itself knows more.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).parents[3] / "docs/aws"
ACCOUNT, REGION = "123456789012", "eu-west-1"
FILLED = {"ACCOUNT": ACCOUNT, "REGION": REGION, "BUCKET": "my-bucket", "PREFIX": "store"}
Tags = Mapping[str, str]


@dataclass(frozen=True)
class Need:
    """One thing that IAM looks at."""

    action: str
    resource: str = "*"
    context: Mapping[str, str] = field(default_factory=dict)


def policy(name: str) -> list[dict[str, Any]]:
    """The statements of a policy file, filled in as docs/aws.md does it."""
    text = (FOLDER / name).read_text()
    for word, value in FILLED.items():
        text = re.sub(word, value, text)
    statements: list[dict[str, Any]] = json.loads(text)["Statement"]
    return statements


def permitted(statements: list[dict[str, Any]], need: Need) -> bool:
    """Whether any statement allows ``need``."""
    return any(_allows(statement, need) for statement in statements)


def _several(value: Any) -> list[str]:
    return [value] if isinstance(value, str) else list(value)


def _allows(statement: Mapping[str, Any], need: Need) -> bool:
    assert statement["Effect"] == "Allow"
    return (
        any(fnmatchcase(need.action.lower(), x.lower()) for x in _several(statement["Action"]))
        and any(fnmatchcase(need.resource, x) for x in _several(statement["Resource"]))
        and all(_holds(kind, keys, need.context) for kind, keys in statement.get("Condition", {}).items())
    )


def _holds(kind: str, keys: Mapping[str, Any], context: Mapping[str, str]) -> bool:
    match = {"StringEquals": lambda value, pattern: value == pattern, "StringLike": fnmatchcase}[kind]
    return all(
        key in context and any(match(context[key], pattern) for pattern in _several(patterns))
        for key, patterns in keys.items()
    )


def denied(
    statements: list[dict[str, Any]],
    operation: str,
    parameters: Mapping[str, Any],
    tags_of: Callable[[str], Tags],
) -> list[Need]:
    """What of a call would not be permitted. ``operation``: ``ec2.create_fleet``; ``tags_of``: those that a thing has already, by its id."""
    return [need for need in needs(operation, parameters, tags_of) if not permitted(statements, need)]


def needs(operation: str, parameters: Mapping[str, Any], tags_of: Callable[[str], Tags]) -> Iterator[Need]:
    """All that IAM looks at for one call."""
    if operation not in _NEEDS:
        raise AssertionError(f"nobody has said what {operation} needs: add it to {__name__}")
    yield from _NEEDS[operation](parameters, tags_of)


def _ec2(kind: str, name: str = "x", account: str = ACCOUNT) -> str:
    return f"arn:aws:ec2:{REGION}:{account}:{kind}/{name}"


def _requested(parameters: Mapping[str, Any]) -> dict[str, str]:
    """aws:RequestTag of a call that makes things."""
    listed = [tag for each in parameters.get("TagSpecifications", ()) for tag in each["Tags"]]
    return {f"aws:RequestTag/{tag['Key']}": tag["Value"] for tag in listed}


def _tagged(parameters: Mapping[str, Any], action: str) -> Iterator[Need]:
    for each in parameters.get("TagSpecifications", ()):
        yield Need("ec2:CreateTags", _ec2(each["ResourceType"]), {"ec2:CreateAction": action})


def _pass_role(role: str, service: str) -> Need:
    return Need("iam:PassRole", f"arn:aws:iam::{ACCOUNT}:role/{role}", {"iam:PassedToService": service})


INSTANCE_OF = (
    "instance",
    "network-interface",
    "volume",
    "subnet",
    "security-group",
    "key-pair",
    "launch-template",
)


def _run(action: str, parameters: Mapping[str, Any]) -> Iterator[Need]:
    context = _requested(parameters)
    for kind in INSTANCE_OF:
        yield Need(action, _ec2(kind), context)
    for kind in ("image", "snapshot"):
        yield Need(action, _ec2(kind, account=""), context)


def _create_fleet(parameters: Mapping[str, Any], _: Any) -> Iterator[Need]:
    yield Need("ec2:CreateFleet", _ec2("fleet"), _requested(parameters))
    yield from _run("ec2:CreateFleet", parameters)
    yield from _run("ec2:RunInstances", parameters)
    if parameters["TargetCapacitySpecification"]["DefaultTargetCapacityType"] == "spot":
        yield Need("ec2:RunInstances", _ec2("spot-instances-request"))
    yield from _tagged(parameters, "CreateFleet")
    yield from _tagged(parameters, "RunInstances")
    yield _pass_role("savedworker-instance", "ec2.amazonaws.com")


def _run_instances(parameters: Mapping[str, Any], _: Any) -> Iterator[Need]:
    yield from _run("ec2:RunInstances", parameters)
    yield from _tagged(parameters, "RunInstances")
    yield _pass_role("savedworker-instance", "ec2.amazonaws.com")


def _create_template(parameters: Mapping[str, Any], _: Any) -> Iterator[Need]:
    yield Need("ec2:CreateLaunchTemplate", _ec2("launch-template"), _requested(parameters))
    yield from _tagged(parameters, "CreateLaunchTemplate")
    if str(parameters["LaunchTemplateData"].get("ImageId", "")).startswith("resolve:ssm:"):
        name = parameters["LaunchTemplateData"]["ImageId"].removeprefix("resolve:ssm:")
        yield Need("ssm:GetParameters", f"arn:aws:ssm:{REGION}::parameter{name}")


def _on(
    action: str, kind: str, ids: str | None = None
) -> Callable[[Mapping[str, Any], Callable[[str], Tags]], Iterator[Need]]:
    """An action on what exists, whose tags count."""

    def found(parameters: Mapping[str, Any], tags_of: Callable[[str], Tags]) -> Iterator[Need]:
        for name in _several(parameters[ids or ""]):
            has = {f"aws:ResourceTag/{key}": value for key, value in tags_of(name).items()}
            service = action.partition(":")[0]
            yield Need(action, f"arn:aws:{service}:{REGION}:{ACCOUNT}:{kind}/{name}", has)

    return found


def _submit(parameters: Mapping[str, Any], _: Any) -> Iterator[Need]:
    batch = f"arn:aws:batch:{REGION}:{ACCOUNT}:"
    yield Need("batch:SubmitJob", f"{batch}job-definition/{parameters['jobDefinition']}")
    yield Need("batch:SubmitJob", f"{batch}job-queue/{parameters['jobQueue']}")
    yield Need("batch:TagResource", f"{batch}job/x")


def _register(parameters: Mapping[str, Any], _: Any) -> Iterator[Need]:
    definition = f"arn:aws:batch:{REGION}:{ACCOUNT}:job-definition/{parameters['jobDefinitionName']}"
    yield Need("batch:RegisterJobDefinition", definition)
    yield Need("batch:TagResource", definition)
    for role in ("savedworker-job", "savedworker-execution"):
        yield _pass_role(role, "ecs-tasks.amazonaws.com")


def _look(action: str) -> Callable[[Any, Any], Iterator[Need]]:
    return lambda parameters, tags_of: iter((Need(action),))


def _nothing(parameters: Any, tags_of: Any) -> Iterator[Need]:
    return iter(())


_LOOKS = {
    "ec2": """DescribeInstances DescribeInstanceTypes DescribeInstanceTypeOfferings DescribeSubnets DescribeImages
        DescribeSecurityGroups DescribeLaunchTemplates DescribeLaunchTemplateVersions""",
    "batch": "DescribeJobs DescribeJobDefinitions DescribeJobQueues DescribeComputeEnvironments ListJobs",
    "ecr": "DescribeImages",
    "iam": "GetRole GetInstanceProfile",
}
_NEEDS: dict[str, Callable[[Mapping[str, Any], Callable[[str], Tags]], Iterator[Need]]] = {
    **{
        f"{service}.{re.sub(r'(?<!^)(?=[A-Z])', '_', name).lower()}": _look(f"{service}:{name}")
        for service, names in _LOOKS.items()
        for name in names.split()
    },
    "ec2.create_fleet": _create_fleet,
    "ec2.run_instances": _run_instances,
    "ec2.create_launch_template": _create_template,
    "ec2.delete_launch_template": _on("ec2:DeleteLaunchTemplate", "launch-template", "LaunchTemplateId"),
    "ec2.create_tags": _on("ec2:CreateTags", "instance", "Resources"),
    "ec2.terminate_instances": _on("ec2:TerminateInstances", "instance", "InstanceIds"),
    "batch.submit_job": _submit,
    "batch.register_job_definition": _register,
    "batch.terminate_job": _on("batch:TerminateJob", "job", "jobId"),
    "s3.head_bucket": lambda parameters, tags_of: iter((Need("s3:ListBucket", "arn:aws:s3:::my-bucket"),)),
    "sts.get_caller_identity": _nothing,  # everybody may
}
