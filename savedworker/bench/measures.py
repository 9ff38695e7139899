"""The measurements. Each returns samples; medians and ratios are made in ``summary``, from one run on one machine."""

from __future__ import annotations

import base64
import os
import secrets
import shutil
import signal
import subprocess
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Protocol

from savedworker.bench.rig import CHANGES, FILES, PROGRAM, SCATTER, SHARED, Rig, forget, phases, warm
from savedworker.checkpoint.cgroups import Cgroup
from savedworker.checkpoint.processes import inner_pid
from savedworker.controller.client import Client
from savedworker.fleet.local import LocalFleet
from savedworker.model import defaults
from savedworker.model.decisions import settled
from savedworker.model.errors import SavedWorkerError
from savedworker.model.record import State, WorkerRecord
from savedworker.model.spec import CheckpointPolicy, WorkerSpec
from savedworker.store.sealing import KEY, KEY_SIZE, PLAIN, sealing_from_environment

Samples = dict[str, list[float]]

FIXED_WORK = """
import sys, time
import numpy as np
array = np.random.default_rng(1).standard_normal((int(float(sys.argv[1]) * 2**30) // 8,))
print("ready", flush=True)
before = time.process_time()
for _ in range(int(sys.argv[2])):
    array *= 1.0000001
    array += 1e-9
print("used", time.process_time() - before, flush=True)
"""
SLEEPS = """
import time
print("ready", flush=True)
time.sleep(1e6)
"""
_READ_AHEAD = 6.0
"""Seconds after which the agent has read a small worker's memory ahead for the first time."""


def freeze(
    folder: Path, interpreter: str, gib: float, runs: int, store: str | None = None
) -> tuple[Samples, dict[str, float]]:
    """Freeze of a checkpoint that lets the worker run on, against ``runc checkpoint --leave-running`` of the same worker.

    ``ours``: the first one, of which nothing is stored yet. ``again``: the next, told against it. ``seen``: the longest pause that
    the worker itself saw. ``criu``: CRIU's own frozen time. They alternate. Every dump
    goes to an empty folder after a sync: into the page cache, not waiting for the disk. Our first save (reads all files of the
    layer, creates the store) is not counted.
    """
    samples: Samples = {}
    rig = Rig(folder, interpreter, store)
    try:
        saver = rig.start(PROGRAM, str(gib))
        rig.save(saver, 1)
        last: dict[str, float] = {}
        for run in range(runs):
            images = rig.images()
            gap, wall = rig.longest_gap(partial(rig.plain_checkpoint, images))
            _add(
                samples,
                runc_seen=gap,
                runc_criu=rig.criu_frozen_seconds(rig.container.home.criu_work),
                runc_wall=wall,
            )
            shutil.rmtree(images)
            rig.fresh_chunks()
            saver._chunks = rig.chunks
            saver._base.clear()
            with phases() as spent:
                gap, (saved, wall, _) = rig.longest_gap(partial(rig.save, saver, 2 * run + 2))
            last = spent
            criu = rig.criu_frozen_seconds(rig.container.home.criu_work)
            _add(samples, ours_seen=gap, ours_criu=criu, ours_reported=saved.frozen_seconds, ours_wall=wall)
            gap, (_, wall, _) = rig.longest_gap(partial(rig.save, saver, 2 * run + 3))
            criu = rig.criu_frozen_seconds(rig.container.home.criu_work)
            _add(samples, again_seen=gap, again_criu=criu, again_wall=wall)
        return samples, last
    finally:
        rig.close()


def save_and_restore(
    folder: Path, interpreter: str, gib: float, runs: int, cold: bool, store: str | None = None
) -> Samples:
    """A held save to committed (new store each time), and restore to running, against plain runc's of the same worker.

    Warm: everything that is read is in the page cache. Cold: images and chunks are put out of it before each restore.
    """
    samples: Samples = {}
    for _ in range(runs):
        rig = Rig(folder, interpreter, store)
        try:
            saver = rig.start(PROGRAM, str(gib))
            images, upper = rig.images(), folder / "upper"
            rig.plain_checkpoint(images)
            subprocess.run(["cp", "-a", str(rig.container.home.upper), str(upper)], check=True)
            saved, wall, manifest = rig.save(saver, 1, hold=True)
            _add(samples, hold_to_committed=saved.seconds, hold_wall=wall)
            for path in (folder / "store", images):
                if path.exists():
                    (forget if cold else warm)(path)
            whole, alone = rig.restore(manifest)
            _add(samples, ours_restore=whole, ours_runc_alone=alone)
            (forget if cold else warm)(images)
            _add(samples, runc_restore=rig.plain_restore(images, upper))
        finally:
            rig.close()
    return samples


def change(folder: Path, interpreter: str, gib: float, runs: int, store: str | None = None) -> Samples:
    """After 5% of the pages were changed, scattered: how much of the image is uploaded again, and how long that takes."""
    samples: Samples = {}
    rig = Rig(folder, interpreter, store)
    try:
        saver = rig.start(SCATTER, str(gib))
        rig.save(saver, 1)
        for run in range(runs):
            rig.change(run + 1)
            saved, wall, manifest = rig.save(saver, run + 2)
            _add(samples, uploaded_share=saved.bytes_uploaded / manifest.bytes_image, seconds=wall)
        return samples
    finally:
        rig.close()


def shared(folder: Path, interpreter: str, gib: float, runs: int, store: str | None = None) -> Samples:
    """A worker whose memory is a file of ``/dev/shm``: a held save without a base; then on another one periodic saves without and with a base, a
    held one with it, and its restore. Before all but the first of them 5% of the pages change, scattered.
    """
    samples: Samples = {}
    for _ in range(runs):
        rig = Rig(folder, interpreter, store)
        try:
            saver = rig.start(SHARED, str(gib))
            _at_hand(gib)
            _add(samples, first=rig.save(saver, 1, hold=True)[0].seconds)
        finally:
            rig.close()
        rig = Rig(folder, interpreter, store)
        try:
            saver = rig.start(SHARED, str(gib))
            _at_hand(gib)
            _add(samples, frozen_first=rig.save(saver, 1)[0].frozen_seconds)
            base = rig.container.home.path / "memory-base"
            rig.change(1)
            _at_hand(gib, base)
            _add(samples, frozen_again=rig.save(saver, 2)[0].frozen_seconds)
            rig.change(2)
            _at_hand(gib, base)
            saved, _, manifest = rig.save(saver, 3, hold=True)
            _add(samples, notice=saved.seconds, uploaded=saved.bytes_uploaded / (gib * 2**30))
            _at_hand(gib, rig.folder / "store")
            _add(samples, restore=rig.restore(manifest)[0])
        finally:
            rig.close()
    return samples


def sealing(folder: Path, interpreter: str, gib: float, runs: int, store: str | None = None) -> Samples:
    """A held first save and its restore with a key and without, alternately: seconds, and CPU-seconds of this process."""
    samples: Samples = {}
    key = base64.b64encode(secrets.token_bytes(KEY_SIZE)).decode()
    for _ in range(runs):
        for name, sealer in (
            ("plain", PLAIN),
            ("sealed", sealing_from_environment({KEY: key}).begin("bench")),
        ):
            rig = Rig(folder, interpreter, store, sealer)
            try:
                saver = rig.start(PROGRAM, str(gib))
                back(gib)
                before = time.process_time()
                saved, _, manifest = rig.save(saver, 1, hold=True)
                saving = time.process_time() - before
                restored, _ = rig.restore(manifest)
                _add(
                    samples,
                    **{
                        f"{name}_save": saved.seconds,
                        f"{name}_save_cpu": saving,
                        f"{name}_restore": restored,
                        f"{name}_restore_cpu": time.process_time() - before - saving,
                    },
                )
            finally:
                rig.close()
    return samples


def files(folder: Path, interpreter: str, count: int, runs: int, store: str | None = None) -> Samples:
    """A held first save of a worker that wrote ``count`` small files, the objects that this made, and its restore."""
    samples: Samples = {}
    for _ in range(runs):
        rig = Rig(folder, interpreter, store)
        try:
            saver = rig.start(FILES, str(count))
            saved, _, manifest = rig.save(saver, 1, hold=True)
            # Another instance has deleted nothing just now: an ext4 without journal looks long for an inode that was not used lately.
            rig.container.home.upper.rename(folder / "left")
            restored, _ = rig.restore(manifest)
            _add(samples, save=saved.seconds, objects=float(rig.chunks.chunks_uploaded), restore=restored)
        finally:
            rig.close()
    return samples


def back(gib: float) -> None:
    """Touch and free memory for three times ``gib``, as far as it is free, and sync: so that nobody is measured finding it.

    In a virtual machine the first write to a page that the host has not given yet is slow, for whoever comes first.
    """
    file = Path("/dev/shm/savedworker-bench")
    size = min(
        int(3 * gib * 2**30), _free_memory() - _LEFT_FREE
    )  # more would push files out of the page cache
    try:
        with file.open("wb", buffering=0) as out:
            piece = bytes(16 << 20)
            for _ in range(size // len(piece)):
                out.write(piece)
    finally:
        file.unlink(missing_ok=True)
    os.sync()


_LEFT_FREE = 512 << 20


def _free_memory() -> int:
    """Bytes that nothing uses, not even the page cache."""
    lines = Path("/proc/meminfo").read_text().splitlines()
    return next(int(x.split()[1]) << 10 for x in lines if x.startswith("MemFree:"))


def _at_hand(gib: float, *paths: Path) -> None:
    """Memory at hand, and ``paths`` in the page cache."""
    back(gib)
    for path in paths:
        warm(path)


class Peer(Protocol):
    """Another way to save and restore a worker. Times in seconds; of ``export`` until it has ended, and until it is on the disk."""

    archive: Path
    """What ``export`` writes."""

    def start(self, program: str, *args: str) -> None: ...
    def change(self, times: int) -> None: ...
    def export(self) -> tuple[float, float]: ...
    def import_(self) -> float: ...
    def close(self) -> None: ...


def reclaim(
    folder: Path,
    interpreter: str,
    kind: str,
    gib: float,
    runs: int,
    peer: Callable[[Path], Peer] | None,
    store: str | None = None,
) -> Samples:
    """A notice: held save of a worker whose base is there and 5% of whose memory then changed, and its restore.

    ``first``: the same without a base, as of a worker that has just begun. Against plain runc and ``peer``. The
    page cache is warm everywhere, and synced before each measurement.
    """
    samples: Samples = {}
    for _ in range(runs):
        for first in (True, False):
            rig = Rig(folder / "ours", "/usr/bin/python3" if peer else interpreter, store)
            try:
                saver = rig.start(CHANGES, kind, str(gib))
                images, upper = rig.images(), folder / "upper"
                if not first:
                    saver.warm_now()
                    rig.change(1)
                    _at_hand(gib)
                    _add(samples, runc_save=rig.plain_checkpoint(images))
                    shutil.rmtree(upper, ignore_errors=True)
                    subprocess.run(["cp", "-a", str(rig.container.home.upper), str(upper)], check=True)
                _at_hand(gib, rig.container.home.path / "memory-base")
                saved, _, manifest = rig.save(saver, 1, hold=True)
                if first:
                    _add(samples, first=saved.seconds)
                    continue
                _add(
                    samples,
                    notice=saved.seconds,
                    uploaded=saved.bytes_uploaded / manifest.bytes_image,
                    image=manifest.bytes_image / 2**30,
                    level=saved.zstd_level,
                    as_is=saver._chunks.meter.bytes_as_is / manifest.bytes_image,
                )
                _at_hand(gib, rig.folder / "store")
                _add(samples, restore=rig.restore(manifest)[0])
                _at_hand(gib, images)
                _add(samples, runc_restore=rig.plain_restore(images, upper))
            finally:
                rig.close()
        if peer is not None:
            other = peer(folder / "peer")
            try:
                other.start(CHANGES, kind, str(gib))
                other.change(1)
                _at_hand(gib)
                ended, durable = other.export()
                _add(samples, peer_save=ended, peer_durable=durable)
                _at_hand(gib, other.archive)
                _add(samples, peer_restore=other.import_())
            finally:
                other.close()
    return samples


@contextmanager
def product(folder: Path) -> Iterator[tuple[Client, LocalFleet, list[str]]]:
    """A store and a local fleet below ``folder``, and a controller that looks after the workers in the list."""
    fleet = LocalFleet(folder / "fleet")
    client = Client(f"file://{folder}/store", fleets=lambda _: fleet)
    workers: list[str] = []
    stop = threading.Event()

    def reconcile() -> None:
        while not stop.wait(0.1):
            for worker in list(workers):
                try:
                    client.reconcile(worker)
                except SavedWorkerError:
                    continue

    thread = threading.Thread(target=reconcile, daemon=True)
    thread.start()
    try:
        yield client, fleet, workers
    finally:
        for worker in workers:
            client.cancel(worker, "bench")
            _until(partial(_settled, client, worker), 60)
        stop.set()
        thread.join()
        shutil.rmtree(folder, ignore_errors=True)


def notice(folder: Path, interpreter: str, gib: float, runs: int) -> Samples:
    """The whole product: from ``preempt`` to committed, and to running on the next host, by the record's own events."""
    samples: Samples = {}
    with product(folder) as (client, _, workers):
        worker = _submit(client, workers, f"notice-{gib}", PROGRAM, str(gib), interpreter=interpreter)
        _until(partial(_ready, client, worker), 120)
        for run in range(runs):
            asked = time.time()
            client.preempt(worker, 120.0)
            record = _until_record(client, worker, partial(_runs_as, run + 2))
            events = client.report(worker).timeline
            seen = [e.at.timestamp() for e in events if e.event == "notice_received"][-1]
            committed = [e.at.timestamp() for e in events if e.event == "checkpoint_committed"][-1]
            running = record.incarnations[-1].started_at
            assert running is not None
            _add(
                samples,
                asked_to_seen=seen - asked,
                seen_to_committed=committed - seen,
                committed_to_running=running.timestamp() - committed,
                away=record.incarnations[-1].away_seconds,
            )
    return samples


def agent_memory(folder: Path, interpreter: str, kind: str, gib: float) -> Samples:
    """Bytes that an agent had in use at most: while it read ahead, saved after a change, saved for a reclaim, and restored."""
    samples: Samples = {}
    with product(folder) as (client, fleet, workers):
        worker = _submit(client, workers, "memory", CHANGES, kind, str(gib), interpreter=interpreter)
        _until(partial(_ready, client, worker), 300)
        agent = _agent_pid(client, fleet, worker)
        client.checkpoint(worker)
        _add(samples, **{"first checkpoint": _peak(agent)})
        _change(client, fleet, worker, 1)
        client.checkpoint(worker)
        _add(samples, **{"after a change of 5%": _peak(agent)})
        _change(client, fleet, worker, 2)
        ends = _while_it_lives(agent)
        client.preempt(worker, 120.0)
        _until_record(client, worker, partial(_runs_as, 2), 300)
        _add(samples, **{"last checkpoint": ends(), "restore": _peak(_agent_pid(client, fleet, worker))})
    return samples


def _agent_pid(client: Client, fleet: LocalFleet, worker: str) -> int:
    return next(pid for pid, children in _agent_and_shim(client, fleet, worker).items() if children)


def _peak(pid: int) -> float:
    """Bytes that process ``pid`` had in use at most so far; 0 when it is gone."""
    try:
        status = Path(f"/proc/{pid}/status").read_text()
    except OSError:
        return 0.0
    return max(
        (float(x.split()[1]) * 1024 for x in status.splitlines() if x.startswith("VmHWM:")), default=0.0
    )


def _while_it_lives(pid: int) -> Callable[[], float]:
    """Looks at process ``pid`` until it is gone; the result waits for that, and is its peak."""
    seen = 0.0

    def look() -> None:
        nonlocal seen
        while Path(f"/proc/{pid}").exists():
            seen = max(seen, _peak(pid))
            time.sleep(0.02)

    thread = threading.Thread(target=look, daemon=True)
    thread.start()

    def result() -> float:
        thread.join()
        return seen

    return result


def _change(client: Client, fleet: LocalFleet, worker: str, times: int) -> None:
    """Have the program change its memory for the ``times``-th time."""
    lease = client.record(worker).lease
    assert lease is not None
    for pid in Cgroup(f"{fleet.host(lease.launch).cgroup}/worker").pids():
        if inner_pid(pid) != 1:
            os.kill(pid, signal.SIGUSR1)
    _until(lambda: _output(client, worker).count("changed") >= times, 120)


def overhead(folder: Path, interpreter: str, gib: float, rounds: int, runs: int, interval: float) -> Samples:
    """CPU-seconds of fixed work: bare, as a worker without and with periodic checkpoints; and what agent and shim used meanwhile."""
    samples: Samples = {}
    with product(folder) as (client, fleet, workers):
        for run in range(runs):
            bare = subprocess.run(
                [interpreter, "-c", FIXED_WORK, str(gib), str(rounds)],
                capture_output=True,
                text=True,
                check=True,
            )
            started = time.monotonic()
            _add(samples, bare=_used(bare.stdout))
            for name, every in (("off", None), ("on", interval)):
                started = time.monotonic()
                worker = _submit(
                    client,
                    workers,
                    f"work-{name}-{run}",
                    FIXED_WORK,
                    str(gib),
                    str(rounds),
                    interpreter=interpreter,
                    interval=every,
                )
                _until(partial(_ready, client, worker), 120)
                agent = _agent_cpu(client, fleet, worker)
                record = _until_record(client, worker, settled, 600)
                events = client.report(worker).timeline
                _add(
                    samples,
                    **{
                        f"{name}": _used(_output(client, worker)),
                        f"{name}_agent": agent(),
                        f"{name}_checkpoints": float(sum(e.event == "checkpoint_committed" for e in events)),
                        f"{name}_wall": time.monotonic() - started,
                    },
                )
                assert record.state is State.SUCCEEDED, record.detail
    return samples


def idle(folder: Path, interpreter: str, seconds: float) -> Samples:
    """Share of a core that agent and shim use while a worker sleeps and no checkpoint is taken, after its memory was read ahead."""
    samples: Samples = {}
    with product(folder) as (client, fleet, workers):
        worker = _submit(client, workers, "idle", SLEEPS, interpreter=interpreter)
        _until(partial(_ready, client, worker), 120)
        time.sleep(_READ_AHEAD)
        pids = _agent_and_shim(client, fleet, worker)
        before, began = _total_cpu(pids), time.monotonic()
        time.sleep(seconds)
        _add(samples, share=(_total_cpu(pids) - before) / (time.monotonic() - began))
    return samples


def _agent_and_shim(client: Client, fleet: LocalFleet, worker: str) -> dict[int, bool]:
    """Their pids, and whether ended children count: those of the shim do not, as the worker is one."""
    lease = client.record(worker).lease
    assert lease is not None
    host = fleet.host(lease.launch)
    assert host.agent_pid is not None
    shim = int((host.scratch / "agent" / "shim" / "shim.pid").read_text())
    return {host.agent_pid: True, shim: False}


def _total_cpu(pids: dict[int, bool]) -> float:
    return sum(_cpu_seconds(pid, children) for pid, children in pids.items())


def _agent_cpu(client: Client, fleet: LocalFleet, worker: str) -> Callable[[], float]:
    """Samples what agent and shim use, with the programs that the agent ran (runc, CRIU), until they are gone."""
    pids = _agent_and_shim(client, fleet, worker)
    first = {pid: _cpu_seconds(pid, children) for pid, children in pids.items()}
    last = dict(first)

    def sample() -> None:
        while any(Path(f"/proc/{pid}").exists() for pid in pids):
            for pid, children in pids.items():
                last[pid] = max(last[pid], _cpu_seconds(pid, children))
            time.sleep(0.05)

    thread = threading.Thread(target=sample, daemon=True)
    thread.start()

    def result() -> float:
        thread.join(timeout=30)
        return sum(last.values()) - sum(first.values())

    return result


def _cpu_seconds(pid: int, children: bool) -> float:
    """User and system time of a process, and of its children that have ended (proc(5): stat, fields 14 to 17)."""
    try:
        words = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return 0.0
    return sum(map(int, words[11 : 15 if children else 13])) / os.sysconf("SC_CLK_TCK")


def _submit(
    client: Client,
    workers: list[str],
    name: str,
    program: str,
    *args: str,
    interpreter: str,
    interval: float | None = None,
) -> str:
    spec = WorkerSpec(
        id=name,
        command=(interpreter, "-u", "-c", program, *args),
        checkpoint=CheckpointPolicy(interval=interval),
        lease_term=defaults.LEASE_TERM_LOCAL,
    )
    client.submit(spec)
    workers.append(spec.id)
    return spec.id


def _output(client: Client, worker: str) -> str:
    return b"".join(getattr(piece, "data", b"") for piece in client.logs(worker, "stdout")).decode()


def _ready(client: Client, worker: str) -> bool:
    return "ready" in _output(client, worker)


def _settled(client: Client, worker: str) -> bool:
    return settled(client.record(worker))


def _runs_as(incarnation: int, record: WorkerRecord) -> bool:
    return len(record.incarnations) == incarnation and record.state is State.RUNNING


def _used(text: str) -> float:
    return float(text.split("used ")[1].split()[0])


def _until(condition: Callable[[], object], seconds: float) -> None:
    end = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > end:
            raise TimeoutError(f"not within {seconds:.0f} s")
        time.sleep(0.05)


def _until_record(
    client: Client, worker: str, condition: Callable[[WorkerRecord], object], seconds: float = 180.0
) -> WorkerRecord:
    _until(lambda: condition(client.record(worker)) or settled(client.record(worker)), seconds)
    record = client.record(worker)
    if not condition(record):
        raise RuntimeError(f"{worker} ended: {record.state} {record.detail}")
    return record


def scratch(parent: Path) -> Path:
    """A folder of our own on the disk that is measured."""
    return Path(tempfile.mkdtemp(prefix="sw-bench-", dir=parent))


def _add(samples: Samples, **values: float) -> None:
    for name, value in values.items():
        samples.setdefault(name, []).append(value)
