"""What every store backend shares: the values that are passed around, the rules for keys, the protocol of a backend."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import NewType, Protocol

from savedworker.model.errors import Refused

Version = NewType("Version", str)
"""Names one content of one key, opaque to callers. Compare for equality and hand back to ``swap``, nothing else."""

Data = bytes | bytearray | memoryview
"""What may be written: any flat buffer of bytes."""

# A strict common subset of what file systems and object stores take unescaped. '@' and a leading '.' are ours.
_COMPONENT = re.compile(r"[A-Za-z0-9_-][A-Za-z0-9._+=,:~-]{0,199}")
MAX_WHOLE = 128 << 20
"""Bytes of an object that is read as a whole; longer ones are streamed."""
MAX_KEY = 700
"""Longest key in characters; S3 takes 1024 bytes with the store's own prefix."""


@dataclass(frozen=True, slots=True)
class Found:
    """An object as it was at one moment."""

    data: bytes
    version: Version


@dataclass(frozen=True, slots=True)
class ObjectInfo:
    """One line of a listing. ``size`` in bytes; ``modified`` by the store's clock, with a time zone."""

    key: str
    size: int
    modified: datetime


class Backend(Protocol):
    """The primitives of one kind of store. Keys and prefixes are checked already; errors are those of ``Store``."""

    def get(self, key: str) -> Found: ...
    def head(self, key: str) -> ObjectInfo | None: ...
    def put(self, key: str, data: Data) -> None: ...
    def create(self, key: str, data: Data) -> None: ...
    def swap(self, key: str, data: Data, expected: Version | None) -> Version: ...
    def put_stream(self, key: str, parts: Iterable[bytes]) -> None: ...
    def get_stream(self, key: str, chunk_size: int) -> Iterator[bytes]: ...
    def list(self, prefix: str, after: str | None) -> Iterator[ObjectInfo]: ...
    def list_dirs(self, prefix: str) -> Sequence[str]: ...
    def delete(self, keys: Sequence[str]) -> None: ...
    def ensure(self) -> None: ...
    def leftovers(self, *, remove: bool) -> tuple[int, int]: ...


def is_component(name: str) -> bool:
    """Whether ``name`` can be one component of a key. Everything else in a listing is foreign and left alone."""
    return _COMPONENT.fullmatch(name) is not None


def is_key(key: str) -> bool:
    """Whether ``key`` is a well-formed key."""
    return 0 < len(key) <= MAX_KEY and all(is_component(part) for part in key.split("/"))


def check_key(key: str) -> str:
    """Return ``key`` if it is well-formed, else raise Refused."""
    if not is_key(key):
        raise Refused(
            f"{key[:200]!r} is not a store key",
            "use components of letters, digits and ._-+=,:~ joined by '/', none empty or beginning with '.'",
        )
    return key


def check_prefix(prefix: str) -> str:
    """Return ``prefix`` without its trailing slash; the empty one means everything. Raises Refused."""
    prefix = prefix.removesuffix("/")
    return check_key(prefix) if prefix else ""
