"""Carries what the shim spooled into the store, a second behind; never blocks the worker."""

from __future__ import annotations

import ctypes
import logging
import os
import threading
from pathlib import Path

from savedworker.agent.shim import STREAMS
from savedworker.agent.shim_client import ShimClient
from savedworker.model import defaults
from savedworker.model.errors import SavedWorkerError, Temporary
from savedworker.model.manifest import StreamPosition
from savedworker.store.logs import LogWriter
from savedworker.store.worker import WorkerStore

log = logging.getLogger(__name__)

_PIECE = 1 << 20
_FALLOC_FL_KEEP_SIZE, _FALLOC_FL_PUNCH_HOLE = 1, 2
_libc = ctypes.CDLL(None, use_errno=True)


class LogShipper:
    """Ships both streams of one incarnation; ``start`` is where its spools begin in the worker's life.

    How far it came is noted beside each spool before what was shipped is freed there: an agent that is started again goes
    on from that note, since the bytes before it read as zeros by now.
    """

    def __init__(
        self, worker: WorkerStore, incarnation: int, shim: ShimClient, start: StreamPosition
    ) -> None:
        self._shim = shim
        self._starts: dict[str, int] = {stream: getattr(start, stream) for stream in STREAMS}
        self._writers = {
            stream: LogWriter(worker, stream, incarnation, self._shipped(stream)) for stream in STREAMS
        }
        self._stop = threading.Event()
        self._lock = threading.Lock()
        self._thread = threading.Thread(target=self._run, name="log-shipper", daemon=True)

    def _note(self, stream: str) -> Path:
        return self._shim.spool(stream).with_suffix(".shipped")

    def _shipped(self, stream: str) -> int:
        """Where shipping goes on: what an earlier agent of this incarnation shipped is durable and need not be there any more."""
        try:
            return max(self._starts[stream], int(self._note(stream).read_text()))
        except (OSError, ValueError):
            return self._starts[stream]

    def begin(self) -> None:
        """Ship in the background from now on. The worker runs already, so a store that is away is no reason to fail."""
        self._thread.start()

    def flush(self) -> None:
        """Say in the store where this incarnation's lines begin, and ship all that are in the spools. Raises what the store raises."""
        with self._lock:
            for stream, writer in self._writers.items():
                writer.begin()
                self._ship(stream, writer)

    def stop(self) -> None:
        """End the background thread."""
        self._stop.set()
        if self._thread.is_alive():
            self._thread.join(timeout=30)

    def _run(self) -> None:
        while True:
            try:
                self.flush()
            except Temporary as error:
                log.warning("log lines wait: %s", error)
            except SavedWorkerError as error:
                log.error("log lines cannot be shipped: %s", error)
            if self._stop.wait(defaults.LOG_SHIP_EVERY):
                return

    def _ship(self, stream: str, writer: LogWriter) -> None:
        try:
            spool = os.open(self._shim.spool(stream), os.O_RDWR)
        except FileNotFoundError:
            return
        try:
            while True:
                at = writer.position - self._starts[stream]
                data = os.pread(spool, _PIECE, at)
                if not data:
                    return
                writer.append(data)
                try:
                    scratch = self._note(stream).with_suffix(".new")
                    scratch.write_text(str(writer.position))
                    scratch.rename(self._note(stream))
                except OSError as error:  # a full disk: then nothing is freed that a successor would need
                    log.warning("%s cannot be noted: %s", self._note(stream), error)
                    continue
                # What is durable need not fill this disk: long-running workers write a lot.
                flags = _FALLOC_FL_PUNCH_HOLE | _FALLOC_FL_KEEP_SIZE
                _libc.fallocate(spool, flags, ctypes.c_long(0), ctypes.c_long(at + len(data)))
        finally:
            os.close(spool)
