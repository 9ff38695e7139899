"""SigtermMonitor with real signals to this process."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest

from savedworker.notice.base import Notice
from savedworker.notice.sigterm import SigtermMonitor


@pytest.fixture(autouse=True)
def _handler_restored() -> Iterator[None]:
    before = signal.getsignal(signal.SIGTERM)
    yield
    signal.signal(signal.SIGTERM, before)


@contextmanager
def watching(monitor: SigtermMonitor) -> Iterator[list[Notice]]:
    seen: list[Notice] = []
    stop = threading.Event()
    thread = threading.Thread(target=monitor.watch, args=(stop, seen.append))
    thread.start()
    try:
        yield seen
    finally:
        stop.set()
        thread.join(60)
    assert not thread.is_alive()


def wait(condition: Callable[[], object], seconds: float = 60.0) -> bool:
    end = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > end:
            return False
        time.sleep(0.01)
    return True


def test_a_sigterm_of_unknown_cause_is_a_notice_with_the_grace() -> None:
    monitor = SigtermMonitor(30.0, lambda: None)
    monitor.install()
    with watching(monitor) as seen:
        at = time.monotonic()
        os.kill(os.getpid(), signal.SIGTERM)
        assert wait(lambda: seen)
        heard = time.monotonic()
    [notice] = seen
    assert (notice.source, notice.kind, notice.withdrawn) == ("sigterm", "interruption", False)
    assert notice.deadline is not None
    assert at + 30.0 <= notice.deadline <= heard + 30.0


def test_a_second_sigterm_is_the_same_notice() -> None:
    monitor = SigtermMonitor(30.0, lambda: None)
    monitor.install()
    with watching(monitor) as seen:
        os.kill(os.getpid(), signal.SIGTERM)
        assert wait(lambda: seen)
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(0.2)
    assert len(seen) == 1


@pytest.mark.parametrize("reason", ["cancelled", "terminated", "time limit"])
def test_a_sigterm_whose_cause_is_final_is_no_notice(reason: str) -> None:
    ends: list[str] = []
    monitor = SigtermMonitor(30.0, lambda: reason, ends.append)
    monitor.install()
    with watching(monitor) as seen:
        os.kill(os.getpid(), signal.SIGTERM)
        assert wait(lambda: ends)
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(0.2)
    assert seen == []
    assert ends == [reason]
    assert monitor.final_reason == reason


def test_a_cause_that_cannot_be_found_out_is_a_notice() -> None:
    def confirm() -> str | None:
        raise ConnectionError("no store")

    monitor = SigtermMonitor(30.0, confirm)
    monitor.install()
    with watching(monitor) as seen:
        os.kill(os.getpid(), signal.SIGTERM)
        assert wait(lambda: seen)
    assert [n.withdrawn for n in seen] == [False]


def test_a_cause_that_is_slow_to_come_does_not_eat_the_grace_and_withdraws_the_notice_when_final() -> None:
    answer = threading.Event()

    def confirm() -> str | None:
        answer.wait(60)
        return "cancelled"

    ends: list[str] = []
    monitor = SigtermMonitor(10.0, confirm, ends.append)
    monitor.install()
    with watching(monitor) as seen:
        at = time.monotonic()
        os.kill(os.getpid(), signal.SIGTERM)
        assert wait(lambda: seen)
        assert time.monotonic() - at < 8.0
        answer.set()
        assert wait(lambda: ends)
    assert [(n.id, n.withdrawn) for n in seen] == [(seen[0].id, False), (seen[0].id, True)]


def test_without_its_handler_it_says_that_it_sees_nothing() -> None:
    monitor = SigtermMonitor(30.0, lambda: None)
    assert "install()" in (monitor.problem() or "")
    monitor.install()
    assert monitor.problem() is None
