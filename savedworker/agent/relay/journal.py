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

from savedworker.agent.relay.pieces import Call, Notes, Shelf

CALLS_KEPT = 2000
"""Calls with an effect. With more of them the oldest checkpoint is one of which nothing is known."""
READS_KEPT = 2000
BODY_KEPT = 64 << 10
"""Bytes of an answer that are kept; a call with a longer one is passed on again."""
READ_BODIES_KEPT = 1 << 20
"""Bytes of all answers to reads that are kept."""


def digest(method: str, path: str, body: bytes) -> str:
    """The name of a call: two calls with one name ask for the same."""
    return hashlib.sha256(f"{method} {path}\n".encode() + body).hexdigest()[:32]


class Journal:
    """The tape of one worker, in ``notes``. What could not be stored may be repeated after a loss without being recognised."""

    def __init__(self, notes: Notes) -> None:
        self._lock = threading.Lock()
        self._shelf = Shelf(notes)
        index, self._calls = self._shelf.read()
        self._first = index.first
        """Counts the calls before those on the tape."""
        self._marks = dict(index.marks)
        """The head at each checkpoint, counted as ``_first`` is."""
        self._pending: dict[str, int] = {}
        self._head = len(self._calls)
        self._count()

    def _count(self) -> None:
        reads = [x for x in self._calls if x.read]
        self._effects, self._reads = len(self._calls) - len(reads), len(reads)
        self._read_bytes = sum(x.bytes for x in reads)
        self._unsaved = False

    @property
    def repeats(self) -> int:
        """How many calls with an effect on the tape may be repeated from here on."""
        return sum(not x.read for x in self._calls[self._head :])

    def restored(self, number: str | None) -> None:
        """The worker goes on from checkpoint ``number``, or from nothing: put the head there, where that is known."""
        with self._lock:
            at = self._marks.get(number or "", -1) - self._first
            if not 0 <= at <= len(self._calls):
                self._marks = {}
                self._forget()
                at = 0
            self._head = at

    def _forget(self) -> None:
        self._first += len(self._calls)
        self._calls, self._head = [], 0
        self._shelf.clear()
        self._count()

    def repeated(self, name: str) -> Call | None:
        """This call with an effect as it was answered before; None for a new one."""
        with self._lock:
            at = self._head
            while at < len(self._calls) and self._calls[at].read:
                at += 1
            if at == len(self._calls):
                self._cut()  # what was read before the end
                return None
            call = self._calls[at]
            if call.digest == name:
                self._head = at + 1
                return call
            self._cut()
            return None

    def reread(self, name: str) -> Call | None:
        """This read as it was answered before, between the same two calls with an effect; None for a new one."""
        with self._lock:
            for at in range(self._head, len(self._calls)):
                call = self._calls[at]
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
                at = self._head - 1
                last = self._calls[at] if self._head else None  # a checkpoint may have come between
                if call.body is None or last is None or last.digest != name or last.body is not None:
                    return
                self._calls[at] = call
                self._store(changed=self._first + at)
                return
            self._cut()
            if not self._needed:
                if self._calls:
                    self._forget()
                self._first += 1
                return
            self._write(call)
            self._store()

    def note_read(self, name: str, status: int, content_type: str, content_range: str, body: bytes) -> None:
        """This read was answered, and not from the tape. Stored with what comes after it, or by ``settle``."""
        with self._lock:
            if self._head < len(self._calls) or not self._needed:
                return  # what is still on the tape is of more use
            if self._reads >= READS_KEPT:
                return
            call = Call(
                digest=name,
                status=status,
                content_type=content_type,
                content_range=content_range,
                body=_kept(body, min(BODY_KEPT, READ_BODIES_KEPT - self._read_bytes)),
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
        """Whether there is a checkpoint that the worker could go back to, and of which enough is known."""
        return bool(self._marks or self._pending)

    def _write(self, call: Call) -> None:
        self._calls.append(call)
        self._head = len(self._calls)
        if call.read:
            self._reads += 1
            self._read_bytes += call.bytes
            return
        self._effects += 1
        while self._effects > CALLS_KEPT:
            self._forget_a_mark()

    def _forget_a_mark(self) -> None:
        """The oldest one, and what is kept for its sake."""
        oldest = min([*self._marks.values(), *self._pending.values()], default=0)
        self._marks = {x: at for x, at in self._marks.items() if at > oldest}
        self._pending = {x: at for x, at in self._pending.items() if at > oldest}
        self._trim()

    def _trim(self) -> None:
        """Forget what was before the oldest mark."""
        begin = min([*self._marks.values(), *self._pending.values()], default=self._first + self._head)
        surplus = max(0, min(begin - self._first, self._head))
        if surplus:
            del self._calls[:surplus]
            self._first += surplus
            self._head -= surplus
            unsaved = self._unsaved
            self._count()
            self._unsaved = unsaved and bool(self._calls)

    def _store(self, changed: int | None = None) -> None:
        self._unsaved = False
        self._shelf.write(self._first, self._marks, self._calls, changed)

    def mark(self, number: str) -> None:
        """Checkpoint ``number`` is about to be taken, and no call is under way."""
        with self._lock:
            self._pending = {number: self._first + self._head}

    def committed(self, number: str, kept: set[str]) -> None:
        """Checkpoint ``number`` is complete; of the others only ``kept`` can still be gone back to."""
        with self._lock:
            if number not in self._pending:
                return
            self._shelf.settle_cut(self._first, self._marks, self._calls)
            self._marks = {x: at for x, at in self._marks.items() if x in kept} | self._pending
            self._pending = {}
            self._trim()
            self._store()

    def failed(self) -> None:
        """The checkpoint that was marked did not come to be."""
        with self._lock:
            self._pending = {}

    def _cut(self) -> None:
        """What stands after the head is not what happens: forget it."""
        if self._head < len(self._calls):
            end = self._first + self._head
            del self._calls[self._head :]
            self._marks = {x: at for x, at in self._marks.items() if at <= end}
            self._shelf.cut(end)
            self._count()


def _kept(body: bytes | None, most: int) -> str | None:
    if body is None or len(body) > most:
        return None
    return base64.b64encode(body).decode()
