"""What a follower writes to the task's log, and when it says that it is over."""

from __future__ import annotations

import base64
import logging
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest

from airflow_provider_savedworker import follow
from airflow_provider_savedworker.follow import Follower, cancel
from savedworker.controller.client import Client
from savedworker.model import events as ev
from savedworker.model.errors import Temporary, Unreachable
from savedworker.model.spec import WorkerSpec
from savedworker.store.backend import open_store
from tests.airflow.conftest import Hand, HandFleet, Lines
from tests.store.keys import key, sealing


class Clock:
    """Seconds that pass when the test says so."""

    def __init__(self) -> None:
        self.seconds = 100.0

    def __call__(self) -> float:
        return self.seconds

    def now(self) -> datetime:
        return datetime.now(UTC) + timedelta(seconds=self.seconds - 100.0)


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def lines() -> Lines:
    return Lines()


@pytest.fixture
def follower(client: Client, hand: Hand, lines: Lines, clock: Clock) -> Follower:
    return Follower(client, hand.id, lines, clock=clock, now=clock.now)


def test_every_line_of_output_is_relayed_once_and_a_line_in_two_pieces_is_one_line(
    hand: Hand, follower: Follower, lines: Lines
) -> None:
    hand.begin()
    hand.say("one\ntw")
    follower.step()
    hand.say("o\nthree")
    hand.say("warn\n", "stderr")
    follower.step()
    assert lines.of("stdout") == ["one", "two"]
    hand.end()
    assert follower.step().done
    assert follower.step().done
    assert lines.of("stdout") == ["one", "two", "three"]
    assert lines.of("stderr") == ["warn"]


def test_of_a_sealed_worker_no_word_is_in_the_store_and_a_successor_goes_on_in_the_middle_of_a_line(
    tmp_path: Path, fleet: HandFleet, lines: Lines, clock: Clock
) -> None:
    client = Client(open_store(str(tmp_path / "store"), sealing=sealing(key())), fleets=lambda _: fleet)
    client.submit(WorkerSpec(id="w", command=("true",), fleet="hand"))
    hand = Hand(client, fleet, client.spec("w"))
    hand.begin()
    hand.say("a line\nsecret wo")
    Follower(client, "w", lines, clock=clock, now=clock.now).step()
    note = (tmp_path / "store/workers/w/engine/airflow.json").read_bytes()
    assert base64.b64encode(b"secret wo") not in note
    for path in (tmp_path / "store").rglob("*"):
        assert path.is_dir() or b"secret" not in path.read_bytes(), path
    hand.say("rd\n")
    Follower(client, "w", lines, clock=clock, now=clock.now).step()
    assert lines.of("stdout") == ["a line", "secret word"]


def test_events_stand_in_the_log_once_with_the_start_before_the_output_and_the_end_after_it(
    hand: Hand, follower: Follower, lines: Lines
) -> None:
    hand.begin()
    hand.say("work\n")
    hand.end()
    follower.step()
    follower.step()
    texts = [text for _, _, text in lines]
    assert texts == [
        "incarnation 1 on i-1 starts from nothing",
        "started",
        "protected",
        "work",
        "the worker's process ended: exit code 0",
    ]


def test_each_notice_checkpoint_move_and_restore_has_one_plain_line(
    hand: Hand, follower: Follower, lines: Lines
) -> None:
    hand.begin()
    hand.fenced(ev.NoticeReceived, id="n", source="spot", seconds_left=20)
    committed = {"frozen_at": datetime.now(UTC), "bytes_image": 1 << 20, "bytes_uploaded": 1 << 10}
    hand.fenced(ev.CheckpointCommitted, number="1-1", cause="notice", **committed)
    follower.step()
    hand.fenced(ev.HandedOver, number="1-1")
    hand.vanish()
    hand.begin(restore="1-1")
    follower.step()
    text = "\n".join(lines.of(""))
    for once in (
        "notice from spot, 20s left",
        "checkpoint 1-1 (notice) committed",
        "handed over",
        "restored from checkpoint 1-1",
    ):
        assert text.count(once) == 1, text
    assert "incarnation 2 on i-2 restores checkpoint 1-1" in text


def test_a_follower_that_begins_later_goes_on_where_the_one_before_ended(
    hand: Hand, client: Client, follower: Follower, lines: Lines
) -> None:
    hand.begin()
    hand.say("one\ntwo\nhalf")
    follower.step()
    again = Lines()
    hand.say(" a line\n")
    Follower(client, hand.id, again).step()
    assert again.of("stdout") == ["half a line"]
    assert again.of("") == ["following worker w again, from where the task's log ended"]


def test_a_follower_that_was_frozen_does_not_repeat_what_its_successor_relayed(
    hand: Hand, client: Client, follower: Follower, lines: Lines
) -> None:
    hand.begin()
    hand.say("one\n")
    follower.step()
    successor = Lines()
    hand.say("two\n")
    Follower(client, hand.id, successor).step()
    follower.step()
    hand.say("three\n")
    follower.step()
    assert successor.of("stdout") == ["two"]
    assert lines.of("stdout") == ["one", "three"]


def test_work_that_is_done_again_after_a_loss_stands_below_a_mark(
    hand: Hand, follower: Follower, lines: Lines
) -> None:
    hand.begin()
    committed = {"frozen_at": datetime.now(UTC), "bytes_image": 1, "bytes_uploaded": 1}
    hand.say("one\n")
    hand.fenced(ev.CheckpointCommitted, number="1-1", cause="periodic", **committed)
    hand.say("two\n")
    follower.step()
    hand.record(ev.InstanceLost(at=datetime.now(UTC), incarnation=1))
    hand.vanish()
    hand.begin(restore="1-1", position=4)
    hand.say("two\nthree\n")
    follower.step()
    outputs = [text for _, source, text in lines if source or "done again" in text]
    assert outputs[:2] == ["one", "two"]
    assert "without a last checkpoint" in outputs[2]
    assert outputs[3:] == ["two", "three"]


def test_what_a_lost_incarnation_said_stands_above_its_loss_also_when_all_is_relayed_at_once(
    hand: Hand, follower: Follower, lines: Lines
) -> None:
    hand.begin()
    follower.step()
    committed = {"frozen_at": datetime.now(UTC), "bytes_image": 1, "bytes_uploaded": 1}
    hand.say("one\n")
    hand.fenced(ev.CheckpointCommitted, number="1-1", cause="periodic", **committed)
    hand.say("two\n")
    hand.record(ev.InstanceLost(at=datetime.now(UTC), incarnation=1))
    hand.vanish()
    hand.begin(restore="1-1", position=4)
    hand.say("two\nthree\n")
    lines.clear()
    follower.step()
    order = "\n".join(text for _, _, text in lines)
    wanted = ["committed", "one", "two", "is gone", "restored from", "done again", "two", "three"]
    at = 0
    for word in wanted:
        at = order.index(word, at) + len(word)


def test_a_worker_that_is_not_protected_is_a_warning_with_the_reasons(
    hand: Hand, follower: Follower, lines: Lines
) -> None:
    hand.begin()
    hand.fenced(ev.ProtectionChanged, unprotected_reasons=("pid 7 has /dev/kvm open",))
    follower.step()
    assert (logging.WARNING, "", "not protected: pid 7 has /dev/kvm open") in lines


def test_a_worker_that_was_never_checked_is_called_unprotected_after_half_a_minute(
    hand: Hand, follower: Follower, lines: Lines, clock: Clock
) -> None:
    hand.client.reconcile(hand.id)
    hand.incarnation = 1
    hand.fenced(ev.LeaseTaken, launch=next(iter(hand.fleet.launches)), instance="i")
    hand.fenced(ev.Started)
    follower.step()
    assert not [text for text in lines.of("") if "not protected" in text]
    clock.seconds += 31
    follower.step()
    follower.step()
    assert [text for text in lines.of("") if "not protected" in text] == [
        "not protected: not checked yet on this instance"
    ]


def test_a_failed_checkpoint_is_a_warning_with_the_age_of_the_last_good_one(
    hand: Hand, follower: Follower, lines: Lines
) -> None:
    hand.begin()
    frozen = datetime.now(UTC) - timedelta(seconds=400)
    hand.fenced(
        ev.CheckpointCommitted,
        number="1-1",
        cause="periodic",
        frozen_at=frozen,
        bytes_image=1,
        bytes_uploaded=1,
    )
    hand.fenced(ev.CheckpointStarted, number="1-2", cause="periodic")
    hand.fenced(ev.CheckpointFailed, number="1-2", detail="the store answers 503")
    follower.step()
    (found,) = [x for x in lines if "failed" in x[2]]
    assert found[0] == logging.WARNING
    assert "the store answers 503" in found[2]
    assert "age of the last good checkpoint, 1-1: 6m4" in found[2]


def test_two_intervals_without_a_checkpoint_are_a_warning(
    hand: Hand, follower: Follower, lines: Lines, clock: Clock
) -> None:
    hand.begin()
    follower.step()
    clock.seconds += 131  # the interval is 60 s
    follower.step()
    clock.seconds += 5
    follower.step()
    assert [text for text in lines.of("") if "two intervals" in text] == [
        "no checkpoint for two intervals: there is no good checkpoint yet"
    ]


def test_a_store_that_does_not_answer_is_a_warning_once_a_minute_and_never_the_end(
    hand: Hand, follower: Follower, lines: Lines, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    hand.begin()
    follower.step()

    def fail(*_: object) -> None:
        raise Unreachable("the store does not answer")

    with monkeypatch.context() as patch:
        patch.setattr(follower.client, "reconcile", fail)
        patch.setattr(follower.client, "record", fail)
        for _ in range(100):
            clock.seconds += 2
            assert not follower.step().done
    assert lines.of("").count("the store does not answer; trying again") == 4
    hand.say("still here\n")
    assert follower.step().trouble is None
    assert lines.of("stdout") == ["still here"]


def test_a_fleet_that_does_not_answer_keeps_no_output_from_the_log(
    hand: Hand, follower: Follower, lines: Lines, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> None:
        raise Temporary("the fleet is busy")

    hand.begin()
    hand.say("hello\n")
    monkeypatch.setattr(follower.client, "reconcile", fail)
    follower.step()
    assert lines.of("stdout") == ["hello"]


def test_a_defect_in_a_library_never_ends_the_task(
    hand: Hand, follower: Follower, lines: Lines, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> None:
        raise ZeroDivisionError("oops")

    monkeypatch.setattr(follower.client, "reconcile", fail)
    assert not follower.step().done
    assert lines.of("") == ["ZeroDivisionError: oops; trying again"]


def test_a_worker_that_vanished_from_the_store_is_believed_gone_after_a_minute(
    client: Client, lines: Lines, clock: Clock
) -> None:
    follower = Follower(client, "nobody", lines, clock=clock)
    assert not follower.step().done
    clock.seconds += follow.MISSING_PATIENCE + 1
    assert follower.step().done


def test_it_is_over_only_when_no_instance_is_left(hand: Hand, follower: Follower, fleet: HandFleet) -> None:
    hand.begin()
    hand.fenced(ev.Finished, exit_code=0)
    assert not follower.step().done  # its agent has still the lease
    hand.fenced(ev.LeaseReleased, end_reason="finished")
    assert follower.step().done
    assert fleet.terminated == list(fleet.launches)


def test_an_instance_that_cannot_be_ended_is_waited_for_five_minutes_and_then_named(
    hand: Hand, follower: Follower, lines: Lines, clock: Clock
) -> None:
    hand.begin()
    hand.fenced(ev.Finished, exit_code=0)
    assert not follower.step().done
    clock.seconds += follow.SETTLE_PATIENCE
    assert follower.step().done
    assert any("not confirmed" in text for text in lines.of(""))


def test_a_launch_that_came_to_nothing_has_a_line_and_one_that_was_used_has_none(
    hand: Hand, follower: Follower, lines: Lines
) -> None:
    record = hand.client.reconcile(hand.id)
    hand.record(
        ev.LaunchEnded(
            at=datetime.now(UTC), launch=record.launches[0].id, outcome="capacity", detail="no spot in z"
        )
    )
    follower.step()
    (found,) = [x for x in lines if "no spot in z" in x[2]]
    assert found[0] == logging.WARNING


def test_cancel_goes_on_until_the_store_answers_and_the_instance_is_gone(
    hand: Hand, client: Client, fleet: HandFleet, monkeypatch: pytest.MonkeyPatch
) -> None:
    client.reconcile(hand.id)
    real, calls = client.cancel, []

    def flaky(worker: str, by: str) -> object:
        calls.append(by)
        if len(calls) == 1:
            raise Unreachable("not now")
        return real(worker, by)

    monkeypatch.setattr(client, "cancel", flaky)
    thread = cancel(client, hand.id, "a test")
    thread.join(20)
    assert not thread.is_alive()
    assert calls == ["a test", "a test"]
    assert client.record(hand.id).state == "cancelled"
    assert set(fleet.launches.values()) == {"ended"}
