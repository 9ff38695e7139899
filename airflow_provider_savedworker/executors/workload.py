"""From one queueing of a task instance to the specification of its worker."""

from __future__ import annotations

import hashlib
import json
import os
import re
from collections.abc import Mapping
from typing import Any

from airflow_provider_savedworker.executors.environment import worker_environment
from airflow_provider_savedworker.executors.settings import Settings, TaskOptions, interpreter
from savedworker.model.spec import Volume, WorkerSpec, parse_spec
from savedworker.model.units import parse_duration, parse_interval, parse_size
from savedworker.model.written import read, read_checkpoint, read_placement

NO_TOKEN = "held-by-the-relay"
"""In the place of the workload's token: the worker's memory holds none that anybody would accept."""


def worker_id(dag_id: str, task_id: str, map_index: int | None, ti_id: str, external_id: str) -> str:
    """The worker of one queueing. The task instance's id alone comes back after a deferral or a reschedule."""
    readable = re.sub(r"[^a-z0-9]+", "-", f"{dag_id}-{task_id}".lower())[:36].strip("-") or "task"
    if map_index is not None and map_index >= 0:
        readable = f"{readable}-{map_index}"
    return f"{readable}-{hashlib.sha256(f'{ti_id} {external_id}'.encode()).hexdigest()[:16]}"


def labels(ti: Any, external_id: str, log_path: str | None, deployment: str) -> dict[str, str]:
    """What the specification says of the task instance: enough for a scheduler that finds the worker to go on with it."""
    found = {
        "engine": "airflow",
        "executor": "SavedWorkerExecutor",
        "dag_id": ti.dag_id,
        "run_id": ti.run_id,
        "task_id": ti.task_id,
        "map_index": str(-1 if ti.map_index is None else ti.map_index),
        "try_number": str(ti.try_number),
        "ti_id": str(ti.id),
        "external_executor_id": external_id,
        "log_path": log_path or "",
    }
    return {"deployment": deployment, **found} if deployment else found


def source(ti: Any) -> str:
    """How messages about its options name the task."""
    return f"task {ti.dag_id}.{ti.task_id}"


def worker_spec(
    workload: Any,
    external_id: str,
    settings: Settings,
    options: TaskOptions,
    lease_term: float,
    config: Mapping[str, Mapping[str, Any]],
) -> WorkerSpec:
    """The worker for ``workload`` (Airflow's ExecuteTask). Raises BadSpec for options that are wrong."""
    ti = workload.ti
    name = worker_id(ti.dag_id, ti.task_id, ti.map_index, str(ti.id), external_id)
    home = f"/tmp/{name}"
    document = json.loads(workload.model_dump_json())
    document["token"] = NO_TOKEN
    image = options.image or settings.image
    given = {**settings.environment, **(options.env or {})}
    task = source(ti)
    checkpoint = {
        **_checkpoint_of_all(settings),
        **read_checkpoint(options.checkpoint, options.checkpoint_interval, task),
    }
    placement = {**_placement_of_all(settings), **read_placement(options.placement, task)}
    memory = options.or_of_all("memory", settings.memory)
    durations = {
        name: read(parse_duration, value, f"{task}: {name}")
        for name in ("orphan_after", "retention")
        if (value := getattr(options, name)) is not None
    }
    return parse_spec(
        {
            "id": name,
            "command": (
                interpreter(settings, options),
                "-m",
                "airflow_provider_savedworker.executors.entry",
                json.dumps(document),
            ),
            "env": worker_environment(config, home, given, as_here=image == "host"),
            "user": options.or_of_all("user", settings.user) or _user_here(image),
            "image": image,
            "volumes": tuple(
                read(Volume.parse, x, f"{task}: volumes")
                for x in options.or_of_all("volumes", settings.volumes)
            ),
            "memory": None if memory is None else read(parse_size, memory, f"{task}: memory"),
            "cpus": options.or_of_all("cpus", settings.cpus),
            "credentials": options.credentials,
            "syscalls": options.syscalls,
            "fleet": options.fleet or settings.fleet,
            "lease_term": lease_term,
            "checkpoint": checkpoint,
            "placement": placement,
            "max_migrations": options.or_of_all("max_migrations", settings.max_migrations),
            **durations,
            "engine": labels(ti, external_id, workload.log_path, settings.deployment),
            "relay": {
                "kind": "airflow",
                "upstream": settings.upstream,
                "authorities": settings.authorities,
                "task": str(ti.id),
            },
        },
        source=task,
    )


def _checkpoint_of_all(settings: Settings) -> dict[str, Any]:
    """What ``[savedworker]`` says of the checkpoint policy."""
    found: dict[str, Any] = {"max_cold_starts": settings.max_cold_starts}
    if settings.checkpoint_interval is not None:
        found["interval"] = parse_interval(settings.checkpoint_interval)
    return found


def _placement_of_all(settings: Settings) -> dict[str, Any]:
    """What ``[savedworker]`` says of the placement policy."""
    if settings.wait_for_capacity is None:
        return {}
    return {"wait_for_capacity": parse_duration(settings.wait_for_capacity)}


def _user_here(image: str) -> str | None:
    """On this machine's own files the task is who the scheduler is, as with LocalExecutor."""
    return f"{os.getuid()}:{os.getgid()}" if image == "host" and os.getuid() else None
