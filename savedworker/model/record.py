"""WorkerRecord: everything that is known about a worker besides its spec. Changed only by compare-and-swap."""

from __future__ import annotations

from enum import StrEnum
from typing import Literal

from pydantic import Field

from savedworker.model import defaults
from savedworker.model.base import Bytes, Count, Document, Frozen, Instant, Seconds
from savedworker.model.manifest import CheckpointNumber
from savedworker.model.rates import Rates


class State(StrEnum):
    """Where a worker is in its life."""

    PENDING = "pending"
    STARTING = "starting"
    RUNNING = "running"
    CHECKPOINTING = "checkpointing"
    MIGRATING = "migrating"
    RESTORING = "restoring"
    SUCCEEDED = "succeeded"
    FAILED = "failed"
    CANCELLED = "cancelled"

    @property
    def terminal(self) -> bool:
        """True when the worker has ended for good."""
        return self in (State.SUCCEEDED, State.FAILED, State.CANCELLED)


class Reason(StrEnum):
    """Why a worker failed or was cancelled."""

    EXIT = "exit"
    SIGNAL = "signal"
    OOM = "oom"
    NO_CAPACITY = "no_capacity"
    CANCELLED = "cancelled"
    INCOMPATIBLE = "incompatible"
    CRASH_LOOP = "crash_loop"
    MIGRATION_BUDGET = "migration_budget"
    LOST = "lost"
    TIMEOUT = "timeout"
    SPEC_ERROR = "spec_error"
    INTERNAL = "internal"

    @property
    def by_user_process(self) -> bool:
        """True when the worker's own process ended by itself, so that its exit code is the answer."""
        return self in (Reason.EXIT, Reason.SIGNAL, Reason.OOM)


LaunchOutcome = Literal["used", "surplus", "capacity", "incompatible", "failed", "gone"]
"""What became of a launch: its agent won the lease; it was not needed; no instance could be had; the instance did not
fit the checkpoint; the request or boot failed; the instance vanished before its agent won the lease."""

EndReason = Literal["notice", "no_notice", "orphaned", "finished", "failed", "cancelled"]


class Lease(Frozen):
    """The right to execute the worker. ``incarnation`` is the fencing token, ``holder`` the agent's nonce."""

    incarnation: int = Field(ge=1, lt=1 << 63)
    holder: str
    launch: str
    term: Seconds = defaults.LEASE_TERM
    renewal: Count = 0
    renewed_at: Instant
    """The holder's wall clock at its last renewal: for reports, never for deciding."""
    released: bool = False


class Incarnation(Frozen):
    """One stretch of the worker's life on one instance."""

    number: int = Field(ge=1, lt=1 << 63)
    launch: str
    instance: str
    zone: str | None = None
    taken_at: Instant
    started_at: Instant | None = None
    """When the worker's processes ran here; null while starting or restoring."""
    stopped_at: Instant | None = None
    """When the worker stopped executing here: the last freeze, or, without notice, the latest moment at which it can have."""
    ended_at: Instant | None = None
    end_reason: EndReason | None = None
    restore_from: CheckpointNumber | None = None
    """The checkpoint that it set out to restore when it took the lease."""
    restored_from: CheckpointNumber | None = None
    """The checkpoint that the worker went on from here."""
    restores_failed: Count = 0
    """Restores that failed on this instance."""
    lost_seconds: Seconds = 0.0
    """Work of this incarnation that is done again by the next one; after a loss without notice, at most so much."""
    away_seconds: Seconds = 0.0
    """Time between the freeze (or loss) before this incarnation and its start."""
    progressed: bool = False


class Launch(Frozen):
    """One request for an instance."""

    id: str
    requested_at: Instant
    avoid: tuple[str, ...] = ()
    choice: str | None = None
    """What its fleet was asked for by name, where a fleet offers several things: a market, a queue."""
    spare_of: str | None = None
    """The notice without a deadline at which it was launched: a spare, that waits for a while whether it is needed."""
    state: Literal["requested", "accepted", "ending", "ended"] = "requested"
    """``ending``: not wanted any more. Its agent must not take the lease, and its instance is being ended."""
    instance: str | None = None
    zone: str | None = None
    instance_type: str | None = None
    """Of its instance, where there are types."""
    outcome: LaunchOutcome | None = None
    detail: str = ""


class DamageSeen(Frozen):
    """What one instance found when it read a checkpoint that may be whole: its own reads may be what is damaged."""

    incarnation: int = Field(ge=1, lt=1 << 63)
    instance: str
    detail: str


class CheckpointEntry(Frozen):
    """A committed checkpoint, as the record knows it."""

    number: CheckpointNumber
    frozen_at: Instant
    """The holder's wall clock at the freeze: the state of the worker at this moment is what was saved."""
    committed_at: Instant
    bytes_image: Bytes
    bytes_uploaded: Bytes
    digest: str = Field(default="", max_length=64)
    """Of its manifest, in hexadecimal digits; empty for one that an older version took."""
    failed_restores: Count = 0
    unusable: str | None = None
    """Why this checkpoint cannot be used, once that is known."""
    damage_seen: DamageSeen | None = None
    """Set while one instance only has found it damaged: it is used after all others, and elsewhere."""

    @property
    def sound(self) -> bool:
        """True while nobody has found anything wrong with what is stored of it."""
        return self.unusable is None and self.damage_seen is None


class ActiveNotice(Frozen):
    """A warning about the present instance that has not been withdrawn."""

    id: str
    source: str
    received_at: Instant
    seconds_left: Seconds | None = None


class Conclusion(Frozen):
    """What the worker told its engine about its end, or was about to tell: a worker past this is never restored."""

    at: Instant
    outcome: str = Field(max_length=100)


class Cancel(Frozen):
    """Somebody wants this worker to end."""

    at: Instant
    by: str


class EventSummary(Frozen):
    """One line of the worker's history."""

    number: Count
    incarnation: Count
    at: Instant
    event: str
    seconds: Seconds | None = None
    detail: str = ""


class WorkerRecord(Document):
    """The durable state of one worker. ``revision`` and ``writer`` change with every write."""

    id: str
    revision: Count = 0
    writer: str = ""
    created_at: Instant
    state: State = State.PENDING
    reason: Reason | None = None
    detail: str = ""
    exit_code: int | None = Field(default=None, ge=0, le=1023)
    signal: int | None = Field(default=None, ge=0, le=255)
    after_restore: bool = False
    ended_at: Instant | None = None
    cancel: Cancel | None = None
    concluded: Conclusion | None = None
    fleet: str = "local"
    lease: Lease | None = None
    incarnations: tuple[Incarnation, ...] = ()
    launches: tuple[Launch, ...] = ()
    checkpoints: tuple[CheckpointEntry, ...] = ()
    """Usable and known-bad ones that are kept, oldest first."""
    notice: ActiveNotice | None = None
    engine_heard_at: Instant | None = None
    """When an engine last looked after the worker, written now and then: agents only look whether it changes."""
    checkpoint_under_way: CheckpointNumber | None = None
    """The checkpoint that the holder of the lease has begun."""
    checkpoint_requests: Count = 0
    """How many times somebody asked for a checkpoint now; the agent answers up to ``checkpoint_answered``."""
    checkpoint_answered: Count = 0
    protected: bool = False
    unprotected_reasons: tuple[str, ...] = ("not started yet",)
    rates: Rates | None = None
    """How fast its checkpoints were on the instance that measured them last."""
    migrations: Count = 0
    cold_starts: Count = 0
    events: Count = 0
    """Number of the last event."""
    recent: tuple[EventSummary, ...] = ()
    """The last events, so that none is missing when a writer dies between the record and the event's own object."""

    @property
    def incarnation(self) -> Incarnation | None:
        """The newest incarnation."""
        return self.incarnations[-1] if self.incarnations else None

    @property
    def lease_held(self) -> bool:
        """True while an incarnation may be executing."""
        return self.lease is not None and not self.lease.released

    @property
    def moves(self) -> int:
        """Times the worker went on or began again on another instance, against ``max_migrations``."""
        return self.migrations + self.cold_starts

    @property
    def last_checkpoint(self) -> CheckpointEntry | None:
        """The newest sound checkpoint; where there is none, the newest one that may be restored yet."""
        usable = sorted((x for x in self.checkpoints if x.unusable is None), key=lambda x: x.sound)
        return usable[-1] if usable else None

    def launch(self, launch_id: str) -> Launch | None:
        """The launch of that id."""
        return next((x for x in self.launches if x.id == launch_id), None)
