"""Durations and sizes as people write them: ``30s``, ``5m``, ``4GiB``."""

from __future__ import annotations

import math
import re
from decimal import Decimal
from typing import Literal

from savedworker.model.errors import Refused

_NUMBER = r"[0-9]{1,12}(?:\.[0-9]{1,15})?"
_PART = re.compile(rf"({_NUMBER})[ ]?(ms|s|m|h|d)")
_DURATION = re.compile(rf"(?:{_NUMBER}[ ]?(?:ms|s|m|h|d)[ ]?){{1,8}}")
_PLAIN = re.compile(_NUMBER)
_SECONDS = {"ms": 0.001, "s": 1.0, "m": 60.0, "h": 3600.0, "d": 86400.0}
_SIZE = re.compile(r"([0-9]{1,19}(?:\.[0-9]{1,15})?)[ ]?(?:([KMGT])(?:i?B)?|([KMGT]i)|B)?", re.IGNORECASE)
_POWERS = {"": 0, "K": 10, "M": 20, "G": 30, "T": 40}
MAX_SIZE = (1 << 63) - 1
"""Bytes; what the kernel can count."""


_DURATION_FIX = "write it as 30s, 5m, 1h30m or a number of seconds"
_SIZE_FIX = "write it as 512MiB, 4GiB or a number of bytes"
MAX_DURATION = 1e12
"""Seconds."""


def parse_duration(text: str | float) -> float:
    """Seconds in ``text``: ``30s``, ``5m``, ``1h30m`` or a bare number of seconds. Raises Refused."""
    if isinstance(text, int | float) and not isinstance(text, bool):
        if not 0 <= text < MAX_DURATION:  # also NaN
            raise Refused("a number so small or large is not a duration", _DURATION_FIX)
        return float(text)
    raw = str(text).strip()
    if _PLAIN.fullmatch(raw):
        return float(raw)
    if not _DURATION.fullmatch(raw):
        raise Refused(f"{raw[:60]!r} is not a duration", _DURATION_FIX)
    return math.fsum(float(number) * _SECONDS[unit] for number, unit in _PART.findall(raw))


def parse_interval(text: str | float) -> float | Literal["auto"] | None:
    """A checkpoint interval: a duration of at least a second, ``auto``, or None for ``off``. Raises Refused."""
    word = str(text).strip().lower()
    if word == "off":
        return None
    if word == "auto":
        return "auto"
    seconds = parse_duration(text)
    if seconds < 1:
        raise Refused(
            f"a checkpoint interval of {str(text)[:60]!r} is too short", "give 1s or more, auto, or off"
        )
    return seconds


def parse_size(text: str | float) -> int:
    """Bytes in ``text``: ``512MiB``, ``4G`` (powers of 1024) or a bare number of bytes. Raises Refused."""
    if isinstance(text, int | float) and not isinstance(text, bool):
        if not 0 <= text <= MAX_SIZE or text != int(text):
            raise Refused("a number so small, large or broken is not a size", _SIZE_FIX)
        return int(text)
    raw = str(text).strip()
    match = _SIZE.fullmatch(raw)
    size = 0
    if match:
        unit = (match[2] or match[3] or "")[:1].upper()
        size = int(Decimal(match[1]) * (1 << _POWERS[unit]))
    if not match or size > MAX_SIZE:
        raise Refused(f"{raw[:60]!r} is not a size", _SIZE_FIX)
    return size


def format_size(size: float) -> str:
    """``size`` in bytes for people, in powers of 1024."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if size < 1024:
            return f"{size:.0f} {unit}" if unit == "B" else f"{size:.1f} {unit}"
        size /= 1024
    return f"{size:.1f} TiB"


def format_duration(seconds: float) -> str:
    """``seconds`` for people: ``0.42s``, ``12s``, ``3m05s``, ``2h10m``."""
    if seconds < 10:
        return f"{seconds:.2f}s" if seconds < 1 else f"{seconds:.1f}s"
    if seconds < 59.5:
        return f"{seconds:.0f}s"
    minutes, rest = divmod(round(seconds), 60)
    if minutes < 60:
        return f"{minutes}m{rest:02d}s"
    hours, minutes = divmod(minutes, 60)
    return f"{hours}h{minutes:02d}m"
