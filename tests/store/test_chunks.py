"""Chunks come back exactly as they were put, or not at all."""

from __future__ import annotations

import os
import struct
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest
import zstandard
from hypothesis import given
from hypothesis import strategies as st

from savedworker.model.budget import Shares
from savedworker.model.errors import Corrupt, Refused, Unreachable
from savedworker.store import ChunkStore, Store
from savedworker.store.chunks import MAX_CHUNK, decode, encode
from savedworker.store.sealing import PLAIN
from tests.store.memory import Altering, MemoryBackend, memory_store

HEADER = struct.Struct("<4sBBHQ")


@pytest.fixture
def chunks(store: Store) -> ChunkStore:
    return ChunkStore(store, "w")


def where(key: str) -> str:
    return f"workers/w/chunks/{key}"


@pytest.mark.parametrize(
    "data",
    [b"", b"x", bytes(1 << 20), os.urandom(1 << 20), b"ab" * 100_000],
    ids=["nothing", "a byte", "zeros", "noise", "repeated"],
)
def test_a_chunk_comes_back_as_it_was_put(chunks: ChunkStore, data: bytes) -> None:
    key = chunks.put(data)
    assert key == PLAIN.chunk_name(data)
    assert chunks.get(key) == data


def test_the_largest_chunk_fits_and_a_larger_one_is_refused() -> None:
    for data in (bytes(MAX_CHUNK), os.urandom(MAX_CHUNK)):
        assert decode(PLAIN.chunk_name(data), encode(data)) == data
    with pytest.raises(Refused):
        encode(bytes(MAX_CHUNK + 1))


def test_incompressible_data_grows_by_the_header_only_and_zeros_shrink() -> None:
    assert len(encode(os.urandom(1 << 20))) == (1 << 20) + HEADER.size
    assert len(encode(bytes(1 << 20))) < 1000


def test_a_chunk_is_uploaded_once(chunks: ChunkStore, store: Store) -> None:
    for _ in range(3):
        chunks.put(b"same" * 1000)
    assert (chunks.chunks_uploaded, chunks.bytes_in) == (1, 12000)
    assert chunks.bytes_uploaded == sum(info.size for info in store.list("workers/w/chunks"))


def test_a_chunk_that_an_earlier_process_put_is_not_uploaded_again(chunks: ChunkStore, store: Store) -> None:
    key = chunks.put(b"x" * 1000)
    for later in (ChunkStore(store, "w"), ChunkStore(store, "w", known=[key])):
        later.put(b"x" * 1000)
        assert later.chunks_uploaded == 0
    foreign = ChunkStore(store, "other")
    foreign.put(b"x" * 1000)
    assert foreign.chunks_uploaded == 1


def test_a_truncated_leftover_under_a_chunks_name_is_not_taken_for_it(store: Store) -> None:
    data = b"x" * 1000
    store.put(where(PLAIN.chunk_name(data)), b"SWCH")
    chunks = ChunkStore(store, "w")
    assert chunks.get(chunks.put(data)) == data


def test_threads_that_put_the_same_chunk_upload_it_once_and_all_wait_for_it(chunks: ChunkStore) -> None:
    chunks.put(b"first")
    data = os.urandom(2 << 20)
    with ThreadPoolExecutor(8) as pool:
        keys = set(pool.map(lambda _: chunks.put(data), range(16)))
    assert keys == {PLAIN.chunk_name(data)}
    assert chunks.chunks_uploaded == 2
    assert chunks.get(PLAIN.chunk_name(data)) == data


def test_a_chunk_whose_upload_failed_is_uploaded_the_next_time(
    chunks: ChunkStore, store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as patch:

        def fail(key: str, data: bytes) -> None:
            raise Unreachable("away")

        patch.setattr(store, "put", fail)
        with pytest.raises(Unreachable):
            chunks.put(b"data")
    assert chunks.chunks_uploaded == 0
    assert chunks.get(chunks.put(b"data")) == b"data"


def test_damage_of_any_kind_is_found(chunks: ChunkStore, store: Store) -> None:
    for data in (os.urandom(5000), b"compressible " * 500):
        key = chunks.put(data)
        stored = store.get(where(key)).data
        damaged = [
            b"",
            stored[:10],
            stored[:16],
            stored[:-1],
            stored + b"\0",
            stored[: len(stored) // 2],
            b"X" + stored[1:],
        ]
        damaged += [
            stored[:at] + bytes([stored[at] ^ 1]) + stored[at + 1 :]
            for at in (4, 5, 6, 8, 9, 16, 20, len(stored) - 1)
        ]
        for wrong in damaged:
            store.put(where(key), wrong)
            with pytest.raises((Corrupt, Refused)):
                chunks.get(key)
        store.put(where(key), stored)
        assert chunks.get(key) == data


def test_another_chunks_content_is_not_accepted(chunks: ChunkStore, store: Store) -> None:
    one, two = chunks.put(b"one" * 100), chunks.put(b"two" * 100)
    store.put(where(one), store.get(where(two)).data)
    with pytest.raises(Corrupt, match="hash"):
        chunks.get(one)


def test_a_missing_chunk_and_a_bad_key_are_corrupt(chunks: ChunkStore) -> None:
    for key in ("0" * 64, "", "../../spec.json", "0" * 63, "G" * 64, "0" * 64 + "\n"):
        with pytest.raises(Corrupt):
            chunks.get(key)


def test_a_decompression_bomb_is_refused_before_it_unfolds(chunks: ChunkStore, store: Store) -> None:
    bomb = zstandard.ZstdCompressor(level=1).compress(bytes(256 << 20))
    key = "0" * 64
    for size in (256 << 20, 1000, 2**64 - 1):
        store.put(where(key), HEADER.pack(b"SWCH", 1, 1, 0, size) + bomb)
        with pytest.raises(Corrupt):
            chunks.get(key)
    unsized = zstandard.ZstdCompressor(write_content_size=False).compressobj()
    body = unsized.compress(bytes(128 << 20)) + unsized.flush()
    store.put(where(key), HEADER.pack(b"SWCH", 1, 1, 0, 1000) + body)
    with pytest.raises(Corrupt):
        chunks.get(key)


def test_an_object_longer_than_any_chunk_is_not_read_to_its_end(chunks: ChunkStore, store: Store) -> None:
    key = "0" * 64
    store.put(where(key), bytes(3 << 20))
    with pytest.raises(Corrupt, match="longer"):
        chunks.get(key, limit=1 << 20)


def test_a_chunk_of_a_newer_version_is_refused_by_name() -> None:
    with pytest.raises(Refused, match="newer version"):
        decode("0" * 64, HEADER.pack(b"SWCH", 2, 0, 0, 0))


@given(st.binary(max_size=300))
def test_no_stored_bytes_make_decode_fail_in_another_way(stored: bytes) -> None:
    for head in (b"", HEADER.pack(b"SWCH", 1, 0, 0, 50), HEADER.pack(b"SWCH", 1, 1, 0, 50)):
        with pytest.raises((Corrupt, Refused)):
            decode("0" * 64, head + stored)


def test_many_chunks_are_put_and_got_in_order(chunks: ChunkStore) -> None:
    data = [os.urandom(1000 + n) for n in range(100)] + [bytes(5000)] * 50
    keys = chunks.put_many(iter(data))
    assert keys == [PLAIN.chunk_name(piece) for piece in data]
    assert chunks.chunks_uploaded == 101
    assert list(chunks.get_many(keys, chunk_bytes=8192)) == data
    assert list(chunks.get_many([])) == []
    with pytest.raises(Corrupt):
        list(chunks.get_many(keys, chunk_bytes=1000))


def test_put_many_holds_no_more_than_its_memory(chunks: ChunkStore, monkeypatch: pytest.MonkeyPatch) -> None:
    chunks.shares = Shares(threads=4, waiting=5000)
    chunks.put(b"")
    held, most, lock = 0, 0, threading.Lock()

    def put(data: bytes) -> str:
        nonlocal held
        time.sleep(0.002)
        with lock:
            held -= len(data)
        return ""

    def pieces() -> Iterator[bytes]:
        nonlocal held, most
        for _ in range(60):
            with lock:
                held += 1000
                most = max(most, held)
            yield bytes(1000)

    monkeypatch.setattr(chunks, "put", put)
    chunks.put_many(pieces())
    # One more than fits is in the hands of the loop that waits to hand it over; one may be counted twice in passing.
    assert most <= 7000
    assert len(chunks.put_many([bytes(9000)] * 3)) == 3


def test_put_many_stops_at_the_first_failure_or_when_its_source_raises(
    chunks: ChunkStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    chunks.shares = Shares(threads=8, waiting=1000)
    taken = 0

    def source() -> Iterator[bytes]:
        nonlocal taken
        for n in range(1000):
            taken += 1
            yield f"{n}".encode() * 100

    def deadline() -> Iterator[bytes]:
        yield b"one"
        raise TimeoutError("the deadline")

    with pytest.raises(TimeoutError):
        chunks.put_many(deadline())
    assert chunks.get(PLAIN.chunk_name(b"one")) == b"one"

    def fail(data: bytes) -> str:
        raise Unreachable("away")

    monkeypatch.setattr(chunks, "put", fail)
    with pytest.raises(Unreachable):
        chunks.put_many(source())
    assert taken < 1000


def test_chunks_that_are_forgotten_are_uploaded_again(chunks: ChunkStore, store: Store) -> None:
    key = chunks.put(b"data")
    chunks.keep([key])
    assert dict(chunks.list()).keys() == {key}
    store.delete([where(key)])
    chunks.forget([key, "not a key"])
    assert list(chunks.list()) == []
    assert chunks.get(chunks.put(b"data")) == b"data"


HOUR = 3600.0


def aged(known: list[str] | None = None) -> tuple[ChunkStore, Store, MemoryBackend]:
    """Chunks in a store whose clock the test turns, and theirs with it."""
    store, backend = memory_store()
    return ChunkStore(store, "w", known=known, clock=lambda: backend.seconds), store, backend


def test_a_chunk_that_was_put_counts_as_present_for_half_of_the_grace() -> None:
    chunks, _, backend = aged()
    key = chunks.put(b"data")
    backend.seconds += 11.9 * HOUR
    assert chunks.is_fresh(key)
    assert (chunks.put(b"data"), chunks.chunks_uploaded) == (key, 1)
    backend.seconds += 0.2 * HOUR
    assert not chunks.is_fresh(key)
    assert (chunks.put(b"data"), chunks.chunks_uploaded) == (key, 2)
    backend.seconds += 11.9 * HOUR
    assert chunks.is_fresh(key)


def test_a_chunk_that_was_found_counts_as_present_until_it_is_half_the_grace_old_by_the_stores_clock() -> (
    None
):
    chunks, store, backend = aged()
    old, young = chunks.put(b"old"), None
    backend.seconds += 11 * HOUR
    young = chunks.put(b"young")
    later = ChunkStore(store, "w", clock=lambda: backend.seconds - 900_000)  # another machine's clock
    assert later.is_fresh(old)
    assert later.is_fresh(young)
    backend.seconds += 1.1 * HOUR
    assert not later.is_fresh(old)
    assert later.is_fresh(young)
    assert not later.is_fresh("0" * 64)


def test_a_chunk_of_a_kept_checkpoint_is_present_however_old_it_is_and_no_longer() -> None:
    chunks, _, backend = aged()
    key = chunks.put(b"data")
    chunks.keep([key])
    backend.seconds += 100 * HOUR
    assert chunks.is_fresh(key)
    chunks.keep([])
    assert not chunks.is_fresh(key)


def test_a_chunk_whose_object_is_gone_is_got_from_its_copy(store: Store, chunks: ChunkStore) -> None:
    key = chunks.put(b"data")
    stored = store.get(where(key)).data
    store.delete([where(key)])
    store.put(f"{where(key)}+0123456789abcdef", stored)
    assert chunks.get(key) == b"data"
    assert ChunkStore(store, "w").is_fresh(key)
    store.put(f"{where(key)}+0123456789abcdef", stored[:-1] + b"x")
    with pytest.raises(Corrupt):
        chunks.get(key)


def test_what_is_put_in_parallel_is_all_there_when_the_block_is_left(chunks: ChunkStore) -> None:
    data = [b"%d" % (i // 2) for i in range(600)]
    with chunks.putting() as put:
        keys = [put(each) for each in data]
    assert keys == [PLAIN.chunk_name(each) for each in data]
    assert [chunks.get(key) for key in keys] == data
    assert chunks.chunks_uploaded == 300


def test_many_small_chunks_are_put_at_a_time_and_few_large_ones(
    chunks: ChunkStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    chunks.shares = Shares(threads=2, waiting=64 << 20)
    chunks.put(b"listed")
    together = threading.Barrier(32, timeout=20)
    lock = threading.Lock()
    most = {True: 0, False: 0}
    now = {True: 0, False: 0}
    original = chunks._store.put

    def put(key: str, data: bytes) -> None:
        small = len(data) < 1000
        with lock:
            now[small] += 1
            most[small] = max(most[small], now[small])
        if small:
            together.wait()
        original(key, data)
        with lock:
            now[small] -= 1

    monkeypatch.setattr(chunks._store, "put", put)
    with chunks.putting() as store:
        keys = [store(os.urandom(500)) for _ in range(32)] + [store(os.urandom(1 << 20)) for _ in range(12)]
    assert most == {True: 32, False: 2}
    assert [len(chunks.get(key)) for key in keys] == [500] * 32 + [1 << 20] * 12


def test_a_failure_of_one_that_is_put_in_parallel_comes_out_at_the_latest_when_the_block_is_left(
    chunks: ChunkStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(key: str, _data: object) -> None:
        raise Unreachable(f"{key} cannot be written")

    def put_one() -> None:
        with chunks.putting() as put:
            put(b"lost")

    monkeypatch.setattr(chunks._store, "put", fail)
    with pytest.raises(Unreachable):
        put_one()
    monkeypatch.undo()
    assert chunks.get(chunks.put(b"lost")) == b"lost"


def test_a_chunk_that_is_gone_and_that_nothing_names_any_more_is_told_once(
    chunks: ChunkStore, store: Store
) -> None:
    """As one that small files shared: they are stored again in another one."""
    old, other = chunks.put(b"old"), chunks.put(b"other")
    chunks.keep([old, other])
    store.delete([where(old)])
    assert chunks.check_known() == {old}
    chunks.keep([old, other])
    assert chunks.check_known() == {old}
    chunks.keep([other])
    assert chunks.check_known() == frozenset()


def test_the_store_is_listed_when_a_save_begins_and_not_inside_its_freeze(
    store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    def listed(*_: object, **__: object) -> None:
        raise AssertionError("listed")

    chunks = ChunkStore(store, "w")
    chunks.begin_save()
    monkeypatch.setattr(store, "list", listed)
    assert not chunks.is_fresh("0" * 64)
    chunks.put(b"data")
    with pytest.raises(AssertionError, match="listed"):
        ChunkStore(store, "w").is_fresh("0" * 64)


def test_a_known_chunk_that_vanished_or_lost_its_end_is_noticed_by_a_listing_and_put_again(
    chunks: ChunkStore, store: Store
) -> None:
    contents = [os.urandom(3000) for _ in range(5)]
    whole, deleted, cut, emptied, longer = keys = [chunks.put(data) for data in contents]
    chunks.keep(keys)
    assert chunks.check_known() == frozenset()
    store.delete([where(deleted)])
    store.put(where(cut), store.get(where(cut)).data[:-1])
    store.put(where(emptied), b"")
    store.put(where(longer), store.get(where(longer)).data + b"x")
    assert chunks.check_known() == {deleted, cut, emptied, longer}
    chunks.begin_save()
    assert [chunks.is_fresh(key) for key in keys] == [True, False, False, False, False]
    chunks.keep(keys)  # the record still names them: they are not there for all that
    assert [chunks.is_fresh(key) for key in keys] == [True, False, False, False, False]
    for key, data in zip(keys, contents, strict=True):
        assert chunks.put(data) == key
        assert chunks.get(key) == data
    chunks.keep(keys)
    assert chunks.check_known() == frozenset()
    assert chunks.chunks_uploaded == 9
    assert chunks.is_fresh(whole)


def test_a_chunk_that_was_read_or_only_listed_is_missed_as_well(chunks: ChunkStore, store: Store) -> None:
    read, listed = keys = [chunks.put(os.urandom(3000)) for _ in range(2)]
    later = ChunkStore(store, "w", known=keys)
    later.get(read)
    store.put(where(read), store.get(where(read)).data[:-1])
    assert later.check_known() == {read}
    store.delete([where(listed)])
    assert later.check_known() == {read, listed}
    assert ChunkStore(store, "w").check_known() == frozenset()  # which has not relied on any


def test_a_chunk_of_which_only_a_copy_is_left_is_not_missed_and_a_cut_one_is_in_spite_of_its_copy(
    chunks: ChunkStore, store: Store
) -> None:
    data = os.urandom(3000)
    key = chunks.put(data)
    chunks.keep([key])
    stored = store.get(where(key)).data
    store.put(f"{where(key)}+{'0' * 16}", stored)
    store.delete([where(key)])
    assert chunks.check_known() == frozenset()
    assert chunks.get(key) == data
    store.put(where(key), stored[:-1])
    assert chunks.check_known() == {key}


def test_what_arrives_altered_is_read_once_more_before_it_is_called_damaged() -> None:
    backend = Altering()
    chunks = ChunkStore(Store("memory://", backend), "w")
    data = os.urandom(3000)
    key = chunks.put(data)
    backend.times = 1
    assert chunks.get(key) == data
    assert backend.times == 0
    assert chunks.is_fresh(key)
    backend.times = 2
    with pytest.raises(Corrupt, match=key):
        chunks.get(key)
    assert chunks.get(key) == data


@pytest.mark.parametrize("damage", ["altered", "missing"])
def test_a_chunk_that_was_read_and_is_damaged_is_put_again_whatever_names_it(
    store: Store, damage: str
) -> None:
    data = os.urandom(3000)
    key = ChunkStore(store, "w").put(data)
    stored = store.get(where(key)).data
    chunks = ChunkStore(store, "w")
    assert chunks.is_fresh(key)
    chunks.keep([key])
    if damage == "altered":
        store.put(where(key), stored[:-1] + bytes([stored[-1] ^ 1]))
    else:
        store.delete([where(key)])
    with pytest.raises(Corrupt):
        chunks.get(key)
    chunks.begin_save()
    chunks.keep([key])
    assert not chunks.is_fresh(key)
    assert chunks.put(data) == key
    assert chunks.chunks_uploaded == 1
    assert store.get(where(key)).data == stored
    assert chunks.is_fresh(key)
    assert chunks.get(key) == data


def test_a_damaged_chunk_with_a_whole_copy_is_whole(chunks: ChunkStore, store: Store) -> None:
    data = os.urandom(3000)
    key = chunks.put(data)
    stored = store.get(where(key)).data
    store.put(where(key), stored[:-1] + bytes([stored[-1] ^ 1]))
    store.put(f"{where(key)}+{'0' * 16}", stored[:-1])
    store.put(f"{where(key)}+{'1' * 16}", stored)
    assert chunks.get(key) == data


def test_a_listing_is_not_relied_upon_where_somebody_found_damage(store: Store) -> None:
    earlier = ChunkStore(store, "w")
    kept, listed = (earlier.put(os.urandom(3000)) for _ in range(2))
    chunks = ChunkStore(store, "w")
    chunks.keep([kept])
    chunks.ignore_listing()
    assert [chunks.is_fresh(key) for key in (kept, listed)] == [True, False]
    again = chunks.put(b"again")
    assert chunks.is_fresh(again)
