"""What fetches and stores a lot gets its memory in huge pages."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from savedworker.checkpoint.allocator import TUNABLES, in_huge_pages
from tests.checkpoint.bench import Bench

HUGE = "glibc.malloc.hugetlb=1"


@pytest.mark.parametrize(
    ("given", "wanted"),
    [
        ({}, HUGE),
        ({TUNABLES: ""}, HUGE),
        ({TUNABLES: "glibc.malloc.check=1"}, f"glibc.malloc.check=1:{HUGE}"),
        ({TUNABLES: "glibc.malloc.hugetlb=0"}, "glibc.malloc.hugetlb=0"),
        ({TUNABLES: HUGE}, HUGE),
    ],
)
def test_what_the_environment_says_already_stands(given: dict[str, str], wanted: str) -> None:
    assert in_huge_pages({"HOME": "/", **given}) == {"HOME": "/", TUNABLES: wanted}


PROGRAM = """
import os, sys
from savedworker.checkpoint.allocator import begin_again_in_huge_pages
begin_again_in_huge_pages()
data = bytearray(64 << 20)
data[:] = b"x" * len(data)
huge = sum(int(x.split()[1]) for x in open("/proc/self/smaps") if x.startswith("AnonHugePages:"))
print(os.getpid(), sys.argv[1:], huge)
"""


def huge_pages(**environ: str) -> tuple[str, int]:
    process = subprocess.Popen(
        [sys.executable, "-c", PROGRAM, "a word"],
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, TUNABLES: "", **environ},
    )
    (said, _) = process.communicate(timeout=60)
    assert process.returncode == 0
    pid, _, rest = said.partition(" ")
    assert int(pid) == process.pid
    words, _, kib = rest.rpartition(" ")
    return words, int(kib)


def test_a_program_that_begins_again_is_the_same_and_has_huge_pages() -> None:
    can = Path("/sys/kernel/mm/transparent_hugepage/enabled")
    words, kib = huge_pages()
    assert words == "['a word']"
    assert (kib >= 32 << 10) == (can.exists() and "[never]" not in can.read_text())
    words, kib = huge_pages(**{TUNABLES: "glibc.malloc.hugetlb=0"})
    assert words == "['a word']"


@pytest.mark.criu
def test_a_worker_has_nothing_of_it_in_its_environment(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither when it begins nor after a move, by an agent that runs so."""
    monkeypatch.setenv(TUNABLES, HUGE)
    bench.start("/bin/sh", "-c", "while :; do cat /proc/self/environ; echo; echo seen; sleep 0.1; done")
    bench.until_output("seen\n")
    bench.save(hold=True)
    bench.restore()
    bench.writes_on()
    assert "PATH=" in bench.text
    assert TUNABLES not in bench.text
