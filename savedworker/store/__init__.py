"""Everything durable: documents, compare-and-swap records, chunks, checkpoints and logs below one object-store prefix.

May import: model.
"""

from savedworker.store.backend import Found, ObjectInfo, Store, Version, open_store
from savedworker.store.chunks import ChunkStore
from savedworker.store.worker import Held, WorkerStore, list_workers

__all__ = [
    "ChunkStore",
    "Found",
    "Held",
    "ObjectInfo",
    "Store",
    "Version",
    "WorkerStore",
    "list_workers",
    "open_store",
]
