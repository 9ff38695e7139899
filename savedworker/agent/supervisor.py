"""Keeps the agent running on an instance that has nobody else for that: the main program of a container, or of user data.

An agent that crashes is started again and re-attaches to its shim; one that ends well ends the instance. SIGTERM is passed on.
"""

from __future__ import annotations

import contextlib
import ctypes
import logging
import os
import selectors
import shutil
import signal
import socket
import subprocess
import time
from collections.abc import Sequence
from pathlib import Path

from savedworker.checkpoint.allocator import in_huge_pages

log = logging.getLogger(__name__)

RESTARTS = 20
"""Crashes after which the instance is given up, as on the local fleet."""
FIRST_PAUSE, LONGEST_PAUSE = 1.0, 30.0
HANDLER_PATIENCE = 10.0
"""Seconds for which an agent may take to handle SIGTERM before it gets one that came earlier."""
_PR_SET_CHILD_SUBREAPER = 36


def supervise(
    command: Sequence[str],
    state_dir: Path,
    *,
    restarts: int = RESTARTS,
    first_pause: float = FIRST_PAUSE,
    patience: float = HANDLER_PATIENCE,
) -> int:
    """Run ``command`` until it ends with 0, or has crashed too often. Returns its last exit status (128+n for signal n).

    ``state_dir`` is removed at the end: what is durable is in the store, and a host may serve others. Main thread only.
    """
    # Orphans (the shim of an agent that crashed) become children of this process, so that it can collect them.
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    waker, woken = socket.socketpair()
    waker.setblocking(False)
    woken.setblocking(False)
    signal.set_wakeup_fd(waker.fileno(), warn_on_full_buffer=False)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    told = _Told()
    signal.signal(signal.SIGTERM, told.hear)
    signal.signal(signal.SIGINT, told.hear)
    crashes = 0
    try:
        with selectors.DefaultSelector() as selector:
            selector.register(woken, selectors.EVENT_READ)
            while True:
                status = _one_life(command, selector, woken, told, patience)
                if status == 0 or (told.to_end and status == 128 + signal.SIGTERM):
                    return status  # in the other case it had nothing to save: it did not handle SIGTERM yet
                crashes += 1
                if crashes > restarts:
                    log.error("the agent crashed %d times, at last with status %d: given up", crashes, status)
                    return status
                pause = min(first_pause * 2 ** (crashes - 1), LONGEST_PAUSE)
                log.warning("the agent ended with status %d, restart %d in %.1f s", status, crashes, pause)
                begun = time.monotonic()
                # Once SIGTERM has come every second counts: the container is killed soon.
                while (left := begun + (first_pause if told.to_end else pause) - time.monotonic()) > 0:
                    _sleep(selector, woken, left)
                    _reap(None)
    finally:
        signal.set_wakeup_fd(-1)
        shutil.rmtree(state_dir, ignore_errors=True)


class _Told:
    """SIGTERM, for the agent: also for one that is not running at the moment."""

    def __init__(self) -> None:
        self.to_end = False

    def hear(self, *_: object) -> None:
        self.to_end = True


def _one_life(
    command: Sequence[str],
    selector: selectors.BaseSelector,
    woken: socket.socket,
    told: _Told,
    patience: float,
) -> int:
    # A session of its own: Ctrl-C at a terminal is passed on once, not twice.
    agent = subprocess.Popen(
        command, stdin=subprocess.DEVNULL, env=in_huge_pages(os.environ), start_new_session=True
    )
    passed_on = False
    until = time.monotonic() + patience
    while True:
        status = _reap(agent.pid)
        if status is not None:
            agent.returncode = status
            return status
        waiting = told.to_end and not passed_on
        # Before it handles SIGTERM an agent would die of it, and what was meant as a notice would be lost.
        if waiting and (_handles_sigterm(agent.pid) or time.monotonic() >= until):
            passed_on = True
            with contextlib.suppress(ProcessLookupError):
                os.kill(agent.pid, signal.SIGTERM)
        _sleep(selector, woken, 0.05 if waiting and not passed_on else 1.0)


def _handles_sigterm(pid: int) -> bool:
    try:
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    except OSError:
        return False
    caught = next((line.split()[1] for line in lines if line.startswith("SigCgt:")), "0")
    return bool(int(caught, 16) >> (signal.SIGTERM - 1) & 1)


def _sleep(selector: selectors.BaseSelector, woken: socket.socket, seconds: float) -> None:
    """Until a signal comes, at most ``seconds``."""
    if selector.select(seconds):
        with contextlib.suppress(BlockingIOError):
            woken.recv(4096)


def _reap(agent: int | None) -> int | None:
    """Collect ended children. The agent's exit status if it was among them."""
    found: int | None = None
    while True:
        try:
            pid, status = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            return found
        if pid == 0:
            return found
        if pid == agent:
            code = os.waitstatus_to_exitcode(status)
            found = code if code >= 0 else 128 - code
