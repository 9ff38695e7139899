"""The digits classifier on EC2 spot instances: a reclaim moves it to another zone, the task stays one try.

Needs what docs/aws.md sets up: a bucket as the store (connection ``savedworker_default``), and a fleet ``spot`` in the fleet file. The
image of the fleet has Python with scikit-learn, and this folder at ``/opt/dags``.
"""

from __future__ import annotations

from airflow.sdk import DAG

from airflow_provider_savedworker.operators.saved_worker import SavedWorkerOperator

with DAG("digits_on_ec2", schedule=None, doc_md=__doc__):
    SavedWorkerOperator(
        task_id="train",
        fleet="spot",
        command=["python3", "/opt/dags/train_digits.py"],
        env={"OUTPUT": "/tmp/digits-model.bin", "OMP_NUM_THREADS": "1"},
        memory="2GiB",
        cpus=2,
        checkpoint_interval="2m",
        deferrable=True,
        retries=0,
    )
