"""The limit on what is sent: as fast as it says, for all threads together, and gone the moment that it is lifted."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest

from savedworker.store.backend import open_store
from savedworker.store.chunks import ChunkStore
from savedworker.store.throttle import Throttle


class Clock:
    """Seconds that pass when somebody waits, as if nothing else happened."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 100.0
        self.waited: list[float] = []
        monkeypatch.setattr(threading.Condition, "wait", self.wait)

    def wait(self, timeout: float | None = None) -> bool:
        assert timeout is not None
        self.waited.append(timeout)
        self.now += timeout
        return False


def test_bytes_go_as_fast_as_the_limit_says(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock(monkeypatch)
    throttle = Throttle(lambda: clock.now)
    throttle.limit(1000.0)
    for _ in range(5):
        throttle.take(500)
    assert throttle.waited == pytest.approx(4 * 0.5)
    assert clock.now - 100.0 == pytest.approx(4 * 0.5), (
        "the first one does not wait, each other one for that before it"
    )


def test_without_a_limit_nobody_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock(monkeypatch)
    throttle = Throttle(lambda: clock.now)
    throttle.take(1 << 40)
    throttle.limit(1.0)
    throttle.take(1 << 40)
    throttle.limit(None)
    throttle.take(1 << 40)
    assert (clock.waited, throttle.waited) == ([], 0.0)


def test_who_waits_goes_on_when_the_limit_is_lifted() -> None:
    throttle = Throttle()
    throttle.limit(1.0)
    throttle.take(1 << 30)  # the next one would wait for 34 years
    done = threading.Event()

    def wait_for_it() -> None:
        throttle.take(1)
        done.set()

    waiting = threading.Thread(target=wait_for_it, daemon=True)
    waiting.start()
    assert not done.wait(0.05)
    throttle.limit(None)
    assert done.wait(10)
    waiting.join()


def test_only_what_is_sent_counts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    chunks = ChunkStore(open_store(str(tmp_path)), "w", known=())
    taken: list[int] = []
    monkeypatch.setattr(chunks.throttle, "take", taken.append)
    for data in (bytes(100_000), bytes(100_000), b"other"):
        chunks.put(data)
    assert len(taken) == 2
    assert sum(taken) == chunks.bytes_uploaded < 1000
