"""SIGTERM as a notice, for fleets that reclaim an instance by stopping what runs on it.

SIGTERM does not say why. So whoever can know is asked first: a worker that was cancelled, terminated by a person or ran
into its time limit is at its end, and is not saved. Everything else, silence included, is a notice.
"""

from __future__ import annotations

import hashlib
import logging
import os
import queue
import signal
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from types import FrameType

from savedworker.notice.base import Notice

log = logging.getLogger(__name__)

ANSWER_SHARE = 0.2
"""Share of the grace that ``confirm`` may take before SIGTERM counts as a notice."""
ANSWER_LIMIT = 5.0
_LOOK_UP = 1.0
"""Seconds between two looks whether to stop; signals and answers are waited for, not looked for."""


@dataclass(frozen=True)
class _Answer:
    """What ``confirm`` came to."""

    reason: str | None


class SigtermMonitor:
    """Turns SIGTERM into a notice with ``grace`` seconds, unless ``confirm`` says that it is final.

    Args:
        grace: Seconds between SIGTERM and SIGKILL, as far as is known of this fleet.
        confirm: Reads the record and the fleet's reason. Returns why this is the end (``cancelled``, ``terminated``,
            ``time limit``), or None if it is not known to be. May block and may raise: time and SIGKILL do not wait for it.
        final: Called with that reason, from a thread of the monitor, instead of a notice. When the answer comes after the
            notice, the notice is withdrawn first.
    """

    source = "sigterm"

    def __init__(
        self,
        grace: float,
        confirm: Callable[[], str | None],
        final: Callable[[str], None] = lambda reason: None,
    ) -> None:
        self._grace = grace
        self._confirm = confirm
        self._final = final
        self._happened: queue.SimpleQueue[float | _Answer] = queue.SimpleQueue()
        """When a signal came, or what ``confirm`` answered; its put() may be called in a signal handler."""
        self._installed = False
        self.final_reason: str | None = None
        """Why SIGTERM was the end; None while it was not."""

    def install(self) -> None:
        """Handle SIGTERM from now on. Main thread only (Python allows no other); raises ValueError elsewhere."""
        signal.signal(signal.SIGTERM, self._received)
        self._installed = True

    def _received(self, number: int, frame: FrameType | None) -> None:
        self._happened.put(time.monotonic())

    def problem(self) -> str | None:
        """Says so when the handler is not installed."""
        return None if self._installed else "SIGTERM is not handled: install() was not called"

    def watch(self, stop: threading.Event, emit: Callable[[Notice], None]) -> None:
        """Emit one notice, however many SIGTERM come, until ``stop`` is set."""
        notice: Notice | None = None
        received: float | None = None
        notice_at = 0.0
        answered = False
        while not stop.is_set():
            happened = self._next(None if received is None or notice is not None else notice_at)
            if isinstance(happened, float) and received is None:
                received = happened
                notice_at = received + min(ANSWER_LIMIT, ANSWER_SHARE * self._grace)
                threading.Thread(target=self._ask, daemon=True, name="sigterm-confirm").start()
            if received is None or self.final_reason is not None:
                continue
            if isinstance(happened, _Answer) and not answered:
                answered = True
                self.final_reason = happened.reason
                if self.final_reason is not None:
                    if notice is not None:
                        detail = f"not a notice: {self.final_reason}"
                        emit(
                            Notice(
                                notice.id,
                                self.source,
                                "interruption",
                                notice.deadline,
                                detail,
                                withdrawn=True,
                            )
                        )
                    self._final(self.final_reason)
                    continue
            if notice is None and (answered or time.monotonic() >= notice_at):
                notice_id = hashlib.sha256(f"{self.source} {os.getpid()} {received}".encode()).hexdigest()[
                    :16
                ]
                detail = f"SIGTERM, {self._grace:g}s of grace assumed"
                notice = Notice(notice_id, self.source, "interruption", received + self._grace, detail)
                emit(notice)

    def _next(self, until: float | None) -> float | _Answer | None:
        """The next signal or answer; None after a while, and at ``until`` (time.monotonic()) at the latest."""
        wait = _LOOK_UP if until is None else min(_LOOK_UP, max(0.0, until - time.monotonic()))
        try:
            return self._happened.get(timeout=wait)
        except queue.Empty:
            return None

    def _ask(self) -> None:
        reason = None
        try:
            reason = self._confirm()
        except Exception:  # whatever fails in the store or the fleet, the worker is still to be saved
            log.warning("why SIGTERM came could not be found out, so it is taken for a notice", exc_info=True)
        self._happened.put(_Answer(reason))
