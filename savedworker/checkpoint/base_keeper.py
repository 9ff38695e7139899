"""The base of the worker's memory on this instance's disk: read ahead while the worker runs, given up when it is too old or in the way.

Also how much room the disk has, which the base and the images of a checkpoint share.
"""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Callable, Sequence
from pathlib import Path

from savedworker.checkpoint.container import Container
from savedworker.checkpoint.memory import (
    Base,
    Captured,
    Keep,
    find_shm_sources,
    inherit,
    warm,
    warm_shm,
)
from savedworker.checkpoint.priority import give_way
from savedworker.model.errors import Corrupt, Fatal, SavedWorkerError
from savedworker.model.manifest import StoredMemory
from savedworker.model.units import format_size
from savedworker.store.chunks import ChunkStore

log = logging.getLogger(__name__)

_SPACE_FACTOR = 1.25
"""Bytes of images for each byte of memory, as processes that share some have it written for each."""
_SPACE_LEFT = 64 << 20
_WARM_AFTER = 5.0
_WARM_AGAIN = 60.0
"""Seconds before the memory is read ahead, and between later looks for new memory, at most."""
_REBASE_SHARE = 0.3
"""Share of the images that a checkpoint may upload although most of it is in the base; past it the base is too old."""


def free_space(folder: Path) -> int:
    """Bytes that can be written below ``folder``."""
    disk = os.statvfs(folder)
    return disk.f_bavail * disk.f_frsize


class _NotNow(Exception):
    """The memory is not read ahead while a checkpoint is taken."""


class _Full(Exception):
    """Nor when there is too little room."""


class BaseKeeper:
    """Keeps ``base`` for one incarnation's checkpoints. Nothing else may be called while ``start``'s thread is at work, but ``stop``."""

    def __init__(self, container: Container, chunks: Callable[[], ChunkStore]) -> None:
        self._container = container
        self._chunks = chunks
        self._home = container.home.path
        self.base = Base(self._home / "memory-base")
        self._inherited: list[StoredMemory] = []
        """Of the checkpoint that the worker was restored from: what of its memory may not all be in the base yet."""
        self._keep: Keep | None = None
        self._stop = threading.Event()
        self._warmer: threading.Thread | None = None

    # Reading ahead --------------------------------------------------------------------------------------------

    def keep(self, memory: Sequence[StoredMemory], most: int) -> Keep:
        """What puts the groups that the ``memory`` of a checkpoint was told against into the base while it is restored here.

        At most ``most`` bytes of them wait for that.
        """
        size = sum(x.size for x in memory)
        self._keep = Keep(self.base, most, lambda beside: self._fits(size, beside))
        return self._keep

    def start_from(self, memory: Sequence[StoredMemory]) -> None:
        """Have fetched into the base what was not kept of the groups that the ``memory`` of a checkpoint was told against."""
        self._inherited = list(memory)

    @property
    def warming(self) -> bool:
        """Whether the memory is read ahead in the background, from ``start`` to ``stop``."""
        return self._warmer is not None

    def start(self) -> None:
        """Read ahead in the background, so that the first checkpoint is small as well."""
        self._stop.clear()
        self._warmer = threading.Thread(target=self._keep_warm, name="warmer", daemon=True)
        self._warmer.start()

    def stop(self) -> None:
        """End that, and what is left of ``keep``; what was read stays."""
        self._stop.set()
        if self._keep is not None:
            self._keep.drop()  # the warmer may be waiting for it
        if self._warmer is not None:
            self._warmer.join()
            self._warmer = None
        self._keep = None

    def warm_now(self, still_wanted: Callable[[], None] = lambda: None) -> None:
        """Read what the base lacks, on this thread. Raises what ``still_wanted`` does, SavedWorkerError, OSError."""
        if self._keep is not None:
            self._keep.wait()
        if self.has_room():
            while self._inherited:
                try:
                    inherit(self._inherited[-1], self.base, self._chunks().view, still_wanted)
                except Corrupt as error:
                    log.warning("%s: the memory that is told against it is stored anew", error)
                self._inherited.pop()
            warm(self._container.pids(), self.base, self._chunks(), still_wanted)
            shm = find_shm_sources(self._container.home.shm, still_wanted)
            warm_shm(shm, self.base, self._chunks(), still_wanted)

    def _keep_warm(self) -> None:
        give_way()
        pause = _WARM_AFTER

        def still_wanted() -> None:
            if self._stop.is_set():
                raise _NotNow("a checkpoint is taken")
            if not self.has_room():
                raise _Full("the disk has no room for more of a base")

        while not self._stop.wait(pause):
            pause = min(pause * 2, _WARM_AGAIN)
            try:
                self.warm_now(still_wanted)
            except _NotNow:
                return
            except _Full as error:
                log.info("the memory is not read ahead any further: %s", error)
            except (SavedWorkerError, OSError) as error:
                log.warning("the memory cannot be read ahead, it is tried again: %s", error)

    # Giving it up ---------------------------------------------------------------------------------------------

    def give_up(self) -> None:
        """Forget the base: the next checkpoint is told against nothing."""
        self._inherited.clear()
        self.base.clear()

    def renew(self, memory: Captured, uploaded: int) -> None:
        """Give the base up when the memory has become another one, or most of the base is of memory that is gone.

        ``uploaded``: bytes that were sent of the ``memory`` of the checkpoint before.
        """
        size = memory.bytes_new + memory.bytes_known
        other = memory.bytes_known > memory.bytes_new and uploaded > _REBASE_SHARE * size
        if other or self.base.size > 2 * size + _SPACE_LEFT:
            log.info("the base of the memory is given up: %d of %d bytes were uploaded", uploaded, size)
            self.give_up()

    # Room on the disk -----------------------------------------------------------------------------------------

    def has_room(self) -> bool:
        """Whether the disk takes a copy of the memory beside the images of a checkpoint."""
        return self._fits(self._container.memory())

    def _fits(self, memory: int, beside: int = 0) -> bool:
        """Whether the base of ``memory`` bytes fits, with the images of a checkpoint of them and ``beside`` bytes of something else."""
        images = memory * _SPACE_FACTOR
        need = max(images, images + memory - self.base.size)
        return free_space(self._home) > need + beside + _SPACE_LEFT

    def check_space(self, written: int) -> None:
        """Raises Fatal when the disk has no room for images of ``written`` bytes of memory, even without the base."""
        need = int(written * _SPACE_FACTOR) + _SPACE_LEFT
        free = free_space(self._home) + self.base.size
        if free < need:
            raise Fatal(
                f"a checkpoint needs {format_size(need)} on {self._home} and {format_size(free)} are free",
                "free some, or give the instance a larger disk (on this machine: SAVEDWORKER_LOCAL_DIR)",
            )

    def make_room(self, written: int) -> None:
        """Give the base up if images of ``written`` bytes of memory need its room."""
        if free_space(self._home) < written * _SPACE_FACTOR + _SPACE_LEFT:
            log.info("the base of the memory is given up, to have room on the disk for a checkpoint")
            self.give_up()
