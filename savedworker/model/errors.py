"""The errors of the whole product. Each is one clear line (what is wrong, where) and a fix."""

from __future__ import annotations


class SavedWorkerError(Exception):
    """Base of all errors. ``code`` is machine-readable, ``fix`` says what the reader can do; it may be empty."""

    code = "error"

    def __init__(self, message: str, fix: str = "") -> None:
        super().__init__(message)
        self.message = message
        self.fix = fix

    def __str__(self) -> str:
        return f"{self.message}. Fix: {self.fix}" if self.fix else self.message

    def to_json(self) -> dict[str, str]:
        """The ``{code, message, fix}`` document that every command prints with ``--json``."""
        return {"code": self.code, "message": self.message, "fix": self.fix}


class Refused(SavedWorkerError):
    """The request or document is wrong and will stay wrong: the caller has to change it."""

    code = "refused"


class BadSpec(Refused):
    """A worker's specification is missing, malformed or contradictory."""

    code = "spec_error"


class NoKey(Refused):
    """A worker is sealed with a key that is not configured here."""

    code = "no_key"


class NotFound(SavedWorkerError):
    """A named thing (worker, checkpoint, object) does not exist."""

    code = "not_found"


class AlreadyExists(SavedWorkerError):
    """A create-only write found something there already."""

    code = "already_exists"


class Conflict(SavedWorkerError):
    """A compare-and-swap lost: somebody else wrote first. Read again and decide again."""

    code = "conflict"


class Corrupt(SavedWorkerError):
    """Stored data is truncated, altered or of an unknown format, and was not used."""

    code = "corrupt"


class Temporary(SavedWorkerError):
    """Expected to go away by itself. ``retry_after`` is in seconds."""

    code = "temporary"

    def __init__(self, message: str, retry_after: float = 1.0, fix: str = "") -> None:
        super().__init__(message, fix)
        self.retry_after = retry_after


class Unreachable(Temporary):
    """The store or another service did not answer within its time limit."""

    code = "unreachable"


class Fatal(SavedWorkerError):
    """Nothing that the program can do will mend this: missing tools, rights or space, or a broken invariant."""

    code = "fatal"


class Fenced(SavedWorkerError):
    """This incarnation does not hold the lease any more; nothing that it does counts from now on."""

    code = "fenced"
