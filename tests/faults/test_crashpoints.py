"""Crash points: nothing in production, exact in a test, and none forgotten."""

from __future__ import annotations

import re
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

from savedworker import crashpoints
from savedworker.crashpoints import EXIT_STATUS, POINTS, VARIABLE

PACKAGE = Path(crashpoints.__file__).parent
POINT = "agent.take.before"


def run(armed: str, program: str, *args: str) -> subprocess.CompletedProcess[str]:
    start = "import sys, time, os\nfrom savedworker.crashpoints import crash_point\n"
    command = [sys.executable, "-c", start + program, *args]
    environment = {VARIABLE: armed, "PYTHONPATH": str(PACKAGE.parent), "PATH": "/usr/bin:/bin"}
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60)


def passes(times: int) -> str:
    return f"for n in range({times}):\n    print(n, flush=True)\n    crash_point('{POINT}')\n"


def test_every_point_is_in_the_registry_and_in_one_place_of_the_code() -> None:
    used = Counter(
        name
        for file in PACKAGE.rglob("*.py")
        for name in re.findall(r"""crash_point\(\s*["']([^"']+)["']""", file.read_text())
    )
    assert set(used) == POINTS
    assert {name: times for name, times in used.items() if times != 1} == {}


def test_in_production_nothing_is_armed() -> None:
    assert crashpoints._passed is None
    done = run("", passes(3))
    assert (done.returncode, done.stdout.split()) == (0, ["0", "1", "2"])


@pytest.mark.parametrize(
    ("armed", "returncode", "passed"),
    [
        (POINT, -9, 1),
        (f"{POINT}=kill", -9, 1),
        (f"{POINT}@3", -9, 3),
        (f"{POINT}@2=exit", EXIT_STATUS, 2),
        (f"agent.take.after,{POINT}@2", -9, 2),
        (f"{POINT}@9", 0, 5),
        ("agent.take.after", 0, 5),
    ],
)
def test_a_point_is_armed_by_name_number_and_action(armed: str, returncode: int, passed: int) -> None:
    done = run(armed, passes(5))
    assert (done.returncode, len(done.stdout.split())) == (returncode, passed)
    assert (f"crash point {POINT}" in done.stderr) is (returncode != 0)


def test_a_hang_holds_up_one_thread_only() -> None:
    program = f"""
import threading
threading.Thread(target=crash_point, args=({POINT!r},), daemon=True).start()
time.sleep(0.2)
print("alive", flush=True)
os._exit(0)
"""
    assert run(f"{POINT}=hang:60", program).stdout == "alive\n"


def test_a_hang_that_a_file_armed_ends_when_it_is_let_go(folder: Path) -> None:
    (folder / POINT).write_text("=hang:600")
    program = f"""
import threading
hung = threading.Thread(target=crash_point, args=({POINT!r},), daemon=True)
hung.start()
while not os.path.exists(sys.argv[1]):
    time.sleep(0.01)
hung.join(0.2)
print(hung.is_alive(), flush=True)
os.unlink(sys.argv[1])
hung.join(30)
print(hung.is_alive(), flush=True)
os._exit(0)
"""
    assert run(str(folder), program, str(folder / f"{POINT}.hit")).stdout.split() == ["True", "False"]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "seen").mkdir()
    return tmp_path


def test_a_file_arms_a_point_for_the_first_process_that_gets_there(folder: Path) -> None:
    (folder / POINT).write_text("=exit")
    ends = [run(str(folder), passes(2)).returncode for _ in range(3)]
    assert ends == [EXIT_STATUS, 0, 0]
    assert [x.name for x in folder.iterdir() if x.is_file()] == [f"{POINT}.hit"]
    assert [x.name for x in (folder / "seen").iterdir()] == [POINT]


def test_a_file_counts_passes_from_the_moment_it_was_put_there(folder: Path) -> None:
    program = f"""
crash_point({POINT!r})
crash_point({POINT!r})
open(sys.argv[1], "w").write("@2")
crash_point({POINT!r})
print("once", flush=True)
crash_point({POINT!r})
print("twice")
"""
    done = run(str(folder), program, str(folder / POINT))
    assert (done.returncode, done.stdout) == (-9, "once\n")


def test_a_file_can_be_for_the_processes_of_one_cgroup(folder: Path) -> None:
    (folder / POINT).write_text("@1=exit in /no-such-host/")
    assert run(str(folder), passes(2)).returncode == 0
    own = Path("/proc/self/cgroup").read_text().splitlines()[0].rpartition(":")[2]
    (folder / POINT).write_text(f"@1=exit in {own}")
    assert run(str(folder), passes(2)).returncode == EXIT_STATUS
