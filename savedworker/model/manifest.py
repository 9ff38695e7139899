"""Manifest: what one checkpoint consists of. Created last, immutable; all of its data is in the store before it."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Annotated, Literal

from pydantic import AfterValidator, Field, field_validator

from savedworker.model.base import Bytes, Document, Frozen, Instant
from savedworker.model.errors import Refused
from savedworker.model.fingerprint import Fingerprint

_NUMBER = re.compile(r"[1-9][0-9]{0,8}-[1-9][0-9]{0,8}")
_FILE_NAME = re.compile(r"[A-Za-z0-9_-][A-Za-z0-9._-]{0,99}")
_KEY = re.compile(r"[0-9a-f]{64}")


def check_checkpoint_number(number: str) -> str:
    """Return ``number`` if it has the form ``<incarnation>-<n>``, else raise Refused."""
    if not _NUMBER.fullmatch(number):
        raise Refused(f"{number!r} is not a checkpoint number", "it looks like 1-3: <incarnation>-<n>")
    return number


def order(number: str) -> tuple[int, int]:
    """A sort key: later checkpoints are greater."""
    incarnation, n = check_checkpoint_number(number).split("-")
    return int(incarnation), int(n)


def _is_number(value: str) -> str:
    if not _NUMBER.fullmatch(value):
        raise ValueError(f"{value[:80]!a} is not <incarnation>-<n>")
    return value


Cause = Literal["periodic", "requested", "notice", "orphaned"]
"""Why a checkpoint is taken."""
CheckpointNumber = Annotated[str, AfterValidator(_is_number)]
"""``<incarnation>-<n>``."""


def _check_name(value: str) -> str:
    if not _FILE_NAME.fullmatch(value):
        raise ValueError(f"{value[:80]!a} is not a plain file name")
    return value


def _check_key(value: str) -> str:
    if not _KEY.fullmatch(value):
        raise ValueError("a chunk key is 64 hexadecimal digits")
    return value


class StoredFile(Frozen):
    """A file cut into chunks."""

    name: str
    size: Bytes
    chunks: tuple[str, ...]

    @field_validator("name")
    @classmethod
    def _plain_name(cls, value: str) -> str:
        return _check_name(value)

    @field_validator("chunks")
    @classmethod
    def _keys(cls, value: tuple[str, ...]) -> tuple[str, ...]:
        return tuple(map(_check_key, value))


class ImageFile(Frozen):
    """One of CRIU's images, of ``size`` bytes: the manifest's ``packed`` has them one after the other, but for those that are spaces themselves."""

    name: str
    size: Bytes

    @field_validator("name")
    @classmethod
    def _plain_name(cls, value: str) -> str:
        return _check_name(value)


class MemoryGroup(Frozen):
    """Records of windows of memory, stored as one chunk (``savedworker.checkpoint.memory``)."""

    key: str
    windows: tuple[int, ...] = Field(min_length=1)
    """Numbers of the windows, in the order of their records."""

    @field_validator("key")
    @classmethod
    def _key(cls, value: str) -> str:
        return _check_key(value)


class StoredMemory(Frozen):
    """One space: what the pagemap ``name`` describes, ``size`` bytes of the image ``pages``.

    Or a file that is cut by offset, with ``size`` bytes of pages that have data: an image (``pages`` is its name as well), or one of /dev/shm (without ``pages``), whose
    index has its name.

    Each window is in one of ``groups``; what it has in ``deltas`` is its difference (XOR) from that.
    """

    name: str
    pages: str | None
    size: Bytes
    skip: int = Field(default=0, ge=0, lt=4096)
    """Of a file: it begins so many bytes after the beginning of its first window."""
    groups: tuple[MemoryGroup, ...]
    deltas: tuple[MemoryGroup, ...] = ()

    @field_validator("name", "pages")
    @classmethod
    def _plain_names(cls, value: str | None) -> str | None:
        return None if value is None else _check_name(value)


class StreamPosition(Frozen):
    """Bytes of each stream that the worker had written in its life so far."""

    stdout: Bytes = 0
    stderr: Bytes = 0


class OpenVolumeFile(Frozen):
    """A file on a volume that was open for writing at the cut; volumes are not captured."""

    path: str
    volume: str
    size: Bytes
    append: bool


class Runtime(Frozen):
    """Facts of the container that every later incarnation has to repeat."""

    hostname: str
    syscalls: str = "guarded"
    network: str = "private"
    image: str = ""
    """Digest of an image that a registry has, at the worker's first start: a tag may be moved meanwhile."""
    masked: tuple[str, ...] = ()
    """Folders of the host's root that the worker must not see: the agent's own, and a store on this disk."""
    shm_devices: tuple[int, ...] = Field(default=(), max_length=100_000)
    """Device numbers that /dev/shm had in this worker's life; a later one must differ (PyTorch caches by device and inode)."""


class Manifest(Document):
    """One committed checkpoint: process images, writable layer, /dev/shm, log position, fingerprint."""

    worker: str
    number: CheckpointNumber
    incarnation: int = Field(ge=1, lt=1 << 63)
    cause: Cause
    frozen_at: Instant
    images: tuple[ImageFile, ...]
    """All of CRIU's images but the pages files, which ``memory`` names."""
    packed: StoredFile
    """The contents of ``packed_images``, one after the other."""
    memory: tuple[StoredMemory, ...] = ()
    layer: StoredFile
    """The writable layer's index document."""
    shm: StoredFile
    """The index document of /dev/shm."""
    log: StreamPosition
    volume_files: tuple[OpenVolumeFile, ...] = ()
    runtime: Runtime
    fingerprint: Fingerprint
    bytes_image: Bytes

    @property
    def packed_images(self) -> tuple[ImageFile, ...]:
        """The images that are in ``packed``."""
        apart = {x.name for x in self.memory if x.name == x.pages}
        return tuple(x for x in self.images if x.name not in apart)

    @property
    def image_memory(self) -> tuple[StoredMemory, ...]:
        """What of ``memory`` is in CRIU's images."""
        return tuple(x for x in self.memory if x.pages is not None)

    @property
    def shm_memory(self) -> tuple[StoredMemory, ...]:
        """What of ``memory`` is in files of /dev/shm."""
        return tuple(x for x in self.memory if x.pages is None)

    def chunk_keys(self) -> Iterator[str]:
        """The chunks that it names itself; ``layer`` and ``shm`` are documents that name more. Some come twice."""
        for file in (self.packed, self.layer, self.shm):
            yield from file.chunks
        for space in self.memory:
            yield from (group.key for group in (*space.groups, *space.deltas))

    encryption: None = None
    """Reserved."""
