"""Notice: a warning that the instance will be taken, whatever its source; and what every monitor does."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, Protocol


@dataclass(frozen=True)
class Notice:
    """One warning. Equal ``id`` means the same warning, however often it is seen.

    ``deadline`` is on this machine's monotonic clock (``time.monotonic()`` seconds); None when the source names none
    (EC2 rebalance). ``withdrawn`` takes back an earlier notice of that id.
    """

    id: str
    source: str
    kind: Literal["interruption", "rebalance"]
    deadline: float | None
    detail: str = ""
    withdrawn: bool = False


class Monitor(Protocol):
    """Watches one source."""

    source: str

    def watch(self, stop: threading.Event, emit: Callable[[Notice], None]) -> None:
        """Call ``emit`` for every new or withdrawn notice until ``stop`` is set. Never raises; runs in its own thread."""
        ...

    def problem(self) -> str | None:
        """Why this monitor cannot see notices at present, in one line; None when it works."""
        ...
