"""A store in memory whose clock a test turns, and several programs that take turns at it: no real store can be a day older now."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta

from savedworker.model.errors import AlreadyExists, Conflict, NotFound, Unreachable
from savedworker.store.backend import Store
from savedworker.store.base import Data, Found, ObjectInfo, Version

START = datetime(2030, 1, 1, tzinfo=UTC)


@dataclass
class Stored:
    data: bytes
    modified: datetime
    version: int


class MemoryBackend:
    """``seconds`` is the store's clock. ``step`` is called before every operation and names it.

    An operation for which more than ``patience`` seconds pass does not take place: its client has given up.
    """

    def __init__(self) -> None:
        self.objects: dict[str, Stored] = {}
        self.seconds = 1e6
        self.writes = 0
        self.step: Callable[[str], None] = lambda what: None
        self.patience = float("inf")

    def _wait(self, what: str, since: float | None = None) -> None:
        began = self.seconds if since is None else since
        self.step(what)
        if self.seconds - began > self.patience:
            raise Unreachable(f"{what}: no answer in time")

    def _write(self, key: str, data: Data) -> Version:
        self.writes += 1
        self.objects[key] = Stored(bytes(data), START + timedelta(seconds=self.seconds), self.writes)
        return Version(str(self.writes))

    def get(self, key: str) -> Found:
        self._wait(f"get {key}")
        if key not in self.objects:
            raise NotFound(f"{key} does not exist")
        return Found(self.objects[key].data, Version(str(self.objects[key].version)))

    def head(self, key: str) -> ObjectInfo | None:
        self._wait(f"head {key}")
        found = self.objects.get(key)
        return ObjectInfo(key, len(found.data), found.modified) if found else None

    def put(self, key: str, data: Data) -> None:
        self._wait(f"put {key}")
        self._write(key, data)

    def create(self, key: str, data: Data) -> None:
        self._wait(f"create {key}")
        if key in self.objects:
            raise AlreadyExists(f"{key} exists already")
        self._write(key, data)

    def swap(self, key: str, data: Data, expected: Version | None) -> Version:
        self._wait(f"swap {key}")
        found = self.objects.get(key)
        if (str(found.version) if found else None) != expected:
            raise Conflict(f"{key} was written by somebody else")
        return self._write(key, data)

    def put_stream(self, key: str, parts: Iterable[bytes]) -> None:
        self.put(key, b"".join(parts))

    def get_stream(self, key: str, chunk_size: int) -> Iterator[bytes]:
        return iter([self.get(key).data])

    def list(self, prefix: str, after: str | None) -> Iterator[ObjectInfo]:
        self._wait(f"list {prefix}")
        found = [
            ObjectInfo(key, len(x.data), x.modified)
            for key, x in sorted(self.objects.items())
            if (not prefix or key.startswith(f"{prefix}/")) and (after is None or key > after)
        ]
        return iter(found)

    def list_dirs(self, prefix: str) -> Sequence[str]:
        rest = (key.removeprefix(f"{prefix}/") for key in self.objects if key.startswith(f"{prefix}/"))
        return sorted({name.split("/")[0] for name in rest if "/" in name})

    def delete(self, keys: Sequence[str]) -> None:
        began = self.seconds
        for key in keys:
            self._wait(f"delete {key}", began)
            self.objects.pop(key, None)

    def ensure(self) -> None:
        return

    def leftovers(self, *, remove: bool) -> tuple[int, int]:
        return 0, 0


class Killed(BaseException):
    """What a program gets that is killed at one of its operations."""


class Turns:
    """Runs programs as if they were processes: exactly one at a time, switched at every operation on the store.

    ``choose(n)`` picks which of the n programs that still run goes next, a number from 0 to n-1. ``kill`` maps the name of a program
    to the number of operations after which it dies.
    """

    def __init__(self, backend: MemoryBackend, choose: Callable[[int], int], kill: dict[str, int]) -> None:
        self._choose, self._kill = choose, kill
        self._turn = {"scheduler": threading.Semaphore(0)}
        self._counts: dict[str, int] = {}
        self._name = threading.local()
        self._ended: set[str] = set()
        backend.step = self._step
        self._backend = backend
        self.failures: dict[str, BaseException] = {}

    def _step(self, what: str) -> None:
        name = getattr(self._name, "value", None)
        if name is None:
            return
        self._counts[name] = self._counts.get(name, 0) + 1
        self._turn["scheduler"].release()
        self._turn[name].acquire()
        if self._counts[name] > self._kill.get(name, 10**9):
            raise Killed

    def run(self, **programs: Callable[[], object]) -> None:
        def live(name: str) -> None:
            self._name.value = name
            self._turn[name].acquire()
            try:
                programs[name]()
            except BaseException as error:
                self.failures[name] = error
            finally:
                self._ended.add(name)
                self._turn["scheduler"].release()

        threads = {name: threading.Thread(target=live, args=(name,), daemon=True) for name in programs}
        for name, thread in threads.items():
            self._turn[name] = threading.Semaphore(0)
            thread.start()
        going = list(programs)
        while going:
            name = going[self._choose(len(going)) % len(going)]
            self._turn[name].release()
            self._turn["scheduler"].acquire()
            if name in self._ended:
                going.remove(name)
        self._backend.step = lambda what: None
        for name, error in self.failures.items():
            assert isinstance(error, Killed), f"{name} failed: {error!r}"


class Altering(MemoryBackend):
    """Alters one byte of the next ``times`` answers, in the middle."""

    times = 0

    def get(self, key: str) -> Found:
        found = super().get(key)
        if self.times <= 0:
            return found
        self.times -= 1
        middle = len(found.data) // 2
        altered = found.data[:middle] + bytes([found.data[middle] ^ 128]) + found.data[middle + 1 :]
        return Found(altered, found.version)


def memory_store() -> tuple[Store, MemoryBackend]:
    backend = MemoryBackend()
    return Store("memory://", backend), backend
