"""The foreground of ``run``: bring the worker on, pass its output through, obey signals, until it has ended."""

from __future__ import annotations

import getpass
import logging
import os
import queue
import signal
import socket
import sys
import threading
import time
from dataclasses import dataclass
from typing import BinaryIO, TextIO

from savedworker.cli.exit_status import exit_status
from savedworker.cli.live import REDRAW, LiveView
from savedworker.cli.reconciler import Reconciler, Watched
from savedworker.cli.relay import STREAMS, LogReader, Sink, piece_bytes
from savedworker.cli.signals import Signals
from savedworker.cli.views import PlainView, View, closing_line
from savedworker.controller.client import Client
from savedworker.model.errors import SavedWorkerError, Temporary
from savedworker.model.record import WorkerRecord

SETTLE = 120.0
"""Seconds after the worker's end for its instance to be gone; then ``run`` ends all the same."""


class Detached(SavedWorkerError):
    """``run`` stops following; the worker goes on."""

    code = "detached"


@dataclass(frozen=True)
class Ended:
    """What the worker came to, and whether its instance is known to be gone."""

    record: WorkerRecord
    settled: bool

    @property
    def exit_status(self) -> int:
        """For ``run``."""
        return exit_status(self.record)


def caller() -> str:
    """Who is asking, for the record: ``user@host``."""
    try:
        user = getpass.getuser()
    except (OSError, KeyError):
        user = str(os.getuid())
    return f"{user}@{socket.gethostname()}"


def make_view(stdout: Sink, stderr: Sink, quiet: bool) -> View:
    """The live view where stderr is a terminal that can show it, else plain lines; ``quiet``: the worker's output only."""
    if not quiet and sys.stderr.isatty() and os.environ.get("TERM", "dumb") != "dumb":
        return LiveView(stdout, stderr, sys.stdout.isatty())
    return PlainView(stdout, stderr, announce=not quiet)


class Follower:
    """Follows one worker to its end."""

    def __init__(self, client: Client, worker: str, quiet: bool) -> None:
        self._client = client
        self._worker = worker
        self._quiet = quiet
        self._signals = Signals([signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
        self._interrupts = 0
        self._messages: queue.SimpleQueue[str] = queue.SimpleQueue()
        self.stderr = Sink(_binary(sys.stderr), self._wait_writable)
        self._view = make_view(Sink(_binary(sys.stdout), self._wait_writable), self.stderr, quiet)
        self._reader = LogReader(client, worker, STREAMS, self._signals.wake)

    def follow(self) -> Ended:
        """Return when the worker has ended and all of its output is written. Raises Detached, and errors that last."""
        logger = logging.getLogger("savedworker")
        handler = _Forward(self._messages, self._signals)
        logger.addHandler(handler)
        try:
            with (
                self._signals,
                Reconciler(self._client, slowest=1.0, on_round=lambda _: self._signals.wake()) as rounds,
            ):
                rounds.add(self._worker)
                self._reader.start()
                self._view.say(f"worker {self._worker}")
                try:
                    ended = self._loop(rounds.watched[self._worker])
                    self._view.close()
                    self._view.say(closing_line(ended.record))
                    return ended
                except BrokenPipeError as error:
                    seen = rounds.watched[self._worker]
                    if seen.record is not None and seen.record.state.terminal:
                        return Ended(seen.record, seen.settled)
                    raise Detached("nobody reads our output any more") from error
                finally:
                    self._reader.stop()
                    self._close_view()
        finally:
            logger.removeHandler(handler)

    def _close_view(self) -> None:
        try:
            self._view.close()
        except BrokenPipeError:
            return

    def _loop(self, seen: Watched) -> Ended:
        shown: WorkerRecord | None = None
        ended_at: float | None = None
        while True:
            self._obey_signals()
            self._say_messages()
            drained = self._write_pieces()
            record = seen.record
            if record is not None and record != shown:
                shown = record
                self._view.update(record)
            self._view.tick()
            if record is not None and record.state.terminal:
                ended_at = ended_at or time.monotonic()
                late = time.monotonic() - ended_at > SETTLE
                if seen.settled or late:
                    self._reader.finish()
                    if drained:
                        return Ended(record, seen.settled)
            if error := seen.lasting_error():
                raise error
            self._signals.wait(REDRAW)

    def _write_pieces(self) -> bool:
        """Write what was read; True when the logs are at their end."""
        for _ in range(256):
            try:
                item = self._reader.pieces.get_nowait()
            except queue.Empty:
                return False
            if item is None:
                self._reader.pieces.put(None)  # the end stays the end
                return True
            if isinstance(item, SavedWorkerError):
                self._view.say(f"the worker's output cannot be read any further: {item}")
            else:
                self._view.data(item[0], piece_bytes(item[1]))
        self._signals.wake()
        return False

    def _wait_writable(self, fd: int) -> bool:
        ready = self._signals.wait_writable(fd)
        self._obey_signals()
        return ready

    def _obey_signals(self) -> None:
        for came in self._signals.take():
            if came is not signal.SIGINT:
                raise Detached(f"{came.name} came")
            self._interrupts += 1
            if self._interrupts > 1:
                raise Detached("interrupted twice")
            self._messages.put("cancelling the worker; press Ctrl-C again to leave it alone and go")
            threading.Thread(target=self._cancel, daemon=True).start()

    def _cancel(self) -> None:
        while True:
            try:
                self._client.cancel(self._worker, caller())
            except Temporary as error:
                self._messages.put(f"the worker is not cancelled yet: {error}")
                time.sleep(min(error.retry_after, 5.0))
            except SavedWorkerError as error:
                self._messages.put(f"the worker cannot be cancelled: {error}")
                return
            else:
                return
            finally:
                self._signals.wake()

    def _say_messages(self) -> None:
        while not self._messages.empty():
            self._view.say(self._messages.get())


class _Forward(logging.Handler):
    """Warnings of the packages below become lines of the view, so that they do not tear it."""

    def __init__(self, messages: queue.SimpleQueue[str], signals: Signals) -> None:
        super().__init__(logging.WARNING)
        self._messages, self._signals = messages, signals

    def emit(self, record: logging.LogRecord) -> None:
        """Pass one warning on."""
        self._messages.put(" ".join(record.getMessage().split()))
        self._signals.wake()


def _binary(stream: TextIO) -> BinaryIO:
    stream.flush()
    return stream.buffer
