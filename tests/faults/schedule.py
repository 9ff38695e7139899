"""A schedule: what is done to a worker, and after how many of its steps. Drawn from a seed, so that it can be played again."""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import Literal

from savedworker.model.record import State
from tests.faults.proxy import TROUBLES

Store = Literal["file", "s3"]


@dataclass(frozen=True)
class Step:
    """Once ``after`` more steps of the worker have arrived, do ``fault`` in the variant ``word``."""

    after: int
    fault: str
    word: str


@dataclass(frozen=True)
class Schedule:
    """One worker's fate. ``expected`` is how it has to end."""

    seed: int
    store: Store
    steps: tuple[Step, ...]
    expected: State
    length: int
    interval: float | None

    def __str__(self) -> str:
        does = "; ".join(f"after {x.after}: {x.fault} {x.word}".strip() for x in self.steps)
        return f"seed {self.seed} ({self.store}, {self.length} steps, interval {self.interval}): {does} -> {self.expected}"


_CHECKPOINT = (
    "agent.commit.before", "agent.commit.after", "checkpoint.dump.before", "checkpoint.cut.before",
    "checkpoint.cut.after", "checkpoint.dump.after", "checkpoint.store.memory", "checkpoint.store.images", "checkpoint.store.layer",
    "store.chunk.before", "store.chunk.after", "store.manifest.before", "store.manifest.after", "store.event.before",
)  # fmt: skip
_LEAVING = (
    *_CHECKPOINT[:5], *_CHECKPOINT[6:], "checkpoint.dump.after", "agent.leaving.noted", "agent.hand_over.before",
    "agent.hand_over.after", "checkpoint.closed.after", "agent.reattach.before",
)  # fmt: skip
_MOVE = (
    "agent.take.before", "agent.take.after", "agent.attached", "agent.shim.launched", "agent.runc.before",
    "agent.runc.after", "agent.restored.before", "agent.restored.after", "restore.layer.after", "restore.images.small", "restore.images.after",
    "restore.runc.before", "restore.runc.after", "restore.thaw.before", "shim.begin", "shim.start", "shim.started",
    "logs.begin.before",
)  # fmt: skip
_RUNNING = (
    "agent.renew.before", "agent.renew.answered", "agent.renew.proved", "logs.piece.before", "logs.piece.after",
    "shim.lease", "shim.answer", "store.event.before",
)  # fmt: skip
_SWAP = ("store.swap.written", "store.swap.claimed", "store.swap.promoted")
_END = (
    "agent.finish.before", "agent.finish.after", "agent.release.before", "agent.release.after", "shim.ended",
    "shim.answer",
)  # fmt: skip
_LOST = (
    "checkpoint.cut.before", "checkpoint.cut.after", "checkpoint.store.images", "store.chunk.after",
    "store.manifest.before", "store.manifest.after", "agent.commit.before", "agent.commit.after",
    "checkpoint.dump.after", "agent.hand_over.before", "agent.hand_over.after", "restore.layer.after",
    "restore.images.after", "restore.runc.before", "restore.thaw.before", "restore.runc.after", "agent.restored.before",
    "agent.restored.after", "agent.take.after",
)  # fmt: skip
_CONTROLLER = (
    "controller.launch.recorded", "controller.launch.called", "controller.terminate.before",
    "controller.terminate.after", "store.swap.claimed", "store.event.before",
)  # fmt: skip

MENU: dict[str, tuple[float, tuple[str, ...]]] = {
    "notice": (3, ("3", "6", "12", "20")),
    "no_notice": (2, ("",)),
    "notice_then_none": (2, ("100", "300", "600", "900", "1200", "2000")),
    "withdrawn": (2, ("50", "300", "600", "800", "1000", "1300", "2000")),
    "notice_during_restore": (1.5, ("3", "8", "15")),
    "daemon_killed": (1, ("",)),
    "host_stands_still": (1, ("1", "5", "7", "11")),
    "agent_killed": (1.5, ("",)),
    "agent_stopped": (2, ("1", "5", "7", "10")),
    "agent_stopped_for_good": (1, ("",)),
    "shim_killed": (1, ("",)),
    "agent_and_shim_killed": (0.7, ("",)),
    "shim_killed_beside_a_stopped_agent": (0.7, ("",)),
    "tool_killed_in_dump": (1, ("criu", "runc")),
    "tool_killed_in_last_dump": (1, ("criu", "runc")),
    "tool_killed_in_restore": (1, ("criu", "runc")),
    "crash_in_checkpoint": (3, _CHECKPOINT),
    "crash_in_leaving": (4, _LEAVING),
    "crash_in_move": (4, _MOVE),
    "crash_while_running": (2, _RUNNING),
    "host_lost_at": (3, _LOST),
    "crash_at_the_end": (1.5, _END),
    "controller_killed": (1.5, _CONTROLLER),
    "controller_away": (1, ("1", "3", "6")),
    "stray_launch": (1, ("known", "unknown")),
    "crash_in_yielding": (1, ("agent.yield.killed", "agent.yield.after", "agent.hand_over.after")),
    "agent_stuck_when_not_wanted": (0.5, ("",)),
    "crash_in_cancel": (0.7, ("agent.cancel.killed", "agent.release.before", "agent.release.after")),
    "cancel": (1, ("running", "checkpointing", "leaving", "migrating", "restoring")),
}
"""Fault -> how often it is drawn, and its variants."""
_TROUBLES = tuple(
    f"{trouble}:{method}:{key}:{times}"
    for trouble in TROUBLES
    for method, key in (
        ("PUT", "record"), ("GET", "record"), ("PUT", "chunk"), ("GET", "chunk"), ("PUT", "manifest"),
        ("GET", "manifest"), ("PUT", "event"), ("PUT", "log"), ("GET", "list"),
    )
    for times in (1, 3)
    if trouble != "truncate" or method == "GET"
)  # fmt: skip
S3_ONLY: dict[str, tuple[float, tuple[str, ...]]] = {
    "partition": (6, ("1", "3", "5", "7", "10", "0")),
    "store_trouble": (8, _TROUBLES),
    "store_trouble_in_move": (8, _TROUBLES),
}


def draw(seed: int, store: Store = "file") -> Schedule:
    """The schedule of ``seed``."""
    dice = random.Random(f"{store} {seed}")
    menu = {**MENU, **(S3_ONLY if store == "s3" else {})}
    names = list(menu)
    steps: list[Step] = []
    expected = State.SUCCEEDED
    for _ in range(dice.choice((1, 1, 2, 2, 2, 3))):
        name = dice.choices(names, [menu[n][0] for n in names])[0]
        word = dice.choice(menu[name][1])
        if name == "crash_in_leaving" and store == "file" and dice.random() < 0.15:
            word = dice.choice(_SWAP)
        if name.startswith("crash_") and "cancel" not in name and dice.random() < 0.25:
            word += dice.choice(
                ("=exit", "=hang:1", "=hang:5", "=stop")
                if not word.startswith("shim.")
                else ("=exit", "=hang:1")
            )
        steps.append(Step(dice.randrange(5, 60), name, word))
        if name in ("cancel", "crash_in_cancel"):
            expected = State.CANCELLED
            break
    length = sum(x.after for x in steps) + dice.randrange(60, 200)
    interval = dice.choice((0.7, 1.5, 1.5, 3.0, None))
    return Schedule(seed, store, tuple(steps), expected, length, interval)
