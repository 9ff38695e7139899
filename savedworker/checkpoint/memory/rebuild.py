"""From groups in the store back to CRIU's pages files. Everything that is read is untrusted until its hash is checked."""

from __future__ import annotations

import os
import threading
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Executor, Future
from dataclasses import dataclass
from functools import partial
from itertools import groupby
from pathlib import Path

import numpy as np

from savedworker.checkpoint.memory.files import opened, write_at
from savedworker.checkpoint.memory.pagemap import (
    PAGE,
    WINDOW,
    Space,
    Window,
    is_pagemap,
    read_pagemap,
    space_of,
)
from savedworker.checkpoint.memory.records import Mask, Words, as_bytes, blank, fill, split
from savedworker.model.errors import Corrupt
from savedworker.model.manifest import MemoryGroup, StoredMemory

Get = Callable[[str], bytes | memoryview]
"""The verified content of a chunk."""
Kept = Callable[[str, MemoryGroup, memoryview], None]
"""Is shown the content of every group of a space that a checkpoint is told against (not of what changed)."""

_TASK = 8
"""Windows of one task, at most, where nothing else says which belong together."""


class _Room(threading.local):
    """Of each thread one buffer, for all spaces."""

    def __init__(self) -> None:
        self.content = blank()


class _Shared:
    """What ``get`` gives, once for everybody who wants it at about the same time: of ``often`` the newest are held, up to ``most`` bytes."""

    def __init__(self, get: Get, most: int) -> None:
        self._get, self._most = get, most
        self.often: frozenset[str] = frozenset()
        self._lock = threading.Lock()
        self._held: OrderedDict[str, Future[bytes | memoryview]] = OrderedDict()
        self._size = 0

    def __call__(self, key: str) -> bytes | memoryview:
        if key not in self.often:
            return self._get(key)
        mine: Future[bytes | memoryview] = Future()
        with self._lock:
            found = self._held.setdefault(key, mine)
        if found is not mine:
            return found.result()
        try:
            data = self._get(key)
        except BaseException as error:
            with self._lock:
                if self._held.get(key) is mine:
                    del self._held[key]
            mine.set_exception(error)
            raise
        with self._lock:
            mine.set_result(data)
            if self._held.get(key) is mine:  # else it was the oldest meanwhile
                self._size += _cost(data)
            while self._size > self._most:
                _, oldest = self._held.popitem(last=False)
                if oldest.done():
                    self._size -= _cost(oldest.result())
        return data


def _cost(data: bytes | memoryview) -> int:
    """Bytes of memory for which it counts while it is held."""
    return len(data) + PAGE


@dataclass(frozen=True)
class _Task:
    """Windows that are rebuilt one after the other: the number of the first, the chunks that they need, and what does it."""

    first: int
    keys: frozenset[str]
    write: Callable[[], None]


@dataclass(frozen=True)
class Target:
    """A space as it is stored, which pages it has, and the file that they are written into, which is there already and has ``size`` bytes."""

    stored: StoredMemory
    space: Space
    path: Path
    size: int


def image_targets(memory: Iterable[StoredMemory], folder: Path, sizes: Mapping[str, int]) -> list[Target]:
    """The images in ``folder`` that have the pages of ``memory``: created, and empty yet. ``sizes``: of those that no pagemap describes.

    The pagemaps are there. Raises Corrupt when they do not fit, OSError.
    """
    return [_image_target(stored, folder, sizes) for stored in memory]


def _image_target(stored: StoredMemory, folder: Path, sizes: Mapping[str, int]) -> Target:
    assert stored.pages is not None
    path = folder / stored.pages
    if stored.name == stored.pages:
        size = sizes.get(stored.name, 0)
        target = file_target(stored, ((0, size),) if size else (), path, size)
    else:
        if not is_pagemap(stored.name):
            raise Corrupt(f"{stored.name} is no pagemap")
        space = read_pagemap(folder / stored.name, stored.size)
        if (space.pages, space.size) != (stored.pages, stored.size):
            raise Corrupt(f"{stored.name} describes another pages file than the manifest")
        target = Target(stored, space, path, space.size)
    with opened(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL) as fd:
        os.ftruncate(fd, target.size)
    return target


def file_target(stored: StoredMemory, runs: Sequence[tuple[int, int]], path: Path, size: int) -> Target:
    """A file of ``size`` bytes that is cut by offset, with data where ``runs`` say. Raises Corrupt when that is not what is stored."""
    known = {number for group in stored.groups for number in group.windows}
    if sum(length for _, length in runs) + stored.skip > WINDOW * len(known):
        raise Corrupt(f"the manifest lacks windows of {stored.name}")
    space = space_of(stored.name, runs, skip=stored.skip)
    if space.size != stored.size:
        raise Corrupt(f"{stored.name} has {space.size} bytes, and not the {stored.size} of the manifest")
    return Target(stored, space, path, size)


def rebuild(
    targets: Sequence[Target], get: Get, pool: Executor, most: int, kept: Kept = lambda *_: None
) -> list[Future[None]]:
    """Begin to write the pages of all spaces into their targets. All of it is there when the futures are done.

    Processes that were forked have the same memory at the same place: what is there is rebuilt one after the other, and fetched once
    for all of them as far as ``most`` bytes of it can be held.

    Raises Corrupt, here or from a future, when the manifest, the spaces and the chunks do not fit each other, and what
    ``get`` raises; OSError when the disk does not take it.
    """
    shared = _Shared(get, most)
    windows = max(1, min(_TASK, most // (2 * WINDOW)))
    room = _Room()
    tasks = [task for target in targets for task in _plan(target, shared, kept, windows, room)]
    uses = Counter(key for task in tasks for key in task.keys)
    shared.often = frozenset(key for key, count in uses.items() if count > 1)
    return [pool.submit(task.write) for task in sorted(tasks, key=lambda task: task.first)]


def _plan(target: Target, get: Get, kept: Kept, at_once: int, room: _Room) -> list[_Task]:
    """What is to be done for one space."""
    stored, space = target.stored, target.space
    whole = _by_window(stored.groups, stored.name)
    deltas = _by_window(stored.deltas, stored.name)
    missing = [x.number for x in space.windows if x.number not in whole]
    if missing:
        raise Corrupt(f"the manifest lacks window {missing[0]} of {stored.name}")
    return [
        _Task(
            windows[0].number,
            frozenset(whole[x.number].key for x in windows) | ({delta.key} if delta else set()),
            partial(
                _write,
                target,
                _by_group(windows, whole),
                whole,
                delta,
                get,
                partial(kept, space.name),
                room,
            ),
        )
        for delta, windows in _tasks(space.windows, deltas, at_once)
    ]


def _by_group(windows: Sequence[Window], whole: dict[int, MemoryGroup]) -> list[Window]:
    """Those of one group one after the other, so that it is fetched once."""
    groups: dict[int, list[Window]] = {}
    for window in windows:
        groups.setdefault(id(whole[window.number]), []).append(window)
    return [window for group in groups.values() for window in group]


def _by_window(groups: Sequence[MemoryGroup], name: str) -> dict[int, MemoryGroup]:
    found: dict[int, MemoryGroup] = {}
    for group in groups:
        for number in group.windows:
            if found.setdefault(number, group) is not group:
                raise Corrupt(f"window {number} of {name} is in two groups")
    return found


def _tasks(
    windows: Sequence[Window], deltas: dict[int, MemoryGroup], at_once: int
) -> Iterator[tuple[MemoryGroup | None, list[Window]]]:
    """Windows that change by the same group together, so that it is fetched once; of the others ``at_once``, cut at the same places in every space.

    Two groups may have one key: the same changes at other places.
    """
    of_delta: dict[int, tuple[MemoryGroup, list[Window]]] = {}
    others: list[Window] = []
    for window in windows:
        delta = deltas.get(window.number)
        if delta is None:
            others.append(window)
        else:
            of_delta.setdefault(id(delta), (delta, []))[1].append(window)
    yield from of_delta.values()
    for _, near in groupby(others, key=lambda window: window.number // at_once):
        yield None, list(near)


def _write(
    target: Target,
    windows: Sequence[Window],
    whole: dict[int, MemoryGroup],
    delta: MemoryGroup | None,
    get: Get,
    kept: Callable[[MemoryGroup, memoryview], None],
    room: _Room,
) -> None:
    changes = _records(delta, memoryview(get(delta.key))) if delta is not None else {}
    group: MemoryGroup | None = None
    records: dict[int, tuple[Mask, Words]] = {}
    with opened(target.path, os.O_WRONLY | os.O_NOFOLLOW) as fd:
        for window in windows:
            if group is not whole[window.number]:
                group = whole[window.number]
                data = memoryview(get(group.key))
                records = _records(group, data)
                kept(group, data)
            mask, content = records[window.number]
            if window.number in changes or not mask.all():
                fill(room.content, mask, content)
                content = room.content
            if window.number in changes:
                mask, pages = changes[window.number]
                content[mask] = np.bitwise_xor(content[mask], pages)
            view = as_bytes(content)
            for segment in window.segments:
                part = view[segment.start : segment.start + segment.length]
                offset = segment.offset - target.space.skip
                first = max(0, -offset)
                write_at(fd, part[first : target.size - offset], offset + first)


def _records(group: MemoryGroup, data: memoryview) -> dict[int, tuple[Mask, Words]]:
    return dict(zip(group.windows, split(data, len(group.windows), group.key), strict=True))
