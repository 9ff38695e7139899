"""A periodic checkpoint gives way to the worker, in CPU and I/O; the last one before a reclaim never does."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest

from savedworker.checkpoint import layer, priority
from savedworker.checkpoint.priority import IO_PRIORITY, NICE, beside, give_way, own
from tests.checkpoint.bench import Bench

HOLDS = """
import os, time
data = os.urandom(40 << 20)
with open("/srv/kept", "wb") as file:
    file.write(os.urandom(9 << 20))
while True:
    print("tick", flush=True)
    time.sleep(0.05)
"""


def on_a_thread(action: Callable[[], object]) -> None:
    thread = threading.Thread(target=action)
    thread.start()
    thread.join()


def test_a_thread_that_gives_way_and_those_that_it_starts_have_the_lowest_priorities() -> None:
    seen: list[tuple[int, int]] = []

    def work() -> None:
        seen.append(own())
        give_way()
        seen.append(own())
        on_a_thread(lambda: seen.append(own()))

    on_a_thread(work)
    assert seen == [own(), (NICE, IO_PRIORITY), (NICE, IO_PRIORITY)]
    assert own()[0] < NICE


def test_work_beside_the_worker_hands_on_what_it_returns_and_raises() -> None:
    assert beside(True, own) == (NICE, IO_PRIORITY)
    assert beside(False, own) == own() != (NICE, IO_PRIORITY)
    for runs in (True, False):
        with pytest.raises(ZeroDivisionError):
            beside(runs, lambda: 1 // 0)


@pytest.mark.criu
def test_a_periodic_checkpoint_gives_way_and_the_last_one_does_not(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    bench.python(HOLDS)
    bench.until_output("tick")
    seen: dict[str, set[tuple[int, int]]] = {}

    def watched(what: str, real: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            if what != "put" or "/chunks/" in args[0]:  # not the look at the store's clock
                seen.setdefault(what, set()).add(own())
            return real(*args, **kwargs)

        return call

    monkeypatch.setattr(bench.chunks._store, "put", watched("put", bench.chunks._store.put))
    monkeypatch.setattr(layer, "precopy", watched("read files", layer.precopy))
    monkeypatch.setattr(bench.saver, "_cut", watched("frozen", bench.saver._cut))
    mine, low = own(), (NICE, IO_PRIORITY)
    bench.save()
    assert seen == {"put": {low}, "read files": {low}, "frozen": {mine}}
    seen.clear()
    bench.container.cgroup.thaw()
    bench.saver._base.clear()
    bench.chunks.forget([path.name for path in bench.folder.glob("store/workers/*/chunks/*")])
    bench.save(hold=True)
    assert seen == {"put": {mine}, "read files": {mine}, "frozen": {mine}}


def test_where_the_kernel_refuses_an_io_priority_the_work_is_done_all_the_same(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(priority, "IO_PRIORITY", 7 << 13)  # a class that there is not
    assert beside(True, lambda: "done") == "done"
    assert "the I/O priority cannot be lowered: Invalid argument" in caplog.text
