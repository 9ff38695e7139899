"""Clocks and timers of a worker that was away for a while."""

from __future__ import annotations

import json
import time
from datetime import UTC, datetime
from pathlib import Path

import pytest

from savedworker.model.record import State
from tests.runtime.gate import PRELUDE, Gate
from tests.runtime.world import World

AWAY = 11.0

CLOCKS = (
    PRELUDE
    + """
import ctypes, json, select, signal, struct, subprocess, threading
libc = ctypes.CDLL(None, use_errno=True)
began = time.monotonic()
def fired(name):
    say(name, "after", round(time.monotonic() - began, 2))
timer = libc.timerfd_create(time.CLOCK_MONOTONIC, 0)
assert libc.timerfd_settime(timer, 0, struct.pack("qqqq", 0, 0, 8, 0), None) == 0
def wait_timerfd():
    os.read(timer, 8)
    fired("timerfd")
def wait_sleep():
    time.sleep(8)
    fired("sleep")
def wait_poll():
    select.select([], [], [], 8)
    fired("select")
for target in (wait_timerfd, wait_sleep, wait_poll):
    threading.Thread(target=target).start()
signal.signal(signal.SIGALRM, lambda *_: fired("alarm"))
signal.setitimer(signal.ITIMER_REAL, 8)
last, last_boot, last_wall = time.monotonic(), time.clock_gettime(time.CLOCK_BOOTTIME), time.time()
say("ready")
while closed("end"):
    now, boot, wall = time.monotonic(), time.clock_gettime(time.CLOCK_BOOTTIME), time.time()
    if now < last or boot < last_boot:
        say("BACK", now - last, boot - last_boot)
    if wall - last_wall > 5:
        say("leap", round(wall - last_wall, 1), "monotonic", round(now - last, 2), "boot", round(boot - last_boot, 2))
        other = subprocess.run([sys.executable, "-c", "import time; print(time.monotonic())"], capture_output=True, text=True)
        say("same clock", now <= float(other.stdout) <= time.monotonic())
        say("wall", wall)
        say("told", json.dumps(json.load(open("/.savedworker/migrations.json"))))
    last, last_boot, last_wall = now, boot, wall
    time.sleep(0.01)
"""
)


@pytest.fixture
def gate(tmp_path: Path) -> Gate:
    return Gate(tmp_path / "gate")


def away_for(world: World, worker: str, seconds: float) -> None:
    """Preempt with notice and let the worker lie in the store for ``seconds``."""
    count = len(world.record(worker).incarnations)
    world.pause_controller(worker)
    world.client.preempt(worker, 60)
    record = world.until(worker, lambda r: r.state is State.MIGRATING, "leave its instance")
    frozen_at = record.checkpoints[-1].frozen_at
    world.until(
        worker, lambda _: (datetime.now(UTC) - frozen_at).total_seconds() > seconds, "be away long enough"
    )
    world.resume_controller(worker)
    world.until(worker, lambda r: len(r.incarnations) > count and r.state is State.RUNNING, "run on")


def test_time_stands_still_for_a_worker_that_is_away_and_it_is_told_for_how_long(
    world: World, gate: Gate
) -> None:
    worker = world.python(CLOCKS, volumes=(gate.volume,))
    world.until_output(worker, "ready")
    away_for(world, worker, AWAY)
    for name in ("timerfd", "sleep", "select", "alarm"):
        world.until_output(worker, f"{name} after")
    output = world.output(worker)
    away_for(world, worker, 6.0)
    world.until(worker, lambda _: world.output(worker).count("told") == 2, "see the second gap")
    gate.open("end")
    record = world.until_settled(worker)
    assert record.state is State.SUCCEEDED, world.story(worker)
    output = world.output(worker)
    assert "BACK" not in output
    lines = [line.split() for line in output.splitlines()]
    after = {line[0]: float(line[2]) for line in lines if line[1:2] == ["after"]}
    assert set(after) == {"timerfd", "sleep", "select", "alarm"}
    for name, seconds in after.items():
        assert 7.99 <= seconds < 8 + AWAY / 2, f"{name} fired after {seconds} s of its own time instead of 8"
    leaps = [line for line in lines if line[0] == "leap"]
    assert len(leaps) == 2
    assert float(leaps[0][1]) > AWAY
    assert all(float(leap[3]) < AWAY / 2 and float(leap[5]) < AWAY / 2 for leap in leaps), leaps
    assert output.count("same clock True") == 2
    assert abs(float(output.split("wall ")[-1].split()[0]) - time.time()) < 60
    told = json.loads(output.split("told ")[-1].splitlines()[0])
    assert [entry["checkpoint"] for entry in told] == ["1-1", "2-1"]
    assert told[0]["seconds_away"] > AWAY
    assert told[1]["seconds_away"] > 6.0
