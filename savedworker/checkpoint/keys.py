"""All chunks of one checkpoint. Whoever keeps, deletes or counts the data of a checkpoint asks here and nowhere else."""

from __future__ import annotations

from savedworker.checkpoint.layer.index import LayerIndex
from savedworker.model.errors import Corrupt
from savedworker.model.manifest import Manifest, StoredFile
from savedworker.store.chunks import ChunkStore

MAX_INDEX = 1 << 30
"""Bytes of an index document."""


def read_index(stored: StoredFile, chunks: ChunkStore) -> LayerIndex:
    """The index document of the layer or of /dev/shm. Raises Corrupt or Refused for one that is damaged, and what ``Store`` does."""
    if stored.size > MAX_INDEX:
        raise Corrupt(f"the index {stored.name} claims {stored.size} bytes")
    data = bytearray()
    for key in stored.chunks:
        data += chunks.get(key)
        if len(data) > stored.size:  # or a short list of keys, said again and again, would fill the memory
            break
    if len(data) != stored.size:
        raise Corrupt(f"the index {stored.name} does not have the {stored.size} bytes that it should")
    return LayerIndex.parse(bytes(data))


def chunk_keys(manifest: Manifest, *indexes: LayerIndex) -> frozenset[str]:
    """The keys of all chunks that the checkpoint consists of; ``indexes`` are those that its manifest names, as they are read."""
    return frozenset(manifest.chunk_keys()).union(*(index.chunk_keys() for index in indexes))


def stored_chunk_keys(manifest: Manifest, chunks: ChunkStore) -> frozenset[str]:
    """The same, reading the indexes from the store. Raises what ``read_index`` does."""
    return chunk_keys(manifest, read_index(manifest.layer, chunks), read_index(manifest.shm, chunks))
