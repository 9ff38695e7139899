"""Output reads as one stream over all incarnations, with a mark wherever work was lost."""

from __future__ import annotations

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from savedworker.model.errors import Conflict, Corrupt, Refused, Unreachable
from savedworker.store import Store, WorkerStore, open_store
from savedworker.store.logs import MAX_PIECE, Cursor, LogPiece, LogWriter, Mark, Text, read, render_mark


@pytest.fixture
def worker(store: Store) -> WorkerStore:
    return WorkerStore(store, "w")


def say(worker: WorkerStore, incarnation: int, position: int, *pieces: bytes) -> LogWriter:
    writer = LogWriter(worker, "stdout", incarnation, position)
    writer.begin()
    for piece in pieces:
        writer.append(piece)
    return writer


def shown(worker: WorkerStore, after: Cursor | None = None) -> list[bytes | Mark]:
    """The text between marks, joined."""
    result: list[bytes | Mark] = []
    for piece in read(worker, "stdout", after):
        if isinstance(piece, Text) and result and isinstance(result[-1], bytes):
            result[-1] += piece.data
        else:
            result.append(piece.data if isinstance(piece, Text) else piece)
    return result


def test_a_stream_nobody_wrote_is_empty(worker: WorkerStore) -> None:
    assert list(read(worker, "stdout")) == []
    say(worker, 1, 0)
    assert list(read(worker, "stdout")) == []


def test_what_was_appended_is_read_in_order(worker: WorkerStore) -> None:
    writer = say(worker, 1, 0, b"one\n", b"", b"two\n", b"three")
    assert writer.position == 13
    assert shown(worker) == [b"one\ntwo\nthree"]


def test_with_notice_every_byte_appears_once_and_nothing_is_marked(worker: WorkerStore) -> None:
    say(worker, 1, 0, b"one\n", b"tw")
    say(worker, 2, 6, b"o\n")
    say(worker, 3, 8)
    say(worker, 4, 8, b"three\n")
    assert shown(worker) == [b"one\ntwo\nthree\n"]


def test_a_loss_without_notice_is_marked_where_the_replay_begins(worker: WorkerStore) -> None:
    say(worker, 1, 0, b"1\n2\n", b"3\n4\n")
    say(worker, 2, 4)
    marks = [piece for piece in shown(worker) if isinstance(piece, Mark)]
    assert marks == [Mark(1, 2, 4, 2, 4, 0, False, Cursor(2, 4))]
    LogWriter(worker, "stdout", 2, 4).append(b"3\n4\n5\n")
    assert shown(worker) == [b"1\n2\n3\n4\n", marks[0], b"3\n4\n5\n"]
    assert render_mark(marks[0]) == (
        "[savedworker] incarnation 1 ended without a last checkpoint; the last 2 lines above, since checkpoint position 4, "
        "are done again below"
    )


def test_a_cold_start_discards_everything_before_it(worker: WorkerStore) -> None:
    say(worker, 1, 0, b"a\nb\n")
    say(worker, 2, 4, b"c\nhalf")
    say(worker, 3, 0, b"a\n")
    before, mark, after = shown(worker)
    assert (before, after) == (b"a\nb\nc\nhalf", b"a\n")
    assert isinstance(mark, Mark)
    assert (mark.lost, mark.discarded_bytes, mark.discarded_lines, mark.replay_from) == (2, 10, 4, 0)
    assert mark.mid_line


def test_lines_lost_twice_are_counted_in_what_was_valid_then(worker: WorkerStore) -> None:
    say(worker, 1, 0, b"1\n2\n3\n4\n5\n")
    say(worker, 2, 4, b"C\nD\n")  # 1 2 | C D
    say(worker, 3, 2, b"b\n")  # back to after line 1: discards 2 C D
    marks = [piece for piece in read(worker, "stdout") if isinstance(piece, Mark)]
    assert [(m.lost, m.discarded_lines, m.discarded_bytes) for m in marks] == [(1, 3, 6), (2, 3, 6)]
    for after in (Cursor(2, 8), Cursor(2, 4), Cursor(1, 10), Cursor(1, 2)):
        last = [piece for piece in read(worker, "stdout", after) if isinstance(piece, Mark)][-1]
        assert last == marks[-1]


def test_a_mark_for_one_line_and_for_missing_output_reads_well() -> None:
    assert "the last line above, since checkpoint position 7, is done again below" in render_mark(
        Mark(3, 4, 2, 1, 7, 0, False, Cursor(4, 7))
    )
    assert render_mark(Mark(3, 4, 0, 0, 9, 5, False, Cursor(4, 9))) == (
        "[savedworker] 5 bytes of incarnation 3's output never reached the store"
    )


def test_reading_can_be_resumed_after_every_piece(worker: WorkerStore) -> None:
    say(worker, 1, 0, b"1\n", b"2\n", b"3\n")
    say(worker, 2, 2, b"2\n", b"3\n")
    say(worker, 3, 6, b"4\n")
    pieces = list(read(worker, "stdout"))
    assert len(pieces) == 7
    for n, piece in enumerate(pieces):
        assert list(read(worker, "stdout", Cursor.parse(str(piece.cursor)))) == pieces[n + 1 :]


def test_following_sees_what_comes_later(worker: WorkerStore) -> None:
    writer = say(worker, 1, 0, b"1\n")
    cursor = list(read(worker, "stdout"))[-1].cursor
    assert list(read(worker, "stdout", cursor)) == []
    writer.append(b"2\n")
    (piece,) = read(worker, "stdout", cursor)
    assert piece == Text(b"2\n", Cursor(1, 4))
    say(worker, 2, 2)
    (mark,) = read(worker, "stdout", piece.cursor)
    assert isinstance(mark, Mark)
    assert list(read(worker, "stdout", mark.cursor)) == []


def test_a_gap_ends_the_read_until_a_later_incarnation_begins(worker: WorkerStore, store: Store) -> None:
    say(worker, 1, 0, b"one\n", b"two\n", b"three\n")
    store.delete([f"workers/w/logs/stdout/1/{4:020d}"])
    assert shown(worker) == [b"one\n"]
    say(worker, 2, 14, b"four\n")
    first, gap, rest = shown(worker)
    assert (first, rest) == (b"one\n", b"three\nfour\n")
    assert isinstance(gap, Mark)
    assert gap.missing_bytes == 4


def test_output_that_never_reached_the_store_is_said_to_be_missing(worker: WorkerStore) -> None:
    say(worker, 1, 0, b"one\n")
    say(worker, 2, 8, b"three\n")
    first, gap, rest = shown(worker)
    assert (first, rest) == (b"one\n", b"three\n")
    assert gap == Mark(1, 2, 0, 0, 8, 4, False, Cursor(2, 8))


def test_appending_again_after_an_error_repeats_nothing(
    worker: WorkerStore, store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    writer = say(worker, 1, 0, b"one\n")
    real = store.create

    def lost_answer(key: str, data: bytes) -> None:
        real(key, data)
        raise Unreachable("the answer was lost")

    with monkeypatch.context() as patch:
        patch.setattr(store, "create", lost_answer)
        with pytest.raises(Unreachable):
            writer.append(b"two\n")
    assert writer.position == 4
    writer.append(b"two\nthree\n")
    assert writer.position == 14
    assert shown(worker) == [b"one\ntwo\nthree\n"]


@pytest.mark.parametrize("cuts", [(4,), (2,), (3, 6), (1, 2, 3), (14,), (20,)])
def test_an_agent_that_starts_again_ships_the_same_bytes_once(
    worker: WorkerStore, cuts: tuple[int, ...]
) -> None:
    say(worker, 1, 0, b"one\n", b"two\nthree\n")
    again = LogWriter(worker, "stdout", 1, 0)
    whole, at = b"one\ntwo\nthree\nfour\nfive\n", 0
    for cut in (*cuts, len(whole)):
        again.append(whole[at:cut])
        at = cut
    assert again.position == len(whole)
    assert shown(worker) == [whole]


def test_another_writer_in_the_same_place_is_a_conflict(worker: WorkerStore) -> None:
    say(worker, 1, 4, b"one\n")
    with pytest.raises(Conflict):
        LogWriter(worker, "stdout", 1, 4).append(b"eins\n")
    with pytest.raises(Conflict):
        LogWriter(worker, "stdout", 1, 0).append(b"one\n")
    assert shown(worker)[-1] == b"one\n"


def test_a_long_append_is_cut_into_objects_of_bounded_size(worker: WorkerStore, store: Store) -> None:
    data = b"line\n" * (MAX_PIECE // 4)
    say(worker, 1, 0, data)
    sizes = [info.size for info in store.list("workers/w/logs") if info.size]
    assert sizes == [MAX_PIECE, len(data) - MAX_PIECE]
    assert shown(worker) == [data]


def test_impossible_names_and_sizes_in_the_store_are_not_trusted(worker: WorkerStore, store: Store) -> None:
    say(worker, 1, 0, b"one\n")
    prefix = "workers/w/logs/stdout"
    for name in (
        "1/4",
        "1/x",
        "1/00000000000000000002",
        "1/sub/00000000000000000004",
        "0/begin-x",
        "01/x",
        "x/y",
        "9999999999/z",
    ):
        store.put(f"{prefix}/{name}", b"foreign")
    assert shown(worker) == [b"one\n"]
    store.put(f"{prefix}/1/{4:020d}", bytes(MAX_PIECE + 1))
    with pytest.raises(Corrupt):
        list(read(worker, "stdout"))


@pytest.mark.parametrize("text", ["", "1", "0:1", "1:-1", "1:x", "1:1:1", "1:" + "9" * 30])
def test_a_malformed_cursor_is_refused(text: str) -> None:
    with pytest.raises(Refused):
        Cursor.parse(text)


def test_streams_do_not_mix_and_their_names_are_checked(worker: WorkerStore) -> None:
    say(worker, 1, 0, b"out\n")
    LogWriter(worker, "stderr", 1, 0).append(b"err\n")
    assert shown(worker) == [b"out\n"]
    with pytest.raises(Refused):
        list(read(worker, "../stdout"))


LIVES = st.lists(
    st.tuples(
        st.floats(0, 1), st.lists(st.sampled_from([b"a\n", b"bb\n", b"c", b"\n", b"dd\nd"]), max_size=5)
    ),
    min_size=1,
    max_size=5,
)


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(lives=LIVES, data=st.data())
def test_any_history_reads_as_a_simple_model_says(
    tmp_path_factory: pytest.TempPathFactory, lives: list[tuple[float, list[bytes]]], data: st.DataObject
) -> None:
    worker = WorkerStore(open_store(str(tmp_path_factory.mktemp("logs"))), "w")
    valid = b""
    expected: list[object] = []
    for number, (share, pieces) in enumerate(lives, start=1):
        start = 0 if number == 1 else round(len(valid) * share)
        if start < len(valid):
            lost = valid[start:]
            lines = lost.count(b"\n") + (not lost.endswith(b"\n"))
            expected.append((number - 1, len(lost), lines, start, not lost.endswith(b"\n")))
        valid = valid[:start]
        say(worker, number, start, *pieces)
        expected.extend(pieces)
        valid += b"".join(pieces)
    pieces_read = list(read(worker, "stdout"))
    assert [plain(piece) for piece in pieces_read] == expected
    if pieces_read:
        n = data.draw(st.integers(0, len(pieces_read) - 1))
        assert list(read(worker, "stdout", pieces_read[n].cursor)) == pieces_read[n + 1 :]


def plain(piece: LogPiece) -> object:
    if isinstance(piece, Text):
        return piece.data
    return piece.lost, piece.discarded_bytes, piece.discarded_lines, piece.replay_from, piece.mid_line
