"""A task's log in the store: in order, each line where it belongs, one line per move; finished logs outlive their workers."""

from __future__ import annotations

import json
import os
import threading
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from airflow_provider_savedworker.executors import entry
from airflow_provider_savedworker.executors.entry import Copier
from airflow_provider_savedworker.executors.workload import worker_id
from airflow_provider_savedworker.log import archive, keep_finished
from airflow_provider_savedworker.log.saved_worker_task_handler import SavedWorkerRemoteLogIO
from airflow_provider_savedworker.log.text import worker_log
from savedworker.agent import exits
from savedworker.agent.relay import airflow as relay
from savedworker.agent.shim_client import WorkerExit
from savedworker.controller.client import Client
from savedworker.model import events as ev
from savedworker.model.errors import NoKey, Temporary
from savedworker.model.record import Reason
from savedworker.store.backend import open_store
from tests.airflow.conftest import Hand
from tests.store.keys import key, sealing

START = datetime(2026, 1, 1, 12, tzinfo=UTC)


def line(text: str, second: int = 0) -> str:
    at = (START + timedelta(seconds=second)).isoformat()
    return json.dumps({"timestamp": at, "level": "info", "event": text}) + "\n"


def events(client: Client, hand: Hand) -> list[str]:
    return [str(json.loads(x)["event"]) for x in worker_log(client, client.record(hand.id)).splitlines()]


def checkpoint(hand: Hand, number: str, cause: str = "periodic") -> None:
    hand.fenced(ev.CheckpointStarted, number=number, cause=cause)
    fields: dict[str, Any] = {"frozen_at": datetime.now(UTC), "bytes_image": 1, "bytes_uploaded": 1}
    hand.fenced(ev.CheckpointCommitted, number=number, cause=cause, **fields)


def test_with_notice_each_line_is_there_once_and_the_move_stands_between(client: Client, hand: Hand) -> None:
    hand.begin()
    hand.say(line("one") + line("two", 1))
    position = len(line("one") + line("two", 1))
    checkpoint(hand, "1-1", "notice")
    hand.fenced(ev.HandedOver, number="1-1")
    hand.vanish()
    hand.begin(restore="1-1", position=position)
    hand.say(line("three", 2))
    found = events(client, hand)
    assert [found[0], found[1], found[3]] == ["one", "two", "three"]
    assert found[2].startswith(
        "[savedworker] moved from i-1 on a notice to i-2: restored from checkpoint 1-1"
    )
    assert "nothing was lost" in found[2]
    assert len(found) == 4


def test_without_notice_the_mark_stands_before_what_is_done_again(client: Client, hand: Hand) -> None:
    hand.begin()
    hand.say(line("one"))
    checkpoint(hand, "1-1")
    hand.say(line("two", 1))
    hand.vanish()
    hand.begin(restore="1-1", position=len(line("one")))
    hand.say(line("two", 5) + line("three", 6))
    found = events(client, hand)
    assert [found[0], found[1], *found[4:]] == ["one", "two", "two", "three"]
    assert "done again below" in found[2]
    assert "moved from i-1 without a notice to i-2" in found[3]


def test_our_lines_keep_their_place_when_sorted_by_time(client: Client, hand: Hand) -> None:
    """Airflow sorts what it shows, and clocks of two machines differ."""
    hand.begin()
    hand.say(line("one", 10))
    checkpoint(hand, "1-1", "notice")
    hand.fenced(ev.HandedOver, number="1-1")
    hand.vanish()
    hand.begin(restore="1-1", position=len(line("one", 10)))
    hand.say(line("two", 10))
    lines = worker_log(client, client.record(hand.id)).splitlines()
    times = [datetime.fromisoformat(json.loads(x)["timestamp"]) for x in lines]
    assert times == sorted(times)


def test_a_line_cut_by_the_move_is_one_line(client: Client, hand: Hand) -> None:
    text = line("a long line")
    hand.begin()
    hand.say(text[:10])
    checkpoint(hand, "1-1", "notice")
    hand.fenced(ev.HandedOver, number="1-1")
    hand.vanish()
    hand.begin(restore="1-1", position=10)
    hand.say(text[10:] + line("next", 1))
    found = events(client, hand)
    assert "a long line" in found
    assert sum("moved from" in x for x in found) == 1


def test_a_move_after_the_last_line_is_told_too(client: Client, hand: Hand) -> None:
    hand.begin()
    hand.say(line("one"))
    checkpoint(hand, "1-1", "notice")
    hand.fenced(ev.HandedOver, number="1-1")
    hand.vanish()
    hand.begin(restore="1-1", position=len(line("one")))
    hand.fenced(ev.Concluded, outcome="success")
    hand.end()
    found = events(client, hand)
    assert "moved from i-1" in found[1]
    assert found[2].startswith("[savedworker] migrations 1, cold starts 0, 0.0 s lost")


def test_one_that_told_nothing_has_its_supervisor_s_last_words(client: Client, hand: Hand) -> None:
    hand.begin()
    hand.say("ModuleNotFoundError: No module named 'x'\n", "stderr")
    hand.say(line("Workload finished"), "stderr")  # as Airflow's supervisor writes
    hand.end(1, reason=Reason.EXIT, detail="exit code 1")
    found = events(client, hand)
    assert found[0] == "ModuleNotFoundError: No module named 'x'"
    assert found[1] == "Workload finished"
    assert found[2] == "[savedworker] worker w failed: exit: exit code 1"


# The archive ----------------------------------------------------------------------------------------------------------

PATH = "dag_id=d/run_id=manual__2026-01-01T00:00:00+00:00/task_id=ä t/attempt=1.log"


@pytest.mark.parametrize("sealed", [False, True])
def test_parts_come_back_in_order_and_only_with_the_key(tmp_path: Path, sealed: bool) -> None:
    store = open_store(str(tmp_path / "s"), sealing=sealing(key()) if sealed else None)
    store.ensure()
    archive.keep(store, PATH, "000000000000002~b", "second\n")
    archive.keep(store, PATH, "000000000000001~a", "first\n")
    archive.keep(store, f"{PATH}.trigger.7.log", archive.file_part(f"{PATH}.trigger.7.log"), "trigger\n")
    archive.keep(store, PATH.replace("attempt=1", "attempt=2"), "000000000000003~c", "other\n")
    assert [x[1] for x in archive.parts(store, PATH)] == ["first\n", "second\n", "trigger\n"]
    if sealed:
        raw = b"".join(x.read_bytes() for x in (tmp_path / "s").rglob("*") if x.is_file())
        assert b"first" not in raw
        with pytest.raises(NoKey):
            list(archive.parts(open_store(str(tmp_path / "s")), PATH))


def test_a_part_is_replaced_by_its_later_version(tmp_path: Path) -> None:
    store = open_store(str(tmp_path / "s"))
    store.ensure()
    for text in ("one", "one and two"):
        archive.keep(store, PATH, "file~task", text)
    assert [x[1] for x in archive.parts(store, PATH)] == ["one and two"]


@pytest.fixture
def handler(client: Client, tmp_path: Path) -> SavedWorkerRemoteLogIO:
    handler = SavedWorkerRemoteLogIO(tmp_path / "logs")
    handler.client = client  # type: ignore[misc]
    return handler


def finished(client: Client, fleet: Any, ti: Any) -> Hand:
    from savedworker.model.spec import WorkerSpec

    name = worker_id(ti.dag_id, ti.task_id, ti.map_index, ti.id, ti.external_executor_id)
    hand = Hand(client, fleet, WorkerSpec(id=name, command=("true",), lease_term=10.0))
    client.submit(hand.spec)
    hand.begin()
    hand.say(line("said"))
    hand.fenced(ev.Concluded, outcome="success")
    return hand


def task_instance(**fields: Any) -> Any:
    found = {
        "dag_id": "d",
        "task_id": "t",
        "map_index": -1,
        "id": "i",
        "external_executor_id": "e",
        "state": "success",
    }
    return SimpleNamespace(**(found | fields))


def test_a_worker_that_ended_a_moment_ago_is_shown_and_not_twice(
    client: Client,
    fleet: Any,
    handler: SavedWorkerRemoteLogIO,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    ti = task_instance()
    hand = finished(client, fleet, ti)
    assert line("said") in "".join(handler.read(PATH, ti)[1] or [])
    hand.end()
    monkeypatch.setattr("airflow.logging_config.get_remote_task_log", lambda: handler)
    for _ in range(2):
        keep_finished.keep(client, client.record(hand.id), PATH, tmp_path / "logs")
    sources, texts = handler.read(PATH, ti)
    assert "".join(texts or []).count("said") == 1
    assert len(sources) == 1
    assert not (tmp_path / "logs").exists()


def test_while_it_runs_the_executor_shows_it_and_the_handler_does_not(
    client: Client, fleet: Any, handler: SavedWorkerRemoteLogIO
) -> None:
    finished(client, fleet, task_instance())
    assert handler.read(PATH, task_instance(state="running")) == ([], None)


def test_files_of_other_executors_are_kept_as_well(handler: SavedWorkerRemoteLogIO, tmp_path: Path) -> None:
    handler.client.store.ensure()
    file = tmp_path / "logs" / "a/attempt=1.log"
    file.parent.mkdir(parents=True)
    file.write_text(line("local"))
    handler.upload("a/attempt=1.log")
    handler.upload("a/missing.log")
    assert handler.read("a/attempt=1.log", task_instance())[1] == [line("local")]
    assert file.exists()
    handler.delete_local = True
    handler.upload(file)
    assert not file.exists()


def test_without_remote_logging_the_log_lies_where_airflow_looks(
    client: Client, fleet: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr("airflow.logging_config.get_remote_task_log", lambda: None)
    for external in ("e1", "e2"):  # before and after a deferral
        hand = finished(client, fleet, task_instance(external_executor_id=external))
        hand.end()
        for _ in range(2):
            keep_finished.keep(client, client.record(hand.id), PATH, tmp_path / "logs")
    assert (tmp_path / "logs" / PATH).read_text().count("said") == 2
    assert [x.name for x in (tmp_path / "logs" / PATH).parent.iterdir()] == ["attempt=1.log"]


class Remote:
    """The user's own remote logging: appends what it is given, as Airflow's S3 handler does."""

    def __init__(self, base: Path) -> None:
        self.base = base
        self.text = ""
        self.uploads = 0
        self.problem: Exception | None = None

    def upload(self, path: str, ti: Any) -> None:
        self.uploads += 1
        if self.problem is not None:
            raise self.problem
        self.text += (self.base / path).read_text()

    def read(self, path: str, ti: Any) -> tuple[list[str], list[str] | None]:
        return [path], [self.text] if self.text else None


@pytest.fixture
def remote(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Remote:
    remote = Remote(tmp_path / "logs")
    monkeypatch.setattr("airflow.logging_config.get_remote_task_log", lambda: remote)
    return remote


def test_the_user_s_own_remote_logging_gets_each_worker_s_part(
    client: Client, fleet: Any, remote: Remote
) -> None:
    for external in ("e1", "e2"):  # before and after a deferral
        hand = finished(client, fleet, task_instance(external_executor_id=external))
        hand.end()
        keep_finished.keep(client, client.record(hand.id), PATH, remote.base)
    assert (remote.uploads, remote.text.count("said")) == (2, 2)


def test_two_schedulers_that_look_after_one_worker_hand_its_log_on_once(
    client: Client, fleet: Any, remote: Remote, monkeypatch: pytest.MonkeyPatch
) -> None:
    hand = finished(client, fleet, task_instance())
    hand.end()
    keep_finished.keep(client, client.record(hand.id), PATH, remote.base)
    with pytest.raises(Temporary):
        keep_finished.keep(client, client.record(hand.id), PATH, remote.base)
    monkeypatch.setattr(keep_finished, "PATIENCE", timedelta(0))
    keep_finished.keep(client, client.record(hand.id), PATH, remote.base)
    assert (remote.uploads, remote.text.count("said")) == (1, 1)


def test_one_of_two_that_come_in_the_same_moment_hands_the_log_on(
    client: Client, fleet: Any, remote: Remote, monkeypatch: pytest.MonkeyPatch
) -> None:
    hand = finished(client, fleet, task_instance())
    hand.end()
    monkeypatch.setattr(archive, "kept_at", lambda *_: None)
    keep_finished.keep(client, client.record(hand.id), PATH, remote.base)
    with pytest.raises(Temporary):
        keep_finished.keep(client, client.record(hand.id), PATH, remote.base)
    assert remote.uploads == 1


def test_a_log_that_was_not_handed_on_to_its_end_is_handed_on_later(
    client: Client, fleet: Any, remote: Remote, monkeypatch: pytest.MonkeyPatch
) -> None:
    hand = finished(client, fleet, task_instance())
    hand.end()
    remote.problem = OSError("away")
    with pytest.raises(OSError, match="away"):
        keep_finished.keep(client, client.record(hand.id), PATH, remote.base)
    remote.problem = None
    monkeypatch.setattr(keep_finished, "PATIENCE", timedelta(0))
    keep_finished.keep(client, client.record(hand.id), PATH, remote.base)
    assert remote.text.count("said") == 1


@pytest.mark.parametrize("begun", [False, True])
def test_one_whose_instance_never_reached_airflow_says_so(client: Client, hand: Hand, begun: bool) -> None:
    """Airflow fails it as stuck in the queue, with no other reason."""
    hand.begin()
    client.keep_engine_note(hand.id, relay.HEARTBEAT, b"{}")
    if begun:
        client.keep_engine_note(hand.id, relay.IDENTITY, b"{}")
    client.cancel(hand.id, "Airflow: the task was revoked")
    said = [x for x in events(client, hand) if "had no answer from the Execution API at" in x]
    assert len(said) == (0 if begun else 1)


# In the worker --------------------------------------------------------------------------------------------------------


@pytest.fixture
def pipe() -> Iterator[tuple[int, list[bytes]]]:
    """The writing end of a pipe, and what came out of it."""
    read, write = os.pipe()
    found: list[bytes] = []

    def collect() -> None:
        while data := os.read(read, 1 << 16):
            found.append(data)

    thread = threading.Thread(target=collect)
    thread.start()
    yield write, found
    os.close(write)
    thread.join()
    os.close(read)


def test_the_log_file_is_copied_to_the_last_byte(tmp_path: Path, pipe: tuple[int, list[bytes]]) -> None:
    file = tmp_path / "log"
    file.write_text("of an earlier try on this instance\n")
    copier = Copier(file, pipe[0])
    copier.start()
    text = "".join(line(f"{i}") for i in range(5000))
    with file.open("a") as log:
        log.write(text)
    copier.finish()
    import time

    until = time.monotonic() + 10
    while len(b"".join(pipe[1])) < len(text) and time.monotonic() < until:
        time.sleep(0.01)
    assert b"".join(pipe[1]).decode() == text


def test_a_log_file_that_never_comes_is_no_matter(tmp_path: Path, pipe: tuple[int, list[bytes]]) -> None:
    copier = Copier(tmp_path / "missing", pipe[0])
    copier.start()
    copier.finish()
    assert pipe[1] == []


@pytest.mark.parametrize(
    ("status", "oom_kills", "reason"),
    [(0, 0, None), (7, 0, Reason.EXIT), (-9, 0, Reason.EXIT), (-9, 1, Reason.OOM), (-11, 0, Reason.EXIT)],
)
def test_a_task_that_a_signal_killed_is_known_as_such(
    status: int, oom_kills: int, reason: Reason | None
) -> None:
    """The supervisor survives its task: without more the worker's status would be -9 modulo 256."""
    told = entry.exit_status(status)
    end = exits.ending(WorkerExit(wait_status=0, report=f"exit {told % 256}", oom_kills=oom_kills))
    assert end.reason == reason
    assert end.exit_code == (status if status >= 0 else 128 - status)
