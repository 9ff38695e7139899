"""For how long no engine has been heard of, by this machine's own clock: whether the record's mark changes, not what it says."""

from __future__ import annotations

import time
from datetime import datetime

from savedworker.model.record import WorkerRecord


class EngineWatch:
    """Fed with every record that is seen. Before the first one, the silence counts from the beginning."""

    def __init__(self) -> None:
        self._mark: datetime | None = None
        self._since = time.monotonic()

    def saw(self, record: WorkerRecord) -> None:
        """Notice whether somebody looked after the worker since the record before this one."""
        if record.engine_heard_at != self._mark:
            self._mark, self._since = record.engine_heard_at, time.monotonic()

    @property
    def silent(self) -> float:
        """Seconds since the mark last changed."""
        return time.monotonic() - self._since
