"""Which chunks a collection is about to delete: said in the store before it deletes any.

No store can delete an object on the condition that nobody has written it again, so a delete may hit a chunk that a save has
just put again under the same name. ``workers/<id>/doomed/<nonce>.json`` makes that harmless: a save reads these documents right
before its manifest is published and keeps a copy, under a name that was never used, of every chunk of its own that they name
(``ChunkStore.confirm_save``). A document outlives its collection by the grace, because nobody can tell one that is slow
from one that was killed.
"""

from __future__ import annotations

import secrets
from collections.abc import Iterable

from savedworker.model.base import Document
from savedworker.model.errors import NotFound
from savedworker.store.backend import Store
from savedworker.store.documents import dump, load

AT_ONCE = 50_000
"""Keys of one document at most; it then has 3.4 MB."""


class Doomed(Document):
    """The keys of chunks that may be deleted from now on, at any time."""

    worker: str
    keys: tuple[str, ...]


def prefix(worker_id: str) -> str:
    """Where the documents of a worker are."""
    return f"workers/{worker_id}/doomed"


def announce(store: Store, worker_id: str, keys: Iterable[str]) -> None:
    """Say that these chunks are about to be deleted. Raises what ``Store.create`` does."""
    document = Doomed(worker=worker_id, keys=tuple(sorted(set(keys))))
    store.create(f"{prefix(worker_id)}/{secrets.token_hex(8)}.json", dump(document))


def doomed_keys(store: Store, worker_id: str) -> set[str]:
    """The keys of all chunks that some collection has deleted lately, or may delete. Raises what ``Store`` does, Corrupt, Refused."""
    found: set[str] = set()
    for info in store.list(prefix(worker_id)):
        try:
            found.update(load(Doomed, store.get(info.key).data, info.key).keys)
        except NotFound:  # it was old, and went since the listing
            continue
    return found
