"""A sealed worker in a store that somebody else can write to: altered, swapped, truncated and plain objects are refused."""

from __future__ import annotations

import struct
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from savedworker.model.errors import Corrupt, NoKey, Refused
from savedworker.store import logs
from savedworker.store.backend import Store, open_store
from savedworker.store.chunks import ChunkStore, encode
from savedworker.store.documents import dump
from savedworker.store.sealing import NO_KEY, PLAIN
from savedworker.store.worker import WorkerStore
from tests.hostile.material import MANIFEST, SPEC, few
from tests.store.keys import key, sealing

CONTENT = b"memory " * 300
PIECE = "logs/stdout/1/00000000000000000000"
BEGIN = "logs/stdout/1/begin-00000000000000000000"


class World:
    """Two sealed workers, ``w`` and ``other``, with a spec, two manifests, chunks and a log each."""

    def __init__(self, folder: Path) -> None:
        self.store: Store = open_store(str(folder), sealing=sealing(key()))
        self.store.ensure()
        self.names = {}
        for name in ("w", "other"):
            worker = WorkerStore(self.store, name)
            worker.create_spec(SPEC.model_copy(update={"id": name}))
            for number in ("1-1", "1-2"):
                worker.publish_manifest(MANIFEST.model_copy(update={"worker": name, "number": number}))
            self.names[name] = [worker.chunks.put(x) for x in (CONTENT, CONTENT[:-1])]
            writer = logs.LogWriter(worker, "stdout", 1, 0)
            writer.append(b"hello\n")
            writer.append(b"again\n")
            logs.LogWriter(worker, "stderr", 1, 0).append(b"hello\n")
            logs.LogWriter(worker, "stdout", 2, 6).append(b"again\n")
            worker.keep_engine_note("airflow", b"{}")
        self.chunk = f"chunks/{self.names['w'][0]}"
        self.reads: dict[str, Callable[[], object]] = {
            "spec.json": lambda: self.fresh().load_spec(),
            "checkpoints/1-1/manifest.json": lambda: self.fresh().load_manifest("1-1"),
            self.chunk: lambda: self.fresh().chunks.get(self.names["w"][0]),
            PIECE: lambda: list(logs.read(self.fresh(), "stdout")),
            BEGIN: lambda: list(logs.read(self.fresh(), "stdout")),
            "engine/airflow.json": lambda: self.fresh().load_engine_note("airflow"),
        }

    def fresh(self) -> WorkerStore:
        """The worker as a process sees it that has just begun."""
        return WorkerStore(self.store, "w")

    def data(self, name: str, worker: str = "w") -> bytes:
        return self.store.get(f"workers/{worker}/{name}").data

    def refuses(self, name: str, data: bytes) -> None:
        """``data`` in the place of object ``name`` is refused, and once it is gone all is well."""
        good = self.data(name)
        assert data != good
        self.store.put(f"workers/w/{name}", data)
        try:
            with pytest.raises((Corrupt, NoKey, Refused)):
                self.reads[name]()
        finally:
            self.store.put(f"workers/w/{name}", good)


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> World:
    return World(tmp_path_factory.mktemp("sealed") / "store")


OBJECTS = ["spec.json", "checkpoints/1-1/manifest.json", "chunk", PIECE, BEGIN, "engine/airflow.json"]


def named(world: World, name: str) -> str:
    return world.chunk if name == "chunk" else name


def test_untouched_everything_can_be_read(world: World) -> None:
    for read in world.reads.values():
        assert read() is not None


@few
@given(st.sampled_from(OBJECTS), st.integers(0, 1 << 20), st.integers(1, 255))
def test_no_byte_of_anything_can_be_altered(world: World, name: str, at: int, how: int) -> None:
    name = named(world, name)
    good = bytearray(world.data(name))
    good[at % len(good)] ^= how
    world.refuses(name, bytes(good))


@pytest.mark.parametrize("name", OBJECTS)
def test_no_byte_of_a_header_can_be_altered(world: World, name: str) -> None:
    name = named(world, name)
    good = world.data(name)
    for at in range(min(len(good), 80)):
        for bit in range(8):
            world.refuses(name, good[:at] + bytes([good[at] ^ 1 << bit]) + good[at + 1 :])


@few
@given(st.sampled_from(OBJECTS), st.integers(0, 1 << 20), st.binary(min_size=1, max_size=40))
@example("chunk", 0, b"x")
@example(PIECE, 0, b"x")
def test_nothing_can_be_cut_off_or_put_on(world: World, name: str, at: int, more: bytes) -> None:
    name = named(world, name)
    good = world.data(name)
    world.refuses(name, good[: at % len(good)])
    world.refuses(name, good + more)
    world.refuses(name, more + good)
    world.refuses(name, more)


def test_nothing_of_another_worker_is_taken(world: World) -> None:
    for name in OBJECTS:
        if name == "chunk":
            world.refuses(world.chunk, world.data(f"chunks/{world.names['other'][0]}", "other"))
        else:
            world.refuses(name, world.data(name, "other"))


def test_nothing_of_another_place_of_the_same_worker_is_taken(world: World) -> None:
    """Another number, another chunk, another offset, stream or incarnation, and another kind of object."""
    world.refuses("checkpoints/1-1/manifest.json", world.data("checkpoints/1-2/manifest.json"))
    world.refuses(world.chunk, world.data(f"chunks/{world.names['w'][1]}"))
    for place in (
        "logs/stdout/1/00000000000000000006",
        "logs/stdout/2/00000000000000000006",
        "logs/stderr/1/00000000000000000000",
        BEGIN,
    ):
        world.refuses(PIECE, world.data(place))
    for name in OBJECTS:
        for other in OBJECTS:
            if named(world, name) != named(world, other):
                world.refuses(named(world, name), world.data(named(world, other)))


def test_a_chunk_of_another_worker_is_not_taken_under_its_own_name_either(world: World) -> None:
    theirs = world.names["other"][0]
    world.store.put(f"workers/w/chunks/{theirs}", world.data(f"chunks/{theirs}", "other"))
    with pytest.raises(Corrupt):
        world.fresh().chunks.get(theirs)


def test_an_older_life_of_the_same_name_is_not_taken(world: World, tmp_path: Path) -> None:
    """The same worker id and the same master key: the salt in the spec makes the difference."""
    old = World(tmp_path / "store")
    for name in ("checkpoints/1-1/manifest.json", PIECE, BEGIN, "engine/airflow.json"):
        world.refuses(name, old.data(name))
    world.refuses(world.chunk, old.data(old.chunk))


def test_no_incarnation_can_be_invented_in_the_log(tmp_path: Path) -> None:
    world = World(tmp_path / "store")
    for data in (b"", world.data(BEGIN)):
        world.store.put("workers/w/logs/stdout/3/begin-00000000000000000000", data)
        with pytest.raises(Corrupt):
            list(logs.read(world.fresh(), "stdout"))


def test_plain_objects_are_refused_where_sealed_ones_are_expected(world: World) -> None:
    mine = world.names["w"][0]
    world.refuses(world.chunk, encode(CONTENT))
    # Under the name that the plaintext has in a worker without a key:
    name = PLAIN.chunk_name(CONTENT)
    world.store.put(f"workers/w/chunks/{name}", encode(CONTENT))
    with pytest.raises(Corrupt, match="not sealed"):
        world.fresh().chunks.get(name)
    # With the flag set, and nothing behind it that was sealed:
    plain = bytearray(encode(CONTENT))
    struct.pack_into("<H", plain, 6, 1)
    world.refuses(f"chunks/{mine}", bytes(plain))
    world.refuses("checkpoints/1-1/manifest.json", dump(MANIFEST))
    world.refuses(PIECE, b"hello\n")
    world.refuses(BEGIN, b"")
    world.refuses("engine/airflow.json", b"{}")


def test_a_plain_spec_in_the_place_of_a_sealed_one_is_not_executed_and_opens_nothing(tmp_path: Path) -> None:
    world = World(tmp_path / "store")
    known = world.fresh()
    assert known.load_spec() == SPEC
    evil = SPEC.model_copy(update={"command": ("/bin/evil",)})
    world.store.put("workers/w/spec.json", dump(evil))
    with pytest.raises(Corrupt, match="not sealed"):
        known.load_spec()
    late = world.fresh()
    with pytest.raises(Refused, match="made without a key"):
        late.refuse_plain()
    for call in (
        lambda: late.load_manifest("1-1"),
        lambda: late.chunks.get(world.names["w"][0]),
        lambda: late.load_engine_note("airflow"),
    ):
        with pytest.raises(Corrupt, match="sealed"):
            call()


def test_a_sealed_chunk_in_a_plain_worker_is_one_clear_line(tmp_path: Path, world: World) -> None:
    plain = ChunkStore(open_store(str(tmp_path), sealing=NO_KEY), "w")
    name = plain.put(CONTENT)
    open_store(str(tmp_path), sealing=NO_KEY).put(f"workers/w/chunks/{name}", world.data(world.chunk))
    with pytest.raises(Corrupt, match=f"^chunk {name} is sealed, unlike its worker$"):
        plain.get(name)


@few
@given(st.binary(max_size=200), st.binary(max_size=120))
def test_a_spec_with_any_head_is_refused_and_its_message_is_printable(
    world: World, head: bytes, rest: bytes
) -> None:
    data = struct.pack("<4sBBH", b"SWSE", 1, 0, len(head)) + head + rest
    good = world.data("spec.json")
    world.store.put("workers/w/spec.json", data)
    try:
        with pytest.raises((Corrupt, NoKey)) as caught:
            world.fresh().load_spec()
        assert str(caught.value).isprintable()
        assert len(str(caught.value)) < 500
    finally:
        world.store.put("workers/w/spec.json", good)
