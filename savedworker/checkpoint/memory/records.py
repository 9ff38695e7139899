"""Pages of one window as bytes: a bitmap of which they are, then the pages themselves in order. Read as untrusted input."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import numpy.typing as npt

from savedworker.checkpoint.memory.pagemap import PAGE, PAGES, Segment
from savedworker.model.errors import Corrupt

BITMAP = PAGES // 8
"""Bytes of a record before its pages."""

Words = npt.NDArray[np.uint64]
"""A window's content, PAGES rows of one page each."""
Mask = npt.NDArray[np.bool_]
"""Which pages of a window, PAGES of them."""


def blank(pages: int = PAGES) -> Words:
    """Room for a window's content, or for so many pages. What is in it is arbitrary."""
    return np.empty((pages, PAGE // 8), dtype=np.uint64)


def mask_of(segments: tuple[Segment, ...]) -> Mask:
    """The pages that ``segments`` cover."""
    mask = np.zeros(PAGES, dtype=np.bool_)
    for segment in segments:
        mask[segment.start // PAGE : (segment.start + segment.length) // PAGE] = True
    return mask


def encode(mask: Mask, content: Words) -> tuple[memoryview, memoryview]:
    """The record of the pages in ``mask``, in two parts; the second may be a view of ``content``."""
    pages = content if mask.all() else content[mask]
    return np.packbits(mask).data, as_bytes(pages)


def as_bytes(content: Words) -> memoryview:
    """The bytes of ``content`` (a view)."""
    return content.data.cast("B") if len(content) else memoryview(b"")


def split(group: memoryview, count: int, name: str) -> Iterator[tuple[Mask, Words]]:
    """The ``count`` records of a group: which pages, and their content in order (views). Raises Corrupt."""
    at = 0
    for _ in range(count):
        bitmap = np.frombuffer(group[at : at + BITMAP], dtype=np.uint8)
        if len(bitmap) != BITMAP:
            raise Corrupt(f"group {name} ends within a record")
        mask = np.unpackbits(bitmap).astype(np.bool_)
        length = int(mask.sum()) * PAGE
        at += BITMAP
        if at + length > len(group):
            raise Corrupt(f"group {name} ends within a record")
        yield mask, np.frombuffer(group[at : at + length], dtype=np.uint64).reshape(-1, PAGE // 8)
        at += length
    if at != len(group):
        raise Corrupt(f"group {name} is longer than its records")


def fill(content: Words, mask: Mask, pages: Words) -> None:
    """Make ``content`` what a record says: its pages, and zeros elsewhere."""
    if mask.all():
        content[:] = pages
    else:
        content[:] = 0
        content[mask] = pages
