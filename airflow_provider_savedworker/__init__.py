"""The Airflow provider: runs a task as a saved worker, which outlives the instance that it runs on.

This is the engine's side only: it may import ``savedworker.controller`` and below, and nothing there imports it. Modules
that DAG files import (this one, ``operators``, ``links``) import nothing heavy and nothing that exists only on Linux.
"""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, version
from typing import Any

PACKAGE = "airflow-provider-savedworker"
NAME = "Saved Worker"

try:
    __version__ = version(PACKAGE)
except PackageNotFoundError:  # a source tree that is not installed
    __version__ = "0"


def get_provider_info() -> dict[str, Any]:
    """What Airflow asks of a provider (entry point ``apache_airflow_provider``)."""
    package = "airflow_provider_savedworker"
    return {
        "package-name": PACKAGE,
        "name": NAME,
        "description": "Tasks whose running processes move to another instance when theirs is reclaimed.",
        "integrations": [{"integration-name": NAME, "external-doc-url": "", "tags": ["software"]}],
        "operators": [
            {"integration-name": NAME, "python-modules": [f"{package}.operators.saved_worker"]},
        ],
        "executors": [f"{package}.executors.SavedWorkerExecutor"],
        "cli": [f"{package}.commands.airflow_commands"],
        "remote-logging": [
            {
                "classpath": f"{package}.log.saved_worker_task_handler.SavedWorkerRemoteLogIO",
                "scheme": "savedworker",
            }
        ],
        "hooks": [{"integration-name": NAME, "python-modules": [f"{package}.hooks.saved_worker"]}],
        "triggers": [{"integration-name": NAME, "python-modules": [f"{package}.triggers.saved_worker"]}],
        "task-decorators": [
            {"name": "saved_worker", "class-name": f"{package}.decorators.saved_worker.saved_worker_task"}
        ],
        "extra-links": [f"{package}.links.saved_worker.SavedWorkerLink"],
        "connection-types": [
            {
                "connection-type": "savedworker",
                "hook-class-name": f"{package}.hooks.saved_worker.SavedWorkerHook",
                "hook-name": NAME,
                "ui-field-behaviour": {
                    "hidden-fields": ["host", "schema", "login", "password", "port", "extra"],
                    "relabeling": {},
                    "placeholders": {"store": "s3://bucket/prefix", "fleet": "local"},
                },
                "conn-fields": {
                    "store": {
                        "label": "Store",
                        "description": "Where everything durable goes: s3://, gs:// or file:///, the same for all "
                        "workers and every Airflow component.",
                        "schema": {"type": ["string", "null"]},
                    },
                    "fleet": {
                        "label": "Fleet",
                        "description": "What kind of instances workers run on, for tasks that name none.",
                        "schema": {"type": ["string", "null"]},
                    },
                    "key_file": {
                        "label": "Key file",
                        "description": "With which workers are encrypted: a file on every machine where Airflow runs tasks "
                        "and triggers. The environment variables SAVEDWORKER_KEY_FILE and SAVEDWORKER_KEY come after it.",
                        "schema": {"type": ["string", "null"]},
                    },
                    "checkpoint_interval": {
                        "label": "Checkpoint interval",
                        "description": "Such as 5m, for tasks that name none; off for checkpoints on notice only.",
                        "schema": {"type": ["string", "null"]},
                    },
                },
            }
        ],
        "config": {
            "savedworker": {
                "description": "Options for tasks that run as saved workers.",
                "options": {
                    "store": {
                        "description": "The store for workers whose connection and task name none: s3://, gs:// or "
                        "file:///. The environment variable SAVEDWORKER_STORE goes before it.",
                        "version_added": "0.1.0",
                        "type": "string",
                        "example": "s3://bucket/savedworker",
                        "default": "",
                    },
                    "fleet": {
                        "description": "The fleet for workers whose connection and task name none.",
                        "version_added": "0.1.0",
                        "type": "string",
                        "example": "ec2",
                        "default": "local",
                    },
                    "deployment": {
                        "description": "A name for this Airflow, among others that share a store. It stands in the "
                        "specification of every worker; ids differ without it.",
                        "version_added": "0.1.0",
                        "type": "string",
                        "example": "production",
                        "default": "",
                    },
                    "poll_interval": {
                        "description": "Seconds between two looks at a running worker. Each is a read of its record; "
                        "on an object store the worker's output is looked for every five seconds at most.",
                        "version_added": "0.1.0",
                        "type": "float",
                        "example": "5",
                        "default": "2",
                    },
                    "parallelism": {
                        "description": "How many tasks SavedWorkerExecutor runs at a time; 0: as [core] parallelism says.",
                        "version_added": "0.2.0",
                        "type": "integer",
                        "example": "32",
                        "default": "0",
                    },
                    "execution_api_server_url": {
                        "description": "The Execution API as instances reach it, where that is another way than [core] execution_api_server_url says.",
                        "version_added": "0.2.0",
                        "type": "string",
                        "example": "http://airflow.internal:8080/execution/",
                        "default": "",
                    },
                    "image": {
                        "description": "What a task of SavedWorkerExecutor finds as its root file system: host (that of the instance), a directory, or oci:DIR[:TAG]. Airflow, this provider and the DAGs must be in it.",
                        "version_added": "0.2.0",
                        "type": "string",
                        "example": "oci:/images/airflow:3.3",
                        "default": "host",
                    },
                    "python": {
                        "description": "The interpreter in that image. Empty: that of the scheduler with the image host, else python3.",
                        "version_added": "0.2.0",
                        "type": "string",
                        "example": "/opt/airflow/bin/python",
                        "default": "",
                    },
                    "user": {
                        "description": "Whom tasks run as, by name or number, with an optional :group. Empty: as the scheduler with the image host, else as the image says.",
                        "version_added": "0.2.0",
                        "type": "string",
                        "example": "airflow",
                        "default": "",
                    },
                    "memory": {
                        "description": "The memory limit of each task's worker. Empty: none.",
                        "version_added": "0.2.0",
                        "type": "string",
                        "example": "2GiB",
                        "default": "",
                    },
                    "cpus": {
                        "description": "The share of processors of each task's worker. Empty: no limit.",
                        "version_added": "0.2.0",
                        "type": "float",
                        "example": "1",
                        "default": "",
                    },
                    "volumes": {
                        "description": "Folders of the instance that every task sees, as SRC:DST[:ro|rw], separated by commas.",
                        "version_added": "0.2.0",
                        "type": "string",
                        "example": "/data:/data:ro, /scratch:/scratch",
                        "default": "",
                    },
                    "environment": {
                        "description": "JSON: variables that every task gets. A task inherits nothing of the scheduler's environment but PATH, PYTHONPATH, VIRTUAL_ENV and TZ, and those only with the image host.",
                        "version_added": "0.2.0",
                        "type": "string",
                        "example": '{"AIRFLOW_CONN_LAKE": "s3://"}',
                        "default": "",
                    },
                    "checkpoint_interval": {
                        "description": "Between two checkpoints of a task that names none: such as 10m, auto, or off for checkpoints on notice only. Empty: 5m.",
                        "version_added": "0.2.0",
                        "type": "string",
                        "example": "10m",
                        "default": "",
                    },
                    "max_migrations": {
                        "description": "How often a task may move before it fails with the reason migration_budget.",
                        "version_added": "0.2.0",
                        "type": "string",
                        "example": "20",
                        "default": "unlimited",
                    },
                    "max_cold_starts": {
                        "description": "How often a task that can no longer be restored begins again from nothing without using a retry; then it fails with its reason. A task's checkpoint (executor_config) goes before it.",
                        "version_added": "0.2.0",
                        "type": "string",
                        "example": "1",
                        "default": "3",
                    },
                    "wait_for_capacity": {
                        "description": "How long an instance is sought before a task fails with the reason no_capacity. Empty: 30m. A task's placement (executor_config) goes before it. For a task that has not begun, Airflow's own [scheduler] task_queued_timeout comes first where it is shorter.",
                        "version_added": "0.2.0",
                        "type": "string",
                        "example": "2h",
                        "default": "",
                    },
                    "token_lifetime": {
                        "description": "Seconds for which a token that the executor leaves for a worker's relay is good, beside the worker in the store. It is renewed when half of that is over.",
                        "version_added": "0.2.0",
                        "type": "float",
                        "example": "600",
                        "default": "600",
                    },
                    "executor_threads": {
                        "description": "Threads in the scheduler that look after workers.",
                        "version_added": "0.2.0",
                        "type": "integer",
                        "example": "16",
                        "default": "8",
                    },
                },
            }
        },
    }
