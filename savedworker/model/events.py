"""What can happen to a worker. An event that an incarnation reports carries its fencing token."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from savedworker.model import defaults
from savedworker.model.base import Bytes, Frozen, Instant, Seconds
from savedworker.model.manifest import Cause
from savedworker.model.rates import Rates
from savedworker.model.record import EndReason, LaunchOutcome, Reason


class _Event(Frozen):
    at: Instant


class _Fenced(_Event):
    """Reported by the holder of the lease; ignored from anybody else."""

    incarnation: int
    holder: str


class LaunchRequested(_Event):
    """Written before the fleet is called, so that no launch is unknown."""

    kind: Literal["launch_requested"] = "launch_requested"
    launch: str
    avoid: tuple[str, ...] = ()
    choice: str | None = None
    spare_of: str | None = None
    """The id of the notice without a deadline at which a spare is launched."""
    detail: str = ""


class LaunchAccepted(_Event):
    """The fleet answered with an instance."""

    kind: Literal["launch_accepted"] = "launch_accepted"
    launch: str
    instance: str
    zone: str | None = None
    instance_type: str | None = None


class LaunchEnding(_Event):
    """The launch is not wanted any more. Written before its instance is ended, so that its agent cannot win the lease then."""

    kind: Literal["launch_ending"] = "launch_ending"
    launch: str
    outcome: LaunchOutcome
    detail: str = ""


class LaunchEnded(_Event):
    """The launch failed, or its instance is gone."""

    kind: Literal["launch_ended"] = "launch_ended"
    launch: str
    outcome: LaunchOutcome
    detail: str = ""


class LeaseTaken(_Event):
    """An agent won the lease: a new incarnation begins. It restores ``restore_from``, or starts from nothing."""

    kind: Literal["lease_taken"] = "lease_taken"
    incarnation: int
    holder: str
    launch: str
    instance: str
    zone: str | None = None
    instance_type: str | None = None
    restore_from: str | None = None
    term: Seconds = defaults.LEASE_TERM


class LeaseRenewed(_Fenced):
    kind: Literal["lease_renewed"] = "lease_renewed"


class Started(_Fenced):
    """The worker's own process runs: for the first time, or from nothing after ``why``."""

    kind: Literal["started"] = "started"
    why: str = ""
    seconds: Seconds = 0.0


class Restored(_Fenced):
    """The worker goes on from checkpoint ``number``."""

    kind: Literal["restored"] = "restored"
    number: str
    seconds: Seconds = 0.0
    detail: str = ""


class RestoreFailed(_Fenced):
    """Checkpoint ``number`` could not be restored. ``unusable`` when it is damaged as this instance reads it.

    Then no later try on this instance can succeed; what a second instance finds damaged as well is given up.
    """

    kind: Literal["restore_failed"] = "restore_failed"
    number: str
    detail: str
    unusable: bool = False


class NoticeReceived(_Fenced):
    kind: Literal["notice_received"] = "notice_received"
    id: str
    source: str
    seconds_left: Seconds | None = None
    detail: str = ""


class NoticeWithdrawn(_Fenced):
    kind: Literal["notice_withdrawn"] = "notice_withdrawn"
    id: str
    detail: str = ""


class CheckpointStarted(_Fenced):
    kind: Literal["checkpoint_started"] = "checkpoint_started"
    number: str
    cause: Cause


class CheckpointCommitted(_Fenced):
    """All of checkpoint ``number`` is in the store. ``answered`` requests are satisfied by it."""

    kind: Literal["checkpoint_committed"] = "checkpoint_committed"
    number: str
    cause: Cause
    frozen_at: Instant
    bytes_image: Bytes
    bytes_uploaded: Bytes
    seconds: Seconds = 0.0
    frozen_seconds: Seconds = 0.0
    answered: int = 0
    dropped: tuple[str, ...] = ()
    """Older checkpoints that the record no longer keeps."""
    digest: str = Field(default="", max_length=64)
    """BLAKE3 of its manifest, in hexadecimal digits."""
    rates: Rates | None = None
    """How fast checkpoints are on its instance, by what was measured there so far."""
    zstd_level: int | None = Field(default=None, ge=-100, le=22)
    """At which the last of its chunks were compressed."""
    bytes_as_is: Bytes = 0
    """Of its data, what was uploaded without compression, since it would not shrink."""
    detail: str = ""


class CheckpointFailed(_Fenced):
    kind: Literal["checkpoint_failed"] = "checkpoint_failed"
    number: str
    detail: str
    answered: int = 0


class ProtectionChanged(_Fenced):
    kind: Literal["protection_changed"] = "protection_changed"
    unprotected_reasons: tuple[str, ...]


class HandedOver(_Fenced):
    """The worker is dead here and its last checkpoint committed: the next taker need not wait."""

    kind: Literal["handed_over"] = "handed_over"
    number: str | None
    why: Literal["notice", "orphaned"] = "notice"
    detail: str = ""


class Yielded(_Fenced):
    """The incarnation ends without a new checkpoint (the checkpoint failed or time ran out): work is lost."""

    kind: Literal["yielded"] = "yielded"
    detail: str = ""


class Concluded(_Fenced):
    """The worker is about to tell its engine how it ends: written before that is passed on. It is never restored any more.

    ``outcome`` is the engine's word for it. A later one takes the place of one that the engine refused.
    """

    kind: Literal["concluded"] = "concluded"
    outcome: str = Field(max_length=100)


class Finished(_Fenced):
    """The worker's own process ended, or cannot be run at all (spec_error, internal, incompatible …)."""

    kind: Literal["finished"] = "finished"
    exit_code: int | None = None
    signal: int | None = None
    reason: Reason | None = None
    detail: str = ""


class LeaseReleased(_Fenced):
    """Bookkeeping after the end: nothing of the worker executes on that instance any more."""

    kind: Literal["lease_released"] = "lease_released"
    end_reason: EndReason
    detail: str = ""
    """Why it ended, where that is not told already."""


class InstanceLost(_Event):
    """The fleet says that the instance of ``incarnation`` is gone: it cannot execute any more."""

    kind: Literal["instance_lost"] = "instance_lost"
    incarnation: int
    detail: str = ""


class LeaseExpired(_Event):
    """Nobody renewed the lease for so long that the shim has killed the worker, on the observer's own clock.

    ``renewal`` is the counter that the observer saw all the time; a renewal in the meantime makes this void.
    """

    kind: Literal["lease_expired"] = "lease_expired"
    incarnation: int
    renewal: int
    detail: str = ""


class EngineHeard(_Event):
    """Somebody looks after the worker: an engine that follows it, or a controller. Not a line of its history."""

    kind: Literal["engine_heard"] = "engine_heard"


class CheckpointRequested(_Event):
    kind: Literal["checkpoint_requested"] = "checkpoint_requested"


class CancelRequested(_Event):
    kind: Literal["cancel_requested"] = "cancel_requested"
    by: str


class CheckpointsSetAside(_Event):
    """By policy no existing checkpoint is waited for any longer: the next taker starts from nothing."""

    kind: Literal["checkpoints_set_aside"] = "checkpoints_set_aside"
    detail: str


class GaveUp(_Event):
    """The controller ends the worker: no capacity, budget used up, crash loop, incompatible."""

    kind: Literal["gave_up"] = "gave_up"
    reason: Reason
    detail: str


class Noted(_Event):
    """Something that people should see in the history and that changes nothing."""

    kind: Literal["noted"] = "noted"
    event: str
    detail: str = ""
    seconds: Seconds | None = None


Event = Annotated[
    LaunchRequested
    | LaunchAccepted
    | LaunchEnding
    | LaunchEnded
    | LeaseTaken
    | LeaseRenewed
    | Started
    | Restored
    | RestoreFailed
    | NoticeReceived
    | NoticeWithdrawn
    | CheckpointStarted
    | CheckpointCommitted
    | CheckpointFailed
    | ProtectionChanged
    | HandedOver
    | Yielded
    | Concluded
    | Finished
    | LeaseReleased
    | InstanceLost
    | LeaseExpired
    | EngineHeard
    | CheckpointRequested
    | CancelRequested
    | CheckpointsSetAside
    | GaveUp
    | Noted,
    Field(discriminator="kind"),
]
