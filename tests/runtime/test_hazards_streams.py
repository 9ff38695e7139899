"""Standard streams of every kind: whatever a task writes to, each of its lines is there once and in order."""

from __future__ import annotations

from pathlib import Path

import pytest

from savedworker.model.record import State
from tests.runtime.gate import PRELUDE, Gate
from tests.runtime.world import World

LINES = (
    PRELUDE
    + "\nname, number = sys.argv[1], 0\nwhile closed('end'):\n    number += 1\n    say(name, number, os.isatty(1))\n    time.sleep(0.02)\nsay(name, 'last', number)\n"
)

TASKS = (
    PRELUDE
    + """
import pty, subprocess, threading
program = sys.argv[1]
def command(name):
    return [sys.executable, "-u", "-c", program, name]
def terminal():
    pid, master = pty.fork()
    if pid == 0:
        os.execv(sys.executable, command("terminal"))
    data = b""
    while True:
        try:
            part = os.read(master, 4096)
        except OSError:  # EIO: the other side has ended
            break
        data += part
        *lines, data = data.split(b"\\r\\n")
        for line in lines:
            say(line.decode())
    os.waitpid(pid, 0)
def collector():
    with subprocess.Popen(command("pipe"), stdout=subprocess.PIPE, text=True) as process:
        for line in process.stdout:
            say(line.rstrip())
def plain():
    with open("/srv/plain", "w") as file:
        subprocess.run(command("file"), stdout=file, stdin=open("/dev/null"))
threads = [threading.Thread(target=x) for x in (terminal, collector, plain)]
for thread in threads:
    thread.start()
for thread in threads:
    thread.join()
os.write(1, open("/srv/plain", "rb").read())
os.write(2, b"done\\n")
"""
)


@pytest.fixture
def gate(tmp_path: Path) -> Gate:
    return Gate(tmp_path / "gate")


def numbers(output: str, name: str) -> list[str]:
    return [line for line in output.splitlines() if line.startswith(name)]


def test_terminals_pipes_and_files_lose_and_repeat_no_line_in_three_moves(world: World, gate: Gate) -> None:
    worker = world.python(TASKS, LINES, volumes=(gate.volume,))
    for move in range(1, 4):
        for name in ("terminal", "pipe"):
            world.until_output(worker, f"{name} {move * 20} ")
        world.preempt(worker, notice=60)
        if move == 2:
            world.checkpoint(worker)
    gate.open("end")
    record = world.until_settled(worker)
    assert record.state is State.SUCCEEDED, world.story(worker)
    assert record.migrations == 3
    output = world.output(worker)
    for name, terminal in (("terminal", True), ("pipe", False), ("file", False)):
        lines = numbers(output, name)
        count = len(lines) - 1
        assert count > 60
        assert lines == [f"{name} {n} {terminal}" for n in range(1, count + 1)] + [f"{name} last {count}"]
    assert world.output(worker, "stderr") == "done\n"
