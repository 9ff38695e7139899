"""A store in a directory, also one that several machines share: every write is atomic, and durable when it returns.

obstore's local store neither fsyncs nor has conditional updates, so the writes are ours: a temporary file under ``.tmp``,
fsync, then ``link`` (create-only) or ``rename`` (overwrite), then fsync of the directory. ``local_swap`` has the
compare-and-swap. A key is either always swapped or never.
"""

from __future__ import annotations

import contextlib
import errno
import os
import shutil
import stat
from collections.abc import Callable, Iterable, Iterator, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import TypeVar
from uuid import uuid4

from savedworker.model import defaults
from savedworker.model.errors import AlreadyExists, Conflict, Fatal, NotFound, Refused, Unreachable
from savedworker.store.base import Data, Found, ObjectInfo, Version, is_component, is_key
from savedworker.store.local_swap import SUFFIX, SwapFile, Token, fsync_dir, read_whole, write_new_file

SCRATCH = ".tmp"
"""Directory below the root for files in the making; never listed."""

LEFTOVER_AGE = defaults.COLLECTION_GRACE
"""Seconds without a write after which a file in the making is taken for a dead writer's and removed."""

_RIGHTS = {errno.EACCES, errno.EPERM, errno.EROFS}
_SPACE = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}
_T = TypeVar("_T")


class LocalBackend:
    """Keys are paths below ``root``. ``timeout`` in seconds bounds the wait for other writers; disks do not time out."""

    def __init__(self, root: Path, *, timeout: float) -> None:
        self._root = root
        self._scratch = root / SCRATCH
        self._timeout = timeout
        self._swept = False

    def get(self, key: str) -> Found:
        with _errors(key):
            swapped = self._swapped(key)
            if swapped.exists():
                data, token = swapped.read()
                return Found(data, Version(str(token)))
            data, info = read_whole(self._path(key))
            return Found(data, Version(f"file:{info.st_ino}:{info.st_mtime_ns}:{info.st_size}"))

    def head(self, key: str) -> ObjectInfo | None:
        with _errors(key):
            swapped = self._swapped(key)
            if swapped.exists():
                with contextlib.suppress(NotFound):
                    return _info(key, swapped.stat())
            try:
                info = self._path(key).stat()
            except (FileNotFoundError, NotADirectoryError):
                return None
            return _info(key, info) if stat.S_ISREG(info.st_mode) else None

    def put(self, key: str, data: Data) -> None:
        with _errors(key):
            swapped = self._swapped(key)
            while swapped.exists():
                with contextlib.suppress(Conflict, NotFound):
                    swapped.swap(swapped.read()[1], data)
                    return
        self.put_stream(key, [data])

    def create(self, key: str, data: Data) -> None:
        with _errors(key):
            path = self._path(key)
            if self._swapped(key).exists():
                raise AlreadyExists(f"{key} exists already")
            temporary = self._new_scratch()
            try:
                write_new_file(temporary, data)
                self._in_parent(path, lambda: _link(temporary, path, key))
            finally:
                temporary.unlink(missing_ok=True)

    def swap(self, key: str, data: Data, expected: Version | None) -> Version:
        with _errors(key):
            swapped = self._swapped(key)
            if expected is None:
                if self._path(key).exists():
                    raise Conflict(f"{key} exists already")
                self._new_scratch()
                try:
                    return Version(str(self._in_parent(swapped.directory, lambda: swapped.create(data))))
                except AlreadyExists:
                    raise Conflict(f"{key} exists already") from None
            token = Token.parse(expected)
            if token is None:
                raise Refused(
                    f"{key} was not written by swap, so it cannot be swapped", "create it with swap(…, None)"
                )
            return Version(str(swapped.swap(token, data)))

    def put_stream(self, key: str, parts: Iterable[Data]) -> None:
        path = self._path(key)
        with _errors(key):
            temporary = self._new_scratch()
            file = open(temporary, "xb", buffering=0)  # noqa: SIM115 - so that errors of the parts do not pass for ours
        try:
            with file:
                for part in parts:
                    with _errors(key):
                        view = memoryview(part)
                        while view:
                            view = view[file.write(view) :]
                with _errors(key):
                    os.fsync(file.fileno())
            with _errors(key):
                self._in_parent(path, lambda: temporary.replace(path))
        finally:
            temporary.unlink(missing_ok=True)

    def get_stream(self, key: str, chunk_size: int) -> Iterator[bytes]:
        with _errors(key):
            swapped = self._swapped(key)
            if swapped.exists():
                data = swapped.read()[0]
                return (data[i : i + chunk_size] for i in range(0, len(data), chunk_size))
            path = self._path(key)
            if not path.is_file():  # nor is anything but a file ever opened
                raise NotFound(f"{key} does not exist")
            return _pieces(path, key, chunk_size)

    def list(self, prefix: str, after: str | None) -> Iterator[ObjectInfo]:
        directory = self._path(prefix) if prefix else self._root
        for info in self._walk(directory, prefix):
            if after is None or info.key > after:
                yield info

    def list_dirs(self, prefix: str) -> Sequence[str]:
        with _errors(prefix or "the store"):
            directory = self._path(prefix) if prefix else self._root
            found = []
            for entry in _entries(directory):
                if entry.is_dir(follow_symlinks=False) and is_component(entry.name):
                    key = f"{prefix}/{entry.name}" if prefix else entry.name
                    if next(self._walk(Path(entry.path), key), None) is not None:
                        found.append(entry.name)
            return sorted(found)

    def delete(self, keys: Sequence[str]) -> None:
        for key in keys:
            with _errors(key):
                path = self._path(key)
                swapped = self._swapped(key)
                if swapped.exists():
                    self._new_scratch()
                    swapped.delete()
                with contextlib.suppress(FileNotFoundError, NotADirectoryError):
                    path.unlink()
                    fsync_dir(path.parent)
                self._remove_empty(path.parent)

    def ensure(self) -> None:
        where = str(self._root)
        with _errors(where, "choose a directory that this user may write to"):
            try:
                _make_directories(self._root)
            except (FileExistsError, NotADirectoryError):
                raise Refused(f"{where} is not a directory", "choose another place for the store") from None
            except FileNotFoundError:
                raise Refused(f"{where} cannot be made", "choose another place for the store") from None
            probe = self._new_scratch()
            linked = probe.with_suffix(".link")
            try:
                write_new_file(probe, b"")
                os.link(probe, linked)
            except OSError as error:
                if error.errno in _RIGHTS | _SPACE and not probe.exists():
                    raise
                raise Fatal(
                    f"{where} has no hard links ({error})", "choose a POSIX file system or NFS"
                ) from error
            finally:
                linked.unlink(missing_ok=True)
                probe.unlink(missing_ok=True)
            self._sweep()

    def _path(self, key: str) -> Path:
        return self._root / key

    def _swapped(self, key: str) -> SwapFile:
        return SwapFile(self._path(key), self._scratch, patience=self._timeout)

    def _new_scratch(self) -> Path:
        """A name for a file in the making. The directory for it exists."""
        if not self._scratch.is_dir():
            _make_directories(self._scratch)
        if not self._swept:
            self._sweep()
        return self._scratch / uuid4().hex

    def leftovers(self, *, remove: bool) -> tuple[int, int]:
        if not self._scratch.is_dir():
            return 0, 0
        with _errors("the store"):
            return self._sweep(remove=remove)

    def _sweep(self, *, remove: bool = True) -> tuple[int, int]:
        """Remove what dead writers left, and return how much it was. Ages are by the file system's clock, never by ours."""
        self._swept = True
        probe = self._scratch / uuid4().hex
        probe.touch()
        now = probe.stat().st_mtime
        probe.unlink(missing_ok=True)
        count = size = 0
        for entry in _entries(self._scratch):
            with contextlib.suppress(FileNotFoundError):
                info = entry.stat(follow_symlinks=False)
                if now - info.st_mtime <= LEFTOVER_AGE:
                    continue
                count, size = count + 1, size + _size(entry)
                if not remove:
                    continue
                if entry.is_dir(follow_symlinks=False):
                    shutil.rmtree(entry.path, ignore_errors=True)
                else:
                    os.unlink(entry.path)
        return count, size

    def _in_parent(self, path: Path, write: Callable[[], _T]) -> _T:
        """``write`` a name into ``path``'s directory, which is made, also when a delete removes it in between."""
        for _ in range(20):
            try:
                result = write()
            except FileNotFoundError:
                with contextlib.suppress(FileNotFoundError, FileExistsError):
                    _make_directories(path.parent)
                continue
            except (NotADirectoryError, IsADirectoryError):
                raise Refused(f"{path} cannot be both an object and a directory", "use another key") from None
            with contextlib.suppress(FileNotFoundError):  # deleted since
                fsync_dir(path.parent)
            return result
        raise Unreachable(f"{path} cannot be written: its directory keeps vanishing")

    def _remove_empty(self, directory: Path) -> None:
        while directory != self._root:
            try:
                directory.rmdir()
            except OSError:
                return
            directory = directory.parent

    def _walk(self, directory: Path, prefix: str) -> Iterator[ObjectInfo]:
        """All objects below ``directory``, in the order of their keys."""
        with _errors(prefix or "the store"):
            entries = [(_sort_name(entry), entry) for entry in _entries(directory)]
        for _, entry in sorted(entries, key=lambda pair: pair[0]):
            plain = entry.name.removesuffix(SUFFIX)
            key = f"{prefix}/{plain}" if prefix else plain
            if not is_component(plain) or not is_key(key):
                continue
            if entry.is_dir(follow_symlinks=False):
                if entry.name == plain:
                    yield from self._walk(Path(entry.path), key)
                else:
                    with _errors(key), contextlib.suppress(NotFound):
                        yield _info(key, self._swapped(key).stat())
            elif entry.name == plain and entry.is_file(follow_symlinks=False):
                with _errors(key), contextlib.suppress(FileNotFoundError):
                    yield _info(key, entry.stat())


def _sort_name(entry: os.DirEntry[str]) -> str:
    """Sorts as the keys will: what is below ``a`` comes after ``a-b``, since '-' is less than '/'."""
    if entry.name.endswith(SUFFIX):
        return entry.name.removesuffix(SUFFIX)
    return entry.name + "/" if entry.is_dir(follow_symlinks=False) else entry.name


def _size(entry: os.DirEntry[str]) -> int:
    """Bytes of a file, or of the files in a directory."""
    if not entry.is_dir(follow_symlinks=False):
        return entry.stat(follow_symlinks=False).st_size
    return sum(inner.stat(follow_symlinks=False).st_size for inner in _entries(Path(entry.path)))


def _entries(directory: Path) -> Sequence[os.DirEntry[str]]:
    try:
        with os.scandir(directory) as entries:
            return list(entries)
    except (FileNotFoundError, NotADirectoryError):
        return []


def _make_directories(path: Path) -> None:
    """``mkdir -p`` that makes every new name durable."""
    if path.is_dir():
        return
    _make_directories(path.parent)
    try:
        _make_private(path)
    except FileExistsError:
        if not path.is_dir():
            raise
    with contextlib.suppress(FileNotFoundError):
        fsync_dir(path.parent)


def _make_private(path: Path) -> None:
    """Make one directory for its owner alone, and for others only as far as these may write to the one around it.

    It belongs to whom that one belongs, also where the agent's root makes it.
    """
    around = path.parent.stat()
    shared = 0 if around.st_mode & stat.S_ISVTX else around.st_mode  # /tmp is for all, what lies in it is not
    rights = 0o700 | (0o070 if shared & 0o020 else 0) | (0o007 if shared & 0o002 else 0)
    path.mkdir(mode=0o700)
    if rights != 0o700:
        path.chmod(rights | (around.st_mode & stat.S_ISGID))
    if os.geteuid() == 0 and (around.st_uid, around.st_gid) != (0, 0):
        with contextlib.suppress(OSError):
            os.chown(path, around.st_uid, around.st_gid)


def _link(temporary: Path, path: Path, key: str) -> None:
    try:
        os.link(temporary, path)
    except FileNotFoundError:
        raise
    except OSError as error:
        # A repeated NFS request can report failure after success; the link count of our own file tells (open(2), O_EXCL).
        if temporary.stat().st_nlink == 2:
            return
        if error.errno == errno.EEXIST:
            raise AlreadyExists(f"{key} exists already") from None
        raise


def _pieces(path: Path, key: str, size: int) -> Iterator[bytes]:
    with _errors(key), open(path, "rb", buffering=0) as file:
        while piece := file.read(size):
            yield piece


def _info(key: str, info: os.stat_result) -> ObjectInfo:
    return ObjectInfo(key, info.st_size, datetime.fromtimestamp(info.st_mtime, UTC))


@contextlib.contextmanager
def _errors(key: str, fix: str = "") -> Iterator[None]:
    """Operating system errors as ours. Raises NotFound, Fatal (rights, space), Unreachable (everything else)."""
    try:
        yield
    except (FileNotFoundError, NotADirectoryError, IsADirectoryError):
        raise NotFound(f"{key} does not exist") from None
    except OSError as error:
        if error.errno in _RIGHTS:
            raise Fatal(
                f"no permission for {key} ({error})", fix or "give this user access to the store"
            ) from error
        if error.errno in _SPACE:
            raise Fatal(
                f"no space to write {key} ({error})", "free some space, or use another store"
            ) from error
        raise Unreachable(f"{key} failed in the file system ({error})", fix=fix) from error
