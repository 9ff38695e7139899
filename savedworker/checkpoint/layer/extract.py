"""Building a tree from an index that may come from anywhere: nothing outside of the target is touched, or read."""

from __future__ import annotations

import errno
import os
import stat
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import ExitStack
from functools import partial
from pathlib import Path

from savedworker.checkpoint.layer.content import OpenFile
from savedworker.checkpoint.layer.errors import os_errors
from savedworker.checkpoint.layer.index import CHUNK_SIZE, ROOT, Entry, LayerIndex, check
from savedworker.checkpoint.layer.pack import SMALL, digest
from savedworker.checkpoint.layer.signature import FileId, FileState, Snapshot, settled_before
from savedworker.checkpoint.layer.tree import DirectoryCursor, by_descriptor
from savedworker.model.errors import Corrupt, Refused

Fill = Callable[[list[tuple[Entry, Path]]], None]
"""Writes the data of files that is stored elsewhere, into what are nothing but holes. What it raises ends the extraction unchanged."""
Fetch = Callable[[str], bytes]
"""Returns the bytes behind a key, verified. What it raises ends the extraction unchanged."""

_CREATE = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
_Data = Generator[bytes, None, None]
_AHEAD = 4
"""Chunks asked for ahead of the one being written, for each fetching thread: bounds the memory to that many of 4 MiB."""
_SMALL = 128 << 10
_SMALL_AT_ONCE = 16
"""Chunks up to _SMALL bytes that are fetched at a time: they wait for the store as long as large ones."""
_LEAST = CHUNK_SIZE // 16
"""Bytes for which any chunk counts among those that are asked for ahead."""


def extract(
    index: LayerIndex, fetch: Fetch, target: Path, threads: int = 1, fill: Fill | None = None
) -> Snapshot:
    """Build the tree of ``index`` in ``target``, an existing empty directory that nobody else uses meanwhile.

    Restores owners, modes, attributes, times (directories last), holes, hard links, fifos, whiteouts and opaque marks; atime
    is set to mtime. With ``threads`` above 1, ``fetch`` is called from that many threads, a little ahead of what is being written.
    ``fill`` is called once with the files whose data is stored elsewhere; without it they are refused.
    Needs root. Returns the snapshot for the first ``precopy`` on this instance, so that it need not read everything again.

    Raises Refused for an index that ``check`` refuses and for a target that is not empty, Corrupt when a chunk has not the
    stated length, NoSpace, Fatal for other errors of the file system, and what ``fetch`` raises. The target is then
    incomplete: remove it.
    """
    check(index)
    with ExitStack() as stack:
        with os_errors("open", target):
            cursor = stack.enter_context(DirectoryCursor(target))
            sources = stack.enter_context(DirectoryCursor(target))
            if os.listdir(cursor.root):
                raise Refused(f"{str(target)!r} is not empty", "extract into a new directory")
            _forget_acls(cursor.root)
        elsewhere = [entry for entry in index.entries if entry.space is not None]
        if elsewhere and fill is None:
            raise Refused(
                f"the data of {elsewhere[0].path!r:.300} is not in the layer",
                "the checkpoint is damaged or foreign; use an earlier one",
            )
        packs: dict[str, list[Entry]] = {}
        alone: list[tuple[str, int]] = []
        for entry in index.entries:
            if entry.data and entry.data[0].packed:
                packs.setdefault(entry.data[0].key, []).append(entry)
            else:
                alone += [(x.key, x.length) for x in entry.data]
        shared = [(key, files[0].data[0].of) for key, files in packs.items()]
        data = _fetched(alone + shared, fetch, threads)
        try:
            return _build(index, packs, data, cursor, sources, partial(_fill, fill, elsewhere, target))
        finally:
            data.close()


def _fill(fill: Fill | None, elsewhere: list[Entry], target: Path) -> None:
    if fill is not None:
        fill([(entry, target / entry.path) for entry in elsewhere])


def _forget_acls(root: int) -> None:
    """A default ACL that the target inherited from its own parent would be inherited by everything created below it."""
    for name in ("system.posix_acl_default", "system.posix_acl_access"):
        try:
            os.removexattr(root, name)
        except OSError as error:
            if error.errno not in (errno.ENODATA, errno.EOPNOTSUPP):
                raise


def _build(
    index: LayerIndex,
    packs: dict[str, list[Entry]],
    data: Iterator[bytes],
    cursor: DirectoryCursor,
    sources: DirectoryCursor,
    fill: Callable[[], None],
) -> Snapshot:
    """Directories and what has chunks for itself, then pack by pack, as ``data`` comes; then what ``fill`` does, and the other names of files."""
    states: dict[FileId, FileState] = {}
    links: list[Entry] = []
    elsewhere: list[Entry] = []

    def parent_of(path: str) -> tuple[int, str]:
        parent, _, name = path.rpartition("/")
        with os_errors("create", path):
            return cursor.open(parent or ROOT), name

    def write(entry: Entry, data: Iterable[memoryview]) -> None:
        small = list(data) if entry.size <= SMALL else None
        status = _write_file(entry, *parent_of(entry.path), data if small is None else small)
        state = states[status.st_dev, status.st_ino] = _state(entry, status)
        if small is not None:
            state.digest = digest([(x.offset, piece) for x, piece in zip(entry.data, small, strict=True)])

    for entry in index.entries:
        if entry.path == ROOT or entry.kind == "socket-skipped":
            continue
        if entry.link is not None:
            links.append(entry)
        elif entry.space is not None:
            _write_file(entry, *parent_of(entry.path), ())
            elsewhere.append(entry)
        elif entry.kind == "file":
            if not (entry.data and entry.data[0].packed):
                write(entry, (memoryview(next(data)) for _ in entry.data))
        else:
            here, name = parent_of(entry.path)
            with os_errors("create", entry.path):
                if entry.kind == "dir":
                    os.mkdir(name, 0o700, dir_fd=here)
                else:
                    _make_special(entry, here, name)
    for files in packs.values():
        pack = memoryview(next(data))
        for entry in files:
            write(entry, [pack[x.at : x.at + x.length] for x in entry.data])
    fill()
    for entry in elsewhere:
        status = _finish_file(entry, *parent_of(entry.path))
        states[status.st_dev, status.st_ino] = _state(entry, status)
    for entry in links:
        assert entry.link is not None
        here, name = parent_of(entry.path)
        above, _, first = entry.link.rpartition("/")
        with os_errors("link", entry.path):
            os.link(
                first,
                name,
                src_dir_fd=sources.open(above or ROOT),
                dst_dir_fd=here,
                follow_symlinks=False,
            )
    linked = {entry.link for entry in links if entry.link is not None}
    for path in linked:  # link(2) changes the ctime
        parent, _, name = path.rpartition("/")
        with os_errors("look at", path):
            status = os.stat(name, dir_fd=cursor.open(parent or ROOT), follow_symlinks=False)
        states[status.st_dev, status.st_ino].ctime_ns = status.st_ctime_ns
    # Children before their parents, as creating a child changes the parent's time.
    for entry in reversed(index.entries):
        if entry.kind == "dir":
            with os_errors("set the attributes of", entry.path):
                fd = cursor.open(entry.path)
                _set_metadata(entry, fd)
    horizon = settled_before()
    for state in states.values():
        state.settled = state.ctime_ns < horizon
    return Snapshot(states)


def _state(entry: Entry, status: os.stat_result) -> FileState:
    state = FileState.of(status, False)
    state.data, state.xattrs = entry.data, entry.xattrs
    return state


def _write_file(entry: Entry, directory: int, name: str, data: Iterable[memoryview]) -> os.stat_result:
    with os_errors("create", entry.path):
        fd = os.open(name, _CREATE, 0o600, dir_fd=directory)
    with OpenFile(fd):
        for extent, chunk in zip(entry.data, data, strict=True):
            offset = extent.offset
            with os_errors("write", entry.path):
                while chunk:
                    written = os.pwrite(fd, chunk, offset)
                    chunk, offset = chunk[written:], offset + written
        with os_errors("create", entry.path):
            os.ftruncate(fd, entry.size)
            _set_metadata(entry, fd)
            return os.fstat(fd)


def _finish_file(entry: Entry, directory: int, name: str) -> os.stat_result:
    """Once its data was written by somebody else: the time is another since, and the capabilities are gone."""
    with os_errors("write", entry.path):
        fd = os.open(name, os.O_WRONLY | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=directory)
        with OpenFile(fd):
            _set_metadata(entry, fd)
            return os.fstat(fd)


def _set_metadata(entry: Entry, fd: int) -> None:
    # In this order: chown clears setuid and security.capability, chmod changes the mask of an access ACL.
    os.fchown(fd, entry.uid, entry.gid)
    os.fchmod(fd, entry.mode)
    for name, value in entry.xattrs.items():
        os.setxattr(fd, name, value)
    os.utime(fd, ns=(entry.mtime_ns, entry.mtime_ns))


def _make_special(entry: Entry, directory: int, name: str) -> None:
    if entry.kind == "symlink":
        assert entry.target is not None  # check() saw to it
        os.symlink(entry.target, name, dir_fd=directory)
    elif entry.kind == "fifo":
        os.mkfifo(name, 0o600, dir_fd=directory)
    else:
        device = os.makedev(entry.major, entry.minor) if entry.kind == "device" else os.makedev(0, 0)
        os.mknod(name, 0o600 | stat.S_IFCHR, device, dir_fd=directory)
    os.chown(name, entry.uid, entry.gid, dir_fd=directory, follow_symlinks=False)
    if entry.kind != "symlink":
        os.chmod(name, entry.mode, dir_fd=directory)  # follows symlinks, but this name is the node made above
    for attribute, value in entry.xattrs.items():
        os.setxattr(by_descriptor(directory, name), attribute, value, follow_symlinks=False)
    os.utime(name, ns=(entry.mtime_ns, entry.mtime_ns), dir_fd=directory, follow_symlinks=False)


def _fetched(chunks: Sequence[tuple[str, int]], fetch: Fetch, threads: int) -> _Data:
    """The content of ``chunks``, keys and sizes, in order."""
    if threads > 1:
        return _ahead(chunks, fetch, threads)
    return (_fetch(fetch, key, size) for key, size in chunks)


def _fetch(fetch: Fetch, key: str, length: int) -> bytes:
    """The chunk, if it is as long as the index says: others must not fill the memory ahead of the one being written."""
    data = fetch(key)
    if len(data) != length:
        raise Corrupt(
            f"chunk {key} has {len(data)} bytes instead of {length}",
            "the checkpoint is damaged; use an earlier one",
        )
    return data


def _ahead(chunks: Sequence[tuple[str, int]], fetch: Fetch, threads: int) -> _Data:
    waiting: deque[tuple[Future[bytes], int]] = deque()
    held = 0
    large = ThreadPoolExecutor(threads, "layer-fetch")
    small = ThreadPoolExecutor(_SMALL_AT_ONCE, "layer-fetch-small")
    try:
        for key, length in chunks:
            room = max(length, _LEAST)
            pool = small if length <= _SMALL else large
            waiting.append((pool.submit(_fetch, fetch, key, length), room))
            held += room
            while held > threads * _AHEAD * CHUNK_SIZE:
                future, room = waiting.popleft()
                held -= room
                yield future.result()
        while waiting:
            yield waiting.popleft()[0].result()
    finally:
        for pool in (large, small):
            pool.shutdown(wait=True, cancel_futures=True)
