"""How the user's own process ended is told exactly, once, and no differently after a move."""

from __future__ import annotations

import os
import signal
from dataclasses import dataclass
from pathlib import Path

import pytest

from savedworker.model.record import Reason, State
from tests.runtime.gate import PRELUDE, Gate
from tests.runtime.world import World


@dataclass(frozen=True)
class End:
    """What a program does last, and how that is reported."""

    name: str
    code: str
    reason: Reason | None
    exit_code: int
    signal: int | None = None


HOG = "data = []\nwhile True: data.append(bytearray(os.urandom(1 << 20)))"
ENDS = (
    End("zero", "sys.exit(0)", None, 0),
    End("one", "sys.exit(1)", Reason.EXIT, 1),
    End("three", "sys.exit(3)", Reason.EXIT, 3),
    End("plain-139", "os._exit(139)", Reason.EXIT, 139),
    End("plain-137", "os._exit(137)", Reason.EXIT, 137),
    End("segfault", "import ctypes; ctypes.string_at(0)", Reason.SIGNAL, 139, signal.SIGSEGV),
    End("sigkill", "os.kill(os.getpid(), 9)", Reason.SIGNAL, 137, signal.SIGKILL),
    End("sigterm", "os.kill(os.getpid(), 15)", Reason.SIGNAL, 143, signal.SIGTERM),
    End("memory", HOG, Reason.OOM, 137, signal.SIGKILL),
)
_NAMES = [end.name for end in ENDS]
LAST = PRELUDE + "say('ready')\nwait_for('end')\nexec(sys.argv[1])\n"


@pytest.fixture
def gate(tmp_path: Path) -> Gate:
    return Gate(tmp_path / "gate")


def reported(world: World, worker: str, end: End) -> None:
    """Fail unless ``end`` was reported exactly, and once."""
    record = world.until_settled(worker)
    state = State.SUCCEEDED if end.reason is None else State.FAILED
    found = (record.state, record.reason, record.exit_code, record.signal)
    assert found == (state, end.reason, end.exit_code, end.signal), world.story(worker)
    finished = [e for e in world.report(worker).timeline if e.event == "finished"]
    assert len(finished) == 1
    moved = record.migrations > 0
    assert record.after_restore == (moved and end.reason is not None)
    assert record.cold_starts == 0, world.story(worker)


@pytest.mark.parametrize("end", ENDS, ids=_NAMES)
def test_the_end_of_a_process_that_was_never_moved_is_told_exactly(
    world: World, gate: Gate, end: End
) -> None:
    worker = world.python(LAST, end.code, volumes=(gate.volume,), memory=256 << 20)
    gate.open("end")
    reported(world, worker, end)
    assert world.record(worker).migrations == 0


@pytest.mark.parametrize("end", ENDS, ids=_NAMES)
def test_the_end_of_a_process_that_was_moved_is_told_exactly(world: World, gate: Gate, end: End) -> None:
    worker = world.python(LAST, end.code, volumes=(gate.volume,), memory=256 << 20)
    world.until_output(worker, "ready")
    world.preempt(worker, notice=60)
    gate.open("end")
    reported(world, worker, end)
    assert world.record(worker).migrations == 1


def test_a_program_that_is_not_there_is_told_as_a_shell_would(world: World) -> None:
    worker = world.submit("/no/such/program")
    reported(world, worker, End("missing", "", Reason.EXIT, 127))
    assert "cannot run /no/such/program" in world.output(worker, "stderr")


@pytest.mark.parametrize("where", ["background", "foreground"])
def test_the_child_of_a_shell_is_saved_on_sigterm_right_after_its_start_and_goes_on_elsewhere(
    world: World, gate: Gate, where: str
) -> None:
    child = '/usr/bin/python3 -u -c "$0"'
    shell = f"{child}; exit $?" if where == "foreground" else f"{child} & wait $!; exit $?"
    count = PRELUDE + "say('child', os.getpid())\nwait_for('end')\nsay('again', os.getpid())\nsys.exit(5)\n"
    worker = world.submit("/bin/sh", "-c", shell, count, volumes=(gate.volume,))
    world.until_output(worker, "child")
    agent = world.host(worker).agent_pid
    assert agent is not None
    os.kill(agent, signal.SIGTERM)
    world.until(worker, lambda r: len(r.incarnations) == 2 and r.state is State.RUNNING, "go on elsewhere")
    gate.open("end")
    reported(world, worker, End("shell", "", Reason.EXIT, 5))
    output = world.output(worker).split()
    assert output[0] == "child"
    assert output[2] == "again"
    assert output[1] == output[3]
    incarnations = world.report(worker).incarnations
    assert incarnations[0].end_reason == "notice"
    assert incarnations[1].restored_from == "1-1"
    assert world.report(worker).lost_seconds == 0
