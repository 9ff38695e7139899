"""C63: the user's own remote logging, with Airflow's own S3 handler: what Airflow shows of a task that moved stands in the bucket."""

from __future__ import annotations

import os
import uuid
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest

from tests.airflow.engine import eventually
from tests.airflow.executor_bed import Bed, Run, executor_bed, in_the_meantime, oracle
from tests.store.conftest import BUCKET, SETTINGS, s3_client, s3_server

__all__ = ["s3_server"]  # a fixture

pytestmark = [pytest.mark.engine, pytest.mark.criu, pytest.mark.timeout(420)]

PROVIDERS = Path(__file__).parents[2] / ".providers"
"""Where scripts/setup puts Airflow's amazon provider."""
LOGS = f"s3://{BUCKET}/{uuid.uuid4().hex}"


@pytest.fixture(scope="module")
def bed(s3_server: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Bed]:
    """Its task logs are in the bucket alone: Airflow's handler empties the file on this machine once it is uploaded."""
    assert PROVIDERS.is_dir(), f"{PROVIDERS} is missing; fix: run scripts/setup"
    settings = {
        **SETTINGS,
        "AWS_ENDPOINT_URL": s3_server,
        "PYTHONPATH": os.pathsep.join(x for x in (str(PROVIDERS), os.environ.get("PYTHONPATH")) if x),
        "AIRFLOW__LOGGING__LOGGING_CONFIG_CLASS": "",
        "AIRFLOW__LOGGING__REMOTE_LOGGING": "True",
        "AIRFLOW__LOGGING__REMOTE_BASE_LOG_FOLDER": LOGS,
    }
    with executor_bed(tmp_path_factory.mktemp("remote-log"), settings) as started:
        yield started


def _in_the_bucket(endpoint: str, run: Run) -> str:
    """The object that is the log of the run's only try."""
    client = s3_client(endpoint)
    prefix = f"{LOGS.rpartition('/')[2]}/dag_id={run.dag}/run_id={run.id}/"
    keys = [x["Key"] for x in client.list_objects_v2(Bucket=BUCKET, Prefix=prefix).get("Contents", ())]
    texts = [client.get_object(Bucket=BUCKET, Key=x)["Body"].read().decode() for x in keys]
    client.close()
    assert keys == [f"{prefix}task_id=work/attempt=1.log"]
    return texts[0]


def _steps(run: Run) -> list[str]:
    return [x for x in run.log() if x.startswith("traffic step")]


def _ends_with_step(run: Run, number: int) -> bool:
    return _steps(run)[-1:] == [f"traffic step {number}"]


def test_the_log_of_a_task_that_moved_and_of_one_that_was_lost_is_whole_in_the_user_s_own_bucket(
    bed: Bed, s3_server: str
) -> None:
    moved, lost = bed.run("saved_python", 16), bed.run("saved_periodic", 18)
    moved.move(moved.running(said="traffic step 3"), 20.0, wait=False)
    second = lost.running(said="traffic step 9")
    told = [x for x in bed.output(second).splitlines() if "traffic step" in x]
    lost.move(second, None, wait=False)
    shown = bed.airflow.log(moved.dag, moved.id, "work")
    assert any("traffic step" in x for x in shown), f"it is shown while the task runs: {shown}"
    in_the_meantime([moved, lost], lambda: None, 240)
    for run, steps in ((moved, 16), (lost, 18)):
        (task,) = run.tasks()
        assert (task["state"], task["try_number"], run.callbacks()) == ("success", 1, []), run.told()
        eventually(partial(_ends_with_step, run, steps - 1), 30, "the log is uploaded")
        (worker,) = run.workers()
        assert (worker.migrations, worker.cold_starts) == (1, 0)
        marks = run.marks()
        assert sum(x.startswith("moved from") for x in marks) == 1, marks
        text = _in_the_bucket(s3_server, run)
        assert [text.count(x) for x in marks] == [1] * len(marks)
        said = {
            x for x in text.splitlines() if '"traffic step' in x
        }  # Airflow shows lines that are equal to the microsecond once
        assert len(said) == len(_steps(run)), "Airflow shows what is in the bucket"
        folder = bed.home / "logs" / f"dag_id={run.dag}" / f"run_id={run.id}"
        assert [x for x in folder.rglob("*.log") if x.stat().st_size] == [], "and nothing else"

    assert _steps(moved) == [f"traffic step {i}" for i in range(16)], "exactly once with notice"
    (move,) = (x for x in moved.marks() if x.startswith("moved from"))
    assert "on a notice" in move
    assert "nothing was lost" in move

    assert list(dict.fromkeys(_steps(lost))) == [f"traffic step {i}" for i in range(18)]
    assert len(told) > 9
    (mark,) = (x for x in lost.marks() if x.startswith("moved from"))
    assert "without a notice" in mark
    lines = bed.airflow.log(lost.dag, lost.id, "work")
    at = next(i for i, x in enumerate(lines) if x.startswith("[savedworker] moved"))
    before, after = ([x for x in part if x.startswith("traffic step")] for part in (lines[:at], lines[at:]))
    assert len(before) >= len(told), "what it had said a moment before the loss is there"
    assert before == [f"traffic step {i}" for i in range(len(before))]
    begin = int(after[0].rpartition(" ")[2])
    assert after == [f"traffic step {i}" for i in range(begin, 18)], "the replay follows the line of the move"
    assert any("done again below" in x for x in lost.marks()) == (begin < len(before))
    assert bed.refused_heartbeats() == []


def _agree(run: Run, local: Run) -> bool:
    return run.facts() == local.facts()


@pytest.mark.sweep
def test_logs_in_the_user_s_own_bucket_agree_with_those_of_local_executor(bed: Bed) -> None:
    """LocalExecutor's tasks upload theirs themselves."""
    names = ("python", "deferred", "retried")
    runs = {name: bed.run(f"saved_{name}", 12) for name in names}
    runs["python"].move(runs["python"].running(said="traffic step 1"), 20.0)
    local = oracle(bed, names, dict.fromkeys(names, 12), 300)
    in_the_meantime(runs.values(), lambda: None, 300)
    for name, run in runs.items():
        what = f"{run.facts()} is {local[name].facts()}"
        eventually(partial(_agree, run, local[name]), 30, what, every=2.0)
    assert sum(x.migrations for x in runs["python"].workers()) == 1
