"""Chunks are compressed as hard as it pays, and come back the same whatever that was."""

from __future__ import annotations

import itertools
import os
import random
import time
from importlib import import_module
from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from savedworker.model.compression import FIRST_LEVEL, LEVELS
from savedworker.store import ChunkStore, Store, compression
from savedworker.store.chunks import decode, encode
from savedworker.store.compression import Meter, pack
from savedworker.store.sealing import PLAIN
from tests.store.memory import memory_store

MIB = 1 << 20


def objects(size: int) -> bytes:
    """Bytes that shrink as a heap of small objects does."""
    chance = random.Random(1)
    lines = (f"{{'id': {n}, 'name': 'item {n % 977}', 'x': {chance.random()}}}" for n in itertools.count())
    text = bytearray()
    while len(text) < size:
        text += next(lines).encode()
    return bytes(text[:size])


def machine_code(size: int) -> bytes:
    """Bytes of which a higher level of zstd makes less."""
    program = import_module("numpy._core._multiarray_umath").__file__
    assert program is not None
    data = Path(program).read_bytes()[:size]
    assert len(data) == size
    return data


@pytest.mark.parametrize("level", LEVELS)
@pytest.mark.parametrize(
    "data",
    [b"", b"x", objects(MIB), os.urandom(MIB), os.urandom(MIB // 2) + bytes(MIB // 2), bytes(3 * MIB + 1)],
    ids=["empty", "one", "objects", "random", "half", "zeros"],
)
def test_a_chunk_of_any_level_comes_back(data: bytes, level: int) -> None:
    assert decode(PLAIN.chunk_name(data), encode(data, level=level)) == data


def test_a_higher_level_makes_less_of_it() -> None:
    data = machine_code(4 * MIB)
    sizes = [len(encode(data, level=level)) for level in LEVELS]
    assert all(more > less for more, less in pairwise(sizes)), sizes


def test_what_does_not_shrink_costs_a_sample_and_no_more(monkeypatch: pytest.MonkeyPatch) -> None:
    compressed: list[int] = []
    real = compression._compress

    def counted(data: bytes, level: int) -> bytes:
        compressed.append(memoryview(data).nbytes)
        return real(data, level)

    monkeypatch.setattr(compression, "_compress", counted)
    assert pack(os.urandom(4 * MIB), 6) is None
    assert sum(compressed) <= 64 << 10
    assert pack(os.urandom(100), 1) is None
    half = pack(b"".join(os.urandom(4096) + bytes(4096) for _ in range(512)), 1)
    assert half is not None
    assert len(half) < 2.2 * MIB
    assert pack(memoryview(objects(4 * MIB)), 1) is not None


@given(st.integers(0, 2 * MIB))
def test_a_sample_of_any_length_lies_within_the_data(size: int) -> None:
    data = bytes(size)
    packed = pack(data, 1)
    assert packed is None or decode(PLAIN.chunk_name(data), encode(data)) == data


def test_the_level_rises_in_front_of_a_slow_store_and_falls_in_front_of_a_fast_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(compression, "_DECIDE_EVERY", 4 * MIB)
    store, backend = memory_store()
    chunks = ChunkStore(store, "w", known=[])
    assert chunks.meter.level == FIRST_LEVEL
    data = machine_code(5 * MIB)
    put = backend.put

    def slowly(key: str, value: bytes) -> None:
        time.sleep(len(value) / (0.5 * MIB))
        put(key, value)

    monkeypatch.setattr(backend, "put", slowly)
    keys = [chunks.put(data[i : i + MIB // 2]) for i in range(0, 4 * MIB, MIB // 2)]
    assert chunks.meter.level == LEVELS[-1]
    monkeypatch.setattr(backend, "put", put)
    keys += [chunks.put(data[i : i + MIB // 2] + bytes([n])) for n in range(60) for i in (0, MIB, 2 * MIB)]
    assert chunks.meter.level < FIRST_LEVEL
    chunks.throttle.limit(0.1 * MIB)
    chunks.begin_save()
    assert chunks.meter.level == LEVELS[-1], "a limit is a slow store"
    chunks.throttle.limit(None)
    for key in keys:
        chunks.get(key)


def test_a_level_is_tried_before_it_is_trusted(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of this data a higher level makes no less, so that not even the slowest store makes it worth its CPU."""
    monkeypatch.setattr(compression, "_DECIDE_EVERY", MIB)
    store, _ = memory_store()
    chunks = ChunkStore(store, "w", known=[])
    chunks.throttle.limit(1e12)
    data = objects(MIB)
    assert len(encode(data, level=5)) > len(encode(data, level=1)), "so it is"
    for n in range(12):
        chunks.put(data + bytes([n]))
    assert set(chunks.meter._seen.effects) == set(LEVELS) - {1}
    chunks.throttle.limit(1000.0)
    chunks.begin_save()
    assert chunks.meter.level == 1


def test_what_was_stored_as_it_is_is_counted(store: Store) -> None:
    chunks = ChunkStore(store, "w")
    chunks.put(os.urandom(MIB))
    chunks.put(bytes(MIB))
    assert chunks.meter.bytes_as_is == MIB


def test_one_request_at_a_time_is_told_from_eight() -> None:
    meter = Meter(senders=8)
    for _ in range(8):
        meter.sent(FIRST_LEVEL, 8 * MIB, MIB, 0.01, MIB, 0.001, None)
    assert meter.level < FIRST_LEVEL
