"""What was answered since a checkpoint: a worker that goes back to it asks again.

The calls are a tape with a head. Calls are written at the head; a checkpoint notes where the head was (its *mark*), and a restore
puts it back there. As long as what the worker asks then is what stands on the tape, it is recognised, and the tape has its answer. The
first difference among the calls with an effect cuts the rest of the tape off: from there on every call is a new one. So a call is
recognised only when all since the checkpoint was the same, in the same order.

Calls that only read stand between those with an effect. The world is not put back with the worker: what it reads again has perhaps
been overwritten by itself since, so it is given what it read then. Reads may be left out, and new ones cut nothing off: how often
somebody looks depends on the time. What was read last of all, with no effect after it, needs no tape: nothing has changed since.
"""

from __future__ import annotations

import base64
import hashlib
import threading
from collections.abc import Callable

from pydantic import Field

from savedworker.model.base import Count, Document, Frozen

CALLS_KEPT = 2000
"""Calls with an effect."""
READS_KEPT = 2000
BODY_KEPT = 64 << 10
"""Bytes of an answer that are kept; a call with a longer one is passed on again."""
READ_BODIES_KEPT = 1 << 20
"""Bytes of all answers to reads that are kept: the tape is stored as a whole, again and again."""


class Call(Frozen):
    """One call that was answered. ``body`` is base64; None when it was too long to keep, or is to be asked for again."""

    digest: str
    status: int
    content_type: str = ""
    content_range: str = ""
    body: str | None = None
    read: bool = False


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
        self._unsaved = False

    @property
    def repeats(self) -> int:
        """How many calls with an effect on the tape may be repeated from here on."""
        return sum(not x.read for x in self._tape.calls[self._head :])

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
        """This call with an effect as it was answered before; None for a new one."""
        with self._lock:
            at = self._head
            while at < len(self._tape.calls) and self._tape.calls[at].read:
                at += 1
            if at == len(self._tape.calls):
                self._cut()  # what was read before the end
                return None
            call = self._tape.calls[at]
            if call.digest == name:
                self._head = at + 1
                return call
            self._cut()
            return None

    def reread(self, name: str) -> Call | None:
        """This read as it was answered before, between the same two calls with an effect; None for a new one."""
        with self._lock:
            for at in range(self._head, len(self._tape.calls)):
                call = self._tape.calls[at]
                if not call.read:
                    return None
                if call.digest == name:
                    self._head = at + 1
                    return call
            return None

    def note(
        self, name: str, status: int, content_type: str, body: bytes | None, again: bool = False
    ) -> None:
        """This call with an effect was answered, and not from the tape.

        ``body`` None: the answer is of no use to one that comes again. ``again``: it came again, and was passed on again.
        """
        with self._lock:
            call = Call(digest=name, status=status, content_type=content_type, body=_kept(body, BODY_KEPT))
            if again:
                last = (
                    self._tape.calls[self._head - 1] if self._head else None
                )  # a checkpoint may have come between
                if call.body is None or last is None or last.digest != name or last.body is not None:
                    return
                calls = (*self._tape.calls[: self._head - 1], call, *self._tape.calls[self._head :])
                self._tape = self._tape.model_copy(update={"calls": calls})
            else:
                self._cut()
                if not self._needed:
                    self._tape = self._tape.model_copy(update={"first": self._tape.first + 1})
                    return
                self._write(call)
            self._store()

    def note_read(self, name: str, status: int, content_type: str, content_range: str, body: bytes) -> None:
        """This read was answered, and not from the tape. Stored with what comes after it, or by ``settle``."""
        with self._lock:
            if self._head < len(self._tape.calls) or not self._needed:
                return  # what is still on the tape is of more use
            reads = [x for x in self._tape.calls if x.read]
            if len(reads) >= READS_KEPT:
                return
            left = READ_BODIES_KEPT - sum(len(x.body or "") for x in reads)
            call = Call(
                digest=name,
                status=status,
                content_type=content_type,
                content_range=content_range,
                body=_kept(body, min(BODY_KEPT, left)),
                read=True,
            )
            self._write(call)
            self._unsaved = True

    def settle(self) -> None:
        """A call with an effect is about to be passed on: what was read before it must be found again."""
        with self._lock:
            if self._unsaved:
                self._store()

    @property
    def _needed(self) -> bool:
        """Whether there is a checkpoint that the worker could go back to."""
        return bool(self._tape.marks or self._pending)

    def _write(self, call: Call) -> None:
        calls = (*self._tape.calls, call)
        surplus = 0
        if not call.read and sum(not x.read for x in calls) > CALLS_KEPT:
            surplus = next(i for i, x in enumerate(calls) if not x.read) + 1
        self._tape = self._tape.model_copy(
            update={"calls": calls[surplus:], "first": self._tape.first + surplus}
        )
        self._head = len(self._tape.calls)

    def _store(self) -> None:
        self._unsaved = False
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
            self._store()

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


def _kept(body: bytes | None, most: int) -> str | None:
    if body is None or len(body) > most:
        return None
    return base64.b64encode(body).decode()
