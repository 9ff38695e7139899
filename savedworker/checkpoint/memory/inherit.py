"""After a restore the base is what the checkpoint was told against: those groups, and not the memory, are in the store.

Most of them were kept while the worker was restored (``keep.py``); the others are fetched again.
"""

from __future__ import annotations

from collections.abc import Callable

from savedworker.checkpoint.memory.base import Base
from savedworker.checkpoint.memory.rebuild import Get
from savedworker.checkpoint.memory.records import split
from savedworker.model.manifest import StoredMemory


def inherit(stored: StoredMemory, base: Base, get: Get, still_wanted: Callable[[], None]) -> None:
    """Fetch what ``base`` lacks of the groups of one space, so that the next checkpoint uploads what changed and not all of it again.

    ``still_wanted`` is called before every group and may raise, as may ``get``; what was added stays. Raises OSError when the
    base cannot be written.
    """
    for group in stored.groups:
        if base.find(stored.name, group.windows[0]) is not None:
            continue
        still_wanted()
        data = get(group.key)
        masks = [mask for mask, _ in split(memoryview(data), len(group.windows), group.key)]
        base.add(stored.name, group.windows, masks, group.key, data)
