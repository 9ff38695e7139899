"""Compare-and-swap on a shared POSIX directory: rename only, no locks, no daemon, no clocks.

obstore's local store has create-only writes but no conditional update, and ``flock`` is not dependable on NFS.

**Layout.** A swapped key ``record.json`` is the directory ``record.json@`` with these names in it
(``REV`` counts from 1, ``A`` and ``B`` are random and never used twice)::

    cur-REV-A        the current content, version (REV, A)
    new-REV-B        written and synced by writer B, who wants it to become version (REV, B)
    was-REV-A-B      the content of (REV, A) after it was replaced by (REV+1, B): B's *claim*

**Create**: build a directory that holds ``cur-1-A`` under the store's ``.tmp`` and rename it to ``record.json@``.
rename(2) refuses to replace a directory that is not empty, and one of ours never is, so exactly one creator wins.
**Delete**: rename the whole directory into ``.tmp`` and remove it there.

**Swap** from (R, A) by writer B::

    1. write new-(R+1)-B (exclusively), fsync it, fsync the directory
    2. rename cur-R-A      -> was-R-A-B      the decision: the source has a unique name and can vanish only once
    3. rename new-(R+1)-B  -> cur-(R+1)-B    promotion, by B or by anybody who finds the claim
    4. fsync the directory, prune what is more than HISTORY versions old

**Read**: list; open ``cur-*``. If there is none, the highest claim ``was-R-A-B`` says that ``new-(R+1)-B`` is current:
open that. Opening by name is the moment of the read: ``cur-R-A`` exists exactly while (R, A) is current and promoted,
``new-(R+1)-B`` beside its claim exactly while (R+1, B) is current and not promoted. If the name vanished in between, or a
listing that raced with renames showed nothing, list again. Contents never change under a name, and reading writes nothing.

**Why it is safe.**

- *One winner.* Step 2 is the only way from one version to the next. Two writers rename the same source; a file system
  lets one of them succeed and gives the others ENOENT.
- *No ABA, no stale writer.* Every name holds a random part and is created once, before its writer's step 2 and never
  after. A writer that slept for a week renames a name that is gone for good: ENOENT, it lost. This also holds across
  delete and create of the same key.
- *Helpers are harmless.* Step 3 moves a unique source to a unique target; done twice, or long afterwards, it is ENOENT.
- *Dead writers block nobody.* Killed before 2: its ``new`` is garbage. Killed after 2: the version is decided, readers
  read it, and the next writer promotes it.
- *Pruning is safe however stale.* Only exact names are removed, and only below a version that the same listing showed
  as promoted. A ``new`` there belongs to a writer whose source is consumed and who therefore lost (had it won, it would
  have been promoted before anything later existed); a ``was`` there is not needed to promote anything.
- *Bounded.* At most HISTORY claims, and the ``new`` files of writers that died within the last HISTORY versions.

**NFS.** Every step is one atomic operation on the server. A client that repeats a lost request may see ENOENT for a
rename that did succeed: after ENOENT the writer looks for ``was-R-A-B``, its own claim. Claims are kept for HISTORY
versions so that it is still there then. An error other than ENOENT leaves the outcome open: ``new`` is kept, because
the rename may yet take place, and the caller gets Unreachable. Cached listings can make a read stale by the attribute
cache's time (acdirmax); a swap from a stale version fails as it must.
"""

from __future__ import annotations

import errno
import os
import re
import shutil
import stat
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple, TypeVar
from uuid import uuid4

from savedworker.crashpoints import crash_point
from savedworker.model.errors import AlreadyExists, Conflict, Corrupt, NotFound, Unreachable
from savedworker.store.base import MAX_WHOLE

SUFFIX = "@"
"""What a swapped key's directory has at the end of its name. No key component contains it."""

HISTORY = 8
"""How many replaced versions are kept."""

_T = TypeVar("_T")
_NAME = re.compile(r"(cur|new)-(\d{20})-([0-9a-f]{32})|was-(\d{20})-([0-9a-f]{32})-([0-9a-f]{32})")


class Token(NamedTuple):
    """One version: how many writes, and whose."""

    revision: int
    nonce: str

    def __str__(self) -> str:
        return f"{self.revision}-{self.nonce}"

    @classmethod
    def parse(cls, text: str) -> Token | None:
        """The token in ``text``, or None if it is none."""
        match = re.fullmatch(r"(\d{1,20})-([0-9a-f]{32})", text)
        return cls(int(match[1]), match[2]) if match else None


@dataclass(frozen=True, slots=True)
class _Name:
    """One file name of the protocol."""

    kind: str
    revision: int
    nonce: str
    successor: str = ""

    def __str__(self) -> str:
        base = f"{self.kind}-{self.revision:020d}-{self.nonce}"
        return f"{base}-{self.successor}" if self.successor else base


def _parse(name: str) -> _Name | None:
    match = _NAME.fullmatch(name)
    if not match:
        return None
    if match[1]:
        return _Name(match[1], int(match[2]), match[3])
    return _Name("was", int(match[4]), match[5], match[6])


def fsync_dir(path: Path) -> None:
    """Make the names in directory ``path`` durable."""
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


def write_new_file(path: Path, data: bytes | bytearray | memoryview) -> None:
    """Create ``path``, which must not exist, write ``data`` and fsync it."""
    with open(path, "xb", buffering=0) as file:
        view = memoryview(data)
        while view:
            view = view[file.write(view) :]
        os.fsync(file.fileno())


def read_whole(path: Path) -> tuple[bytes, os.stat_result]:
    """Content and status of the file ``path``. Raises OSError; Corrupt for what is no file, or too long to be ours."""
    descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)  # a fifo would keep us for ever
    with open(descriptor, "rb", buffering=0) as file:
        info = os.fstat(descriptor)
        if stat.S_ISDIR(info.st_mode):
            raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(path))
        if not stat.S_ISREG(info.st_mode) or info.st_size > MAX_WHOLE:
            raise Corrupt(f"{path} is no object of a store: not a file, or one of {info.st_size} bytes")
        return file.read(), info


class SwapFile:
    """One swapped key: ``path`` is the key's own path, ``scratch`` a directory on the same file system.

    ``patience`` in seconds bounds how long a read goes on looking while others write. ``step`` is called with a name
    before each instruction of the protocol; tests stop, kill or interleave there.
    """

    def __init__(
        self, path: Path, scratch: Path, *, patience: float = 30.0, step: Callable[[str], None] | None = None
    ) -> None:
        self.directory = path.with_name(path.name + SUFFIX)
        self._key = path.name
        self._scratch = scratch
        self._patience = patience
        self._step = step or (lambda _: None)

    def exists(self) -> bool:
        """Whether the key has been created (and not deleted) by this protocol."""
        return self.directory.is_dir()

    def read(self) -> tuple[bytes, Token]:
        """The current content and its version. Raises NotFound, Corrupt."""
        return self._at_current(lambda path: read_whole(path)[0])

    def stat(self) -> os.stat_result:
        """Size and time of the current content. Raises NotFound, Corrupt."""
        return self._at_current(lambda path: path.stat())[0]

    def create(self, data: bytes | bytearray | memoryview) -> Token:
        """Make the key with its first content. Raises AlreadyExists. The parent directory must exist."""
        token = Token(1, uuid4().hex)
        built = self._scratch / f"{token.nonce}.create"
        built.mkdir()
        self._step("create:built")
        try:
            write_new_file(built / str(_Name("cur", 1, token.nonce)), data)
            fsync_dir(built)
        except OSError:
            shutil.rmtree(built, ignore_errors=True)
            raise
        self._step("create:written")
        try:
            built.rename(self.directory)
        except OSError as error:
            if not self._has_been(token):
                if self.exists():
                    shutil.rmtree(built, ignore_errors=True)
                    raise AlreadyExists(f"{self._key} exists already") from None
                if isinstance(error, FileNotFoundError):  # the parent: nothing took place
                    shutil.rmtree(built, ignore_errors=True)
                raise
        self._step("create:renamed")
        fsync_dir(self.directory.parent)
        return token

    def swap(self, expected: Token, data: bytes | bytearray | memoryview) -> Token:
        """Replace the content of version ``expected``. Raises Conflict; Unreachable when the outcome is unknown."""
        token = Token(expected.revision + 1, uuid4().hex)
        new = self.directory / str(_Name("new", *token))
        try:
            write_new_file(new, data)
            self._step("swap:written")
            fsync_dir(self.directory)
        except FileNotFoundError:
            raise Conflict(f"{self._key} does not exist any more") from None
        except OSError:
            new.unlink(missing_ok=True)
            raise
        self._step("swap:synced")
        crash_point("store.swap.written")
        if not (
            self._claim(expected, token)
            or (self._promote_if_decided(expected) and self._claim(expected, token))
        ):
            self._step("swap:lost")
            new.unlink(missing_ok=True)
            raise Conflict(f"{self._key} was written by somebody else in the meantime")
        self._step("swap:claimed")
        crash_point("store.swap.claimed")
        self._promote(token)
        self._step("swap:promoted")
        crash_point("store.swap.promoted")
        try:
            fsync_dir(self.directory)
        except FileNotFoundError:
            return token  # deleted after we won
        self._prune()
        return token

    def delete(self) -> bool:
        """Remove the key with all its versions; False if it was not there."""
        gone = self._scratch / f"{uuid4().hex}.gone"
        try:
            self.directory.rename(gone)
        except FileNotFoundError:
            return False
        fsync_dir(self.directory.parent)
        shutil.rmtree(gone, ignore_errors=True)
        return True

    def _names(self) -> list[_Name]:
        try:
            return [name for entry in os.listdir(self.directory) if (name := _parse(entry))]
        except FileNotFoundError:
            raise NotFound(f"{self._key} does not exist") from None

    def _at_current(self, use: Callable[[Path], _T]) -> tuple[_T, Token]:
        """``use`` the current content's path. It is opened by name, so success means that it was current."""
        give_up = time.monotonic() + self._patience
        pause = 0.0
        while True:
            names = self._names()
            self._step("read:listed")
            for name in _candidates(names):
                try:
                    return use(self.directory / str(name)), Token(name.revision, name.nonce)
                except FileNotFoundError:
                    continue
            if time.monotonic() > give_up:
                raise Corrupt(
                    f"{self.directory} has no current version",
                    "restore the directory from a backup, or delete it",
                )
            time.sleep(pause)
            pause = min(0.05, pause + 0.001)

    def _has_been(self, token: Token) -> bool:
        """Whether version ``token`` is or was the key's content (within HISTORY versions)."""
        try:
            names = self._names()
        except NotFound:
            return False
        return any(n.kind in ("cur", "was") and (n.revision, n.nonce) == token for n in names)

    def _claim(self, expected: Token, token: Token) -> bool:
        claim = self.directory / str(_Name("was", *expected, successor=token.nonce))
        try:
            (self.directory / str(_Name("cur", *expected))).rename(claim)
        except FileNotFoundError:
            return claim.exists()
        except OSError as error:
            if claim.exists():
                return True
            raise Unreachable(f"{self._key}: whether the write took place is unknown ({error})") from error
        return True

    def _promote_if_decided(self, token: Token) -> bool:
        """Promote ``token`` if a claim says that it won; False if there is no such claim."""
        try:
            names = self._names()
        except NotFound:
            return False
        if not any(n.kind == "was" and (n.revision + 1, n.successor) == token for n in names):
            return False
        self._promote(token)
        return True

    def _promote(self, token: Token) -> None:
        try:
            (self.directory / str(_Name("new", *token))).rename(self.directory / str(_Name("cur", *token)))
        except FileNotFoundError:
            return  # somebody else did, or the key was deleted

    def _prune(self) -> None:
        """Remove what is old by this one listing. ``cur`` must be in it: the directory may be another one by now."""
        try:
            names = self._names()
        except NotFound:
            return
        promoted = max((name.revision for name in names if name.kind == "cur"), default=0)
        for name in names:
            if name.kind != "cur" and name.revision <= promoted - HISTORY:
                (self.directory / str(name)).unlink(missing_ok=True)


def _candidates(names: list[_Name]) -> list[_Name]:
    """Where the current content may be, according to one listing: ``cur``, else what the highest claim announces."""
    current = [name for name in names if name.kind == "cur"]
    claims = sorted((name for name in names if name.kind == "was"), key=lambda name: name.revision)
    if claims:
        current.append(_Name("new", claims[-1].revision + 1, claims[-1].successor))
    return current
