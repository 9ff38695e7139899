"""The images of a restore are in memory while CRIU reads them, if there is room, and never any longer. A restore that fails ends at once."""

from __future__ import annotations

import errno
import logging
import os
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from savedworker.checkpoint import container
from savedworker.checkpoint import restore as restoring
from savedworker.checkpoint.cgroups import unified
from savedworker.checkpoint.container import Container
from savedworker.checkpoint.keys import read_index
from savedworker.checkpoint.layer.pack import SMALL
from savedworker.model.errors import Corrupt, Fatal
from savedworker.model.room import Room
from tests.checkpoint.bench import Bench

pytestmark = pytest.mark.criu

PROVES = """
import hashlib, os, random, sys, time
memory = bytearray(int(sys.argv[1]) << 20)
for n in range(int(sys.argv[1])):
    memory[n << 20 : n + 1 << 20] = random.Random(n).randbytes(1 << 20)
os.makedirs("/srv/many")
for n in range(int(sys.argv[2])):
    with open(f"/srv/many/{n}", "wb") as file:
        file.write(random.Random(n).randbytes(int(sys.argv[3])))
first = hashlib.sha256(memory).hexdigest()
child = os.fork()
while True:
    print("right" if hashlib.sha256(memory).hexdigest() == first else "wrong", bool(child), flush=True)
    time.sleep(0.05)
"""


def saved(bench: Bench, megabytes: int = 24, files: int = 1, size: int = 5000, **fields: Any) -> None:
    bench.python(PROVES, str(megabytes), str(files), str(size), **fields)
    bench.until_output("right False\n")
    bench.until_output("right True\n")
    bench.save()


def is_right(bench: Bench) -> None:
    """Both processes go on with what they had."""
    before = len(bench.text)
    for process in ("False", "True"):
        bench.until(lambda p=process: f"right {p}\n" in bench.text[before:], f"go on ({process})")  # type: ignore[misc]
    assert "wrong" not in bench.text


def mount_of_images(bench: Bench, pid: int | str = "self") -> list[str]:
    lines = Path(f"/proc/{pid}/mountinfo").read_text().splitlines()
    return [x for x in lines if x.split(" ")[4].startswith(str(bench.folder)) and "/images" in x]


def kernel() -> tuple[int, ...]:
    return tuple(int(x) for x in os.uname().release.split(".")[:2])


def left_behind(bench: Bench) -> list[str]:
    """Mounts, homes and threads of restores that are over."""
    mounts = [x for x in Path("/proc/self/mountinfo").read_text().splitlines() if str(bench.folder) in x]
    threads = [
        x.name for x in threading.enumerate() if x.name.startswith(("restore", "layer", "chunks", "keep"))
    ]
    return [*mounts, *map(str, bench.folder.glob("home-*")), *threads]


def looking(bench: Bench, seen: list[str], fails: bool = False) -> Callable[[list[str]], None]:
    """Runs runc, and notes where the images are then and how much of them is left afterwards."""
    normal = bench._launch

    def launch(argv: list[str]) -> None:
        folder = bench.container.home.images
        seen.extend(mount_of_images(bench))
        assert folder.stat().st_mode & 0o777 == 0o700
        normal(argv)
        pages = max(folder.glob("pages-*.img"), key=lambda x: x.stat().st_size)
        seen.append(f"{pages.stat().st_size} bytes, {pages.stat().st_blocks} blocks")
        if fails:
            raise Fatal("the instance had a bad moment")

    return launch


def test_the_images_are_in_memory_while_they_are_read_and_given_back_meanwhile(
    bench: Bench, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, restoring.log.name)
    saved(bench)
    seen: list[str] = []
    bench.restore(launch=looking(bench, seen))
    is_right(bench)
    (mount, left) = seen
    assert " - tmpfs tmpfs rw" in mount
    assert "nosuid,nodev,noexec" in mount
    assert "mode=700" in mount
    assert ("noswap" in mount) == (kernel() >= (6, 4))
    assert ("huge=within_size" in mount) == Path("/sys/kernel/mm/transparent_hugepage").exists()
    assert left.endswith(", 0 blocks")
    assert mount_of_images(bench) == []
    assert not any(mount_of_images(bench, pid) for pid in bench.container.pids())
    assert not bench.container.home.images.exists()
    said = [x.message for x in caplog.records if "are put" in x.message]
    assert len(said) == 1
    assert "are put in memory: " in said[0]
    assert said[0].endswith("are available")


def test_where_there_is_no_room_they_are_on_disk(
    bench: Bench, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, restoring.log.name)
    monkeypatch.setattr(restoring, "rooms", lambda: [Room(1 << 30, "are left of the limit of cgroup /job")])
    saved(bench)
    seen: list[str] = []
    bench.restore(launch=looking(bench, seen))
    is_right(bench)
    (left,) = seen
    assert not left.endswith(", 0 blocks")
    assert not bench.container.home.images.exists()
    assert "are put on disk: in memory " in caplog.text
    assert "1.0 GiB are left of the limit of cgroup /job" in caplog.text


def test_where_no_tmpfs_can_be_mounted_they_are_on_disk(
    bench: Bench, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, restoring.log.name)
    saved(bench)

    def refused(*_: object) -> None:
        raise PermissionError(1, "Operation not permitted")

    monkeypatch.setattr(Container, "hold_images_in_memory", refused)
    bench.restore()
    is_right(bench)
    assert "are put on disk: a tmpfs cannot be mounted: Operation not permitted" in caplog.text


@pytest.mark.parametrize("unknown", ["noswap", "huge", "noswap huge"])
def test_a_kernel_that_knows_less_has_them_in_memory_all_the_same(
    bench: Bench, monkeypatch: pytest.MonkeyPatch, unknown: str
) -> None:
    saved(bench)
    mount = container._mount

    def older(source: str, target: Path, kind: str, flags: int, options: str) -> None:
        if any(name in options for name in unknown.split()):
            raise OSError(errno.EINVAL, "Invalid argument")
        mount(source, target, kind, flags, options)

    monkeypatch.setattr(container, "_mount", older)
    seen: list[str] = []
    bench.restore(launch=looking(bench, seen))
    is_right(bench)
    assert not any(name in seen[0] for name in unknown.split())
    assert "mode=700" in seen[0]
    assert mount_of_images(bench) == []


def test_a_restore_that_fails_after_the_images_were_given_back_is_tried_again(bench: Bench) -> None:
    saved(bench)
    for _ in range(2):
        seen: list[str] = []
        with pytest.raises(Fatal):
            bench.restore(launch=looking(bench, seen, fails=True))
        assert len(seen) == 2
        assert left_behind(bench) == []
    bench.restore()
    is_right(bench)


def test_the_limit_of_the_worker_is_not_charged_for_its_images(bench: Bench) -> None:
    """Worker and images together are more than its specification lets it have."""
    limit = 96 << 20
    saved(bench, megabytes=64, memory=limit)
    seen: list[str] = []
    bench.restore(launch=looking(bench, seen))
    is_right(bench)
    assert len(seen) == 2
    assert bench.manifest is not None
    assert sum(space.size for space in bench.manifest.memory) > limit
    folder = bench.container.cgroup._folder("memory")
    assert int((folder / ("memory.max" if unified() else "memory.limit_in_bytes")).read_text()) == limit
    assert bench.container.cgroup.oom_kills() == 0


# What stops early ----------------------------------------------------------------------------------------------------


def restore_with(bench: Bench, patch: pytest.MonkeyPatch, damaged: set[str], late: set[str]) -> list[str]:
    """A restore in which ``damaged`` chunks are altered, and ``late`` ones wait until one of those was asked for; the late that were asked for."""
    found = threading.Event()
    begun: list[str] = []

    def answers(ask: Callable[..., Any]) -> Callable[..., Any]:
        def answer(key: str, **options: Any) -> Any:
            if key in damaged:
                found.set()
                raise Corrupt(f"chunk {key} is altered")
            if key in late:
                begun.append(key)
                assert found.wait(30)
            return ask(key, **options)

        return answer

    with patch.context() as patched:
        patched.setattr(bench.chunks, "get", answers(bench.chunks.get))
        patched.setattr(bench.chunks, "view", answers(bench.chunks.view))
        with pytest.raises(Corrupt, match="is altered") as raised:
            bench.restore()
    assert any(key in str(raised.value) for key in damaged)
    assert left_behind(bench) == []
    return begun


def test_damage_in_the_memory_ends_the_fetching_of_the_layer(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    saved(bench, files=60, size=SMALL + 1)
    manifest = bench.manifest
    assert manifest is not None
    damaged = max(manifest.memory, key=lambda x: x.size).groups[0].key
    layer = set(read_index(manifest.layer, bench.chunks).chunk_keys())
    assert len(layer) >= 60
    begun = restore_with(bench, monkeypatch, damaged={damaged}, late=layer)
    assert 0 < len(begun) < 30
    bench.restore()
    is_right(bench)


def test_damage_in_the_layer_ends_the_fetching_of_the_memory(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    saved(bench, megabytes=200)
    manifest = bench.manifest
    assert manifest is not None
    layer = set(read_index(manifest.layer, bench.chunks).chunk_keys())
    groups = {group.key for space in manifest.memory for group in space.groups}
    assert len(groups) > 45
    assert len(restore_with(bench, monkeypatch, damaged=layer, late=groups)) < 30
