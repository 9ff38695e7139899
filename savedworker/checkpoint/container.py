"""One worker's container on this instance: its directories, mounts, network and OCI bundle, and the calls to runc.

Everything lies below one private directory, so that ``teardown`` can take all of it away, whatever was done before.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import hashlib
import json
import logging
import os
import re
import shutil
import stat
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

from savedworker.checkpoint import bundle, images, native, network
from savedworker.checkpoint.cgroups import Cgroup
from savedworker.checkpoint.mountinfo import mounts_below
from savedworker.checkpoint.tools import Tools, run
from savedworker.model.errors import BadSpec, Fatal
from savedworker.model.manifest import Runtime
from savedworker.model.spec import WorkerSpec

log = logging.getLogger(__name__)

RUNC_ID = "worker"
_MS_NOSUID, _MS_NODEV, _MS_NOEXEC, _MS_BIND = 2, 4, 8, 4096
_MNT_DETACH = 2
_OF_IMAGES = (",noswap,huge=within_size", ",noswap", ",huge=within_size", "")
"""Options of the tmpfs of images, the best that the kernel knows. noswap came with 6.4: what is swapped is where they were on disk;
in huge pages a quarter less time is spent on memory. What CRIU has read is given back all the same."""
_MAX_HELD = 1000
_libc = ctypes.CDLL(None, use_errno=True)


@dataclass(frozen=True)
class Home:
    """The private directory of one container and what lies in it."""

    path: Path

    @property
    def upper(self) -> Path:
        """The writable layer."""
        return self.path / "upper"

    @property
    def rootfs(self) -> Path:
        return self.path / "rootfs"

    @property
    def shm(self) -> Path:
        return self.path / "shm"

    @property
    def bundle(self) -> Path:
        return self.path / "bundle"

    @property
    def runc(self) -> Path:
        return self.path / "runc"

    @property
    def criu_conf(self) -> Path:
        return self.path / "criu.conf"

    @property
    def images(self) -> Path:
        """What CRIU restores from, until that is done."""
        return self.path / "images"

    @property
    def criu_work(self) -> Path:
        """CRIU's logs."""
        return self.path / "criu"

    @property
    def stage(self) -> Path:
        return self.path / "stage"

    @property
    def status_file(self) -> Path:
        """Where init says how the command ended."""
        return self.upper / bundle.RUNTIME_FOLDER / "status"


def first_runtime(spec: WorkerSpec, private: Iterable[Path] = (), image: str = "") -> Runtime:
    """The facts that a worker gets at its first start and keeps for life. ``image``: digest of an image that a registry has.

    With the image ``host`` the folders and files ``private`` would be readable through the overlay, so they are masked.
    """
    hidden = [str(path) for path in private if spec.image == "host" and path.exists()]
    targets = [volume.target for volume in spec.volumes]
    return Runtime(
        hostname=spec.id[:63],
        syscalls=spec.syscalls,
        network=spec.network,
        image=image,
        masked=tuple(x for x in hidden if not any(t == x or t.startswith(f"{x}/") for t in targets)),
    )


class Container:
    """A worker's container. ``runtime`` is None until ``prepare``."""

    def __init__(
        self, spec: WorkerSpec, runtime: Runtime, tools: Tools, home: Path, cgroup: str, lower: Path
    ) -> None:
        self.spec = spec
        self.runtime = runtime
        self.tools = tools
        self.home = Home(home)
        self.cgroup = Cgroup(cgroup)
        self.lower = lower
        self.shm_restored = 0
        """Bytes of the large files in ``/dev/shm`` when the worker was restored here."""
        self.network = network.PrivateNetwork(_netns_name(home)) if runtime.network == "private" else None

    def prepare(self, fill: Callable[[Home], None] | None = None) -> None:
        """Make directories, /dev/shm, the layer (filled by ``fill`` for a restore), the overlay, network and bundle.

        Raises BadSpec for what the spec asks and this instance or image does not have, Fatal for the rest. Nothing is left
        behind when it raises.
        """
        ids = images.find_user(self.lower, self.spec.user)
        for volume in self.spec.volumes:
            try:
                os.stat(volume.source)
            except PermissionError as error:
                raise BadSpec(
                    f"volume source {volume.source} refuses root ({error.strerror}), so that it can be neither mounted nor restored",
                    "let root in (NFS: no_root_squash; FUSE: allow_root), or copy what is needed",
                ) from error
            except OSError as error:
                raise Fatal(
                    f"volume source {volume.source} cannot be used on this instance: {error.strerror}",
                    "create or mount it there",
                ) from error
        try:
            self.home.path.mkdir(parents=True, mode=0o700, exist_ok=True)
            for folder in ("upper", "work", "rootfs", "shm", "bundle", "runc", "criu", "stage"):
                (self.home.path / folder).mkdir(mode=0o700 if folder != "rootfs" else 0o755)
            self.home.upper.chmod(0o755)
            self._mount_shm()
            if fill is not None:
                fill(self.home)
            self._mount_overlay()
            if fill is None:
                self._first_files(ids[0], ids[1])
            if self.network is not None:
                self.network.create()
            self._write_bundle(ids)
        except BaseException:
            self.teardown()
            raise

    def _mount_shm(self) -> None:
        """A fresh tmpfs whose device number the worker has never seen: PyTorch caches storages by (device, inode)."""
        held: list[Path] = []
        try:
            while True:
                _mount(
                    "tmpfs",
                    self.home.shm,
                    "tmpfs",
                    _MS_NOSUID | _MS_NODEV,
                    f"mode=1777,inode64,size={_shm_size()}",
                )
                if self.home.shm.stat().st_dev not in self.runtime.shm_devices:
                    break
                if len(held) >= _MAX_HELD:
                    raise Fatal("no device number is left that this worker never had for /dev/shm")
                aside = (
                    self.home.path / f"shm-{len(held)}"
                )  # keeps its number taken while the next one is made
                aside.mkdir()
                held.append(aside)
                _mount(str(self.home.shm), aside, "", _MS_BIND, "")
                _unmount(self.home.shm)
        finally:
            for aside in held:
                _unmount(aside)
                aside.rmdir()
        device = self.home.shm.stat().st_dev
        self.runtime = self.runtime.model_copy(update={"shm_devices": (*self.runtime.shm_devices, device)})

    def hold_images_in_memory(self, size: int) -> None:
        """Make the folder of the images a tmpfs of ``size`` bytes. Raises OSError, and the folder is not there then."""
        self.home.images.mkdir(mode=0o700)
        flags = _MS_NOSUID | _MS_NODEV | _MS_NOEXEC
        try:
            for more in _OF_IMAGES:
                try:
                    _mount("tmpfs", self.home.images, "tmpfs", flags, f"mode=0700,size={size}{more}")
                    return
                except OSError as error:
                    if error.errno != errno.EINVAL or not more:
                        raise
        except OSError:
            self.home.images.rmdir()
            raise

    def memory(self) -> int:
        """Bytes of the worker's memory now. What a restore wrote into ``/dev/shm`` was charged to the agent."""
        charged = self.cgroup.memory()
        if not self.shm_restored:
            return charged
        disk = os.statvfs(self.home.shm)
        return charged + min(self.shm_restored, (disk.f_blocks - disk.f_bfree) * disk.f_frsize)

    def drop_images(self) -> None:
        """Take the images away, from memory or disk. May be called at any time that CRIU does not read them."""
        if os.path.ismount(self.home.images):
            _unmount(self.home.images)
        if os.path.ismount(self.home.images):
            log.error("%s stays: it is still mounted", self.home.images)
            return
        shutil.rmtree(self.home.images, ignore_errors=True)

    def _mount_overlay(self) -> None:
        lower, upper, work = map(_option, (self.lower, self.home.upper, self.home.path / "work"))
        options = f"lowerdir={lower},upperdir={upper},workdir={work}"
        try:
            _mount("overlay", self.home.rootfs, "overlay", 0, options)
        except OSError as error:
            raise Fatal(
                f"the overlay cannot be mounted below {self.home.path}: {error.strerror}",
                "the state directory must be on a real file system (ext4, xfs), not on an overlay",
            ) from error

    def _first_files(self, uid: int, gid: int) -> None:
        """What the runtime itself keeps in the layer: init, so that it travels along, its status file, and the host names."""
        folder = self.home.rootfs / bundle.RUNTIME_FOLDER
        if folder.is_symlink() or (folder.exists() and not folder.is_dir()):
            raise BadSpec(
                f"the image has something of its own at /{bundle.RUNTIME_FOLDER}", "remove it from the image"
            )
        folder.mkdir(mode=0o755, exist_ok=True)
        for name in ("init", "status"):  # an image made from a worker's files has them
            try:
                (folder / name).unlink(missing_ok=True)
            except OSError as error:
                raise BadSpec(
                    f"the image has something of its own at /{bundle.RUNTIME_FOLDER}/{name}",
                    "remove it from the image",
                ) from error
        shutil.copy(native.init_program(), folder / "init")
        (folder / "init").chmod(0o755)
        (folder / "status").touch(mode=0o600)
        os.chown(folder / "status", uid, gid)
        etc = self.home.rootfs / "etc"
        if etc.is_dir() and not etc.is_symlink():  # a link would lead out of the image
            address = network.INNER if self.network else "127.0.0.1"
            _replace(
                etc / "hosts", f"127.0.0.1\tlocalhost\n::1\tlocalhost\n{address}\t{self.runtime.hostname}\n"
            )
            _replace(etc / "hostname", self.runtime.hostname + "\n")

    def _write_bundle(self, ids: tuple[int, int, list[int], str]) -> None:
        resolv_conf = None
        if self.network is not None:
            resolv_conf = self.home.path / "resolv.conf"
            network.write_resolv_conf(resolv_conf)
            resolv_conf.chmod(0o644)
        paths = bundle.BundlePaths(
            rootfs=self.home.rootfs,
            shm=self.home.shm,
            resolv_conf=resolv_conf,
            criu_conf=self.home.criu_conf,
            netns=self.network.path if self.network else None,
            cgroup=self.cgroup.path,
        )
        bundle.write(self.home.bundle, bundle.configuration(self.spec, self.runtime, ids, paths))

    def runc(self, *words: str | Path) -> list[str]:
        """A call to runc on this container's own state directory, its log kept apart from the worker's stderr."""
        log = self.home.path / "runc.log"
        return [
            str(self.tools.runc),
            "--root",
            str(self.home.runc),
            "--log",
            str(log),
            "--log-format",
            "json",
            *map(str, words),
        ]

    def start_command(self) -> list[str]:
        """Runs the worker from nothing, detached; the caller's stdio becomes the worker's."""
        self._clear_log()
        return self.runc("run", "--detach", "--bundle", self.home.bundle, RUNC_ID)

    def restore_command(self, image_folder: Path) -> list[str]:
        """Restores the worker from ``image_folder``, detached; the caller's stdio becomes the worker's."""
        self._clear_log()
        flags = ["--detach", "--manage-cgroups-mode", "soft", "--file-locks"]
        places: list[str | Path] = ["--image-path", image_folder, "--work-path", self.home.criu_work]
        return self.runc("restore", *places, "--bundle", self.home.bundle, *flags, RUNC_ID)

    def checkpoint_command(self, image_folder: Path, keep_running: bool) -> list[str]:
        """Dumps the worker into ``image_folder``; afterwards it runs on or is dead."""
        self._clear_log()
        flags = [
            "--file-locks",
            "--manage-cgroups-mode",
            "soft",
            *(["--leave-running"] if keep_running else []),
        ]
        return self.runc(
            "checkpoint", "--image-path", image_folder, "--work-path", self.home.criu_work, *flags, RUNC_ID
        )

    def runc_words(self) -> str:
        """What runc said last."""
        try:
            lines = (self.home.path / "runc.log").read_text(errors="replace").splitlines()
        except OSError:
            return ""
        found = []
        for line in lines:
            with contextlib.suppress(ValueError, AttributeError):
                entry = json.loads(line)
                if entry.get("level") in ("error", "fatal"):
                    found.append(str(entry.get("msg", "")))
        return "; ".join(found[-3:])

    def _clear_log(self) -> None:
        (self.home.path / "runc.log").unlink(missing_ok=True)

    def environment(self) -> dict[str, str]:
        """For every call to runc: it finds criu in PATH."""
        return native.criu_environment(self.tools)

    def pids(self) -> list[int]:
        """The worker's processes, as this instance numbers them."""
        return self.cgroup.pids()

    def init_pid(self) -> int | None:
        """The outer pid of the worker's pid 1; None when runc knows no running container."""
        try:
            state = json.loads((self.home.runc / RUNC_ID / "state.json").read_text())
            return int(state["init_process_pid"])
        except (OSError, ValueError, KeyError):
            return None

    def teardown(self) -> None:
        """Kill what runs and take everything away. May be called at any time, and again."""
        self.cgroup.kill()
        if (self.home.runc / RUNC_ID).exists():
            with contextlib.suppress(Fatal):
                run(self.runc("delete", "--force", RUNC_ID), check=False)
        if self.network is not None:
            self.network.remove()
        unmount_below(self.home.path)
        self.cgroup.remove()
        left = mounts_below(self.home.path)
        if left:
            # Never delete through a mount: of a cgroup hierarchy that would remove other people's cgroups.
            log.error("%s stays: %s is still mounted", self.home.path, left[0])
            return
        shutil.rmtree(self.home.path, ignore_errors=True)

    def clear_after_criu(self) -> None:
        """Take away what a CRIU that was killed leaves: it mounts every cgroup hierarchy in its work directory."""
        unmount_below(self.home.criu_work)


def _netns_name(home: Path) -> str:
    """A name of its own for every container on a machine, since /run/netns may be shared by several agents."""
    return "swk-" + hashlib.sha256(str(home).encode()).hexdigest()[:10]


def _shm_size() -> int:
    """Half of the memory, as the kernel's own default."""
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // 2


def _mount(source: str, target: Path, kind: str, flags: int, options: str) -> None:
    if _libc.mount(source.encode(), os.fsencode(target), kind.encode(), flags, options.encode()):
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number), str(target))


def _unmount(target: Path) -> None:
    _libc.umount2(os.fsencode(target), _MNT_DETACH)


def unmount_below(folder: Path) -> None:
    """Lazily unmount everything below ``folder``."""
    for point in mounts_below(folder):
        _unmount(point)


def _replace(path: Path, text: str) -> None:
    """Write ``text`` to ``path`` even where the image has a symbolic link, a fifo or a device there. Raises BadSpec."""
    try:
        if os.path.lexists(path) and not stat.S_ISREG(path.lstat().st_mode):
            path.unlink()
        flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW | os.O_NONBLOCK
        with os.fdopen(os.open(path, flags, 0o644), "w") as file:
            file.write(text)
    except IsADirectoryError as error:
        raise BadSpec(f"the image has a directory at /etc/{path.name}", "remove it from the image") from error


def _option(path: Path) -> str:
    """``path`` as a value in the overlay's mount options, where commas and colons mean something."""
    return re.sub(r"([\\,:])", r"\\\1", str(path))
