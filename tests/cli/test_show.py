"""Status, list and report: documents for programs, tables and a picture for people."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from typing import Any

from savedworker.cli.timeline import Glyphs, picture
from savedworker.model.record import CheckpointEntry, EventSummary, Incarnation, Reason, State, WorkerRecord
from savedworker.model.report import report
from tests.cli.conftest import Shell

BEGIN = datetime(2026, 1, 1, 12, 0, tzinfo=UTC)


def at(seconds: float) -> datetime:
    return BEGIN + timedelta(seconds=seconds)


def moved(**fields: Any) -> WorkerRecord:
    """A worker that ran 0..40 on one instance, lost 10 s of work, was away 10 s and then ran to its end at 100."""
    given: dict[str, Any] = {
        "id": "w",
        "created_at": BEGIN,
        "state": State.SUCCEEDED,
        "exit_code": 0,
        "ended_at": at(100),
        "fleet": "fake",
        "migrations": 1,
        "incarnations": (
            Incarnation(
                number=1,
                launch="l1",
                instance="host-1",
                taken_at=at(0),
                started_at=at(0),
                stopped_at=at(40),
                ended_at=at(40),
                end_reason="no_notice",
                lost_seconds=10,
            ),
            Incarnation(
                number=2,
                launch="l2",
                instance="host-2",
                zone="b",
                taken_at=at(45),
                started_at=at(50),
                ended_at=at(100),
                end_reason="finished",
                restored_from="1-1",
                away_seconds=10,
            ),
        ),
        "checkpoints": (
            CheckpointEntry(
                number="1-1",
                frozen_at=at(30),
                committed_at=at(31),
                bytes_image=200 << 20,
                bytes_uploaded=1 << 20,
            ),
        ),
        "recent": (
            EventSummary(
                number=1,
                incarnation=1,
                at=at(31),
                event="checkpoint_committed",
                detail="checkpoint 1-1 (periodic) committed",
            ),
            EventSummary(
                number=2,
                incarnation=1,
                at=at(40),
                event="instance_lost",
                detail="instance of incarnation 1 is gone",
            ),
        ),
        "events": 2,
    }
    return WorkerRecord(**{**given, **fields})


def test_the_picture_shows_running_lost_and_away_time_on_one_axis():
    lines = [line.plain.rstrip() for line in picture(report(moved(), [], at(100)), at(100), Glyphs("ascii"))]
    assert lines == [
        "          0s                                                 1m40s",
        "1 host-1  ################xxxxxxx",
        "2 host-2                        ......############################",
        "                           ^",
        "          # running   x work done again   . away   ^ checkpoint",
    ]


def test_the_picture_of_a_worker_that_is_starting_or_away_does_not_break():
    first = (
        moved().incarnations[0].model_copy(update={"started_at": None, "ended_at": None, "lost_seconds": 0})
    )
    record = moved(state=State.STARTING, ended_at=None, exit_code=None, incarnations=(first,), migrations=0)
    lines = picture(report(record, [], at(5)), at(5), Glyphs("utf-8"))
    assert "·" in lines[1].plain


def test_a_pipe_gets_plain_tables_that_are_never_cut(shell: Shell):
    shell.put(moved())
    shell.put(
        moved(
            id="x" * 60,
            state=State.RUNNING,
            ended_at=None,
            exit_code=None,
            unprotected_reasons=("pid 7 has " + "/long" * 40,),
        )
    )
    out = shell("list").output
    assert "\x1b" not in out
    assert "x" * 60 in out
    assert "/long" * 40 in out
    assert all(line == line.rstrip() for line in out.splitlines())
    assert [line.split()[0] for line in out.splitlines()] == ["ID", "w", "x" * 60]


def test_list_takes_one_state_and_says_when_there_is_nothing(shell: Shell):
    nothing = shell("list")
    assert (nothing.exit_code, nothing.stdout, nothing.stderr) == (0, "", "no workers\n")
    assert shell.json("list") == []
    shell.put(moved())
    shell.put(moved(id="f", state=State.FAILED, reason=Reason.OOM, exit_code=None, signal=9))
    assert [s["id"] for s in shell.json("list", "--state", "failed")] == ["f"]
    assert [s["id"] for s in shell.json("list")] == ["f", "w"]
    assert "failed (oom)" in shell("list").output


def test_status_is_an_array_in_the_order_asked_and_an_unknown_one_is_an_error(shell: Shell):
    shell.put(moved())
    shell.put(moved(id="a"))
    assert [s["id"] for s in shell.json("status", "w", "a")] == ["w", "a"]
    assert shell.json("status", "w")[0]["last_checkpoint"] == {
        "number": "1-1",
        "age_seconds": 70.0,
        "bytes_image": 200 << 20,
        "bytes_uploaded": 1 << 20,
    }
    assert shell("status", "w", "nobody").exit_code == 1


def test_report_tells_people_the_same_as_programs(shell: Shell):
    shell.put(moved(state=State.FAILED, reason=Reason.EXIT, exit_code=3, after_restore=True))
    document = shell.json("report", "w")
    assert [i["end_reason"] for i in document["incarnations"]] == ["no_notice", "finished"]
    assert [e["event"] for e in document["timeline"]] == ["checkpoint_committed", "instance_lost"]
    told = shell("report", "w").output
    for part in (
        "failed (exit), exit code 3, soon after a restore",
        "1 migration, 10s away, up to 10s of work lost",
        "1-1, 1m10s before the end",
        "2  host-2    b     1-1",
        "checkpoint 1-1 (periodic) committed",
        "+40s  instance of incarnation 1 is gone",
    ):
        assert part in told, told
