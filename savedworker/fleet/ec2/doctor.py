"""What ``savedworker doctor`` says of an EC2 fleet. Asks and dry-runs only: nothing is made."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

from savedworker.fleet.aws import doctor as shared
from savedworker.fleet.aws.session import Aws
from savedworker.fleet.base import LaunchRequest
from savedworker.fleet.ec2 import template
from savedworker.fleet.ec2.settings import Ec2Settings
from savedworker.fleet.ec2.user_data import render
from savedworker.fleet.finding import Finding
from savedworker.model.errors import SavedWorkerError
from savedworker.model.spec import WorkerSpec

if TYPE_CHECKING:
    from savedworker.fleet.ec2.fleet import Ec2Fleet


def diagnose(fleet: Ec2Fleet, store_url: str) -> Iterator[Finding]:
    """All findings."""
    aws, settings = fleet.aws, fleet.settings
    who = list(shared.guarded("credentials", lambda: shared.credentials(aws)))
    yield from who
    if who[-1].level == "FAIL":
        return  # everything else would fail of the same
    yield from shared.guarded("permissions", lambda: _permissions(fleet, store_url))
    yield from shared.guarded("types", lambda: _types(fleet))
    yield from shared.guarded("image", lambda: _image(aws, settings))
    yield from shared.guarded("security groups", lambda: _groups(aws, settings))
    if settings.instance_profile:
        yield from shared.role(aws, "instance_profile", settings.instance_profile, "instance profile")
    elif not settings.launch_template:
        yield Finding(
            "instance_profile",
            "FAIL",
            "instances would have no role: they could not reach the store",
            "create one (docs/aws.md) and set instance_profile",
        )
    yield from shared.guarded("user data", lambda: _user_data(fleet, store_url))
    yield from shared.guarded("metadata", lambda: _metadata(aws, settings))
    yield from shared.guarded("bucket", lambda: shared.bucket(aws, store_url))


def _permissions(fleet: Ec2Fleet, store_url: str) -> Iterator[Finding]:
    """What a launch will ask for, with the tags on which the policy insists."""
    aws, request = fleet.aws, _request(store_url)
    try:
        pools = fleet.suitable(request).pools[:1]
        asked = fleet.create_fleet_request(request, pools, 0, "savedworker-doctor")
        data = fleet.template_data(request)
    except SavedWorkerError as error:
        yield Finding("permissions", "WARN", f"not tried: {error.message}", error.fix or "correct that first")
        return
    yield from shared.dry_run(aws, "create_fleet", "ec2:CreateFleet", **asked)
    yield from shared.dry_run(
        aws,
        "create_launch_template",
        "ec2:CreateLaunchTemplate",
        LaunchTemplateName="savedworker-doctor",
        LaunchTemplateData=data,
        TagSpecifications=template.tag_specifications(fleet.name, store_url, fleet.settings.tags),
    )
    yield from shared.dry_run(
        aws,
        "run_instances",
        "ec2:RunInstances, with ec2:CreateTags and iam:PassRole,",
        MinCount=1,
        MaxCount=1,
        InstanceType=pools[0].type,
        TagSpecifications=[x for x in asked["TagSpecifications"] if x["ResourceType"] == "instance"],
        **{x: data[x] for x in ("ImageId", "IamInstanceProfile", "SecurityGroupIds", "KeyName") if x in data},
        **_in_a_subnet(asked, data),
    )
    yield from shared.dry_run(aws, "describe_instances", "ec2:DescribeInstances")
    yield Finding(
        "permissions",
        "OK",
        "ec2:TerminateInstances and ec2:DeleteLaunchTemplate have no dry run without something to end: not tried",
    )


def _in_a_subnet(asked: Mapping[str, Any], data: Mapping[str, Any]) -> dict[str, str]:
    """Not together with network interfaces of a template, which say it themselves."""
    if data.get("NetworkInterfaces"):
        return {}
    return {"SubnetId": asked["LaunchTemplateConfigs"][0]["Overrides"][0]["SubnetId"]}


def _request(store_url: str) -> LaunchRequest:
    """A launch of a worker that asks for nothing."""
    return LaunchRequest("l-doctor", "doctor", store_url, WorkerSpec(id="doctor", command=("true",)))


def _types(fleet: Ec2Fleet) -> Iterator[Finding]:
    types, offered, zones = fleet.catalog()
    here = sorted(
        {kind.name for kind in types if any((kind.name, zone) in offered for zone in zones.values())}
    )
    if not here:
        yield Finding(
            "types",
            "FAIL",
            f"none of {', '.join(fleet.settings.instance_types)} is offered in {', '.join(sorted(set(zones.values())))}",
            "list other instance_types or subnets",
        )
        return
    several = len(set(zones.values())) > 1
    shown = ", ".join(here[:6]) + (f" and {len(here) - 6} more" if len(here) > 6 else "")
    detail = f"{shown} in {', '.join(sorted(set(zones.values())))}"
    if several and len(here) > 1:
        yield Finding("types", "OK", detail)
    else:
        yield Finding(
            "types",
            "WARN",
            f"{detail}: there is nowhere else to go after a reclaim",
            "list several instance_types, and subnets in several zones",
        )


def _image(aws: Aws, settings: Ec2Settings) -> Iterator[Finding]:
    if settings.image is None or settings.image.startswith("resolve:ssm:"):
        yield Finding(
            "image",
            "OK",
            f"{settings.image or settings.launch_template}: resolved at the launch, not looked at",
        )
        return
    images = aws.call("ec2", "describe_images", "looking at the image", ImageIds=[settings.image]).get(
        "Images", ()
    )
    if not images:
        yield Finding(
            "image", "FAIL", f"there is no image {settings.image} here", "correct image, or the region"
        )
        return
    found = images[0]
    if found.get("Architecture") not in (None, settings.architecture):
        yield Finding(
            "image",
            "FAIL",
            f"{settings.image} is for {found['Architecture']}, and the fleet is for {settings.architecture}",
            "correct image or architecture",
        )
        return
    yield Finding("image", "OK", f"{settings.image}: {found.get('Name') or 'it exists'}")
    device = found.get("RootDeviceName")
    if settings.volume_size is not None and device and device != settings.volume_device:
        yield Finding(
            "image",
            "FAIL",
            f"its root device is {device}, and volume_size is for {settings.volume_device}",
            f"set volume_device: {device}",
        )


def _groups(aws: Aws, settings: Ec2Settings) -> Iterator[Finding]:
    if not settings.security_groups:
        yield Finding("security groups", "OK", "the default one of the network")
        return
    listed = list(settings.security_groups)
    aws.call("ec2", "describe_security_groups", "looking at security groups", GroupIds=listed)
    yield Finding("security groups", "OK", ", ".join(listed))


def _user_data(fleet: Ec2Fleet, store_url: str) -> Iterator[Finding]:
    size = len(render(fleet.boot(_request(store_url))).encode())
    source = fleet.settings.bundle or f"{fleet.settings.agent} of the image"
    yield Finding("user data", "OK", f"{size} bytes, no secrets; the agent is {source}")
    if fleet.settings.bundle and not fleet.settings.bundle_sha256:
        yield Finding(
            "user data",
            "WARN",
            f"whoever can write to {fleet.settings.bundle} decides what instances execute",
            "set bundle_sha256",
        )


def _metadata(aws: Aws, settings: Ec2Settings) -> Iterator[Finding]:
    """The hop limit and tags that instances get: ours, whatever the user's template says."""
    if settings.launch_template:
        theirs = template.users_own(aws, settings.launch_template).get("MetadataOptions", {})
        if theirs.get("HttpEndpoint") == "disabled":
            yield Finding(
                "metadata",
                "WARN",
                "your template turns the metadata service off; it is turned on, notices come by it",
            )
    detail = f"version 2 required, tags visible, hop limit {settings.hop_limit}"
    if settings.hop_limit > 1:
        yield Finding(
            "metadata",
            "WARN",
            f"{detail}: workers can reach it, and with it the instance's whole role",
            "set hop_limit: 1; workers get credentials from the agent",
        )
    else:
        yield Finding("metadata", "OK", detail)
