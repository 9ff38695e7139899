"""DrillMonitor: a file is a notice."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest

from savedworker.notice.drill import DrillMonitor, give_notice, withdraw_notice


def test_no_file_is_no_notice_and_no_problem(tmp_path: Path) -> None:
    monitor = DrillMonitor(tmp_path / "drill.json")
    assert list(monitor.look()) == []
    assert monitor.problem() is None


def test_a_file_is_one_notice_and_its_removal_withdraws_it(tmp_path: Path) -> None:
    path = tmp_path / "drill.json"
    monitor = DrillMonitor(path)
    before = time.monotonic()
    give_notice(path, 30)
    [notice] = [*monitor.look(), *monitor.look()]
    assert notice.kind == "interruption"
    assert notice.deadline is not None
    assert before + 29.9 < notice.deadline < time.monotonic() + 30.1
    withdraw_notice(path)
    [gone] = [*monitor.look(), *monitor.look()]
    assert (gone.id, gone.withdrawn) == (notice.id, True)


def test_the_time_counts_from_the_writing_so_that_a_restarted_agent_sees_the_same_end(tmp_path: Path) -> None:
    path = tmp_path / "drill.json"
    give_notice(path, 30)
    before = time.monotonic()
    earlier = time.time() - 20
    os.utime(path, (earlier, earlier))
    [first], [second] = DrillMonitor(path).look(), DrillMonitor(path).look()
    assert first.id == second.id
    assert first.deadline is not None
    assert before + 9.9 < first.deadline < time.monotonic() + 10.1


def test_another_content_is_another_notice(tmp_path: Path) -> None:
    path = tmp_path / "drill.json"
    monitor = DrillMonitor(path)
    give_notice(path, None)
    [first] = monitor.look()
    give_notice(path, 5)
    gone, second = monitor.look()
    assert (first.kind, first.deadline) == ("rebalance", None)
    assert (gone.id, gone.withdrawn) == (first.id, True)
    assert second.kind == "interruption"


@pytest.mark.parametrize(
    "text", ["", "{}", "[]", '{"notice": "soon"}', '{"notice": -1}', '{"notice": true}', '{"notice": NaN}']
)
def test_a_file_that_makes_no_sense_is_a_problem_and_no_notice(tmp_path: Path, text: str) -> None:
    path = tmp_path / "drill.json"
    path.write_text(text)
    monitor = DrillMonitor(path)
    assert list(monitor.look()) == []
    assert monitor.problem() is not None
    path.unlink()
    list(monitor.look())
    assert monitor.problem() is None
