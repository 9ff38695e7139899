"""CRIU's image of open files (``files.img``): what is mended in it before a restore.

*Files on volumes*: CRIU refuses to restore a process whose open file has another size or mode than at the dump. For a file on
a volume, which no checkpoint captures, that would make every checkpoint useless as soon as the worker writes on. So the two
fields are taken out of its entry; position, flags and path stay.

*Periodic timers*: the kernel says that a timerfd whose expiry has not been read yet has no time left, and CRIU would restore
that as a timer that is switched off (seen with 4.2.1 on 6.18). One nanosecond left lets it go on.

Numbers from CRIU 4.2.1: images/fdinfo.proto, images/regfile.proto, images/timerfd.proto, magic.h.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from savedworker.checkpoint import criu_image

_MAGIC = criu_image.magic(criu_image.IMAGE, 0x56303138)
_REGULAR_FILE, _TIMER = 3, 12
_NAME, _SIZE, _MODE, _BUILD_ID = 6, 8, 10, 11
_TICKS, _LEFT_SECONDS, _LEFT_NANOSECONDS, _EVERY_SECONDS, _EVERY_NANOSECONDS = 5, 7, 8, 9, 10


@dataclass(frozen=True)
class OpenRegularFile:
    """One entry: the path as the worker sees it, and what CRIU will insist on (None: it does not)."""

    path: str
    size: int | None
    mode: int | None
    program: bool
    """It has a build id: a program or library, which must be the very same."""


def forget_sizes(image: Path, forget: Callable[[OpenRegularFile], bool]) -> None:
    """Rewrite ``image`` (whole, or not at all) without size and mode of those entries that ``forget`` picks. Raises Fatal."""
    _mend(image, _REGULAR_FILE, lambda entry: _without_size(entry, forget))


def rearm_timers(image: Path) -> None:
    """Rewrite ``image`` (whole, or not at all) with every periodic timer switched on that has expiries unread. Raises Fatal."""
    _mend(image, _TIMER, _rearmed)


def _mend(image: Path, kind: int, change: Callable[[bytes], bytes]) -> None:
    def mended(entry: bytes) -> bytes:
        return b"".join(
            criu_image.bytes_field(field, change(value))
            if field == kind and isinstance(value, bytes)
            else raw
            for field, value, raw in criu_image.fields(entry)
        )

    criu_image.rewrite(image, _MAGIC, mended)


def _without_size(entry: bytes, forget: Callable[[OpenRegularFile], bool]) -> bytes:
    known = {field: value for field, value, _ in criu_image.fields(entry)}
    name, size, mode = known.get(_NAME), known.get(_SIZE), known.get(_MODE)
    file = OpenRegularFile(
        path="/" + os.fsdecode(name).lstrip("/") if isinstance(name, bytes) else "",
        size=size if isinstance(size, int) else None,
        mode=mode if isinstance(mode, int) else None,
        program=_BUILD_ID in known,
    )
    if not forget(file):
        return entry
    return b"".join(raw for field, _, raw in criu_image.fields(entry) if field not in (_SIZE, _MODE))


def _rearmed(entry: bytes) -> bytes:
    known = {field: value for field, value, _ in criu_image.fields(entry)}
    periodic = known.get(_EVERY_SECONDS) or known.get(_EVERY_NANOSECONDS)
    if not periodic or not known.get(_TICKS) or known.get(_LEFT_SECONDS) or known.get(_LEFT_NANOSECONDS):
        return entry
    return b"".join(
        criu_image.number_field(field, 1) if field == _LEFT_NANOSECONDS else raw
        for field, _, raw in criu_image.fields(entry)
    )
