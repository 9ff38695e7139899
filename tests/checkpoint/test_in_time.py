"""A checkpoint that would come too late ends in time, the worker runs on, and the reason says by how much."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from savedworker.checkpoint import layer
from savedworker.checkpoint.layer import content
from savedworker.checkpoint.pace import Pace, Work
from savedworker.checkpoint.save import TooLate, _Progress
from tests.checkpoint.bench import Bench

MIB, GIB = 1 << 20, 1 << 30
TICKS = """
import time
for i in range(100000):
    print(i, flush=True)
    time.sleep(0.01)
"""


class Clock:
    """time.monotonic that the test moves."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 1000.0
        monkeypatch.setattr("time.monotonic", lambda: self.now)


def test_the_rest_is_foretold_from_what_was_stored(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock(monkeypatch)
    progress = _Progress(100 * MIB, 0, 1011.5, lambda: None)
    for _ in range(15):  # 10 MiB a second are just enough
        clock.now += 0.1
        progress(MIB, False)
    clock.now += 1.5
    with pytest.raises(
        TooLate, match=r"15.0 MiB of 100.0 MiB of memory were stored in 3.\ds: the rest would come \d+"
    ):
        progress(MIB, False)


@pytest.mark.parametrize("new_first", [True, False])
@pytest.mark.parametrize("slower", [1, 4])
def test_what_is_new_takes_longer_whether_it_comes_first_or_last(
    monkeypatch: pytest.MonkeyPatch, new_first: bool, slower: int
) -> None:
    """10 s for 100 MiB that are new and 4 s for 800 MiB that are known, or four times as long: of 20 s."""
    clock = Clock(monkeypatch)
    progress = _Progress(100 * MIB, 800 * MIB, 1020.0, lambda: None)
    pieces = [(10 * MIB, False, 1.0)] * 10 + [(80 * MIB, True, 0.4)] * 10
    begun = []
    with pytest.raises(TooLate) if slower > 1 else contextlib.nullcontext():
        for size, known, seconds in pieces if new_first else reversed(pieces):
            progress(size, known)
            begun.append(size)
            clock.now += slower * seconds
    assert len(begun) == (20 if slower == 1 else 2 if new_first else 12), (
        "an eighth of what is too slow tells it"
    )


def test_a_slow_store_says_nothing_of_what_is_only_compared(monkeypatch: pytest.MonkeyPatch) -> None:
    """A worker that grew by a GiB since it was restored: 34 s for that, and 50 s for the 100 GiB that are known, of 120 s."""
    clock = Clock(monkeypatch)
    progress = _Progress(GIB, 100 * GIB, 1120.0, lambda: None)
    for _ in range(256):
        progress(4 * MIB, False)
        clock.now += 4 / 30
    for _ in range(100):
        progress(GIB, True)
        clock.now += 0.5
    assert 1080 < clock.now < 1090


def test_threads_that_wait_for_the_store_side_by_side_are_not_added_up(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Four of them store 100 MiB, each at 2 MiB a second: 12.5 s, of 15 or of 11."""
    for deadline, fits in ((1015.0, True), (1011.0, False)):
        clock = Clock(monkeypatch)
        progress = _Progress(100 * MIB, 0, deadline, lambda: None)
        with ThreadPoolExecutor(4) as pool:
            all_there = threading.Barrier(4, timeout=30)

            def store(progress: _Progress = progress, all_there: threading.Barrier = all_there) -> None:
                all_there.wait()
                progress(MIB, False)

            with contextlib.nullcontext() if fits else pytest.raises(TooLate, match="too late"):
                for _ in range(25):
                    for part in [pool.submit(store) for _ in range(4)]:
                        part.result()
                    clock.now += 0.5


def test_a_slow_beginning_and_no_deadline_stop_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock(monkeypatch)
    early = _Progress(100 * MIB, 0, 1001.0, lambda: None)
    endless = _Progress(100 * MIB, 0, None, lambda: None)
    clock.now += 0.9
    early(MIB, False)
    clock.now += 1000
    endless(MIB, False)
    early(MIB, False)  # an eighth tells more than the first piece


def test_what_cannot_be_in_time_is_not_begun_and_the_worker_runs_on(bench: Bench) -> None:
    bench.python(TICKS)
    bench.until_output("5\n")
    saver = bench.saver
    saver.pace = Pace(rest=60.0, measured=1)
    with pytest.raises(TooLate, match=r"a checkpoint takes about 1m.* here and \d+(\.\d)?s are left"):
        saver.save("1-1", "notice", lambda _: None, hold=True, deadline=time.monotonic() + 9)
    bench.writes_on()
    saver.save("1-2", "periodic", lambda _: None, deadline=time.monotonic() + 30)
    assert saver.pace.measured == 2
    assert saver.seconds_to_safe() < 40


GROWS = """
import os, sys, time
files = int(sys.argv[1])
for n in range(files):
    with open(f"/srv/{n}", "wb") as file:
        file.write(os.urandom(1 << 20))
memory = os.urandom(32 << 20)
while True:
    print("tick", flush=True)
    time.sleep(0.02)
"""


def learnt(monkeypatch: pytest.MonkeyPatch) -> list[Work]:
    """What each checkpoint is learnt from."""
    works: list[Work] = []
    original = Pace.learnt

    def learn(pace: Pace, work: Work) -> Pace:
        works.append(work)
        return original(pace, work)

    monkeypatch.setattr(Pace, "learnt", learn)
    return works


def slowed(monkeypatch: pytest.MonkeyPatch, seconds: float) -> None:
    """Reading the files of the layer ahead takes so much longer."""
    original = layer.precopy

    def slow(*values: Any, **named: Any) -> layer.PreCopy:
        threading.Event().wait(seconds)
        return original(*values, **named)

    monkeypatch.setattr(layer, "precopy", slow)


@pytest.mark.criu
def test_files_that_are_stored_the_first_time_do_not_count_for_the_next_time(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    works = learnt(monkeypatch)
    slowed(monkeypatch, 4.0)
    bench.python(GROWS, "4")
    bench.until_output("tick")
    bench.save()
    bench.save()
    first, second = works
    assert second.rest > 4.0
    assert first.rest < second.rest - 1.0


@pytest.mark.criu
def test_what_is_stored_is_what_the_pace_of_the_store_is_learnt_from(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    works = learnt(monkeypatch)
    bench.python(GROWS, "4")
    bench.until_output("tick")
    bench.save()
    (work,) = works
    assert work.store is not None
    assert work.new > 32 * MIB
    assert bench.saver.pace.stored == 1
    assert bench.saver.pace.new == pytest.approx(work.new / work.store, rel=1e-6)


@pytest.mark.criu
@pytest.mark.parametrize("where", ["/srv", "/dev/shm"])
def test_a_limit_on_what_is_sent_is_not_taken_for_the_pace_of_the_store(
    bench: Bench, monkeypatch: pytest.MonkeyPatch, where: str
) -> None:
    """A notice's checkpoint is sent without one, and is not to be thought too late because of it: 6 s for files, 4 for memory."""
    works = learnt(monkeypatch)
    bench.python(GROWS.replace("/srv", where), "48", checkpoint={"bandwidth": 8 * MIB})
    bench.until_output("tick")
    began = time.monotonic()
    bench.saver._snapshot = layer.Snapshot()  # files that were stored for the first time do not count anyway
    bench.save()
    (work,) = works
    assert time.monotonic() - began > 8.0
    assert (work.new > 32 * MIB, work.store) == (True, None)
    assert work.rest < 4.0
    assert (bench.saver.pace.new, bench.saver.pace.stored) == (Pace().new, 0)
    memory = bench.saver._sizes()[0]
    assert bench.saver.pace.measured_seconds(memory, 0) == bench.saver.pace.measured_seconds(0, 0), (
        "nobody knows yet"
    )


@pytest.mark.criu
@pytest.mark.parametrize("stage", ["copied in the freeze", "stored"])
@pytest.mark.parametrize("where", ["/srv", "/dev/shm"])
def test_files_are_given_up_at_the_deadline_like_memory(
    bench: Bench, monkeypatch: pytest.MonkeyPatch, stage: str, where: str
) -> None:
    """Some of them are done when the time is over; the worker runs on at once, and nothing of them is left."""
    bench.python(GROWS.replace("/srv", where), "24")
    bench.until_output("tick")
    calls: list[None] = []
    over = threading.Event()

    def counted(original: Callable[..., Any], *values: Any, **named: Any) -> Any:
        calls.append(None)
        if len(calls) == 4:
            over.set()
        return original(*values, **named)

    def still_wanted() -> None:
        if over.is_set():
            raise TooLate("the deadline came before the checkpoint was committed")

    with monkeypatch.context() as patch:
        patch.setattr(
            layer, "precopy", lambda *_, **__: layer.PreCopy()
        )  # all of them are left for the freeze
        if stage == "stored":
            original = content.Staged.chunks
            patch.setattr(content.Staged, "chunks", lambda *values: counted(original, *values))
        else:
            copy = content.Stage.copy
            patch.setattr(content.Stage, "copy", lambda *values: counted(copy, *values))
        with pytest.raises(TooLate, match="the deadline came"):
            bench.saver.save("1-1", "notice", lambda _: None, hold=True, still_wanted=still_wanted)
    assert len(calls) < 24
    bench.writes_on()
    assert list(bench.container.home.stage.iterdir()) == []
    bench.save(hold=True)
    bench.restore()
    bench.writes_on()
