"""One stretch of the worker's life on this instance: begin, keep, leave.

One thread decides: everything that happens (a notice, the worker's end, a cancel, a timer, a lost lease) arrives in one queue
and is dealt with in order. A checkpoint runs on that thread; while it does, ``_still_wanted`` looks at what has arrived.
"""

from __future__ import annotations

import contextlib
import logging
import os
import queue
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from functools import partial
from typing import Any, Literal, TypeVar

from savedworker.agent import attachment, inputs, outputs
from savedworker.agent.config import AgentConfig
from savedworker.agent.engine_watch import EngineWatch
from savedworker.agent.exits import ending
from savedworker.agent.inner.credentials import CredentialsService
from savedworker.agent.inner.dns import DnsForwarder
from savedworker.agent.inner.services import InnerServices, Service
from savedworker.agent.inner.sources import sources
from savedworker.agent.lease import LeaseKeeper, holds
from savedworker.agent.log_shipping import LogShipper
from savedworker.agent.notices import NoticeBoard
from savedworker.agent.relay.airflow import PORT, AirflowRelay, Ties
from savedworker.agent.shim_client import ShimClient, ShimGone
from savedworker.checkpoint import images, network, processes
from savedworker.checkpoint.container import Container
from savedworker.checkpoint.keys import stored_chunk_keys
from savedworker.checkpoint.migration_file import tell_incarnation
from savedworker.checkpoint.pace import next_interval
from savedworker.checkpoint.preflight import preflight
from savedworker.checkpoint.restore import Came, check_runtime, restore
from savedworker.checkpoint.save import Saved, Saver, TooLate
from savedworker.crashpoints import crash_point
from savedworker.model import defaults
from savedworker.model import events as ev
from savedworker.model.decisions import Elsewhere, Nothing, StartOver, checkpoints_to_drop, next_try
from savedworker.model.errors import (
    BadSpec,
    Conflict,
    Corrupt,
    Fatal,
    Fenced,
    NotFound,
    Refused,
    SavedWorkerError,
    Temporary,
    Unreachable,
)
from savedworker.model.manifest import Cause, Manifest, StreamPosition, order
from savedworker.model.record import CheckpointEntry, EndReason, Reason, State, WorkerRecord
from savedworker.model.spec import WorkerSpec
from savedworker.model.units import format_duration, format_size
from savedworker.notice.base import Notice
from savedworker.store.worker import WorkerStore, digest_of

log = logging.getLogger(__name__)
T = TypeVar("T")

DONE = 0
_LEAVE_MARGIN = 1.5
"""Seconds before a deadline at which the worker is stopped if no checkpoint could be committed."""
_RETRY_AFTER_FAILED_SAVE = 2.0
_RETRY_ORPHAN = 60.0


class _Interrupted(SavedWorkerError):
    """A checkpoint is abandoned because something more urgent happened."""

    code = "interrupted"


@dataclass(frozen=True)
class _Happened:
    """One entry of the queue."""

    what: Literal["exit", "lost", "shim_gone", "notice", "record", "remark"]
    notice: Notice | None = None
    text: str = ""


class Incarnation:
    """Runs one incarnation on the calling thread. Each of ``begin``, ``reattach`` and ``refuse`` returns the exit status."""

    def __init__(
        self,
        config: AgentConfig,
        worker: WorkerStore,
        lease_documents: WorkerStore,
        spec: WorkerSpec,
        container: Container,
        shim: ShimClient,
        note: attachment.Attachment,
    ) -> None:
        self._config = config
        self._worker = worker
        self._spec = spec
        self._container = container
        self._shim = shim
        self._note = note
        self._happened: queue.Queue[_Happened] = queue.Queue()
        self._record: WorkerRecord | None = None
        self._engine = EngineWatch()
        self._fenced = threading.Event()
        self._cancelled = threading.Event()
        self._keeper = LeaseKeeper(
            lease_documents, note.incarnation, note.holder, spec.lease_term, shim, self._saw, self._lost
        )
        self._board = NoticeBoard(config, worker, self._noticed)
        self._inner = InnerServices(self._inner_services())
        self._shipper: LogShipper | None = None
        self._relay: AirflowRelay | None = None
        self._saver = Saver(container, worker.chunks, shim.drain)
        self._keys: dict[str, frozenset[str]] = {}
        """Of the checkpoints that the record keeps and that this agent knows: the keys of their chunks."""
        self._next_n = 1
        self._save_problem = ""
        self._said_need = 0.0
        self._reported: tuple[str, ...] | None = None

    def _inner_services(self) -> list[Service]:
        """What the worker finds in its network."""
        found: list[Service] = [DnsForwarder()]
        if self._spec.credentials == "instance":
            known = sources(os.environ, self._config.metadata)
            found.append(CredentialsService(known, self._may_serve, self._remark_credentials))
        return found

    def _may_serve(self) -> bool:
        return self._keeper.proven and not self._fenced.is_set()

    def _remark_credentials(self, text: str) -> None:
        self._happened.put(_Happened("remark", text=text))

    # How it begins --------------------------------------------------------------------------------------------

    def begin(self, record: WorkerRecord, manifest: Manifest | None) -> int:
        """Restore ``manifest`` or the next best checkpoint, or start from nothing; then keep the worker."""
        self._saw(record)
        self._keeper.start()
        try:
            try:
                self._open_relay()
                runs = self._bring_up(record, manifest)
            except (Fenced, ShimGone, BadSpec):
                raise
            except _Interrupted:
                return self._release("cancelled")
            except (SavedWorkerError, OSError) as error:
                log.exception("the worker cannot be started here")
                return self._release("failed", f"the worker could not be started here: {error}")
            if isinstance(runs, str):
                return self._release("failed", runs)
            # Of a worker that runs no error is the end: this process dies of it, and the next one re-attaches.
            runs()
            return self._keep()
        except Fenced:
            return self._abandon()
        except ShimGone:
            return self._without_shim()
        except BadSpec as error:
            return self._end(Reason.SPEC_ERROR, str(error))

    def reattach(self, record: WorkerRecord) -> int:
        """Go on with a worker that this agent's predecessor started."""
        log.info("re-attaching to incarnation %d", self._note.incarnation)
        crash_point("agent.reattach.before")
        self._saw(record)
        numbers = [order(n) for n in self._worker.list_checkpoints()]
        mine = [n for incarnation, n in numbers if incarnation == self._note.incarnation]
        under_way = record.checkpoint_under_way
        self._next_n = max([*mine, order(under_way)[1] if under_way else 0]) + 1
        self._keeper.start()
        try:
            self._container.drop_images()  # the agent before may have ended right after CRIU had read them
            if self._container.network is not None and not network.claim(self._container.network.name):
                log.warning("another agent has claimed the private network of this instance")
            self._inner.open(self._container.network)
            self._open_relay()
            if record.incarnation is not None and record.incarnation.started_at is None:
                self._say_that_it_runs()
            self._settle_leaving()
            if self._shim.status().exit is None:
                self._learn_keys(record)
            if under_way and self._note.leaving is None:
                self._report(
                    ev.CheckpointFailed,
                    number=under_way,
                    detail="the agent was restarted during the checkpoint",
                )
            self._ship_from(self._note.start)
            return self._keep()
        except Fenced:
            return self._abandon()
        except ShimGone:
            return self._without_shim()

    def _settle_leaving(self) -> None:
        """Learn what became of the worker that the agent before was about to end.

        Either CRIU, which saw its action script fail, let it run on: then it does not leave any more. Or it was killed, which
        the shim will see, perhaps a while later: then this was no end of its own.
        """
        while self._note.leaving is not None and self._shim.status().exit is None:
            self._check_fence()
            if processes.runs_untraced(self._container.init_pid()):
                self._note_leaving(None)
            else:
                time.sleep(0.02)

    def _say_that_it_runs(self) -> None:
        """What the agent before could not report any more."""
        why = "the agent was restarted meanwhile"
        if self._note.launched:
            self._report(ev.Restored, number=self._note.launched, detail=why)
        else:
            self._report(ev.Started, why=why if self._note.incarnation > 1 else "")

    def refuse(self, why: BadSpec) -> int:
        """The spec cannot be run on any instance."""
        return self._end(Reason.SPEC_ERROR, str(why))

    def _bring_up(self, record: WorkerRecord, manifest: Manifest | None) -> Callable[[], object] | str:
        """Have the worker run: what is to be called then, to say so. Or why it is not to run here, where the history does not say it."""
        tried: list[str] = []
        while isinstance(
            entry := next_try(record, self._spec, self._note.incarnation, tried), CheckpointEntry
        ):
            started = time.monotonic()
            try:
                if manifest is None or manifest.number != entry.number:
                    manifest = self._worker.load_manifest(entry.number, entry.digest)
                    check_runtime(manifest, self._spec)
                return self._restore(manifest, started)
            except (Fenced, BadSpec, ShimGone):
                raise
            except Unreachable as error:
                log.warning("the restore of %s waits for the store: %s", entry.number, error)
                time.sleep(min(error.retry_after, 5.0))
                self._check_fence()
                continue
            except SavedWorkerError as error:
                log.error("checkpoint %s could not be restored: %s", entry.number, error)
                damaged = isinstance(error, Corrupt | NotFound)
                detail = str(error)
                if damaged and entry.damage_seen is not None:
                    detail += f"; instance {entry.damage_seen.instance} had found damage as well"
                record = self._report(ev.RestoreFailed, number=entry.number, detail=detail, unusable=damaged)
            tried.append(entry.number)
        match entry:
            case Elsewhere(why):
                return why
            case StartOver(why):
                return self._start(why)
            case Nothing():
                self._report(ev.Finished, reason=Reason.CRASH_LOOP, detail="no checkpoint can be restored")
                return ""

    def _open_relay(self) -> None:
        """Serve the engine's interface, where the worker is to reach it through us."""
        if self._spec.relay is None:
            return
        ties = Ties(
            incarnation=self._note.incarnation,
            load=self._worker.load_engine_note,
            keep=self._worker.keep_engine_note,
            drop=self._worker.delete_engine_notes,
            holds=lambda: self._keeper.proven and not self._fenced.is_set(),
            conclude=self._conclude,
        )
        self._relay = AirflowRelay(self._spec.relay, ties, (network.GATEWAY, PORT), only=network.INNER)
        self._relay.start()
        self._saver = Saver(self._container, self._worker.chunks, self._shim.drain, self._relay)

    def _conclude(self, outcome: str) -> bool:
        """The worker is about to tell its engine how it ends. Called by the relay, which passes it on if this is true."""
        record = self._report(ev.Concluded, outcome=outcome)
        mine = holds(record, self._note.incarnation, self._note.holder)
        return mine and record.concluded is not None and record.concluded.outcome == outcome

    def _refuse_calls(self) -> None:
        """Nothing of this incarnation's reaches the engine any more."""
        if self._relay is not None:
            self._relay.gate.close()

    def _has_concluded(self) -> bool:
        return self._record is not None and self._record.concluded is not None

    def _start(self, why: str) -> Callable[[], object]:
        """Have it run from nothing; what says so."""
        started = time.monotonic()
        if self._relay is not None:
            self._relay.restored(None)
        self._container.prepare()
        self._fetch_inputs()
        tell_incarnation(self._container.home.rootfs, self._note.incarnation)
        self._launch(StreamPosition(), self._container.start_command(), "")
        if not why and self._note.incarnation > 1:
            why = "there is no checkpoint"
        crash_point("agent.started.before")
        return partial(self._report, ev.Started, why=why, seconds=time.monotonic() - started)

    def _fetch_inputs(self) -> None:
        """Have the worker's inputs among its files. Waits for a store that is away."""
        if not self._spec.inputs:
            return
        started = time.monotonic()
        owner = images.find_user(self._container.lower, self._spec.user)[:2]
        place = self._container.home.rootfs
        got = self._patiently(
            lambda: inputs.fetch(self._spec.inputs, place, owner, self._spec.id, self._transfer_wanted)
        )
        detail = f"{got.files} files, {format_size(got.size)}"
        self._report_noted("inputs_fetched", detail, time.monotonic() - started)

    def _patiently(self, transfer: Callable[[], T]) -> T:
        """``transfer``, again and again while the store at its other end is away."""
        while True:
            try:
                return transfer()
            except Temporary as error:
                log.warning("inputs or outputs wait for their store: %s", error)
                time.sleep(min(error.retry_after, 5.0))
                self._transfer_wanted()

    def _transfer_wanted(self) -> None:
        """Between pieces of an input or output: raises when nobody wants it any more."""
        self._check_fence()
        if self._cancelled.is_set():
            raise _Interrupted("the worker was cancelled")

    def _restore(self, manifest: Manifest, started: float) -> Callable[[], object]:
        """Have it run from a checkpoint; what says so."""
        runtime = manifest.runtime
        if runtime.image != self._container.runtime.image:
            raise Refused(f"checkpoint {manifest.number} is of another image than the one that is here")
        if self._container.runtime != runtime:
            self._container = Container(
                self._spec,
                runtime,
                self._container.tools,
                self._container.home.path,
                self._container.cgroup.path,
                self._container.lower,
            )
            self._saver = Saver(self._container, self._worker.chunks, self._shim.drain, self._relay)
        if self._relay is not None:
            self._relay.restored(manifest.number)
        came = restore(
            self._container,
            manifest,
            self._worker.chunks,
            lambda argv: self._launch(manifest.log, argv, manifest.number),
            self._note.incarnation,
            self._saver.keep(manifest.memory),
        )
        self._saver.start_from(came.snapshot, came.shm, manifest.memory)
        crash_point("agent.restored.before")
        return partial(self._say_restored, manifest.number, time.monotonic() - started, came)

    def _say_restored(self, number: str, seconds: float, came: Came) -> None:
        self._report(ev.Restored, number=number, seconds=seconds, detail="; ".join(came.notes))
        self._keep_chunks({number: came.keys})
        crash_point("agent.restored.after")

    def _launch(self, position: StreamPosition, argv: list[str], restores: str) -> None:
        """Run runc with the worker's stdio. Noted before, so that a successor of this agent finds the worker."""
        home = self._container.home
        self._check_fence()
        self._inner.open(self._container.network)
        self._note = self._note.model_copy(
            update={"launched": restores, "start": position, "runtime": self._container.runtime}
        )
        attachment.save(self._config.state_dir, self._note)
        crash_point("agent.runc.before")
        self._shim.start(
            argv, self._container.environment(), position, home.status_file, home.runc / "worker/state.json"
        )
        crash_point("agent.runc.after")
        self._ship_from(position)

    def _ship_from(self, position: StreamPosition) -> None:
        self._shipper = LogShipper(self._worker, self._note.incarnation, self._shim, position)
        self._shipper.begin()
        threading.Thread(target=self._await_exit, name="exit-watcher", daemon=True).start()

    # While it runs --------------------------------------------------------------------------------------------

    def _keep(self) -> int:
        """Until the worker ends, is cancelled, leaves, or the lease is lost."""
        if self._record is not None and not all(x.sound for x in self._record.checkpoints):
            self._worker.chunks.ignore_listing()  # some of its chunks are damaged, and it is not known which
        self._board.start()
        self._saver.start_warming()
        next_check = time.monotonic()
        wanted = self._spec.checkpoint.interval
        interval = defaults.CHECKPOINT_INTERVAL if wanted == "auto" else wanted
        next_save = time.monotonic() + interval if interval else float("inf")
        next_leave = 0.0
        while True:
            now = time.monotonic()
            try:
                happened = self._happened.get(timeout=max(0.0, min(next_check, next_save, now + 1.0) - now))
            except queue.Empty:
                happened = None
            match happened:
                case _Happened("exit"):
                    return self._finish()
                case _Happened("lost"):
                    return self._abandon()
                case _Happened("shim_gone"):
                    return self._without_shim()
                case _Happened("notice", notice) if notice is not None:
                    if self._attend(notice):
                        return DONE
                case _Happened("remark", text=text):
                    self._report_noted("credentials", text)
                case _:
                    pass
            if self._cancelled.is_set():
                return self._cancel()
            record = self._record
            if record is not None and record.checkpoint_requests > record.checkpoint_answered:
                self._save("requested", answered=record.checkpoint_requests)
            if time.monotonic() >= next_save and interval and not self._has_concluded():
                interval = self._adapt(interval, self._save("periodic"))
                next_save = time.monotonic() + interval
            orphaned = self._engine.silent >= self._spec.orphan_after and not self._has_concluded()
            if orphaned and time.monotonic() >= next_leave:
                if self._leave_orphaned():
                    return DONE
                next_leave = time.monotonic() + _RETRY_ORPHAN
            if time.monotonic() >= next_check:
                self._check_protection()
                next_check = time.monotonic() + defaults.PREFLIGHT_EVERY

    def _attend(self, notice: Notice) -> bool:
        """Act on a notice. True when the worker has left this instance."""
        left = None if notice.deadline is None else max(0.0, notice.deadline - time.monotonic())
        if notice.withdrawn:
            self._report(ev.NoticeWithdrawn, id=notice.id, detail=notice.detail)
            return False
        self._report(
            ev.NoticeReceived, id=notice.id, source=notice.source, seconds_left=left, detail=notice.detail
        )
        if self._has_concluded():
            return self._end_here(notice)
        if notice.deadline is None:
            self._save("periodic")  # rebalance: no deadline yet, but be ready for one
            return False
        return self._leave(notice, notice.deadline)

    def _leave(self, notice: Notice, deadline: float) -> bool:
        """Checkpoint and hold until committed, then go; False when the notice was withdrawn or the worker stays."""
        stop_at = deadline - _LEAVE_MARGIN

        def still_wanted() -> None:
            if self._urgent(notice) or self._has_concluded():
                raise _Interrupted("something more urgent happened")
            if time.monotonic() > stop_at:
                raise Fatal("the deadline came before the checkpoint was committed")

        while True:
            try:
                saved = self._save_and_hold("notice", still_wanted, stop_at)
            except _Interrupted:
                if self._has_concluded() and not self._urgent(notice):
                    return self._end_here(notice)
                return (
                    False  # what interrupted is dealt with by the loop; withdrawn means that the worker stays
                )
            except Fenced:
                raise
            except SavedWorkerError as error:
                log.error("the checkpoint before the reclaim failed: %s", error)
                left = stop_at - time.monotonic()
                # What cannot be in time is not tried again: the worker runs while it may, perhaps to its end.
                if self._wait_unless_urgent(
                    notice, left if isinstance(error, TooLate) else min(_RETRY_AFTER_FAILED_SAVE, left)
                ):
                    return False
                if time.monotonic() < stop_at:
                    continue
                return self._yield(str(error))
            return self._hand_over(saved.manifest.number, saved.closed)

    def _end_here(self, notice: Notice) -> bool:
        """The worker has told its engine how it ends and is never restored: it comes to its end here, if there is time."""
        if notice.deadline is None:
            return False
        log.info("the worker has told its engine how it ends: it is not saved any more")
        if self._wait_unless_urgent(notice, notice.deadline - _LEAVE_MARGIN - time.monotonic()):
            return False
        return self._yield("it had told its engine how it ends, and did not end in time")

    def _leave_orphaned(self) -> bool:
        """No engine looks after the worker: checkpoint it, so that one that comes back resumes it. True when it has left."""

        def still_wanted() -> None:
            if self._urgent() or self._notice_waits() or self._has_concluded():
                raise _Interrupted("something more urgent happened")
            if self._engine.silent < self._spec.orphan_after:
                raise _Interrupted("an engine looks after the worker again")

        log.warning("no engine has been heard of for %s", format_duration(self._engine.silent))
        try:
            saved = self._save_and_hold("orphaned", still_wanted)
        except Fenced:
            raise
        except SavedWorkerError as error:
            log.error("the checkpoint of the orphaned worker failed, it runs on: %s", error)
            return False
        return self._hand_over(saved.manifest.number, saved.closed, why="orphaned")

    def _wait_unless_urgent(self, notice: Notice, seconds: float) -> bool:
        until = time.monotonic() + seconds
        while time.monotonic() < until:
            if self._urgent(notice):
                return True
            time.sleep(0.05)
        return self._urgent(notice)

    def _urgent(self, leaving: Notice | None = None) -> bool:
        """True when something has happened that ends a leaving: its notice withdrawn, ended, cancelled, fenced."""
        if self._fenced.is_set() or self._cancelled.is_set():
            return True
        with self._happened.mutex:
            return any(
                x.what in ("exit", "lost", "shim_gone")
                or (
                    leaving is not None
                    and x.notice is not None
                    and x.notice.withdrawn
                    and x.notice.id == leaving.id
                )
                for x in self._happened.queue
            )

    def _notice_waits(self) -> bool:
        with self._happened.mutex:
            return any(x.what == "notice" for x in self._happened.queue)

    def _check_protection(self) -> None:
        """Tell people whether a checkpoint could be taken now, and why not."""
        reasons = preflight(self._container.pids(), self._spec)
        reasons += self._board.problems()
        reasons += self._saver.problems()
        with contextlib.suppress(ShimGone):  # which is on its way here as an event of its own
            reasons += self._shim.status().problems
        if self._save_problem:
            reasons.append(f"the last checkpoint failed: {self._save_problem}")
        reasons += self._too_slow()
        found = tuple(reasons)
        if found != self._reported:
            self._reported = found
            self._report(ev.ProtectionChanged, unprotected_reasons=found)

    def _too_slow(self) -> list[str]:
        """Why a notice would not be enough. Said anew only when it has become a different matter: each saying is an event."""
        need, notice = (
            self._saver.seconds_to_safe(),
            self._config.notice,
        )
        said = self._said_need
        if need <= notice:
            self._said_need = 0.0
            return []
        if not said / 2 < need < said * 2:
            said = self._said_need = need
        return [
            f"a checkpoint would take about {format_duration(said)} and a notice gives {format_duration(notice)}"
        ]

    def _adapt(self, interval: float, saved: Saved | None) -> float:
        """The next interval between periodic checkpoints, which is another one only under ``auto``."""
        if self._spec.checkpoint.interval != "auto" or saved is None:
            return interval
        notice = self._config.notice
        chosen, why = next_interval(interval, saved.frozen_seconds, self._saver.seconds_to_safe(), notice)
        if why:
            self._report_noted("checkpoint_interval", f"{format_duration(chosen)} from now on: {why}")
        return chosen

    def _report_noted(self, event: str, detail: str, seconds: float | None = None) -> None:
        self._write(ev.Noted(at=_now(), event=event, detail=detail, seconds=seconds))

    # Checkpoints ----------------------------------------------------------------------------------------------

    def _number(self) -> str:
        self._note_leaving(None)  # if it was set, the worker runs on all the same
        number = f"{self._note.incarnation}-{self._next_n}"
        self._next_n += 1
        return number

    def _save(self, cause: Cause, answered: int = 0) -> Saved | None:
        """A checkpoint that lets the worker run on. A failure is reported and never raised."""
        number = self._number()
        self._report(ev.CheckpointStarted, number=number, cause=cause)
        try:
            saved = self._saver.save(number, cause, self._publish, still_wanted=self._still_wanted)
        except _Interrupted as error:
            self._failed(number, str(error), answered)
            return None
        except SavedWorkerError as error:
            self._save_problem = str(error)
            self._failed(number, str(error), answered)
            self._check_protection()
            return None
        self._committed(saved, answered)
        self._save_problem = ""
        self._check_protection()
        return saved

    def _save_and_hold(
        self, cause: Cause, still_wanted: Callable[[], None], deadline: float | None = None
    ) -> Saved:
        number = self._number()
        self._report(ev.CheckpointStarted, number=number, cause=cause)
        try:
            saved = self._saver.save(
                number,
                cause,
                self._publish,
                hold=True,
                still_wanted=still_wanted,
                committed=self._commit_and_leave,
                deadline=deadline,
            )
        except SavedWorkerError as error:
            self._failed(number, str(error), 0)
            raise
        return saved

    def _publish(self, manifest: Manifest) -> None:
        """The lines before the cut are stored first: whoever goes on from there never writes them again."""
        if self._shipper is not None:
            self._shipper.flush()
        self._worker.publish_manifest(manifest)

    def _commit_and_leave(self, saved: Saved) -> None:
        """The worker is still frozen and is killed next, unless this raises or this process dies."""
        self._committed(saved, self._record.checkpoint_requests if self._record else 0)
        self._note_leaving(saved.manifest.number)
        crash_point("agent.leaving.noted")

    def _note_leaving(self, number: str | None) -> None:
        if self._note.leaving != number:
            self._note = self._note.model_copy(update={"leaving": number})
            attachment.save(self._config.state_dir, self._note)

    def _still_wanted(self) -> None:
        if self._urgent() or self._notice_waits():
            raise _Interrupted("abandoned: a notice or the worker's end came first")
        if self._has_concluded():
            raise _Interrupted("the worker has told its engine how it ends, and is not restored any more")

    def _committed(self, saved: Saved, answered: int) -> None:
        manifest = saved.manifest
        dropped = checkpoints_to_drop(self._record, self._spec.checkpoint.keep) if self._record else ()
        # Not relied upon from here on: whatever becomes of this write, it may have taken place.
        self._keep_chunks({number: keys for number, keys in self._keys.items() if number not in dropped})
        crash_point("agent.commit.before")
        record = self._report(
            ev.CheckpointCommitted,
            number=manifest.number,
            cause=manifest.cause,
            frozen_at=manifest.frozen_at,
            bytes_image=manifest.bytes_image,
            bytes_uploaded=saved.bytes_uploaded,
            seconds=saved.seconds,
            frozen_seconds=saved.frozen_seconds,
            answered=answered,
            dropped=dropped,
            digest=digest_of(manifest),
            rates=self._saver.rates(),
            zstd_level=saved.zstd_level,
            bytes_as_is=saved.bytes_as_is,
            detail=_remarks(saved),
        )
        crash_point("agent.commit.after")
        if any(entry.number == manifest.number for entry in record.checkpoints):
            self._keep_chunks({**self._keys, manifest.number: saved.keys})
        if self._relay is not None:
            self._relay.committed(manifest.number, {c.number for c in record.checkpoints})

    def _keep_chunks(self, keys: dict[str, frozenset[str]]) -> None:
        """``keys`` of the chunks of checkpoints that the record keeps: these need not be put again, however old they are."""
        self._keys = keys
        self._worker.chunks.keep(frozenset[str]().union(*keys.values()))

    def _learn_keys(self, record: WorkerRecord) -> None:
        """Read what the agent before knew of the newest checkpoint, or the next one would put every old chunk again."""
        newest = next((x for x in reversed(record.checkpoints) if x.sound), None)
        if newest is None:
            return
        try:
            manifest = self._worker.load_manifest(newest.number, newest.digest)
            keys = stored_chunk_keys(manifest, self._worker.chunks)
        except SavedWorkerError as error:
            log.warning("the chunks of checkpoint %s are put again: %s", newest.number, error)
        else:
            self._keep_chunks({newest.number: keys})

    def _failed(self, number: str, detail: str, answered: int) -> None:
        log.error("checkpoint %s failed: %s", number, detail)
        self._report(ev.CheckpointFailed, number=number, detail=detail, answered=answered)

    # How it ends ----------------------------------------------------------------------------------------------

    def _hand_over(self, number: str, closed: int = 0, why: Literal["notice", "orphaned"] = "notice") -> bool:
        """The worker is dead and its checkpoint committed: let the next instance have it."""
        self._refuse_calls()
        self._flush_logs()
        crash_point("agent.hand_over.before")
        self._report(
            ev.HandedOver,
            number=number,
            why=why,
            detail=f"{closed} outside connections were closed" if closed else "",
        )
        crash_point("agent.hand_over.after")
        self._clean_up()
        return True

    def _yield(self, why: str) -> bool:
        """Time is up without a checkpoint: stop here, so that the next one begins from the last good one at once."""
        with contextlib.suppress(Fatal):  # a full disk
            self._note_leaving("")
        self._shim.kill()
        self._refuse_calls()
        crash_point("agent.yield.killed")
        self._flush_logs()
        self._report(ev.Yielded, detail=why)
        crash_point("agent.yield.after")
        self._clean_up()
        return True

    def _finish(self) -> int:
        """The worker's own process has ended."""
        status = self._shim.status()
        if status.exit is None:
            return self._without_shim()
        if status.killed_by_lease:
            log.error("the shim killed the worker: its lease had run out")
            return self._abandon()
        if self._note.leaving is not None and not status.exit.report:
            why = "the worker was stopped to leave, and the agent was interrupted"
            self._hand_over(self._note.leaving) if self._note.leaving else self._yield(why)
            return DONE
        self._flush_logs()
        end = ending(status.exit)
        if end.reason is None and self._spec.outputs:
            try:
                self._publish_outputs()
            except _Interrupted:
                return self._cancel()
            except SavedWorkerError as error:
                if isinstance(error, Fenced | ShimGone):
                    raise
                log.error("the outputs cannot be published: %s", error)
                end = replace(end, reason=Reason.SPEC_ERROR, detail=f"it succeeded, but {error}")
        crash_point("agent.finish.before")
        self._report(
            ev.Finished, exit_code=end.exit_code, signal=end.signal, reason=end.reason, detail=end.detail
        )
        crash_point("agent.finish.after")
        return self._release("finished" if end.reason is None else "failed")

    def _publish_outputs(self) -> None:
        """The outputs of a worker that succeeded, from its final layer. Waits for a store that is away.

        Begins anew after a crash of this agent: the worker's files stay as they are, and so does what is published.
        """
        started = time.monotonic()
        rootfs = self._container.home.rootfs
        done = self._patiently(
            lambda: outputs.publish(
                self._spec.outputs, rootfs, self._spec.id, self._transfer_wanted, self._prove_lease
            )
        )
        crash_point("outputs.published")
        detail = f"{done.files} files, {format_size(done.size)}"
        if done.left_out:
            detail += f"; left out, being no files: {', '.join(done.left_out[:3])}"
        self._report_noted("outputs_published", detail, time.monotonic() - started)

    def _prove_lease(self) -> None:
        """A renewal now, so that what follows is done by the holder. Raises Fenced, Unreachable."""
        while True:
            self._transfer_wanted()
            try:
                self._saw(self._keeper.renew())
                return
            except Conflict:
                time.sleep(0.05)  # many writers just now

    def _end(self, reason: Reason, detail: str) -> int:
        """The worker cannot be run at all."""
        self._report(ev.Finished, reason=reason, detail=detail)
        return self._release("failed")

    def _cancel(self) -> int:
        self._shim.kill()
        self._refuse_calls()
        crash_point("agent.cancel.killed")
        self._flush_logs()
        return self._release("cancelled")

    def _without_shim(self) -> int:
        """The shim died, and nobody will learn the worker's exit status: go back to the last checkpoint."""
        log.error("the shim is gone")
        self._container.cgroup.kill()
        self._write(
            ev.InstanceLost(at=_now(), incarnation=self._note.incarnation, detail="the worker's shim died")
        )
        self._clean_up()
        return DONE

    def _release(self, reason: EndReason, detail: str = "") -> int:
        """Everything here is dead: give the lease back and leave nothing."""
        self._container.cgroup.kill()
        self._clean_up(stop_keeper=False)
        crash_point("agent.release.before")
        self._report(ev.LeaseReleased, end_reason=reason, detail=detail)
        crash_point("agent.release.after")
        self._keeper.stop()
        return DONE

    def _abandon(self) -> int:
        """Fenced: somebody else owns the worker. Kill what is here; it is not for us to record more than that."""
        self._container.cgroup.kill()
        with contextlib.suppress(SavedWorkerError):
            event = ev.Noted(at=_now(), event="abandoned", detail=self._why_abandoned())
            self._worker.record_event(event)
        self._clean_up()
        return DONE

    def _why_abandoned(self) -> str:
        what = f"incarnation {self._note.incarnation} was given up by its own agent"
        try:
            killed = self._shim.status().killed_by_lease
        except SavedWorkerError:
            return what
        why = (
            "its lease ran out, so that its shim had frozen and then killed the worker"
            if killed
            else "another one holds the lease"
        )
        return f"{what}: {why}"

    def _clean_up(self, stop_keeper: bool = True) -> None:
        if self._relay is not None:
            self._relay.stop()
        self._board.stop()
        self._saver.stop_warming()
        if stop_keeper:
            self._keeper.stop()
        if self._shipper is not None:
            self._shipper.stop()
        self._inner.close()
        self._container.teardown()
        try:
            self._shim.quit()
        except SavedWorkerError as error:
            log.warning("%s", error)

    def _flush_logs(self) -> None:
        """All lines must be in the store before the record says that the incarnation is over."""
        while self._shipper is not None:
            try:
                self._shim.drain()
                self._shipper.flush()
                return
            except ShimGone:
                return
            except Temporary as error:
                log.warning("the last lines wait for the store: %s", error)
                if self._fenced.is_set():
                    return
                time.sleep(min(error.retry_after, 2.0))

    # What happens ---------------------------------------------------------------------------------------------

    def _report(self, kind: Callable[..., ev.Event], **fields: Any) -> WorkerRecord:
        """Write an event of this incarnation, under its fencing token. Raises Fenced when the lease is lost."""
        note = self._note
        return self._write(kind(at=_now(), incarnation=note.incarnation, holder=note.holder, **fields))

    def _write(self, event: ev.Event) -> WorkerRecord:
        """Write ``event``, however long the store is away."""
        while True:
            self._check_fence()
            try:
                record = self._worker.record_event(event, tries=50).record
            except Temporary as error:
                log.warning("%s waits for the store: %s", event.kind, error)
                time.sleep(min(error.retry_after, 2.0))
                continue
            self._saw(record)
            return record

    def _check_fence(self) -> None:
        if self._fenced.is_set():
            raise Fenced("the lease is lost")

    def _saw(self, record: WorkerRecord) -> None:
        self._record = record
        self._engine.saw(record)
        if record.state is State.CANCELLED and not self._cancelled.is_set():
            self._cancelled.set()
            self._happened.put(_Happened("record"))
        elif record.state.terminal and not holds(record, self._note.incarnation, self._note.holder):
            self._cancelled.set()
        elif record.checkpoint_requests > record.checkpoint_answered:
            self._happened.put(_Happened("record"))

    def _lost(self) -> None:
        self._fenced.set()
        self._refuse_calls()
        self._happened.put(_Happened("lost"))

    def _noticed(self, notice: Notice) -> None:
        self._happened.put(_Happened("notice", notice))
        self._saver.hurry()

    def _await_exit(self) -> None:
        try:
            self._shim.wait()
        except ShimGone:
            self._happened.put(_Happened("shim_gone"))
            return
        self._happened.put(_Happened("exit"))


def _remarks(saved: Saved) -> str:
    """What is worth knowing about a checkpoint beside its figures."""
    if saved.mended:
        return f"{saved.mended} chunks had gone from the store or were truncated, and were put again if still needed"
    return ""


def _now() -> datetime:
    return datetime.now(UTC)
