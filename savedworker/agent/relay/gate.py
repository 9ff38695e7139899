"""Holds requests back around a freeze: who closes the gate waits for those that are inside, and later ones wait before it."""

from __future__ import annotations

import threading
import time
from types import TracebackType

from savedworker.model.errors import SavedWorkerError


class Shut(SavedWorkerError):
    """The gate does not open any more: this incarnation is over, or has lost its lease."""

    code = "relay_shut"


class Gate:
    """For any number of threads. Open at first."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._inside = 0
        self._held = False
        self._shut = False

    @property
    def held(self) -> bool:
        """True while requests wait for a freeze to be over."""
        return self._held

    @property
    def shut(self) -> bool:
        """True once nothing passes any more."""
        return self._shut

    def enter(self) -> None:
        """Go in, as soon as the gate is open. Raises Shut."""
        with self._changed:
            while self._held and not self._shut:
                self._changed.wait()
            if self._shut:
                raise Shut("the relay of this incarnation is closed")
            self._inside += 1

    def leave(self) -> None:
        """Go out again."""
        with self._changed:
            self._inside -= 1
            self._changed.notify_all()

    def hold(self, patience: float) -> bool:
        """Let nobody in from now on, and wait up to ``patience`` seconds for those inside. True when none is left."""
        with self._changed:
            self._held = True
            until = time.monotonic() + patience
            while self._inside and (left := until - time.monotonic()) > 0:
                self._changed.wait(left)
            return not self._inside

    def release(self) -> None:
        """Open it again."""
        with self._changed:
            self._held = False
            self._changed.notify_all()

    def close(self) -> None:
        """Let nobody in any more; whoever waits gets Shut."""
        with self._changed:
            self._shut = True
            self._changed.notify_all()

    def wait_shut(self, seconds: float) -> bool:
        """Sleep, at most until the gate is shut. True when it is."""
        with self._changed:
            return self._changed.wait_for(lambda: self._shut, seconds)


class Pass:
    """One request's way through a gate: in and out again several times, and surely out in the end."""

    def __init__(self, gate: Gate) -> None:
        self._gate = gate
        self._inside = False

    def enter(self) -> None:
        """Raises Shut."""
        if not self._inside:
            self._gate.enter()
            self._inside = True

    def leave(self) -> None:
        """Nothing happens outside."""
        if self._inside:
            self._inside = False
            self._gate.leave()

    def __enter__(self) -> Pass:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.leave()
