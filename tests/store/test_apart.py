"""A store whose client lives in a helper process: for schedulers that fork, since a forked child's own first request would hang."""

from __future__ import annotations

import os
import pickle
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from savedworker.model.errors import AlreadyExists, Conflict, NotFound, Refused, SavedWorkerError, Unreachable
from savedworker.store.apart import ApartBackend, open_store_apart
from savedworker.store.backend import Store
from tests.faults.s3 import BUCKET, SETTINGS, moto
from tests.store.keys import key, sealing


@pytest.fixture(scope="module")
def endpoint() -> Iterator[str]:
    with moto() as (host, port):
        yield f"http://{host}:{port}"


@pytest.fixture
def store(endpoint: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[Store]:
    for name, value in {**SETTINGS, "AWS_ENDPOINT_URL": endpoint}.items():
        monkeypatch.setenv(name, value)
    store = open_store_apart(f"s3://{BUCKET}/apart", sealing=sealing(key()))
    yield store
    store._backend.close()  # type: ignore[attr-defined]


def test_everything_that_a_store_does(store: Store) -> None:
    store.ensure()
    store.put("a/b", b"1")
    assert store.get("a/b").data == b"1"
    store.create("a/c", b"2")
    with pytest.raises(AlreadyExists):
        store.create("a/c", b"3")
    with pytest.raises(NotFound):
        store.get("a/none")
    version = store.swap("r", b"1", None)
    store.swap("r", b"2", version)
    with pytest.raises(Conflict):
        store.swap("r", b"3", version)
    assert [x.key for x in store.list("a")] == ["a/b", "a/c"]
    assert list(store.list_dirs("")) == ["a"]
    store.put_stream("s", iter([b"x", b"y"]))
    assert b"".join(store.get_stream("s")) == b"xy"
    info = store.head("s")
    assert info is not None
    assert info.size == 2
    store.delete(["a/b", "a/c", "r", "s"])
    assert store.head("s") is None
    assert store.sealing == sealing(key())


FORKS = """
import os, signal, sys
from savedworker.store.apart import open_store_apart
from savedworker.store.backend import open_store
store = open_store_apart(sys.argv[1])
store.put("parent", b"1")
child = os.fork()
if child == 0:
    signal.alarm(20)  # as it ends that hangs
    open_store(store.url).put("child", b"2")
    os._exit(0)
assert os.waitpid(child, 0)[1] == 0
assert store.get("child").data == b"2"
"""


def test_a_process_that_uses_it_may_fork_children_that_use_the_store_themselves(store: Store) -> None:
    """In a process of its own: this one has used a store directly, in other tests, and its children would hang."""
    subprocess.run([sys.executable, "-c", FORKS, store.url], check=True, timeout=60)


def test_a_helper_that_died_is_begun_again(store: Store) -> None:
    store.put("a", b"1")
    backend = store._backend
    assert isinstance(backend, ApartBackend)
    assert backend._helper is not None
    os.kill(backend._helper.pid, signal.SIGKILL)
    backend._helper.wait()
    assert store.get("a").data == b"1"


def test_a_store_that_cannot_be_opened_says_so() -> None:
    store = open_store_apart("s3://a_bucket!/x")
    with pytest.raises(Refused, match="bucket"):
        store.get("a")


def test_a_store_that_is_away_is_unreachable(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {**SETTINGS, "AWS_ENDPOINT_URL": "http://127.0.0.1:9"}.items():
        monkeypatch.setenv(name, value)
    store = open_store_apart(f"s3://{BUCKET}/x", timeout=2.0)
    with pytest.raises(Unreachable):
        store.get("a")
    store._backend.close()  # type: ignore[attr-defined]


def test_a_directory_needs_no_helper(tmp_path: Path) -> None:
    store = open_store_apart(str(tmp_path / "s"))
    assert not isinstance(store._backend, ApartBackend)


def test_errors_come_through_as_they_are() -> None:
    kinds: list[type[SavedWorkerError]] = [SavedWorkerError]
    while kinds:
        kind = kinds.pop()
        kinds += [x for x in kind.__subclasses__() if x.__module__ == "savedworker.model.errors"]
        error = kind("what", fix="how")
        again = pickle.loads(pickle.dumps(error))
        assert (type(again), again.message, again.fix) == (kind, "what", "how")
