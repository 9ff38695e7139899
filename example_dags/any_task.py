"""Ordinary tasks: with this executor each of them is a saved worker, and with any other they are what they are.

``[core] executor = airflow_provider_savedworker.executors.SavedWorkerExecutor``; docs/executor.md has the rest of the configuration.
"""

from __future__ import annotations

import time

from airflow.sdk import DAG, task

with DAG("any_task", schedule=None, catchup=False):

    @task
    def parts() -> list[int]:
        return [1, 2, 3]

    @task(executor_config={"checkpoint_interval": "30s", "memory": "1GiB"}, retries=1)
    def work(part: int) -> int:
        """Nothing in here knows that it may go on elsewhere."""
        done = 0
        for step in range(60):
            time.sleep(1)
            done += part
            print(f"part {part}: step {step}")
        return done

    @task
    def total(results: list[int]) -> int:
        return sum(results)

    total(work.expand(part=parts()))
