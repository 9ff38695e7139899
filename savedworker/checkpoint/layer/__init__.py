"""The writable layer (an overlay's upper directory) and /dev/shm: captured around a short freeze, extracted from untrusted documents.

May import: model.errors, nothing else of the product; the data goes through two callables, so no store is needed here.

``precopy`` while the worker runs, ``finish`` inside the freeze, ``Pending.complete`` after the thaw; ``extract`` on the next
instance. ``shared_writable_files`` names the files whose changes no time stamp shows.
"""

from savedworker.checkpoint.layer.capture import (
    STAGES,
    Held,
    Pending,
    PreCopy,
    finish,
    held_apart,
    precopy,
)
from savedworker.checkpoint.layer.errors import ChangedWhileFrozen, NoSpace
from savedworker.checkpoint.layer.extract import Fill, extract
from savedworker.checkpoint.layer.index import (
    CHUNK_SIZE,
    FORMAT_VERSION,
    SPACE_PATH_MAX,
    Entry,
    Extent,
    LayerIndex,
)
from savedworker.checkpoint.layer.mapped import shared_writable_files
from savedworker.checkpoint.layer.pack import wasteful
from savedworker.checkpoint.layer.signature import FileId, FileState, Snapshot

__all__ = [
    "CHUNK_SIZE",
    "FORMAT_VERSION",
    "SPACE_PATH_MAX",
    "STAGES",
    "ChangedWhileFrozen",
    "Entry",
    "Extent",
    "FileId",
    "FileState",
    "Fill",
    "Held",
    "LayerIndex",
    "NoSpace",
    "Pending",
    "PreCopy",
    "Snapshot",
    "extract",
    "finish",
    "held_apart",
    "precopy",
    "shared_writable_files",
    "wasteful",
]
