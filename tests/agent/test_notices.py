"""What an agent can rely on for a warning, and that it says when it cannot be warned."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any, cast

import pytest
from click.testing import CliRunner

from savedworker.agent import main
from savedworker.agent.config import AgentConfig
from savedworker.agent.notices import NoticeBoard
from savedworker.cli.application import cli
from savedworker.store.worker import WorkerStore


def config(fleet: str, state_dir: Path, **more: Any) -> AgentConfig:
    return AgentConfig("s3://b", "w", "l-1", fleet, "i-1", None, state_dir, **more)


def test_the_warning_that_can_be_relied_on_is_that_of_the_fleet(tmp_path: Path):
    """C28: on AWS Batch it is the time from SIGTERM to SIGKILL, which is the hosts' setting."""
    assert config("ec2", tmp_path).notice == 120
    assert config("local", tmp_path).notice == 30
    assert config("aws-batch", tmp_path).notice == 25
    assert config("aws-batch", tmp_path, sigterm_grace=105.0).notice == 105


@pytest.mark.parametrize("fleet", ["ec2", "aws-batch"])
def test_an_agent_that_cannot_reach_the_metadata_service_says_so(
    tmp_path: Path, fleet: str, monkeypatch: pytest.MonkeyPatch
):
    """C22: it never waits silently. The monitor itself, hop limits included, is tested in tests/notice."""
    monkeypatch.setattr("signal.signal", lambda *_: None)  # SIGTERM stays this process's own
    nobody = config(fleet, tmp_path, metadata="http://127.0.0.1:9")
    board = NoticeBoard(nobody, cast(WorkerStore, None), lambda notice: None)
    (monitor,) = [each for each in board._monitors if each.source == "ec2"]
    stop = threading.Event()
    stop.set()
    list(cast(Any, monitor).look())
    (problem,) = board.problems()
    assert problem.startswith("notices from ec2 cannot be seen: the metadata service at http://127.0.0.1:9")


def test_the_command_takes_what_the_fleets_give(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """The very words of a job and of user data."""
    from savedworker.fleet.aws_batch.job import submission
    from savedworker.fleet.aws_batch.settings import BatchSettings
    from savedworker.fleet.base import LaunchRequest
    from savedworker.model.spec import parse_spec

    seen: list[AgentConfig] = []

    def run(config: AgentConfig) -> int:
        seen.append(config)
        return 0

    monkeypatch.setattr(main, "run", run)
    monkeypatch.setenv("AWS_BATCH_JOB_ID", "job-1")
    settings = BatchSettings.model_validate({"queues": "q", "image": "i", "stop_timeout": 110})
    request = LaunchRequest("l-1", "w", "s3://b/p", parse_spec({"id": "w", "command": ["true"]}))
    asked = submission(settings, request, "batch", settings.queues[0], "d", "eu-west-1")
    words = [word for word in asked["containerOverrides"]["command"][1:] if word != "--supervise"]
    done = CliRunner().invoke(cli, [*words, "--zone", "eu-west-1a", "--instance", "job-1"])
    assert done.exit_code == 0, done.output
    assert seen == [
        AgentConfig(
            store="s3://b/p",
            worker="w",
            launch="l-1",
            fleet="aws-batch",
            instance="job-1",
            zone="eu-west-1a",
            state_dir=Path("/var/lib/savedworker/l-1"),
            cgroup_parent="/savedworker/l-1",
            sigterm_grace=105.0,
        )
    ]
