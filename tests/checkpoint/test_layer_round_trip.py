"""The writable layer comes back as it was."""

from __future__ import annotations

import os
import random
import shutil
import socket
import stat
import subprocess
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from savedworker.checkpoint.layer import CHUNK_SIZE, LayerIndex, PreCopy, extract, finish, precopy
from savedworker.checkpoint.layer.index import MAX_DEPTH
from savedworker.checkpoint.layer.pack import SMALL
from savedworker.model.errors import Refused
from tests.checkpoint.layer_trees import Chunks, described, mounted_overlay, unmount

needs_root = pytest.mark.criu  # owners, devices and trusted attributes need root
pytestmark = needs_root


def captured(root: Path, chunks: Chunks, stage: Path, warm: bool = True) -> LayerIndex:
    stage.mkdir(exist_ok=True)
    ahead = precopy(root, chunks.sink) if warm else PreCopy()
    index, _ = finish(root, ahead, stage).complete(chunks.sink)
    assert os.listdir(stage) == []
    return LayerIndex.parse(index.to_bytes())


def extracted(index: LayerIndex, chunks: Chunks, target: Path, threads: int = 1) -> Path:
    target.mkdir()
    extract(index, chunks.fetch, target, threads)
    return target


@pytest.fixture
def overlays(tmp_path: Path) -> Iterator[list[Path]]:
    mounted: list[Path] = []
    yield mounted
    for path in reversed(mounted):
        unmount(path)


def lower_tree(root: Path) -> None:
    for name in ("kept", "changed", "deleted", "chmodded", "renamed-from"):
        (root / name).write_text(name * 100)
    for directory in ("opaque", "gone", "moved/inner"):
        (root / directory).mkdir(parents=True)
        (root / directory / "old").write_text("old")


def work_in(root: Path) -> None:
    """What a worker does to its root file system."""
    (root / "changed").write_text("new content")
    (root / "deleted").unlink()
    (root / "chmodded").chmod(0o4750)
    (root / "renamed-from").rename(root / "renamed-to")
    shutil.rmtree(root / "opaque")
    (root / "opaque").mkdir()
    (root / "opaque/new").write_text("new")
    shutil.rmtree(root / "gone")
    (root / "moved").rename(root / "moved-away")
    everything(root)


def everything(root: Path) -> None:
    """One of each thing that a directory can hold."""
    rng = random.Random(1)
    (root / "empty-file").touch()
    (root / "large").write_bytes(rng.randbytes(2 * CHUNK_SIZE + 12345))
    with open(root / "sparse", "wb") as file:
        file.truncate(48 << 20)
        for offset in (0, CHUNK_SIZE - 10, 30 << 20, (48 << 20) - 5):
            file.seek(offset)
            file.write(b"data!" * (4 if offset else 1))
    os.truncate(root / "sparse", 48 << 20)
    with open(root / "only-a-hole", "wb") as file:
        file.truncate(24 << 20)
    (root / "first").write_text("one file, three names")
    (root / "dir/sub").mkdir(parents=True)
    os.link(root / "first", root / "second")
    os.link(root / "first", root / "dir/sub/third")
    os.mkfifo(root / "fifo", 0o640)
    os.symlink("first", root / "relative")
    os.symlink("/etc/passwd", root / "absolute")
    os.symlink("../../nowhere", root / "dir/dangling")
    os.symlink(b"to \xff\xfe", os.fsencode(root) + b"/link \xff\n")
    (root / "new\nline and \\012 and \x07").write_text("odd")
    (root / "ünïcödé-☃").write_text("more than ASCII")
    with open(os.fsencode(root) + b"/not-utf8-\xff\xc3\x28", "wb") as file:
        file.write(b"bytes")
    (root / "empty-dir").mkdir(mode=0o711)
    (root / "read-only").mkdir()
    (root / "read-only/inside").write_text("x")
    (root / "read-only").chmod(0o555)
    (root / "sticky").mkdir()
    (root / "sticky").chmod(0o1777)
    (root / "setgid").mkdir()
    os.chown(root / "setgid", 5, 6)
    (root / "setgid").chmod(0o2770)
    (root / "setuid").write_text("#!")
    os.chown(root / "setuid", 1000, 2000)
    (root / "setuid").chmod(0o6755)
    (root / "no-rights").write_text("secret")
    (root / "no-rights").chmod(0)
    os.lchown(root / "relative", 12, 34)
    os.setxattr(root / "large", "user.note", b"binary \x00\xff")
    os.setxattr(root / "large", "user.empty", b"")
    os.setxattr(root / "dir", "trusted.thing", b"t")
    os.setxattr(root / "absolute", "trusted.on-a-symlink", b"s", follow_symlinks=False)
    os.setxattr(root / "fifo", "trusted.on-a-fifo", b"f")
    os.setxattr(
        root / "first", "security.capability", bytes.fromhex("0100000200040000000000000000000000000000")
    )
    # An ACL: version 2; user rwx, user 1234 rw, group r, mask rw, other nothing (include/uapi/linux/posix_acl_xattr.h)
    acl = bytes.fromhex(
        "0200000001000700ffffffff02000600d204000004000400ffffffff10000600ffffffff20000000ffffffff"
    )
    os.setxattr(
        root / "changed" if (root / "changed").exists() else root / "setuid", "system.posix_acl_access", acl
    )
    os.setxattr(root / "dir", "system.posix_acl_default", acl)
    for number, name in ((3, "null"), (8, "random")):
        os.mknod(root / name, 0o666 | stat.S_IFCHR, os.makedev(1, number))
    deep = root / "deep"
    for _ in range(40):
        deep = deep / "level"
    deep.mkdir(parents=True)
    (deep / "bottom").write_text("here")
    os.utime(root / "empty-file", ns=(1, 1_234_567_890_123_456_789))
    os.utime(root / "setuid", ns=(1, -1_500_000_001))
    os.utime(root / "relative", ns=(1, 999_999_999), follow_symlinks=False)
    os.utime(root / "deep", ns=(1, 1_000_000_000_000_000_001))
    os.utime(root, ns=(1, 1_111_111_111_222_222_222))


@pytest.mark.criu
@pytest.mark.parametrize("warm", [True, False])
def test_an_extracted_upper_directory_shows_the_same_tree_on_the_same_lower(
    tmp_path: Path, overlays: list[Path], warm: bool
) -> None:
    lower, upper = tmp_path / "lower", tmp_path / "upper"
    lower.mkdir()
    upper.mkdir()
    lower_tree(lower)
    overlays.append(mounted_overlay(lower, upper, tmp_path, "a"))
    work_in(overlays[0])
    chunks = Chunks()

    index = captured(upper, chunks, tmp_path / "stage", warm)
    again = extracted(index, chunks, tmp_path / "again", threads=4)

    assert described(again) == described(upper)
    overlays.append(mounted_overlay(lower, again, tmp_path, "b"))
    assert described(overlays[1], raw=False) == described(overlays[0], raw=False)
    kinds = {entry.path: entry.kind for entry in index.entries}
    assert kinds["deleted"] == kinds["gone"] == kinds["renamed-from"] == "whiteout"
    assert sorted(os.listdir(overlays[1] / "opaque")) == ["new"]
    assert not any("trusted.overlay.origin" in entry.xattrs for entry in index.entries)
    assert any("trusted.overlay.opaque" in entry.xattrs for entry in index.entries)
    assert any("trusted.overlay.redirect" in entry.xattrs for entry in index.entries)


@pytest.mark.parametrize("warm", [True, False])
@pytest.mark.parametrize("place", ["disk", "memory"])
def test_everything_that_a_directory_can_hold_comes_back(tmp_path: Path, warm: bool, place: str) -> None:
    root = tmp_path / "root"
    root.mkdir()
    if place == "memory":
        subprocess.run(["mount", "-t", "tmpfs", "-o", "size=64m", "tmpfs", str(root)], check=True)
    try:
        everything(root)
        chunks = Chunks()
        index = captured(root, chunks, tmp_path / "stage", warm)
        again = extracted(index, chunks, tmp_path / "again")
        assert described(again) == described(root)
        assert len(list(index.chunk_keys())) < 40
        second = Chunks()
        captured(again, second, tmp_path / "stage", warm)
        assert second.stored == chunks.stored
    finally:
        if place == "memory":
            unmount(root)


def test_a_sparse_file_costs_only_its_data(tmp_path: Path) -> None:
    root = tmp_path / "root"
    root.mkdir()
    with open(root / "sparse", "wb") as file:
        file.truncate(5 << 30)
        for i in range(5):
            file.seek(i << 30)
            file.write(b"x" * 4096)
    chunks = Chunks()

    index = captured(root, chunks, tmp_path / "stage", warm=False)
    again = extracted(index, chunks, tmp_path / "again")

    assert chunks.bytes_sunk == 5 * 4096
    assert (again / "sparse").stat().st_size == 5 << 30
    assert (again / "sparse").stat().st_blocks * 512 < 1 << 20


def test_a_file_of_small_holes_does_not_become_a_chunk_for_every_page(tmp_path: Path) -> None:
    root = tmp_path / "root"
    root.mkdir()
    with open(root / "ladder", "wb") as file:
        for i in range(0, 8 << 20, 8192):
            file.seek(i)
            file.write(b"r" * 4096)
    chunks = Chunks()

    index = captured(root, chunks, tmp_path / "stage")

    again = extracted(index, chunks, tmp_path / "again")
    assert len(list(index.chunk_keys())) == 2
    assert (again / "ladder").read_bytes() == (root / "ladder").read_bytes()


def test_a_bound_socket_is_named_in_the_index_and_not_extracted(tmp_path: Path) -> None:
    root = tmp_path / "root"
    root.mkdir()
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(str(root / "listener"))
        index = captured(root, Chunks(), tmp_path / "stage")
    assert [(e.path, e.kind) for e in index.entries] == [(".", "dir"), ("listener", "socket-skipped")]
    assert os.listdir(extracted(index, Chunks(), tmp_path / "again")) == []


@pytest.mark.parametrize("device", [(stat.S_IFCHR, 1, 1), (stat.S_IFBLK, 8, 0), (stat.S_IFBLK, 1, 3)])
def test_a_device_that_no_layer_may_hold_is_refused_before_the_freeze_and_in_it(
    tmp_path: Path, device: tuple[int, int, int]
) -> None:
    root, stage = tmp_path / "root", tmp_path / "stage"
    root.mkdir()
    stage.mkdir()
    os.mknod(root / "disk", 0o600 | device[0], os.makedev(*device[1:]))
    with pytest.raises(Refused, match="disk"):
        precopy(root, Chunks().sink)
    with pytest.raises(Refused, match="disk"):
        finish(root, PreCopy(), stage)
    assert os.listdir(stage) == []


def test_paths_longer_than_path_max_come_back_and_hold_no_descriptors(tmp_path: Path) -> None:
    root = tmp_path / "root"
    root.mkdir()
    levels, name = 300, "n" * 200
    here = os.open(root, os.O_RDONLY)
    for level in range(levels):
        os.mkdir(name, dir_fd=here)
        below = os.open(name, os.O_RDONLY, dir_fd=here)
        os.close(here)
        here = below
        file = os.open(f"file{level}", os.O_CREAT | os.O_WRONLY, dir_fd=here)
        os.write(file, b"%d" % level)
        os.close(file)
    os.close(here)
    chunks = Chunks()
    before = len(os.listdir("/proc/self/fd"))

    assert len(precopy(root, chunks.sink).snapshot.states) == 2 * levels
    index = captured(root, chunks, tmp_path / "stage", warm=False)
    again = extracted(index, chunks, tmp_path / "again")

    assert len(os.listdir("/proc/self/fd")) == before
    assert captured(again, chunks, tmp_path / "stage", warm=False).to_bytes() == index.to_bytes()
    assert sum(entry.kind == "file" for entry in index.entries) == levels


def test_a_tree_too_deep_to_come_back_is_refused_when_it_is_captured(tmp_path: Path) -> None:
    root = tmp_path / "root"
    root.mkdir()
    here = os.open(root, os.O_RDONLY)
    for _ in range(MAX_DEPTH + 1):
        os.mkdir("d", dir_fd=here)
        below = os.open("d", os.O_RDONLY, dir_fd=here)
        os.close(here)
        here = below
    os.close(here)
    try:
        with pytest.raises(Refused, match="deep"):
            precopy(root, Chunks().sink)
    finally:
        subprocess.run(["rm", "-rf", str(root)], check=True)


def test_fifty_thousand_small_files_come_back(tmp_path: Path) -> None:
    root = tmp_path / "root"
    for directory in range(100):
        (root / f"d{directory}").mkdir(parents=True)
        for number in range(500):
            (root / f"d{directory}/f{number}").write_bytes(b"%d/%d" % (directory, number))
    chunks = Chunks()
    index = captured(root, chunks, tmp_path / "stage")
    assert len(index.entries) == 50_101
    assert described(extracted(index, chunks, tmp_path / "again")) == described(root)


def test_chunks_are_fetched_from_several_threads_and_not_far_ahead(tmp_path: Path) -> None:
    root = tmp_path / "root"
    root.mkdir()
    for number in range(20):
        (root / f"{number}").write_bytes(random.Random(number).randbytes(SMALL + 1))
    chunks = Chunks()
    index = captured(root, chunks, tmp_path / "stage")
    together = threading.Barrier(4, timeout=20)
    count = iter(range(10_000))

    def fetch(key: str) -> bytes:
        if next(count) < 4:
            together.wait()
        return chunks.fetch(key)

    (tmp_path / "again").mkdir()
    extract(index, fetch, tmp_path / "again", threads=4)
    assert described(tmp_path / "again") == described(root)


def test_small_chunks_do_not_wait_for_the_store_two_at_a_time(tmp_path: Path) -> None:
    """With two threads for large chunks: a file of many small pieces between holes would take long over a distant store."""
    root = tmp_path / "root"
    root.mkdir()
    with open(root / "pieces", "wb") as file:
        for number in range(100):
            file.seek(number << 20)
            file.write(random.Random(number).randbytes(4096))
    (root / "large").write_bytes(random.Random(0).randbytes(9 << 20))
    chunks = Chunks()
    index = captured(root, chunks, tmp_path / "stage")
    together = threading.Barrier(16, timeout=20)
    turn = threading.Lock()
    at_once: list[int] = []
    large = 0

    def fetch(key: str) -> bytes:
        nonlocal large
        data = chunks.fetch(key)
        if len(data) == 4096:
            with turn:
                at_once.append(1)
                first = len(at_once) <= 16
            if first:
                together.wait()
        else:
            with turn:
                large += 1
                assert large <= 2
            time.sleep(0.01)
            with turn:
                large -= 1
        return data

    (tmp_path / "again").mkdir()
    extract(index, fetch, tmp_path / "again", threads=2)
    assert described(tmp_path / "again") == described(root)


names = st.one_of(
    st.sampled_from([b"a", b"b", b"a-b", b"a.b", b" ", b"\xff", b"\xc3\xa9", b"...", b"new\nline"]),
    st.binary(min_size=1, max_size=20).filter(
        lambda b: b"/" not in b and b"\0" not in b and b not in (b".", b"..")
    ),
)
contents = st.one_of(
    st.binary(max_size=300),
    st.lists(st.tuples(st.integers(0, 20 << 20), st.binary(min_size=1, max_size=100)), max_size=4),
)
leaves = st.one_of(
    st.tuples(st.just("file"), contents, st.integers(0, 0o7777)),
    st.tuples(st.just("symlink"), st.binary(min_size=1, max_size=50).filter(lambda b: b"\0" not in b)),
    st.tuples(st.just("fifo"), st.integers(0, 0o7777)),
    st.tuples(st.just("whiteout")),
    st.tuples(st.just("link")),
)
trees = st.recursive(
    leaves, lambda children: st.dictionaries(names, children, max_size=5), max_leaves=25
).filter(lambda tree: isinstance(tree, dict))


def plant(root: bytes, tree: dict[bytes, Any], files: list[bytes]) -> None:
    for name, node in tree.items():
        path = root + b"/" + name
        match node:
            case dict():
                os.mkdir(path)
                plant(path, node, files)
            case ("file", content, mode):
                with open(path, "wb") as file:
                    for offset, piece in content if isinstance(content, list) else [(0, content)]:
                        file.seek(offset)
                        file.write(piece)
                os.chmod(path, mode)
                files.append(path)
            case ("symlink", target):
                os.symlink(target, path)
            case ("fifo", mode):
                os.mkfifo(path, mode)
            case ("whiteout",):
                os.mknod(path, stat.S_IFCHR, 0)
            case ("link",) if files:
                os.link(files[-1], path)


@settings(max_examples=150, deadline=None, suppress_health_check=list(HealthCheck))
@given(tree=trees, warm=st.booleans(), threads=st.sampled_from([1, 3]))
def test_any_tree_comes_back(
    tmp_path_factory: pytest.TempPathFactory, tree: dict[bytes, Any], warm: bool, threads: int
) -> None:
    scratch = tmp_path_factory.mktemp("tree")
    try:
        root = scratch / "root"
        root.mkdir()
        plant(os.fsencode(root), tree, [])
        chunks = Chunks()
        index = captured(root, chunks, scratch / "stage", warm)
        again = extracted(index, chunks, scratch / "again", threads)
        assert described(again, holes=False) == described(root, holes=False)
    finally:
        shutil.rmtree(scratch)
