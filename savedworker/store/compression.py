"""Compressing chunks: as is what a sample says is not worth it, else as hard as the store is slow."""

from __future__ import annotations

import logging
import os
import threading
import time
from itertools import cycle

import zstandard

from savedworker.model.compression import (
    FIRST_LEVEL,
    INCOMPRESSIBLE,
    LEVELS,
    Effect,
    Measured,
    choose_level,
)
from savedworker.store.base import Data

log = logging.getLogger(__name__)

_PIECE, _PIECES = 4096, 16
"""A sample is so many pieces of a page's size, spread over the data."""
_SAMPLED_FROM = 4 * _PIECE * _PIECES
"""Bytes below which all is compressed without looking."""
_TRIED = 512 << 10
"""Bytes of a chunk with which another level is tried, once between two decisions: a hundredth or two of the work."""
_DECIDE_EVERY = 32 << 20
"""Bytes of plaintext between two decisions."""


def pack(data: Data, level: int) -> bytes | None:
    """``data`` as one zstd frame with its content size; None when it is better stored as it is."""
    view = memoryview(data).cast("B")
    if len(view) >= _SAMPLED_FROM:
        sample = _sample(view)
        if len(_compress(sample, min(level, FIRST_LEVEL))) > len(sample) * INCOMPRESSIBLE:
            return None
    packed = _compress(view, level)
    return packed if len(packed) < len(view) else None


def try_level(data: Data, level: int) -> Effect:
    """What ``level`` does to a part of ``data``, against level 1."""
    view = memoryview(data).cast("B")
    start = max(0, len(view) - _TRIED) // 2
    part = view[start : start + _TRIED]
    costs, sizes = [], []
    for each in (1, level):
        began = time.thread_time()
        sizes.append(len(_compress(part, each)))
        costs.append(max(1e-6, time.thread_time() - began))
    return Effect(min(20.0, max(0.1, costs[1] / costs[0])), sizes[1] / sizes[0])


def _sample(view: memoryview) -> bytes:
    step = (len(view) - _PIECE) // (_PIECES - 1)
    return b"".join(view[at : at + _PIECE] for at in range(0, step * _PIECES, step))


def _compress(data: Data, level: int) -> bytes:
    return zstandard.ZstdCompressor(level=level, write_content_size=True).compress(data)


class Meter:
    """Measures one process's compressing and sending, and has the level that fits. Thread-safe."""

    def __init__(self, senders: int) -> None:
        self._senders = senders
        self._cores = len(os.sched_getaffinity(0))
        self._lock = threading.Lock()
        self._seen = Measured()
        self._since = 0
        self._trials = cycle(level for level in LEVELS if level != 1)
        self._trial_due = True
        self.level = FIRST_LEVEL
        """Of zstd, for what comes next."""
        self.bytes_as_is = 0
        """Bytes of plaintext that were stored without compression."""

    def sent(
        self,
        level: int,
        size: int,
        packed: int | None,
        cpu: float,
        sent: int,
        seconds: float,
        limit: float | None,
    ) -> None:
        """A chunk of ``size`` bytes was stored, in a request of ``sent`` bytes that took ``seconds``.

        ``packed``: what it was at ``level``, None if it was not compressed; ``cpu``: CPU-seconds for that. ``limit``: see ``choose_level``.
        """
        with self._lock:
            if packed is None:
                self.bytes_as_is += size
            else:
                self._seen = self._seen.compressed(level, size, packed, cpu)
            self._seen = self._seen.stored(size if packed is None else 0, sent, seconds)
            self._since += size
            if self._since < _DECIDE_EVERY:
                return
            self._decide(limit)
            self._since, self._trial_due = 0, True
            self._seen = self._seen.faded()

    def trial(self) -> int | None:
        """A level to try on the next chunk, now and then. Its effect is told to ``tried``."""
        with self._lock:
            due, self._trial_due = self._trial_due, False
            return next(self._trials) if due else None

    def tried(self, level: int, effect: Effect) -> None:
        """What came of a trial."""
        with self._lock:
            self._seen = self._seen.tried(level, effect)

    def decide(self, limit: float | None) -> None:
        """Choose anew: what may be sent per second has changed."""
        with self._lock:
            self._decide(limit)

    def _decide(self, limit: float | None) -> None:
        level = choose_level(self._seen, self._cores, self._senders, limit)
        if level != self.level:
            log.info(
                "chunks are compressed at level %d from now on, not %d: %.0f MiB/s per core, %.1f MiB/s per request",
                level,
                self.level,
                self._seen.plain / max(self._seen.cpu, 1e-9) / 2**20,
                self._seen.sent / max(self._seen.sending, 1e-9) / 2**20,
            )
            self.level = level
