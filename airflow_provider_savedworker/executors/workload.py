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
from savedworker.model import defaults
from savedworker.model.spec import Volume, WorkerSpec, parse_spec
from savedworker.model.units import parse_duration, parse_interval, parse_size

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
    wanted = (
        options.checkpoint_interval
        if options.checkpoint_interval is not None
        else settings.checkpoint_interval
    )
    checkpoint: dict[str, Any] = {
        "interval": defaults.CHECKPOINT_INTERVAL if wanted is None else parse_interval(wanted),
        "when_unrestorable": options.when_unrestorable,
        "max_cold_starts": _first(options.max_cold_starts, settings.max_cold_starts),
    }
    if options.checkpoint_bandwidth is not None:
        checkpoint["bandwidth"] = parse_size(options.checkpoint_bandwidth)
    if options.checkpoints_kept is not None:
        checkpoint["keep"] = options.checkpoints_kept
    if options.wait_for_match is not None:
        checkpoint["wait_for_match"] = parse_duration(options.wait_for_match)
    placement = {}
    capacity = _first(options.wait_for_capacity, settings.wait_for_capacity)
    if capacity is not None:
        placement["wait_for_capacity"] = parse_duration(capacity)
    if options.avoid_reclaimed is not None:
        placement["avoid_reclaimed"] = parse_duration(options.avoid_reclaimed)
    memory = _first(options.memory, settings.memory)
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
            "user": options.user or settings.user or _user_here(image),
            "image": image,
            "volumes": tuple(Volume.parse(x) for x in _first(options.volumes, settings.volumes) or ()),
            "memory": None if memory is None else parse_size(memory),
            "cpus": _first(options.cpus, settings.cpus),
            "syscalls": options.syscalls,
            "fleet": options.fleet or settings.fleet,
            "lease_term": lease_term,
            "checkpoint": checkpoint,
            "placement": placement,
            "max_migrations": _first(options.max_migrations, settings.max_migrations),
            "engine": labels(ti, external_id, workload.log_path, settings.deployment),
            "relay": {
                "kind": "airflow",
                "upstream": settings.upstream,
                "authorities": settings.authorities,
                "task": str(ti.id),
            },
        },
        source=f"task {ti.dag_id}.{ti.task_id}",
    )


def _first(*values: Any) -> Any:
    """The first that is given."""
    return next((x for x in values if x is not None), None)


def _user_here(image: str) -> str | None:
    """On this machine's own files the task is who the scheduler is, as with LocalExecutor."""
    return f"{os.getuid()}:{os.getgid()}" if image == "host" and os.getuid() else None
