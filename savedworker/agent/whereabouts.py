"""What an agent is not told when it is started, it asks the metadata service of its instance."""

from __future__ import annotations

import os
from dataclasses import dataclass

from savedworker.fleet.aws.marks import LAUNCH, WORKER
from savedworker.fleet.aws.metadata import InstanceMetadata
from savedworker.model.errors import Refused, Temporary


@dataclass(frozen=True)
class Whereabouts:
    """Which launch this instance was made for, and what and where it is."""

    worker: str
    launch: str
    instance: str
    zone: str | None
    instance_type: str | None


def find(
    metadata: InstanceMetadata,
    worker: str | None = None,
    launch: str | None = None,
    instance: str | None = None,
    zone: str | None = None,
) -> Whereabouts:
    """Fill in what is None. Raises Refused when worker or launch are known to nobody, Temporary when nobody answers for them."""
    worker = worker or _tag(metadata, WORKER)
    launch = launch or _tag(metadata, LAUNCH)
    kind: str | None = None
    try:
        instance = instance or os.environ.get("AWS_BATCH_JOB_ID") or metadata.get("instance-id")
        zone = zone or metadata.get("placement/availability-zone")
        kind = metadata.get("instance-type")
    except Temporary:
        pass  # a job whose container cannot reach the service still runs, if without notices, and says so
    if not instance:
        raise Refused("this instance has no name", "give --instance")
    return Whereabouts(worker, launch, instance, zone, kind)


def _tag(metadata: InstanceMetadata, key: str) -> str:
    value = metadata.tag(key)
    if not value:
        raise Refused(
            f"this instance has no tag {key} that it may see",
            "have InstanceMetadataTags enabled, or give --worker and --launch",
        )
    return value
