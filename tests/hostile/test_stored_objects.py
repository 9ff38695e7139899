"""Objects that nobody of ours wrote: chunks, log pieces and names, and what lies about in a store's directory."""

from __future__ import annotations

import os
import stat
import struct
import time
import tracemalloc
from pathlib import Path

import pytest
import zstandard
from hypothesis import example, given
from hypothesis import strategies as st

from savedworker.model.errors import Corrupt, NotFound, Refused, SavedWorkerError
from savedworker.store import logs
from savedworker.store.backend import Store, open_store
from savedworker.store.base import MAX_WHOLE
from savedworker.store.chunks import MAX_CHUNK, ChunkStore, decode, encode
from savedworker.store.sealing import PLAIN
from savedworker.store.worker import WorkerStore, list_workers
from tests.hostile.material import RECORD, SPEC, few

GOOD = encode(b"hello " * 100)


@few
@given(
    st.one_of(
        st.binary(max_size=60),
        st.tuples(st.integers(0, len(GOOD) - 1), st.binary(min_size=1, max_size=9)).map(
            lambda x: GOOD[: x[0]] + x[1] + GOOD[x[0] + len(x[1]) :]
        ),
        st.tuples(
            st.integers(0, 255),
            st.integers(0, 255),
            st.integers(0, 65535),
            st.integers(0, (1 << 64) - 1),
            st.binary(max_size=20),
        ).map(lambda x: struct.pack("<4sBBHQ", b"SWCH", *x[:4]) + x[4]),
    )
)
@example(
    struct.pack("<4sBBHQ", b"SWCH", 1, 1, 0, MAX_CHUNK) + zstandard.ZstdCompressor().compress(bytes(1 << 20))
)
@example(struct.pack("<4sBBHQ", b"SWCH", 1, 1, 0, (1 << 64) - 1) + b"\x28\xb5\x2f\xfd\xe0" + b"\xff" * 8)
def test_a_chunk_of_any_bytes_is_its_content_or_an_error_and_never_much_memory(stored: bytes) -> None:
    key = PLAIN.chunk_name(b"hello " * 100)
    tracemalloc.start()
    try:
        assert decode(key, stored, 1 << 20) == b"hello " * 100
    except (Corrupt, Refused):
        pass
    finally:
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
    assert peak < 8 << 20


@pytest.fixture
def store(tmp_path: Path) -> Store:
    made = open_store(str(tmp_path / "store"))
    made.ensure()
    return made


@pytest.fixture
def worker(store: Store) -> WorkerStore:
    made = WorkerStore(store, "w")
    made.create_spec(SPEC)
    made.create_record(RECORD)
    logs.LogWriter(made, "stdout", 1, 0).append(b"hello\n")
    return made


def test_strange_names_among_the_log_pieces_are_left_alone(worker: WorkerStore, tmp_path: Path) -> None:
    folder = tmp_path / "store/workers/w/logs/stdout/1"
    for name in (
        "x",
        "٣" * 20,
        "0" * 19,
        "0" * 21,
        "-" * 20,
        "begin-",
        "begin-" + "9" * 25,
        "00000000000000000006\n",
        "a b;$(c)",
    ):
        (folder / name).write_bytes(b"foreign")
    (folder / ("9" * 20)).write_bytes(b"far away")
    (folder.parent / "0").mkdir()
    (folder.parent / ("9" * 30)).mkdir()
    (folder / "00000000000000000003").write_bytes(b"overlapping")
    (folder / "00000000000000000006").mkdir()
    os.mkfifo(folder / "00000000000000000007")
    (folder / "00000000000000000008").symlink_to("/etc/passwd")
    pieces = list(logs.read(worker, "stdout"))
    assert b"".join(x.data for x in pieces if isinstance(x, logs.Text)) == b"hello\n"


def test_a_log_piece_of_absurd_size_is_refused_before_it_is_read(worker: WorkerStore, tmp_path: Path) -> None:
    piece = tmp_path / "store/workers/w/logs/stdout/1/00000000000000000006"
    piece.touch()
    os.truncate(piece, 1 << 42)
    with pytest.raises(Corrupt, match="too long"):
        list(logs.read(worker, "stdout"))


def test_incarnations_that_begin_at_absurd_offsets_are_a_mark_and_no_loop(worker: WorkerStore) -> None:
    for number, offset in ((2, 10**20 - 1), (3, 0), (999_999_999, 5)):
        worker.store.put(f"workers/w/logs/stdout/{number}/begin-{offset:020d}", b"")
    marks = [logs.render_mark(x) for x in logs.read(worker, "stdout") if isinstance(x, logs.Mark)]
    assert len(marks) == 3
    assert all(len(x) < 300 for x in marks)


@few
@given(st.one_of(st.text(max_size=30), st.from_regex(r"[0-9]{1,12}:[0-9]{1,25}")))
@example("٣:٣")
@example("1:" + "9" * 20)
def test_a_cursor_of_any_text_is_a_place_or_refused(text: str) -> None:
    try:
        found = logs.Cursor.parse(text)
    except Refused:
        return
    assert logs.Cursor.parse(str(found)) == found


def test_a_cursor_far_beyond_the_end_reads_nothing(worker: WorkerStore) -> None:
    assert list(logs.read(worker, "stdout", logs.Cursor(1, 10**20 - 1))) == []
    assert list(logs.read(worker, "stdout", logs.Cursor(999_999_999, 0))) == []


@pytest.mark.parametrize("name", ["", ".", "..", "../other", "a/b", "std out", "$(x)", "\0", "x" * 300])
def test_a_stream_of_a_strange_name_is_refused(worker: WorkerStore, name: str) -> None:
    with pytest.raises(Refused):
        list(logs.read(worker, name))


@pytest.mark.parametrize(
    "worker_id",
    ["", ".", "..", "../w", "a/b", "A", "a b", "$(x)", "a;b", "'", "x" * 64, "a\n", "a\0", "é", "-a", "a..b"],
)
def test_a_worker_id_of_a_strange_form_names_nothing(store: Store, worker_id: str) -> None:
    with pytest.raises(Refused):
        WorkerStore(store, worker_id)


def test_strange_directories_among_the_workers_are_left_alone(worker: WorkerStore, tmp_path: Path) -> None:
    for name in ("..x", "A B", "$(touch pwned)", "a\nb", "x" * 100, ".hidden"):
        (tmp_path / "store/workers" / name).mkdir()
        (tmp_path / "store/workers" / name / "spec.json").write_text("{}")
    assert list(list_workers(worker.store)) == ["w"]
    for name in ("0-1.json", "x.json", "1-9999999999999.json", "٣-٣.json"):
        (tmp_path / "store/workers/w/events").mkdir(exist_ok=True)
        (tmp_path / "store/workers/w/events" / name).write_text("[]" * 3)
    with pytest.raises(Corrupt):  # one has the name of an event and is none
        worker.events()


@pytest.mark.parametrize("what", ["fifo", "huge", "device", "folder", "loop"])
def test_no_document_is_waited_for_or_read_without_end(
    worker: WorkerStore, tmp_path: Path, what: str
) -> None:
    spec = tmp_path / "store/workers/w/spec.json"
    (record,) = (tmp_path / "store/workers/w/record.json@").glob("cur-*")
    for path in (spec, record):
        path.unlink()
        if what == "fifo":
            os.mkfifo(path)
        elif what == "huge":
            path.touch()
            os.truncate(path, MAX_WHOLE + 1)
        elif what == "device":
            os.mknod(path, stat.S_IFCHR | 0o600, os.makedev(1, 5))
        elif what == "folder":
            path.mkdir()
        else:
            path.symlink_to(path.name)
    started = time.monotonic()
    for read in (worker.load_spec, worker.load_record):
        with pytest.raises(SavedWorkerError):
            read()
    assert time.monotonic() - started < 30


def test_a_chunk_that_is_a_fifo_or_has_no_end_is_corrupt(store: Store, tmp_path: Path) -> None:
    chunks = ChunkStore(store, "w")
    key = chunks.put(b"x")
    path = tmp_path / "store/workers/w/chunks" / key
    path.unlink()
    os.mkfifo(path)
    with pytest.raises(Corrupt):
        chunks.get(key)
    path.unlink()
    path.touch()
    os.truncate(path, 1 << 42)
    with pytest.raises(Corrupt, match="longer than any chunk"):
        chunks.get(key)


@pytest.mark.parametrize(
    "key", ["", "..", "a/../b", "/etc/passwd", "a//b", "a/.b", "a b", "a\0b", "é", "a\n", "x/" * 400]
)
def test_no_key_leads_out_of_the_store(store: Store, key: str) -> None:
    for call in (
        store.get,
        store.head,
        lambda x: store.put(x, b""),
        lambda x: store.create(x, b""),
        lambda x: store.delete([x]),
    ):
        with pytest.raises(Refused):
            call(key)
    with pytest.raises((Refused, NotFound)):
        list(store.get_stream(key))


def test_a_store_that_we_make_is_for_its_owner_alone(tmp_path: Path) -> None:
    tmp_path.chmod(0o755)
    before = os.umask(0)
    try:
        worker = WorkerStore(open_store(str(tmp_path / "deep/store")), "w")
        worker.create_spec(SPEC)
        worker.create_record(RECORD)
        worker.chunks.put(b"memory")
    finally:
        os.umask(before)
    for folder in (
        "deep",
        "deep/store",
        "deep/store/workers",
        "deep/store/workers/w",
        "deep/store/workers/w/chunks",
    ):
        assert stat.S_IMODE((tmp_path / folder).stat().st_mode) == 0o700, folder


def test_in_a_directory_that_others_may_write_to_they_may_go_on_doing_so(tmp_path: Path) -> None:
    root = tmp_path / "shared"
    root.mkdir()
    root.chmod(0o2770)
    WorkerStore(open_store(str(root)), "w").create_spec(SPEC)
    assert stat.S_IMODE((root / "workers/w").stat().st_mode) == 0o2770
    for_all = tmp_path / "tmp"
    for_all.mkdir()
    for_all.chmod(0o1777)
    WorkerStore(open_store(str(for_all / "store")), "w").create_spec(SPEC)
    assert stat.S_IMODE((for_all / "store").stat().st_mode) == 0o700


def test_what_root_writes_into_another_users_store_belongs_to_that_user(tmp_path: Path) -> None:
    root = tmp_path / "store"
    root.mkdir()
    os.chown(root, 1234, 2345)
    WorkerStore(open_store(str(root)), "w").create_spec(SPEC)
    found = (root / "workers/w").stat()
    assert (found.st_uid, found.st_gid) == (1234, 2345)
