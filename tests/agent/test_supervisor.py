"""The supervisor keeps an agent running where nobody else does: in a container, or under user data."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.fixture
def started(tmp_path: Path) -> Iterator[Callable[[str], subprocess.Popen[str]]]:
    """Supervisors of the shell command that is given, with a folder ``state`` of their own."""
    running: list[subprocess.Popen[str]] = []
    (tmp_path / "state").mkdir()

    def start(
        command: str, restarts: int = 3, first_pause: float = 0.01, patience: float = 60.0
    ) -> subprocess.Popen[str]:
        program = (
            "import sys; from pathlib import Path; from savedworker.agent.supervisor import supervise;"
            f"sys.exit(supervise(['sh', '-c', {command!r}], Path('state'), restarts={restarts}, first_pause={first_pause}, patience={patience}))"
        )
        process = subprocess.Popen(
            [sys.executable, "-c", program],
            cwd=tmp_path,
            env={**os.environ, "PYTHONPATH": str(ROOT)},
            stdout=subprocess.PIPE,
            text=True,
        )
        running.append(process)
        return process

    yield start
    for process in running:
        if process.poll() is None:
            process.kill()
        process.communicate()


def until(condition: Callable[[], bool]) -> None:
    end = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.01)


def test_an_agent_that_is_done_ends_it_and_leaves_nothing(
    tmp_path: Path, started: Callable[..., subprocess.Popen[str]]
):
    (tmp_path / "state/image").write_text("of a worker")
    process = started("echo once")
    assert process.communicate(timeout=90)[0] == "once\n"
    assert process.returncode == 0
    assert not (tmp_path / "state").exists()


def test_an_agent_gets_its_memory_in_huge_pages(started: Callable[..., subprocess.Popen[str]]):
    process = started("echo $GLIBC_TUNABLES")
    assert "glibc.malloc.hugetlb=1" in process.communicate(timeout=90)[0]


def test_an_agent_that_crashes_is_started_again(
    tmp_path: Path, started: Callable[..., subprocess.Popen[str]]
):
    process = started("echo life; [ -e second ] && exit 0; touch second; kill -9 $$")
    assert process.communicate(timeout=90)[0] == "life\nlife\n"
    assert process.returncode == 0


@pytest.mark.parametrize(("end", "status"), [("exit 7", 7), ("kill -9 $$", 137)])
def test_one_that_crashes_for_ever_is_given_up_with_its_status(
    started: Callable[..., subprocess.Popen[str]], end: str, status: int
):
    process = started(f"echo life; {end}", restarts=3)
    assert process.communicate(timeout=90)[0] == "life\n" * 4
    assert process.returncode == status


def test_sigterm_is_passed_on_and_the_agent_decides_when_it_ends(
    tmp_path: Path, started: Callable[..., subprocess.Popen[str]]
):
    """On AWS Batch that is the notice: the agent saves first."""
    process = started(
        "trap 'echo saving; until [ -e saved ]; do sleep 0.01; done; exit 0' TERM; touch ready; while :; do sleep 0.01; done"
    )
    until((tmp_path / "ready").exists)
    process.send_signal(signal.SIGTERM)
    with pytest.raises(subprocess.TimeoutExpired):
        process.wait(0.5)
    (tmp_path / "saved").touch()
    assert process.communicate(timeout=90)[0] == "saving\n"
    assert process.returncode == 0


def test_a_sigterm_reaches_every_later_life_once_that_can_hear_it(
    started: Callable[..., subprocess.Popen[str]],
):
    """An agent that dies while it is told, or has just been started, must not lose what was meant as a notice."""
    process = started(
        'if [ ! -e again ]; then touch again; kill -TERM "$PPID"; exit 1; fi;'
        " sleep 0.3; trap 'echo told; exit 0' TERM; while :; do sleep 0.01; done"
    )
    assert process.communicate(timeout=90)[0] == "told\n"
    assert process.returncode == 0


def test_a_sigterm_between_two_lives_ends_the_pause_in_which_the_notice_would_be_used_up(
    tmp_path: Path, started: Callable[..., subprocess.Popen[str]]
):
    process = started(
        'echo "$(( $(cat lives 2>/dev/null) + 1 ))" >lives.new; mv lives.new lives; [ "$(cat lives)" -lt 7 ] && exit 1;'
        " trap 'echo told; exit 0' TERM; while :; do sleep 0.01; done",
        restarts=9,
        first_pause=0.25,
    )
    lives = tmp_path / "lives"
    until(lambda: lives.exists() and lives.read_text() == "6\n")
    told = time.monotonic()
    process.send_signal(signal.SIGTERM)
    assert process.communicate(timeout=90)[0] == "told\n"
    assert time.monotonic() - told < 6, "the pause after the sixth crash is 8 s"


def test_an_agent_that_has_nothing_to_save_yet_is_not_started_again_after_sigterm(
    tmp_path: Path, started: Callable[..., subprocess.Popen[str]]
):
    process = started("echo life; touch ready; exec sleep 60", patience=1.0)
    until((tmp_path / "ready").exists)
    process.send_signal(signal.SIGTERM)
    assert process.communicate(timeout=90)[0] == "life\n"
    assert process.returncode == 143


def test_orphans_of_a_crashed_agent_live_and_are_collected(
    tmp_path: Path, started: Callable[..., subprocess.Popen[str]]
):
    """The shim is one: it holds the worker until the next agent attaches."""
    process = started(
        "if [ ! -e orphan ]; then (sleep 0.2; touch done) & echo $! >orphan; exit 1; fi;"
        " pid=$(cat orphan); until [ -e done ]; do sleep 0.01; done; while [ -d /proc/$pid ]; do sleep 0.01; done; echo collected"
    )
    assert process.communicate(timeout=90)[0] == "collected\n"
