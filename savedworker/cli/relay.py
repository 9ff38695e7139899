"""The worker's output: from the logs in the store to our own stdout and stderr, byte for byte."""

from __future__ import annotations

import contextlib
import logging
import os
import queue
import stat
import threading
from collections.abc import Callable, Iterator
from typing import BinaryIO

from savedworker.controller.client import Client
from savedworker.model.errors import NotFound, SavedWorkerError, Temporary
from savedworker.store.logs import Cursor, LogPiece, Mark, render_mark

log = logging.getLogger(__name__)

STREAMS = ("stdout", "stderr")
POLL = 0.3
"""Seconds between two looks at logs that grow."""
SLOWEST_POLL = 1.5
_ATOMIC = 4096
"""A pipe that is writable takes this much without blocking (pipe(7), PIPE_BUF)."""


def piece_bytes(piece: LogPiece) -> bytes:
    """What stands in the output for ``piece``: a mark is a line of its own."""
    if isinstance(piece, Mark):
        return f"{chr(10) if piece.mid_line else ''}{render_mark(piece)}\n".encode()
    return piece.data


class Sink:
    """One of our own streams. Writes all or raises BrokenPipeError; ``wait_writable`` waits for a while, and says whether it does."""

    def __init__(self, stream: BinaryIO, wait_writable: Callable[[int], bool] | None = None) -> None:
        self._stream = stream
        self._wait = wait_writable
        self.at_line_start = True
        try:
            self._fd: int | None = stream.fileno()
            kind = os.fstat(self._fd).st_mode
            self._slow = not stat.S_ISREG(kind)
        except OSError:  # a test's buffer
            self._fd, self._slow = None, False

    def write(self, data: bytes) -> None:
        """Write all of ``data``. Raises BrokenPipeError when nobody reads."""
        if not data:
            return
        self.at_line_start = data.endswith(b"\n")
        if self._fd is None:
            self._stream.write(data)
            self._stream.flush()
            return
        view = memoryview(data)
        while view:
            if self._slow and self._wait is not None and not self._wait(self._fd):
                continue
            with contextlib.suppress(BlockingIOError):
                view = view[os.write(self._fd, view[: _ATOMIC if self._slow else 1 << 20]) :]


class LogReader(threading.Thread):
    """Reads both streams of a worker as they grow, into ``pieces``: (stream, piece), then None at the end.

    ``finish`` says that the worker has ended: what a look that began after it finds is the rest. Errors go to
    ``pieces`` as exceptions; a store that does not answer is asked again.
    """

    def __init__(
        self, client: Client, worker: str, streams: tuple[str, ...], on_piece: Callable[[], None]
    ) -> None:
        super().__init__(name="logs", daemon=True)
        self._client = client
        self._worker = worker
        self._cursors: dict[str, Cursor | None] = dict.fromkeys(streams)
        self._on_piece = on_piece
        self._finish = threading.Event()
        self._stop = False
        self.pieces: queue.Queue[tuple[str, LogPiece] | SavedWorkerError | None] = queue.Queue(maxsize=64)

    def finish(self) -> None:
        """Read what is there now, then end."""
        self._finish.set()

    def stop(self) -> None:
        """End at once, read or not."""
        self._stop = True
        self._finish.set()

    def run(self) -> None:
        """The thread's work."""
        pause = POLL
        while not self._stop:
            last = self._finish.is_set()
            try:
                found = self._look()
            except Temporary as error:
                log.warning("the logs of %s cannot be read now: %s", self._worker, error)
                last, found = False, False
            except SavedWorkerError as error:
                self._put(error)
                last, found = True, False
            if last:
                self._put(None)
                return
            pause = POLL if found else min(pause * 1.5, SLOWEST_POLL)
            if self._finish.is_set():
                self._stop_slowly()
            else:
                self._finish.wait(pause)

    def _stop_slowly(self) -> None:
        # Only after a failed look: the flag is set, so waiting for it would spin.
        threading.Event().wait(POLL)

    def _look(self) -> bool:
        found = False
        for stream, cursor in self._cursors.items():
            for piece in pieces_after(self._client, self._worker, stream, cursor):
                self._put((stream, piece))
                self._cursors[stream] = piece.cursor
                found = True
        return found

    def _put(self, item: tuple[str, LogPiece] | SavedWorkerError | None) -> None:
        while not self._stop:
            try:
                self.pieces.put(item, timeout=0.5)
            except queue.Full:
                continue
            self._on_piece()
            return


def pieces_after(client: Client, worker: str, stream: str, cursor: Cursor | None) -> Iterator[LogPiece]:
    """What the store holds of ``stream`` after ``cursor``; nothing where nothing was written yet."""
    with contextlib.suppress(NotFound):
        yield from client.logs(worker, stream, cursor)
