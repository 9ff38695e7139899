"""Taking one checkpoint: read ahead, freeze and dump, capture the files inside the freeze, store, publish.

With ``hold`` the worker stays frozen until everything is committed and is dead afterwards; any failure lets it run on.
Without, it runs on as soon as its state is on local disk, whatever becomes of the rest.
"""

from __future__ import annotations

import contextlib
import logging
import os
import shutil
import stat
import subprocess
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Executor, ThreadPoolExecutor
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Protocol

from savedworker.checkpoint import affinity, criu_errors, hooks, layer, native, processes, watches
from savedworker.checkpoint.base_keeper import BaseKeeper, free_space
from savedworker.checkpoint.container import Container
from savedworker.checkpoint.fingerprinting import FileDigests, instance_fingerprint, mapped_outside_layer
from savedworker.checkpoint.keys import MAX_INDEX, chunk_keys
from savedworker.checkpoint.layer import NoSpace
from savedworker.checkpoint.memory import (
    BaseDamaged,
    ByOffset,
    Captured,
    Chunks,
    InProcess,
    Keep,
    Source,
    Spill,
    Unreadable,
    capture,
    find_sources,
    shm_size,
    shm_sources,
    space_name,
)
from savedworker.checkpoint.network import reset_all
from savedworker.checkpoint.pace import Pace, Work
from savedworker.checkpoint.preflight import preflight
from savedworker.checkpoint.priority import beside, give_way
from savedworker.crashpoints import crash_point
from savedworker.model import defaults
from savedworker.model.compression import FIRST_LEVEL
from savedworker.model.errors import Fatal, Refused, Temporary
from savedworker.model.manifest import (
    Cause,
    ImageFile,
    Manifest,
    OpenVolumeFile,
    StoredFile,
    StoredMemory,
    StreamPosition,
)
from savedworker.model.rates import Rates
from savedworker.model.spec import Volume
from savedworker.model.units import format_duration, format_size
from savedworker.store.chunks import ChunkStore
from savedworker.store.throttle import Throttle

log = logging.getLogger(__name__)

IMAGE_CHUNK = 4 << 20
_SPILL = "memory-spill"
_DUMP_RATE = 200 << 20
"""Bytes per second that even a slow disk takes; for the time after which a silent dump counts as stuck."""
_DUMP_PATIENCE = 20.0
_HOPELESS = 3.0
"""A checkpoint that is expected to take so many times longer than there is time is not begun."""
_TELLING = 1.0
"""Seconds of storing before their pace says how long the rest will take."""
_LIMITED = 0.1
"""Share of a time that threads waited, from which on it tells of the limit on what is sent and not of the store."""
_KERNEL_PATIENCE = 30.0
"""Seconds for which a thread that cannot be stopped is waited for before a checkpoint is given up."""
_FULL = 1 << 20
"""A disk with less than this many bytes counts as full."""


@dataclass(frozen=True)
class Saved:
    """A committed checkpoint. Durations in seconds."""

    manifest: Manifest
    seconds: float
    frozen_seconds: float
    bytes_uploaded: int
    keys: frozenset[str]
    """Of all chunks of the checkpoint."""
    closed: int = 0
    """Outside connections that were destroyed (only with hold)."""
    zstd_level: int = FIRST_LEVEL
    """At which the last of its chunks were compressed."""
    bytes_as_is: int = 0
    """Bytes of its memory and files that were uploaded without compression, since they would not shrink."""
    mended: int = 0
    """Chunks of earlier checkpoints that had gone from the store, or had become shorter, and are put again where still needed."""


@dataclass(frozen=True)
class _Cut:
    """What was taken inside the freeze."""

    frozen_at: datetime
    upper: layer.Pending
    shm: layer.Pending
    shm_memory: list[ByOffset]
    """What of ``/dev/shm`` is memory: read where it is, inside the freeze."""
    log: StreamPosition
    volume_files: tuple[OpenVolumeFile, ...]
    mapped: dict[str, str]


@dataclass(frozen=True)
class _Memory:
    """What of the memory was read inside the freeze, to be stored after it."""

    captured: Captured
    spill: Spill
    written: list[Source]
    """The spaces that CRIU wrote to files: not read yet."""


@dataclass(frozen=True)
class _Stored:
    """What became of one cut. ``seconds``: for its memory; ``held_up``: for all else, if a limit on what is sent was in its way."""

    manifest: Manifest
    keys: frozenset[str]
    memory: Captured
    seconds: float
    limited: bool
    """Whether such a limit was in the way of the memory."""
    held_up: float


def tcp_option(container: Container) -> str:
    """With a private network every connection inside the worker survives. With the host's none can: its addresses change."""
    return "tcp-established" if container.network else "tcp-close"


def volume_of(path: str, volumes: Iterable[Volume]) -> Volume | None:
    """The volume on which ``path``, as the worker sees it, lies: the innermost one. A volume may be a single file."""
    around = [v for v in volumes if path == v.target or path.startswith(v.target + "/")]
    return max(around, key=lambda v: len(v.target), default=None)


def _pieces(paths: Iterable[Path], still_wanted: Callable[[], None]) -> Iterator[bytes]:
    """The contents of ``paths``, one after the other, in pieces of IMAGE_CHUNK bytes."""
    piece = bytearray()
    for path in paths:
        with path.open("rb") as file:
            while data := file.read(IMAGE_CHUNK - len(piece)):
                still_wanted()
                piece += data
                if len(piece) == IMAGE_CHUNK:
                    yield bytes(piece)
                    piece.clear()
    if piece:
        yield bytes(piece)


@contextlib.contextmanager
def _threads(count: int, background: bool = False) -> Iterator[ThreadPoolExecutor]:
    """Threads for hashing, comparing, compressing and storing, whose libraries let go of the GIL.

    More than there are cores where most of them wait for the store. In the background they give way to the worker.
    """
    pool = ThreadPoolExecutor(count, thread_name_prefix="saver", initializer=give_way if background else None)
    try:
        yield pool
    finally:
        pool.shutdown(wait=True, cancel_futures=True)


class TooLate(Fatal):
    """The checkpoint would not be committed in time. The last complete one stands."""

    code = "too_late"


class _Progress:
    """Called before every piece of memory that is stored: looks whether the rest can be stored by ``deadline``.

    ``new`` and ``known``: bytes that the base lacks and has. One waits for the store and the other for this instance, and they need not come
    in equal parts: how long each takes is seen apart. Of one of which less than an eighth is done nothing is said.
    """

    def __init__(
        self, new: int, known: int, deadline: float | None, still_wanted: Callable[[], None]
    ) -> None:
        self._deadline, self._still_wanted = deadline, still_wanted
        self._kinds = {False: _Kind(new), True: _Kind(known)}
        self._began = time.monotonic()
        self._lock = threading.Lock()
        self._under_way: dict[int, tuple[_Kind, int, float]] = {}
        """What each thread is at, how many bytes of it, and since when."""

    def __call__(self, size: int, known: bool) -> None:
        self._still_wanted()
        if self._deadline is None:
            return
        now = time.monotonic()
        with self._lock:
            before = self._under_way.get(threading.get_ident())
            if before is not None:
                kind, piece, began = before
                kind.done += piece
                kind.busy += now - began
            self._under_way[threading.get_ident()] = self._kinds[known], size, now
            kinds, spent = self._kinds.values(), now - self._began
            if spent < _TELLING:
                return
            busy = sum(x.busy for x in kinds) + sum(now - began for _, _, began in self._under_way.values())
            left = sum(x.left for x in kinds) * spent / busy if busy else 0.0  # several threads are at it
            done, total = sum(x.done for x in kinds), sum(x.total for x in kinds)
        late = now + left - self._deadline
        if left and late > 0:
            raise TooLate(
                f"{format_size(done)} of {format_size(total)} of memory were stored in {format_duration(spent)}: "
                f"the rest would come {format_duration(late)} too late",
                "take checkpoints more often (--checkpoint-interval auto), so that less is left to be stored",
            )


@dataclass
class _Kind:
    """Memory of one kind: bytes of it, and bytes and seconds of threads so far."""

    total: int
    done: int = 0
    busy: float = 0.0

    @property
    def left(self) -> float:
        """Seconds of one thread for the rest, as far as what is done tells."""
        if not self.done or self.done < self.total / 8:
            return 0.0
        return max(0, self.total - self.done) * self.busy / self.done


class _Stretch:
    """A stretch of time that begins now: its seconds, and whether many of them went by waiting, as what is sent is limited."""

    def __init__(self, throttle: Throttle) -> None:
        self._throttle = throttle
        self._began, self._waited = time.monotonic(), throttle.waited

    @property
    def seconds(self) -> float:
        return time.monotonic() - self._began

    @property
    def limited(self) -> bool:
        return self._throttle.waited - self._waited > _LIMITED * self.seconds


class Door(Protocol):
    """What must not be under way across a freeze: the worker's calls to its engine. See ``agent/relay``."""

    def hold(self, number: str) -> None:
        """Right before the freeze for checkpoint ``number``: have nothing under way."""

    def thawed(self) -> None:
        """The worker runs again, and its state has been taken."""

    def release(self) -> None:
        """The checkpoint failed, and the worker runs on."""


class Saver:
    """Takes the checkpoints of one incarnation. Not for two threads at once."""

    def __init__(
        self,
        container: Container,
        chunks: ChunkStore,
        drain: Callable[[], StreamPosition],
        door: Door | None = None,
    ) -> None:
        self._door = door
        self._container = container
        self._chunks = chunks
        self._drain = drain
        self._digests = FileDigests()
        self._snapshot: layer.Snapshot | None = None
        self._shm: layer.Snapshot | None = None
        self.pace = Pace()
        self._keeper = BaseKeeper(container, lambda: self._chunks)
        self._base = self._keeper.base
        self._readable = True
        """Whether the memory of frozen processes can be read from outside, as far as is known."""
        self._runc: subprocess.Popen[bytes] | None = None
        self._abandoned: subprocess.Popen[bytes] | None = None

    def keep(self, memory: Sequence[StoredMemory]) -> Keep:
        """For a restore of a checkpoint with this ``memory``: what keeps of it what the next checkpoint is told against."""
        return self._keeper.keep(memory, self._chunks.shares.waiting // 2)

    def start_from(
        self, snapshot: layer.Snapshot, shm: layer.Snapshot, memory: Sequence[StoredMemory]
    ) -> None:
        """Take over what a restore knows of layer, ``/dev/shm`` and ``memory``, so that what does not change is not stored again."""
        self._snapshot, self._shm = snapshot, shm
        self._keeper.start_from(memory)

    def read_ahead(self) -> None:
        """Store the layer's files as they are now, so that less is left for the freeze."""
        self._precopy()

    def hurry(self) -> None:
        """Have a periodic checkpoint that is under way send as fast as it can, or see at once that it is not wanted any more."""
        self._chunks.throttle.limit(None)

    def start_warming(self) -> None:
        """Read a base of the worker's memory in the background, so that the first checkpoint is small as well."""
        self._chunks.throttle.limit(self._container.spec.checkpoint.bandwidth)
        self._keeper.start()

    def warm_now(self, still_wanted: Callable[[], None] = lambda: None) -> None:
        """Read what the base lacks, on this thread. Raises what ``still_wanted`` does, SavedWorkerError, OSError."""
        self._keeper.warm_now(still_wanted)

    def stop_warming(self) -> None:
        """End that; what was read stays."""
        self._keeper.stop()

    def save(
        self,
        number: str,
        cause: Cause,
        publish: Callable[[Manifest], None],
        hold: bool = False,
        still_wanted: Callable[[], None] = lambda: None,
        committed: Callable[[Saved], None] | None = None,
        deadline: float | None = None,
    ) -> Saved:
        """Take checkpoint ``number`` and ``publish`` its manifest once all of its data is in the store.

        With ``hold`` the worker is frozen throughout; ``still_wanted`` may raise until the last moment to let it run on, and
        ``committed`` is called before it is killed (raising there lets it run on, too). Raises Refused when something cannot be
        saved, Temporary when another try may do, TooLate when it would not be committed by ``deadline`` (time.monotonic()), Fatal
        otherwise; the worker then runs on, its connections untouched.
        """
        throttle = self._chunks.throttle

        def unhindered() -> None:
            """``still_wanted``; what ends a checkpoint early does not wait for bytes that may not be sent yet."""
            try:
                still_wanted()
            except BaseException:
                throttle.limit(None)
                raise

        published: list[Manifest] = []

        def publish_it(manifest: Manifest) -> None:
            published.append(manifest)
            publish(manifest)

        warming = self._keeper.warming
        throttle.limit(None)
        self.stop_warming()
        try:
            self._await_abandoned(still_wanted)
            self._can_be_in_time(deadline)
            throttle.limit(None if hold else self._container.spec.checkpoint.bandwidth)
            while True:
                try:
                    return self._take(number, cause, publish_it, hold, unhindered, committed, deadline)
                except Unreadable as error:
                    if not self._readable:
                        raise
                    log.warning("%s: the checkpoint is taken again, and CRIU writes the memory", error)
                    self._readable = False
                except NoSpace as error:
                    if published or not self._base.size or self.problems(hold):
                        raise  # without a base there would not be enough, either
                    log.warning("%s: the checkpoint is taken again, without a base of the memory", error)
                    self._keeper.give_up()
        finally:
            throttle.limit(self._container.spec.checkpoint.bandwidth)  # for what is read ahead
            if warming:
                self.start_warming()

    def _take(
        self,
        number: str,
        cause: Cause,
        publish: Callable[[Manifest], None],
        hold: bool,
        still_wanted: Callable[[], None],
        committed: Callable[[Saved], None] | None,
        deadline: float | None,
    ) -> Saved:
        started = time.monotonic()
        uploaded_before, as_is_before = self._chunks.bytes_uploaded, self._chunks.meter.bytes_as_is
        self._chunks.begin_save()
        mended = 0 if hold else len(self._chunks.check_known())
        if mended:
            log.warning("%d chunks are missing from the store or truncated, and are put again", mended)
        reasons = preflight(self._container.pids(), self._container.spec)
        if reasons:
            raise Refused("; ".join(reasons), "see docs/compatibility.md")
        folder = self._container.home.path / f"images-{number}"
        home = self._container.home
        for left in (*home.path.glob("images-*"), *home.stage.glob(layer.STAGES)):
            shutil.rmtree(left, ignore_errors=True)  # of a save in which an agent before this one was killed
        written = self._written(hold)
        self._keeper.check_space(written)
        self._keeper.make_room(written)
        folder.mkdir(mode=0o700)
        cuts: list[_Cut] = []
        try:
            precopy, once = self._read_files(not hold, still_wanted)
            self._wait_until_it_can_stop(still_wanted)
            still_wanted()
            shm = self._reusable(self._shm)
            memories: list[_Memory] = []
            saved: list[Saved] = []
            dump_started = time.monotonic()
            thawed_at: list[float] = []

            def of_use() -> None:
                """Raises when this cut is for nothing: a runc that was killed can leave its CRIU, and so us, at work."""
                still_wanted()
                self._check_runc()

            def at_the_cut() -> None:
                of_use()
                criu = self._tracers()
                crash_point("checkpoint.cut.before")
                affinity.remember(self._container.pids(), folder)
                cuts.append(self._cut(precopy, shm, frozen_at, of_use))
                crash_point("checkpoint.cut.after")
                if not hold:
                    memories.append(self._read_memory(folder, cuts[0], of_use))
                    crash_point("checkpoint.cut.memory")
                    self._check_frozen(criu)
                    thawed_at.append(time.monotonic())
                    return
                stored = self._store(number, cause, folder, cuts[0], None, of_use, deadline)
                manifest = stored.manifest
                of_use()
                self._check_frozen(criu)
                publish(manifest)
                network = self._container.network
                result = Saved(
                    manifest=manifest,
                    seconds=time.monotonic() - started,
                    frozen_seconds=time.monotonic() - dump_started,
                    bytes_uploaded=self._chunks.bytes_uploaded - uploaded_before,
                    keys=stored.keys,
                    zstd_level=self._chunks.meter.level,
                    bytes_as_is=self._chunks.meter.bytes_as_is - as_is_before,
                )
                if committed is not None:
                    committed(result)
                self._check_runc()
                pids = self._container.pids()
                closed = len(network.destroy_outbound(pids)) if network else reset_all(pids)
                crash_point("checkpoint.closed.after")
                saved.append(replace(result, closed=closed))

            frozen_at = datetime.now(UTC)
            crash_point("checkpoint.dump.before")
            try:
                if self._door is not None:
                    self._door.hold(number)
                    still_wanted()
                self._dump(folder, not hold, self._can_read_live(hold), at_the_cut, still_wanted)
            except BaseException:
                if self._door is not None:
                    self._door.release()
                raise
            if self._door is not None and not hold:
                self._door.thawed()
            crash_point("checkpoint.dump.after")
            if hold:
                return saved[0]
            stored = beside(
                True, partial(self._store, number, cause, folder, cuts[0], memories[0], still_wanted)
            )
            manifest, memory, store = stored.manifest, stored.memory, stored.seconds
            publish(manifest)
            seconds, frozen = time.monotonic() - started, thawed_at[0] - dump_started
            rest = max(0.0, seconds - frozen - store - once - stored.held_up)
            self.pace = self.pace.learnt(
                Work(memory.bytes_new, memory.bytes_known, frozen, None if stored.limited else store, rest)
            )
            return Saved(
                manifest=manifest,
                seconds=seconds,
                frozen_seconds=frozen,
                bytes_uploaded=self._chunks.bytes_uploaded - uploaded_before,
                keys=stored.keys,
                zstd_level=self._chunks.meter.level,
                bytes_as_is=self._chunks.meter.bytes_as_is - as_is_before,
                mended=mended,
            )
        finally:
            for cut in cuts:
                cut.upper.discard()
                cut.shm.discard()
            shutil.rmtree(folder, ignore_errors=True)

    def _read_files(
        self, beside_worker: bool, still_wanted: Callable[[], None]
    ) -> tuple[layer.PreCopy, float]:
        """``_precopy``, and its seconds that say nothing of another checkpoint: there was more to be stored than there will be, or it had to wait."""
        first, stretch = self._snapshot is None, _Stretch(self._chunks.throttle)
        precopy = beside(beside_worker, partial(self._precopy, still_wanted))
        return precopy, stretch.seconds if first or stretch.limited else 0.0

    def _written(self, hold: bool) -> int:
        """Bytes of memory that are to be written to the disk, at most: by CRIU, or by us if the worker is to run on."""
        container = self._container
        if not hold or not self._can_read_live(hold):
            return container.memory()
        in_files = max(0, shm_size(container.home.shm) - container.shm_restored)
        return max(0, container.cgroup.shared_memory() - in_files)

    def _can_read_live(self, hold: bool) -> bool:
        """Whether the memory is better read from the frozen processes than written by CRIU.

        A worker that is to run on soon waits until what is new is on local disk, which CRIU does faster.
        """
        return self._readable and (hold or self._base.size > self._container.memory() / 2)

    def seconds_to_safe(self) -> float:
        """How long a checkpoint would take now, from a notice to its commit, going by those that were taken here."""
        return self.pace.seconds(*self._sizes())

    def _sizes(self) -> tuple[int, int]:
        """Bytes of memory that the base lacks and has, by and large."""
        memory = self._container.memory()
        known = min(self._base.size, memory)
        return memory - known, known

    def rates(self) -> Rates | None:
        """What ``seconds_to_safe`` goes by, for people; None before anything was measured."""
        pace = self.pace
        if not pace.measured:
            return None
        return Rates(
            dump=pace.dump,
            new=pace.new,
            known=pace.known,
            rest=pace.rest,
            base=self._base.size,
            measured=pace.measured,
        )

    def _can_be_in_time(self, deadline: float | None) -> None:
        """Raises TooLate when not even a far better pace than that of the checkpoints before would do."""
        if deadline is None or not self.pace.measured:
            return
        left, need = deadline - time.monotonic(), self.pace.measured_seconds(*self._sizes())
        if need > _HOPELESS * max(left, 0.0):
            raise TooLate(
                f"a checkpoint takes about {format_duration(need)} here and {format_duration(max(left, 0.0))} are left",
                "take checkpoints more often (--checkpoint-interval auto), so that less is left to be stored",
            )

    def problems(self, hold: bool = False) -> list[str]:
        """Why no checkpoint could be taken now, for want of room."""
        try:
            self._keeper.check_space(self._written(hold))
        except Fatal as error:
            return [error.message]
        return []

    def _precopy(self, still_wanted: Callable[[], None] = lambda: None) -> layer.PreCopy:
        home = self._container.home
        with self._chunks.putting(still_wanted) as put:
            result = layer.precopy(
                home.upper,
                put,
                self._reusable(self._snapshot),
                mapped=lambda: layer.shared_writable_files(self._container.pids(), home.upper),
                check=still_wanted,
            )
        self._snapshot = result.snapshot
        mapped_outside_layer(self._container.pids(), self._container.lower, home.upper, self._digests)
        return result

    def _reusable(self, snapshot: layer.Snapshot | None) -> layer.Snapshot:
        """What is known of a tree, without the files that are to be stored anew: a chunk may not be in the store any more, or is hardly used."""
        states = {} if snapshot is None else snapshot.states
        waste = layer.wasteful(states.values())
        return layer.Snapshot(
            {
                file: state
                for file, state in states.items()
                if all(x.key not in waste and self._chunks.is_fresh(x.key) for x in state.data)
            }
        )

    def _wait_until_it_can_stop(self, still_wanted: Callable[[], None]) -> None:
        """Wait while a thread is in the kernel and cannot be stopped (state D), as the parent of a vfork or on a lost share.

        The worker runs on meanwhile. CRIU would hold all of it frozen for ten seconds and then give up: the child that a
        vfork waits for is frozen too. Threads that wait for a disk again and again are no matter. Raises Temporary.
        """
        waiting = processes.uninterruptible(self._container.pids())
        until = time.monotonic() + _KERNEL_PATIENCE
        while waiting:
            still_wanted()
            if time.monotonic() > until:
                thread = min(waiting)
                who = f"pid {processes.inner_pid(thread)} ({processes.name_of(thread)})"
                raise Temporary(f"{who} waits in the kernel (state D) and cannot be stopped", retry_after=60)
            time.sleep(0.02)
            waiting &= processes.uninterruptible(self._container.pids())

    def _cut(
        self,
        precopy: layer.PreCopy,
        shm_before: layer.Snapshot,
        frozen_at: datetime,
        still_wanted: Callable[[], None],
    ) -> _Cut:
        """Everything that must be of the very moment of the freeze."""
        home, pids = self._container.home, self._container.pids()
        mapped = layer.shared_writable_files(pids, home.upper)
        upper = layer.finish(home.upper, precopy, home.stage, dirty=mapped, check=still_wanted)
        try:
            shm = layer.finish(
                home.shm,
                layer.PreCopy(shm_before),
                home.stage,
                trust_ctime=False,
                check=still_wanted,
                apart=space_name,
            )
            return _Cut(
                frozen_at=frozen_at,
                upper=upper,
                shm=shm,
                shm_memory=shm_sources(home.shm, shm.apart.values()),
                log=self._drain(),
                volume_files=self._volume_files(pids),
                mapped=mapped_outside_layer(pids, self._container.lower, home.upper, self._digests),
            )
        except BaseException:
            upper.discard()
            raise

    def _volume_files(self, pids: list[int]) -> tuple[OpenVolumeFile, ...]:
        found: dict[tuple[str, bool], OpenVolumeFile] = {}
        volumes = self._container.spec.volumes
        for pid in pids if volumes else ():
            for file in processes.open_files(pid, lambda target: volume_of(target, volumes)):
                volume = volume_of(file.target, volumes)
                if file.flags & os.O_ACCMODE == os.O_RDONLY or volume is None or volume.read_only:
                    continue
                with contextlib.suppress(OSError):
                    status = os.stat(f"/proc/{pid}/fd/{file.fd}")
                    append = bool(file.flags & os.O_APPEND)
                    if stat.S_ISREG(status.st_mode) and status.st_nlink:
                        found[file.target, append] = OpenVolumeFile(
                            path=os.path.relpath(file.target, volume.target),
                            volume=volume.target,
                            size=status.st_size,
                            append=append,
                        )
        return tuple(found.values())

    def _processes(self) -> dict[int, int]:
        """Inner to outer pid of the worker's processes."""
        return {processes.inner_pid(pid): pid for pid in self._container.pids()}

    def _capture(
        self,
        sources: Sequence[Source],
        chunks: Callable[[], Chunks],
        pool: Executor,
        keep: bool,
        wanted: Callable[[], Callable[[int, bool], None]],
    ) -> Captured:
        """``capture``, told against nothing if the base cannot be relied on.

        ``chunks`` makes where it goes, ``wanted`` what is asked whether it still is, anew for each try.
        """
        try:
            return capture(sources, self._base, chunks(), pool, keep, wanted())
        except BaseDamaged as error:
            log.warning("%s: all of the memory is stored anew", error)
            self._keeper.give_up()
            return capture(sources, self._base, chunks(), pool, keep, wanted())

    def _in_time(
        self, sources: Sequence[Source], deadline: float | None, still_wanted: Callable[[], None]
    ) -> _Progress:
        sizes = {False: 0, True: 0}
        for source in sources if deadline is not None else ():
            for window in source.space.windows:
                sizes[self._base.find(source.space.name, window.number) is not None] += window.size
        return _Progress(sizes[False], sizes[True], deadline, still_wanted)

    def _read_memory(self, folder: Path, cut: _Cut, still_wanted: Callable[[], None]) -> _Memory:
        """Inside the freeze: read what CRIU did not write, and keep what of it is new or has changed."""
        sources = find_sources(folder, self._processes())
        live: list[Source] = [x for x in sources if isinstance(x, InProcess)]
        live += cut.shm_memory
        written = [x for x in sources if not isinstance(x, InProcess)]
        spills: list[Spill] = []

        def spill() -> Spill:
            spills.append(Spill(folder / _SPILL, self._chunks))
            return spills[-1]

        with _threads(min(self._chunks.shares.threads, len(os.sched_getaffinity(0)))) as pool:
            captured = self._capture(live, spill, pool, False, lambda: lambda *_: still_wanted())
        return _Memory(captured, spills[-1], written)

    def _store(
        self,
        number: str,
        cause: Cause,
        folder: Path,
        cut: _Cut,
        read: _Memory | None,
        still_wanted: Callable[[], None],
        deadline: float | None = None,
    ) -> _Stored:
        """Put all data of the checkpoint into the store.

        With ``read`` the worker runs meanwhile, and is not to be disturbed; the next checkpoint is told against this one.
        """
        before, stretch = self._chunks.bytes_uploaded, _Stretch(self._chunks.throttle)
        with _threads(self._chunks.shares.threads, background=read is not None) as pool:
            if read is None:
                sources = [*find_sources(folder, self._processes()), *cut.shm_memory]
                in_time = partial(self._in_time, sources, deadline, still_wanted)
                memory = self._capture(sources, lambda: self._chunks, pool, False, in_time)
            else:
                memory = self._store_memory(read, pool, still_wanted)
        if read is not None:
            self._keeper.renew(memory, self._chunks.bytes_uploaded - before)
        store_seconds, limited = stretch.seconds, stretch.limited
        stretch = _Stretch(self._chunks.throttle)
        crash_point("checkpoint.store.memory")
        images = [
            path
            for path in sorted(folder.iterdir())
            if path.name not in memory.files
            and path.name != _SPILL
            and path.suffix != ".log"
            and not path.name.startswith("stats-")
        ]
        packed = self._chunks.put_many(_pieces(images, still_wanted))
        apart = [folder / x.name for x in memory.spaces if x.name == x.pages]
        sizes = {path.name: path.stat().st_size for path in (*images, *apart)}
        size_packed = sum(sizes[path.name] for path in images)
        crash_point("checkpoint.store.images")
        with self._chunks.putting(still_wanted) as put:
            layer_index, snapshot = cut.upper.complete(put)
            shm_index, shm_snapshot = cut.shm.complete(put)
        crash_point("checkpoint.store.layer")
        self._snapshot, self._shm = snapshot, shm_snapshot
        layer_file, shm_file = self._store_index("layer", layer_index), self._store_index("shm", shm_index)
        held_up = stretch.seconds if stretch.limited else 0.0
        spec = self._container.spec
        manifest = Manifest(
            worker=spec.id,
            number=number,
            incarnation=int(number.split("-")[0]),
            cause=cause,
            frozen_at=cut.frozen_at,
            images=tuple(ImageFile(name=name, size=size) for name, size in sizes.items()),
            packed=StoredFile(name="packed", size=size_packed, chunks=tuple(packed)),
            memory=memory.spaces,
            layer=layer_file,
            shm=shm_file,
            log=cut.log,
            volume_files=cut.volume_files,
            runtime=self._container.runtime,
            fingerprint=instance_fingerprint(self._container.tools, spec.image).model_copy(
                update={"mapped_files": cut.mapped}
            ),
            bytes_image=size_packed + sum(x.size for x in memory.spaces if x.pages is not None),
        )
        keys = chunk_keys(manifest, layer_index, shm_index)
        return _Stored(manifest, keys, memory, store_seconds, limited, held_up)

    def _store_memory(self, read: _Memory, pool: Executor, still_wanted: Callable[[], None]) -> Captured:
        """Store what was read inside the freeze and what CRIU wrote to files."""

        def wanted(*_: object) -> None:
            still_wanted()

        keep = self._keeper.has_room()
        try:
            read.spill.store(read.captured, self._base, pool, keep, wanted)
        except BaseDamaged:
            self._keeper.give_up()  # so that the next checkpoint is told against nothing
            raise
        return read.captured + self._capture(read.written, lambda: self._chunks, pool, keep, lambda: wanted)

    def _store_index(self, name: str, index: layer.LayerIndex) -> StoredFile:
        data = index.to_bytes()
        if len(data) > MAX_INDEX:
            raise Refused(
                f"the worker's files are too many: {len(index.entries)} of them in its {name}",
                "put them into archives, or on a volume",
            )
        keys = self._chunks.put_many(data[i : i + IMAGE_CHUNK] for i in range(0, len(data), IMAGE_CHUNK))
        return StoredFile(name=name, size=len(data), chunks=tuple(keys))

    def _dump(
        self,
        folder: Path,
        keep_running: bool,
        live: bool,
        at_the_cut: Callable[[], None],
        still_wanted: Callable[[], None],
    ) -> None:
        """Run the dump with ``at_the_cut`` inside the freeze. However it fails, the worker runs on (soon, if not wanted).

        With ``live`` CRIU is not to write the memory of the processes: ``at_the_cut`` reads it.
        """
        home = self._container.home
        (home.criu_work / "dump.log").unlink(missing_ok=True)
        watches.write_map(home.criu_work, watches.find_paths(self._container.pids()))
        reached = threading.Event()
        self._runc = None

        def cut() -> None:
            reached.set()
            at_the_cut()

        with hooks.serving(home.path, {"post-dump": cut}) as (script, failure):
            home.criu_conf.write_text(
                f"{tcp_option(self._container)}\nskip-in-flight\nlink-remap\ncpu-cap\n"
                f"ghost-limit {defaults.GHOST_LIMIT}\n"
                f"network-lock skip\naction-script {script}\n"
            )
            process = subprocess.Popen(
                self._container.checkpoint_command(folder, keep_running),
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                env=self._container.environment() | ({native.LIVE_PAGES: "live"} if live else {}),
            )
            self._runc = process
            status = self._wait(process, reached, still_wanted)
        if status != 0:
            self._let_run_on()
            self._container.clear_after_criu()
            if failure.error is not None:
                raise failure.error
            if free_space(home.path) < _FULL:  # CRIU's log, which would say so, may be on that disk too
                raise NoSpace(
                    f"the disk for checkpoint images, {home.path}, is full",
                    "free space or give a larger disk",
                )
            raise criu_errors.explain(home.criu_work / "dump.log", self._container.runc_words())

    def _tracers(self) -> dict[int, int]:
        """Who traces the worker's processes: CRIU, from the freeze to its end."""
        return {pid: processes.tracer_of(pid) for pid in self._container.pids()}

    def _check_frozen(self, criu: dict[int, int]) -> None:
        """Raises Fatal when CRIU, which traced these processes, has let go of them since, or had before: what was read is not of one moment."""
        if not any(criu.values()) or self._tracers() != criu:
            raise Fatal("CRIU ended in the middle of the dump", "see whether something kills processes here")

    def _check_runc(self) -> None:
        if self._runc is not None and self._runc.poll() is not None:
            raise Fatal("runc ended in the middle of the dump", "see whether something kills processes here")

    def _wait(
        self, process: subprocess.Popen[bytes], reached: threading.Event, still_wanted: Callable[[], None]
    ) -> int:
        """The dump's exit status. A dump that does not get to its cut in time is stuck: thaw first, kill only then.

        A stopped process deadlocks CRIU on the version 1 freezer; thawing lets CRIU end by itself (PLATFORM hazard 4). One
        that is not wanted any more is left alone, since a CRIU that is killed can take the worker with it.
        """
        patience = _DUMP_PATIENCE + self._container.memory() / _DUMP_RATE
        until = time.monotonic() + patience
        while not reached.is_set():
            try:
                return process.wait(timeout=0.05)
            except subprocess.TimeoutExpired:
                pass
            try:
                still_wanted()
            except BaseException:
                self._abandoned = process
                raise
            if time.monotonic() > until:
                log.warning("the dump made no progress within %.0f s: thawing the worker", patience)
                self._let_run_on()
                try:
                    process.wait(timeout=10)
                except subprocess.TimeoutExpired:
                    process.kill()
                    process.wait()
                    self._let_run_on()
                self._container.clear_after_criu()
                raise Temporary(
                    f"the worker could not be frozen and dumped within {patience:.0f} s", retry_after=60
                )
        return process.wait()

    def _await_abandoned(self, still_wanted: Callable[[], None]) -> None:
        """Wait for the end of a dump that was abandoned: its CRIU lets the worker run on as soon as it misses its folder."""
        until = time.monotonic() + _DUMP_PATIENCE
        while self._abandoned is not None:
            still_wanted()
            if self._abandoned.poll() is not None:
                self._abandoned = None
                self._let_run_on()
                self._container.clear_after_criu()
            elif time.monotonic() > until:
                raise Temporary("the dump before this one has not ended yet", retry_after=_DUMP_PATIENCE)
            else:
                time.sleep(0.02)

    def _let_run_on(self) -> None:
        self._container.cgroup.thaw()
