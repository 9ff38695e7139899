"""Places outside of our store that a user names: where inputs come from and outputs go to (``s3://``, ``gs://``, ``file://``).

Names there are the user's: anything that a file can be called, not the strict keys of our own store.

**All or nothing**, as far as a store can: everything is staged first, where nobody sees it, and then made visible in one go that
moves as few bytes as possible. In a directory each file is renamed; a folder that is not there yet appears as a whole. On an
object store a large file is an upload whose last request is held back; the small ones are put.
"""

from __future__ import annotations

import errno
import os
import shutil
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol
from urllib.parse import unquote

from savedworker.crashpoints import crash_point
from savedworker.model.errors import Fatal, NotFound, Refused, Unreachable
from savedworker.store.backend import connect_gs, connect_s3

if TYPE_CHECKING:
    from obstore import WritableFile

PIECE = 4 << 20
"""Bytes that are read and written at a time."""
HELD_LEAST = 8 << 20
"""A file of at least so many bytes is staged as an upload that is not completed; smaller ones are put at the end."""
HELD_MOST = 24
"""Uploads that are held back at a time, each with up to a part in memory. The largest files are the ones held."""
PARTS_MOST = 9000
"""Parts of an upload; S3 takes 10000."""
AT_ONCE = 8

Wanted = Callable[[], None]
"""Called between pieces; what it raises ends the transfer."""


@dataclass(frozen=True)
class Item:
    """One file: its name below the place (empty: the place itself) and its bytes."""

    name: str
    size: int


@dataclass(frozen=True)
class Outgoing:
    """A file of this machine that goes to ``name`` below the place (empty: to the place itself)."""

    name: str
    file: Path
    size: int


class Place(Protocol):
    """One URL."""

    url: str

    def find(self) -> list[Item]:
        """What is there: one item for an object, all below it for a URL that ends in a slash. Raises NotFound and others."""
        ...

    def read(self, item: Item) -> Iterator[bytes]:
        """The content of what ``find`` told."""
        ...

    def stage(self, files: Sequence[Outgoing], wanted: Wanted) -> None:
        """Bring ``files`` as far as nobody sees them. What an earlier try left is removed."""
        ...

    def commit(self, wanted: Wanted) -> None:
        """Make visible what was staged."""
        ...

    def abandon(self) -> None:
        """Forget what was staged and not committed."""
        ...


def open_place(url: str, mark: str, timeout: float = 30.0) -> Place:
    """The place at ``url`` (checked already by the spec). ``mark`` tells the stages of several writers apart.

    Raises Refused; nothing is contacted yet.
    """
    scheme, _, rest = url.partition("://")
    if scheme == "file":
        return FolderPlace(url, Path(unquote(rest)), mark)
    bucket, _, key = rest.partition("/")
    return ObjectPlace(url, scheme, bucket, key, timeout)


class FolderPlace:
    """A file or folder of this machine, also on a shared mount."""

    def __init__(self, url: str, path: Path, mark: str) -> None:
        self.url = url
        self._tree = url.endswith("/")
        self._path = path
        self._stage = path.parent / f".savedworker-{mark}"
        self._staged: list[Outgoing] = []

    def find(self) -> list[Item]:
        with _file_errors(self.url):
            if not self._tree:
                if self._path.is_dir():
                    raise NotFound(f"{self.url} is a folder; write it with a slash at its end")
                return [Item("", self._path.stat().st_size)]
            found = []
            for folder, _, names in os.walk(self._path, onerror=_raise):
                for name in names:
                    file = Path(folder, name)
                    if file.is_file():
                        found.append(Item(str(file.relative_to(self._path)), file.stat().st_size))
            return sorted(found, key=lambda item: item.name)

    def read(self, item: Item) -> Iterator[bytes]:
        with _file_errors(self.url), open(self._path / item.name if item.name else self._path, "rb") as file:
            while piece := file.read(PIECE):
                yield piece

    def stage(self, files: Sequence[Outgoing], wanted: Wanted) -> None:
        with _file_errors(self.url):
            self._path.parent.mkdir(parents=True, exist_ok=True)
            self.abandon()
            self._stage.mkdir()
            for each in files:
                target = self._stage / (each.name or "file")
                target.parent.mkdir(parents=True, exist_ok=True)
                with open(each.file, "rb") as source, open(target, "xb") as out:
                    while piece := source.read(PIECE):
                        out.write(piece)
                        wanted()
                    out.flush()
                    os.fsync(out.fileno())
            self._staged = list(files)

    def commit(self, wanted: Wanted) -> None:
        with _file_errors(self.url):
            if self._tree and not self._path.exists():
                wanted()
                self._stage.rename(self._path)
                _sync(self._path.parent)
                crash_point("outputs.visible.folder")
            else:
                for each in self._staged:
                    wanted()
                    target = self._path / each.name if each.name else self._path
                    target.parent.mkdir(parents=True, exist_ok=True)
                    (self._stage / (each.name or "file")).rename(target)
                    _sync(target.parent)
                    crash_point("outputs.visible.file")
            self.abandon()

    def abandon(self) -> None:
        shutil.rmtree(self._stage, ignore_errors=True)
        self._staged = []


class ObjectPlace:
    """An object, or all below a prefix, in S3 or Google Cloud Storage."""

    def __init__(self, url: str, scheme: str, bucket: str, key: str, timeout: float) -> None:
        from savedworker.store.objects import clients_for_places

        self.url = url
        self._tree = url.endswith("/")
        self._key = key.rstrip("/")
        connect = partial(connect_s3 if scheme == "s3" else connect_gs, bucket, None, {})
        with _object_errors(url):
            self._documents, self._transfers = clients_for_places(connect, timeout)
        self._held: list[WritableFile] = []
        self._later: list[Outgoing] = []

    def find(self) -> list[Item]:
        import obstore

        with _object_errors(self.url):
            if not self._tree:
                return [Item("", obstore.head(self._documents, self._key)["size"])]
            found = [
                Item(meta["path"].removeprefix(self._key).lstrip("/"), meta["size"])
                for page in obstore.list(self._documents, self._key or None, chunk_size=1000)
                for meta in page
            ]
        if not found:
            raise NotFound(f"{self.url}: there is nothing")
        names = {item.name for item in found}
        folders = {"/".join(parts[:n]) for parts in (x.split("/") for x in names) for n in range(len(parts))}
        # What consoles put there so that a folder is seen: an empty object with the folder's own name.
        return [item for item in found if item.size or item.name not in folders]

    def read(self, item: Item) -> Iterator[bytes]:
        import obstore

        with _object_errors(self.url):
            pieces = iter(obstore.get(self._transfers, self._name(item.name)).stream(min_chunk_size=PIECE))
        while True:
            with _object_errors(self.url):
                piece = next(pieces, None)
            if piece is None:
                return
            yield bytes(piece)

    def _name(self, name: str) -> str:
        return "/".join(part for part in (self._key, name) if part)

    def stage(self, files: Sequence[Outgoing], wanted: Wanted) -> None:
        self.abandon()
        by_size = sorted(files, key=lambda each: each.size, reverse=True)
        large = [each for each in by_size[:HELD_MOST] if each.size >= HELD_LEAST]
        self._later = by_size[len(large) :]
        self._held = _side_by_side(large, partial(self._hold, wanted=wanted))

    def _hold(self, each: Outgoing, wanted: Wanted) -> WritableFile:
        import obstore

        with _object_errors(self.url), open(each.file, "rb") as source:
            part = max(HELD_LEAST, each.size // PARTS_MOST + 1)
            writer = obstore.open_writer(self._transfers, self._name(each.name), buffer_size=part)
            while piece := source.read(PIECE):
                wanted()
                writer.write(piece)
        return writer

    def commit(self, wanted: Wanted) -> None:
        _side_by_side(self._held, partial(self._complete, wanted=wanted))
        _side_by_side(self._later, partial(self._put, wanted=wanted))
        self._held, self._later = [], []

    def _complete(self, writer: WritableFile, wanted: Wanted) -> None:
        wanted()
        with _object_errors(self.url):
            writer.close()
        crash_point("outputs.visible.large")

    def _put(self, each: Outgoing, wanted: Wanted) -> None:
        import obstore

        wanted()
        with _object_errors(self.url), open(each.file, "rb") as source:
            if each.size < HELD_LEAST:
                obstore.put(self._documents, self._name(each.name), source.read(), use_multipart=False)
            else:
                obstore.put(self._transfers, self._name(each.name), source)
        crash_point("outputs.visible.small")

    def abandon(self) -> None:
        # An upload that is never completed is invisible; a lifecycle rule of the bucket removes it.
        self._held, self._later = [], []


def _side_by_side(things: Sequence[Any], work: Callable[[Any], Any]) -> list[Any]:
    """``work`` on all, several at a time; the first error after all that had begun have ended."""
    if len(things) < 2:
        return [work(each) for each in things]
    with ThreadPoolExecutor(AT_ONCE, thread_name_prefix="places") as pool:
        under_way = [pool.submit(work, each) for each in things]
        try:
            return [each.result() for each in under_way]
        except BaseException:
            pool.shutdown(wait=True, cancel_futures=True)
            raise


def _raise(error: OSError) -> None:
    raise error


def _sync(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


@contextmanager
def _file_errors(where: str) -> Iterator[None]:
    try:
        yield
    except FileNotFoundError as error:
        raise NotFound(f"{where}: there is no {error.filename}") from error
    except OSError as error:
        if error.errno in (errno.EIO, errno.ESTALE, errno.ETIMEDOUT):
            raise Unreachable(f"{where}: {error.strerror}") from error
        raise Fatal(
            f"{where}: {error.strerror} ({error.filename})", "check rights and space there"
        ) from error


@contextmanager
def _object_errors(where: str) -> Iterator[None]:
    from obstore.exceptions import BaseError

    from savedworker.store.objects import explain

    try:
        yield
    except OSError as error:
        if isinstance(error, BaseError | FileNotFoundError):
            raise explain(error, where) from error
        raise Fatal(f"{where}: {error.strerror or error}") from error
    except BaseError as error:
        raise explain(error, where) from error
    except (ValueError, TypeError) as error:
        why = str(error).partition("\n")[0]
        raise Refused(f"{where} cannot be used: {why}", "check the URL and the environment") from error
