"""The launch template of a fleet: CreateFleet takes no other. Named after its content, made once, never changed."""

from __future__ import annotations

import base64
import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from savedworker.fleet.aws.marks import FLEET, STORE, digest, store_mark
from savedworker.fleet.aws.session import Aws, code_of
from savedworker.fleet.ec2.settings import Ec2Settings
from savedworker.model.errors import Refused, SavedWorkerError

_ID = re.compile(r"lt-[0-9a-f]+")
UNUSED_AFTER = 86400.0
"""Seconds after its making in which a template that these settings do not name may be another controller's, which has other ones."""


def template_data(
    settings: Ec2Settings, user_data: str, base: Mapping[str, Any] | None = None
) -> dict[str, Any]:
    """The content: ``base`` (the user's own template) with what the settings and the product say over it."""
    data: dict[str, Any] = {
        k: v for k, v in (base or {}).items() if k not in ("InstanceType", "InstanceRequirements")
    }
    if settings.image:
        data["ImageId"] = settings.image
    if not data.get("ImageId"):
        raise Refused("the launch template names no image", "set image of the fleet")
    if settings.instance_profile:
        kind = "Arn" if settings.instance_profile.startswith("arn:") else "Name"
        data["IamInstanceProfile"] = {kind: settings.instance_profile}
    if settings.security_groups:
        data["SecurityGroupIds"] = list(settings.security_groups)
    if settings.key_name:
        data["KeyName"] = settings.key_name
    if settings.volume_size is not None:
        others = [
            x for x in data.get("BlockDeviceMappings", ()) if x.get("DeviceName") != settings.volume_device
        ]
        disk = {
            "VolumeSize": settings.volume_size,
            "VolumeType": "gp3",
            "Encrypted": True,
            "DeleteOnTermination": True,
        }
        data["BlockDeviceMappings"] = [*others, {"DeviceName": settings.volume_device, "Ebs": disk}]
    data["UserData"] = base64.b64encode(user_data.encode()).decode()
    data["InstanceInitiatedShutdownBehavior"] = "terminate"
    data["MetadataOptions"] = {
        "HttpEndpoint": "enabled",
        "HttpTokens": "required",
        "HttpPutResponseHopLimit": settings.hop_limit,
        "InstanceMetadataTags": "enabled",
    }
    data.pop("InstanceMarketOptions", None)  # the market is CreateFleet's to say
    return data


def template_name(fleet: str, data: Mapping[str, Any]) -> str:
    """Equal for equal content."""
    return f"savedworker-{fleet}-{digest(data)}"


def ensure(aws: Aws, fleet: str, store_url: str, data: Mapping[str, Any], tags: Mapping[str, str]) -> str:
    """The name of the template with that content, made if it is not there."""
    name = template_name(fleet, data)
    try:
        aws.call(
            "ec2",
            "create_launch_template",
            "making the launch template",
            LaunchTemplateName=name,
            LaunchTemplateData=dict(data),
            TagSpecifications=tag_specifications(fleet, store_url, tags),
        )
    except SavedWorkerError as error:
        if "AlreadyExists" not in code_of(error.__cause__ or error):
            raise
    return name


def tag_specifications(fleet: str, store_url: str, tags: Mapping[str, str]) -> list[dict[str, Any]]:
    """The tags of a template: whose it is."""
    own = {**tags, FLEET: fleet, STORE: store_mark(store_url)}
    listed = [{"Key": key, "Value": value} for key, value in sorted(own.items())]
    return [{"ResourceType": "launch-template", "Tags": listed}]


@dataclass(frozen=True)
class Unused:
    """A template that no launch will ask for any more."""

    id: str
    name: str


def unused(aws: Aws, fleet: str, store_url: str, current: Collection[str], now: datetime) -> list[Unused]:
    """The templates of ``fleet`` for that store that are not among the ``current`` names, and older than a day."""
    ours = [
        {"Name": f"tag:{FLEET}", "Values": [fleet]},
        {"Name": f"tag:{STORE}", "Values": [store_mark(store_url)]},
    ]
    found = aws.pages(
        "ec2", "describe_launch_templates", "looking for launch templates", "LaunchTemplates", Filters=ours
    )
    return [
        Unused(str(x["LaunchTemplateId"]), str(x["LaunchTemplateName"]))
        for x in found
        if x["LaunchTemplateName"] not in current and (now - x["CreateTime"]).total_seconds() > UNUSED_AFTER
    ]


def delete(aws: Aws, template: Unused) -> None:
    """Delete it, if it is there. Instances that were made from it are not touched."""
    try:
        aws.call("ec2", "delete_launch_template", "deleting a launch template", LaunchTemplateId=template.id)
    except SavedWorkerError as error:
        if not code_of(error.__cause__ or error).startswith("InvalidLaunchTemplate"):
            raise


def users_own(aws: Aws, reference: str) -> dict[str, Any]:
    """The content of the user's template ``NAME_OR_ID[:VERSION]``, in the form in which it can be given again."""
    name, _, version = reference.partition(":")
    which = {"LaunchTemplateId" if _ID.fullmatch(name) else "LaunchTemplateName": name}
    answer = aws.call(
        "ec2",
        "describe_launch_template_versions",
        "reading the launch template",
        Versions=[version or "$Default"],
        **which,
    )
    versions = answer.get("LaunchTemplateVersions", ())
    if not versions:
        raise Refused(f"launch template {reference} has no such version", "correct launch_template")
    shape = aws.client("ec2").meta.service_model.shape_for("RequestLaunchTemplateData")
    kept: dict[str, Any] = _as_request(versions[0]["LaunchTemplateData"], shape)
    return kept


def _as_request(value: Any, shape: Any) -> Any:
    """What AWS answers has members that it does not take."""
    if shape.type_name == "structure":
        return {
            name: _as_request(value[name], member)
            for name, member in shape.members.items()
            if name in value and value[name] not in (None, [], {})
        }
    if shape.type_name == "list":
        return [_as_request(each, shape.member) for each in value]
    return value
