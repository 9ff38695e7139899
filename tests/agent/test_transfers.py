"""Inputs go where the worker will find them, and nowhere else; outputs come from the worker's files, and from nowhere else."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from savedworker.agent.inputs import fetch, inside
from savedworker.agent.outputs import publish
from savedworker.model.errors import BadSpec, Fenced, SavedWorkerError
from savedworker.model.spec import Input, Output
from savedworker.store import places
from tests.store.conftest import BUCKET, FaultyProxy, proxy, s3_endpoint, s3_server

__all__ = ["proxy", "s3_endpoint", "s3_server"]  # fixtures


def quiet() -> None:
    """Nothing ends the transfer."""


@pytest.fixture
def rootfs(tmp_path: Path) -> Path:
    root = tmp_path / "rootfs"
    (root / "etc").mkdir(parents=True)
    (root / "etc/shadow").write_text("secret")
    return root


@pytest.fixture
def data(tmp_path: Path) -> Path:
    folder = tmp_path / "data"
    (folder / "sub").mkdir(parents=True)
    (folder / "a").write_text("A")
    (folder / "sub/b").write_text("B")
    return folder


def get(rootfs: Path, *inputs: str) -> None:
    fetch([Input.parse(x) for x in inputs], rootfs, (os.getuid(), 4711), "w", quiet)


def tree(folder: Path) -> dict[str, str]:
    return {str(x.relative_to(folder)): x.read_text() for x in folder.rglob("*") if x.is_file()}


def test_objects_and_trees_go_to_files_and_folders_of_the_user(rootfs: Path, data: Path) -> None:
    get(rootfs, f"file://{data}/:/in/tree", f"file://{data}/a:/in/file", f"file://{data}/sub/b:/new/folder/")
    assert tree(rootfs / "in") == {"tree/a": "A", "tree/sub/b": "B", "file": "A"}
    assert tree(rootfs / "new") == {"folder/b": "B"}
    made = [rootfs / x for x in ("in", "in/tree/sub", "in/file", "new/folder/b")]
    assert {x.stat().st_gid for x in made} == {4711}
    assert {oct(x.stat().st_mode & 0o777) for x in made} == {"0o755", "0o644"}
    assert (rootfs / "etc").stat().st_gid != 4711


def test_links_of_the_image_are_followed_within_it_and_what_is_there_is_replaced(
    rootfs: Path, data: Path, tmp_path: Path
) -> None:
    (rootfs / "var").mkdir()
    (rootfs / "var/run").symlink_to("/run")
    (rootfs / "up").symlink_to("../../../../tmp")
    (rootfs / "out").symlink_to("/etc/../up/x")
    (rootfs / "here").write_text("old")
    os.mkfifo(rootfs / "fifo")
    get(rootfs, *(f"file://{data}/a:{x}" for x in ("/var/run/a", "/up/a", "/out", "/here", "/fifo")))
    assert tree(rootfs) == {
        "run/a": "A",
        "tmp/a": "A",
        "tmp/x": "A",
        "here": "A",
        "fifo": "A",
        "etc/shadow": "secret",
    }
    assert not (tmp_path / "tmp").exists()
    (rootfs / "loop").symlink_to("loop")
    with pytest.raises(BadSpec, match="too many symbolic links"):
        inside(rootfs, "/loop/x")


@pytest.mark.parametrize(
    ("words", "what"),
    [("{data}/none:/x", "there is no"), ("{data}/none/:/x", "there is no"), ("{data}/a:/etc", "is a folder"), ("{data}/a:/etc/shadow/x", "in the way")],
)  # fmt: skip
def test_an_input_that_cannot_be_is_the_specs_fault(rootfs: Path, data: Path, words: str, what: str) -> None:
    with pytest.raises(BadSpec, match=what):
        get(rootfs, "file://" + words.format(data=data))


def put(rootfs: Path, *outputs: str, prove: object = quiet):
    return publish([Output.parse(x) for x in outputs], rootfs, "w", quiet, prove)  # type: ignore[arg-type]


def test_files_and_folders_are_published_without_links_and_special_files(
    rootfs: Path, tmp_path: Path
) -> None:
    out = rootfs / "out"
    (out / "sub").mkdir(parents=True)
    (out / "a").write_text("A")
    (out / "sub/b").write_text("B")
    (out / "sub/leak").symlink_to("/etc/shadow")
    (out / "folder").symlink_to("/etc")
    os.mkfifo(out / "fifo")
    done = put(rootfs, f"/out:file://{tmp_path}/to", f"/out/a:file://{tmp_path}/one", f"/out/a:file://{tmp_path}/in/")  # fmt: skip
    assert (done.files, done.size) == (4, 4)
    assert sorted(done.left_out) == ["/out/fifo", "/out/folder", "/out/sub/leak"]
    assert tree(tmp_path / "to") == {"a": "A", "sub/b": "B"}
    assert ((tmp_path / "one").read_text(), tree(tmp_path / "in")) == ("A", {"a": "A"})


def test_a_worker_cannot_have_the_agent_read_for_it_through_a_link(rootfs: Path, tmp_path: Path) -> None:
    (rootfs / "home").mkdir()
    (rootfs / "home/out").symlink_to("/etc")
    (rootfs / "home/model").symlink_to("/etc/shadow")
    for path in ("/home/out/shadow", "/home/out", "/home/model"):
        with pytest.raises(BadSpec, match="symbolic link"):
            put(rootfs, f"{path}:file://{tmp_path}/to")
    assert not (tmp_path / "to").exists()


@pytest.mark.parametrize(
    ("path", "what"), [("/none", "did not make it"), ("/etc/shadow/x", "did not make it"), ("/etc/shadow/", "neither"), ("/empty", "empty folder")]
)  # fmt: skip
def test_an_output_that_is_not_there_is_said_and_nothing_else_is_published(
    rootfs: Path, tmp_path: Path, path: str, what: str
) -> None:
    (rootfs / "empty").mkdir()
    with pytest.raises(BadSpec, match=what):
        put(rootfs, f"/etc/shadow:file://{tmp_path}/one", f"{path}:file://{tmp_path}/two")
    assert not (tmp_path / "one").exists()


def test_who_lost_the_lease_while_it_staged_publishes_nothing(rootfs: Path, tmp_path: Path) -> None:
    def lost() -> None:
        assert list(tmp_path.glob(".savedworker-*"))  # all of it is staged by then
        raise Fenced("lost")

    with pytest.raises(Fenced):
        put(rootfs, f"/etc/shadow:file://{tmp_path}/one", f"/etc:file://{tmp_path}/two", prove=lost)
    assert sorted(x.name for x in tmp_path.iterdir()) == ["rootfs"]


def test_outputs_become_visible_in_the_order_given_so_that_the_last_one_can_say_that_all_are_there(
    rootfs: Path, proxy: FaultyProxy, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AWS_ENDPOINT_URL", proxy.endpoint)
    out = rootfs / "out"
    out.mkdir()
    (out / "large").write_bytes(b"x" * places.HELD_LEAST)
    for n in range(20):
        (out / f"small-{n}").write_text("s")
    (rootfs / "_SUCCESS").write_text("")
    (rootfs / "other").write_text("o")
    to = f"s3://{BUCKET}/{rootfs.parent.name}"
    put(rootfs, f"/out:{to}/out/", f"/other:{to}/other", f"/_SUCCESS:{to}/_SUCCESS")
    shown = [path for method, path in proxy.requests if method == "POST" and "uploadId=" in path]
    shown += [path for method, path in proxy.requests if method == "PUT" and "uploadId=" not in path]
    assert len(shown) == 23
    order = [path.partition("?")[0] for _, path in proxy.requests if path in shown]
    assert order[-2:] == [f"/{BUCKET}/{rootfs.parent.name}/{name}" for name in ("other", "_SUCCESS")]


@pytest.mark.parametrize("broken", ["first", "second"])
def test_where_one_output_cannot_be_made_visible_none_after_it_is(
    rootfs: Path, tmp_path: Path, broken: str
) -> None:
    """A folder stands where a file is to go: that shows only when it is renamed."""
    for name in ("first", "second", "done"):
        (rootfs / name).write_text(name)
    (tmp_path / "to" / broken).mkdir(parents=True)
    outputs = [f"/{name}:file://{tmp_path}/to/{name}" for name in ("first", "second", "done")]
    with pytest.raises(SavedWorkerError):
        put(rootfs, *outputs)
    assert tree(tmp_path / "to") == ({} if broken == "first" else {"first": "first"})
    assert not list((tmp_path / "to").glob(".savedworker-*"))
