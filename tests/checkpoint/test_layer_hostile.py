"""An index is untrusted: whatever it says, nothing outside of the target is touched and the answer is a typed error."""

from __future__ import annotations

import base64
import contextlib
import copy
import hashlib
import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from savedworker.checkpoint.layer import CHUNK_SIZE, Entry, LayerIndex, NoSpace, extract
from savedworker.model.errors import Corrupt, Refused, SavedWorkerError
from tests.checkpoint.layer_trees import described

pytestmark = pytest.mark.criu  # extracting restores owners, which needs root

DATA = b"hello"
KEY = hashlib.sha256(DATA).hexdigest()
SHARED = hashlib.sha256(2 * DATA).hexdigest()
META = {"mode": 0o644, "uid": 0, "gid": 0, "mtime_ns": 0}
ROOT_ENTRY = {"path": ".", "kind": "dir", **META}


def a_file(path: str = "file", **changes: Any) -> dict[str, Any]:
    return {"path": path, "kind": "file", **META, "size": 5, "data": [[0, 5, KEY]], **changes}


def a_shared(path: str = "shared", **changes: Any) -> dict[str, Any]:
    return {
        "path": path, "kind": "file", **META, "size": 5, "space": "shm-1", "runs": [[0, 5]], **changes
    }  # fmt: skip


def a_dir(path: str, **changes: Any) -> dict[str, Any]:
    return {"path": path, "kind": "dir", **META, **changes}


def a_link(path: str, target: str) -> dict[str, Any]:
    return {"path": path, "kind": "symlink", **META, "target": target}


def document(*entries: Any, **changes: Any) -> bytes:
    body = {"format": "savedworker-layer", "version": 3, "entries": [ROOT_ENTRY, *entries], **changes}
    return json.dumps(body).encode()


def fetch(key: str) -> bytes:
    return {KEY: DATA, SHARED: 2 * DATA}[key]


@pytest.fixture
def target(tmp_path: Path) -> Path:
    target = tmp_path / "target"
    target.mkdir()
    return target


def test_the_documents_these_tests_vary_are_good(target: Path) -> None:
    device = {"path": "null", "kind": "device", **META, "major": 1, "minor": 3}
    hard = {"path": "second", "kind": "file", "link": "file"}
    good = document(a_file(), hard, a_dir("d"), a_file("d/f"), a_link("s", "/etc"), device)
    extract(LayerIndex.parse(good), fetch, target)
    assert (target / "second").read_bytes() == (target / "d/f").read_bytes() == DATA


HOSTILE: dict[str, bytes] = {
    "absolute": document(a_file("/etc/cron.d/x")),
    "absolute directory": document(a_dir("/tmp")),
    "parent": document(a_file("../x")),
    "parent directory": document(a_dir("..")),
    "parent below": document(a_dir("d"), a_file("d/../../x")),
    "dot": document(a_dir("d"), a_file("d/./x")),
    "dot in front": document(a_file("./x")),
    "second root": document(ROOT_ENTRY),
    "empty": document(a_file("")),
    "empty component": document(a_dir("d"), a_file("d//x")),
    "slash at the end": document(a_dir("d"), a_dir("d/")),
    "nul": document(a_file("a\0b")),
    "long name": document(a_file("x" * 256)),
    "long name in bytes": document(a_file("ü" * 128)),
    "half a surrogate": document(a_file("\ud800")),
    "second spelling": document(a_file("é"), a_file("\udcc3\udca9")),
    "twice": document(a_file(), a_file()),
    "no parent": document(a_file("d/x")),
    "parent later": document(a_file("d/x"), a_dir("d")),
    "parent is a file": document(a_file(), a_file("file/x")),
    "parent is a symlink": document(a_link("d", "/tmp"), a_file("d/x")),
    "parent is a whiteout": document({"path": "d", "kind": "whiteout", **META}, a_file("d/x")),
    "file over symlink": document(a_link("d", "/tmp/x"), a_file("d")),
    "link to nothing": document({"path": "x", "kind": "file", "link": "nothing"}),
    "link to itself": document({"path": "x", "kind": "file", "link": "x"}),
    "link to later": document({"path": "x", "kind": "file", "link": "file"}, a_file()),
    "link to a directory": document(a_dir("d"), {"path": "x", "kind": "file", "link": "d"}),
    "link to a symlink": document(a_link("s", "/etc/passwd"), {"path": "x", "kind": "file", "link": "s"}),
    "link outside": document({"path": "x", "kind": "file", "link": "/etc/passwd"}),
    "link outside by dots": document({"path": "x", "kind": "file", "link": "../x"}),
    "link of a directory": document(a_file(), {"path": "x", "kind": "dir", "link": "file"}),
    "link to null": document({"path": "x", "kind": "file", "link": None}),
    "link with data": document(a_file(), a_file("x", link="file")),
    "negative size": document(a_file(size=-1, data=[])),
    "huge size": document(a_file(size=2**63)),
    "size is true": document(a_file(size=True, data=[])),
    "size is a float": document(a_file(size=5.0)),
    "data beyond the end": document(a_file(size=4)),
    "negative offset": document(a_file(data=[[-1, 5, KEY]])),
    "negative length": document(a_file(data=[[0, -5, KEY]])),
    "no length": document(a_file(data=[[0, 0, KEY]])),
    "overlap": document(a_file(size=9, data=[[0, 5, KEY], [4, 5, KEY]])),
    "backwards": document(a_file(size=20, data=[[10, 5, KEY], [0, 5, KEY]])),
    "across chunks": document(a_file(size=CHUNK_SIZE + 5, data=[[CHUNK_SIZE - 1, 5, KEY]])),
    "huge chunk": document(a_file(size=2**40, data=[[0, 2**40, KEY]])),
    "key is a path": document(a_file(data=[[0, 5, "../../record.json"]])),
    "key with a newline": document(a_file(data=[[0, 5, KEY + "\n"]])),
    "key is a number": document(a_file(data=[[0, 5, 7]])),
    "two in an extent": document(a_file(data=[[0, 5]])),
    "four in an extent": document(a_file(data=[[0, 5, KEY, 0]])),
    "before its chunk": document(a_file(data=[[0, 5, KEY, -1, 50]])),
    "behind its chunk": document(a_file(data=[[0, 5, KEY, 46, 50]])),
    "shared chunk is huge": document(a_file(data=[[0, 5, KEY, 0, CHUNK_SIZE + 1]])),
    "place is true": document(a_file(data=[[0, 5, KEY, True, 50]])),
    "size of the chunk is text": document(a_file(data=[[0, 5, KEY, 0, "50"]])),
    "a chunk of two sizes": document(
        a_file(data=[[0, 5, KEY, 0, 50]]), a_file("other", data=[[0, 5, KEY, 0, 51]])
    ),
    "shared and whole": document(a_file(size=55, data=[[0, 5, KEY, 0, 50], [5, 50, KEY]])),
    "two shared chunks": document(a_file(size=9, data=[[0, 4, KEY, 0, 50], [4, 4, KEY[::-1], 0, 50]])),
    "extents in an object": document(a_file(data={"0": KEY})),
    "data in two places": document(a_shared(data=[[0, 5, KEY]])),
    "a space without runs": document({k: v for k, v in a_shared().items() if k != "runs"}),
    "runs without a space": document({k: v for k, v in a_shared().items() if k != "space"}),
    "data nowhere": document({k: v for k, v in a_file().items() if k != "data"}),
    "a space is a path": document(a_shared(space="../x")),
    "a space with a newline": document(a_shared(space="s\n")),
    "a space without a name": document(a_shared(space="")),
    "a space is null": document(a_shared(space=None)),
    "a space is a number": document(a_shared(space=7)),
    "a space of two files": document(a_shared(), a_shared("other")),
    "a space of a long path": document(
        *(a_dir("/".join(["d" * 200] * n)) for n in range(1, 6)),
        a_shared("/".join(["d" * 200] * 5) + "/" + "x" * 20),
    ),
    "runs are a number": document(a_shared(runs=5)),
    "three in a run": document(a_shared(runs=[[0, 5, 5]])),
    "a run is a number": document(a_shared(runs=[5])),
    "a run of text": document(a_shared(runs=[[0, "5"]])),
    "a run is true": document(a_shared(runs=[[0, True]])),
    "a run beyond the end": document(a_shared(runs=[[0, 6]])),
    "a run before the beginning": document(a_shared(runs=[[-1, 5]])),
    "an empty run": document(a_shared(runs=[[0, 0]])),
    "runs overlap": document(a_shared(size=9, runs=[[0, 5], [4, 5]])),
    "runs backwards": document(a_shared(size=20, runs=[[10, 5], [0, 5]])),
    "disk": document({"path": "x", "kind": "device", **META, "major": 8, "minor": 0}),
    "mem": document({"path": "x", "kind": "device", **META, "major": 1, "minor": 1}),
    "device 0:0": document({"path": "x", "kind": "device", **META, "major": 0, "minor": 0}),
    "device is a float": document({"path": "x", "kind": "device", **META, "major": 1.0, "minor": 3}),
    "unknown kind": document({"path": "x", "kind": "door", **META}),
    "kind is a list": document({"path": "x", "kind": ["file"], **META}),
    "unknown field": document(a_file(more=1)),
    "missing field": document({"path": "x", "kind": "dir", "mode": 0}),
    "target missing": document({"path": "x", "kind": "symlink", **META}),
    "target empty": document(a_link("x", "")),
    "target with nul": document(a_link("x", "a\0b")),
    "target too long": document(a_link("x", "a" * 4096)),
    "target is a number": document(a_link("x", 5)),  # type: ignore[arg-type]
    "mode with a file type": document(a_file(mode=0o100644)),
    "mode negative": document(a_file(mode=-1)),
    "uid too large": document(a_file(uid=2**32 - 1)),
    "gid negative": document(a_file(gid=-1)),
    "time too large": document(a_file(mtime_ns=2**63)),
    "xattr of no namespace": document(a_file(xattrs={"system.nfs4_acl": ""})),
    "xattr with nul": document(a_file(xattrs={"user.a\0b": ""})),
    "xattr not base64": document(a_file(xattrs={"user.a": "%"})),
    "xattr not text": document(a_file(xattrs={"user.a": 5})),
    "xattr beyond ASCII": document(a_file(xattrs={"user.a": "é"})),
    "xattr too large": document(a_file(xattrs={"user.a": base64.b64encode(bytes(65537)).decode()})),
    "xattr name too long": document(a_file(xattrs={"user." + "a" * 251: ""})),
    "xattrs in a list": document(a_file(xattrs=[])),
    "entry is a string": document("file"),
    "entries in an object": document(entries={}),
    "no entries": document(entries=[]),
    "no root": document(entries=[a_file()]),
    "root is a file": document(entries=[a_file(".")]),
    "no format": document(format=None),
    "other format": document(format="tar"),
    "more at the top": document(more=1),
    "deep": document(*(a_dir("/".join("d" * n)) for n in range(1, 2050))),
    "not JSON": b"\x1f\x8b",
    "not UTF-8": b'"\xff"',
    "nothing": b"",
    "a number": b"5",
    "nested": b"[" * 200_000,
    "long number": b'{"format":"savedworker-layer","version":' + b"9" * 10_000 + b"}",
}


@pytest.mark.parametrize("name", HOSTILE)
def test_a_hostile_index_is_refused(name: str) -> None:
    with pytest.raises(Refused):
        LayerIndex.parse(HOSTILE[name])


@pytest.mark.parametrize("version", [4, 0, "1", 1.0, True, None])
def test_an_unknown_format_version_is_refused_by_name(version: Any) -> None:
    with pytest.raises(Refused, match="version") as caught:
        LayerIndex.parse(document(version=version))
    assert repr(version) in str(caught.value)
    assert "version of Saved Worker" in caught.value.fix


def test_data_that_is_elsewhere_is_refused_where_nobody_brings_it(target: Path) -> None:
    """As in the writable layer."""
    index = LayerIndex.parse(document(a_shared()))
    with pytest.raises(Refused, match="'shared' is not in the layer"):
        extract(index, fetch, target)
    assert os.listdir(target) == []

    def fill(files: list[tuple[Entry, Path]]) -> None:
        files[0][1].write_bytes(DATA)

    extract(index, fetch, target, fill=fill)
    assert (target / "shared").read_bytes() == DATA


def test_an_index_that_was_not_parsed_is_checked_all_the_same(target: Path) -> None:
    for entries in (
        [],
        [Entry(".", "dir"), Entry("../x", "file")],
        [Entry(".", "dir"), Entry("x", "link", link="y")],
    ):
        with pytest.raises(Refused):
            extract(LayerIndex(entries), fetch, target)
    assert os.listdir(target) == []


@pytest.mark.parametrize(
    "answer", [b"", b"hell", b"hello!", bytes(CHUNK_SIZE)], ids=["nothing", "shorter", "longer", "a chunk"]
)
def test_a_chunk_of_another_length_is_refused(target: Path, answer: bytes) -> None:
    with pytest.raises(Corrupt, match="bytes instead of 5"):
        extract(LayerIndex.parse(document(a_file())), lambda key: answer, target)


def test_a_target_that_is_not_empty_is_refused_and_untouched(target: Path) -> None:
    (target / "mine").write_text("mine")
    before = described(target)
    with pytest.raises(Refused, match="not empty"):
        extract(LayerIndex.parse(document(a_file())), fetch, target)
    assert described(target) == before


def test_a_target_that_is_a_symlink_is_not_followed(tmp_path: Path) -> None:
    (tmp_path / "real").mkdir()
    (tmp_path / "alias").symlink_to("real")
    with pytest.raises(SavedWorkerError):
        extract(LayerIndex.parse(document(a_file())), fetch, tmp_path / "alias")
    assert os.listdir(tmp_path / "real") == []


def test_what_fetch_raises_ends_the_extraction_unchanged(target: Path) -> None:
    def gone(key: str) -> bytes:
        raise FileNotFoundError(key)

    for threads in (1, 3):
        with pytest.raises(FileNotFoundError):
            extract(LayerIndex.parse(document(a_file(f"f{threads}"))), gone, target, threads)
        shutil.rmtree(target)
        target.mkdir()


def test_a_size_that_no_file_system_holds_is_a_typed_error(target: Path) -> None:
    with pytest.raises(SavedWorkerError, match="too large"):
        extract(LayerIndex.parse(document(a_file(size=2**63 - 1, data=[]))), fetch, target)


def test_a_full_target_is_a_clear_error(target: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object) -> int:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "pwrite", full)
    with pytest.raises(NoSpace, match="space"):
        extract(LayerIndex.parse(document(a_file())), fetch, target)


def test_a_default_acl_above_the_target_does_not_reach_the_layer(tmp_path: Path) -> None:
    acl = bytes.fromhex("0200000001000700ffffffff04000500ffffffff20000500ffffffff")
    os.setxattr(tmp_path, "system.posix_acl_default", acl)
    (tmp_path / "target").mkdir()
    extract(LayerIndex.parse(document(a_file(), a_dir("d"))), fetch, tmp_path / "target")
    for path in ("", "d", "file"):
        assert os.listxattr(tmp_path / "target" / path) == []


anything = st.recursive(
    st.one_of(
        st.none(),
        st.booleans(),
        st.integers(-(2**70), 2**70),
        st.floats(),
        st.text(max_size=10),
        st.sampled_from(
            ["..", ".", "/", "a/../b", "d", "file", "s", "s/x", "/tmp/escaped", "d/s/x", KEY, "\udcff"]
        ),
    ),
    lambda inner: st.one_of(
        st.lists(inner, max_size=4), st.dictionaries(st.text(max_size=5), inner, max_size=4)
    ),
    max_leaves=8,
)
GOOD: list[dict[str, Any]] = [
    ROOT_ENTRY,
    a_dir("d"),
    a_file(),
    a_link("s", "../outside"),
    a_link("d/s", "../../outside"),
    a_file("d/f", xattrs={"user.x": "eA=="}),
    a_file("d/shared", data=[[0, 5, SHARED, 0, 10]]),
    a_file("shared", data=[[0, 5, SHARED, 5, 10]]),
    {"path": "h", "kind": "file", "link": "file"},
    {"path": "n", "kind": "device", **META, "major": 1, "minor": 3},
    {"path": "p", "kind": "fifo", **META},
    {"path": "w", "kind": "whiteout", **META},
]


@st.composite
def mutated(draw: st.DrawFn) -> bytes:
    """A good document with a few fields replaced, entries dropped, doubled or swapped."""
    entries = copy.deepcopy(GOOD)
    for _ in range(draw(st.integers(1, 4))):
        where = draw(st.integers(0, len(entries) - 1))
        match draw(st.sampled_from(["field", "field", "field", "path", "drop", "double", "swap", "any"])):
            case "field":
                if isinstance(entries[where], dict):
                    keys = sorted({*entries[where], "path", "kind", "link", "data", "target", "xattrs"})
                    entries[where][draw(st.sampled_from(keys))] = draw(anything)
            case "path":
                if isinstance(entries[where], dict):
                    parts = draw(
                        st.lists(st.sampled_from(["..", ".", "", "d", "s", "file", "x"]), max_size=4)
                    )
                    entries[where]["path"] = "/".join(parts)
            case "drop" if len(entries) > 1:
                del entries[where]
            case "double":
                entries.append(copy.deepcopy(entries[where]))
            case "swap":
                other = draw(st.integers(0, len(entries) - 1))
                entries[where], entries[other] = entries[other], entries[where]
            case _:
                entries[where] = draw(anything)
    return json.dumps({"format": "savedworker-layer", "version": 1, "entries": entries}).encode()


def outside_is_untouched(scratch: Path, attempt: Callable[[Path], None]) -> None:
    outside, target = scratch / "outside", scratch / "target"
    outside.mkdir()
    target.mkdir()
    (outside / "file").write_text("the host's")
    (scratch / "x").write_text("the host's too")
    before = {path: described(scratch / path) for path in ("outside", "x")}
    names = sorted(os.listdir(scratch))
    attempt(target)
    assert {path: described(scratch / path) for path in ("outside", "x")} == before
    assert sorted(os.listdir(scratch)) == names
    assert not os.path.lexists("/tmp/escaped")


@settings(max_examples=600, deadline=None, suppress_health_check=list(HealthCheck))
@given(raw=mutated())
@example(raw=document(a_link("d", "../outside"), a_file("d/file")))
def test_a_mutated_index_touches_nothing_outside_and_fails_with_a_typed_error(
    tmp_path_factory: pytest.TempPathFactory, raw: bytes
) -> None:
    scratch = tmp_path_factory.mktemp("hostile")

    def attempt(target: Path) -> None:
        try:
            index = LayerIndex.parse(raw)
        except Refused:
            return
        try:
            extract(index, lambda key: DATA, target)
        except SavedWorkerError:
            return
        assert LayerIndex.parse(index.to_bytes()) == index

    try:
        outside_is_untouched(scratch, attempt)
    finally:
        shutil.rmtree(scratch)


@settings(max_examples=300, deadline=None)
@given(raw=st.one_of(st.binary(max_size=200), anything.map(lambda value: json.dumps(value).encode())))
def test_any_bytes_are_an_index_or_refused(raw: bytes) -> None:
    with pytest.raises(Refused):
        LayerIndex.parse(raw)


@settings(max_examples=300, deadline=None)
@given(cut=st.integers(0, 10_000), flip=st.integers(0, 255))
def test_a_damaged_document_is_an_index_or_refused(cut: int, flip: int) -> None:
    raw = bytearray(document(*GOOD[1:]))
    raw[cut % len(raw)] ^= flip
    for damaged in (bytes(raw), bytes(raw[: cut % len(raw)])):
        with contextlib.suppress(Refused):
            LayerIndex.parse(damaged)
