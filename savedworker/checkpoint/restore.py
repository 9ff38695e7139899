"""Bringing one checkpoint back on this instance: check, fetch and verify everything, rebuild the files, restore.

Nothing is used before it is verified: a truncated pages image makes CRIU loop for ever, a flipped page would come back as
silently wrong memory (PLATFORM hazard 5).
"""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import shutil
import stat
from collections.abc import Callable, Sequence
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import partial
from pathlib import Path

from savedworker.checkpoint import affinity, criu_errors, hooks, images, layer
from savedworker.checkpoint.container import Container, Home
from savedworker.checkpoint.fetching import Fetching
from savedworker.checkpoint.fingerprinting import FileDigests, instance_fingerprint, same_files_here
from savedworker.checkpoint.free_memory import rooms
from savedworker.checkpoint.keys import chunk_keys, read_index
from savedworker.checkpoint.memory import Keep, Target, file_target, image_targets, rebuild, shm_size
from savedworker.checkpoint.memory.pagemap import PAGE
from savedworker.checkpoint.migration_file import add_migration, tell_incarnation
from savedworker.checkpoint.network import reset_all
from savedworker.checkpoint.open_files_image import OpenRegularFile, forget_sizes, rearm_timers
from savedworker.checkpoint.save import tcp_option, volume_of
from savedworker.checkpoint.tools import Tools
from savedworker.checkpoint.watchdog import watching
from savedworker.crashpoints import crash_point
from savedworker.model.errors import Corrupt, Fatal, Refused
from savedworker.model.fingerprint import mismatches
from savedworker.model.manifest import Manifest
from savedworker.model.room import Place, choose_place, memory_need
from savedworker.model.spec import WorkerSpec
from savedworker.model.units import format_size
from savedworker.store.chunks import ChunkStore

log = logging.getLogger(__name__)

MAX_LOG = 64 << 20
"""Bytes of CRIU's log after which a restore counts as running in circles; 2 GiB of worker make some hundred KiB."""
_PATIENCE = 60.0
_SLACK = 16 << 20
"""Bytes of a tmpfs beyond the images in it."""
_RESTORE_RATE = 50 << 20
"""Bytes per second that even a slow disk gives."""


class Incompatible(Refused):
    """This instance cannot take the checkpoint; another one may."""

    code = "incompatible"


@dataclass(frozen=True)
class Came:
    """How a restore went. ``notes`` are lines that people should see."""

    notes: tuple[str, ...]
    snapshot: layer.Snapshot
    shm: layer.Snapshot
    keys: frozenset[str]
    """Of all chunks of the checkpoint."""


Launch = Callable[[list[str]], None]
"""Runs a runc command with the worker's stdio and returns when it has ended well; raises otherwise."""


def check_instance(manifest: Manifest, spec: WorkerSpec, tools: Tools, lower: Path) -> None:
    """Raise Incompatible when this instance does not match the checkpoint's fingerprint. Downloads nothing."""
    here = instance_fingerprint(tools, spec.image)
    here = here.model_copy(
        update={"mapped_files": same_files_here(manifest.fingerprint, lower, FileDigests())}
    )
    reasons = mismatches(manifest.fingerprint, here)
    if reasons:
        more = f" and {len(reasons) - 3} more" if len(reasons) > 3 else ""
        raise Incompatible(
            f"checkpoint {manifest.number} does not fit this instance: {'; '.join(reasons[:3])}{more}",
            "use instances of one kind with the same image",
        )


def check_runtime(manifest: Manifest, spec: WorkerSpec) -> None:
    """Raise Corrupt when the manifest asks for another container than the spec of the worker does."""
    found = manifest.runtime
    if (found.hostname, found.network, found.syscalls) != (spec.id[:63], spec.network, spec.syscalls):
        raise Corrupt(f"checkpoint {manifest.number} asks for another container than the worker's spec")
    if found.image and not (spec.image.startswith(images.REGISTRY) and images.is_digest(found.image)):
        raise Corrupt(f"checkpoint {manifest.number} asks for an image that is not the spec's")
    for folder in found.masked:
        if (
            not folder.startswith("/")
            or "\0" in folder
            or ".." in folder.split("/")
            or folder.strip("/") == ""
        ):
            raise Corrupt(
                f"checkpoint {manifest.number} hides {folder[:200]!a}, which is no folder of the host"
            )


def restore(
    container: Container,
    manifest: Manifest,
    chunks: ChunkStore,
    launch: Launch,
    incarnation: int,
    keep: Keep | None = None,
) -> Came:
    """Restore ``manifest`` into ``container`` (not prepared yet; its runtime must be the manifest's) as ``incarnation``.

    ``launch`` runs runc with the worker's stdio. ``keep`` is given what the next checkpoint will be told against.
    Raises Corrupt when stored data is damaged, Refused or Fatal when CRIU refuses. When it raises, nothing is left on the instance.
    """
    check_runtime(manifest, container.spec)
    notes: list[str] = []
    snapshots: list[layer.Snapshot] = []
    keys: list[frozenset[str]] = []

    def fill(home: Home) -> None:
        upper, shm = read_index(manifest.layer, chunks), read_index(manifest.shm, chunks)
        keys.append(chunk_keys(manifest, upper, shm))
        in_memory = _place_images(container, manifest, shm, chunks.budget)
        if keep is not None:
            keep.leave_room(_size(upper))
        # What has no memory of its own is fetched beside what has: the store's answers are waited for once.
        fetching = Fetching(chunks)

        # On a disk the images themselves are what there is room, and time, for.
        rebuilding = _Rebuilding(fetching, keep if in_memory else None)

        def extract(index: layer.LayerIndex, target: Path, fill: layer.Fill | None = None) -> layer.Snapshot:
            with fetching.part():
                return layer.extract(index, fetching.get, target, threads=2, fill=fill)

        with rebuilding, ThreadPoolExecutor(2, thread_name_prefix="restore") as pool, fetching.part():
            under_way = [
                pool.submit(extract, upper, home.upper),
                pool.submit(extract, shm, home.shm, partial(_fill_shm, manifest, rebuilding)),
            ]
            _fetch_images(manifest, fetching, home.images, rebuilding)
            crash_point("restore.images.after")
            snapshots.extend(extracted.result() for extracted in under_way)
            crash_point("restore.layer.after")
        container.shm_restored = shm_size(home.shm)
        if keep is not None:
            keep.close()

    home = container.home
    try:
        container.prepare(fill)
        notes += _mend_volumes(container, manifest)
        rearm_timers(home.images / "files.img")
        pids = container.cgroup.pids

        def before_thaw() -> None:
            crash_point("restore.thaw.before")
            if container.network is not None:
                closed = len(container.network.destroy_outbound(pids()))
                lost = container.network.destroy_one_sided()
                if lost:
                    notes.append(
                        f"{lost} connections inside the worker were closed: they were not accepted yet"
                    )
            else:
                closed = reset_all(pids())
            if closed:
                notes.append(f"{closed} outside connections were closed")

        def restored() -> None:
            # CRIU runs network-unlock only where it restores a network namespace.
            if container.network is None:
                before_thaw()
            notes.extend(affinity.bring_back(pids(), home.images))
            add_migration(home.rootfs, manifest.number, manifest.frozen_at, datetime.now(UTC))
            tell_incarnation(home.rootfs, incarnation)

        actions = {"post-restore": restored}
        if container.network is not None:
            actions["network-unlock"] = before_thaw
        with hooks.serving(home.path, actions) as (script, failure):
            home.criu_conf.write_text(
                f"{tcp_option(container)}\nnetwork-lock skip\ncpu-cap\naction-script {script}\n"
                + ("auto-dedup\n" if os.path.ismount(home.images) else "")
            )
            crash_point("restore.runc.before")
            patience = _PATIENCE + _image_size(manifest) / _RESTORE_RATE
            with watching(home.criu_work / "restore.log", MAX_LOG, patience) as ended:
                try:
                    launch(container.restore_command(home.images))
                except Fatal as error:
                    if failure.error is not None:
                        raise failure.error from error
                    kept = _keep_log(home)
                    if ended.why:
                        raise Fatal(
                            f"CRIU made no end of the restore: {ended.why}", f"its log is {kept}"
                        ) from error
                    raise criu_errors.explain(kept, container.runc_words()) from error
        crash_point("restore.runc.after")
        container.drop_images()
        return Came(tuple(notes), snapshots[0], snapshots[1], keys[0])
    except BaseException:
        if keep is not None:
            try:
                keep.undo()  # it writes below the container's home
            except OSError as error:
                log.warning("the base of the memory cannot be taken away: %s", error)
        container.teardown()
        raise


def _keep_log(home: Home) -> Path:
    """CRIU's log, moved out of what is about to be removed."""
    kept = home.path.with_name("last-restore.log")
    with contextlib.suppress(OSError):
        shutil.move(home.criu_work / "restore.log", kept)
    return kept


def _size(index: layer.LayerIndex) -> int:
    """Bytes of the data of its files."""
    return sum(sum(x.length for x in entry.data) + sum(x for _, x in entry.runs) for entry in index.entries)


def _place_images(container: Container, manifest: Manifest, shm: layer.LayerIndex, budget: int) -> bool:
    """Have the images in memory if there is room: what is written to a disk is throttled beyond a share of the memory. Whether they are.

    CRIU then gives back what it has read (``auto-dedup``), so that worker and images are there at once only for a part.
    """
    size = _image_size(manifest)
    spaces = len(manifest.image_memory)
    processes = sum(x.name != x.pages for x in manifest.image_memory)
    need = memory_need(size, processes, _size(shm), budget)
    place = choose_place(need, rooms())
    if place.in_memory:
        # In whole pages; the small ones may be written anew.
        slack = _SLACK + manifest.packed.size + (len(manifest.images) + spaces) * PAGE
        try:
            container.hold_images_in_memory(size + slack)
        except OSError as error:
            place = Place(False, f"a tmpfs cannot be mounted: {error.strerror}")
    log.info(
        "the images of checkpoint %s (%s) are put %s: %s",
        manifest.number,
        format_size(size),
        "in memory" if place.in_memory else "on disk",
        place.why,
    )
    return place.in_memory


class _Rebuilding:
    """Rebuilds spaces, all of them with the same threads. To be used as a context manager."""

    def __init__(self, chunks: Fetching, keep: Keep | None) -> None:
        self._chunks, self._keep = chunks, keep
        self._pool = ThreadPoolExecutor(chunks.shares.threads, thread_name_prefix="restore")

    def __enter__(self) -> _Rebuilding:
        return self

    def __exit__(self, *_: object) -> None:
        self._pool.shutdown(wait=True, cancel_futures=True)

    def run(self, targets: Sequence[Target]) -> None:
        """Write the pages of all of them, each verified. The first that fails ends the others. Raises as ``rebuild``."""
        kept = (lambda *_: None) if self._keep is None else self._keep.offer
        # Twice at most: of the images and of /dev/shm.
        most = self._chunks.shares.waiting // 8
        under_way = rebuild(targets, self._chunks.view, self._pool, most, kept)
        for part in wait(under_way, return_when=FIRST_EXCEPTION).done:
            part.result()


def _fill_shm(manifest: Manifest, rebuilding: _Rebuilding, files: list[tuple[layer.Entry, Path]]) -> None:
    """Write the files of ``/dev/shm`` that are spaces."""
    stored = {x.name: x for x in manifest.shm_memory}
    if sorted(x.name for x in manifest.shm_memory) != sorted(entry.space or "" for entry, _ in files):
        raise Corrupt(f"the memory of checkpoint {manifest.number} is not that of its files in /dev/shm")
    targets = [file_target(stored[x.space], x.runs, path, x.size) for x, path in files if x.space]
    try:
        rebuilding.run(targets)
    except OSError as error:
        raise Fatal(
            f"the checkpoint's /dev/shm cannot be written: {error.strerror or error}",
            "give the instance more memory",
        ) from error


def _fetch_images(manifest: Manifest, chunks: Fetching, folder: Path, rebuilding: _Rebuilding) -> None:
    """Write CRIU's images into ``folder``, in parallel, each part of them verified. The first part that fails ends the others."""
    sizes = {file.name: file.size for file in manifest.images}
    names = [file.name for file in manifest.packed_images] + [x.pages for x in manifest.image_memory]
    need = _image_size(manifest)
    if (
        len(set(names)) != len(names)
        or "files.img" not in names
        or sum(file.size for file in manifest.packed_images) != manifest.packed.size
    ):
        raise Corrupt(f"the images of checkpoint {manifest.number} are not a set of CRIU's images")
    folder.mkdir(mode=0o700, exist_ok=True)
    disk = os.statvfs(folder)
    if disk.f_bavail * disk.f_frsize < need:
        raise Fatal(
            f"the checkpoint's images need {need} bytes on {folder}", "give the instance a larger disk"
        )
    _unpack(manifest, chunks, folder)
    crash_point("restore.images.small")
    try:
        rebuilding.run(image_targets(manifest.image_memory, folder, sizes))
    except OSError as error:
        raise Fatal(
            f"the checkpoint's images cannot be written to {folder}: {error.strerror or error}",
            "give the instance a larger disk",
        ) from error


def _image_size(manifest: Manifest) -> int:
    return manifest.packed.size + sum(space.size for space in manifest.image_memory)


def _unpack(manifest: Manifest, chunks: Fetching, folder: Path) -> None:
    """The small images, from one stream of their contents."""
    wrong = f"the small images of checkpoint {manifest.number} do not have the {manifest.packed.size} bytes that they should"
    stream = chunks.get_many(manifest.packed.chunks)
    data = memoryview(b"")
    for file in manifest.packed_images:
        left = file.size
        with (folder / file.name).open("xb") as out:
            while left:
                if not data:
                    piece: bytes = next(stream, b"")
                    if not piece:
                        raise Corrupt(wrong)
                    data = memoryview(piece)
                out.write(data[:left])
                data, left = data[left:], left - len(data[:left])
    if data or any(stream):
        raise Corrupt(wrong)


def _mend_volumes(container: Container, manifest: Manifest) -> list[str]:
    """Bring append-only files on volumes back to where the checkpoint knew them; say what cannot be brought back.

    CRIU is told not to insist on the size of what differs then: the worker goes on with the file as it is.
    """
    notes: dict[str, str] = {}
    volumes = {v.target: v for v in container.spec.volumes}
    for file in manifest.volume_files:
        volume = volumes.get(file.volume)
        if volume is None or volume.read_only or not _is_below(file.path):
            raise Corrupt(
                f"checkpoint {manifest.number} names {file.path[:200]!a} on a volume that the spec does not have"
            )
        where = os.path.normpath(f"{file.volume}/{file.path}")
        with contextlib.ExitStack() as opened:
            try:
                fd = _open_below(Path(volume.source), file.path)
            except OSError as error:
                notes[where] = f"{where} is not captured and cannot be opened here: {error.strerror}"
                continue
            opened.callback(os.close, fd)
            size = os.fstat(fd).st_size
            if file.append and size > file.size:
                try:
                    os.ftruncate(fd, file.size)
                except OSError as error:
                    notes[where] = f"{where} is not captured and cannot be cut back here: {error.strerror}"
                    continue
                notes[where] = f"{where}: cut back by {size - file.size} bytes to the checkpoint"

    def differs(file: OpenRegularFile) -> bool:
        """Whether this file of a volume is another than at the dump. A program must be the same: CRIU shall refuse it."""
        volume = volume_of(file.path, container.spec.volumes)
        if volume is None or file.program or file.size is None:
            return False
        try:
            fd = _open_below(Path(volume.source), os.path.relpath(file.path, volume.target), os.O_RDONLY)
        except OSError:
            return False
        try:
            found = os.fstat(fd)
        finally:
            os.close(fd)
        if found.st_size != file.size:
            notes.setdefault(
                file.path,
                f"{file.path} is not captured: it has {found.st_size} bytes, the checkpoint knew {file.size}",
            )
        return found.st_size != file.size or found.st_mode != file.mode

    if volumes:
        forget_sizes(container.home.images / "files.img", differs)
    return list(notes.values())


def _is_below(relative: str) -> bool:
    """Whether ``relative`` names a file below the folder that it is told from, or (``.``) that one itself."""
    parts = relative.split("/")
    return relative == "." or not ({"", ".", ".."} & set(parts) or "\0" in relative)


def _open_below(root: Path, relative: str, flags: int = os.O_WRONLY) -> int:
    """Open the regular file ``relative`` below ``root`` (``.``: itself) without following any symbolic link.

    The worker may have put anything there: a device or fifo is not even opened. Raises OSError.
    """
    if not _is_below(relative):
        raise OSError(errno.EINVAL, "it is not below the volume")
    if relative == ".":
        return _reopen(os.open(root, os.O_PATH), flags)
    folder = os.open(root, os.O_RDONLY | os.O_DIRECTORY)
    try:
        *parents, name = relative.split("/")
        for parent in parents:
            deeper = os.open(parent, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW, dir_fd=folder)
            os.close(folder)
            folder = deeper
        return _reopen(os.open(name, os.O_PATH | os.O_NOFOLLOW, dir_fd=folder), flags)
    finally:
        os.close(folder)


def _reopen(path: int, flags: int) -> int:
    """Open the regular file behind the O_PATH descriptor ``path``, which is closed."""
    try:
        if not stat.S_ISREG(os.fstat(path).st_mode):
            raise OSError(errno.EINVAL, "it is not a regular file")
        return os.open(f"/proc/self/fd/{path}", flags | os.O_NONBLOCK)
    finally:
        os.close(path)
