"""``savedworker bench`` on a tiny worker: a table and JSON, and nothing is left of it. What it measures here is no measurement."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from savedworker.bench.suite import PARTS
from savedworker.checkpoint.mountinfo import mounts_below
from savedworker.cli.bench import PARTS as help_has

pytestmark = [pytest.mark.criu, pytest.mark.xdist_group("bench")]  # one private network at a time


def bench(folder: Path, parts: tuple[str, ...], *words: str) -> str:
    """Its output; the store and the scratch are in ``folder``."""
    scratch = folder / "scratch"
    scratch.mkdir(exist_ok=True)
    only = [word for part in parts for word in ("--only", part)]
    where = ["--scratch", str(scratch), "--store", f"file://{folder}/store"]
    command = [sys.executable, "-m", "savedworker.cli", "bench", "--quick", "--size", "0.05", *only, *where]
    process = subprocess.Popen([*command, *words], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    try:
        output, errors = process.communicate(timeout=300)
    finally:
        process.kill()
    assert process.returncode == 0, errors
    assert [x for x in errors.splitlines() if not x.startswith("bench: ")] == []
    assert left(folder, process.pid) == []
    return output


def left(folder: Path, pid: int) -> list[str]:
    """What is left of it: objects of workers, scratch, mounts, cgroups."""
    workers = [str(x) for x in (folder / "store").rglob("*") if "/workers/" in str(x) and x.is_file()]
    tops = (Path("/sys/fs/cgroup"), *Path("/sys/fs/cgroup").iterdir())
    cgroups = [str(x) for top in tops if top.is_dir() for x in top.glob(f"swbench-{pid}-*")]
    mounts = [str(x) for x in mounts_below(folder)]
    return workers + cgroups + mounts + [str(x) for x in (folder / "scratch").iterdir()]


@pytest.fixture
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("bench")


def test_it_measures_until_committed_and_running_and_leaves_nothing(folder: Path) -> None:
    document = json.loads(bench(folder, ("freeze", "reclaim", "shared", "sealing"), "--json"))
    figures = {x["what"]: x for x in document["figures"]}
    for what in (
        "notice to committed, 0.05 GiB, scattered",
        "the same without a base, 0.05 GiB, scattered",
        "restore to running, 0.05 GiB, scattered",
        "freeze seen by the worker, first checkpoint, 0.05 GiB",
        "restore to running with a key, 0.05 GiB",
    ):
        assert what in figures, sorted(figures)
        assert figures[what]["value"] > 0
    assert document["machine"]["cores"] >= 1


def test_the_help_names_every_part_that_there_is() -> None:
    """The command does not import the measurements for its help, and has a list of its own."""
    assert help_has == PARTS


def test_the_table_says_of_how_many_samples_it_is(folder: Path) -> None:
    shown = " ".join(bench(folder, ("files",)).split())
    assert "FIGURE OURS AGAINST RATIO TARGET" in shown
    assert "One sample of each into file://" in shown
