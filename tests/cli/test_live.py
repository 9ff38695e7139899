"""The live view, through a real pseudo-terminal and a small model of its screen."""

from __future__ import annotations

import fcntl
import os
import pty
import re
import select
import signal
import struct
import sys
import termios
import time
from datetime import UTC, datetime, timedelta
from pathlib import Path

from savedworker.cli.live import render
from savedworker.model.record import (
    ActiveNotice,
    CheckpointEntry,
    EventSummary,
    Incarnation,
    State,
    WorkerRecord,
)
from tests.cli.conftest import Shell

NOW = datetime(2026, 1, 1, 12, 0, tzinfo=UTC)


class Screen:
    """What a terminal shows: enough of one for cursor up, erase below, colours and line ends."""

    def __init__(self, rows: int, columns: int) -> None:
        self.rows, self.columns = rows, columns
        self.lines = [""]
        self.row = self.column = 0
        self.rest = ""

    def feed(self, data: bytes) -> None:
        text = self.rest + data.decode()
        self.rest = ""
        position = 0
        while position < len(text):
            if text[position] == "\x1b":
                match = re.compile(r"\x1b\[(\d*)([A-Za-z])").match(text, position) or re.compile(
                    r"\x1b\[[\d;]*m"
                ).match(text, position)
                if match is None:
                    self.rest = text[position:]
                    return
                position = match.end()
                if match.group().endswith("A"):
                    self.row = max(0, self.row - int(match.group(1) or 1))
                elif match.group().endswith("J"):
                    self.lines[self.row] = self.lines[self.row][: self.column]
                    del self.lines[self.row + 1 :]
                else:
                    assert match.group().endswith("m"), match.group()
                continue
            char = text[position]
            position += 1
            if char == "\r":
                self.column = 0
            elif char == "\n":
                self.row, self.column = self.row + 1, self.column  # the tty adds the carriage return
                if self.row == len(self.lines):
                    self.lines.append("")
            else:
                line = self.lines[self.row].ljust(self.column)
                self.lines[self.row] = line[: self.column] + char + line[self.column + 1 :]
                self.column += 1
                assert self.column < self.columns, "a line of ours would wrap"

    @property
    def text(self) -> str:
        return "\n".join(line.rstrip() for line in self.lines)


class Terminal:
    """A pseudo-terminal on which ``savedworker`` runs."""

    def __init__(self, shell: Shell, *words: str, rows: int = 24, columns: int = 100, stdout=None) -> None:
        self.screen = Screen(rows, columns)
        self.master, slave = pty.openpty()
        fcntl.ioctl(slave, termios.TIOCSWINSZ, struct.pack("HHHH", rows, columns, 0, 0))
        shell.env["TERM"] = "xterm-256color"
        self.process = shell.start(
            *words, stdin=slave, stdout=stdout or slave, stderr=slave, start_new_session=True
        )
        os.close(slave)

    def look(self, seconds: float) -> str:
        until = time.monotonic() + seconds
        while (left := until - time.monotonic()) > 0:
            if select.select([self.master], [], [], left)[0]:
                try:
                    data = os.read(self.master, 65536)
                except OSError:
                    break
                if not data:
                    break
                self.screen.feed(data)
        return self.screen.text

    def until(self, text: str, timeout: float = 60) -> str:
        end = time.monotonic() + timeout
        while time.monotonic() < end:
            if text in self.look(0.1):
                return self.screen.text
        raise AssertionError(f"{text!r} never came up:\n{self.screen.text}")

    def to_the_end(self) -> str:
        while self.process.poll() is None:
            self.look(0.2)
        self.look(0.2)
        return self.screen.text


def waits_for(file: Path) -> str:
    """A line of a Python program."""
    return f"import os, time\nwhile not os.path.exists({str(file)!r}): time.sleep(.05)"


def test_the_view_shows_state_protection_and_events_below_the_workers_output_and_goes_away_at_the_end(
    shell: Shell, tmp_path: Path
):
    code = f"import time\nfor i in range(35): print('line', i, flush=True); time.sleep(.05)\n{waits_for(tmp_path / 'end')}"
    terminal = Terminal(shell, "run", "--name", "w", "--", sys.executable, "-c", code)
    seen = terminal.until("protected  yes").splitlines()
    title = next(
        n for n, line in enumerate(seen) if line.startswith("── w  running on host-1  incarnation 1")
    )
    assert any(line.startswith("line ") for line in seen[:title]) or title == 1
    assert not any(line.startswith("line ") for line in seen[title:])
    shell("preempt", "w", "--notice", "20")
    seen_after = terminal.until("1 migration")  # below the title, and drawn after it
    assert "running on host-2  incarnation 2" in seen_after
    (tmp_path / "end").touch()
    end = terminal.to_the_end().splitlines()
    assert end[0] == "savedworker: worker w"
    assert [line for line in end if line.startswith("line")] == [f"line {i}" for i in range(35)]
    assert end[-1].startswith("savedworker: w succeeded after")
    assert "──" not in terminal.screen.text
    assert terminal.process.returncode == 0


def test_an_unfinished_line_moves_in_the_view_and_comes_out_whole(shell: Shell, tmp_path: Path):
    code = (
        "import sys, time\n"
        "for i in range(20): print(f'\\r{i}/20', end='', file=sys.stderr, flush=True); time.sleep(.1)\n"
        f"{waits_for(tmp_path / 'end')}\n"
        "print(' finished', file=sys.stderr)\nprint('the end', end='')"
    )
    terminal = Terminal(shell, "run", "--name", "w", "--", sys.executable, "-c", code)
    terminal.until("/20\n── w")
    (tmp_path / "end").touch()
    lines = terminal.to_the_end().splitlines()
    assert "19/20 finished" in lines
    assert "the end" in lines
    assert lines[-1].startswith("savedworker: w succeeded")


def test_with_stdout_in_a_pipe_the_view_is_on_the_terminal_and_the_pipe_is_clean(
    shell: Shell, tmp_path: Path
):
    read, write = os.pipe()
    end = tmp_path / "end"
    words = ["sh", "-c", f"until [ -e {end} ]; do sleep .05; done; printf 'a\\nb'"]
    terminal = Terminal(shell, "run", "--name", "w", "--", *words, stdout=write)
    os.close(write)
    terminal.until("── w  running")
    end.touch()
    terminal.to_the_end()
    assert os.read(read, 1000) == b"a\nb"
    assert os.read(read, 1000) == b""


def test_ctrl_c_on_the_terminal_cancels_and_leaves_the_screen_tidy(shell: Shell):
    terminal = Terminal(shell, "run", "--name", "w", "--", "sleep", "60")
    terminal.until("protected  yes")
    os.kill(terminal.process.pid, signal.SIGINT)
    lines = terminal.to_the_end().splitlines()
    assert lines[-2] == "savedworker: cancelling the worker; press Ctrl-C again to leave it alone and go"
    assert lines[-1].startswith("savedworker: w cancelled by ")
    assert "──" not in terminal.screen.text


def test_a_terminal_that_can_show_nothing_gets_plain_lines(shell: Shell):
    shell.env["TERM"] = "dumb"
    terminal = Terminal.__new__(Terminal)
    terminal.screen = Screen(24, 200)
    terminal.master, slave = pty.openpty()
    terminal.process = shell.start(
        "run", "--name", "w", "--", "sleep", "1", stdin=slave, stdout=slave, stderr=slave
    )
    os.close(slave)
    lines = terminal.to_the_end().splitlines()
    assert lines[:2] == ["savedworker: worker w", "savedworker: protected"]


def test_a_narrow_terminal_cuts_lines_and_none_wraps(shell: Shell, tmp_path: Path):
    end = tmp_path / "end"
    words = ["sh", "-c", f"until [ -e {end} ]; do sleep .05; done"]
    terminal = Terminal(shell, "run", "--name", "w", "--", *words, rows=6, columns=44)
    shown = terminal.until("── w  running")
    end.touch()
    assert len(shown.splitlines()) <= 6
    # Our closing line is one line of text and may wrap like any other; the view may not.
    terminal.screen.columns = 10_000
    terminal.to_the_end()


def record(**fields) -> WorkerRecord:
    return WorkerRecord(id="w", created_at=NOW - timedelta(minutes=5), **fields)


def shown(given: WorkerRecord, width: int = 100, **held: bytes) -> list[str]:
    lines = render(given, NOW, {"stdout": b"", "stderr": b"", **held}, width)
    return [re.sub(r"\x1b\[[\d;]*m", "", line).rstrip() for line in lines]


def test_a_worker_that_is_not_protected_is_visibly_so():
    lines = shown(
        record(state=State.RUNNING, unprotected_reasons=("pid 7 has /dev/fuse open as fd 3", "io_uring"))
    )
    assert "   protected  no: pid 7 has /dev/fuse open as fd 3; io_uring" in lines


def test_a_notice_counts_down_and_a_checkpoint_has_an_age():
    lines = shown(
        record(
            state=State.CHECKPOINTING,
            notice=ActiveNotice(
                id="n", source="ec2", received_at=NOW - timedelta(seconds=20), seconds_left=120
            ),
            checkpoints=(
                CheckpointEntry(
                    number="1-1",
                    frozen_at=NOW - timedelta(seconds=65),
                    committed_at=NOW,
                    bytes_image=1 << 30,
                    bytes_uploaded=1 << 20,
                ),
            ),
            recent=(
                EventSummary(
                    number=1,
                    incarnation=1,
                    at=NOW - timedelta(seconds=3),
                    event="checkpoint_started",
                    detail="checkpoint 1-2 (notice)",
                ),
            ),
            events=1,
        )
    )
    assert "   now         checkpoint 1-2 (notice) being taken for 3s" in lines
    assert "   notice      from ec2, 100s left" in lines or "   notice      from ec2, 1m40s left" in lines
    assert "   checkpoint  1-1, 1m05s ago (1.0 GiB image, 1.0 MiB uploaded)" in lines


def test_a_worker_that_is_away_says_for_how_long():
    gone = Incarnation(
        number=1,
        launch="l",
        instance="host-1",
        taken_at=NOW - timedelta(minutes=4),
        started_at=NOW - timedelta(minutes=4),
        stopped_at=NOW - timedelta(seconds=75),
        ended_at=NOW - timedelta(seconds=70),
        end_reason="notice",
    )
    assert "   now        away for 1m15s, waiting for an instance" in shown(
        record(state=State.MIGRATING, incarnations=(gone,))
    )
    assert "   now        waiting for an instance for 5m00s" in shown(record())


def test_control_characters_and_colours_of_an_unfinished_line_do_no_harm():
    lines = render(
        record(), NOW, {"stdout": b"\x07\x1b[31mred\x1b[0m \x1b[2J\xff" + b"x" * 200, "stderr": b"\r\r"}, 60
    )
    plain = re.sub(r"\x1b\[[\d;]*m", "", lines[0])
    assert "\x1b" not in plain
    assert plain.startswith("red ")
    assert len(plain) <= 60
