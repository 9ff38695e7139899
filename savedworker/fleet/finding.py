"""One line of what ``savedworker doctor`` finds."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Level = Literal["OK", "WARN", "FAIL"]


@dataclass(frozen=True)
class Finding:
    """One line of the diagnosis."""

    check: str
    level: Level
    detail: str
    fix: str = ""
