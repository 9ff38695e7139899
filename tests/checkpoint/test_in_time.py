"""A checkpoint that would come too late ends in time, the worker runs on, and the reason says by how much."""

from __future__ import annotations

import time

import pytest

from savedworker.checkpoint.pace import Pace
from savedworker.checkpoint.save import TooLate, _Progress
from tests.checkpoint.bench import Bench

MIB = 1 << 20
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
    progress = _Progress(100 * MIB, 1011.5, lambda: None)
    for _ in range(15):  # 10 MiB a second are just enough
        clock.now += 0.1
        progress(MIB)
    clock.now += 1.5
    with pytest.raises(
        TooLate, match=r"15.0 MiB of 100.0 MiB of memory were stored in 3.\ds: the rest would come \d+"
    ):
        progress(MIB)


def test_a_slow_beginning_and_no_deadline_stop_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock(monkeypatch)
    early, endless = _Progress(100 * MIB, 1001.0, lambda: None), _Progress(100 * MIB, None, lambda: None)
    clock.now += 0.9
    early(MIB)
    clock.now += 1000
    endless(MIB)
    early(MIB)  # an eighth tells more than the first piece


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
