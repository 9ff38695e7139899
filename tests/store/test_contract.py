"""What every store promises, whatever is behind it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
import uuid
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime, timedelta

import pytest

from savedworker.model.errors import AlreadyExists, Conflict, NotFound, Refused
from savedworker.store import Store, open_store


def unique(text: str = "") -> bytes:
    """Bytes as swap wants them: unlike any written before."""
    return f"{text} {uuid.uuid4().hex}".encode()


def test_what_was_put_is_read_back(store: Store) -> None:
    store.put("a/b.json", b"first")
    assert store.get("a/b.json").data == b"first"
    store.put("a/b.json", b"second")
    assert store.get("a/b.json").data == b"second"


def test_an_empty_object_and_any_flat_buffer_can_be_written(store: Store) -> None:
    store.put("empty", b"")
    store.put("view", memoryview(b"xabcx")[1:4])
    store.create("array", bytearray(b"abc"))
    assert [store.get(key).data for key in ("empty", "view", "array")] == [b"", b"abc", b"abc"]


def test_a_large_object_is_written_whole(store: Store) -> None:
    data = os.urandom(17 << 20)
    store.put("large", data)
    assert store.get("large").data == data
    assert store.head("large") is not None


def test_a_missing_object_is_not_found(store: Store) -> None:
    with pytest.raises(NotFound):
        store.get("no/such")
    with pytest.raises(NotFound):
        list(store.get_stream("no/such"))
    assert store.head("no/such") is None
    assert list(store.list("no")) == []
    assert store.list_dirs("no") == []


def test_create_writes_only_where_nothing_is(store: Store) -> None:
    store.create("one", b"mine")
    with pytest.raises(AlreadyExists):
        store.create("one", b"yours")
    with pytest.raises(AlreadyExists):
        store.create("one", b"mine")
    assert store.get("one").data == b"mine"


def test_of_many_creators_one_wins(store: Store) -> None:
    def create(n: int) -> bool:
        try:
            store.create("race", f"{n}".encode())
        except AlreadyExists:
            return False
        return True

    with ThreadPoolExecutor(8) as pool:
        wins = list(pool.map(create, range(8)))
    assert sum(wins) == 1
    assert store.get("race").data == f"{wins.index(True)}".encode()


def test_swap_creates_then_replaces_only_the_expected_version(store: Store) -> None:
    first = store.swap("w/record.json", unique("1"), None)
    assert store.get("w/record.json").version == first
    second = store.swap("w/record.json", unique("2"), first)
    assert second != first
    with pytest.raises(Conflict):
        store.swap("w/record.json", unique("3"), first)
    with pytest.raises(Conflict):
        store.swap("w/record.json", unique("3"), None)
    found = store.get("w/record.json")
    assert found.version == second
    assert found.data.startswith(b"2 ")


def test_swap_of_a_missing_object_is_a_conflict(store: Store) -> None:
    version = store.swap("gone", unique(), None)
    store.delete(["gone"])
    with pytest.raises(Conflict):
        store.swap("gone", unique(), version)


def test_a_writer_that_slept_through_many_versions_and_a_deletion_loses(store: Store) -> None:
    stale = store.swap("k", unique(), None)
    version = stale
    for _ in range(20):
        version = store.swap("k", unique(), version)
        with pytest.raises(Conflict):
            store.swap("k", unique("stale"), stale)
    store.delete(["k"])
    store.swap("k", unique("new life"), None)
    for old in (stale, version):
        with pytest.raises(Conflict):
            store.swap("k", unique("stale"), old)
    assert store.get("k").data.startswith(b"new life")


def test_concurrent_swaps_lose_no_update(store: Store) -> None:
    store.swap("counter", json.dumps([0, "start"]).encode(), None)
    lock = threading.Lock()  # moto checks If-Match and writes in two steps; S3 does it in one

    def increment(_: int) -> None:
        while True:
            found = store.get("counter")
            data = json.dumps([json.loads(found.data)[0] + 1, uuid.uuid4().hex]).encode()
            try:
                if store.url.startswith("s3:"):
                    with lock:
                        store.swap("counter", data, found.version)
                else:
                    store.swap("counter", data, found.version)
            except Conflict:
                continue
            return

    with ThreadPoolExecutor(6) as pool:
        list(pool.map(increment, range(60)))
    assert json.loads(store.get("counter").data)[0] == 60


def test_a_swapped_key_is_listed_read_and_deleted_under_its_plain_name(store: Store) -> None:
    version = store.swap("w/x/record.json", unique(), None)
    for _ in range(12):
        version = store.swap("w/x/record.json", unique(), version)
    store.put("w/x/spec.json", b"{}")
    data = store.get("w/x/record.json").data
    assert [info.key for info in store.list("w")] == ["w/x/record.json", "w/x/spec.json"]
    assert next(store.list("w")).size == len(data)
    head = store.head("w/x/record.json")
    assert head is not None
    assert head.size == len(data)
    assert b"".join(store.get_stream("w/x/record.json", 7)) == data
    assert store.list_dirs("w/x") == []
    with pytest.raises(AlreadyExists):
        store.create("w/x/record.json", b"x")
    store.delete(["w/x/record.json"])
    assert [info.key for info in store.list("w")] == ["w/x/spec.json"]
    with pytest.raises(NotFound):
        store.get("w/x/record.json")


def test_put_over_a_swapped_key_makes_older_versions_stale(store: Store) -> None:
    old = store.swap("k", unique(), None)
    store.put("k", b"forced")
    assert store.get("k").data == b"forced"
    with pytest.raises(Conflict):
        store.swap("k", unique(), old)
    store.swap("k", unique("again"), store.get("k").version)
    assert store.get("k").data.startswith(b"again")


def test_a_listing_has_every_object_below_the_prefix_and_nothing_else(store: Store) -> None:
    keys = ["a-b/1", "a/1", "a/2/3", "ab/1", "b"]
    for key in keys:
        store.put(key, key.encode())
    assert [info.key for info in store.list()] == sorted(keys)
    assert [info.key for info in store.list("a")] == ["a/1", "a/2/3"]
    assert [info.key for info in store.list("a/")] == ["a/1", "a/2/3"]
    assert [info.key for info in store.list("", after="a/1")] == ["a/2/3", "ab/1", "b"]
    assert store.list_dirs() == ["a", "a-b", "ab"]
    assert store.list_dirs("a") == ["2"]
    info = next(store.list("a"))
    assert info.size == 3
    assert abs(info.modified - datetime.now(UTC)) < timedelta(minutes=5)


def test_more_than_a_thousand_objects_are_listed_and_deleted(store: Store) -> None:
    keys = [f"many/{n:05d}" for n in range(1203)]
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(lambda key: store.put(key, b"x"), keys))
    assert [info.key for info in store.list("many")] == keys
    assert [info.key for info in store.list("many", after=keys[1000])] == keys[1001:]
    store.delete(keys)
    assert list(store.list("many")) == []
    assert store.list_dirs() == []


def test_deleting_what_is_not_there_is_fine(store: Store) -> None:
    store.put("a/here", b"")
    store.delete(["a/no", "a/here", "b/no"])
    store.delete(["a/here"])
    store.delete([])
    assert list(store.list()) == []


def test_a_directory_without_objects_is_not_listed(store: Store) -> None:
    store.put("a/b/c", b"")
    store.delete(["a/b/c"])
    assert store.list_dirs() == []
    store.put("a/b/d", b"")
    assert store.list_dirs("a") == ["b"]


def test_a_stream_that_fails_half_way_leaves_nothing(store: Store) -> None:
    def parts() -> object:
        yield os.urandom(6 << 20)
        yield os.urandom(6 << 20)
        raise FileNotFoundError("the caller's own trouble")

    with pytest.raises(FileNotFoundError, match="own trouble"):
        store.put_stream("s", parts())  # type: ignore[arg-type]
    assert list(store.list()) == []


def test_an_empty_stream_is_an_empty_object(store: Store) -> None:
    store.put_stream("s", iter([]))
    assert store.get("s").data == b""
    assert list(store.get_stream("s")) == []


def test_a_stream_is_read_in_pieces_of_the_size_asked_for(store: Store) -> None:
    store.put_stream("s", [b"ab", b"", b"cdefg"])
    assert list(store.get_stream("s", 3)) == [b"abc", b"def", b"g"]


STREAM = """
import hashlib, os, resource, sys
from savedworker.store import open_store

store = open_store(sys.argv[1])
store.put("warm", os.urandom(2 << 20)); b"".join(store.get_stream("warm"))
def peak(): return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024
before, total, wrote, read = peak(), 64, hashlib.sha256(), hashlib.sha256()
def parts():
    for _ in range(total):
        part = os.urandom(1 << 20)
        wrote.update(part)
        yield part
store.put_stream("big", parts())
put = peak()
for piece in store.get_stream("big", 1 << 20):
    read.update(piece)
assert wrote.digest() == read.digest()
print(put - before, peak() - before)
"""


def test_streaming_64_mib_does_not_hold_it_all(url: str) -> None:
    done = subprocess.run([sys.executable, "-c", STREAM, url], check=True, capture_output=True, text=True)
    grew = [int(word) for word in done.stdout.split()]
    assert max(grew) < 48, f"peak memory grew by {grew} MiB after put and get"


@pytest.mark.parametrize(
    "key",
    [
        "",
        "/a",
        "a//b",
        "a/",
        "../a",
        "a/../b",
        ".",
        "a/.tmp/b",
        "a@",
        "a b",
        "a\nb",
        "ä",
        "a%2fb",
        "x" * 900,
        "a\\b",
    ],
)
def test_a_malformed_key_is_refused(store: Store, key: str) -> None:
    with pytest.raises(Refused):
        store.put(key, b"")
    with pytest.raises(Refused):
        store.get(key)
    with pytest.raises(Refused):
        store.delete(["ok", key])


def test_ensure_makes_the_store_usable(url: str) -> None:
    store = open_store(url)
    store.ensure()
    store.ensure()
    assert list(store.list()) == []


def test_two_programs_see_one_store(url: str) -> None:
    open_store(url).put("a", b"1")
    assert open_store(url + "/").get("a").data == b"1"
