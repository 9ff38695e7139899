"""Memory images: cut, told against a base, stored, and rebuilt bit for bit, whatever lies in them and whatever changed."""

from __future__ import annotations

import ctypes
import mmap
import os
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Executor, ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from savedworker.checkpoint import native
from savedworker.checkpoint.base_keeper import BaseKeeper
from savedworker.checkpoint.container import Container
from savedworker.checkpoint.criu_image import IMAGE, bytes_field, magic, number_field, pack
from savedworker.checkpoint.memory import (
    Base,
    BaseDamaged,
    Captured,
    Spill,
    capture,
    find_sources,
    image_targets,
    inherit,
    own_pages,
    rebuild,
    warm,
)
from savedworker.checkpoint.memory.pagemap import PAGE, PAGES, WINDOW, read_pagemap
from savedworker.checkpoint.memory.rebuild import _cost, _Shared
from savedworker.model.errors import Corrupt, Fatal
from savedworker.model.manifest import StoredMemory
from savedworker.store.backend import open_store
from savedworker.store.chunks import ChunkStore

MAGIC = magic(IMAGE, 0x56084025)
Runs = dict[int, bytes]
"""Content of runs of pages, by the number of their first page."""


def write_dump(folder: Path, spaces: dict[str, Runs]) -> Path:
    """A folder with pagemaps and pages files as CRIU writes them; runs may touch."""
    folder.mkdir()
    for number, (name, runs) in enumerate(sorted(spaces.items()), 1):
        entries = [number_field(1, number)]
        for page, data in sorted(runs.items()):
            entries.append(
                number_field(1, page * PAGE) + number_field(2, len(data) // PAGE) + number_field(4, 4)
            )
        (folder / name).write_bytes(pack(MAGIC, entries))
        (folder / f"pages-{number}.img").write_bytes(b"".join(data for _, data in sorted(runs.items())))
    return folder


def noise(seed: int, pages: int) -> bytes:
    return bytes(np.random.default_rng(seed).bytes(pages * PAGE))


@pytest.fixture
def pool() -> Iterator[Executor]:
    with ThreadPoolExecutor(4) as made:
        yield made


@pytest.fixture
def chunks(tmp_path: Path) -> ChunkStore:
    return ChunkStore(open_store(str(tmp_path / "store")), "w", known=())


def rebuilt(
    original: Path,
    spaces: Sequence[StoredMemory],
    target: Path,
    get: Callable[[str], bytes],
    pool: Executor,
    most: int = 64 << 20,
) -> None:
    """Rebuild all spaces in ``target`` and compare every pages file."""
    target.mkdir()
    for space in spaces:
        (target / space.name).write_bytes((original / space.name).read_bytes())
    for part in rebuild(image_targets(spaces, target, {}), get, pool, most):
        part.result()
    for space in spaces:
        assert space.pages is not None
        assert (target / space.pages).read_bytes() == (original / space.pages).read_bytes()


# pages near each other, at the edges of windows, and far away
pages = st.one_of(
    st.integers(0, 40),
    st.integers(PAGES - 4, PAGES + 4),
    st.integers(3 * PAGES, 3 * PAGES + 9),
    st.just((1 << 47) // PAGE),
)
space = st.dictionaries(pages, st.tuples(st.integers(1, 3), st.integers(0, 3)), max_size=12)
spaces = st.dictionaries(
    st.sampled_from(["pagemap-1.img", "pagemap-7.img", "pagemap-shmem-3.img"]), space, max_size=3
)


def materialised(shape: dict[str, dict[int, tuple[int, int]]]) -> dict[str, Runs]:
    """Runs that do not overlap; content 0 is zeros."""
    made: dict[str, Runs] = {}
    for name, runs in shape.items():
        end = 0
        for page, (count, content) in sorted(runs.items()):
            if page >= end:
                made.setdefault(name, {})[page] = (
                    noise(content + page % 5, count) if content else bytes(count * PAGE)
                )
                end = page + count
        made.setdefault(name, {})
    return made


@settings(
    max_examples=60,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
    deadline=None,
)
@given(history=st.lists(spaces, min_size=1, max_size=4), keep=st.lists(st.booleans(), min_size=4, max_size=4))
def test_every_checkpoint_comes_back_bit_for_bit_whatever_came_before(
    tmp_path_factory: pytest.TempPathFactory, history: list[Any], keep: list[bool]
) -> None:
    here = tmp_path_factory.mktemp("memory")
    store = ChunkStore(open_store(str(here / "store")), "w", known=())
    base = Base(here / "base")
    with ThreadPoolExecutor(3) as threads:
        taken = []
        for number, shape in enumerate(history):
            folder = write_dump(here / f"dump-{number}", materialised(shape))
            taken.append(
                (folder, capture(find_sources(folder, {}), base, store, threads, keep[number]).spaces)
            )
        for number, (folder, stored) in enumerate(taken):
            rebuilt(folder, stored, here / f"back-{number}", store.get, threads)


def big(pages: int = 3 * PAGES, seed: int = 1) -> dict[str, Runs]:
    return {"pagemap-1.img": {5: noise(seed, pages)}}


def scattered(data: bytes, every: int = 20) -> bytes:
    """One byte of every ``every``-th page is another."""
    changed = bytearray(data)
    changed[:: every * PAGE] = bytes(x ^ 255 for x in changed[:: every * PAGE])
    return bytes(changed)


def test_scattered_changes_upload_next_to_nothing_and_growth_moves_nothing(
    tmp_path: Path, chunks: ChunkStore, pool: Executor
) -> None:
    base = Base(tmp_path / "base")
    first = big()
    capture(find_sources(write_dump(tmp_path / "1", first), {}), base, chunks, pool, keep=True)
    assert chunks.bytes_uploaded > 3 * PAGES * PAGE
    before = chunks.bytes_uploaded
    data = scattered(first["pagemap-1.img"][5])
    grown = {"pagemap-1.img": {2: noise(8, 1), 5: data, 9 * PAGES: noise(9, 2)}}
    folder = write_dump(tmp_path / "2", grown)
    stored = capture(find_sources(folder, {}), base, chunks, pool, keep=False)
    assert chunks.bytes_uploaded - before < 0.02 * len(data)
    assert stored.bytes_known > len(data)
    rebuilt(folder, stored.spaces, tmp_path / "back", chunks.get, pool)


def test_what_did_not_change_uploads_nothing(tmp_path: Path, chunks: ChunkStore, pool: Executor) -> None:
    base = Base(tmp_path / "base")
    capture(find_sources(write_dump(tmp_path / "1", big()), {}), base, chunks, pool, keep=True)
    before = chunks.bytes_uploaded
    stored = capture(find_sources(write_dump(tmp_path / "2", big()), {}), base, chunks, pool, keep=True)
    assert chunks.bytes_uploaded == before
    assert stored.spaces[0].deltas == ()


def text(seed: int, pages: int) -> bytes:
    """What compresses, and whose difference from other text compresses less."""
    return np.random.default_rng(seed).choice(list(b"etaoinsh"), pages * PAGE).astype(np.uint8).tobytes()


def windows(*contents: bytes) -> dict[str, Runs]:
    """One content for each window, at its beginning."""
    return {"pagemap-1.img": {number * PAGES: data for number, data in enumerate(contents)}}


def told(stored: Captured) -> set[int]:
    """The windows of the only space that are told against the base."""
    return {number for group in stored.spaces[0].deltas for number in group.windows}


class Told:
    """Captures ``before``, then ``after`` against it, and brings that back."""

    def __init__(self, folder: Path, chunks: ChunkStore, pool: Executor, before: dict[str, Runs]) -> None:
        self._folder, self._chunks, self._pool = folder, chunks, pool
        self._taken = 0
        self.base = Base(folder / "base")
        self.capture(before, keep=True)

    def capture(self, spaces: dict[str, Runs], keep: bool) -> Captured:
        self._taken += 1
        self.dump = write_dump(self._folder / f"dump-{self._taken}", spaces)
        before = self._chunks.bytes_uploaded
        stored = capture(find_sources(self.dump, {}), self.base, self._chunks, self._pool, keep)
        self.uploaded = self._chunks.bytes_uploaded - before
        fetched = dict[str, int]()

        def get(key: str) -> bytes:
            data = self._chunks.get(key)
            fetched[key] = len(data)
            return data

        rebuilt(self.dump, stored.spaces, self._folder / f"back-{self._taken}", get, self._pool)
        self.fetched = sum(fetched.values())
        return stored


@pytest.mark.parametrize("content", [noise, text])
@pytest.mark.parametrize("keep", [True, False])
def test_windows_that_were_replaced_are_stored_whole_and_nobody_fetches_the_base_for_them(
    tmp_path: Path, chunks: ChunkStore, pool: Executor, content: Callable[[int, int], bytes], keep: bool
) -> None:
    """Every second one, in two batches."""
    size = 12 * PAGES * PAGE
    first = [content(n, PAGES) for n in range(12)]
    bed = Told(tmp_path, chunks, pool, windows(*first))
    known = {n: bed.base.find("pagemap-1.img", n) for n in range(12)}
    second = [content(100 + n, PAGES) if n % 2 else scattered(data) for n, data in enumerate(first)]
    stored = bed.capture(windows(*second), keep)
    assert told(stored) == set(range(0, 12, 2))
    assert bed.uploaded < 0.52 * size
    assert bed.fetched < 1.04 * size, "the memory, and what is told against the base"
    assert (stored.bytes_new, stored.bytes_known) == (0, size), "the base is known to be too old"
    assert {n: bed.base.find("pagemap-1.img", n) for n in range(12)} == known
    back = bed.capture(windows(*first), keep)
    assert (bed.uploaded, told(back)) == (0, set())


def test_a_few_pages_at_regular_places_are_not_taken_for_all(
    tmp_path: Path, chunks: ChunkStore, pool: Executor
) -> None:
    """The headers of what is allocated half a MiB at a time; one page of it, wherever that lies."""
    first = [noise(n, PAGES) for n in range(6)]
    bed = Told(tmp_path, chunks, pool, windows(*first))
    for place in (0, 1, 127):
        second = []
        for data in first:
            changed = bytearray(data)
            for row in range(place, PAGES, PAGES // 8):
                changed[row * PAGE : (row + 1) * PAGE] = noise(row + place, 1)
            second.append(bytes(changed))
        stored = bed.capture(windows(*second), keep=False)
        assert len(told(stored)) >= 5


def test_what_did_not_change_is_never_taken_for_replaced(
    tmp_path: Path, chunks: ChunkStore, pool: Executor
) -> None:
    """Zeros and text take as little as their difference; the pages that are looked at first are others or are not."""
    plain = [bytes(PAGES * PAGE), text(1, PAGES), noise(2, PAGES), noise(3, PAGES), noise(4, PAGES)]
    bed = Told(tmp_path, chunks, pool, windows(*plain))
    half = PAGES // 2 * PAGE
    changed = [
        bytes(half) + noise(5, 1) + bytes(half - PAGE),
        plain[1][:-1] + b"?",
        noise(6, 1) + plain[2][PAGE:],
        plain[3][:half] + noise(7, PAGES // 2),
        scattered(plain[4], every=1),
    ]
    stored = bed.capture(windows(*changed), keep=True)
    assert told(stored) == {0, 1, 2, 3, 4}
    assert bed.uploaded < 1.1 * half


@pytest.mark.parametrize(
    ("before", "after"),
    [
        ({0: PAGES // 2}, {PAGES // 2: PAGES // 2}),
        ({0: PAGES // 2}, {PAGES // 4: PAGES // 2}),
        ({0: PAGES // 2}, {0: PAGES}),
        ({0: PAGES}, {PAGES // 2: PAGES // 2}),
    ],
    ids=["elsewhere", "moved", "grown", "shrunk"],
)
def test_a_replaced_window_need_not_have_the_pages_that_it_had(
    tmp_path: Path, chunks: ChunkStore, pool: Executor, before: dict[int, int], after: dict[int, int]
) -> None:
    first, second = (
        {"pagemap-1.img": {at: noise(seed, count) for at, count in runs.items()}}
        for seed, runs in enumerate((before, after))
    )
    bed = Told(tmp_path, chunks, pool, first)
    stored = bed.capture(second, keep=True)
    assert (told(stored), len(stored.spaces[0].groups)) == (set(), 1)
    assert bed.fetched < 1.01 * sum(after.values()) * PAGE


def test_a_window_that_shares_its_group_is_told_against_it_even_if_it_was_replaced(
    tmp_path: Path, chunks: ChunkStore, pool: Executor
) -> None:
    """The group holds another window, which a checkpoint would then have twice."""
    part = PAGES // 4
    bed = Told(tmp_path, chunks, pool, windows(*(noise(n, part) for n in range(3))))
    stored = bed.capture(windows(noise(0, part), noise(11, part), noise(12, part)), keep=True)
    assert told(stored) == {1, 2}


def test_a_replaced_window_does_not_keep_a_new_one_out_of_the_base(
    tmp_path: Path, chunks: ChunkStore, pool: Executor
) -> None:
    """The base takes whole groups or none."""
    part = PAGES // 4
    bed = Told(tmp_path, chunks, pool, windows(noise(0, part)))
    bed.capture(windows(noise(10, part), noise(11, part)), keep=True)
    assert bed.base.find("pagemap-1.img", 1) is not None


def test_after_a_move_what_was_replaced_is_the_base(
    tmp_path: Path, chunks: ChunkStore, pool: Executor
) -> None:
    bed = Told(tmp_path, chunks, pool, windows(noise(1, PAGES), noise(2, PAGES)))
    second = windows(noise(11, PAGES), scattered(noise(2, PAGES)))
    moved = bed.capture(second, keep=False)
    bed.base = Base(tmp_path / "later")
    inherit(moved.spaces[0], bed.base, chunks.view, lambda: None)
    stored = bed.capture(windows(scattered(noise(11, PAGES)), scattered(noise(2, PAGES))), keep=True)
    assert told(stored) == {0, 1}
    assert bed.uploaded < 0.02 * 2 * PAGES * PAGE


def test_replaced_windows_of_a_spill_leave_the_base_as_it_is(
    tmp_path: Path, chunks: ChunkStore, pool: Executor
) -> None:
    first = [noise(n, PAGES) for n in range(2)]
    bed = Told(tmp_path, chunks, pool, windows(*first))
    known = [bed.base.find("pagemap-1.img", n) for n in range(2)]
    folder = write_dump(tmp_path / "2", windows(noise(11, PAGES), scattered(first[1]), noise(12, PAGES)))
    spill = Spill(tmp_path / "spill", chunks)
    stored = capture(find_sources(folder, {}), bed.base, spill, pool, keep=False)
    spill.store(stored, bed.base, pool, keep=True)
    assert told(stored) == {1}
    assert [bed.base.find("pagemap-1.img", n) for n in range(2)] == known
    assert bed.base.find("pagemap-1.img", 2) is not None
    rebuilt(folder, stored.spaces, tmp_path / "back", chunks.get, pool)


def test_a_base_that_cannot_be_read_is_said_to_be_damaged_by_whoever_looks_at_a_few_pages(
    tmp_path: Path, chunks: ChunkStore, pool: Executor
) -> None:
    bed = Told(tmp_path, chunks, pool, windows(noise(1, PAGES)))
    os.truncate(tmp_path / "base", 0)
    folder = write_dump(tmp_path / "2", windows(noise(2, PAGES)))
    with pytest.raises(BaseDamaged, match="cannot be read"):
        capture(find_sources(folder, {}), bed.base, chunks, pool, keep=False)


@pytest.mark.parametrize(("content", "kept"), [(lambda _: noise(2, 5 * PAGES), False), (scattered, True)])
def test_a_base_of_memory_that_was_replaced_is_given_up(
    tmp_path: Path,
    chunks: ChunkStore,
    pool: Executor,
    content: Callable[[bytes], bytes],
    kept: bool,
) -> None:
    keeper = BaseKeeper(cast(Container, SimpleNamespace(home=SimpleNamespace(path=tmp_path))), lambda: chunks)
    first = noise(1, 5 * PAGES)
    for number, data in enumerate((first, content(first))):
        before = chunks.bytes_uploaded
        folder = write_dump(tmp_path / str(number), {"pagemap-1.img": {5: data}})
        memory = capture(find_sources(folder, {}), keeper.base, chunks, pool, keep=True)
        keeper.renew(memory, chunks.bytes_uploaded - before)
    assert (keeper.base.size > 0) == kept


@pytest.mark.parametrize("told_against_a_base", [False, True])
@pytest.mark.parametrize("most", [40 << 20, 64 << 20])
def test_what_forked_processes_have_in_common_is_fetched_once(
    tmp_path: Path, chunks: ChunkStore, pool: Executor, told_against_a_base: bool, most: int
) -> None:
    """Much more of it than is held; each has a little of its own as well, and one lacks some of it."""
    common = [noise(n, PAGES) for n in range(40)]
    parent = {number * PAGES: data for number, data in enumerate(common)}
    spaces: dict[str, Runs] = {f"pagemap-{pid}.img": dict(parent) for pid in range(1, 5)}
    del spaces["pagemap-2.img"][3 * PAGES], spaces["pagemap-2.img"][4 * PAGES]
    base = Base(tmp_path / "base")
    if told_against_a_base:
        capture(find_sources(write_dump(tmp_path / "1", spaces), {}), base, chunks, pool, keep=True)
    for pid, runs in enumerate(spaces.values(), 1):
        runs[10 * PAGES] = scattered(runs[10 * PAGES], every=10 * pid)
        runs[1000 * PAGES] = noise(100 + pid, PAGES)
    folder = write_dump(tmp_path / "2", spaces)
    stored = capture(find_sources(folder, {}), base, chunks, pool, keep=False).spaces
    fetched: Counter[str] = Counter()
    lock = threading.Lock()

    def get(key: str) -> bytes:
        with lock:
            fetched[key] += 1
        return chunks.get(key)

    rebuilt(folder, stored, tmp_path / "back", get, pool, most=most)
    assert fetched.total() < 1.5 * len(fetched), "without that it were nearly four times as many"


def test_what_is_asked_for_again_when_it_is_not_held_any_more_is_counted_once() -> None:
    """The answer to the first one who asked comes after that to the second."""
    asked, answered = threading.Event(), threading.Event()

    def get(key: str) -> bytes:
        if key == "x" and not asked.is_set():
            asked.set()
            assert answered.wait(30)
        return bytes(10)

    shared = _Shared(get, _cost(bytes(10)))  # room for one
    shared.often = frozenset("xab")
    with ThreadPoolExecutor(1) as pool:
        first = pool.submit(shared, "x")
        assert asked.wait(30)
        for key in "abxb":
            shared(key)
        answered.set()
        assert first.result() == bytes(10)
    for key in "abxab":
        assert shared(key) == bytes(10)
    assert (len(shared._held), shared._size) == (1, _cost(bytes(10)))


def test_groups_of_windows_that_alternate_are_fetched_once(
    tmp_path: Path, chunks: ChunkStore, pool: Executor
) -> None:
    base = Base(tmp_path / "base")
    even, odd = ({n * PAGES: noise(n, 4) for n in range(start, 8, 2)} for start in (0, 1))
    first = write_dump(tmp_path / "1", {"pagemap-1.img": even})
    capture(find_sources(first, {}), base, chunks, pool, keep=True)
    folder = write_dump(tmp_path / "2", {"pagemap-1.img": even | odd})
    stored = capture(find_sources(folder, {}), base, chunks, pool, keep=True).spaces
    assert [len(group.windows) for group in stored[0].groups] == [4, 4]
    fetched: Counter[str] = Counter()

    def get(key: str) -> bytes:
        fetched[key] += 1
        return chunks.get(key)

    rebuilt(folder, stored, tmp_path / "back", get, pool)
    assert set(fetched.values()) == {1}


def test_what_could_not_be_fetched_for_one_is_not_there_for_any(
    tmp_path: Path, chunks: ChunkStore, pool: Executor
) -> None:
    spaces: dict[str, Runs] = {f"pagemap-{pid}.img": {0: noise(1, 2 * PAGES)} for pid in range(1, 9)}
    folder = write_dump(tmp_path / "1", spaces)
    stored = capture(find_sources(folder, {}), Base(tmp_path / "base"), chunks, pool, keep=False).spaces

    def get(key: str) -> bytes:
        raise Corrupt(f"chunk {key} is missing from the store")

    back = tmp_path / "back"
    back.mkdir()
    for space in stored:
        (back / space.name).write_bytes((folder / space.name).read_bytes())
    parts = rebuild(image_targets(stored, back, {}), get, pool, 64 << 20)
    assert len(parts) == 8
    for part in parts:
        with pytest.raises(Corrupt, match="is missing"):
            part.result()


def test_a_base_that_was_cleared_is_made_anew(tmp_path: Path, chunks: ChunkStore, pool: Executor) -> None:
    base = Base(tmp_path / "base")
    capture(find_sources(write_dump(tmp_path / "1", big()), {}), base, chunks, pool, keep=True)
    assert base.size > 0
    base.clear()
    assert (base.size, (tmp_path / "base").exists()) == (0, False)
    folder = write_dump(tmp_path / "2", big(seed=2))
    stored = capture(find_sources(folder, {}), base, chunks, pool, keep=True)
    assert (stored.bytes_known, stored.spaces[0].deltas) == (0, ())
    rebuilt(folder, stored.spaces, tmp_path / "back", chunks.get, pool)


def test_a_base_read_from_a_running_process_makes_its_first_checkpoint_small(
    tmp_path: Path, chunks: ChunkStore, pool: Executor
) -> None:
    """The process is this one: its pages are found by their addresses, as CRIU would write them."""
    array = np.random.default_rng(3).integers(0, 2**64, 2 * WINDOW // 8, dtype=np.uint64)
    first = -(-array.ctypes.data // PAGE)
    base = Base(tmp_path / "base")
    assert warm([os.getpid()], base, chunks, lambda: None) > array.nbytes - 2 * WINDOW
    before = chunks.bytes_uploaded
    array[::2048] += np.uint64(1)
    start = first * PAGE - array.ctypes.data
    length = (array.nbytes - start) // PAGE * PAGE
    runs = {first: array.tobytes()[start : start + length]}
    folder = write_dump(tmp_path / "1", {f"pagemap-{os.getpid()}.img": runs})
    stored = capture(find_sources(folder, {}), base, chunks, pool, keep=False)
    assert chunks.bytes_uploaded - before < 0.1 * length
    rebuilt(folder, stored.spaces, tmp_path / "back", chunks.get, pool)


def test_reading_ahead_ends_when_it_is_not_wanted_and_keeps_what_it_has(
    tmp_path: Path, chunks: ChunkStore
) -> None:
    array = np.random.default_rng(3).integers(0, 2**64, 4 * WINDOW // 8, dtype=np.uint64)
    base = Base(tmp_path / "base")

    def wanted() -> None:
        if base.size:
            raise RuntimeError

    with pytest.raises(RuntimeError):
        warm([os.getpid()] * 9, base, chunks, wanted)
    assert 0 < base.size < array.nbytes
    assert array[0] == np.random.default_rng(3).integers(0, 2**64, 1, dtype=np.uint64)[0]


def test_processes_that_are_gone_are_left_out(tmp_path: Path, chunks: ChunkStore) -> None:
    child = os.fork()
    if not child:
        os._exit(0)
    os.waitpid(child, 0)
    assert warm([child], Base(tmp_path / "base"), chunks, lambda: None) == 0


def test_what_is_not_wanted_any_more_is_given_up(tmp_path: Path, chunks: ChunkStore, pool: Executor) -> None:
    def not_wanted(*_: object) -> None:
        raise RuntimeError

    with pytest.raises(RuntimeError):
        capture(
            find_sources(write_dump(tmp_path / "1", big()), {}),
            Base(tmp_path / "base"),
            chunks,
            pool,
            True,
            not_wanted,
        )


# Documents of a stranger --------------------------------------------------------------------------------------


@pytest.fixture
def stored(tmp_path: Path, chunks: ChunkStore, pool: Executor) -> StoredMemory:
    """Three windows; the middle one differs from its base."""
    base = Base(tmp_path / "base")
    first = big()
    capture(find_sources(write_dump(tmp_path / "1", first), {}), base, chunks, pool, keep=True)
    data = bytearray(first["pagemap-1.img"][5])
    data[PAGES * PAGE : PAGES * PAGE + 9] = b"different"
    folder = write_dump(tmp_path / "2", {"pagemap-1.img": {5: bytes(data)}})
    (found,) = capture(find_sources(folder, {}), base, chunks, pool, keep=False).spaces
    assert len(found.deltas) == 1
    return found


def swapped(stored: StoredMemory, **update: Any) -> StoredMemory:
    return stored.model_copy(update=update)


@pytest.mark.parametrize("wrong", [
    lambda s: swapped(s, groups=s.groups[1:]),
    lambda s: swapped(s, groups=(*s.groups, s.groups[0].model_copy(update={"key": s.groups[1].key}))),
    lambda s: swapped(s, groups=(s.groups[0].model_copy(update={"windows": (0, 1)}), *s.groups[2:])),
    lambda s: swapped(s, deltas=(s.deltas[0].model_copy(update={"windows": (1, 2)}),)),
    lambda s: swapped(s, deltas=s.deltas * 2 + (s.deltas[0].model_copy(update={"key": s.groups[0].key}),)),
    lambda s: swapped(s, size=s.size + PAGE),
    lambda s: swapped(s, size=s.size - PAGE),
    lambda s: swapped(s, pages="pages-9.img"),
    lambda s: swapped(s, groups=(s.groups[0].model_copy(update={"key": "0" * 64}), *s.groups[1:])),
], ids=["a window is missing", "a window twice", "more windows than records", "changes of more windows", "changes twice",
        "too long", "too short", "another file", "a chunk that is not there"])  # fmt: skip
def test_a_manifest_that_does_not_fit_is_refused(
    tmp_path: Path,
    chunks: ChunkStore,
    pool: Executor,
    stored: StoredMemory,
    wrong: Callable[[Any], StoredMemory],
) -> None:
    with pytest.raises(Corrupt):
        rebuilt(tmp_path / "2", [wrong(stored)], tmp_path / "back", chunks.get, pool)


def test_the_right_one_is_not(
    tmp_path: Path, chunks: ChunkStore, pool: Executor, stored: StoredMemory
) -> None:
    rebuilt(tmp_path / "2", [stored], tmp_path / "back", chunks.get, pool)


@settings(max_examples=150, suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None)
@given(st.binary(max_size=80))
def test_any_bytes_are_a_pagemap_or_refused(tmp_path: Path, tail: bytes) -> None:
    path = tmp_path / "pagemap-1.img"
    for data in (tail, MAGIC + tail, pack(MAGIC, [number_field(1, 1), tail]), pack(MAGIC, [tail, tail])):
        path.write_bytes(data)
        try:
            found = read_pagemap(path, 1 << 30)
        except Corrupt:
            continue
        assert found.size == sum(window.size for window in found.windows)


@pytest.mark.parametrize("entry", [
    number_field(1, PAGE) + number_field(2, 1 << 50) + number_field(4, 4),
    number_field(1, PAGE + 1) + number_field(2, 1) + number_field(4, 4),
    number_field(1, PAGE) + number_field(2, 1) + number_field(4, 1),
    number_field(1, PAGE) + number_field(2, 1) + number_field(4, 2),
    number_field(1, PAGE) + number_field(2, 0) + number_field(4, 4),
    bytes_field(1, b"x"),
], ids=["endless", "within a page", "in a parent", "lazy", "empty", "no number"])  # fmt: skip
def test_pagemaps_that_cannot_be_are_refused(tmp_path: Path, entry: bytes) -> None:
    path = tmp_path / "pagemap-1.img"
    path.write_bytes(pack(MAGIC, [number_field(1, 1), entry]))
    with pytest.raises(Corrupt):
        read_pagemap(path, 1 << 30)


def test_a_pages_file_of_another_size_is_refused(tmp_path: Path, chunks: ChunkStore, pool: Executor) -> None:
    folder = write_dump(tmp_path / "1", big())
    with (folder / "pages-1.img").open("ab") as file:
        file.write(bytes(PAGE))
    with pytest.raises(Fatal, match=r"pages-1.img has not the"):
        capture(find_sources(folder, {}), Base(tmp_path / "base"), chunks, pool, keep=True)


def same_everywhere(pages: int) -> bytes:
    return bytes([7]) * (pages * PAGE)


def test_equal_content_in_many_windows_and_spaces_comes_back_in_all_of_them(
    tmp_path: Path, chunks: ChunkStore, pool: Executor
) -> None:
    """Its groups have one key. On disk the base keeps them once."""
    spaces = {
        "pagemap-1.img": {0: same_everywhere(5 * PAGES)},
        "pagemap-2.img": {PAGES: same_everywhere(3 * PAGES)},
    }
    base = Base(tmp_path / "base")
    for number, keep in enumerate((True, True, False)):
        folder = write_dump(tmp_path / f"{number}", spaces)
        stored = capture(find_sources(folder, {}), base, chunks, pool, keep=keep)
        rebuilt(folder, stored.spaces, tmp_path / f"back-{number}", chunks.get, pool)
    assert base.size < 5 * WINDOW  # of eight: four threads may bring the same at once


def test_equal_changes_in_many_places_come_back_in_all_of_them(
    tmp_path: Path, chunks: ChunkStore, pool: Executor
) -> None:
    """As of a loop that does one thing to all of an array: the deltas of two batches have one key."""
    data = noise(1, 40 * PAGES)
    base = Base(tmp_path / "base")
    folder = write_dump(tmp_path / "1", {"pagemap-1.img": {0: data}})
    capture(find_sources(folder, {}), base, chunks, pool, keep=True)
    changed = np.frombuffer(data, dtype=np.uint8).copy()
    changed[:: 16 * PAGE] ^= 1
    folder = write_dump(tmp_path / "2", {"pagemap-1.img": {0: changed.tobytes()}})
    stored = capture(find_sources(folder, {}), base, chunks, pool, keep=False)
    deltas = stored.spaces[0].deltas
    assert len({x.key for x in deltas}) < len(deltas)
    rebuilt(folder, stored.spaces, tmp_path / "back", chunks.get, pool)


@pytest.mark.parametrize("damage", ["altered", "exchanged", "short", "gone"])
def test_a_base_that_the_disk_does_not_give_back_is_never_relied_on(
    tmp_path: Path, chunks: ChunkStore, pool: Executor, damage: str
) -> None:
    base = Base(tmp_path / "base")
    folder = write_dump(tmp_path / "1", big())
    capture(find_sources(folder, {}), base, chunks, pool, keep=True)
    content = bytearray((tmp_path / "base").read_bytes())
    match damage:
        case "altered":
            content[len(content) // 2] ^= 1
        case "exchanged":
            at = 300 * PAGE
            content[at : at + 2 * PAGE] = content[at + PAGE : at + 2 * PAGE] + content[at : at + PAGE]
        case "short":
            del content[-PAGE:]
        case _:
            pass
    (tmp_path / "base").write_bytes(content)
    if damage == "gone":
        (tmp_path / "base").unlink()
    with pytest.raises(BaseDamaged):
        capture(find_sources(folder, {}), base, chunks, pool, keep=False)


def test_pages_are_found_the_same_by_old_and_new_kernels_and_a_reservation_costs_nothing(
    tmp_path: Path,
) -> None:
    size = 64 << 20
    with mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS) as area:
        for at in range(0, size, 3 * PAGE):
            area[at] = 1
        start = ctypes.addressof(ctypes.c_char.from_buffer(area))
        with open("/proc/self/pagemap", "rb", buffering=0) as pagemap:

            def both() -> list[list[tuple[int, int]]]:
                ways = (own_pages.own_pages, own_pages._ask_each)
                return [list(find(pagemap.fileno(), start, start + size, lambda: None)) for find in ways]

            runs, again = both()
            for _ in range(20):
                if runs != again:  # a page that the kernel is moving in this moment (compaction) is not there
                    runs, again = both()
            assert runs == again
    assert len(runs) == -(-size // (3 * PAGE))


def test_terabytes_that_are_only_reserved_are_not_walked(tmp_path: Path, chunks: ChunkStore) -> None:
    """As sanitizers, Go and the JVM reserve them; a notice would wait for the walk."""
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | 0x4000  # MAP_NORESERVE
    looked = 0

    def wanted() -> None:
        nonlocal looked
        looked += 1

    with mmap.mmap(-1, 8 << 40, flags=flags) as area:
        area[4 << 40] = 1
        warm([os.getpid()], Base(tmp_path / "base"), chunks, wanted)
    assert looked < 10_000  # windows of 4 MiB would be two million


def test_looking_for_memory_ends_when_it_is_not_wanted() -> None:
    def not_wanted() -> None:
        raise RuntimeError

    with open("/proc/self/pagemap", "rb", buffering=0) as pagemap:
        for find in (own_pages.own_pages, own_pages._ask_each):
            with pytest.raises(RuntimeError):
                list(find(pagemap.fileno(), 0, 16 << 40, not_wanted))


def test_a_base_that_is_inherited_keeps_the_next_checkpoint_small(
    tmp_path: Path, chunks: ChunkStore, pool: Executor
) -> None:
    """All windows have changed since the base was made, so that none of them is in the store as it is now."""
    first, base = big(), Base(tmp_path / "base")
    capture(find_sources(write_dump(tmp_path / "1", first), {}), base, chunks, pool, keep=True)
    second = {name: {at: scattered(data) for at, data in runs.items()} for name, runs in first.items()}
    moved = capture(find_sources(write_dump(tmp_path / "2", second), {}), base, chunks, pool, keep=False)
    later = Base(tmp_path / "later")
    for space in moved.spaces:
        inherit(space, later, chunks.view, lambda: None)
    before = chunks.bytes_uploaded
    folder = write_dump(tmp_path / "3", second)
    stored = capture(find_sources(folder, {}), later, chunks, pool, keep=True)
    assert chunks.bytes_uploaded == before
    assert stored == moved
    rebuilt(folder, stored.spaces, tmp_path / "back", chunks.get, pool)


def test_what_compares_is_loaded_before_there_is_anything_to_compare(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An agent that cannot load it finds out before it takes the lease, and not in a freeze."""
    broken = tmp_path / "compare"
    broken.write_bytes(b"not a library")
    native.comparer.cache_clear()
    try:
        with monkeypatch.context() as patched:
            patched.setattr(native, "_built", lambda *_: broken)
            for loads in (native.prepare, lambda: Base(tmp_path / "base")):
                with pytest.raises(Fatal, match=f"{broken} cannot be loaded"):
                    loads()
    finally:
        native.comparer.cache_clear()


class Waiting:
    """A store whose puts wait for each other: none is done before ``parties`` are under way."""

    def __init__(self, chunks: ChunkStore, parties: int, lost: bool) -> None:
        self._chunks, self._lost = chunks, lost
        self._barrier = threading.Barrier(parties)

    def put(self, data: bytes | bytearray, /) -> str:
        self._barrier.wait(timeout=30)
        return self._chunks.put(data)

    def is_fresh(self, key: str, /) -> bool:
        return not self._lost and self._chunks.is_fresh(key)


@pytest.mark.parametrize("what", ["new", "changed", "replaced", "lost"])
def test_who_waits_for_the_store_keeps_nobody_from_reading(
    tmp_path: Path, chunks: ChunkStore, what: str
) -> None:
    many = len(os.sched_getaffinity(0)) + 2
    first = {f"pagemap-{n}.img": {5: noise(n, PAGES // 4)} for n in range(1, many + 1)}
    changes: dict[str, Callable[[bytes], bytes]] = {
        "changed": lambda data: scattered(data, 1),
        "replaced": lambda data: noise(data[0] + 1000, PAGES // 4),
    }
    change = changes.get(what, lambda data: data)
    second = {name: {5: change(runs[5])} for name, runs in first.items()}
    base = Base(tmp_path / "base")
    folder = write_dump(tmp_path / "second", second)
    waiting = Waiting(chunks, many, what == "lost")
    with ThreadPoolExecutor(many) as threads:
        if what != "new":
            capture(find_sources(write_dump(tmp_path / "first", first), {}), base, chunks, threads, keep=True)
        stored = capture(find_sources(folder, {}), base, waiting, threads, keep=False).spaces
        rebuilt(folder, stored, tmp_path / "back", chunks.get, threads)


def test_a_base_never_has_a_window_twice(tmp_path: Path, chunks: ChunkStore, pool: Executor) -> None:
    """A manifest names whole groups; with a window in two of them it would be refused."""
    sparse = {"pagemap-1.img": {0: noise(1, 4), PAGES: noise(2, 4), 2 * PAGES: noise(3, 4)}}
    base, other = Base(tmp_path / "base"), Base(tmp_path / "other")
    moved = capture(find_sources(write_dump(tmp_path / "1", sparse), {}), other, chunks, pool, keep=True)
    del sparse["pagemap-1.img"][0]
    capture(find_sources(write_dump(tmp_path / "2", sparse), {}), base, chunks, pool, keep=True)
    inherit(moved.spaces[0], base, chunks.view, lambda: None)
    sparse["pagemap-1.img"][0] = noise(4, 4)
    folder = write_dump(tmp_path / "3", sparse)
    stored = capture(find_sources(folder, {}), base, chunks, pool, keep=False)
    rebuilt(folder, stored.spaces, tmp_path / "back", chunks.get, pool)


def test_a_pagemap_that_is_too_long_for_what_it_tells_is_not_read(tmp_path: Path) -> None:
    path = tmp_path / "pagemap-1.img"
    path.write_bytes(pack(MAGIC, [number_field(1, 1)]))
    os.truncate(path, 1 << 40)
    with pytest.raises(Corrupt, match="too long"):
        read_pagemap(path, 1 << 30)
