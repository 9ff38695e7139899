"""How the journal's tape is stored: in pieces of bounded length, so that a call costs the same however many came before it.

A piece is written anew with each call until it is full; the index says where the tape begins and where its marks are. Each of them is a
note by itself, and a host may be lost between any two: what is read then is the tape as it was at one of the moments in between. Pieces of
a tape that was cut off may still lie in the store. They are told by their ``epoch``, which rises with each cut: what follows a piece on
the tape was never written in an earlier epoch than it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from pydantic import Field

from savedworker.model.base import Count, Document, Frozen

CALLS_IN_PIECE = 64
BYTES_IN_PIECE = 64 << 10
"""A piece is full when its answers have this many bytes or more."""

Kind = TypeVar("Kind", bound=Document)


class Call(Frozen):
    """One call that was answered. ``body`` is base64; None when it was too long to keep, or is to be asked for again."""

    digest: str
    status: int
    content_type: str = ""
    content_range: str = ""
    body: str | None = None
    read: bool = False

    @property
    def bytes(self) -> int:
        return len(self.body or "")


class Index(Document):
    """Where the tape begins: ``first`` counts the calls before it, ``piece`` is the number of the piece that has the first one.

    ``epoch``: no earlier one has a piece of this tape. ``marks``: the head at each checkpoint, counted as ``first`` is.
    """

    first: Count = 0
    piece: Count = 0
    epoch: Count = 0
    marks: dict[str, int] = Field(default_factory=dict)


class Piece(Document):
    """``first`` counts the calls before those in it."""

    first: Count
    epoch: Count
    calls: tuple[Call, ...]


class Notes:
    """The notes beside the worker that the tape is kept in. ``name`` is the index's.

    ``load`` gives a note that is there and of this kind, else None. ``keep`` says whether it could be stored.
    """

    def __init__(
        self,
        name: str,
        load: Callable[[str, type[Any]], Any],
        keep: Callable[[str, Document], bool],
        drop: Callable[[Sequence[str]], None],
    ) -> None:
        self._name = name
        self._load = load
        self._keep = keep
        self._drop = drop

    def piece_name(self, number: int) -> str:
        """The name of a piece's note."""
        return f"{self._name}-{number}"

    def index(self) -> Index | None:
        found: Index | None = self._load(self._name, Index)
        return found

    def piece(self, number: int) -> Piece | None:
        found: Piece | None = self._load(self.piece_name(number), Piece)
        return found

    def keep_index(self, index: Index) -> bool:
        return self._keep(self._name, index)

    def keep_piece(self, number: int, piece: Piece) -> bool:
        return self._keep(self.piece_name(number), piece)

    def drop_pieces(self, numbers: Sequence[int]) -> None:
        if numbers:
            self._drop([self.piece_name(x) for x in numbers])


class Shelf:
    """The pieces of one tape. Calls are counted from the worker's first one."""

    def __init__(self, notes: Notes) -> None:
        self._notes = notes
        self._number = 0
        """Of the first of ``_pieces``."""
        self._pieces: list[tuple[int, int]] = []
        """First call and epoch of each piece that has calls of the tape."""
        self._end = 0
        """The number of the first call that is not stored."""
        self._epoch = 0
        self._is_cut = False
        """What lies in the store after ``_end`` looks still as if it were of the tape."""
        self._index: Index | None = None

    def read(self) -> tuple[Index, list[Call]]:
        """The tape that is stored: where it begins, its marks, and its calls."""
        index = self._index = self._notes.index() or Index()
        self._number, self._epoch, self._end = index.piece, index.epoch, index.first
        calls: list[Call] = []
        number = index.piece
        while (piece := self._notes.piece(number)) is not None:
            follows = piece.first <= self._end if number == index.piece else piece.first == self._end
            if not follows or piece.epoch < self._epoch:
                break
            calls += piece.calls[self._end - piece.first :]
            self._pieces.append((piece.first, piece.epoch))
            self._end = index.first + len(calls)
            self._epoch = piece.epoch
            number += 1
        return index, calls

    def cut(self, end: int) -> None:
        """The calls from number ``end`` on are not of the tape any more."""
        if end < self._end:
            self._end = end
            self._epoch += 1
            self._is_cut = True

    def clear(self) -> None:
        """No call is of the tape any more."""
        self._number += len(self._pieces)
        self._pieces = []
        self._epoch += 1
        self._is_cut = False

    def write(
        self, first: int, marks: dict[str, int], calls: Sequence[Call], changed: int | None = None
    ) -> None:
        """Store what is not stored: ``calls`` begin with number ``first``; number ``changed`` is another one than was stored."""
        while self._pieces and self._pieces[-1][0] >= self._end:
            self._pieces.pop()
        if not self._write_index(first, marks):
            return
        self._end = max(self._end, first)
        if changed is not None and changed < self._end:
            self._write_again(first, calls, changed)
        if not self._pieces:
            self._is_cut = False  # the index has another epoch
        while self._is_cut or self._end < first + len(calls):
            if not self._write_piece(first, calls):
                return

    def settle_cut(self, first: int, marks: dict[str, int], calls: Sequence[Call]) -> None:
        """Before the tape gets a mark: what was cut off must not be found after it."""
        if self._is_cut:
            self.write(first, marks, calls)

    def _write_index(self, first: int, marks: dict[str, int]) -> bool:
        ends = [*(start for start, _ in self._pieces[1:]), self._end]
        obsolete = sum(end <= first for end in ends[: len(self._pieces)])
        number, left = self._number + obsolete, self._pieces[obsolete:]
        index = Index(first=first, piece=number, epoch=left[0][1] if left else self._epoch, marks=marks)
        if index != self._index:
            if not self._notes.keep_index(index):
                return False
            self._notes.drop_pieces(range(self._index.piece if self._index else 0, number))
            self._index = index
        self._number, self._pieces = number, left
        return True

    def _write_again(self, first: int, calls: Sequence[Call], changed: int) -> None:
        """The piece that has call number ``changed``. It stays as long as it is, and so what follows it follows it still."""
        at = max(i for i, (start, _) in enumerate(self._pieces) if start <= changed)
        end = self._pieces[at + 1][0] if at + 1 < len(self._pieces) else self._end
        start, epoch = max(self._pieces[at][0], first), self._pieces[at][1]
        piece = Piece(first=start, epoch=epoch, calls=tuple(calls[start - first : end - first]))
        self._notes.keep_piece(self._number + at, piece)

    def _write_piece(self, first: int, calls: Sequence[Call]) -> bool:
        """The last piece, with all that has room in it, or the one after it."""
        start = max(self._pieces[-1][0], first) if self._pieces else self._end
        is_new = not self._pieces or (not self._is_cut and _full(calls[start - first : self._end - first]))
        if is_new:
            start = self._end
        end = self._end
        while end < first + len(calls) and not _full(calls[start - first : end - first]):
            end += 1
        piece = Piece(first=start, epoch=self._epoch, calls=tuple(calls[start - first : end - first]))
        number = self._number + len(self._pieces) - (not is_new)
        if not self._notes.keep_piece(number, piece):
            return False
        self._pieces[len(self._pieces) - (not is_new) :] = [(start, self._epoch)]
        self._end, self._is_cut = end, False
        return True


def _full(calls: Sequence[Call]) -> bool:
    return len(calls) >= CALLS_IN_PIECE or sum(x.bytes for x in calls) >= BYTES_IN_PIECE
