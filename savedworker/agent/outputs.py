"""Publishing a worker's outputs, once, when it has succeeded.

Nothing of the worker runs any more. Its files are read through the overlay, which has the image, what was restored and what it
wrote since. Everything is staged, then the lease is proven once more, then it is made visible; only after that does the
record say that the worker succeeded. Whoever is interrupted in between begins again.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from savedworker.crashpoints import crash_point
from savedworker.model.errors import BadSpec, Refused
from savedworker.model.spec import Output
from savedworker.store.places import Outgoing, Place, Wanted, open_place


@dataclass(frozen=True)
class Published:
    """What was published. ``left_out``: paths of the worker's that are neither files nor folders."""

    files: int
    size: int
    left_out: tuple[str, ...]


def publish(
    outputs: Sequence[Output], rootfs: Path, mark: str, wanted: Wanted, prove: Callable[[], None]
) -> Published:
    """Publish ``outputs`` from the files below ``rootfs``.

    ``wanted`` is called between pieces, ``prove`` once before anything becomes visible; what they raise ends it. Raises BadSpec
    for an output that the worker did not make or that has no place to go to; Fatal, Unreachable.
    """
    left_out: list[str] = []
    plan: list[tuple[Place, list[Outgoing]]] = []
    for number, each in enumerate(outputs):
        plan.append(_plan(each, rootfs, f"{mark}-{number}", left_out))
    try:
        crash_point("outputs.planned")
        for place, files in plan:
            place.stage(files, wanted)
        crash_point("outputs.staged")
        wanted()
        prove()
        for place, _ in plan:
            place.commit(wanted)
        crash_point("outputs.committed")
    except BaseException:
        for place, _ in plan:
            place.abandon()
        raise
    every = [file for _, files in plan for file in files]
    return Published(len(every), sum(file.size for file in every), tuple(left_out))


def _plan(output: Output, rootfs: Path, mark: str, left_out: list[str]) -> tuple[Place, list[Outgoing]]:
    source = _own(rootfs, output.path)
    status = source.lstat()
    url = output.url
    if stat.S_ISDIR(status.st_mode):
        url = url if url.endswith("/") else url + "/"
        files = list(_below(source, "", output.path.rstrip("/"), left_out))
        if not files:
            raise BadSpec(f"output {output.path} is an empty folder", "have the worker write into it")
    elif stat.S_ISREG(status.st_mode) and not output.path.endswith("/"):
        url = url + source.name if url.endswith("/") else url
        files = [Outgoing("", source, status.st_size)]
    else:
        raise BadSpec(f"output {output.path} is neither a file nor a folder", "correct the path")
    try:
        return open_place(url, mark), files
    except Refused as error:
        raise BadSpec(f"output {url}: {error.message}", error.fix) from error


def _own(rootfs: Path, path: str) -> Path:
    """The file of the worker's at ``path``. No link is followed: the worker may have made it, and we may read more than it may."""
    here = rootfs
    for part in path.strip("/").split("/"):
        here = here / part
        try:
            status = here.lstat()
        except (FileNotFoundError, NotADirectoryError) as error:
            raise BadSpec(
                f"output {path} is not there: the worker did not make it", "correct the path, or the program"
            ) from error
        if stat.S_ISLNK(status.st_mode):
            raise BadSpec(f"output {path} leads through a symbolic link", "name the real path")
    return here


def _below(folder: Path, prefix: str, where: str, left_out: list[str]) -> Iterator[Outgoing]:
    """All files below ``folder``. Links and special files are left out."""
    with os.scandir(folder) as entries:
        for entry in sorted(entries, key=lambda each: each.name):
            name = f"{prefix}{entry.name}"
            if entry.is_dir(follow_symlinks=False):
                yield from _below(Path(entry.path), f"{name}/", where, left_out)
            elif entry.is_file(follow_symlinks=False):
                yield Outgoing(name, Path(entry.path), entry.stat(follow_symlinks=False).st_size)
            else:
                left_out.append(f"{where}/{name}")
