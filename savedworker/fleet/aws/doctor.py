"""Findings that both kinds of fleet share: credentials, the bucket, and how a dry run is read."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from savedworker.fleet.aws.session import Aws, code_of
from savedworker.fleet.finding import Finding
from savedworker.model.errors import Refused, SavedWorkerError

POLICY = "give the controller's role docs/aws/controller-policy.json"


def guarded(check: str, probe: Callable[[], Iterator[Finding]]) -> Iterator[Finding]:
    """The findings of ``probe``, or a FAIL that says why there are none."""
    try:
        yield from probe()
    except SavedWorkerError as error:
        yield Finding(check, "FAIL", error.message, error.fix)


def credentials(aws: Aws) -> Iterator[Finding]:
    """Who the controller is."""
    who = aws.call("sts", "get_caller_identity", "asking who this is")
    yield Finding("credentials", "OK", f"{who['Arn']} in {aws.region}")


def dry_run(
    aws: Aws, operation: str, permission: str, fix: str = POLICY, **parameters: Any
) -> Iterator[Finding]:
    """Whether EC2 would permit ``operation``."""
    try:
        aws.call("ec2", operation, "a dry run", DryRun=True, **parameters)
    except SavedWorkerError as error:
        code = code_of(error.__cause__ or error)
        if code == "DryRunOperation":
            yield Finding("permissions", "OK", f"{permission} is permitted")
        elif code in ("UnauthorizedOperation", "AccessDenied"):
            yield Finding("permissions", "FAIL", f"{permission} is not permitted", fix)
        else:
            yield Finding(
                "permissions", "WARN", f"{permission} could not be tried: {error.message}", error.fix
            )
        return
    yield Finding("permissions", "WARN", f"{permission}: AWS gave no answer to a dry run")


def bucket(aws: Aws, store_url: str) -> Iterator[Finding]:
    """Whether the store can be reached from other machines, and is in the region where instances are."""
    if not store_url.startswith("s3://"):
        yield Finding(
            "bucket",
            "FAIL",
            f"{store_url} cannot be reached from instances of AWS",
            "use --store s3://BUCKET/PREFIX (a shared file system mounted at that path on every instance would do too)",
        )
        return
    name = store_url.removeprefix("s3://").partition("/")[0]
    try:
        answer = aws.call("s3", "head_bucket", f"looking at bucket {name}", Bucket=name)
        region = answer.get("BucketRegion") or answer["ResponseMetadata"]["HTTPHeaders"].get(
            "x-amz-bucket-region"
        )
    except Refused as error:
        yield Finding("bucket", "FAIL", error.message, "create it, or correct --store and the permissions")
        return
    if region and region != aws.region:
        yield Finding(
            "bucket",
            "WARN",
            f"{name} is in {region}, and instances are in {aws.region}: every checkpoint crosses regions, which is slow and is billed",
            f"use a bucket in {aws.region}, or set environment: {{AWS_REGION: {region}}} of the fleet",
        )
    else:
        yield Finding("bucket", "OK", f"{name} is in {region or 'this region, as far as AWS tells'}")


def role(aws: Aws, what: str, arn_or_name: str, kind: str) -> Iterator[Finding]:
    """Whether a role or instance profile exists, where IAM may be asked."""
    name = arn_or_name.rpartition("/")[2]
    operation, key = (
        ("get_role", "RoleName") if kind == "role" else ("get_instance_profile", "InstanceProfileName")
    )
    try:
        answer = aws.call("iam", operation, f"looking at {what}", **{key: name})
    except SavedWorkerError as error:
        code = code_of(error.__cause__ or error)
        if code == "NoSuchEntity":
            yield Finding(
                what, "FAIL", f"there is no {kind} {name}", f"create it (docs/aws.md), or correct {what}"
            )
        else:
            yield Finding(
                what, "WARN", f"{name} could not be looked at: {error.message}", "allow iam:Get* to check it"
            )
        return
    roles = answer.get("InstanceProfile", {}).get("Roles", True)
    if not roles:
        yield Finding(what, "FAIL", f"{kind} {name} has no role", "aws iam add-role-to-instance-profile")
    else:
        yield Finding(what, "OK", f"{kind} {name} exists")
