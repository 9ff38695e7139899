"""Capturing a directory tree around a freeze: read ahead, copy the rest while frozen, chunk the copies afterwards."""

from __future__ import annotations

import contextlib
import errno
import os
import shutil
import stat
import tempfile
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass, field
from pathlib import Path

from savedworker.checkpoint.layer.content import (
    Stage,
    Staged,
    Unreadable,
    chunks,
    extents,
    open_regular,
    pieces,
)
from savedworker.checkpoint.layer.errors import OUTSIDER, ChangedWhileFrozen, os_errors, translated
from savedworker.checkpoint.layer.index import KEPT_DEVICES, ROOT, Entry, LayerIndex
from savedworker.checkpoint.layer.index import check as check_index
from savedworker.checkpoint.layer.pack import Packer
from savedworker.checkpoint.layer.signature import FileId, FileState, Snapshot, settled_before
from savedworker.checkpoint.layer.tree import DirectoryCursor, read_xattrs, walk
from savedworker.model.errors import Refused, SavedWorkerError

STAGES = "layer-*"
"""What the directories of copies are called."""

_NAMES = 1024
"""Names, and pieces of a file, between two looks whether the capture is still wanted."""

Apart = Callable[[str, os.stat_result], str | None]
"""The name under which the data of the file at a path is stored elsewhere; None for a file that is to be stored here."""
Sink = Callable[[bytes], str]
"""Stores one chunk of 1 to ``CHUNK_SIZE`` bytes and returns its key. What it raises ends the capture unchanged."""


@dataclass(slots=True)
class PreCopy:
    """What was read ahead. ``PreCopy()`` is "nothing", for a tree that is all copied in the freeze (a tmpfs)."""

    snapshot: Snapshot = field(default_factory=Snapshot)
    bytes_read: int = 0
    """Bytes that went through the sink."""
    bytes_reused: int = 0
    """Bytes of files that ``previous`` already knew."""


def precopy(
    root: Path,
    sink: Sink,
    previous: Snapshot | None = None,
    mapped: Callable[[], Collection[FileId]] | None = None,
    check: Callable[[], None] = lambda: None,
) -> PreCopy:
    """Read the tree below ``root`` while its worker runs, giving every chunk of file data to ``sink``.

    ``previous`` is the snapshot of an earlier capture or of an ``extract`` on this instance (or ``snapshot`` of a precopy that
    took long: repeat until little is left); files it knows and that did not change are not read. ``mapped`` names the
    files that are mapped shared and writable; it is called once, at the right moment, which is after the clock was read and
    before the first file is (see signature.py). Without it, pass to ``finish`` what was mapped before this call as well.

    Files that vanish or change meanwhile are left to ``finish``. ``check`` is called before each file is read, and ends the
    capture by raising. Raises Refused for what no layer can hold (other device
    nodes, too deep a tree), so that it is known before the freeze; Fatal if ``root`` cannot be read; and what ``sink`` raises.
    """
    known = previous.states if previous is not None else {}
    result = PreCopy()
    states = result.snapshot.states
    # What changes once changes again: with what does not, it would leave half-empty chunks behind.
    calm, restless = Packer(sink), Packer(sink)
    horizon = settled_before()
    busy = mapped() if mapped is not None else ()
    with os_errors("read", root):
        cursor = DirectoryCursor(root)
    with cursor:
        for path, directory, name, status in walk(cursor, tolerant=True, ordered=True):
            identity = (status.st_dev, status.st_ino)
            if identity in states:
                continue
            before = known.get(identity)
            if before is not None and identity not in busy and before.holds_for(status):
                states[identity] = before
                result.bytes_reused += sum(extent.length for extent in before.data)
                continue
            _kind(path, status)
            state = FileState.of(status, status.st_ctime_ns < horizon and identity not in busy)
            packer = calm if before is None and state.settled else restless
            try:
                _read_attributes(state, directory, name)
                if stat.S_ISREG(status.st_mode):
                    check()
                    with open_regular(directory, name, identity) as file:
                        data = chunks(file, status, tolerant=True)
                        result.bytes_read += packer.add(path, state, data, before)
            except Unreadable:
                continue
            states[identity] = state
    calm.flush()
    restless.flush()
    return result


def finish(
    root: Path,
    precopy: PreCopy,
    stage_dir: Path,
    dirty: Collection[FileId] = frozenset(),
    trust_ctime: bool = True,
    check: Callable[[], None] | None = None,
    apart: Apart | None = None,
) -> Pending:
    """Fix the tree below ``root`` as it is now, inside the freeze: one lstat for each name, one copy for each changed file.

    ``dirty`` are the files mapped shared and writable now. ``trust_ctime=False`` copies every file (tmpfs: writes through a
    mapping never touch the time stamps); what ``precopy`` knows then only spares storing equal content again. ``stage_dir`` must
    exist; a directory of our own below it holds the copies until ``Pending.complete`` or ``Pending.discard``. On a file system with
    reflinks a copy costs no data. What is ``apart`` is not copied: its data is for the caller to read, from ``Pending.apart``.
    ``check`` is called before each copy (and within large ones), and now and then between names, and ends the capture by
    raising, for a deadline.

    Raises NoSpace when the stage is full, ChangedWhileFrozen when the tree is not frozen after all, Refused as ``precopy``,
    Fatal for other errors of the file system. Whatever is raised, the stage is empty again and the layer untouched.
    """
    states = precopy.snapshot.states if trust_ctime else {}
    horizon = settled_before()
    with os_errors("stage in", stage_dir):
        own = Path(tempfile.mkdtemp(prefix=STAGES.rstrip("*"), dir=stage_dir))
    try:
        with os_errors("capture", root):
            cursor = DirectoryCursor(root)
        pending = Pending(own, precopy.snapshot)
        with cursor, Stage(own, check) as stage:
            top = FileState.of(os.fstat(cursor.root), settled=False)
            top.xattrs = read_xattrs(cursor.root, ".")
            pending.records.append(Record(ROOT, os.fstat(cursor.root), top))
            records, staged, fresh = pending.records, pending.staged, pending.fresh
            elsewhere = pending.apart
            for path, directory, name, status in walk(cursor, tolerant=False):
                if check is not None and len(records) % _NAMES == 0:
                    check()
                identity = (status.st_dev, status.st_ino)
                known = states.get(identity)
                if known is not None and known.holds_for(status) and identity not in dirty:
                    records.append(Record(path, status, known))
                    continue
                state = fresh.get(identity)
                if state is None:
                    _kind(path, status)
                    settled = trust_ctime and status.st_ctime_ns < horizon and identity not in dirty
                    fresh[identity] = state = FileState.of(status, settled)
                    try:
                        _read_attributes(state, directory, name)
                        if stat.S_ISREG(status.st_mode) and status.st_size > 0:
                            space = apart(path, status) if apart is not None else None
                            if space is not None:
                                elsewhere[identity] = _held(
                                    path, directory, name, status, space, False, check
                                )
                            else:
                                with open_regular(directory, name, identity) as file:
                                    staged[identity] = stage.copy(file, status, path)
                    except Unreadable as error:
                        raise _broken(error.cause, path) from error
                records.append(Record(path, status, state))
        return pending
    except BaseException as error:
        shutil.rmtree(own, ignore_errors=True)
        if isinstance(error, OSError):  # from the walk itself
            raise _broken(error, root) from error
        raise


@dataclass(frozen=True, slots=True)
class Held:
    """A file whose data is stored elsewhere, as ``space``: where it is in the tree, and what of it is not a hole (as in ``Entry``)."""

    path: str
    status: os.stat_result
    space: str
    runs: tuple[tuple[int, int], ...]


def _held(
    path: str,
    directory: int,
    name: str,
    status: os.stat_result,
    space: str,
    changing: bool,
    check: Callable[[], None] | None,
) -> Held:
    """Raises Unreadable."""
    runs: list[tuple[int, int]] = []
    with open_regular(directory, name, (status.st_dev, status.st_ino)) as file:
        try:
            for run in pieces(extents(file, status, changing)):
                runs.append(run)
                if check is not None and len(runs) % _NAMES == 0:
                    check()
        except OSError as error:
            raise Unreadable(error) from error
    return Held(path, status, space, tuple(runs))


def held_apart(root: Path, apart: Apart, check: Callable[[], None]) -> Iterator[Held]:
    """The files below ``root`` that are ``apart``, while its worker may be changing them: what vanishes meanwhile is left out.

    ``check`` is called before each file, and within large ones, and ends it by raising. Raises Fatal, Refused.
    """
    with os_errors("read", root):
        cursor = DirectoryCursor(root)
    with cursor:
        for path, directory, name, status in walk(cursor, tolerant=True):
            space = apart(path, status) if stat.S_ISREG(status.st_mode) else None
            if space is not None:
                check()
                with contextlib.suppress(Unreadable):
                    yield _held(path, directory, name, status, space, True, check)


@dataclass(slots=True)
class Record:
    """One name at the freeze."""

    path: str
    status: os.stat_result
    state: FileState


@dataclass(slots=True)
class Pending:
    """A captured tree whose changed files still lie in the stage."""

    stage: Path
    before: Snapshot
    records: list[Record] = field(default_factory=list)
    staged: dict[FileId, Staged] = field(default_factory=dict)
    apart: dict[FileId, Held] = field(default_factory=dict)
    """Files whose data is stored elsewhere."""
    fresh: dict[FileId, FileState] = field(default_factory=dict)
    """States made in the freeze; ``complete`` fills in the keys of those that are staged."""

    @property
    def bytes_staged(self) -> int:
        """Bytes of data, without holes, that ``complete`` will give to the sink."""
        return sum(copy.bytes_data for copy in self.staged.values())

    def complete(self, sink: Sink) -> tuple[LayerIndex, Snapshot]:
        """Give the staged copies to ``sink`` and return the index, and the snapshot that the next ``precopy`` starts from.

        Needs neither the freeze nor the tree. The stage is removed on success. When ``sink`` raises, the stage stays: call
        again, or ``discard``. The index is checked, so what is returned can be extracted. Raises Fatal if the stage is damaged.
        """
        packer = Packer(sink)
        records = sorted(self.records, key=_order)
        left = dict(self.staged)
        for record in records:
            identity = (record.status.st_dev, record.status.st_ino)
            copy = left.pop(identity, None)
            if copy is not None:
                before = self.before.states.get(identity)
                packer.add(record.path, self.fresh[identity], copy.chunks(self.stage), before)
        packer.flush()
        entries: list[Entry] = []
        first_names: dict[FileId, str] = {}
        states: dict[FileId, FileState] = {}
        for record in records:
            status, state = record.status, record.state
            identity = (status.st_dev, status.st_ino)
            kind = _kind(record.path, status)
            states[identity] = state
            if kind == "file" and status.st_nlink > 1:
                first = first_names.setdefault(identity, record.path)
                if first != record.path:
                    entries.append(Entry(record.path, kind, link=first))
                    continue
            entry = Entry(
                record.path,
                kind,
                stat.S_IMODE(status.st_mode),
                status.st_uid,
                status.st_gid,
                status.st_mtime_ns,
                state.xattrs,
            )
            if kind == "file":
                entry.size, entry.data = status.st_size, state.data
                held = self.apart.get(identity)
                if held is not None:
                    entry.space, entry.runs = held.space, held.runs
            elif kind == "symlink":
                entry.target = state.target
            elif kind == "device":
                entry.major, entry.minor = os.major(status.st_rdev), os.minor(status.st_rdev)
            entries.append(entry)
        index = LayerIndex(entries)
        check_index(index)
        self.discard()
        return index, Snapshot(states)

    def discard(self) -> None:
        """Remove the staged copies, for a checkpoint that will not be completed. May be called at any time."""
        shutil.rmtree(self.stage, ignore_errors=True)


def _broken(error: OSError, path: object) -> SavedWorkerError:
    if error.errno in (errno.ENOENT, errno.ESTALE):
        return ChangedWhileFrozen(f"{str(path)!r} vanished in the freeze", fix=OUTSIDER)
    return translated(error, "capture", path)


def _order(record: Record) -> tuple[bool, str]:
    return record.path != ROOT, record.path


def _read_attributes(state: FileState, directory: int, name: str) -> None:
    try:
        state.xattrs = read_xattrs(directory, name)
        if stat.S_ISLNK(state.mode):
            state.target = os.readlink(name, dir_fd=directory)
    except OSError as error:
        raise Unreadable(error) from error


def _kind(path: str, status: os.stat_result) -> str:
    mode = status.st_mode
    if stat.S_ISREG(mode):
        return "file"
    if stat.S_ISDIR(mode):
        return "dir"
    if stat.S_ISLNK(mode):
        return "symlink"
    if stat.S_ISFIFO(mode):
        return "fifo"
    if stat.S_ISSOCK(mode):
        return "socket-skipped"
    device = (os.major(status.st_rdev), os.minor(status.st_rdev))
    if stat.S_ISCHR(mode) and device == (0, 0):
        return "whiteout"
    if stat.S_ISCHR(mode) and device in KEPT_DEVICES:
        return "device"
    raise Refused(
        f"device node {path!r} ({device[0]}:{device[1]}) cannot be saved",
        "remove it; only null, zero, full, random, urandom and tty are kept",
    )
