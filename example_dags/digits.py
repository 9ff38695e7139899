"""Trains a small classifier as a saved worker: reclaim its instance as often as you like, the task is one try."""

from __future__ import annotations

import sys
from pathlib import Path

from airflow.sdk import DAG, Param

from airflow_provider_savedworker.operators.saved_worker import SavedWorkerOperator

PROGRAM = Path(__file__).resolve().parent / "train_digits.py"

with DAG(
    "digits",
    schedule=None,
    params={"output": Param("/tmp", type="string", description="Directory that gets digits-model.bin")},
    doc_md=__doc__,
):
    SavedWorkerOperator(
        task_id="train",
        command=[sys.executable, str(PROGRAM)],
        env={
            "OUTPUT": "/output/digits-model.bin",
            # One thread: the sums are then always made in the same order, and the model is the same to the last bit.
            "OMP_NUM_THREADS": "1",
            "OPENBLAS_NUM_THREADS": "1",
            "PYTHONDONTWRITEBYTECODE": "1",
        },
        volumes=["{{ params.output }}:/output"],
        checkpoint_interval="8s",
        poll_interval=1,
        retries=0,
    )
