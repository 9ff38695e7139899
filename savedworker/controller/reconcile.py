"""reconcile(worker): look, decide, act. Idempotent; may run anywhere, any number of times at once.

A launch is written to the record before the fleet is called, and its id is the fleet's client token, so a controller
that dies between the two leaves a launch that the next one finds and repeats without harm.
"""

from __future__ import annotations

import logging
import time
import uuid
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import UTC, datetime

from savedworker.crashpoints import crash_point
from savedworker.fleet.base import Chooses, Fleet, LaunchRequest, NoCapacity, get_fleet
from savedworker.model import defaults
from savedworker.model import events as ev
from savedworker.model.decisions import (
    CallFleet,
    InstanceView,
    Observations,
    Record,
    RequestLaunch,
    Terminate,
    choose_checkpoint,
    decide,
    settled,
)
from savedworker.model.errors import Conflict, Corrupt, NoKey, NotFound, Refused, Temporary
from savedworker.model.fingerprint import Fingerprint
from savedworker.model.placement import Choice, fit
from savedworker.model.record import CheckpointEntry, Launch, WorkerRecord
from savedworker.model.spec import WorkerSpec
from savedworker.store.backend import Store
from savedworker.store.worker import Held, WorkerStore

log = logging.getLogger(__name__)

ROUNDS = 8
"""Decisions in a row within one reconcile: each follows from the record that the one before wrote."""


@dataclass
class _Watch:
    """What this controller remembers of a worker between calls: only clocks, nothing that another could not rebuild."""

    since: float
    lease_seen: tuple[int, str, int] | None = None
    lease_since: float = 0.0
    running: dict[str, float] = field(default_factory=dict)
    """Since when each launch's instance has been seen running."""


class Controller:
    """Brings workers on. Holds no state that matters: any number of controllers may work on the same workers."""

    def __init__(
        self,
        store: Store,
        fleets: Callable[[str], Fleet] = get_fleet,
        clock: Callable[[], float] = time.monotonic,
        now: Callable[[], datetime] = lambda: datetime.now(UTC),
    ) -> None:
        self.store = store
        self._fleets = fleets
        self._known_fleets: dict[str, Fleet] = {}
        self._clock = clock
        self._now = now
        self._watches: dict[str, _Watch] = {}
        self._specs: dict[str, WorkerSpec] = {}

    def fleet(self, name: str) -> Fleet:
        """The fleet of that name. Raises Refused."""
        if name not in self._known_fleets:
            self._known_fleets[name] = self._fleets(name)
        return self._known_fleets[name]

    def spec(self, worker: str) -> WorkerSpec:
        """The worker's spec (immutable, so read once). Raises NotFound."""
        if worker not in self._specs:
            self._specs[worker] = WorkerStore(self.store, worker).load_spec()
        return self._specs[worker]

    def reconcile(self, worker: str) -> WorkerRecord:
        """Do what is needed now for ``worker`` and return its record. Raises NotFound, Unreachable, Refused.

        A worker that must not be executed here (see ``WorkerStore.refuse_plain``) gets no instance: all else is done, then it raises.
        """
        documents = WorkerStore(self.store, worker)
        held = documents.load_record()
        try:
            spec = self.spec(worker)
        except NoKey:
            if not held.record.state.terminal:
                raise
            spec = _stand_in(held.record)
        refused: Refused | None = None
        for _ in range(ROUNDS):
            watch = self._watch(held.record)
            if settled(held.record):
                self._watches.pop(worker, None)
                self._specs.pop(worker, None)
                break
            actions = decide(held.record, spec, self._observe(held.record, spec, watch), self._now())
            before = held.record
            for action in actions:
                if isinstance(action, Record) and action.only_now and held.record != before:
                    continue  # the next round looks whether it is still to be done
                if isinstance(action, RequestLaunch | CallFleet):
                    try:
                        documents.refuse_plain()
                    except Refused as error:
                        refused = error
                        continue
                held = self._act(documents, spec, held, action)
            if held.record == before:
                break
        if refused is not None:
            raise refused
        return held.record

    def _watch(self, record: WorkerRecord) -> _Watch:
        now = self._clock()
        watch = self._watches.setdefault(record.id, _Watch(since=now))
        lease = record.lease
        seen = (lease.incarnation, lease.holder, lease.renewal) if lease else None
        if seen != watch.lease_seen:
            watch.lease_seen, watch.lease_since = seen, now
        return watch

    def _observe(self, record: WorkerRecord, spec: WorkerSpec, watch: _Watch) -> Observations:
        now = self._clock()
        open_launches = [x.id for x in record.launches if x.state != "ended"]
        instances: dict[str, InstanceView] = {}
        if open_launches:
            try:
                instances = dict(self.fleet(record.fleet).describe(open_launches))
                runs = [x for x, view in instances.items() if view.state == "running"]
                watch.running = {x: watch.running.get(x, now) for x in runs}
            except Temporary as error:
                log.warning("fleet %s does not answer, going by the last record: %s", record.fleet, error)
                instances = {x: InstanceView("pending") for x in open_launches}
        silent = now - watch.lease_since if record.lease_held else 0.0
        running = {x: now - since for x, since in watch.running.items()}
        return Observations(instances, silent, now - watch.since, self._choices(record, spec), running)

    def _choices(self, record: WorkerRecord, spec: WorkerSpec) -> tuple[Choice, ...]:
        if record.state.terminal:
            return ()
        fleet: object = self.fleet(record.fleet)
        return tuple(fleet.choices(spec)) if isinstance(fleet, Chooses) else ()

    def _record(self, documents: WorkerStore, event: ev.Event) -> Held:
        return documents.record_event(event)

    def _record_now(self, documents: WorkerStore, held: Held, event: ev.Event) -> Held:
        """Write ``event`` on the very record that was looked at, or read what that has become meanwhile."""
        try:
            return documents.swap_event(held, event)
        except Conflict:
            return documents.load_record()

    def _act(
        self,
        documents: WorkerStore,
        spec: WorkerSpec,
        held: Held,
        action: Record | RequestLaunch | CallFleet | Terminate,
    ) -> Held:
        match action:
            case Record(event, only_now):
                if only_now:
                    return self._record_now(documents, held, event)
                return self._record(documents, event)
            case RequestLaunch():
                return self._request_launch(documents, spec, held, action)
            case CallFleet(launch):
                return self._call_fleet(documents, spec, held.record, launch)
            case Terminate(launch, why):
                return self._terminate(documents, held, launch, why)

    def _request_launch(
        self, documents: WorkerStore, spec: WorkerSpec, held: Held, wanted: RequestLaunch
    ) -> Held:
        launch = Launch(
            id=f"l-{uuid.uuid4().hex[:16]}",
            requested_at=self._now(),
            avoid=wanted.avoid,
            choice=wanted.choice,
            spare_of=wanted.spare_of,
        )
        event = ev.LaunchRequested(
            at=launch.requested_at,
            launch=launch.id,
            avoid=launch.avoid,
            choice=launch.choice,
            spare_of=launch.spare_of,
            detail=wanted.why,
        )
        # Only on the very record that the decision was made from: of two controllers one launches.
        held = self._record_now(documents, held, event)
        if held.record.launch(launch.id) is None:
            return held
        crash_point("controller.launch.recorded")
        return self._call_fleet(documents, spec, held.record, launch)

    def _call_fleet(
        self, documents: WorkerStore, spec: WorkerSpec, record: WorkerRecord, launch: Launch
    ) -> Held:
        fleet = self.fleet(spec.fleet)
        checkpoint = choose_checkpoint(record, spec) if isinstance(fleet, Chooses) else None
        fingerprint = _fingerprint(documents, checkpoint) if checkpoint is not None else None
        request = LaunchRequest(
            launch=launch.id,
            worker=spec.id,
            store_url=self.store.url,
            spec=spec,
            avoid=launch.avoid,
            choice=launch.choice,
            fit=fit(record, fingerprint, checkpoint.number if checkpoint else None),
            environment=self.store.sealing.environment(),
        )
        try:
            answer = fleet.launch(request)
        except NoCapacity as error:
            return self._record(
                documents,
                ev.LaunchEnded(at=self._now(), launch=launch.id, outcome="capacity", detail=str(error)),
            )
        except Refused as error:
            return self._record(
                documents,
                ev.LaunchEnded(at=self._now(), launch=launch.id, outcome="failed", detail=str(error)),
            )
        except Temporary as error:
            log.warning("launch %s of %s: %s; it is tried again", launch.id, spec.id, error)
            return documents.load_record()
        crash_point("controller.launch.called")
        return self._record(
            documents,
            ev.LaunchAccepted(
                at=self._now(),
                launch=launch.id,
                instance=answer.instance,
                zone=answer.zone,
                instance_type=answer.instance_type,
            ),
        )

    def _terminate(self, documents: WorkerStore, held: Held, launch: Launch, why: str) -> Held:
        crash_point("controller.terminate.before")
        try:
            self.fleet(held.record.fleet).terminate(launch.id)
        except Temporary as error:
            log.warning("launch %s could not be ended yet: %s", launch.id, error)
            return held
        crash_point("controller.terminate.after")
        if held.record.lease_held and held.record.lease and held.record.lease.launch == launch.id:
            held = self._record(
                documents,
                ev.InstanceLost(at=self._now(), incarnation=held.record.lease.incarnation, detail=why),
            )
        return self._record(
            documents, ev.LaunchEnded(at=self._now(), launch=launch.id, outcome="surplus", detail=why)
        )


def _fingerprint(documents: WorkerStore, checkpoint: CheckpointEntry) -> Fingerprint | None:
    """What ``checkpoint`` needs; None when its manifest cannot be read (agents find and report that)."""
    try:
        return documents.load_manifest(checkpoint.number, checkpoint.digest).fingerprint
    except (Corrupt, NotFound, Refused) as error:
        log.warning("the manifest of checkpoint %s of %s: %s", checkpoint.number, documents.id, error)
        return None


def _stand_in(record: WorkerRecord) -> WorkerSpec:
    """For a worker that has ended and whose spec cannot be opened here: enough to end its instances."""
    term = record.lease.term if record.lease else defaults.LEASE_TERM
    return WorkerSpec(id=record.id, command=("unknown",), fleet=record.fleet, lease_term=term)
