"""The DAGs of the engine tests. What they run is told by the run's conf, so that one Airflow serves all tests."""

from __future__ import annotations

import os
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

from airflow.providers.standard.operators.empty import EmptyOperator
from airflow.sdk import DAG, task

from airflow_provider_savedworker.operators.saved_worker import SavedWorkerOperator

CALLBACKS = Path(os.environ.get("SAVEDWORKER_TEST_CALLBACKS", "/nonexistent"))


def note(kind: str) -> Callable[[Any], None]:
    """A callback that leaves a line where the test looks for it."""

    def callback(context: Any) -> None:
        with CALLBACKS.open("a") as file:
            print(kind, context["run_id"], context["ti"].try_number, file=file)

    return callback


def make_dag(name: str, **fields: Any) -> DAG:
    """A DAG with a task ``work`` that runs the command of the run's conf, and one after it."""
    with DAG(f"worker_{name}", schedule=None, is_paused_upon_creation=False) as dag:
        SavedWorkerOperator(
            task_id="work",
            name=f"test-{name}",
            command="{{ dag_run.conf['command'] }}",
            volumes=["{{ dag_run.conf['volume'] }}:/shared"],
            checkpoint={
                "interval": "{{ dag_run.conf.get('checkpoint_interval', 'off') }}",
                "max_cold_starts": "{{ dag_run.conf.get('max_cold_starts', 9) }}",
            },
            placement={"spare_for": None},
            max_migrations=5,
            poll_interval=1,
            retry_delay=1.0,
            on_failure_callback=note("failure"),
            on_retry_callback=note("retry"),
            on_success_callback=note("success"),
            **fields,
        ) >> EmptyOperator(task_id="after")
    return dag


plain = make_dag("plain", retries=0)
retried = make_dag("retried", retries=1)
synchronous = make_dag("synchronous", retries=1, deferrable=False)
timed = make_dag("timed", retries=0, execution_timeout=timedelta(seconds=20))

# Three tasks of one function, the last of which is skipped, and one that does not defer. All are told a secret.
with DAG("worker_mapped", schedule=None, is_paused_upon_creation=False) as mapped:
    common: dict[str, Any] = {
        "env": {
            "TOKEN": "{{ conn.secretive.password }}",
            "ADDRESS": "db://me:{{ conn.secretive.password }}@db",
        },
        "checkpoint_interval": "off",
        "poll_interval": 1,
    }

    @task.saved_worker(skip_on_exit_code=[98, 99], **common)
    def work(number: int) -> list[str]:
        """Says what it knows."""
        told = 'echo "number {number}, token $TOKEN, at $ADDRESS"; exit {status}'
        return ["/bin/sh", "-c", told.format(number=number, status=99 if number == 2 else 0)]

    work.expand(number=[0, 1, 2])
    SavedWorkerOperator(task_id="synchronous", command="echo token $TOKEN", deferrable=False, **common)
