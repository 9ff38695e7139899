"""Named places in agent, shim, controller, store and checkpoint code at which a test can stop the process that gets there.

In production ``crash_point`` is one comparison. The environment variable SAVEDWORKER_CRASH arms it, read once at import:

* ``NAME[@NTH][=ACTION]`` (several: comma-separated): in every process, at the NTH time (1) that it gets there.
* an absolute path: a folder. The file ``NAME`` in it, with ``[@NTH][=ACTION][ in CGROUP]`` as content, arms NAME from then on
  until the first process that is hit renames it to ``NAME.hit``; ``in`` restricts it to processes whose cgroup's path
  contains the word, which tells hosts apart. ``seen/NAME`` says that a process got to NAME.

ACTION: ``kill`` (the default: SIGKILL to oneself), ``exit``, ``stop`` (SIGSTOP), ``hang:SECONDS`` (this thread only; armed by a file, not
longer than ``NAME.hit`` is there).

May import: nothing but the standard library, as the shim uses it.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import time
from pathlib import Path
from typing import Final

VARIABLE: Final = "SAVEDWORKER_CRASH"

POINTS: Final = frozenset(
    {
        "agent.take.before",
        "agent.take.after",
        "agent.left",
        "agent.attached",
        "agent.shim.launched",
        "agent.runc.before",
        "agent.runc.after",
        "agent.started.before",
        "agent.restored.before",
        "agent.restored.after",
        "agent.renew.before",
        "agent.renew.answered",
        "agent.renew.proved",
        "agent.commit.before",
        "agent.commit.after",
        "agent.leaving.noted",
        "agent.hand_over.before",
        "agent.hand_over.after",
        "agent.yield.killed",
        "agent.yield.after",
        "agent.finish.before",
        "agent.finish.after",
        "agent.cancel.killed",
        "inputs.found",
        "inputs.fetched",
        "outputs.planned",
        "outputs.staged",
        "outputs.visible.folder",
        "outputs.visible.file",
        "outputs.visible.large",
        "outputs.visible.small",
        "outputs.committed",
        "outputs.published",
        "agent.release.before",
        "agent.release.after",
        "agent.reattach.before",
        "checkpoint.dump.before",
        "checkpoint.cut.before",
        "checkpoint.cut.after",
        "checkpoint.cut.memory",
        "checkpoint.dump.after",
        "checkpoint.store.memory",
        "checkpoint.store.images",
        "checkpoint.store.layer",
        "checkpoint.closed.after",
        "restore.layer.after",
        "restore.images.small",
        "restore.images.after",
        "restore.runc.before",
        "restore.runc.after",
        "restore.thaw.before",
        "shim.begin",
        "shim.lease",
        "shim.start",
        "shim.started",
        "shim.ended",
        "shim.answer",
        "shim.freeze",
        "controller.launch.recorded",
        "controller.launch.called",
        "controller.terminate.before",
        "controller.terminate.after",
        "store.swap.written",
        "store.swap.claimed",
        "store.swap.promoted",
        "store.chunk.before",
        "store.chunk.after",
        "store.manifest.before",
        "store.manifest.after",
        "store.event.before",
        "collect.manifest.before",
        "collect.manifest.after",
        "collect.doomed.before",
        "collect.doomed.after",
        "collect.chunks.before",
        "collect.chunks.after",
        "collect.worker.before",
        "collect.worker.data",
        "collect.worker.spec",
        "logs.begin.before",
        "logs.piece.before",
        "logs.piece.after",
    }
)
"""Every name, each used in one place. A test compares this with the code, another that schedules get to all of them."""

EXIT_STATUS: Final = 70
_passed: dict[str, int] | None = {} if os.environ.get(VARIABLE) else None
"""How often each point was passed; None when nothing can be armed."""


def crash_point(name: str) -> None:
    """Stop here if a test asked for it."""
    if _passed is not None:
        _reach(name, _passed, os.environ.get(VARIABLE, ""))


def _reach(name: str, passed: dict[str, int], armed: str) -> None:
    if name not in passed and armed.startswith("/"):
        with contextlib.suppress(OSError):
            Path(armed, "seen", name).touch()
    passed[name] = passed.get(name, 0) + 1
    if armed.startswith("/"):
        _reach_file(name, passed, Path(armed))
        return
    for entry in armed.split(","):
        place, _, action = entry.partition("=")
        wanted, _, nth = place.strip().partition("@")
        if wanted == name and passed[name] == int(nth or 1):
            _act(name, action)


def _reach_file(name: str, passed: dict[str, int], folder: Path) -> None:
    file = folder / name
    try:
        place, _, cgroup = file.read_text().strip().partition(" in ")
    except OSError:
        passed[name] = 0  # NTH counts from the arming
        return
    nth, _, action = place.partition("=")
    if passed[name] < int(nth.removeprefix("@") or 1) or not _is_in(cgroup):
        return
    hit = folder / f"{name}.hit"
    try:
        file.rename(hit)
    except OSError:
        return  # another process was first
    _act(name, action, hit)


def _is_in(cgroup: str) -> bool:
    return not cgroup or cgroup in Path("/proc/self/cgroup").read_text()


def _act(name: str, action: str, hit: Path | None = None) -> None:
    sys.stderr.write(f"crash point {name}: {action or 'kill'} of {os.getpid()}\n")
    sys.stderr.flush()
    what, _, seconds = action.partition(":")
    match what:
        case "" | "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        case "stop":
            os.kill(os.getpid(), signal.SIGSTOP)
        case "exit":
            os._exit(EXIT_STATUS)
        case "hang":
            until = time.monotonic() + float(seconds)
            while (left := until - time.monotonic()) > 0 and (hit is None or hit.exists()):
                time.sleep(min(left, 0.02) if hit else left)
        case _:
            raise ValueError(f"{VARIABLE}: there is no action {action!r}")
