"""One agent: wait for the lease, begin an incarnation, and end the instance with it.

Exit status 0 means that the instance has done its work and should end; anything else that the agent crashed and should be
started again, when it re-attaches to the shim that holds the worker.
"""

from __future__ import annotations

import logging
import os
import secrets
import time
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path

from savedworker.agent import attachment
from savedworker.agent.config import AgentConfig, memory_budget
from savedworker.agent.engine_watch import EngineWatch
from savedworker.agent.incarnation import Incarnation
from savedworker.agent.inner.sources import sources
from savedworker.agent.lease import holds
from savedworker.agent.registry import log_in
from savedworker.agent.shim import lease_clock
from savedworker.agent.shim_client import ShimClient, ShimGone
from savedworker.checkpoint import images, native, network, restore
from savedworker.checkpoint.container import Container, first_runtime
from savedworker.checkpoint.tools import Tools, find_tools
from savedworker.crashpoints import crash_point
from savedworker.model import defaults
from savedworker.model import events as ev
from savedworker.model.decisions import Leave, Wait, choose_checkpoint, may_take
from savedworker.model.errors import (
    BadSpec,
    Conflict,
    Corrupt,
    Fatal,
    NotFound,
    Refused,
    SavedWorkerError,
    Temporary,
    Unreachable,
)
from savedworker.model.manifest import Manifest
from savedworker.model.record import ActiveNotice, CheckpointEntry, LaunchOutcome
from savedworker.model.spec import WorkerSpec
from savedworker.store.backend import open_store
from savedworker.store.sealing import KEY, PLAIN
from savedworker.store.worker import Held, WorkerStore

log = logging.getLogger(__name__)

DONE, CRASHED = 0, 1
IMAGE_PATIENCE = 120.0
"""Seconds that a registry which does not answer is waited for, before another instance gets the next try."""


def run(config: AgentConfig) -> int:
    """Live one incarnation (or none, when not wanted). Returns the exit status."""
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    config.state_dir.mkdir(parents=True, mode=0o700, exist_ok=True)
    agent = _Agent(config)
    try:
        return agent.run()
    except Temporary as error:
        log.error("%s", error)
        return CRASHED


class _Agent:
    def __init__(self, config: AgentConfig) -> None:
        store = open_store(config.store)
        os.environ.pop(KEY, None)  # nothing that is started from here needs it
        ring = store.sealing.ring
        self.config = replace(config, key_files=ring.files() if ring else ())
        self.worker = WorkerStore(store, config.worker)
        self.shim = ShimClient(config.state_dir / "shim")
        self.cgroup = f"{config.cgroup_parent}/worker"
        self._give_up = time.monotonic() + IMAGE_PATIENCE

    def run(self) -> int:
        known = attachment.load(self.config.state_dir)
        if known is not None:
            return self._go_on(self.worker.load_spec(), known)
        try:
            self.worker.refuse_plain()
            spec = self.worker.load_spec()
        except (
            Corrupt,
            Refused,
        ) as error:  # of no use here: altered, sealed with a key that is missing, or not sealed
            return self._leave("failed", str(error))
        try:
            self.worker.chunks.spend(memory_budget(spec, os.environ))
            tools = find_tools()
            native.prepare()
        except SavedWorkerError as error:
            return self._leave("failed", str(error))
        image_problem: BadSpec | None = None
        lower, digest = Path("/"), ""
        try:
            lower, digest = self._image(spec)
            images.find_user(lower, spec.user)
        except BadSpec as error:
            image_problem = error  # the spec's fault: reported by the holder of the lease
        except Unreachable:
            raise  # the store, without which nothing can be said either
        except SavedWorkerError as error:
            return self._leave("failed", str(error))
        taken = self._win(spec, tools, lower)
        if taken is None:
            return DONE
        held, manifest, sent = taken
        lease = held.record.lease
        assert lease is not None
        runtime = manifest.runtime if manifest else first_runtime(spec, self.config.private_folders, digest)
        note = attachment.Attachment(incarnation=lease.incarnation, holder=lease.holder, runtime=runtime)
        attachment.save(self.config.state_dir, note)
        crash_point("agent.attached")
        self.shim.launch(self.cgroup)
        crash_point("agent.shim.launched")
        self.shim.lease(sent + spec.lease_term, spec.lease_term)
        incarnation = self._incarnation(spec, tools, lower, note)
        if image_problem is not None:
            return incarnation.refuse(image_problem)
        return incarnation.begin(held.record, manifest)

    def _image(self, spec: WorkerSpec) -> tuple[Path, str]:
        """The worker's image and its digest: the one of the checkpoint that would be restored, else what its name means now."""
        cache = self.config.state_dir / "images"
        if not spec.image.startswith(images.REGISTRY):
            return images.lower_directory(spec.image, cache), ""
        entry = choose_checkpoint(self.worker.load_record().record, spec)
        manifest = self._manifest(spec, entry)
        known = sources(os.environ, self.config.metadata)
        while True:
            try:
                registry = log_in(spec.image, known, self.config.state_dir)
                digest = manifest.runtime.image if manifest else images.digest_of(spec.image, registry)
                return images.lower_directory(spec.image, cache, digest, registry), digest
            except Temporary as error:
                if isinstance(error, Unreachable) or time.monotonic() > self._give_up:
                    raise
                log.warning("the image is waited for: %s", error)
                time.sleep(error.retry_after)

    def _incarnation(
        self, spec: WorkerSpec, tools: Tools, lower: Path, note: attachment.Attachment
    ) -> Incarnation:
        # A request that hangs must not cost the lease: what renews it gives up in time to ask again.
        timeout = min(defaults.STORE_TIMEOUT, spec.lease_term)
        store = open_store(self.config.store, timeout=timeout, sealing=self.worker.store.sealing)
        lease_documents = WorkerStore(store, self.config.worker)
        container = Container(spec, note.runtime, tools, self.config.state_dir / "worker", self.cgroup, lower)
        return Incarnation(self.config, self.worker, lease_documents, spec, container, self.shim, note)

    def _go_on(self, spec: WorkerSpec, known: attachment.Attachment) -> int:
        """Started again within an incarnation: re-attach to the shim, or clean up after one that is gone."""
        record = self.worker.load_record().record
        mine = holds(record, known.incarnation, known.holder)
        if mine and known.launched is not None and self._has_worker():
            tools = find_tools()
            self.worker.chunks.spend(memory_budget(spec, os.environ))
            lower = images.lower_directory(
                spec.image, self.config.state_dir / "images", known.runtime.image
            )  # there already
            return self._incarnation(spec, tools, lower, known).reattach(record)
        log.error("the incarnation that began here cannot go on: cleaning up")
        container = Container(
            spec, known.runtime, find_tools(), self.config.state_dir / "worker", self.cgroup, Path("/")
        )
        container.teardown()
        if mine:
            # Nothing of it runs any more: the next taker need not wait for the term.
            self.worker.record_event(
                ev.InstanceLost(
                    at=datetime.now(UTC),
                    incarnation=known.incarnation,
                    detail="the agent was restarted and the worker's shim was gone",
                )
            )
        return DONE

    def _has_worker(self) -> bool:
        """Whether the shim has a worker, or had one that ended. Waits while runc is at work, at most until the lease ends it."""
        try:
            while (status := self.shim.status()).starting:
                time.sleep(0.05)
        except ShimGone:
            return False
        return status.worker_pid is not None or status.exit is not None

    def _leave(self, outcome: LaunchOutcome, detail: str, held: Held | None = None) -> int:
        """End this instance without an incarnation, and say why. Whether it has ended is for the fleet to say.

        With ``held`` only if that is the record still: in a later one this agent may be needed. Raises Conflict.
        """
        log.error("not starting: %s", detail)
        event = ev.LaunchEnding(
            at=datetime.now(UTC), launch=self.config.launch, outcome=outcome, detail=detail
        )
        if held is None:
            self.worker.record_event(event)
        else:
            self.worker.swap_event(held, event)
        crash_point("agent.left")
        return DONE

    def _win(self, spec: WorkerSpec, tools: Tools, lower: Path) -> tuple[Held, Manifest | None, float] | None:
        """Wait for the lease and take it. Returns the record, the checkpoint to restore, and when the take was sent."""
        holder = secrets.token_hex(16)
        seen: tuple[int, str, int] | None = None
        since = unchanged = time.monotonic()
        notice: ActiveNotice | None = None
        engine = EngineWatch()
        tried: tuple[Manifest | None, float] | None = None
        waits = False
        while True:
            try:
                held = self.worker.load_record()
                lease = held.record.lease
                now = (lease.incarnation, lease.holder, lease.renewal) if lease else None
                if tried is not None and lease and holds(held.record, lease.incarnation, holder):
                    return held, *tried  # the answer was lost, and the take was not
                if now != seen:
                    seen, since = now, time.monotonic()
                if held.record.notice != notice:
                    notice, unchanged = held.record.notice, time.monotonic()
                at = time.monotonic()
                answer = may_take(held.record, spec, self.config.launch, at - since, at - unchanged)
                if isinstance(answer, Leave):
                    self._leave("surplus", answer.why, held)
                    return None
                engine.saw(held.record)
                if engine.silent >= spec.orphan_after:
                    self._leave("surplus", "no engine looks after the worker any more")
                    return None
                if isinstance(answer, Wait):
                    time.sleep(min(1.0, spec.lease_term / 40))
                    continue
                if spec.network == "private" and not self._has_network():
                    if not waits:
                        log.warning(
                            "another worker has the private network of this instance: waiting for its end"
                        )
                    waits = True
                    time.sleep(1.0)
                    continue
                manifest = self._manifest(spec, answer.checkpoint)
                if manifest is not None:
                    restore.check_instance(manifest, spec, tools, lower)
                    if exposed := self._exposed_key(spec, manifest):
                        self._leave("failed", exposed)
                        return None
                sent = lease_clock()
                tried = manifest, sent
                crash_point("agent.take.before")
                taken = self._take(held, holder, answer.checkpoint, spec.lease_term)
                crash_point("agent.take.after")
                if holds(taken.record, len(held.record.incarnations) + 1, holder):
                    return taken, manifest, sent
            except restore.Incompatible as error:
                self._leave("incompatible", str(error))
                return None
            except Conflict:
                continue
            except Temporary as error:
                log.warning("the store does not answer, waiting: %s", error)
                time.sleep(min(error.retry_after, 5.0))

    @staticmethod
    def _has_network() -> bool:
        """Whether the private network of this instance is for this worker."""
        try:
            return network.claim()
        except Fatal as error:
            log.warning("it is not known who has the private network: %s", error)
            return True  # what is wrong is told when the worker is begun

    def _manifest(self, spec: WorkerSpec, checkpoint: CheckpointEntry | None) -> Manifest | None:
        """The checkpoint's manifest; None without one, or when it cannot be read (the restore will find and report that)."""
        if checkpoint is None:
            return None
        try:
            manifest = self.worker.load_manifest(checkpoint.number, checkpoint.digest)
            restore.check_runtime(manifest, spec)
            return manifest
        except (Corrupt, NotFound, Refused) as error:
            log.error("the manifest of checkpoint %s cannot be used: %s", checkpoint.number, error)
            return None

    def _exposed_key(self, spec: WorkerSpec, manifest: Manifest) -> str:
        """Why the worker could read the key here: what it must not see was settled at its first start. Empty if it cannot."""
        if spec.image != "host" or self.worker.sealer is PLAIN:
            return ""
        masked = manifest.runtime.masked
        seen = [x for x in self.config.key_files if not {str(x), *map(str, x.parents)} & set(masked)]
        if not seen:
            return ""
        return (
            f"the worker could read the key file {seen[0]} of this instance. "
            f"Fix: keep it where the first instance had it, or give the key in {KEY}"
        )

    def _take(self, held: Held, holder: str, checkpoint: CheckpointEntry | None, term: float) -> Held:
        """Take the lease by compare-and-swap on the very record that was looked at. Raises Conflict."""
        event = ev.LeaseTaken(
            at=datetime.now(UTC),
            incarnation=len(held.record.incarnations) + 1,
            holder=holder,
            launch=self.config.launch,
            instance=self.config.instance,
            zone=self.config.zone,
            instance_type=self.config.instance_type,
            term=term,
            restore_from=checkpoint.number if checkpoint else None,
        )
        return self.worker.swap_event(held, event)
