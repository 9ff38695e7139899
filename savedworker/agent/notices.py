"""Collects what every notice monitor sees, and passes each notice on once."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable

from savedworker.agent.config import AgentConfig
from savedworker.model.errors import SavedWorkerError
from savedworker.model.record import State
from savedworker.notice.base import Monitor, Notice
from savedworker.notice.drill import DrillMonitor
from savedworker.notice.ec2 import Ec2Monitor
from savedworker.notice.sigterm import SigtermMonitor
from savedworker.store.worker import WorkerStore

log = logging.getLogger(__name__)

LOCAL_POLL = 0.5
EC2_POLL = 5.0
"""AWS advises to look every 5 seconds."""


class NoticeBoard:
    """The monitors of one agent. ``emit`` is called from their threads, once for each notice and each withdrawal."""

    def __init__(self, config: AgentConfig, worker: WorkerStore, emit: Callable[[Notice], None]) -> None:
        self._worker = worker
        self._emit = emit
        self._stop = threading.Event()
        self._seen: set[tuple[str, bool]] = set()
        self._lock = threading.Lock()
        sigterm = SigtermMonitor(config.sigterm_grace, self._final_reason)
        sigterm.install()
        self._monitors: list[Monitor] = [sigterm, DrillMonitor(config.state_dir / "drill.json")]
        if config.fleet in ("local", "ec2", "aws-batch"):
            poll = LOCAL_POLL if config.fleet == "local" else EC2_POLL
            self._monitors.append(Ec2Monitor(config.metadata, poll=poll))

    def start(self) -> None:
        """Watch, each source in a thread of its own."""
        for monitor in self._monitors:
            threading.Thread(
                target=monitor.watch,
                args=(self._stop, self._pass_on),
                name=f"notice-{monitor.source}",
                daemon=True,
            ).start()

    def stop(self) -> None:
        """Stop watching."""
        self._stop.set()

    def problems(self) -> list[str]:
        """Why notices cannot be seen at present."""
        found = ((monitor.source, monitor.problem()) for monitor in self._monitors)
        return [f"notices from {source} cannot be seen: {problem}" for source, problem in found if problem]

    def _pass_on(self, notice: Notice) -> None:
        with self._lock:
            if (notice.id, notice.withdrawn) in self._seen:
                return
            self._seen.add((notice.id, notice.withdrawn))
            self._seen.discard((notice.id, not notice.withdrawn))
        log.info("notice: %s", notice)
        self._emit(notice)

    def _final_reason(self) -> str | None:
        """SIGTERM: the record knows whether the worker was cancelled; then it is no notice."""
        try:
            record = self._worker.load_record().record
        except SavedWorkerError:
            return None
        return "cancelled" if record.state is State.CANCELLED else None
