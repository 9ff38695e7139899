"""What an agent writes down on its own disk, so that one that is started again can go on where it was."""

from __future__ import annotations

import os
from pathlib import Path

from pydantic import ValidationError

from savedworker.model.base import Document
from savedworker.model.errors import Fatal
from savedworker.model.manifest import Runtime, StreamPosition


class Attachment(Document):
    """An incarnation that has begun on this instance."""

    incarnation: int
    holder: str
    runtime: Runtime
    start: StreamPosition = StreamPosition()
    launched: str | None = None
    """Noted before runc is run: the checkpoint that it restores, empty for a start from nothing. The shim knows how it went."""
    leaving: str | None = None
    """Noted before the worker is stopped here for good: the checkpoint that it goes on from, empty when there is no new one.

    Whoever finds the worker killed then knows that it was by us, and no failure of its own.
    """


def load(folder: Path) -> Attachment | None:
    """The attachment in ``folder``; None when no incarnation began here (or it cannot be read: then none is trusted)."""
    try:
        return Attachment.model_validate_json((folder / "attachment.json").read_bytes())
    except (OSError, ValidationError):
        return None


def _private(path: str, flags: int) -> int:
    return os.open(path, flags, 0o600)


def save(folder: Path, attachment: Attachment) -> None:
    """Write it, all or nothing. Raises Fatal when the disk does not take it."""
    scratch = folder / "attachment.json.new"
    try:
        with open(scratch, "w", opener=_private) as file:
            file.write(attachment.model_dump_json())
            file.flush()
            os.fsync(file.fileno())
        scratch.rename(folder / "attachment.json")
    except OSError as error:
        raise Fatal(
            f"{scratch} cannot be written: {error.strerror}", "give the instance a larger disk"
        ) from error
