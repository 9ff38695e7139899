"""The journal's tape in pieces: a call costs the same however many came before it, and what is read is the tape of some moment."""

from __future__ import annotations

import contextlib
import random

import pytest

from savedworker.agent.relay import journal as tapes
from savedworker.agent.relay import pieces
from savedworker.agent.relay.journal import Journal, digest
from tests.agent.stored_journal import NAME, Lost, Stored


def effect(journal: Journal, name: str) -> bool:
    """Make a call as the relay does; whether it was recognised."""
    known = journal.repeated(name)
    journal.settle()
    journal.note(name, 200, "", b"", again=known is not None)
    return known is not None


def checkpoint(journal: Journal, number: str, *kept: str) -> None:
    journal.mark(number)
    journal.committed(number, {number, *kept})


def test_the_thousandth_call_costs_no_more_than_the_hundredth() -> None:
    stored = Stored()
    journal = stored.journal()
    checkpoint(journal, "1-1")
    costs = []
    for i in range(1000):
        before = stored.written, stored.bytes
        effect(journal, digest("PUT", f"/{i}", b""))
        costs.append((stored.written - before[0], stored.bytes - before[1]))
    assert {x for x, _ in costs} == {1}
    assert sum(x for _, x in costs[900:]) < 1.2 * sum(x for _, x in costs[:100])
    assert max(x for _, x in costs) < 20_000
    assert [x.digest for x in stored.calls()] == [digest("PUT", f"/{i}", b"") for i in range(1000)]


def test_long_answers_end_a_piece_early() -> None:
    stored = Stored()
    journal = stored.journal()
    checkpoint(journal, "1-1")
    for i in range(8):
        journal.note_read(f"read {i}", 200, "", "", b"x" * tapes.BODY_KEPT)
        effect(journal, f"write {i}")
    assert max(len(x) for x in stored.notes.values()) < 2 * pieces.BYTES_IN_PIECE + 64 * 200
    again = stored.journal()
    again.restored("1-1")
    for i in range(8):
        assert again.reread(f"read {i}") is not None
        assert again.repeated(f"write {i}") is not None


def test_a_checkpoint_deletes_what_no_checkpoint_needs() -> None:
    stored = Stored()
    journal = stored.journal()
    for number in range(5):
        checkpoint(journal, f"1-{number + 1}")
        for i in range(200):
            effect(journal, f"{number} {i}")
    assert len(stored.notes) <= 1 + 200 // pieces.CALLS_IN_PIECE + 2
    checkpoint(journal, "1-6")
    assert set(stored.notes) == {NAME}


def test_pieces_of_what_was_cut_off_are_not_found_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pieces, "CALLS_IN_PIECE", 4)
    stored = Stored()
    journal = stored.journal()
    checkpoint(journal, "1-1")
    for i in range(20):
        effect(journal, f"a {i}")
    for cut in (8, 6):  # at the edge of a piece, and within one
        journal = stored.journal()
        journal.restored("1-1")
        for i in range(cut):
            assert effect(journal, f"a {i}")
        assert not effect(journal, f"b {cut}")
        assert [x.digest for x in stored.calls()] == [*(f"a {i}" for i in range(cut)), f"b {cut}"]


def went_another_way(cut: int) -> tuple[Stored, Journal]:
    """After ten calls since checkpoint 1-1 the worker was lost, made ``cut`` of them again, and then wants something else."""
    stored = Stored()
    journal = stored.journal()
    checkpoint(journal, "1-1")
    for i in range(10):
        effect(journal, f"a {i}")
    journal = stored.journal()
    journal.restored("1-1")
    for i in range(cut):
        effect(journal, f"a {i}")
    assert journal.repeated("another") is None
    return stored, journal


def test_a_checkpoint_right_after_a_cut_has_nothing_after_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """The worker went another way, and made no call on it yet."""
    monkeypatch.setattr(pieces, "CALLS_IN_PIECE", 4)
    for cut in range(10):
        stored, journal = went_another_way(cut)
        checkpoint(journal, "2-1", "1-1")
        again = stored.journal()
        again.restored("2-1")
        assert again.repeats == 0
        again = stored.journal()
        again.restored("1-1")
        assert again.repeats == cut


def test_a_loss_while_a_checkpoint_right_after_a_cut_is_noted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pieces, "CALLS_IN_PIECE", 4)
    for cut in range(10):
        for step in range(4):
            stored, journal = went_another_way(cut)
            stored.lost_after = step
            with contextlib.suppress(Lost):
                checkpoint(journal, "2-1", "1-1")
            stored.lost_after = None
            again = stored.journal()
            again.restored("2-1")
            assert again.repeats == 0
            again = stored.journal()
            again.restored("1-1")
            assert again.repeats >= cut


class Life:
    """A worker that makes calls, is saved, lost, restored, and goes the same way or another one; beside what a plain list says of it."""

    def __init__(self, seed: int) -> None:
        self.chance = random.Random(seed)
        self.stored = Stored()
        self.journal = self.stored.journal()
        self.journal.restored(None)
        self.made: list[str] = []
        """Calls with an effect in this life, from the worker's beginning."""
        self.at: dict[str, list[str]] = {}
        """What had been made at each checkpoint that is kept."""
        self.after: dict[str, list[str]] = {}
        """What was made since then, in the life in which most recently something was."""
        self.ahead: list[str] = []
        """What the tape should know to come next."""
        self.numbers = 0

    def call(self) -> None:
        same = bool(self.ahead) and self.chance.random() < 0.9
        name = self.ahead[0] if same else f"call {self.chance.randrange(10**9)}"
        if self.chance.random() < 0.3:
            self.journal.note_read(f"read {name}", 200, "", "", b"value")
        known = effect(self.journal, name)
        assert known == same, "all that stands on the tape is recognised, and nothing else"
        self.ahead = self.ahead[1:] if same else []
        self.made.append(name)
        if not same:
            for number, before in list(self.at.items()):
                if self.made[: len(before)] == before:
                    self.after[number] = self.made[len(before) :]
                else:
                    del self.at[number], self.after[number]

    def save(self) -> None:
        self.numbers += 1
        number = f"1-{self.numbers}"
        kept = list(self.at)[-1:]
        self.journal.mark(number)
        self.journal.committed(number, {number, *kept})
        self.at = {x: self.at[x] for x in kept} | {number: list(self.made)}
        self.after = {x: self.after[x] for x in kept} | {number: list(self.ahead)}

    def lose(self) -> None:
        """And go on from one of the checkpoints that are kept."""
        self.stored.lost_after = None
        self.journal = self.stored.journal()
        number = self.chance.choice(list(self.at))
        self.journal.restored(number)
        self.made = list(self.at[number])
        self.ahead = list(self.after[number])
        self.at = {x: y for x, y in self.at.items() if self.made[: len(y)] == y or x == number}


@pytest.mark.parametrize("size", [1, 3, 64])
def test_any_life_is_recognised_as_far_as_it_goes_the_same_way(
    monkeypatch: pytest.MonkeyPatch, size: int
) -> None:
    monkeypatch.setattr(pieces, "CALLS_IN_PIECE", size)
    for seed in range(150):
        life = Life(seed)
        life.save()
        for _ in range(80):
            life.chance.choices([life.call, life.save, life.lose], [12, 2, 1])[0]()


@pytest.mark.parametrize("size", [1, 3, 64])
def test_a_loss_between_any_two_notes_leaves_what_was_the_same_before_and_after(
    monkeypatch: pytest.MonkeyPatch, size: int
) -> None:
    """For each checkpoint: the tape of before or of after, or as much as both begin with; never a call of another way."""
    monkeypatch.setattr(pieces, "CALLS_IN_PIECE", size)
    losses = 0
    for seed in range(200):
        life = Life(seed)
        life.save()
        for _ in range(40):
            life.chance.choices([life.call, life.save, life.lose], [12, 2, 1])[0]()
        before = since(life.stored)
        life.stored.lost_after = life.chance.randrange(3)
        try:
            life.chance.choice([life.call, life.save])()
        except Lost:
            losses += 1
            found = since(life.stored)
            life.stored.lost_after = None
            life.journal.settle()
            life.journal._store()  # what it would have been without the loss
            after = since(life.stored)
            for number, calls in found.items():
                ways = [x[number] for x in (before, after) if number in x]
                assert any(calls == way[: len(calls)] for way in ways), (seed, number)
                assert calls[: (n := common(*ways))] == ways[0][:n], (seed, number)
    assert losses > 50


def common(*ways: list[str]) -> int:
    """How many calls are the same at their beginnings."""
    for i, calls in enumerate(zip(*ways, strict=False)):
        if len(set(calls)) > 1:
            return i
    return min(len(x) for x in ways)


def since(stored: Stored) -> dict[str, list[str]]:
    """What stands on the tape after each mark."""
    index, calls = pieces.Shelf(stored._access()).read()
    return {x: [c.digest for c in calls[at - index.first :]] for x, at in index.marks.items()}


def test_what_could_not_be_stored_is_stored_with_the_next_call(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pieces, "CALLS_IN_PIECE", 4)
    stored = Stored()
    journal = stored.journal()
    checkpoint(journal, "1-1")
    for i in range(30):
        stored.away = 5 <= i < 20
        effect(journal, f"a {i}")
    assert [x.digest for x in stored.calls()] == [f"a {i}" for i in range(30)]
