"""All measurements of one run: which there are, what a figure is called, and what it is held against."""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any

from savedworker.agent.config import memory_budget
from savedworker.bench import machine, measures
from savedworker.bench.measures import Peer
from savedworker.bench.summary import Figure, Results, figure
from savedworker.model.spec import WorkerSpec

PARTS = (
    "overhead",
    "freeze",
    "restore",
    "change",
    "reclaim",
    "shared",
    "notice",
    "sealing",
    "memory",
    "files",
)
KINDS = ("scattered", "contiguous", "heap", "growth", "incompressible")


@dataclass(frozen=True)
class Plan:
    """What is measured. ``sizes`` in GiB of worker; ``scratch`` is on the disk that is measured."""

    parts: Sequence[str] = PARTS
    sizes: Sequence[float] = (0.5, 1.0, 2.0)
    kinds: Sequence[str] = KINDS
    runs: int = 3
    """Samples of each figure."""
    scratch: Path = Path("/var/tmp")
    interpreter: str = sys.executable
    """The Python that the workers run; needs numpy."""
    peer: Callable[[Path], Peer] | None = None
    """Makes the peer that ``reclaim`` is measured beside. It runs /usr/bin/python3, and then ours does."""
    store: str | None = None
    """Where freeze, restore, change, reclaim, shared, sealing and files store; without it a directory on the disk."""
    store_name: str = ""
    """What that is, for people; the kind of its URL unless given."""
    quick: bool = False


def measure(plan: Plan, say: Callable[[str], None], results: Results) -> None:
    """Measure all of ``plan`` into ``results``, one part after the other. Raises SavedWorkerError."""
    f = results.figures
    parts: dict[str, Callable[[float, Path], None]] = {
        "freeze": lambda gib, folder: _freeze(plan, folder, gib, f, results.notes),
        "restore": lambda gib, folder: _restore(plan, folder, gib, f),
        "change": lambda gib, folder: _change(plan, folder, gib, f),
        "reclaim": lambda gib, folder: _reclaim(plan, folder, gib, f, say),
        "shared": lambda gib, folder: _shared(plan, folder, gib, f),
        "notice": lambda gib, folder: _notice(plan, folder, gib, f),
        "sealing": lambda gib, folder: _sealing(plan, folder, gib, f),
        "memory": lambda gib, folder: _memory(plan, folder, gib, f),
    }
    try:
        for name, part in parts.items():
            for gib in plan.sizes if name in plan.parts else ():
                say(f"{name}, {gib:g} GiB")
                _in_scratch(plan.scratch, partial(part, gib))
        if "files" in plan.parts:
            count = 500 if plan.quick else 10_000
            say(f"files, {count}")
            _in_scratch(plan.scratch, lambda folder: _files(plan, folder, count, f))
        if "overhead" in plan.parts:
            say("overhead")
            _in_scratch(plan.scratch, lambda folder: _overhead(plan, folder, f))
            _in_scratch(plan.scratch, lambda folder: _idle(plan, folder, f))
    finally:
        results.header["load_after"] = machine.load()


def begin(plan: Plan) -> Results:
    """No figures yet; what the machine is like before them."""
    header = {
        "at": datetime.now(UTC).isoformat(timespec="seconds"),
        "machine": machine.describe(plan.scratch),
        "load_before": machine.load(),
        "load_after": machine.load(),
        "runs": plan.runs,
        "sizes_gib": list(plan.sizes),
        "store": plan.store_name or (plan.store or "file").partition(":")[0] + "://",
        "page_cache": "warm, unless a figure says cold",
    }
    return Results(header, [], {})


def _freeze(plan: Plan, folder: Path, gib: float, figures: list[Figure], notes: dict[str, Any]) -> None:
    s, spent = measures.freeze(folder, plan.interpreter, gib, plan.runs, plan.store)
    per_gib = 1 / gib
    figures += [
        *(
            figure(
                f"freeze {how}, {of}, {gib:g} GiB",
                s[f"{of_key}_{how_key}"],
                "s/GiB",
                s[f"runc_{how_key}"],
                "≤ 1.15",
                per_gib,
            )
            for of, of_key in (("first checkpoint", "ours"), ("later ones", "again"))
            for how, how_key in (("seen by the worker", "seen"), ("by CRIU's count", "criu"))
        ),
        figure(f"first full save to committed, runs on, {gib:g} GiB", s["ours_wall"], "s", s["runc_wall"]),
        figure(f"later ones, nothing changed, {gib:g} GiB", s["again_wall"], "s", s["runc_wall"]),
    ]
    notes[f"Where a save of {gib:g} GiB spends its time"] = spent


def _restore(plan: Plan, folder: Path, gib: float, figures: list[Figure]) -> None:
    for cold in (False, True):
        kind = "cold" if cold else "warm"
        s = measures.save_and_restore(folder, plan.interpreter, gib, plan.runs, cold, plan.store)
        figures.append(
            figure(
                f"restore to running, {kind} cache, {gib:g} GiB", s["ours_restore"], "s", s["runc_restore"]
            )
        )
        if not cold:
            figures.append(figure(f"held save to committed, {gib:g} GiB", s["hold_to_committed"], "s"))
            figures.append(
                figure(
                    f"runc's part of our restore, {gib:g} GiB", s["ours_runc_alone"], "s", s["runc_restore"]
                )
            )


def _change(plan: Plan, folder: Path, gib: float, figures: list[Figure]) -> None:
    s = measures.change(folder, plan.interpreter, gib, plan.runs, plan.store)
    figures += [
        figure(
            f"uploaded after 5% scattered change, {gib:g} GiB",
            s["uploaded_share"],
            "% of the image",
            None,
            "≤ 2",
            100,
        ),
        figure(f"save after 5% scattered change, {gib:g} GiB", s["seconds"], "s"),
    ]


def _reclaim(plan: Plan, folder: Path, gib: float, figures: list[Figure], say: Callable[[str], None]) -> None:
    for kind in plan.kinds[:1] if plan.quick else plan.kinds:
        say(f"reclaim, {gib:g} GiB, {kind}")
        s = measures.reclaim(folder, plan.interpreter, kind, gib, plan.runs, plan.peer, plan.store)
        what = f"{gib:g} GiB, {kind}"
        against = s.get("peer_save")
        sooner, first = ("≤ 0.17", "≤ 0.4") if kind != "incompressible" else ("", "")
        less = "≤ 2" if kind == "scattered" else ""  # the others have memory that is all new
        back = "≤ 0.33"
        if against is None:  # these are shares of the peer's time
            sooner = first = back = ""
        on_disk = []
        if "peer_durable" in s:
            name = f"the same without a base, both on the disk, {what}"
            on_disk.append(figure(name, s["first"], "s", s["peer_durable"], than="podman export and fsync"))
        figures += [
            figure(f"notice to committed, {what}", s["notice"], "s", against, sooner, than="podman export"),
            figure(f"the same without a base, {what}", s["first"], "s", against, first, than="podman export"),
            *on_disk,
            figure(
                f"the same against runc alone, {what}",
                s["notice"],
                "s",
                s["runc_save"],
                than="runc checkpoint",
            ),
            figure(f"uploaded, {what}", s["uploaded"], "% of the image", None, less, 100),
            figure(f"level of zstd chosen, {what}", s["level"], ""),
            figure(f"stored as is, base included, {what}", s["as_is"], "% of the image", None, "", 100),
            figure(
                f"restore to running, {what}",
                s["restore"],
                "s",
                s.get("peer_restore"),
                back,
                than="podman import",
            ),
            figure(
                f"the same against runc alone, {what}",
                s["restore"],
                "s",
                s["runc_restore"],
                than="runc restore",
            ),
        ]


def _shared(plan: Plan, folder: Path, gib: float, figures: list[Figure]) -> None:
    s = measures.shared(folder, plan.interpreter, gib, plan.runs, plan.store)
    what, per_gib = f"{gib:g} GiB in /dev/shm", 1 / gib
    figures += [
        figure(f"notice to committed, {what}", s["notice"], "s"),
        figure(f"the same without a base, {what}", s["first"], "s"),
        figure(f"uploaded, {what}", s["uploaded"], "% of it", None, "", 100),
        figure(f"freeze of a periodic checkpoint, {what}", s["frozen_again"], "s/GiB", None, "", per_gib),
        figure(f"freeze of one without a base, {what}", s["frozen_first"], "s/GiB", None, "", per_gib),
        figure(f"restore to running, {what}", s["restore"], "s"),
    ]


def _notice(plan: Plan, folder: Path, gib: float, figures: list[Figure]) -> None:
    s = measures.notice(folder, plan.interpreter, gib, plan.runs)
    figures += [
        figure(f"preempt to notice seen, {gib:g} GiB", s["asked_to_seen"], "s"),
        figure(f"notice seen to committed, {gib:g} GiB", s["seen_to_committed"], "s"),
        figure(f"committed to running elsewhere, {gib:g} GiB", s["committed_to_running"], "s"),
        figure(f"away, {gib:g} GiB", s["away"], "s"),
    ]


def _sealing(plan: Plan, folder: Path, gib: float, figures: list[Figure]) -> None:
    s = measures.sealing(folder, plan.interpreter, gib, plan.runs, plan.store)
    for what, name in (("held save to committed", "save"), ("restore to running", "restore")):
        for kind, unit in (("", "s"), ("_cpu", "CPU-s")):
            figures.append(
                figure(
                    f"{what} with a key, {gib:g} GiB",
                    s[f"sealed_{name}{kind}"],
                    unit,
                    s[f"plain_{name}{kind}"],
                    than="without a key",
                )
            )


def _memory(plan: Plan, folder: Path, gib: float, figures: list[Figure]) -> None:
    budget = memory_budget(WorkerSpec(id="bench", command=("bench",)), os.environ) >> 20
    for kind in ("contiguous",) if plan.quick else ("scattered", "contiguous"):
        peaks = measures.agent_memory(folder / kind, plan.interpreter, kind, gib)
        figures += [
            figure(
                f"agent's peak memory, {what}, {gib:g} GiB, {kind}",
                samples,
                "MiB",
                None,
                f"≤ {budget}",
                2**-20,
            )
            for what, samples in peaks.items()
        ]


def _files(plan: Plan, folder: Path, count: int, figures: list[Figure]) -> None:
    s = measures.files(folder, plan.interpreter, count, plan.runs, plan.store)
    figures += [
        figure(f"first full save to committed, {count} small files", s["save"], "s"),
        figure(f"objects stored for it, {count} small files", s["objects"], ""),
        figure(f"restore to running, {count} small files", s["restore"], "s"),
    ]


def _overhead(plan: Plan, folder: Path, figures: list[Figure]) -> None:
    rounds, interval = (300, 2.0) if plan.quick else (4000, 10.0)
    s = measures.overhead(folder, plan.interpreter, 0.1, rounds, plan.runs, interval)
    n = figure("", s["on_checkpoints"], "").value
    figures += [
        figure(
            "CPU of the worker's fixed work, checkpoints off",
            s["off"],
            "s",
            s["bare"],
            "≤ 1.01",
            than="bare process",
        ),
        figure(
            f"the same, {n:.0f} checkpoints (every {interval:g} s)",
            s["on"],
            "s",
            s["bare"],
            "≤ 1.01",
            than="bare process",
        ),
        figure("CPU of agent and shim beside it, off", s["off_agent"], "s"),
        figure(f"CPU of agent and shim beside it, {n:.0f} checkpoints of 0.1 GiB", s["on_agent"], "s"),
    ]


def _idle(plan: Plan, folder: Path, figures: list[Figure]) -> None:
    share = measures.idle(folder, plan.interpreter, 3.0 if plan.quick else 30.0)["share"]
    figures.append(
        figure("CPU of agent and shim between checkpoints", share, "% of a core", None, "≤ 1", 100)
    )


def _in_scratch(parent: Path, action: Callable[[Path], None]) -> None:
    folder = measures.scratch(parent)
    try:
        action(folder)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
