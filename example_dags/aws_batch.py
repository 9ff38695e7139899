"""The same on AWS Batch: a spot queue first, on-demand after three losses within an hour or ten minutes without capacity.

Needs what docs/aws.md sets up: a bucket as the store (connection ``savedworker_default``), and a fleet ``batch`` in the fleet file, whose image is
built from the agent's with Python, scikit-learn and this folder at ``/opt/dags``.
"""

from __future__ import annotations

from airflow.sdk import DAG

from airflow_provider_savedworker.operators.saved_worker import SavedWorkerOperator

with DAG("digits_on_aws_batch", schedule=None, doc_md=__doc__):
    SavedWorkerOperator(
        task_id="train",
        fleet="batch",
        command=["python3", "/opt/dags/train_digits.py"],
        env={"OUTPUT": "/tmp/digits-model.bin", "OMP_NUM_THREADS": "1"},
        memory="2GiB",
        cpus=1,
        checkpoint_interval="2m",
        placement={"on_demand_after_losses": 3, "on_demand_after_wait": "10m"},
        deferrable=True,
        retries=0,
    )
