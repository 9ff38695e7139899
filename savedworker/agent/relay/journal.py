"""Which calls with an effect were answered since a checkpoint: a worker that goes back to it makes them again.

The calls are a tape with a head. Calls are written at the head; a checkpoint notes where the head was (its *mark*), and a restore
puts it back there. As long as what the worker asks then is what stands on the tape, it is recognised, and the tape has its answer. The
first difference cuts the rest of the tape off: from there on every call is a new one. So a call is recognised only when all since
the checkpoint was the same, in the same order.
"""

from __future__ import annotations

import base64
import hashlib
import threading
from collections.abc import Callable

from pydantic import Field

from savedworker.model.base import Count, Document, Frozen

CALLS_KEPT = 2000
BODY_KEPT = 64 << 10
"""Bytes of an answer that are kept; a call with a longer one is passed on again."""


class Call(Frozen):
    """One call that was answered. ``body`` is base64; None when it was too long to keep."""

    digest: str
    status: int
    content_type: str = ""
    body: str | None = None


class Tape(Document):
    """What is stored. ``first`` counts the calls before those that are kept; ``marks``: the head at each checkpoint."""

    first: Count = 0
    calls: tuple[Call, ...] = ()
    marks: dict[str, int] = Field(default_factory=dict)


def digest(method: str, path: str, body: bytes) -> str:
    """The name of a call: two calls with one name ask for the same."""
    return hashlib.sha256(f"{method} {path}\n".encode() + body).hexdigest()[:32]


class Journal:
    """The tape of one worker. ``save`` stores it, and may fail: then calls may be repeated that were not noted."""

    def __init__(self, tape: Tape | None, save: Callable[[Tape], None]) -> None:
        self._lock = threading.Lock()
        self._save = save
        self._tape = tape or Tape()
        self._head = len(self._tape.calls)
        self._pending: dict[str, int] = {}

    @property
    def repeats(self) -> int:
        """How many calls on the tape may be repeated from here on."""
        return len(self._tape.calls) - self._head

    def restored(self, number: str | None) -> None:
        """The worker goes on from checkpoint ``number``, or from nothing: put the head there, where that is known."""
        with self._lock:
            tape = self._tape
            at = tape.marks.get(number or "", -1) - tape.first
            if not 0 <= at <= len(tape.calls):
                self._tape = Tape(first=tape.first + len(tape.calls))
                at = 0
            self._head = at

    def repeated(self, name: str) -> Call | None:
        """The answer that this call had before; None for a new one."""
        with self._lock:
            if self._head == len(self._tape.calls):
                return None
            call = self._tape.calls[self._head]
            if call.digest == name and call.body is not None:
                self._head += 1
                return call
            self._cut()
            return None

    def note(self, name: str, status: int, content_type: str, body: bytes) -> None:
        """This call was answered, and not from the tape."""
        with self._lock:
            self._cut()
            if not self._tape.marks and not self._pending:
                self._tape = self._tape.model_copy(update={"first": self._tape.first + 1})
                return  # nothing that the worker could go back to
            kept = base64.b64encode(body).decode() if len(body) <= BODY_KEPT else None
            call = Call(digest=name, status=status, content_type=content_type, body=kept)
            calls = (*self._tape.calls, call)
            surplus = max(0, len(calls) - CALLS_KEPT)
            self._tape = self._tape.model_copy(
                update={"calls": calls[surplus:], "first": self._tape.first + surplus}
            )
            self._head = len(self._tape.calls)
            self._save(self._tape)

    def mark(self, number: str) -> None:
        """Checkpoint ``number`` is about to be taken, and no call is under way."""
        with self._lock:
            self._pending = {number: self._tape.first + self._head}

    def committed(self, number: str, kept: set[str]) -> None:
        """Checkpoint ``number`` is complete; of the others only ``kept`` can still be gone back to."""
        with self._lock:
            if number not in self._pending:
                return
            marks = {x: at for x, at in self._tape.marks.items() if x in kept} | self._pending
            self._pending = {}
            surplus = max(0, min(min(marks.values()) - self._tape.first, self._head))
            self._head -= surplus
            self._tape = Tape(first=self._tape.first + surplus, calls=self._tape.calls[surplus:], marks=marks)
            self._save(self._tape)

    def failed(self) -> None:
        """The checkpoint that was marked did not come to be."""
        with self._lock:
            self._pending = {}

    def _cut(self) -> None:
        """What stands after the head is not what happens: forget it."""
        if self._head < len(self._tape.calls):
            end = self._tape.first + self._head
            marks = {x: at for x, at in self._tape.marks.items() if at <= end}
            self._tape = self._tape.model_copy(
                update={"calls": self._tape.calls[: self._head], "marks": marks}
            )
