"""Notice: a warning that the instance will be taken, whatever its source; and what every monitor does."""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
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


class Polling(ABC):
    """A monitor that looks at its source again and again, every ``_poll`` seconds; ``_problem`` is why it sees nothing."""

    def __init__(self, poll: float) -> None:
        self._poll = poll
        self._problem: str | None = None

    @abstractmethod
    def look(self) -> Iterator[Notice]:
        """Look at the source once; yields what has changed since. Never raises."""

    def watch(self, stop: threading.Event, emit: Callable[[Notice], None]) -> None:
        """Emit every notice once, and again when it is withdrawn, until ``stop`` is set."""
        while not stop.is_set():
            for notice in self.look():
                emit(notice)
            stop.wait(self._poll)

    def problem(self) -> str | None:
        """Why notices cannot be seen at present, in one line; None when they can (or nobody has looked yet)."""
        return self._problem


class Monitor(Protocol):
    """Watches one source."""

    source: str

    def watch(self, stop: threading.Event, emit: Callable[[Notice], None]) -> None:
        """Call ``emit`` for every new or withdrawn notice until ``stop`` is set. Never raises; runs in its own thread."""
        ...

    def problem(self) -> str | None:
        """Why this monitor cannot see notices at present, in one line; None when it works."""
        ...
