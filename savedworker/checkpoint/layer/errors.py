"""What can go wrong with a layer beyond a refused document, and the translation of the kernel's errors into it."""

from __future__ import annotations

import errno
from types import TracebackType

from savedworker.model.errors import Fatal, Temporary

OUTSIDER = "nothing outside the worker may write to its layer"


class NoSpace(Fatal):
    """The stage or the target directory is full (ENOSPC, EDQUOT). What had been staged was removed again."""

    code = "no_space"


class ChangedWhileFrozen(Temporary):
    """A file changed between its stat and its copy inside the freeze: something outside the worker writes to the layer."""

    code = "changed_while_frozen"


class os_errors:
    """Turns OSError inside the block into ``NoSpace`` or ``Fatal`` that name the action and the path.

    Named like the function that it is used as: ``with os_errors("extract", path):``. A class and not ``contextlib.contextmanager``: it is entered for every file, and this costs a tenth.
    """

    __slots__ = ("action", "path")

    def __init__(self, action: str, path: object) -> None:
        self.action = action
        self.path = path

    def __enter__(self) -> None:
        return None

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if isinstance(error, OSError):
            raise translated(error, self.action, self.path) from error


def translated(error: OSError, action: str, path: object) -> Fatal:
    """The typed error for ``error``, which happened on ``action`` (a verb) of ``path``."""
    reason = f"cannot {action} {str(path)!r}: {error.strerror or error}"
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return NoSpace(reason, "free space on that file system, or give the worker a larger scratch volume")
    return Fatal(reason, "look at the file system, its mount options and the rights of the agent")
