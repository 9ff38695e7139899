"""A journal whose notes lie in a dictionary, and may fail or be cut short."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from savedworker.agent.relay.journal import Journal
from savedworker.agent.relay.pieces import Call, Index, Notes, Shelf
from savedworker.model.base import Document

NAME = "journal"


class Lost(BaseException):
    """The host is lost in this moment."""


class Stored:
    """``away``: the store takes nothing. ``lost_after``: the host is lost after so many more notes were written or dropped."""

    def __init__(self) -> None:
        self.notes: dict[str, str] = {}
        self.away = False
        self.lost_after: int | None = None
        self.written = 0
        self.bytes = 0

    def journal(self) -> Journal:
        """As the next relay reads it."""
        return Journal(self._access())

    def index(self) -> Index:
        return Shelf(self._access()).read()[0]

    def calls(self) -> list[Call]:
        return Shelf(self._access()).read()[1]

    def _access(self) -> Notes:
        return Notes(NAME, self._load, self._keep, self._drop)

    def _load(self, name: str, kind: type[Any]) -> Any:
        return kind.model_validate_json(self.notes[name]) if name in self.notes else None

    def _keep(self, name: str, note: Document) -> bool:
        self._step()
        if self.away:
            return False
        self.notes[name] = note.model_dump_json()
        self.written += 1
        self.bytes += len(self.notes[name])
        return True

    def _drop(self, names: Sequence[str]) -> None:
        self._step()
        for name in names:
            self.notes.pop(name, None)

    def _step(self) -> None:
        if self.lost_after is not None:
            if self.lost_after == 0:
                raise Lost
            self.lost_after -= 1
