"""What a restore does with a manifest and images of a stranger: it refuses, and touches nothing outside of its home."""

from __future__ import annotations

import os
import socket
import stat
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from savedworker.checkpoint import bundle, container, images
from savedworker.checkpoint import restore as restoring
from savedworker.checkpoint.container import Home
from savedworker.checkpoint.fetching import Fetching
from savedworker.checkpoint.fingerprinting import FileDigests, same_files_here
from savedworker.checkpoint.keys import read_index
from savedworker.checkpoint.layer import Entry
from savedworker.checkpoint.migration_file import add_migration, tell_incarnation
from savedworker.checkpoint.mountinfo import mounts_below
from savedworker.model.errors import BadSpec, Corrupt, Fatal, SavedWorkerError
from savedworker.model.fingerprint import Fingerprint
from savedworker.model.manifest import (
    ImageFile,
    Manifest,
    MemoryGroup,
    OpenVolumeFile,
    StoredFile,
    StoredMemory,
)
from savedworker.model.spec import Volume
from savedworker.store.backend import open_store
from savedworker.store.chunks import ChunkStore
from tests.hostile.material import AT, KEY, MANIFEST, few

PRECIOUS = b"0123456789"


class Ground:
    """A volume and, beside it, something precious; the container is only what ``_mend_volumes`` looks at."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.volume = folder / "volume"
        self.volume.mkdir()
        (self.volume / "log").write_bytes(PRECIOUS)
        self.precious = folder / "precious"
        self.precious.write_bytes(PRECIOUS)
        home = Home(folder / "home")
        (home.path / "images").mkdir(parents=True)
        self.files = home.path / "images/files.img"
        volumes = (Volume(source=str(self.volume), target="/data"),)
        self.container: Any = SimpleNamespace(spec=SimpleNamespace(volumes=volumes), home=home)

    def mend(self, *files: OpenVolumeFile) -> list[str]:
        from savedworker.checkpoint.open_files_image import _MAGIC

        self.files.write_bytes(_MAGIC)
        manifest = MANIFEST.model_copy(update={"volume_files": files})
        return restoring._mend_volumes(self.container, manifest)


def cut(path: str, size: int = 3, volume: str = "/data") -> OpenVolumeFile:
    return OpenVolumeFile(path=path, volume=volume, size=size, append=True)


@pytest.fixture
def ground(tmp_path: Path) -> Ground:
    return Ground(tmp_path)


def test_a_file_that_grew_is_cut_back(ground: Ground) -> None:
    assert ground.mend(cut("log")) == ["/data/log: cut back by 7 bytes to the checkpoint"]
    assert (ground.volume / "log").read_bytes() == PRECIOUS[:3]


def test_no_path_in_a_manifest_leads_out_of_the_volume(ground: Ground) -> None:
    precious = str(ground.precious)
    for path in (
        precious,
        "/" + precious,
        "../precious",
        "a/../../precious",
        "/",
        "",
        "..",
        "./../precious",
        "log/",
        "a\0b",
        "//etc/passwd",
    ):
        with pytest.raises(Corrupt):
            ground.mend(cut(path))
    with pytest.raises(Corrupt):
        ground.mend(cut("log", volume="/other"))
    assert ground.precious.read_bytes() == PRECIOUS


def test_a_size_beyond_all_disks_changes_nothing(ground: Ground) -> None:
    assert ground.mend(cut("log", size=(1 << 63) - 1)) == []
    assert (ground.volume / "log").read_bytes() == PRECIOUS


def test_nothing_that_a_worker_puts_on_its_volume_is_followed_or_opened(ground: Ground) -> None:
    (ground.volume / "link").symlink_to(ground.precious)
    (ground.volume / "folder").symlink_to(ground.folder)
    os.mkfifo(ground.volume / "fifo")
    os.mknod(ground.volume / "zero", stat.S_IFCHR | 0o600, os.makedev(1, 5))
    socket.socket(socket.AF_UNIX).bind(str(ground.volume / "socket"))
    reader = os.open(ground.volume / "fifo", os.O_RDONLY | os.O_NONBLOCK)
    started = time.monotonic()
    for path in ("link", "folder/precious", "fifo", "zero", "socket", ".", "missing", "x" * 300, "\udcff"):
        (note,) = ground.mend(cut(path))
        assert "cannot be opened here" in note
    os.close(reader)
    assert time.monotonic() - started < 30
    assert ground.precious.read_bytes() == PRECIOUS


@few
@given(st.text(alphabet="./a~\0\n", max_size=12))
@example("/../..")
def test_whatever_the_path_only_files_below_the_volume_are_opened(tmp_path_factory: Any, path: str) -> None:
    root = tmp_path_factory.mktemp("v") / "volume"
    (root / "a").mkdir(parents=True)
    (root / "a/a").write_text("x")
    try:
        opened = restoring._open_below(root, path, os.O_RDONLY)
    except OSError:
        return
    assert os.readlink(f"/proc/self/fd/{opened}").startswith(f"{root}/")
    os.close(opened)


@pytest.fixture
def chunks(tmp_path: Path) -> ChunkStore:
    return ChunkStore(open_store(str(tmp_path / "store")), "w", known=())


def test_an_index_that_says_one_chunk_a_million_times_takes_no_memory(chunks: ChunkStore) -> None:
    key = chunks.put(bytes(4 << 20))
    stored = StoredFile(name="layer", size=5 << 20, chunks=(key,) * 200_000)
    started = time.monotonic()
    with pytest.raises(Corrupt):
        read_index(stored, chunks)
    assert time.monotonic() - started < 30
    with pytest.raises(Corrupt, match="claims"):
        read_index(StoredFile(name="layer", size=1 << 50, chunks=(key,)), chunks)


def fetch_images(manifest: Manifest, chunks: ChunkStore, folder: Path) -> None:
    fetching = Fetching(chunks)
    with restoring._Rebuilding(fetching, None) as rebuilding:
        restoring._fetch_images(manifest, fetching, folder, rebuilding)


def test_an_image_that_says_one_chunk_a_million_times_does_not_fill_the_disk(
    chunks: ChunkStore, tmp_path: Path
) -> None:
    key = chunks.put(bytes(1 << 20))
    manifest = MANIFEST.model_copy(
        update={
            "images": (ImageFile(name="files.img", size=1 << 20),),
            "packed": StoredFile(name="packed", size=1 << 20, chunks=(key,) * 200_000),
            "memory": (),
        }
    )
    started = time.monotonic()
    with pytest.raises(Corrupt, match="do not have the"):
        fetch_images(manifest, chunks, tmp_path / "images")
    assert time.monotonic() - started < 30
    assert sum(x.stat().st_size for x in (tmp_path / "images").iterdir()) <= 1 << 20


FILES = ImageFile(name="files.img", size=0)
NOTHING = StoredFile(name="packed", size=0, chunks=())
SPACE = MANIFEST.memory[0]


@pytest.mark.parametrize("update", [
    {"images": (), "packed": NOTHING},
    {"images": (ImageFile(name="pages.img", size=0),), "packed": NOTHING},
    {"images": (FILES, FILES), "packed": NOTHING},
    {"images": (ImageFile(name="files.img", size=(1 << 63) - 1),), "packed": StoredFile(name="p", size=(1 << 63) - 1, chunks=())},
    {"images": (ImageFile(name="files.img", size=5),), "packed": StoredFile(name="packed", size=5, chunks=(KEY,))},
    {"images": (ImageFile(name="files.img", size=5),), "packed": NOTHING},
    {"images": (FILES,), "packed": NOTHING, "memory": (SPACE.model_copy(update={"size": (1 << 63) - 1}),)},
    {"images": (FILES,), "packed": NOTHING, "memory": (SPACE, SPACE)},
    {"images": (FILES,), "packed": NOTHING, "memory": (SPACE.model_copy(update={"pages": "files.img"}),)},
    {"images": (FILES,), "packed": NOTHING, "memory": (SPACE,)},
    {"images": (FILES, ImageFile(name="x.img", size=8192)), "packed": NOTHING, "memory": (
        SPACE.model_copy(update={"name": "x.img", "pages": "x.img", "size": 8192}), SPACE.model_copy(update={"name": "x.img"}))},
    {"images": (FILES, ImageFile(name="pagemap-1.img", size=1 << 30)), "packed": NOTHING, "memory": (SPACE.model_copy(update={
        "name": "pagemap-1.img", "pages": "pagemap-1.img", "size": 1 << 30, "groups": (MemoryGroup(key=KEY, windows=tuple(range(256))),)}), SPACE)},
], ids=["none", "without files.img", "one twice", "larger than the disk", "a chunk that is not there", "sizes that differ",
        "memory larger than the disk", "memory twice", "memory over an image", "memory without a pagemap",
        "a pagemap of another name", "a pagemap that is too long"])  # fmt: skip
def test_images_that_cannot_be_a_checkpoint_are_refused(
    chunks: ChunkStore, tmp_path: Path, update: dict[str, Any]
) -> None:
    manifest = MANIFEST.model_copy(update={"memory": (), **update})
    with pytest.raises((Corrupt, Fatal)):
        fetch_images(manifest, chunks, tmp_path / "images")


GROUP = MemoryGroup(key=KEY, windows=(0,))
OF_SHM = StoredMemory(name="shm-1", pages=None, size=4096, groups=(GROUP,))


@pytest.mark.parametrize(("memory", "runs"), [
    ((), [(0, 1)]),
    ((OF_SHM,), None),
    ((OF_SHM, OF_SHM.model_copy(update={"name": "shm-2"})), [(0, 1)]),
    ((OF_SHM, OF_SHM), [(0, 1)]),
    ((OF_SHM.model_copy(update={"name": "shm-2"}),), [(0, 1)]),
    ((OF_SHM.model_copy(update={"pages": "pages-1.img"}),), [(0, 1)]),
    ((OF_SHM,), [(0, 5000)]),
    ((OF_SHM,), []),
    ((OF_SHM,), [(4 << 20, 4096)]),
    ((OF_SHM.model_copy(update={"size": 1 << 60}),), [(0, 1 << 60)]),
    ((OF_SHM.model_copy(update={"size": 1 << 44, "groups": (MemoryGroup(key=KEY, windows=(0,) * (1 << 22)),)}),), [(0, 1 << 44)]),
    ((OF_SHM,), [(0, 1)]),
], ids=["no memory", "no file", "more memory", "memory twice", "other memory", "an image", "more pages", "fewer pages", "another window",
        "endless", "endless by one window", "a chunk that is not there"])  # fmt: skip
def test_shared_memory_that_cannot_be_a_checkpoint_is_refused(
    chunks: ChunkStore,
    tmp_path: Path,
    memory: tuple[StoredMemory, ...],
    runs: list[tuple[int, int]] | None,
) -> None:
    manifest = MANIFEST.model_copy(update={"memory": (SPACE, *memory)})
    files = []
    if runs is not None:
        (tmp_path / "file").touch()
        entry = Entry("file", "file", size=1 << 60, space="shm-1", runs=tuple(runs))
        files = [(entry, tmp_path / "file")]
    started = time.monotonic()
    with (
        restoring._Rebuilding(Fetching(chunks), None) as rebuilding,
        pytest.raises(Corrupt),
    ):
        restoring._fill_shm(manifest, rebuilding, files)
    assert time.monotonic() - started < 30


def test_no_file_that_a_fingerprint_names_is_waited_for_or_read_without_end(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "fifo")
    (tmp_path / "real").write_text("x")
    (tmp_path / "endless").symlink_to("/dev/zero")
    names = [
        "/fifo",
        "/endless",
        "/real",
        "/../real",
        "/a/../real",
        "//real",
        "",
        "/",
        "/a\0b",
        "/" + "x" * 5000,
        "/real/x",
    ]
    started = time.monotonic()
    found = same_files_here(
        Fingerprint(machine="m", mapped_files=dict.fromkeys(names, "d")), tmp_path, FileDigests()
    )
    assert set(found) == {"/real", "//real"}
    names = [
        "/dev/zero",
        "/dev/random",
        "/proc/kmsg",
        "/proc/kcore",
        "/dev/tty",
        "/sys/kernel/mm/transparent_hugepage/enabled",
    ]
    assert (
        same_files_here(
            Fingerprint(machine="m", mapped_files=dict.fromkeys(names, "d")), Path("/"), FileDigests()
        )
        == {}
    )
    assert time.monotonic() - started < 30


# The folder /.savedworker, where the worker's root may have done anything


class Layer:
    """A live overlay, as the agent sees it, and a victim outside of it."""

    def __init__(self, folder: Path) -> None:
        self.victim = folder / "victim"
        self.victim.mkdir()
        (self.victim / "migrations.json").write_bytes(PRECIOUS)
        (self.victim / "incarnation").write_bytes(PRECIOUS)
        self.parts = {x: folder / x for x in ("lower", "upper", "work", "rootfs")}
        for part in self.parts.values():
            part.mkdir()
        (self.parts["lower"] / "etc").mkdir()
        self.rootfs = self.parts["rootfs"]
        options = (
            f"lowerdir={self.parts['lower']},upperdir={self.parts['upper']},workdir={self.parts['work']}"
        )
        container._mount("overlay", self.rootfs, "overlay", 0, options)
        self.folder = self.rootfs / bundle.RUNTIME_FOLDER
        self.folder.mkdir()

    def tell(self) -> None:
        started = time.monotonic()
        add_migration(self.rootfs, "1-1", AT, AT)
        tell_incarnation(self.rootfs, 2)
        assert time.monotonic() - started < 30

    def unharmed(self) -> bool:
        return {x.name: x.read_bytes() for x in self.victim.iterdir()} == dict.fromkeys(
            ("migrations.json", "incarnation"), PRECIOUS
        )


@pytest.fixture
def layer() -> Iterator[Layer]:
    import shutil
    import tempfile

    folder = Path(tempfile.mkdtemp(prefix="sw-hostile-", dir="/var/tmp"))
    made = Layer(folder)
    try:
        yield made
    finally:
        container.unmount_below(folder)
        assert mounts_below(folder) == []
        shutil.rmtree(folder)


def _link_file(x: Layer) -> None:
    for name in ("migrations.json", "incarnation", ".migrations.json.new", ".incarnation.new"):
        (x.folder / name).symlink_to(x.victim / "incarnation")


def _link_folder(x: Layer) -> None:
    x.folder.rmdir()
    x.folder.symlink_to(x.victim)


def _hard_link(x: Layer) -> None:
    (x.rootfs / "mine").write_bytes(PRECIOUS)
    for name in ("migrations.json", ".migrations.json.new", ".incarnation.new"):
        os.link(x.rootfs / "mine", x.folder / name)


def _fifos(x: Layer) -> None:
    for name in ("migrations.json", "incarnation", ".migrations.json.new"):
        os.mkfifo(x.folder / name)


def _devices(x: Layer) -> None:
    for name in ("migrations.json", "incarnation"):
        os.mknod(x.folder / name, stat.S_IFCHR | 0o600, os.makedev(1, 5))


def _sockets(x: Layer) -> None:
    socket.socket(socket.AF_UNIX).bind(str(x.folder / "migrations.json"))


def _huge(x: Layer) -> None:
    (x.folder / "migrations.json").touch()
    os.truncate(x.folder / "migrations.json", 1 << 42)


def _deep(x: Layer) -> None:
    (x.folder / "migrations.json").write_text("[" * 900 + "]" * 900)


def _wide_and_deep(x: Layer) -> None:
    (x.folder / "migrations.json").write_text("[" + ",".join(["[" * 400 + "]" * 400] * 1000) + "]")


def _surrogates(x: Layer) -> None:
    (x.folder / "migrations.json").write_text(
        '[{"checkpoint": "\\ud800", "frozen_at": NaN, "restored_at": 1e999, "seconds_away": "x"}]'
    )


@pytest.mark.parametrize("attack", [
    _link_file, _hard_link, _fifos, _devices, _sockets, _huge, _deep, _wide_and_deep, _surrogates,
], ids=lambda f: f.__name__.strip("_").replace("_", " "))  # fmt: skip
def test_the_worker_is_told_of_its_migration_whatever_it_left_in_the_way(
    layer: Layer, attack: Callable[[Layer], None]
) -> None:
    attack(layer)
    layer.tell()
    assert layer.unharmed()
    assert (layer.folder / "incarnation").read_text() == "2\n"
    told = (layer.folder / "migrations.json").read_text()
    assert '"checkpoint": "1-1"' in told
    assert len(told) < 100_000
    if (layer.rootfs / "mine").exists():
        assert (layer.rootfs / "mine").read_bytes() == PRECIOUS


def _no_folder(x: Layer) -> None:
    x.folder.rmdir()


def _file_for_folder(x: Layer) -> None:
    x.folder.rmdir()
    x.folder.write_text("mine")


def _fifo_for_folder(x: Layer) -> None:
    x.folder.rmdir()
    os.mkfifo(x.folder)


def _folders_for_files(x: Layer) -> None:
    for name in ("migrations.json", "incarnation", ".migrations.json.new", ".incarnation.new"):
        (x.folder / name / "full").mkdir(parents=True)


def _dangling(x: Layer) -> None:
    x.folder.rmdir()
    x.folder.symlink_to("/nonexistent/place")


@pytest.mark.parametrize("attack", [
    _link_folder, _no_folder, _file_for_folder, _fifo_for_folder, _folders_for_files, _dangling,
], ids=lambda f: f.__name__.strip("_").replace("_", " "))  # fmt: skip
def test_where_the_worker_cannot_be_told_nothing_happens(
    layer: Layer, attack: Callable[[Layer], None]
) -> None:
    attack(layer)
    layer.tell()
    assert layer.unharmed()


# Images that a stranger made


def place_first_files(layer: Layer) -> None:
    made: Any = SimpleNamespace(
        home=SimpleNamespace(rootfs=layer.rootfs), network=None, runtime=SimpleNamespace(hostname="w")
    )
    container.Container._first_files(made, 1000, 1000)


@pytest.mark.parametrize("what", ["link", "fifo", "device", "hard link"])
def test_whatever_an_image_has_as_its_hosts_file_nothing_outside_is_written(layer: Layer, what: str) -> None:
    layer.folder.rmdir()
    hosts = layer.rootfs / "etc/hosts"
    if what == "link":
        hosts.symlink_to(layer.victim / "incarnation")
    elif what == "fifo":
        os.mkfifo(hosts)
    elif what == "device":
        os.mknod(hosts, stat.S_IFCHR | 0o600, os.makedev(1, 7))  # /dev/full: a write would fail
    else:
        (layer.rootfs / "other").write_text("x")
        os.link(layer.rootfs / "other", hosts)
    place_first_files(layer)
    assert layer.unharmed()
    assert hosts.read_text().endswith("\tw\n")
    assert stat.S_ISREG(hosts.lstat().st_mode)


@pytest.mark.parametrize(
    "what", ["link", "file", "init is a folder", "status is a folder", "hosts is a folder"]
)
def test_an_image_with_something_in_the_runtimes_place_is_refused_by_name(layer: Layer, what: str) -> None:
    if what == "link":
        _link_folder(layer)
    elif what == "file":
        _file_for_folder(layer)
    elif what == "hosts is a folder":
        (layer.rootfs / "etc/hosts").mkdir()
    else:
        (layer.folder / what.split()[0]).mkdir()
    with pytest.raises(BadSpec):
        place_first_files(layer)
    assert layer.unharmed()


def test_an_etc_that_leads_out_of_the_image_is_left_alone(layer: Layer) -> None:
    (layer.rootfs / "etc").rmdir()
    (layer.rootfs / "etc").symlink_to(layer.victim)
    place_first_files(layer)
    assert layer.unharmed()


PASSWD = [
    b"root:x:0:0:r:/root:/bin/sh\n",
    b"u:x:99999999999:1:::\n",
    b"u:x:4294967295:1:::\n",
    "u:x:²:1:::\n".encode(),
    b"u:x:1:many:::\n",
    b"u:x:-1:-1:::\n",
    b"u:x:" + b"9" * 5000 + b":1:::\n",
    b"\xff\xfe\0" * 100,
    b":" * 10_000,
]


@pytest.mark.parametrize("content", PASSWD, ids=range(len(PASSWD)))
def test_a_user_table_of_any_content_gives_a_number_that_a_process_can_have(
    tmp_path: Path, content: bytes
) -> None:
    (tmp_path / "etc").mkdir()
    for name in ("passwd", "group"):
        (tmp_path / "etc" / name).write_bytes(content)
    for user in ("u", "u:u", "1000", "1:u"):
        try:
            uid, gid, more, _ = images.find_user(tmp_path, user)
        except BadSpec:
            continue
        assert all(0 <= x < (1 << 32) - 1 for x in (uid, gid, *more))


@pytest.mark.parametrize("what", ["fifo", "endless", "huge", "folder"])
def test_a_user_table_that_is_no_file_is_not_waited_for(tmp_path: Path, what: str) -> None:
    (tmp_path / "etc").mkdir()
    passwd = tmp_path / "etc/passwd"
    if what == "fifo":
        os.mkfifo(passwd)
    elif what == "endless":
        passwd.symlink_to("/dev/zero")
    elif what == "huge":
        passwd.touch()
        os.truncate(passwd, 1 << 42)
    else:
        passwd.mkdir()
    started = time.monotonic()
    with pytest.raises(SavedWorkerError):
        images.find_user(tmp_path, "u")
    assert time.monotonic() - started < 30
