"""Every kind of bad answer from an object store, at every kind of request: the caller learns the truth, or that nobody knows it."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator

import pytest

from savedworker.model.errors import AlreadyExists, Conflict, NotFound, SavedWorkerError, Unreachable
from savedworker.store.backend import Store, open_store
from savedworker.store.base import Version
from tests.faults.conftest import TIMEOUT
from tests.faults.proxy import TROUBLES, Proxy, Rule, Trouble
from tests.faults.s3 import BUCKET, SETTINGS
from tests.timing import within


@pytest.fixture
def store(proxy: Proxy, monkeypatch: pytest.MonkeyPatch) -> Iterator[Store]:
    for name, value in SETTINGS.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("AWS_ENDPOINT_URL", proxy.url)
    yield open_store(f"s3://{BUCKET}/{os.urandom(4).hex()}", timeout=TIMEOUT)
    proxy.clear()


Call = Callable[[Store, Version], object]
READS: dict[str, Call] = {
    "get": lambda s, _: s.get("a").data,
    "get_stream": lambda s, _: b"".join(s.get_stream("a")),
    "list": lambda s, _: [x.key for x in s.list()],
    "head": lambda s, _: s.head("a") is not None,
}
WRITES: dict[str, Call] = {
    "put": lambda s, _: s.put("a", b"new"),
    "create": lambda s, _: s.create("b", b"new"),
    "swap": lambda s, v: s.swap("a", b"new", v),
    "delete": lambda s, _: s.delete(["a"]),
}
METHODS = {"put": "PUT", "create": "PUT", "swap": "PUT", "delete": "POST|DELETE", "head": "HEAD"}


@pytest.mark.parametrize("trouble", TROUBLES)
@pytest.mark.parametrize("verb", READS)
def test_a_read_survives_one_bad_answer(store: Store, proxy: Proxy, verb: str, trouble: Trouble) -> None:
    store.swap("a", b"old", None)
    expected = READS[verb](store, Version(""))
    took: list[float] = []
    for _ in range(3):  # while a machine stands still every store is away
        rule = proxy.add(
            Rule(trouble, METHODS.get(verb, "GET"), seconds=TIMEOUT if "hang" in trouble else 0.3)
        )
        began = time.monotonic()
        survived = True
        try:
            assert READS[verb](store, Version("")) == expected
        except Unreachable:
            survived = trouble == "truncate"  # known at once, and temporary: the caller asks again
        assert rule.hits
        took.append(time.monotonic() - began)
        if survived and took[-1] < TIMEOUT + 1:
            return
    raise AssertionError(f"it does not survive, or takes too long: {took} s")


@pytest.mark.parametrize("trouble", [x for x in TROUBLES if x != "truncate"])
@pytest.mark.parametrize("verb", WRITES)
def test_a_write_survives_one_bad_answer_and_is_done_once(
    store: Store, proxy: Proxy, verb: str, trouble: Trouble
) -> None:
    version = store.swap("a", b"old", None)
    rule = proxy.add(Rule(trouble, METHODS[verb], seconds=TIMEOUT if "hang" in trouble else 0.3))
    try:
        WRITES[verb](store, version)
    except Unreachable:
        assert verb == "delete"  # which may be repeated, and is
        WRITES[verb](store, version)
    assert rule.hits
    if verb == "delete":
        with pytest.raises(NotFound):
            store.get("a")
    else:
        assert store.get("b" if verb == "create" else "a").data == b"new"


@pytest.mark.parametrize("trouble", ["503", "reset", "reset_after", "hang_after", "500_after"])
@pytest.mark.parametrize("verb", ["create", "swap"])
def test_a_store_that_stays_bad_is_unreachable_and_never_a_wrong_answer(
    store: Store, proxy: Proxy, verb: str, trouble: Trouble
) -> None:
    """Also the reading back fails: nobody can know, and that is what the caller is told. Afterwards a repetition is right."""
    version = store.swap("a", b"old", None)
    proxy.add(Rule(trouble, times=10**6, seconds=TIMEOUT))

    def fails() -> None:
        with pytest.raises(Unreachable):
            WRITES[verb](store, version)

    within(TIMEOUT + 1, fails)
    proxy.clear()
    key = "b" if verb == "create" else "a"
    try:
        WRITES[verb](store, version)
    except (AlreadyExists, Conflict):
        assert trouble.endswith("_after")
    assert store.get(key).data == b"new"


@pytest.mark.parametrize("trouble", ["reset_after", "hang_after", "500_after"])
def test_a_lost_swap_that_somebody_else_has_replaced_is_a_conflict_and_not_a_success(
    store: Store, proxy: Proxy, trouble: Trouble
) -> None:
    version = store.swap("a", b"old", None)
    rule = Rule(trouble, "PUT", seconds=TIMEOUT)
    other = open_store(store.url, options={"endpoint": f"http://{proxy.behind[0]}:{proxy.behind[1]}"})

    class Then(Rule):
        """Between our write and our reading back another writer wins."""

        def applies(self, client: str, method: str, path: str) -> bool:
            if method == "GET" and rule.hits and not self.hits:
                self.hits.append(path)
                other.swap("a", b"theirs", other.get("a").version)
            return False

    proxy.add(rule)
    proxy.add(Then("503"))
    with pytest.raises(Conflict):
        store.swap("a", b"mine", version)
    assert other.get("a").data == b"theirs"


def test_a_truncated_chunk_is_never_taken_for_a_whole_one(store: Store, proxy: Proxy) -> None:
    from savedworker.store.chunks import ChunkStore

    chunks = ChunkStore(store, "w")
    data = os.urandom(1 << 20)
    key = chunks.put(data)
    for _ in range(3):
        proxy.add(Rule("truncate", "GET", "/chunks/"))
        found: bytes | str = ""
        try:
            found = chunks.get(key)
        except SavedWorkerError as error:
            found = error.code
        assert found in (data, "unreachable", "corrupt")
    assert chunks.get(key) == data
