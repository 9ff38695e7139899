"""The directory's compare-and-swap: one winner, no lost update, no way to die that leaves it unusable."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from savedworker.model.errors import AlreadyExists, Conflict, Corrupt, NotFound, Unreachable
from savedworker.store import open_store
from savedworker.store.local import LEFTOVER_AGE
from savedworker.store.local_swap import HISTORY, SwapFile, Token

STEPS_OF_CREATE = ["create:built", "create:written", "create:renamed"]
STEPS_OF_SWAP = ["swap:written", "swap:synced", "swap:claimed", "swap:promoted"]


def swap_file(root: Path, step: Callable[[str], None] | None = None, patience: float = 10.0) -> SwapFile:
    scratch = root / ".tmp"
    scratch.mkdir(exist_ok=True)
    return SwapFile(root / "record.json", scratch, patience=patience, step=step)


# Each process counts in one shared document: the total, its own share, and who wrote last. What it tried and what it was
# told go to a file of its own, so that nothing is forgotten when it is killed.
COUNTER = """
import json, os, sys, uuid
from savedworker.model.errors import Conflict, NotFound
from savedworker.store import open_store

url, name, limit = sys.argv[1], sys.argv[2], int(sys.argv[3])
store, told = open_store(url), os.open(sys.argv[4], os.O_WRONLY | os.O_CREAT | os.O_APPEND)
done = 0
while done < limit:
    try:
        found = store.get("w/record.json")
        counts = json.loads(found.data)
    except NotFound:
        found, counts = None, {"total": 0, "of": {}}
    counts["total"] += 1
    counts["of"][name] = counts["of"].get(name, 0) + 1
    counts["nonce"] = uuid.uuid4().hex
    os.write(told, b"try\\n")
    try:
        store.swap("w/record.json", json.dumps(counts).encode(), found and found.version)
    except Conflict:
        os.write(told, b"lost\\n")
        continue
    os.write(told, b"won\\n")
    done += 1
"""


def start_counter(root: Path, name: str, limit: int) -> subprocess.Popen[bytes]:
    return subprocess.Popen(
        [sys.executable, "-c", COUNTER, str(root), name, str(limit), str(root.parent / f"{name}.told")]
    )


def test_many_processes_count_without_losing_one(tmp_path: Path) -> None:
    root = tmp_path / "store"
    processes = [start_counter(root, f"p{n}", 60) for n in range(6)]
    assert [process.wait(timeout=120) for process in processes] == [0] * 6
    found = open_store(str(root)).get("w/record.json")
    counts = json.loads(found.data)
    assert counts["of"] == {f"p{n}": 60 for n in range(6)}
    assert counts["total"] == 360
    token = Token.parse(found.version)
    assert token is not None
    assert token.revision == 360
    assert len(os.listdir(root / "w/record.json@")) <= HISTORY


def test_processes_killed_at_random_lose_no_update_and_block_nobody(tmp_path: Path) -> None:
    root = tmp_path / "store"
    running: dict[str, subprocess.Popen[bytes]] = {}
    names: list[str] = []
    chance = random.Random(20)

    def begun() -> list[str]:
        """Those that count: on a slow machine it takes a while until one does."""
        return sorted(name for name in running if (tmp_path / f"{name}.told").exists())

    for _ in range(40):
        while len(running) < 4:
            names.append(f"p{len(names)}")
            running[names[-1]] = start_counter(root, names[-1], 1 << 30)
        time.sleep(chance.uniform(0.05, 0.4))
        while not begun():
            time.sleep(0.01)
        victim = chance.choice(begun())
        running[victim].send_signal(signal.SIGKILL)
        running.pop(victim).wait()
    for process in running.values():
        process.kill()
        process.wait()
    survivor = start_counter(root, "survivor", 3)
    assert survivor.wait(timeout=120) == 0

    found = open_store(str(root)).get("w/record.json")
    counts = json.loads(found.data)
    token = Token.parse(found.version)
    assert token is not None
    assert counts["total"] == sum(counts["of"].values()) == token.revision
    assert counts["total"] > 50
    for name in names:
        told = tmp_path / f"{name}.told"
        words = told.read_text().split() if told.exists() else []
        counted = counts["of"].get(name, 0)
        # Killed between the swap and the answer: counted, though nobody was told. Never the other way round.
        assert words.count("won") <= counted <= words.count("try") - words.count("lost"), name
    assert [info.key for info in open_store(str(root)).list()] == ["w/record.json"]


CRASH = """
import os, signal, sys
from pathlib import Path
from savedworker.store.local_swap import SwapFile

root, at = Path(sys.argv[1]), sys.argv[2]
(root / ".tmp").mkdir(exist_ok=True)
def step(name):
    if name == at:
        os.kill(os.getpid(), signal.SIGKILL)
file = SwapFile(root / "record.json", root / ".tmp", step=step)
if at.startswith("create"):
    file.create(b"dead")
else:
    file.swap(file.read()[1], b"dead")
"""


def die(root: Path, at: str) -> None:
    done = subprocess.run([sys.executable, "-c", CRASH, str(root), at], capture_output=True)
    assert done.returncode == -signal.SIGKILL, done.stderr


@pytest.mark.parametrize("at", STEPS_OF_CREATE)
def test_a_creator_that_dies_at_any_step_leaves_all_or_nothing(tmp_path: Path, at: str) -> None:
    die(tmp_path, at)
    file = swap_file(tmp_path)
    if at == "create:renamed":
        data, token = file.read()
        assert data == b"dead"
    else:
        with pytest.raises(NotFound):
            file.read()
        token = file.create(b"alive")
    assert file.read()[1] == token
    file.swap(token, b"next")
    assert file.read()[0] == b"next"
    assert [info.key for info in open_store(str(tmp_path)).list()] == ["record.json"]


@pytest.mark.parametrize("at", STEPS_OF_SWAP)
def test_a_writer_that_dies_at_any_step_leaves_the_old_or_the_new_content(tmp_path: Path, at: str) -> None:
    file = swap_file(tmp_path)
    first = file.create(b"old")
    die(tmp_path, at)
    data, token = file.read()
    assert data == (b"dead" if at in ("swap:claimed", "swap:promoted") else b"old")
    assert file.stat().st_size == len(data)
    if data == b"dead":
        with pytest.raises(Conflict):
            file.swap(first, b"stale")
    newer = file.swap(token, b"newer")
    assert file.read() == (b"newer", newer)


def test_reading_writes_nothing_even_after_a_writer_died(tmp_path: Path) -> None:
    swap_file(tmp_path).create(b"old")
    die(tmp_path, "swap:claimed")
    before = sorted(os.listdir(tmp_path / "record.json@"))
    assert swap_file(tmp_path).read()[0] == b"dead"
    assert sorted(os.listdir(tmp_path / "record.json@")) == before


def test_files_left_by_dead_writers_are_bounded(tmp_path: Path) -> None:
    file = swap_file(tmp_path)
    file.create(b"0")
    for _ in range(3):
        for at in STEPS_OF_SWAP:
            die(tmp_path, at)
    for n in range(2 * HISTORY):
        file.swap(file.read()[1], f"{n}".encode())
    assert len(os.listdir(tmp_path / "record.json@")) <= HISTORY


def test_a_writer_that_pauses_at_any_step_cannot_undo_what_came_after(tmp_path: Path) -> None:
    for at in STEPS_OF_SWAP:
        root = tmp_path / at.replace(":", "-")
        root.mkdir()
        others = swap_file(root)
        first = others.create(b"same bytes")
        outcome: list[Token | None] = []

        def meanwhile(name: str, at: str = at, others: SwapFile = others) -> None:
            if name == at:
                for _ in range(3 * HISTORY):
                    others.swap(others.read()[1], b"same bytes")

        try:
            outcome.append(swap_file(root, meanwhile).swap(first, b"late"))
        except Conflict:
            outcome.append(None)
        data, token = others.read()
        assert data == b"same bytes"
        won = at in ("swap:claimed", "swap:promoted")
        assert (outcome[0] is not None) == won
        assert token.revision == 1 + 3 * HISTORY + won
        assert len(os.listdir(root / "record.json@")) <= HISTORY


def test_a_paused_writer_does_no_harm_to_a_key_that_was_deleted_and_made_again(tmp_path: Path) -> None:
    for at in STEPS_OF_SWAP:
        root = tmp_path / at.replace(":", "-")
        root.mkdir()
        others = swap_file(root)
        token = others.create(b"first life")
        for _ in range(3 * HISTORY):
            token = others.swap(token, b"first life")
        second: list[Token] = []

        def meanwhile(
            name: str, at: str = at, others: SwapFile = others, second: list[Token] = second
        ) -> None:
            if name == at:
                assert others.delete()
                second.append(others.swap(others.create(b"second life"), b"second life, 2"))
                (others.directory / f"new-{3:020d}-{'a' * 32}").write_bytes(b"somebody's work in progress")

        try:
            swap_file(root, meanwhile).swap(token, b"late")
        except Conflict:
            assert at in ("swap:written", "swap:synced")
        assert others.read() == (b"second life, 2", second[0])
        assert (others.directory / f"new-{3:020d}-{'a' * 32}").exists()


def test_of_two_creators_that_meet_one_wins(tmp_path: Path) -> None:
    def meanwhile(name: str) -> None:
        if name == "create:written":
            swap_file(tmp_path).create(b"other")

    with pytest.raises(AlreadyExists):
        swap_file(tmp_path, meanwhile).create(b"mine")
    assert swap_file(tmp_path).read()[0] == b"other"
    assert os.listdir(tmp_path / ".tmp") == []


def test_a_listing_that_raced_with_renames_is_repeated(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = swap_file(tmp_path)
    token = file.create(b"0")
    old = os.listdir(file.directory)
    for n in range(3):
        token = file.swap(token, f"{n}".encode())
    claims = [name for name in os.listdir(file.directory) if name.startswith("was")]
    listings = [[], old, claims, claims[:1], ["foreign", ".nfs0001"]]
    real = os.listdir
    monkeypatch.setattr(os, "listdir", lambda path: listings.pop() if listings else real(path))
    assert file.read() == (b"2", token)
    assert listings == []


def test_a_repeated_request_that_reports_failure_after_success_still_wins(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = Path.rename

    def lying(self: Path, target: str | Path) -> Path:
        real(self, target)
        raise FileNotFoundError(2, "as an NFS client says when its first request was lost", str(self))

    file = swap_file(tmp_path)
    monkeypatch.setattr(Path, "rename", lying)
    first = file.create(b"1")
    second = file.swap(first, b"2")
    assert file.read() == (b"2", second)
    with pytest.raises(Conflict):
        file.swap(first, b"3")


def test_an_outcome_that_cannot_be_known_is_unreachable_and_may_still_take_place(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = swap_file(tmp_path)
    first = file.create(b"1")
    with monkeypatch.context() as patch:
        late: list[tuple[Path, Path]] = []

        def hanging(self: Path, target: Path) -> Path:
            late.append((self, target))
            raise TimeoutError(110, "timed out")

        patch.setattr(Path, "rename", hanging)
        with pytest.raises(Unreachable):
            file.swap(first, b"2")
    assert file.read() == (b"1", first)
    late[0][0].rename(late[0][1])
    data, token = file.read()
    assert data == b"2"
    file.swap(token, b"3")
    assert file.read()[0] == b"3"


def test_a_directory_that_lost_its_content_is_corrupt_not_missing(tmp_path: Path) -> None:
    file = swap_file(tmp_path, patience=0.2)
    file.create(b"1")
    for name in os.listdir(file.directory):
        (file.directory / name).unlink()
    with pytest.raises(Corrupt):
        file.read()


class Schedule:
    """Lets one thread run at a time, from one protocol step to the next, in the order that ``choices`` gives."""

    def __init__(self, choices: list[int]) -> None:
        self._choices = choices
        self._turn = threading.Condition()
        self._waiting: set[int] = set()
        self._next: int | None = None
        self._alive: set[int] = set()

    def run(self, bodies: list[Callable[[Callable[[str], None]], None]]) -> None:
        self._alive = set(range(len(bodies)))

        def main(n: int) -> None:
            try:
                self._wait(n)
                bodies[n](lambda name: self._wait(n))
            finally:
                with self._turn:
                    self._alive.discard(n)
                    self._choose()

        threads = [threading.Thread(target=main, args=(n,)) for n in range(len(bodies))]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(30)
            assert not thread.is_alive()

    def _wait(self, n: int) -> None:
        with self._turn:
            self._waiting.add(n)
            self._choose()
            assert self._turn.wait_for(lambda: self._next == n, 30)
            self._next = None
            self._waiting.discard(n)

    def _choose(self) -> None:
        if self._next is None and self._waiting and self._waiting == self._alive:
            ready = sorted(self._waiting)
            choice = self._choices.pop() if self._choices else 0
            self._next = ready[choice % len(ready)]
            self._turn.notify_all()


@settings(
    max_examples=120,
    deadline=None,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
@given(choices=st.lists(st.integers(0, 5), max_size=80), deletes=st.booleans())
def test_every_interleaving_of_steps_gives_one_chain_of_versions(
    tmp_path_factory: pytest.TempPathFactory, choices: list[int], deletes: bool
) -> None:
    root = tmp_path_factory.mktemp("swap")
    won: list[tuple[Token | None, Token]] = [(None, swap_file(root).create(b"start"))]
    read: list[tuple[bytes, Token]] = []
    wrote: dict[Token, bytes] = {won[0][1]: b"start"}

    def writer(name: bytes) -> Callable[[Callable[[str], None]], None]:
        def body(step: Callable[[str], None]) -> None:
            file = swap_file(root, step)
            for n in range(3):
                data = b"%s-%d" % (name, n)
                try:
                    seen = file.read()
                    read.append(seen)
                    token = file.swap(seen[1], data)
                    won.append((seen[1], token))
                    wrote[token] = data
                except (Conflict, NotFound):
                    continue

        return body

    def deleter(step: Callable[[str], None]) -> None:
        file = swap_file(root, step)
        step("before")
        file.delete()
        step("between")
        token = file.create(b"again")
        won.append((None, token))
        wrote[token] = b"again"

    Schedule(choices).run([writer(b"a"), writer(b"b"), writer(b"c"), *([deleter] if deletes else [])])
    replaced = [old for old, _ in won if old is not None]
    assert len(set(replaced)) == len(replaced), "two writers replaced the same version"
    assert all(new.revision == (old.revision if old else 0) + 1 for old, new in won)
    for data, token in read:
        assert wrote[token] == data
    data, token = swap_file(root).read()
    assert wrote[token] == data
    assert token not in replaced, "the current version was replaced"
    lives = 1 + deletes
    assert sum(1 for _, new in won if new not in replaced) <= lives, (
        "a version that nobody replaced is not current"
    )


def test_old_leftovers_are_swept_and_young_ones_stay(tmp_path: Path) -> None:
    store = open_store(str(tmp_path))
    store.ensure()
    old, young = tmp_path / ".tmp" / "old.create", tmp_path / ".tmp" / "young"
    old.mkdir()
    (old / "x").touch()
    young.touch()
    long_ago = time.time() - LEFTOVER_AGE - 60
    os.utime(old, (long_ago, long_ago))
    open_store(str(tmp_path)).put("a", b"")
    assert os.listdir(tmp_path / ".tmp") == ["young"]
    assert [info.key for info in store.list()] == ["a"]


def test_foreign_names_in_the_directory_are_not_listed(tmp_path: Path) -> None:
    store = open_store(str(tmp_path))
    store.put("a/b", b"")
    for name in ("a/.hidden", "a/with space", "a/.nfs000123", "a/b~@", "a/link"):
        (tmp_path / name).symlink_to("b") if name == "a/link" else (tmp_path / name).touch()
    (tmp_path / "a/loop").symlink_to("..")
    assert [info.key for info in store.list()] == ["a/b"]
    assert store.list_dirs("a") == []


def test_a_write_cannot_leave_the_store_through_a_key(tmp_path: Path) -> None:
    store = open_store(str(tmp_path / "store"))
    store.put("a", b"")
    assert sorted(os.listdir(tmp_path)) == ["store"]
