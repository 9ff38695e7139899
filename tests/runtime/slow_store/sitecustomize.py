"""Slows down every agent that has this folder in PYTHONPATH: each chunk to or from the store, and each container that is made,
takes the seconds that the file $SAVEDWORKER_TEST_PACE holds: first those of what goes to the store, then those of all else.

Only so can a test be sure that something happens *while* a worker starts, is being stored or is being fetched. What waits sees when the
seconds become fewer: with many of them it goes on exactly when the test says so.
"""

import os
import sys
import time
from pathlib import Path


def _pace(which: int) -> float:
    try:
        return float(Path(os.environ["SAVEDWORKER_TEST_PACE"]).read_text().split()[which])
    except (KeyError, OSError, ValueError):
        return 0.0


def _wait(which: int) -> None:
    began = time.monotonic()
    while (left := began + _pace(which) - time.monotonic()) > 0:
        time.sleep(min(left, 0.02))


if "agent" in sys.orig_argv:
    from savedworker.checkpoint.container import Container
    from savedworker.store.chunks import ChunkStore

    _put = ChunkStore.put
    _get = ChunkStore.get
    _prepare = Container.prepare

    def _slow_put(self, data):
        _wait(0)
        return _put(self, data)

    def _slow_get(self, key, **options):
        _wait(1)
        return _get(self, key, **options)

    def _slow_prepare(self, *values):
        _wait(1)
        return _prepare(self, *values)

    ChunkStore.put = _slow_put  # type: ignore[method-assign]
    ChunkStore.get = _slow_get  # type: ignore[method-assign]
    Container.prepare = _slow_prepare  # type: ignore[method-assign]
