"""Checkpoint and restore on a bench: what goes wrong half-way leaves nothing behind and can be tried again."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

from savedworker.checkpoint import restore as restoring
from savedworker.checkpoint import save as saving
from savedworker.checkpoint.base_keeper import BaseKeeper
from savedworker.checkpoint.fetching import Fetching
from savedworker.checkpoint.open_files_image import OpenRegularFile, forget_sizes
from savedworker.model.errors import Corrupt, Fatal, Refused, Temporary
from savedworker.model.manifest import Manifest
from tests.checkpoint.bench import Bench

pytestmark = pytest.mark.criu

LINKED = """
import os, time
os.makedirs("/srv/data")
one = open("/srv/data/one", "w+")
os.link("/srv/data/one", "/srv/data/two")
os.unlink("/srv/data/one")
n = 0
while True:
    n += 1
    one.write(f"{n}\\n")
    one.flush()
    print(n, os.fstat(one.fileno()).st_nlink, open("/srv/data/two").read().count("\\n"), flush=True)
    time.sleep(0.02)
"""


def left_behind(bench: Bench) -> list[str]:
    """Mounts and homes of the bench."""
    mounts = [x for x in Path("/proc/self/mountinfo").read_text().splitlines() if str(bench.folder) in x]
    return mounts + [str(x) for x in bench.folder.glob("home-*")]


def test_a_restore_that_fails_after_criu_ran_leaves_nothing_and_is_retried_from_the_same_checkpoint(
    bench: Bench,
) -> None:
    bench.python(LINKED)
    bench.until_output("5 1 5\n")
    bench.save()
    normal = bench._launch

    def fails(argv: list[str]) -> None:
        normal(argv)
        raise Fatal("the instance had a bad moment")

    for _ in range(2):
        with pytest.raises(Fatal):
            bench.restore(launch=fails)
        assert left_behind(bench) == []
    bench.restore()
    bench.writes_on()
    last = bench.lines()[-1].split()
    assert last[1] == "1"
    assert last[0] == last[2]


STOPPED = """
import os, signal, time
child = os.fork()
if child == 0:
    os.kill(os.getpid(), signal.SIGSTOP)
    print("continued", flush=True)
    os._exit(0)
while True:
    print("tick", flush=True)
    time.sleep(0.02)
"""


def test_a_dump_that_is_stuck_is_ended_by_thawing_and_nobody_is_killed(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(saving, "preflight", lambda *_: [])
    bench.python(STOPPED)
    bench.until_output("tick")
    before = sorted(bench.container.pids())
    with monkeypatch.context() as impatient:
        impatient.setattr(saving, "_DUMP_PATIENCE", 1.0)
        with pytest.raises(Temporary, match="could not be frozen and dumped"):
            bench.save()
    bench.writes_on()
    assert sorted(bench.container.pids()) == before
    assert not bench.container.cgroup.freezing()
    states = {pid: Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] for pid in before}
    (stopped,) = [pid for pid, state in states.items() if state == "T"]
    os.kill(stopped, 18)
    bench.until_output("continued")
    bench.save()
    bench.restore()
    bench.writes_on()


def test_a_disk_that_fills_up_during_the_dump_is_named_and_the_worker_runs_on(
    bench: Bench, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(BaseKeeper, "check_space", lambda *_: None)
    small = tmp_path / "small"
    small.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=24m", "tmpfs", small], check=True)
    folder, bench.folder = bench.folder, small
    bench.chunks = type(bench.chunks)(bench.chunks._store, "bench")
    try:
        bench.python(
            "import os, time\ndata = os.urandom(48 << 20)\nwhile True:\n    print('tick', flush=True)\n    time.sleep(0.02)\n"
        )
        bench.until_output("tick")
        with pytest.raises(Fatal, match=r"the disk for checkpoint images, .* is full"):
            bench.save()
        bench.writes_on()
        assert not list(bench.container.home.path.glob("images-*"))
        subprocess.run(["mount", "-o", "remount,size=200m", small], check=True)
        bench.save()
        bench.writes_on()
    finally:
        bench.container.teardown()
        bench.folder = folder
        subprocess.run(["umount", small], check=True)


def test_altered_chunks_are_found_before_anything_is_restored(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    bench.python(LINKED)
    bench.until_output("5 1 5\n")
    saved = bench.save()
    group = max(saved.manifest.memory, key=lambda x: x.size).groups[0]
    launched: list[list[str]] = []
    (file,) = bench.folder.glob(f"store/**/{group.key}")
    whole = file.read_bytes()
    for damaged in (whole[:-1], whole[:100], bytes([*whole[:200], whole[200] ^ 1, *whole[201:]]), b""):
        file.write_bytes(damaged)
        with pytest.raises(Corrupt):
            bench.restore(launch=launched.append)
        assert left_behind(bench) == []
    file.write_bytes(whole)
    short = saved.manifest.model_copy(
        update={
            "images": tuple(
                x.model_copy(update={"size": x.size + 1}) if x.name == "files.img" else x
                for x in saved.manifest.images
            ),
            "packed": saved.manifest.packed.model_copy(update={"size": saved.manifest.packed.size + 1}),
        }
    )
    with pytest.raises(Corrupt, match="do not have the"):
        bench.restore(short, launch=launched.append)
    assert launched == []
    bench.restore()
    bench.writes_on()


def test_a_restore_that_makes_no_end_is_stopped_and_its_log_is_bounded(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Should a damaged image get past every check after all: CRIU loops for ever and writes gigabytes of log."""
    monkeypatch.setattr(restoring, "MAX_LOG", 1 << 20)
    bench.python(LINKED)
    bench.until_output("5 1 5\n")
    bench.save()
    real = restoring._fetch_images

    def truncated(
        manifest: Manifest, chunks: Fetching, folder: Path, rebuilding: restoring._Rebuilding
    ) -> None:
        real(manifest, chunks, folder, rebuilding)
        pages = max(folder.glob("pages-*.img"), key=lambda path: path.stat().st_size)
        os.truncate(pages, 1 << 20)

    monkeypatch.setattr(restoring, "_fetch_images", truncated)
    with pytest.raises(Fatal, match="made no end"):
        bench.restore()
    assert left_behind(bench) == []
    kept = bench.folder / "last-restore.log"
    assert kept.stat().st_size < 512 << 20


def test_a_program_that_is_another_one_here_is_refused_by_name(bench: Bench) -> None:
    from savedworker.model.spec import Volume

    volume = bench.folder / "volume"
    volume.mkdir()
    library = volume / "library.so"
    library.write_bytes(Path("/lib/x86_64-linux-gnu/libz.so.1").resolve().read_bytes())
    bench.python(
        "import ctypes, time\nkept = ctypes.CDLL('/data/library.so')\nwhile True:\n    print('tick', flush=True)\n    time.sleep(0.02)\n",
        volumes=(Volume(source=str(volume), target="/data"),),
    )
    bench.until_output("tick")
    bench.save()
    library.unlink()
    library.write_bytes(Path("/lib/x86_64-linux-gnu/libm.so.6").resolve().read_bytes())
    with pytest.raises(Refused, match=r"/data/library.so is another file here"):
        bench.restore()
    assert left_behind(bench) == []


def test_an_image_of_open_files_keeps_everything_but_what_was_picked(bench: Bench, tmp_path: Path) -> None:
    bench.python(LINKED)
    bench.until_output("5 1 5\n")
    saved = bench.save()
    images = saved.manifest.images
    place = [image.name for image in images].index("files.img")
    at = sum(image.size for image in images[:place])
    image = tmp_path / "files.img"
    packed = b"".join(bench.chunks.get(key) for key in saved.manifest.packed.chunks)
    original = packed[at : at + images[place].size]
    image.write_bytes(original)
    seen: list[OpenRegularFile] = []

    def look(file: OpenRegularFile) -> bool:
        seen.append(file)
        return False

    forget_sizes(image, look)
    assert image.read_bytes() == original
    by_path = {file.path: file for file in seen}
    assert by_path["/.savedworker/status"].size == 0
    python = next(file for file in seen if file.path.startswith("/usr/bin/python3"))
    assert python.program
    assert python.size == os.stat(python.path).st_size
    forget_sizes(image, lambda file: file.path == "/.savedworker/status")
    seen.clear()
    forget_sizes(image, look)
    changed = [file for file in seen if file != by_path[file.path]]
    assert [(file.path, file.size, file.mode) for file in changed] == [("/.savedworker/status", None, None)]
    for broken in (b"", b"nonsense", original[:-3]):
        image.write_bytes(broken)
        with pytest.raises(Fatal):
            forget_sizes(image, look)
        assert image.read_bytes() == broken


def test_nothing_is_ever_deleted_through_a_mount_that_somebody_left_below_a_container(
    bench: Bench, tmp_path: Path
) -> None:
    """A CRIU that was killed leaves the machine's cgroup hierarchies mounted in its work directory."""
    precious = tmp_path / "precious"
    (precious / "empty").mkdir(parents=True)
    (precious / "file").write_text("kept")
    bench.python("import time\nprint('ready', flush=True)\ntime.sleep(1000)\n")
    bench.until_output("ready")
    left = bench.container.home.criu_work / "left behind"
    left.mkdir()
    subprocess.run(["mount", "--bind", precious, left], check=True)
    bench.container.teardown()
    assert left_behind(bench) == []
    assert (precious / "file").read_text() == "kept"
    assert (precious / "empty").is_dir()
