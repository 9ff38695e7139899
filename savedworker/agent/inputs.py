"""Fetching a worker's inputs into its files, before its first start (or a cold start).

They are part of the writable layer from then on: every checkpoint has them, and no migration fetches them again.
"""

from __future__ import annotations

import contextlib
import os
import stat
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

from savedworker.crashpoints import crash_point
from savedworker.model.errors import BadSpec, Fatal, NotFound, Refused
from savedworker.model.spec import Input
from savedworker.store.places import AT_ONCE, Item, Place, Wanted, open_place

_LINKS_MOST = 40


@dataclass(frozen=True)
class Fetched:
    """How much there was."""

    files: int
    size: int


def fetch(
    inputs: Sequence[Input], rootfs: Path, owner: tuple[int, int], mark: str, wanted: Wanted
) -> Fetched:
    """Write all of ``inputs`` below ``rootfs``, in which nothing runs yet, as files of ``owner`` (uid, gid).

    ``wanted`` is called between pieces; what it raises ends it. Raises BadSpec for what is not there or cannot be named so,
    Fatal for rights and space, Unreachable.
    """
    work: list[tuple[Place, Item, Path]] = []
    for each in inputs:
        try:
            place = open_place(each.url, mark)
            found = place.find()
        except NotFound as error:
            raise BadSpec(f"input {each.url}: {error.message}", "correct the URL, or put it there") from error
        except Refused as error:
            raise BadSpec(f"input {each.url}: {error.message}", error.fix) from error
        target = each.path.rstrip("/")
        if each.path.endswith("/") and not each.url.endswith("/"):
            target = f"{target}/{each.url.rpartition('/')[2]}"
        for item in found:
            work.append((place, item, inside(rootfs, f"{target}/{item.name}" if item.name else target)))
    crash_point("inputs.found")
    for _, _, file in work:  # one after the other: several threads would quarrel about folders
        _make_folder(file.parent, owner)
    with ThreadPoolExecutor(AT_ONCE, thread_name_prefix="inputs") as pool:
        under_way = [pool.submit(_fetch, *each, owner, wanted) for each in work]
        try:
            for part in under_way:
                part.result()
        except BaseException:
            pool.shutdown(wait=True, cancel_futures=True)
            raise
    crash_point("inputs.fetched")
    return Fetched(len(work), sum(item.size for _, item, _ in work))


def inside(root: Path, path: str) -> Path:
    """Where the worker's ``path`` is below ``root``, with links followed as the worker follows them. Raises BadSpec.

    Only for files that nobody changes meanwhile.
    """
    left = path.split("/")
    found: list[str] = []
    links = 0
    while left:
        part = left.pop(0)
        if part in ("", "."):
            continue
        if part == "..":
            if found:
                found.pop()
            continue
        here = root.joinpath(*found, part)
        if here.is_symlink():
            links += 1
            if links > _LINKS_MOST:
                raise BadSpec(f"{path}: too many symbolic links in the image", "name the real path")
            to = os.readlink(here)
            if to.startswith("/"):
                found = []
            left = [*to.split("/"), *left]
            continue
        found.append(part)
    return root.joinpath(*found)


def _make_folder(folder: Path, owner: tuple[int, int]) -> None:
    missing = []
    while not folder.exists():
        missing.append(folder)
        folder = folder.parent
    for each in reversed(missing):
        with _told(each):
            each.mkdir(mode=0o755)
            os.chown(each, *owner)


def _fetch(place: Place, item: Item, file: Path, owner: tuple[int, int], wanted: Wanted) -> None:
    with _told(file):
        with contextlib.suppress(FileNotFoundError):
            if not stat.S_ISDIR(file.lstat().st_mode):
                file.unlink()  # whatever the image has there: a file, a device
        descriptor = os.open(file, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o644)
        with os.fdopen(descriptor, "wb") as out:
            os.fchown(descriptor, *owner)
            os.fchmod(descriptor, 0o644)
            size = 0
            for piece in place.read(item):
                wanted()
                size += len(piece)
                out.write(piece)
    if size != item.size:
        raise BadSpec(
            f"input {place.url}: {item.name or 'it'} changed while it was fetched",
            "publish it before it is used",
        )


@contextlib.contextmanager
def _told(file: Path) -> Iterator[None]:
    """What the file system refuses, as one of our errors."""
    try:
        yield
    except FileExistsError as error:
        raise BadSpec(f"input: {file} is a folder, and a file should go there", "change the path") from error
    except NotADirectoryError as error:
        raise BadSpec(f"input: a file is in the way of the folder {file}", "change the path") from error
    except OSError as error:
        raise Fatal(
            f"an input cannot be written to {file}: {error.strerror}", "give the instance a larger disk"
        ) from error
