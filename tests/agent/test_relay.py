"""The relay between a task and its engine, against a stand-in for the Execution API: what it passes on, holds, keeps and refuses."""

from __future__ import annotations

import http.client
import json
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from savedworker.agent.relay import airflow, upstream
from savedworker.agent.relay.airflow import AirflowRelay, ConclusionNote, Identity, Ties
from savedworker.agent.relay.journal import (
    BODY_KEPT,
    CALLS_KEPT,
    READ_BODIES_KEPT,
    READS_KEPT,
    digest,
)
from savedworker.agent.relay.pieces import Call, Index, Piece
from savedworker.agent.relay.tokens import TokenNote, Tokens
from savedworker.model.errors import Unreachable
from savedworker.model.spec import RelaySpec
from tests.agent.fake_execution_api import TASK, FakeApi, jwt
from tests.agent.stored_journal import Stored
from tests.certificates import make_certificates


class Bed:
    """A relay, the API behind it, and the notes in the store."""

    def __init__(self, api: FakeApi | None = None, authorities: str = "") -> None:
        self.api = api or FakeApi()
        self.authorities = authorities
        self.notes: dict[str, bytes] = {airflow.TOKEN: TokenNote(token=jwt()).model_dump_json().encode()}
        self.holds = True
        self.said: list[str] = []
        self.may_conclude = True
        self.order: list[str] = []
        self.relays: list[AirflowRelay] = []
        self.relay = self.begin(1)

    def begin(self, incarnation: int, restored: str | None = None) -> AirflowRelay:
        """The relay of one more incarnation."""
        spec = RelaySpec(kind="airflow", upstream=self.api.url, task=TASK, authorities=self.authorities)
        ties = Ties(incarnation, self.notes.get, self.keep, self.drop, lambda: self.holds, self.conclude)
        self.relay = AirflowRelay(spec, ties, ("127.0.0.1", 0))
        self.relay.restored(restored)
        self.relay.start()
        self.relays.append(self.relay)
        return self.relay

    def keep(self, name: str, note: bytes) -> None:
        self.order.append(f"note {name}")
        self.notes[name] = note

    def drop(self, names: Sequence[str]) -> None:
        for name in names:
            self.notes.pop(name, None)

    def tape(self) -> dict[str, bytes]:
        """The notes that are the journal's."""
        return {name: note for name, note in self.notes.items() if name.startswith(airflow.JOURNAL)}

    def noted(self) -> list[Call]:
        """The calls in them, oldest first. More than one piece is another test's matter."""
        index = Index.model_validate_json(self.notes[airflow.JOURNAL])
        note = self.notes.get(f"{airflow.JOURNAL}-{index.piece}")
        return list(Piece.model_validate_json(note).calls) if note is not None else []

    def conclude(self, outcome: str) -> bool:
        self.order.append(f"record {outcome}")
        self.said.append(outcome)
        return self.may_conclude

    def ask(self, method: str, path: str, body: Any = None, timeout: float = 15.0) -> tuple[int, Any]:
        """As the task asks."""
        connection = http.client.HTTPConnection(*self.relay.address, timeout=timeout)
        try:
            data = None if body is None else json.dumps(body)
            headers = {"Content-Type": "application/json", "Authorization": "Bearer held-by-the-relay"}
            connection.request(method, f"/execution{path}", body=data, headers=headers)
            answer = connection.getresponse()
            assert answer.getheader("Refreshed-API-Token") is None
            content = answer.read()
            return answer.status, json.loads(content) if content else None
        finally:
            connection.close()

    def later(self, *arguments: Any) -> tuple[threading.Thread, list[Any]]:
        """``ask`` in a thread; what came of it is in the list."""
        found: list[Any] = []

        def work() -> None:
            try:
                found.append(self.ask(*arguments))
            except (OSError, http.client.HTTPException) as error:
                found.append(error)

        thread = threading.Thread(target=work, daemon=True)
        thread.start()
        return thread, found

    def run_task(self, pid: int = 7) -> tuple[int, Any]:
        body = {"pid": pid, "hostname": "h", "unixname": "root", "state": "running"}
        return self.ask("PATCH", f"/task-instances/{TASK}/run", body)

    def heartbeat(self, pid: int = 7) -> int:
        return self.ask("PUT", f"/task-instances/{TASK}/heartbeat", {"pid": pid, "hostname": "h"})[0]

    def push(self, value: Any, key: str = "k") -> int:
        return self.ask("POST", f"/xcoms/d/r/t/{key}?map_index=-1", value)[0]

    def put(self, value: Any, name: str = "kept") -> None:
        """Write a Variable."""
        assert self.ask("PUT", f"/variables/{name}", value)[0] == 204

    def get(self, name: str = "kept") -> Any:
        """Read a Variable; None if there is none."""
        status, value = self.ask("GET", f"/variables/{name}")
        assert status in (200, 404)
        return value

    def trigger(self, number: int) -> int:
        return self.ask("POST", "/dag-runs/d/r", {"conf": number})[0]

    def triggered(self) -> list[int]:
        return [x[2]["conf"] for x in self.api.calls("r")]

    def checkpoint(self, number: str, kept: tuple[str, ...] = ()) -> None:
        self.relay.hold(number)
        self.relay.thawed()
        self.relay.committed(number, {number, *kept})

    def values(self) -> list[Any]:
        return [x[2] for x in self.api.calls("k")]


@pytest.fixture
def bed() -> Iterator[Bed]:
    bed = Bed()
    yield bed
    for relay in bed.relays:
        relay.stop()
    bed.api.paused.set()
    bed.api.stop()


def eventually(condition: Callable[[], Any], what: str) -> None:
    until = time.monotonic() + 15
    while not condition():
        assert time.monotonic() < until, what
        time.sleep(0.01)


# Tokens ---------------------------------------------------------------------------------------------------------------


def test_the_task_needs_no_token_and_gets_none(bed: Bed) -> None:
    bed.api.refresh = jwt(700.0, "refreshed")
    assert bed.run_task()[0] == 200
    assert bed.api.requests[0][3] == TokenNote.model_validate_json(bed.notes[airflow.TOKEN]).token
    bed.heartbeat()
    assert bed.api.requests[1][3] == bed.api.refresh, "the server's newer one is used from then on"


def test_a_token_that_is_refused_is_replaced_by_the_next_one_in_the_store(bed: Bed) -> None:
    stale, fresh = jwt(5.0, "stale"), jwt(600.0, "fresh")
    bed.notes[airflow.TOKEN] = TokenNote(token=stale).model_dump_json().encode()
    bed.api.accepted = {fresh}
    thread, found = bed.later("GET", "/variables/x")
    eventually(lambda: bed.api.requests, "the stale one was tried")
    assert not found
    bed.notes[airflow.TOKEN] = TokenNote(token=fresh).model_dump_json().encode()
    thread.join(15)
    assert found == [(200, {"kind": "x"})]


def test_what_a_good_token_may_not_do_is_the_task_s_own_affair(bed: Bed) -> None:
    bed.api.status["x"] = 403
    assert bed.ask("GET", "/variables/x")[0] == 403


def test_a_note_that_cannot_be_read_leaves_the_token_that_there_is() -> None:
    answers: list[Any] = [TokenNote(token=jwt(1.0, "a")).model_dump_json().encode(), Unreachable("away")]

    def load() -> bytes:
        found = answers.pop(0) if answers else Unreachable("away")
        if isinstance(found, Exception):
            raise found
        return bytes(found)

    tokens = Tokens(load)
    assert tokens.best().endswith(".a")
    tokens._looked = float("-inf")
    assert tokens.best().endswith(".a")


# TLS ------------------------------------------------------------------------------------------------------------------


def test_an_api_server_whose_certificate_is_signed_by_the_deployment_s_own_authority(tmp_path: Path) -> None:
    made = make_certificates(tmp_path, "127.0.0.1")
    bed = Bed(FakeApi(made.context()), made.authority.read_text())
    try:
        assert bed.run_task()[0] == 200
        assert bed.heartbeat() == 204
    finally:
        bed.relay.stop()
        bed.api.stop()


@pytest.mark.parametrize("what", ["another authority", "another name", "none"])
def test_nothing_is_told_to_who_is_not_the_api_server(tmp_path: Path, what: str) -> None:
    made = make_certificates(tmp_path, "127.0.0.2" if what == "another name" else "127.0.0.1")
    known = {"another authority": make_certificates(tmp_path / "other", "127.0.0.1"), "another name": made}
    bed = Bed(FakeApi(made.context()), known[what].authority.read_text() if what in known else "")
    try:
        thread, found = bed.later("GET", "/variables/x")
        eventually(lambda: airflow.HEARTBEAT in bed.notes, "it waits, and says so")
        assert not bed.api.requests
        assert not found
        bed.relay.stop()
        thread.join(10)
    finally:
        bed.relay.stop()
        bed.api.stop()


# Heartbeats -----------------------------------------------------------------------------------------------------------


def test_a_held_task_is_kept_alive_by_its_relay(bed: Bed, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(airflow, "HEARTBEAT_EVERY", 0.05)
    bed.begin(1)
    bed.run_task(pid=12)
    bed.relay.hold("1-1")
    before = len(bed.api.calls("heartbeat"))
    eventually(lambda: len(bed.api.calls("heartbeat")) >= before + 2, "heartbeats while it is frozen")
    assert bed.api.calls("heartbeat")[-1][2] == {"pid": 12, "hostname": "h"}


def test_a_task_that_waits_for_an_answer_is_kept_alive_by_its_relay(
    bed: Bed, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Airflow's supervisor does one thing at a time: it sends no heartbeat while a call of the task's takes its time."""
    monkeypatch.setattr(airflow, "HEARTBEAT_EVERY", 0.1)
    bed.begin(1)
    bed.run_task(pid=12)
    bed.api.hold_up("slow")
    thread, found = bed.later("GET", "/variables/slow")
    eventually(lambda: len(bed.api.calls("heartbeat")) >= 2, "heartbeats meanwhile")
    assert not found
    bed.api.paused.set()
    thread.join(10)
    time.sleep(0.3)
    before = len(bed.api.calls("heartbeat"))
    time.sleep(0.5)
    assert len(bed.api.calls("heartbeat")) == before, "it speaks for itself again"


def test_no_heartbeat_follows_the_word_that_ends_the_task(bed: Bed, monkeypatch: pytest.MonkeyPatch) -> None:
    """One that was under way is waited for: Airflow would answer it that the task should not run any more."""
    monkeypatch.setattr(airflow, "HEARTBEAT_EVERY", 0.05)
    bed.begin(1)
    bed.run_task()
    bed.api.hold_up("heartbeat")
    bed.relay.hold("1-1")
    eventually(lambda: bed.api.calls("heartbeat"), "one is under way")
    bed.relay.thawed()
    thread, _ = bed.later("PATCH", f"/task-instances/{TASK}/state", {"state": "success"})
    eventually(lambda: bed.said, "it is in the record")
    assert not bed.api.calls("state")
    bed.api.paused.set()
    thread.join(10)
    bed.relay.hold("1-2")
    time.sleep(0.3)
    kinds = [x[1].rsplit("/", 1)[-1] for x in bed.api.requests]
    assert kinds[-1] == "state"


def test_an_api_server_that_is_away_does_not_end_the_task_and_that_it_lives_is_told(bed: Bed) -> None:
    bed.run_task()
    bed.api.stop()
    try:
        assert bed.heartbeat() == 204
        assert airflow.HEARTBEAT in bed.notes
    finally:
        bed.api.start_again()


@pytest.mark.parametrize("status", [404, 409, 410])
def test_a_task_that_airflow_does_not_want_learns_it(bed: Bed, status: int) -> None:
    bed.run_task()
    bed.api.status["heartbeat"] = status
    assert bed.heartbeat() == status


def test_a_task_that_begins_again_is_to_airflow_the_one_that_it_knows(bed: Bed) -> None:
    bed.run_task(pid=7)
    bed.begin(2)
    bed.run_task(pid=99)
    bed.heartbeat(pid=99)
    assert [x[2]["pid"] for x in bed.api.calls("run")] == [7, 7]
    assert bed.api.calls("heartbeat")[-1][2]["pid"] == 7
    assert Identity.model_validate_json(bed.notes[airflow.IDENTITY]).pid == 7


# Around a freeze ------------------------------------------------------------------------------------------------------


def test_a_call_under_way_comes_to_its_end_before_the_freeze_and_new_ones_wait(bed: Bed) -> None:
    bed.api.paused.clear()
    first, answered = bed.later("GET", "/variables/first")
    assert bed.api.arrived.wait(10)
    holding = threading.Thread(target=bed.relay.hold, args=("1-1",), daemon=True)
    holding.start()
    eventually(lambda: bed.relay.gate.held, "held")
    second, waits = bed.later("GET", "/variables/second")
    assert holding.is_alive()
    bed.api.paused.set()
    holding.join(10)
    first.join(10)
    assert answered == [(200, {"kind": "first"})]
    assert not bed.api.calls("second")
    assert not waits
    bed.relay.thawed()
    second.join(10)
    assert waits == [(200, {"kind": "second"})]


def test_what_waits_when_the_worker_has_left_is_never_passed_on(bed: Bed) -> None:
    bed.relay.hold("1-1")
    thread, found = bed.later("POST", "/xcoms/d/r/t/k", 1)
    time.sleep(0.1)
    bed.relay.stop()
    thread.join(10)
    assert isinstance(found[0], OSError | http.client.HTTPException)
    assert not bed.api.requests


def test_nothing_passes_without_a_lease_and_what_waits_passes_with_it(bed: Bed) -> None:
    bed.holds = False
    thread, found = bed.later("GET", "/variables/x")
    time.sleep(0.2)
    assert not bed.api.requests
    bed.holds = True
    thread.join(10)
    assert found == [(200, {"kind": "x"})]


def test_a_fenced_incarnation_is_refused(bed: Bed) -> None:
    bed.holds = False
    thread, found = bed.later("GET", "/variables/x")
    bed.relay.gate.close()
    thread.join(10)
    assert isinstance(found[0], OSError | http.client.HTTPException)
    assert not bed.api.requests


def test_a_call_waits_for_an_api_server_that_is_away(bed: Bed) -> None:
    bed.api.stop()
    thread, found = bed.later("POST", "/xcoms/d/r/t/k", 5)
    time.sleep(0.5)
    assert not found
    bed.api.start_again()
    thread.join(15)
    assert found[0][0] == 204
    assert bed.values() == [5]


@pytest.mark.parametrize("status", [502, 503, 504, 429])
def test_an_answer_that_says_nothing_is_asked_for_again(bed: Bed, status: int) -> None:
    bed.api.status["x"] = status
    thread, found = bed.later("GET", "/variables/x")
    eventually(lambda: len(bed.api.requests) >= 2, "asked again")
    bed.api.status.clear()
    thread.join(15)
    assert found == [(200, {"kind": "x"})]


@pytest.mark.parametrize("status", [400, 404, 409, 422, 500])
def test_any_other_answer_is_the_task_s(bed: Bed, status: int) -> None:
    bed.api.status["x"] = status
    assert bed.ask("GET", "/variables/x")[0] == status
    assert len(bed.api.requests) == 1


def test_an_answer_that_is_too_long_is_refused_and_not_asked_for_again(
    bed: Bed, monkeypatch: pytest.MonkeyPatch
) -> None:
    bed.api.variables["kept-long"] = {"key": "kept-long", "value": "x" * 3000}
    monkeypatch.setattr(upstream, "MAX_BODY", 2000)
    for _ in range(2):
        status, answer = bed.ask("GET", "/variables/kept-long")
        assert status == 413
        assert "/variables/kept-long has more than" in answer["detail"]["message"]
    assert len(bed.api.requests) == 2
    bed.api.variables["kept-long"] = {"key": "kept-long", "value": "short"}
    assert bed.ask("GET", "/variables/kept-long") == (200, {"key": "kept-long", "value": "short"})


def test_only_the_execution_api_and_its_own_task_are_reached(bed: Bed) -> None:
    assert bed.ask("GET", "/../api/v2/dags")[0] == 404
    other = TASK[:-1] + "2"
    assert bed.ask("PATCH", f"/task-instances/{other}/state", {"state": "success"})[0] == 403
    assert not bed.api.requests


# The end --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("state", ["success", "failed", "deferred", "up_for_reschedule", "up_for_retry"])
def test_how_the_task_ends_is_written_down_before_it_is_passed_on(bed: Bed, state: str) -> None:
    seen: list[list[str]] = []
    bed.api.paused.clear()
    thread, _ = bed.later("PATCH", f"/task-instances/{TASK}/state", {"state": state, "x": 1})
    assert bed.api.arrived.wait(10)
    seen.append(list(bed.order))
    bed.api.paused.set()
    thread.join(10)
    assert seen == [[f"note {airflow.CONCLUSION}", f"record {state}"]]
    note = ConclusionNote.model_validate_json(bed.notes[airflow.CONCLUSION])
    assert json.loads(note.body) == {"state": state, "x": 1}
    assert bed.relay.concluded


def test_an_incarnation_that_may_not_say_it_says_nothing(bed: Bed) -> None:
    bed.may_conclude = False
    _, found = bed.later("PATCH", f"/task-instances/{TASK}/state", {"state": "success"})
    eventually(lambda: found, "answered")
    assert isinstance(found[0], OSError | http.client.HTTPException)
    assert not bed.api.requests


# Calls that come again ------------------------------------------------------------------------------------------------


def test_a_run_that_was_triggered_before_the_loss_is_not_triggered_again(bed: Bed) -> None:
    bed.trigger(1)
    bed.checkpoint("1-1")
    for run in (2, 3):
        bed.trigger(run)
    bed.begin(2, restored="1-1")
    assert [bed.trigger(x) for x in (2, 3, 4)] == [204, 204, 204]
    assert bed.triggered() == [1, 2, 3, 4]


def test_what_overwrites_is_made_again_so_that_the_task_reads_what_it_wrote_last(bed: Bed) -> None:
    """x=1, x=2 before the loss: after it the task writes 1, reads, and must not read 2."""
    bed.checkpoint("1-1")
    for value in (1, 2):
        bed.push(value)
    bed.begin(2, restored="1-1")
    bed.push(1)
    assert bed.values() == [1, 2, 1]


@pytest.mark.parametrize("status", [404, 409])
def test_a_call_that_is_refused_because_it_was_made_before_is_answered_as_then(bed: Bed, status: int) -> None:
    bed.checkpoint("1-1")
    assert bed.ask("DELETE", "/variables/x")[0] == 204
    bed.begin(2, restored="1-1")
    bed.api.status["x"] = status
    assert bed.ask("DELETE", "/variables/x")[0] == 204
    assert bed.ask("DELETE", "/variables/x")[0] == status, "this one is new"


def test_the_first_difference_ends_the_recognising(bed: Bed) -> None:
    bed.checkpoint("1-1")
    for run in (1, 2):
        bed.trigger(run)
    bed.begin(2, restored="1-1")
    for run in (2, 1):
        bed.trigger(run)
    assert bed.triggered() == [1, 2, 2, 1]


def test_the_same_call_twice_in_one_life_is_passed_on_twice(bed: Bed) -> None:
    bed.checkpoint("1-1")
    for run in (1, 2, 1):
        bed.trigger(run)
    assert bed.triggered() == [1, 2, 1]


def test_a_worker_that_begins_from_nothing_makes_all_its_calls(bed: Bed) -> None:
    bed.checkpoint("1-1")
    bed.trigger(1)
    bed.begin(2)
    bed.trigger(1)
    assert bed.triggered() == [1, 1]


def test_going_back_to_the_older_of_two_checkpoints(bed: Bed) -> None:
    bed.checkpoint("1-1")
    bed.trigger(1)
    bed.checkpoint("1-2", kept=("1-1",))
    bed.trigger(2)
    bed.begin(2, restored="1-1")
    for run in (1, 2, 3):
        bed.trigger(run)
    assert bed.triggered() == [1, 2, 3]


def test_a_second_loss_before_the_next_checkpoint(bed: Bed) -> None:
    bed.checkpoint("1-1")
    for run in (1, 2):
        bed.trigger(run)
    bed.begin(2, restored="1-1")
    for run in (1, 2, 3):
        bed.trigger(run)
    bed.begin(3, restored="1-1")
    for run in (1, 2, 3, 4):
        bed.trigger(run)
    assert bed.triggered() == [1, 2, 3, 4]


def test_a_checkpoint_within_what_comes_again_counts_from_there(bed: Bed) -> None:
    bed.checkpoint("1-1")
    for run in (1, 2, 3):
        bed.trigger(run)
    bed.begin(2, restored="1-1")
    bed.trigger(1)
    bed.checkpoint("2-1")
    bed.trigger(2)
    bed.begin(3, restored="2-1")
    for run in (2, 3, 4):
        bed.trigger(run)
    assert bed.triggered() == [1, 2, 3, 4]


def test_a_call_that_failed_is_made_again(bed: Bed) -> None:
    bed.checkpoint("1-1")
    bed.api.status["r"] = 409
    assert bed.trigger(1) == 409
    bed.begin(2, restored="1-1")
    assert bed.trigger(1) == 409
    assert bed.triggered() == [1, 1]


def test_a_failed_call_that_comes_again_hides_none_of_those_after_it(bed: Bed) -> None:
    bed.checkpoint("1-1")
    bed.api.status["r"] = 409
    bed.trigger(1)
    bed.api.status.clear()
    bed.trigger(2)
    bed.begin(2, restored="1-1")
    bed.trigger(1)
    bed.trigger(2)
    assert bed.triggered() == [1, 2, 1]


def test_a_failed_call_that_succeeds_when_it_comes_again_is_known_from_then_on(bed: Bed) -> None:
    bed.checkpoint("1-1")
    bed.api.status["r"] = 409
    bed.trigger(1)
    bed.api.status.clear()
    bed.begin(2, restored="1-1")
    assert bed.trigger(1) == 204
    bed.begin(3, restored="1-1")
    assert bed.trigger(1) == 204
    assert bed.triggered() == [1, 1]


def test_a_checkpoint_while_a_call_that_came_again_waits_for_its_answer() -> None:
    notes = Stored()
    journal = notes.journal()
    journal.mark("1-1")
    journal.committed("1-1", {"1-1"})
    journal.note("a", 409, "", None)
    journal.restored("1-1")
    assert journal.repeated("a") is not None
    journal.mark("2-1")
    journal.committed("2-1", {"2-1"})
    journal.note("a", 204, "", b"", again=True)
    assert notes.calls() == []


# What is read again ---------------------------------------------------------------------------------------------------


def test_after_a_loss_a_task_reads_what_it_had_written_before_the_checkpoint(bed: Bed) -> None:
    """Written, saved, and overwritten before the loss: the task that goes on from the checkpoint has only written the first value."""
    bed.checkpoint("1-0")
    bed.put("first")
    bed.checkpoint("1-1")
    assert bed.get() == "first"
    bed.put("second")
    assert bed.get() == "second"
    bed.put("third")
    bed.begin(2, restored="1-1")
    assert bed.api.variables["kept"] == "third"
    assert bed.get() == "first"
    bed.put("second")
    assert bed.get() == "second"
    bed.put("third")
    assert bed.get() == "third", "from here on it is new"
    assert bed.api.variables["kept"] == "third"


def test_a_counter_that_was_counted_up_before_the_loss_is_counted_up_once(bed: Bed) -> None:
    bed.put(5)
    bed.checkpoint("1-1")
    bed.put(bed.get() + 1)
    bed.begin(2, restored="1-1")
    bed.put(bed.get() + 1)
    assert bed.get() == 6


def test_what_was_not_there_is_not_there_again(bed: Bed) -> None:
    bed.checkpoint("1-1")
    assert bed.get() is None
    bed.put("made")
    bed.begin(2, restored="1-1")
    assert bed.get() is None


def test_a_loss_in_the_middle_of_the_call_that_overwrites(bed: Bed) -> None:
    """Airflow has the new value, and nobody was told: what was read before it is on the tape already."""
    bed.put("first")
    bed.checkpoint("1-1")
    assert bed.get() == "first"
    bed.api.hold_up("kept")
    bed.later("PUT", "/variables/kept", "second")
    eventually(lambda: bed.api.requests[-1][2] == "second", "it is under way")
    tape = bed.tape()
    bed.api.paused.set()
    eventually(lambda: bed.api.variables["kept"] == "second", "and done")
    eventually(lambda: bed.tape() != tape, "and noted, which the loss undoes here")
    bed.notes |= tape
    bed.begin(2, restored="1-1")
    assert bed.get() == "first"


def test_reads_alone_cost_no_note(bed: Bed) -> None:
    bed.checkpoint("1-1")
    before = len(bed.order)
    for _ in range(5):
        bed.get()
    assert len(bed.order) == before
    bed.put(1)
    assert len(bed.order) == before + 2, "once before what overwrites, once after it"
    bed.put(2)
    assert len(bed.order) == before + 3


def test_how_often_something_is_looked_at_hides_no_call_with_an_effect(bed: Bed) -> None:
    bed.checkpoint("1-1")
    for _ in range(3):
        bed.get()
    bed.trigger(1)
    bed.begin(2, restored="1-1")
    for _ in range(5):
        bed.get()
    bed.get("kept_other")
    bed.trigger(1)
    bed.begin(3, restored="1-1")
    bed.trigger(1)
    assert bed.triggered() == [1]


def test_reads_before_the_checkpoint_are_not_those_after_it(bed: Bed) -> None:
    bed.checkpoint("1-1")
    assert bed.get() is None
    bed.checkpoint("1-2", kept=("1-1",))
    bed.put("made")
    bed.begin(2, restored="1-2")
    bed.put("made")
    assert bed.get() == "made"
    bed.begin(3, restored="1-1")
    assert bed.get() is None, "the older checkpoint is from before it"


def test_connections_are_asked_for_anew_and_leave_no_secret_on_the_tape(bed: Bed) -> None:
    bed.checkpoint("1-1")
    for _ in range(2):
        bed.ask("GET", "/connections/suite")
        bed.put(1)
    assert len(bed.noted()) == 2
    bed.begin(2, restored="1-1")
    bed.ask("GET", "/connections/suite")
    assert len(bed.api.calls("suite")) == 3


def test_how_many_there_are_is_what_it_was(bed: Bed) -> None:
    def count() -> str:
        connection = http.client.HTTPConnection(*bed.relay.address, timeout=10)
        connection.request("HEAD", "/execution/xcoms/d/r/t/k")
        answer = connection.getresponse()
        connection.close()
        return answer.getheader("Content-Range") or ""

    bed.checkpoint("1-1")
    assert count() == "map_indexes 0"
    bed.put(1)
    bed.begin(2, restored="1-1")
    assert count() == "map_indexes 0"
    bed.put(1)
    assert count() == "map_indexes 1"


def test_of_long_answers_only_so_much_is_kept_and_the_rest_is_asked_for_again() -> None:
    notes = Stored()
    journal = notes.journal()
    journal.mark("1-1")
    journal.committed("1-1", {"1-1"})
    for i in range(READS_KEPT + 5):
        journal.note_read(digest("GET", f"/{i}", b""), 200, "", "", b"x" * BODY_KEPT)
    journal.note(digest("PUT", "/x", b""), 200, "", b"")
    assert sum(len(x) for x in notes.notes.values()) < 2 * READ_BODIES_KEPT
    again = notes.journal()
    again.restored("1-1")
    first, last = (again.reread(digest("GET", f"/{i}", b"")) for i in (0, READS_KEPT - 1))
    assert first is not None
    assert first.body is not None
    assert last is not None
    assert last.body is None
    assert again.reread(digest("GET", f"/{READS_KEPT}", b"")) is None
    assert again.repeated(digest("PUT", "/x", b"")) is not None


def test_a_checkpoint_that_came_to_nothing_leaves_no_mark(bed: Bed) -> None:
    bed.checkpoint("1-1")
    bed.trigger(1)
    bed.relay.hold("1-2")
    bed.relay.release()
    bed.relay.committed("1-2", {"1-1", "1-2"})
    bed.begin(2, restored="1-2")
    bed.trigger(1)
    assert bed.triggered() == [1, 1], "a checkpoint that is not marked is one of which nothing is known"


def test_the_journal_is_bounded_and_then_knows_less() -> None:
    """Of a checkpoint with too many calls since then nothing is known, and no more is stored; of a later one everything."""
    notes = Stored()
    journal = notes.journal()
    journal.mark("1-1")
    journal.committed("1-1", {"1-1"})
    names = [digest("POST", "/x", str(i).encode()) for i in range(CALLS_KEPT + 5)]
    for name in names[:-10]:
        journal.note(name, 200, "", b"")
    journal.mark("1-2")
    journal.committed("1-2", {"1-1", "1-2"})
    for name in names[-10:]:
        journal.note(name, 200, "", b"")
    again = notes.journal()
    again.restored("1-1")
    assert again.repeats == 0
    assert again.repeated(names[0]) is None
    again = notes.journal()
    again.restored("1-2")
    assert [again.repeated(x) is not None for x in names[-10:]] == [True] * 10
    for name in names:
        again.note(name, 200, "", b"")
    written = notes.written
    for name in names:
        again.note(name, 200, "", b"")
    assert notes.written == written


def test_a_note_that_arrives_altered_is_asked_for_once_more_before_it_is_given_up(bed: Bed) -> None:
    whole = bed.notes[airflow.TOKEN]
    altered = whole[:5] + b"\x80" + whole[6:]
    answers: list[bytes] = []
    ties = Ties(
        2, lambda _: answers.pop(0) if answers else None, bed.keep, bed.drop, lambda: True, bed.conclude
    )
    relay = AirflowRelay(RelaySpec(kind="airflow", upstream=bed.api.url, task=TASK), ties, ("127.0.0.1", 0))
    answers[:] = [altered, whole]
    assert relay._read(airflow.TOKEN, TokenNote) == TokenNote.model_validate_json(whole)
    answers[:] = [altered, altered]
    assert relay._read(airflow.TOKEN, TokenNote) is None
    assert answers == []
