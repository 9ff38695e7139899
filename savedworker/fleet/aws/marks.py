"""How instances and jobs are marked as ours: tags, and digests for names."""

from __future__ import annotations

import hashlib
import json
from typing import Any

WORKER, LAUNCH, STORE, FLEET, ENDED = (
    f"savedworker:{word}" for word in ("worker", "launch", "store", "fleet", "ended")
)
"""Tags. ENDED is on what we end: else it would look like a person's doing. Their characters are those that the metadata service can show."""


def store_mark(store_url: str) -> str:
    """Names a store in a tag without telling where it is."""
    return hashlib.sha256(store_url.encode()).hexdigest()[:16]


def digest(content: Any) -> str:
    """Sixteen hexadecimal digits that are equal for equal content."""
    text = json.dumps(content, sort_keys=True, separators=(",", ":"), ensure_ascii=False)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def tags(worker: str, launch: str, store_url: str, fleet: str) -> dict[str, str]:
    """The tags of everything that is made for one launch."""
    return {WORKER: worker, LAUNCH: launch, STORE: store_mark(store_url), FLEET: fleet}
