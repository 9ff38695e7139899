"""Notices from a file on the instance: the drill of fleets that cannot be asked to take an instance away."""

from __future__ import annotations

import hashlib
import json
import os
import time
from collections.abc import Iterator
from pathlib import Path

from savedworker.notice.base import Notice, Polling

_LONGEST = 366 * 86400
"""Seconds."""


def give_notice(path: Path, notice: float | None) -> None:
    """Drill: warn the agent that watches ``path`` of an end in ``notice`` seconds; None: of one without a deadline."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    temporary.write_text(json.dumps({"notice": notice}))
    temporary.replace(path)


def withdraw_notice(path: Path) -> None:
    """Drill: take the warning back."""
    path.unlink(missing_ok=True)


class DrillMonitor(Polling):
    """Watches a file like ``{"notice": 30}``: seconds from the moment it was written, null for no deadline.

    A new content is a new notice; removing the file withdraws it. Nothing takes the instance away in the end.
    """

    source = "drill"

    def __init__(self, path: Path, poll: float = 0.5) -> None:
        super().__init__(poll)
        self._path = path
        self._standing: Notice | None = None

    def look(self) -> Iterator[Notice]:
        """Read the file once; yields what has changed."""
        try:
            notice = self._read()
        except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
            self._problem = f'{self._path} is not a drill like {{"notice": 30}}: {error}'
            return
        self._problem = None
        before = self._standing
        if before is not None and (notice is None or notice.id != before.id):
            self._standing = None
            yield Notice(
                before.id, self.source, before.kind, before.deadline, "drill withdrawn", withdrawn=True
            )
        if notice is not None and self._standing is None:
            self._standing = notice
            yield notice

    def _read(self) -> Notice | None:
        try:
            descriptor = os.open(self._path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
            with open(descriptor, "rb") as file:
                written = os.fstat(file.fileno()).st_mtime_ns
                content = file.read(4096)
        except FileNotFoundError:
            return None
        notice_id = hashlib.sha256(b"drill %d " % written + content).hexdigest()[:16]
        if self._standing is not None and self._standing.id == notice_id:
            return self._standing
        seconds = json.loads(content)["notice"]
        if seconds is None:
            return Notice(notice_id, self.source, "rebalance", None, "drill without a deadline")
        if isinstance(seconds, bool) or not 0 <= seconds <= _LONGEST:
            raise ValueError(f"{str(seconds)[:40]} seconds")
        # From the writing on, so that an agent that starts again sees the same end.
        left = max(0.0, seconds - (time.time() - written / 1e9))
        return Notice(
            notice_id, self.source, "interruption", time.monotonic() + left, f"drill of {seconds:g}s"
        )
