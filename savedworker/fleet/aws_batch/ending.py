"""What the states and reasons of a job mean: one table of AWS's texts, each told apart from the others."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from savedworker.model.decisions import InstanceView
from savedworker.model.record import Reason

Outcome = Literal["capacity", "failed", "gone"]
OURS = "savedworker: "
"""Begins the reason of every TerminateJob of ours; any other is a person's (or another program's)."""
DRILL = f"{OURS}drill: "

WAITING = ("SUBMITTED", "PENDING", "RUNNABLE")
"""States without a host. A job that is STARTING has one: fetching its image may take longer than anybody waits for capacity."""
ENDED = ("SUCCEEDED", "FAILED")


@dataclass(frozen=True)
class End:
    """What one kind of end means."""

    pattern: str
    """Of statusReason, or of the reason of the last attempt's container."""
    outcome: Outcome
    words: str
    final: Reason | None = None


ENDS = (
    End(r"Host EC2 \(instance .*\) terminated", "gone", "AWS took the host"),
    End(r"OutOfMemoryError", "failed", "the container used more memory than it was given", Reason.OOM),
    End(
        r"Job attempt duration exceeded timeout|attemptDurationSeconds",
        "gone",
        "the job's time limit passed",
        Reason.TIMEOUT,
    ),
    End(
        r"CannotPull|CannotPullContainerError|CannotInspectContainerError|ImageNotFound",
        "failed",
        "the image cannot be fetched: check image, and that execution_role or the hosts may fetch it",
    ),
    End(
        r"ResourceInitializationError|unable to pull secrets|AccessDeniedException",
        "failed",
        "the key or image could not be fetched: check execution_role",
    ),
    End(
        r"CannotCreateContainerError|CannotStartContainerError|ContainerRuntimeError|DockerTimeoutError|CannotCreateVolumeError",
        "failed",
        "the host could not start the container",
    ),
    End(r"MISCONFIGURATION:", "capacity", "no compute environment of the queue can run it"),
    End(r"CAPACITY:", "capacity", "no capacity"),
    End(r"Task failed to start|RESOURCE:", "failed", "the host could not start the task"),
)
"""In order: the first that matches counts. A job's end by exit status or TerminateJob is told by other members."""


def view(jobs: Sequence[Mapping[str, Any]], by_hand_cancels: bool) -> InstanceView:
    """What is known of one launch from its jobs (nearly always one), as DescribeJobs tells of them.

    Two controllers may have submitted it at the same time: the one that was first counts, as its agent is the one that can begin.
    """
    if not jobs:
        return InstanceView("unknown")
    order = {"RUNNING": 0, "STARTING": 1}
    best = min(
        jobs,
        key=lambda x: (
            x["status"] in ENDED,
            order.get(x["status"], 2),
            int(x.get("createdAt", 0)),
            str(x["jobId"]),
        ),
    )
    status, job = str(best["status"]), str(best["jobId"])
    reason = _plain(best.get("statusReason"))
    if status in ("RUNNING", "STARTING"):
        return InstanceView("running", job)
    if status in WAITING:
        return InstanceView("pending", job, detail=f"{status}: {reason}" if reason else status)
    if status not in ENDED:
        return InstanceView("running", job, detail=f"unknown status {status}")
    return _ended(best, job, reason, by_hand_cancels)


def _ended(job: Mapping[str, Any], name: str, reason: str, by_hand_cancels: bool) -> InstanceView:
    container = _last_container(job)
    inner = _plain(container.get("reason"))
    code = container.get("exitCode")
    if reason.startswith(DRILL):
        return InstanceView("ended", name, outcome="gone", detail=reason.removeprefix(DRILL))
    if reason.startswith(OURS):
        return InstanceView("ended", name, outcome="gone", detail=reason.removeprefix(OURS))
    for end in ENDS:
        if re.search(end.pattern, inner) or re.search(end.pattern, reason):
            shown = inner if re.search(end.pattern, inner) else reason
            return InstanceView(
                "ended", name, outcome=end.outcome, detail=f"{end.words} ({shown})", final=end.final
            )
    # Batch may set these also for what it ends itself: its own reasons are known by now.
    if (job.get("isTerminated") or job.get("isCancelled")) and by_hand_cancels:
        return InstanceView(
            "ended",
            name,
            outcome="gone",
            detail=f"whoever ended job {name} with AWS Batch" + (f" ({reason})" if reason else ""),
            final=Reason.CANCELLED,
        )
    if job["status"] == "SUCCEEDED" or code == 0:
        return InstanceView("ended", name, outcome="gone", detail="its agent ended itself")
    if code is not None:
        return InstanceView(
            "ended",
            name,
            outcome="failed",
            detail=f"its agent ended with exit status {code}: see the job's log",
        )
    return InstanceView(
        "ended", name, outcome="failed", detail=reason or inner or "AWS Batch gives no reason"
    )


def _last_container(job: Mapping[str, Any]) -> Mapping[str, Any]:
    attempts = job.get("attempts") or ()
    last: Mapping[str, Any] = attempts[-1].get("container", {}) if attempts else {}
    return {**(job.get("container") or {}), **last}


def _plain(text: Any) -> str:
    return " ".join(str(text or "").split())
