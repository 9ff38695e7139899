"""What is captured is the tree of the freeze, whatever was read before it."""

from __future__ import annotations

import errno
import mmap
import os
import shutil
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from savedworker.checkpoint.layer import (
    CHUNK_SIZE,
    ChangedWhileFrozen,
    NoSpace,
    PreCopy,
    Snapshot,
    content,
    extract,
    finish,
    precopy,
    shared_writable_files,
)
from savedworker.checkpoint.layer.pack import SMALL
from savedworker.checkpoint.layer.signature import FileId
from savedworker.model.errors import Fatal
from tests.checkpoint.layer_trees import Chunks, described, mounted_overlay, unmount

pytestmark = pytest.mark.criu  # owners and attributes need root

ALONE = b"x" * (SMALL + 1)
"""The content of a file that shares its chunk with no other."""


@pytest.fixture
def root(tmp_path: Path) -> Path:
    root = tmp_path / "root"
    root.mkdir()
    (tmp_path / "stage").mkdir()
    return root


def file_id(path: Path) -> FileId:
    status = path.lstat()
    return status.st_dev, status.st_ino


def settle() -> None:
    """Let the clock of time stamps pass the margin, so that files are not racily clean."""
    time.sleep(0.06)


def stage_of(root: Path) -> Path:
    return root.parent / "stage"


def restored(
    root: Path, ahead: PreCopy, chunks: Chunks, dirty: frozenset[FileId] = frozenset(), trust: bool = True
) -> Snapshot:
    """Finish, complete, extract beside the root, and compare."""
    index, snapshot = finish(root, ahead, stage_of(root), dirty, trust).complete(chunks.sink)
    again = root.parent / "again"
    shutil.rmtree(again, ignore_errors=True)
    again.mkdir()
    extract(index, chunks.fetch, again)
    assert described(again) == described(root)
    assert os.listdir(stage_of(root)) == []
    return snapshot


def test_a_file_changed_after_precopy_is_captured_as_it_was_at_the_freeze(root: Path) -> None:
    (root / "kept").write_text("kept")
    (root / "changed").write_text("before")
    (root / "removed").write_text("removed")
    (root / "replaced").write_text("replaced")
    settle()
    chunks = Chunks()
    ahead = precopy(root, chunks.sink)
    (root / "changed").write_text("after!")
    (root / "removed").unlink()
    (root / "fresh").write_text("replacement")
    (root / "fresh").rename(root / "replaced")
    (root / "created").write_text("created")
    (root / "dir").mkdir()
    chunks.sunk.clear()
    restored(root, ahead, chunks)
    assert chunks.sunk == [len("after!" + "replacement" + "created")]


def test_a_change_that_keeps_size_and_mtime_is_seen(root: Path) -> None:
    (root / "file").write_text("before")
    settle()
    chunks = Chunks()
    ahead = precopy(root, chunks.sink)
    before = (root / "file").stat()
    (root / "file").write_text("after!")
    os.utime(root / "file", ns=(before.st_atime_ns, before.st_mtime_ns))
    assert (root / "file").stat().st_size == before.st_size
    restored(root, ahead, chunks)


def test_attributes_changed_after_precopy_are_captured_as_they_were_at_the_freeze(root: Path) -> None:
    for name in ("mode", "owner", "xattr", "linked"):
        (root / name).write_text(name)
    (root / "dir").mkdir()
    settle()
    chunks = Chunks()
    ahead = precopy(root, chunks.sink)
    (root / "mode").chmod(0o4711)
    os.chown(root / "owner", 7, 8)
    os.setxattr(root / "xattr", "user.x", b"new")
    os.setxattr(root / "dir", "trusted.overlay.opaque", b"y")
    os.link(root / "linked", root / "link_remap.17")
    restored(root, ahead, chunks)


def test_a_file_written_in_the_same_tick_as_precopy_is_not_trusted(root: Path) -> None:
    """The stamp of such a change may be the one that precopy saw: simulated, as this kernel's stamps are finer than that."""
    chunks = Chunks()
    (root / "file").write_text("before")
    ahead = precopy(root, chunks.sink)
    (root / "file").write_text("after!")
    status = (root / "file").stat()
    state = ahead.snapshot.states[file_id(root / "file")]
    state.ctime_ns, state.mtime_ns = status.st_ctime_ns, status.st_mtime_ns
    restored(root, ahead, chunks)


def test_a_file_stamped_in_the_future_is_not_trusted(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (root / "file").write_text("x")
    settle()
    real = time.clock_gettime_ns
    monkeypatch.setattr(time, "clock_gettime_ns", lambda clock: real(clock) - 3_600_000_000_000)
    ahead = precopy(root, Chunks().sink)
    assert not ahead.snapshot.states[file_id(root / "file")].settled


def test_writes_through_a_shared_mapping_are_captured_when_the_file_is_named_dirty(root: Path) -> None:
    (root / "mapped").write_bytes(bytes(8192))
    chunks = Chunks()
    with open(root / "mapped", "r+b") as file, mmap.mmap(file.fileno(), 0) as memory:
        for value in range(20):
            memory[0] = 1
            settle()
            before = (root / "mapped").stat()
            ahead = precopy(root, chunks.sink)
            memory[1] = 2 + value
            after = (root / "mapped").stat()
            if (after.st_ctime_ns, after.st_mtime_ns) == (before.st_ctime_ns, before.st_mtime_ns):
                break  # a page that was written back to the disk in between is noticed when it is written to
        else:
            pytest.fail("the hazard is gone?")
        restored(root, ahead, chunks, frozenset({file_id(root / "mapped")}))


def test_a_file_mapped_during_precopy_and_unmapped_before_the_freeze_is_captured_as_it_was(
    root: Path,
) -> None:
    (root / "mapped").write_bytes(bytes(8192))
    chunks = Chunks()
    with open(root / "mapped", "r+b") as file, mmap.mmap(file.fileno(), 0) as memory:
        memory[0] = 1
        settle()
        ahead = precopy(root, chunks.sink, mapped=lambda: {file_id(root / "mapped")})
        memory[1] = 2
    restored(root, ahead, chunks)


def test_a_file_that_was_mapped_at_one_freeze_is_read_again_for_the_next(root: Path) -> None:
    (root / "mapped").write_bytes(bytes(8192))
    chunks = Chunks()
    with open(root / "mapped", "r+b") as file, mmap.mmap(file.fileno(), 0) as memory:
        memory[0] = 1
        settle()
        snapshot = restored(root, precopy(root, chunks.sink), chunks, frozenset({file_id(root / "mapped")}))
        memory[1] = 2
    settle()
    restored(root, precopy(root, chunks.sink, snapshot), chunks)


def test_nothing_is_trusted_where_time_stamps_prove_nothing(root: Path) -> None:
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=16m", "tmpfs", str(root)], check=True)
    try:
        (root / "shm").write_bytes(bytes(8192))
        chunks = Chunks()
        settle()
        ahead = precopy(root, chunks.sink)
        with open(root / "shm", "r+b") as file, mmap.mmap(file.fileno(), 0) as memory:
            memory[0] = 1
        snapshot = restored(root, ahead, chunks, trust=False)
        assert not any(state.settled for state in snapshot.states.values())
    finally:
        unmount(root)


def test_unchanged_files_are_read_once_in_a_series_of_checkpoints(root: Path) -> None:
    for number in range(50):
        (root / f"{number}").write_bytes(b"%d" % number * 100)
    os.link(root / "7", root / "seven")
    settle()
    chunks = Chunks()
    snapshot: Snapshot | None = None
    for turn in range(3):
        settle()
        ahead = precopy(root, chunks.sink, snapshot)
        (root / "13").write_text(f"turn {turn}")
        snapshot = restored(root, ahead, chunks)
        if turn:
            assert len(chunks.sunk) <= 2
            assert ahead.bytes_reused > 0
        chunks.sunk.clear()


def test_an_extracted_layer_is_not_read_again(root: Path) -> None:
    for number in range(10):
        (root / f"{number}").write_bytes(b"%d" % number * 100)
    (root / "large").write_bytes(os.urandom(CHUNK_SIZE + 1))
    os.link(root / "large", root / "larger")
    chunks = Chunks()
    index, _ = finish(root, PreCopy(), stage_of(root)).complete(chunks.sink)
    again = root.parent / "elsewhere"
    again.mkdir()

    snapshot = extract(index, chunks.fetch, again)
    for state in snapshot.states.values():
        state.settled = True  # as they are when extracting took longer than the margin
    chunks.sunk.clear()
    second, _ = finish(again, precopy(again, chunks.sink, snapshot), stage_of(root)).complete(chunks.sink)
    assert chunks.sunk == []
    assert second.to_bytes() == index.to_bytes()


def test_files_written_just_before_extract_returned_are_not_trusted(root: Path) -> None:
    (root / "file").write_text("x")
    chunks = Chunks()
    index, _ = finish(root, PreCopy(), stage_of(root)).complete(chunks.sink)
    (root.parent / "again").mkdir()
    snapshot = extract(index, chunks.fetch, root.parent / "again")
    assert [state.settled for state in snapshot.states.values()] == [False]


def test_precopy_survives_a_tree_that_changes_under_it(root: Path) -> None:
    for number in range(30):
        (root / f"d{number}").mkdir()
        (root / f"d{number}/file").write_text("x" * 100)
    chunks = Chunks()

    def sink(data: bytes) -> str:
        for victim in [path for path in root.iterdir() if path.is_dir()][:1]:
            shutil.rmtree(victim)
            os.mkfifo(victim)  # opening it for reading would block
            survivor = next((path for path in root.iterdir() if path.is_dir()), None)
            if survivor is not None:
                (survivor / "file").unlink(missing_ok=True)
                os.mkfifo(survivor / "file")
        return chunks.sink(data)

    ahead = precopy(root, sink)
    restored(root, ahead, chunks)


def test_precopy_does_not_follow_a_directory_that_became_a_symlink(root: Path) -> None:
    outside = root.parent / "outside"
    outside.mkdir()
    (outside / "secret").write_text("of the host")
    (root / "a").mkdir()
    (root / "b").mkdir()
    for directory in ("a", "b"):
        (root / directory / "file").write_bytes(ALONE)
    seen: list[bytes] = []

    def sink(data: bytes) -> str:
        seen.append(data)
        for directory in ("a", "b"):
            if not (root / directory).is_symlink():
                shutil.rmtree(root / directory)
                (root / directory).symlink_to(outside)
        return "0" * 64

    precopy(root, sink)
    assert seen == [ALONE]


def test_what_the_sink_raises_ends_precopy_unchanged(root: Path) -> None:
    (root / "file").write_text("x")

    def sink(data: bytes) -> str:
        raise ConnectionResetError("the store is gone")

    with pytest.raises(ConnectionResetError):
        precopy(root, sink)


def test_completing_can_be_repeated_after_the_sink_failed(root: Path) -> None:
    (root / "one").write_bytes(ALONE)
    (root / "two").write_bytes(os.urandom(len(ALONE)))
    (root / "three").write_text("1")
    chunks = Chunks()
    pending = finish(root, PreCopy(), stage_of(root))
    assert pending.bytes_staged == 2 * len(ALONE) + 1
    calls = iter(range(10))

    def flaky(data: bytes) -> str:
        if next(calls) == 1:
            raise ConnectionResetError("the store is gone")
        return chunks.sink(data)

    with pytest.raises(ConnectionResetError):
        pending.complete(flaky)
    (root / "three").write_text("not in the checkpoint")
    index, _ = pending.complete(chunks.sink)
    (root.parent / "again").mkdir()
    extract(index, chunks.fetch, root.parent / "again")
    assert (root.parent / "again/one").read_bytes() == ALONE
    assert (root.parent / "again/two").read_bytes() == (root / "two").read_bytes()
    assert (root.parent / "again/three").read_text() == "1"
    assert os.listdir(stage_of(root)) == []


def test_a_discarded_capture_leaves_nothing_in_the_stage(root: Path) -> None:
    (root / "file").write_bytes(os.urandom(300_000))
    pending = finish(root, PreCopy(), stage_of(root))
    assert os.listdir(stage_of(root))
    pending.discard()
    pending.discard()
    assert os.listdir(stage_of(root)) == []


@pytest.mark.parametrize("size", [100_000, 3 << 20])
def test_a_full_stage_is_a_clear_error_and_is_emptied(root: Path, size: int) -> None:
    stage = stage_of(root)
    for number in range(40 if size < 1 << 20 else 2):
        (root / f"{number}").write_bytes(os.urandom(size))
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=2m", "tmpfs", str(stage)], check=True)
    try:
        with pytest.raises(NoSpace, match="space") as caught:
            finish(root, PreCopy(), stage)
        assert isinstance(caught.value, Fatal)
        assert caught.value.fix
        assert os.listdir(stage) == []
    finally:
        unmount(stage)


def test_a_deadline_ends_the_capture_and_empties_the_stage(root: Path) -> None:
    for number in range(5):
        (root / f"{number}").write_text("x")

    class TooLate(Exception):
        pass

    left = iter([None, None])

    def check() -> None:
        try:
            next(left)
        except StopIteration:
            raise TooLate from None

    with pytest.raises(TooLate):
        finish(root, PreCopy(), stage_of(root), check=check)
    assert os.listdir(stage_of(root)) == []


@pytest.mark.parametrize("size", [10, 500_000])
def test_a_writer_that_was_not_frozen_is_noticed(
    root: Path, size: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    (root / "file").write_bytes(bytes(size))
    monkeypatch.setattr(content.Stage, "copy", _before_last_look(content.Stage.copy, root / "file"))
    with pytest.raises(ChangedWhileFrozen, match="file"):
        finish(root, PreCopy(), stage_of(root))
    assert os.listdir(stage_of(root)) == []


def _before_last_look(real, victim: Path):  # type: ignore[no-untyped-def]
    def copy(stage, fd, status, path):  # type: ignore[no-untyped-def]
        settle()
        with open(victim, "r+b") as file:
            file.write(b"!")
        return real(stage, fd, status, path)

    return copy


def test_a_stage_on_another_file_system_works_without_copy_file_range(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object) -> int:
        raise OSError(errno.EXDEV, "other file system")

    monkeypatch.setattr(os, "copy_file_range", refuse)
    with open(root / "sparse", "wb") as file:
        file.truncate(100 << 20)
        file.seek(50 << 20)
        file.write(os.urandom(9 << 20))
    restored(root, PreCopy(), Chunks())


@pytest.fixture
def overlay(tmp_path: Path) -> Iterator[tuple[Path, Path]]:
    lower, upper = tmp_path / "lower", tmp_path / "upper"
    lower.mkdir()
    upper.mkdir()
    (lower / "from-below").write_bytes(bytes(4096))
    merged = mounted_overlay(lower, upper, tmp_path, "m")
    yield upper, merged
    unmount(merged)


@pytest.mark.criu
def test_files_mapped_shared_and_writable_through_an_overlay_are_found_in_its_upper_directory(
    overlay: tuple[Path, Path],
) -> None:
    upper, merged = overlay
    names = ["from-below", "new", "odd \\012 name", "line\nbreak", "read-only-mapping", "gone (deleted)"]
    for name in names[1:]:
        (merged / name).write_bytes(bytes(4096))
    (merged / "private").write_bytes(bytes(4096))
    (merged / "read-only").write_bytes(bytes(4096))
    program = """if True:
        import mmap, os, sys
        kept = []
        for name in sys.argv[1:]:
            f = open(name, 'rb' if name == 'read-only' else 'r+b')
            prot = mmap.PROT_READ if name.startswith('read-only') else mmap.PROT_READ | mmap.PROT_WRITE
            kept.append(mmap.mmap(f.fileno(), 0, mmap.MAP_PRIVATE if name == 'private' else mmap.MAP_SHARED, prot))
        print(flush=True); sys.stdin.read()
    """
    arguments = ["python3", "-c", program, *names, "private", "read-only"]
    with subprocess.Popen(arguments, cwd=merged, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        process.stdout.readline()
        try:
            found = shared_writable_files([process.pid, 2**22 - 1], upper, str(merged))
            assert found == {file_id(upper / name) for name in names}
            os.link(merged / "new", merged / "other name")
            (merged / "new").unlink()
            found = shared_writable_files([process.pid], upper, str(merged))
            assert found == {file_id(upper / name) for name in [*names, "other name"] if name != "new"}
        finally:
            process.communicate()
