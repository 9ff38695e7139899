"""The memory of the worker in its checkpoints: what is new is stored, what changed is told against a base.

A *space* is what one of CRIU's pagemap files describes, the address space of a process or one piece of shared memory, or a large file of ``/dev/shm`` or a deleted one (``by_offset.py``). It is cut
into *windows* at aligned addresses or offsets, so that growth in one place moves nothing in another. A *record* holds the pages of one
window (``records.py``), a *group* is a run of records that is stored as one chunk. The *base* (``base.py``) is what this
instance has of the groups in the store: a window that is in it is stored as the XOR with it, of the pages that differ, unless it was replaced. No base
has a base: a checkpoint names the groups that it is told against, and is complete with them.

``sources.py`` reads the memory of a dump, ``capture.py`` stores it, through ``spill.py`` if the worker is not to wait, ``rebuild.py`` brings them back bit for bit, ``warm.py`` reads a base from the running
worker, ``keep.py`` and ``inherit.py`` have that of the checkpoint it was restored from.
"""

from savedworker.checkpoint.memory.base import Base, BaseDamaged
from savedworker.checkpoint.memory.by_offset import (
    ByOffset,
    find_shm_sources,
    shm_size,
    shm_sources,
    space_name,
)
from savedworker.checkpoint.memory.capture import Captured, Chunks, capture
from savedworker.checkpoint.memory.inherit import inherit
from savedworker.checkpoint.memory.keep import Keep
from savedworker.checkpoint.memory.rebuild import Target, file_target, image_targets, rebuild
from savedworker.checkpoint.memory.sources import InProcess, Source, Unreadable, find_sources
from savedworker.checkpoint.memory.spill import Spill
from savedworker.checkpoint.memory.warm import warm, warm_shm

__all__ = [
    "Base",
    "BaseDamaged",
    "ByOffset",
    "Captured",
    "Chunks",
    "InProcess",
    "Keep",
    "Source",
    "Spill",
    "Target",
    "Unreadable",
    "capture",
    "file_target",
    "find_shm_sources",
    "find_sources",
    "image_targets",
    "inherit",
    "rebuild",
    "shm_size",
    "shm_sources",
    "space_name",
    "warm",
    "warm_shm",
]
