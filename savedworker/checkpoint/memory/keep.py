"""What a restore fetches is kept as the base of the next checkpoint, as far as disk and processor leave room for that.

The worker does not wait for it: what there is no room for at that moment is left out, and fetched again once the worker runs
(``inherit.py``).
"""

from __future__ import annotations

import logging
import threading
from collections import Counter, deque
from collections.abc import Callable

from savedworker.checkpoint.memory.base import Base
from savedworker.checkpoint.memory.records import split
from savedworker.checkpoint.priority import give_way
from savedworker.model.errors import Corrupt
from savedworker.model.manifest import MemoryGroup

log = logging.getLogger(__name__)


class Keep:
    """Writes groups into ``base`` on a thread of its own, which gives way. Until that has ended nobody else may use ``base``.

    ``most``: bytes of groups that wait to be written at most. ``has_room`` is asked before each, and says whether the disk takes it
    with so many bytes of something else.
    """

    def __init__(self, base: Base, most: int, has_room: Callable[[int], bool]) -> None:
        self._base, self._most, self._has_room = base, most, has_room
        self._changed = threading.Condition()
        self._waiting: deque[tuple[str, MemoryGroup, memoryview]] = deque()
        self._keys = Counter[str]()
        self._buffers: dict[str, memoryview] = {}
        """Of what waits, how often it does, and its content: what several spaces have in common is in memory once."""
        self._held = 0
        self._beside = 0
        self._taken: set[tuple[str, int]] = set()
        self._closed = False
        self._thread: threading.Thread | None = None

    def leave_room(self, size: int) -> None:
        """So many bytes of the disk are needed for something else."""
        self._beside = size

    def offer(self, space: str, group: MemoryGroup, data: memoryview) -> None:
        """Here is the verified content of a group of ``space``. Returns at once. Any thread may call."""
        name = (space, group.windows[0])
        with self._changed:
            size = 0 if group.key in self._buffers else len(data)
            if self._closed or name in self._taken or self._held + size > self._most:
                return
            data = self._buffers.setdefault(group.key, data)
            self._taken.add(name)
            self._keys[group.key] += 1
            self._held += size
            self._waiting.append((space, group, data))
            self._changed.notify()
            if self._thread is None:
                thread = threading.Thread(target=self._write, name="keep", daemon=True)
                thread.start()
                self._thread = thread

    def close(self) -> None:
        """Nothing more is offered: the thread ends with what it has."""
        with self._changed:
            self._closed = True
            self._changed.notify()

    def wait(self) -> None:
        """Close, and wait until all that was taken is written."""
        self.close()
        if self._thread is not None:
            self._thread.join()

    def drop(self) -> None:
        """Close, and do without what is not written yet."""
        with self._changed:
            self._waiting.clear()
        self.wait()

    def undo(self) -> None:
        """The restore failed: nothing is left in ``base``."""
        self.drop()
        self._base.clear()

    def _write(self) -> None:
        try:
            give_way()
            self._write_all()
        except (OSError, Corrupt) as error:
            log.warning("what is fetched is not kept any further: %s", error)
        finally:
            with self._changed:
                self._closed = True
                self._waiting.clear()

    def _write_all(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._waiting or self._closed)
                if not self._waiting:
                    return
                space, group, data = self._waiting.popleft()
            if not self._has_room(self._beside):
                log.info("what is fetched is not kept any further: the disk has no room for it")
                return
            masks = [mask for mask, _ in split(data, len(group.windows), group.key)]
            self._base.add(space, group.windows, masks, group.key, data)
            with self._changed:
                self._keys[group.key] -= 1
                if not self._keys[group.key]:
                    del self._keys[group.key], self._buffers[group.key]
                    self._held -= len(data)
