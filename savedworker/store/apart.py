"""A store whose client lives in a process of its own, for programs that fork.

The library behind S3 and Google Cloud Storage has threads that a forked child lacks: its first request there hangs for ever (seen with
obstore 0.9.4 on Linux). Airflow's scheduler forks the tasks of LocalExecutor; with the client in a helper process, the scheduler itself never
begins those threads, and its children may have their own. A directory needs none of this.
"""

from __future__ import annotations

import contextlib
import os
import pickle
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import IO, Any

from savedworker.model.errors import Fatal, SavedWorkerError, Unreachable
from savedworker.store.backend import Store, open_store
from savedworker.store.base import Data, Found, ObjectInfo, Version
from savedworker.store.sealing import NO_KEY, Sealing, sealing_from_environment

_LENGTH = struct.Struct("<Q")
_AT_ONCE = 16
_MARGIN = 30.0
"""Seconds beyond the store's own limit after which a helper that gives no answer counts as stuck."""


def open_store_apart(url: str, *, timeout: float = 30.0, sealing: Sealing | None = None) -> Store:
    """As ``open_store``; what is no directory is reached through a helper process, begun at the first request."""
    if sealing is None:
        sealing = sealing_from_environment()
    if "://" not in url or url.startswith("file:"):
        return open_store(url, timeout=timeout, sealing=sealing)
    return Store(url.rstrip("/"), ApartBackend(url, timeout), sealing)


class ApartBackend:
    """A backend in a helper process, which is begun again when it has died. For any number of threads of one process."""

    def __init__(self, url: str, timeout: float) -> None:
        self._url = url
        self._timeout = timeout
        self._lock = threading.Lock()
        self._helper: subprocess.Popen[bytes] | None = None
        self._waiting: dict[int, tuple[subprocess.Popen[bytes], Future[Any]]] = {}
        self._next = 0

    def get(self, key: str) -> Found:
        """See ``Store``, as for all of these."""
        found: Found = self._ask("get", key)
        return found

    def head(self, key: str) -> ObjectInfo | None:
        found: ObjectInfo | None = self._ask("head", key)
        return found

    def put(self, key: str, data: Data) -> None:
        self._ask("put", key, bytes(data))

    def create(self, key: str, data: Data) -> None:
        self._ask("create", key, bytes(data))

    def swap(self, key: str, data: Data, expected: Version | None) -> Version:
        version: Version = self._ask("swap", key, bytes(data), expected)
        return version

    def put_stream(self, key: str, parts: Iterable[bytes]) -> None:
        self._ask("put_stream", key, list(parts))

    def get_stream(self, key: str, chunk_size: int) -> Iterator[bytes]:
        return iter(self._ask("get_stream", key, chunk_size))

    def list(self, prefix: str, after: str | None) -> Iterator[ObjectInfo]:
        return iter(self._ask("list", prefix, after))

    def list_dirs(self, prefix: str) -> Sequence[str]:
        found: Sequence[str] = self._ask("list_dirs", prefix)
        return found

    def delete(self, keys: Sequence[str]) -> None:
        self._ask("delete", [*keys])

    def ensure(self) -> None:
        self._ask("ensure")

    def leftovers(self, *, remove: bool) -> tuple[int, int]:
        found: tuple[int, int] = self._ask("leftovers", remove)
        return found

    def close(self) -> None:
        """End the helper; the next request begins another one."""
        with self._lock:
            helper, self._helper = self._helper, None
        if helper is not None:
            helper.kill()  # what listens to it closes the pipes
            helper.wait()

    def _ask(self, name: str, *arguments: Any) -> Any:
        with self._lock:
            helper = self._running()
            self._next += 1
            number, answer = self._next, Future[Any]()
            self._waiting[number] = helper, answer
            assert helper.stdin is not None
            try:
                _write(helper.stdin, (number, name, arguments))
            except OSError as error:
                self._waiting.pop(number)
                raise Unreachable(f"the process that reaches {self._url} has died: {error}") from error
        try:
            return answer.result(self._timeout + _MARGIN)
        except TimeoutError as error:
            self.close()
            raise Unreachable(f"the process that reaches {self._url} gives no answer") from error

    def _running(self) -> subprocess.Popen[bytes]:
        if self._helper is None or self._helper.poll() is not None:
            command = [sys.executable, "-m", "savedworker.store.apart", self._url, str(self._timeout)]
            try:
                self._helper = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
            except OSError as error:
                raise Fatal(f"the process that reaches {self._url} cannot be begun: {error}") from error
            threading.Thread(
                target=self._listen, args=(self._helper,), name="store-apart", daemon=True
            ).start()
        return self._helper

    def _listen(self, helper: subprocess.Popen[bytes]) -> None:
        assert helper.stdout is not None
        while (said := _read(helper.stdout)) is not None:
            number, good, found = said
            with self._lock:
                asked = self._waiting.pop(number, None)
            if asked is not None:
                asked[1].set_result(found) if good else asked[1].set_exception(found)
        helper.stdout.close()
        with self._lock, contextlib.suppress(OSError):
            if helper.stdin is not None:
                helper.stdin.close()
        with self._lock:  # not what its successor has been asked by now
            lost = [number for number, (whom, _) in self._waiting.items() if whom is helper]
            answers = [self._waiting.pop(number)[1] for number in lost]
        for answer in answers:
            answer.set_exception(Unreachable(f"the process that reaches {self._url} has died"))


def _write(pipe: IO[bytes], what: Any) -> None:
    data = pickle.dumps(what)
    pipe.write(_LENGTH.pack(len(data)) + data)
    pipe.flush()


def _read(pipe: IO[bytes]) -> Any:
    """None at the end."""
    head = pipe.read(_LENGTH.size)
    if len(head) < _LENGTH.size:
        return None
    (length,) = _LENGTH.unpack(head)
    data = pipe.read(length)
    return pickle.loads(data) if len(data) == length else None  # from our own parent or child


def _end_with(parent: int) -> None:
    """A forked sibling may hold the other end of stdin: its end does not tell that nobody asks any more."""
    while os.getppid() == parent:
        time.sleep(1.0)
    os._exit(0)


def serve(url: str, timeout: float) -> None:
    """The helper: answers requests from stdin on stdout until its parent is gone."""
    threading.Thread(target=_end_with, args=(os.getppid(),), daemon=True).start()
    out = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # whatever else is printed here is no answer
    lock = threading.Lock()
    backend: Any = None
    refused: SavedWorkerError | None = None
    try:
        backend = open_store(url, timeout=timeout, sealing=NO_KEY)._backend
    except SavedWorkerError as error:
        refused = error

    def answer(number: int, name: str, arguments: tuple[Any, ...]) -> None:
        try:
            if refused is not None:
                raise refused
            found = (
                backend.leftovers(remove=arguments[0])
                if name == "leftovers"
                else getattr(backend, name)(*arguments)
            )
            said = (number, True, list(found) if name in ("get_stream", "list", "list_dirs") else found)
        except SavedWorkerError as error:
            error.__cause__ = error.__context__ = None
            said = (number, False, error)
        except Exception as error:  # noqa: BLE001 - it is told to whoever asked
            said = (number, False, Fatal(f"{url}: {type(error).__name__}: {error}"))
        with lock:
            _write(out, said)

    with ThreadPoolExecutor(_AT_ONCE) as pool:
        while (asked := _read(sys.stdin.buffer)) is not None:
            pool.submit(answer, *asked)


if __name__ == "__main__":
    serve(sys.argv[1], float(sys.argv[2]))
