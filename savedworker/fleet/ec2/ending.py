"""What EC2's states and state reasons mean: one table."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Literal

from savedworker.fleet.aws.marks import ENDED
from savedworker.model.decisions import InstanceView
from savedworker.model.record import Reason

Outcome = Literal["capacity", "failed", "gone"]

REASONS: dict[str, tuple[Outcome, str]] = {
    "Server.SpotInstanceTermination": ("gone", "EC2 reclaimed the spot instance"),
    "Server.SpotInstanceShutdown": ("gone", "EC2 reclaimed the spot instance"),
    "Server.ScheduledStop": ("gone", "EC2 retired the instance"),
    "Server.InsufficientInstanceCapacity": ("capacity", "EC2 had no capacity for it"),
    "Server.InternalError": ("failed", "EC2 could not start it (internal error)"),
    "Client.InternalError": (
        "failed",
        "EC2 could not start it (client error): most often the key of an encrypted volume may not be used",
    ),
    "Client.InvalidSnapshot.NotFound": ("failed", "the snapshot of its image is not there"),
    "Client.VolumeLimitExceeded": ("capacity", "the account's quota of volumes is used up"),
    "Client.InstanceInitiatedShutdown": ("gone", "it ended itself"),
    "Client.InstanceTerminated": ("gone", "it was ended while an image of it was made"),
    "Client.UserInitiatedHibernate": ("gone", "a person hibernated it"),
    "Client.UserInitiatedShutdown": ("gone", "it was ended with EC2's API"),
}
"""Code of the state reason: what became of the launch, and a plain message."""

BY_HAND = "Client.UserInitiatedShutdown"
_EXECUTES_NOTHING = ("terminated", "stopped")
"""An instance that is shutting down may still execute the worker for a moment: only these are an end."""


def view(instances: Sequence[Mapping[str, Any]], by_hand_cancels: bool) -> InstanceView:
    """What is known of one launch from its instances (nearly always one), as DescribeInstances tells of them."""
    if not instances:
        return InstanceView("unknown")
    order = {"running": 0, "pending": 1, "shutting-down": 2, "stopping": 2}
    best = min(instances, key=lambda x: order.get(_state(x), 3))
    state, instance = _state(best), str(best["InstanceId"])
    zone = best.get("Placement", {}).get("AvailabilityZone")
    if state == "pending":
        return InstanceView("pending", instance, zone)
    if state not in _EXECUTES_NOTHING:
        return InstanceView("running", instance, zone)
    code = str(best.get("StateReason", {}).get("Code", ""))
    outcome, words = REASONS.get(code, ("gone", f"it is {state}" + (f" ({code})" if code else "")))
    tags = {tag["Key"]: tag["Value"] for tag in best.get("Tags", ())}
    if ENDED in tags:
        return InstanceView("ended", instance, zone, "gone", tags[ENDED])
    if code == BY_HAND and by_hand_cancels:
        return InstanceView(
            "ended",
            instance,
            zone,
            "gone",
            f"whoever ended instance {instance} with EC2's API",
            Reason.CANCELLED,
        )
    return InstanceView("ended", instance, zone, outcome, words)


def _state(instance: Mapping[str, Any]) -> str:
    return str(instance.get("State", {}).get("Name", ""))
