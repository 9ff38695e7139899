"""The options of the executor: ``[savedworker]`` for all tasks, ``executor_config`` for one."""

from __future__ import annotations

import ipaddress
import json
import math
import os
import re
import ssl
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, Protocol, get_args
from urllib.parse import urlsplit

from pydantic import BaseModel, ConfigDict, ValidationError

from savedworker.model.errors import BadSpec
from savedworker.model.spec import POLICIES, WorkerSpec, first_problem
from savedworker.model.units import parse_duration, parse_interval, parse_size
from savedworker.model.written import read

SECTION = "savedworker"
_CERTIFICATE = re.compile(r"-----BEGIN CERTIFICATE-----.+?-----END CERTIFICATE-----", re.DOTALL)


OF_OTHERS = frozenset({"pod_override", "pod_template_file"})
"""Options of KubernetesExecutor's that stand in ``executor_config`` by themselves. Entries named ``…Executor`` are others' too."""


class Conf(Protocol):
    """Airflow's configuration, or a team's part of it."""

    def get(self, section: str, key: str, **kwargs: Any) -> Any: ...


class TaskOptions(BaseModel):
    """``executor_config`` of a task, or its entry ``savedworker`` where other executors have entries too.

    The fields mean what they mean for ``SavedWorkerOperator``; what is not given comes from ``[savedworker]``. None goes before
    ``[savedworker]`` where it is a value of the specification, see ``_NULLS``; elsewhere it is as not given.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    memory: str | int | None = None
    cpus: float | None = None
    image: str | None = None
    python: str | None = None
    user: str | None = None
    volumes: tuple[str, ...] | None = None
    env: dict[str, str] | None = None
    credentials: Literal["none", "instance"] = "none"
    fleet: str | None = None
    syscalls: Literal["guarded", "all"] = "guarded"
    checkpoint_interval: str | float | None = None
    """The short form of ``checkpoint.interval``."""
    checkpoint: Any = None
    """Fields of the checkpoint policy: a mapping, which ``read_checkpoint`` looks into."""
    placement: Any = None
    """Fields of the placement policy: a mapping, which ``read_placement`` looks into."""
    max_migrations: int | None = None
    orphan_after: str | float | None = None
    retention: str | float | None = None

    def or_of_all(self, name: str, of_all: Any) -> Any:
        """The field ``name``, or ``of_all`` (what ``[savedworker]`` says) where the task does not give it."""
        given = getattr(self, name)
        lifts = name in self.model_fields_set and name in _NULLS
        return given if lifts or given is not None else of_all


_NULLS = frozenset(
    name for name, field in WorkerSpec.model_fields.items() if type(None) in get_args(field.annotation)
)
"""Fields for which null is a value of the specification: no limit, or nobody in particular."""


def task_options(executor_config: Mapping[str, Any] | None, task: str = "task") -> TaskOptions:
    """The options in the ``executor_config`` of ``task``, which is for messages. Raises BadSpec that names what is wrong.

    What is there for other executors is left to them: the same DAG runs under any.
    """
    given: Any = {
        k: v
        for k, v in (executor_config or {}).items()
        if k not in OF_OTHERS and not str(k).endswith("Executor")
    }
    if SECTION in given:
        given = given[SECTION]
    if not isinstance(given, Mapping):
        raise BadSpec(
            f"{task}: executor_config[{SECTION!r}] is a {type(given).__name__}", "give a mapping of options"
        )
    try:
        return TaskOptions.model_validate(dict(given))
    except ValidationError as error:
        raise BadSpec(f"{task}: executor_config: {first_problem(error)}", _fix(error)) from error


def _fix(error: ValidationError) -> str:
    problem = error.errors(include_url=False)[0]
    if problem["type"] != "extra_forbidden":
        return "correct that option"
    name = str(problem["loc"][0])
    for group, model in POLICIES.items():
        if name in model.model_fields:
            return f"it is a field of {group}: {{{group!r}: {{{name!r}: …}}}}"
    return f"use one of: {', '.join(TaskOptions.model_fields)}"


@dataclass(frozen=True)
class Settings:
    """``[savedworker]``, as far as the executor reads it. Durations in seconds."""

    store: str
    fleet: str
    upstream: str
    """The Execution API as instances reach it."""
    authorities: str = ""
    """Certificates (PEM) by which its own may be signed: those that Airflow's own tasks would trust, too."""
    image: str = "host"
    python: str = ""
    user: str | None = None
    memory: str | None = None
    cpus: float | None = None
    volumes: tuple[str, ...] = ()
    environment: dict[str, str] = field(default_factory=dict)
    checkpoint_interval: str | None = None
    max_migrations: int | None = None
    max_cold_starts: int | None = 3
    wait_for_capacity: str | None = None
    poll_interval: float = 2.0
    token_lifetime: float = 600.0
    threads: int = 8
    log_on_this_machine: bool = True
    deployment: str = ""


def read_settings(conf: Conf, upstream: str) -> Settings:
    """The options as they are now. Raises BadSpec for one that is wrong or missing."""

    def text(name: str, default: str = "") -> str:
        return str(conf.get(SECTION, name, fallback=default) or default).strip()

    def number(name: str, default: float) -> float:
        given = text(name)
        if not given:
            return default
        try:
            found = float(given)
            if math.isfinite(found) and found >= 0:
                return found
        except ValueError:
            pass
        raise BadSpec(f"[{SECTION}] {name} = {given!r} is no number that can be used", "give 0 or more")

    def written(name: str, parse: Callable[[str], object]) -> str | None:
        given = text(name)
        if given:
            read(parse, given, f"[{SECTION}] {name}")
        return given or None

    def count(name: str, default: int | None) -> int | None:
        given = text(name)
        if given.lower() in ("unlimited", "none"):
            return None
        if given and not (given.isascii() and given.isdigit()):
            raise BadSpec(
                f"[{SECTION}] {name} = {given!r} is no whole number", "give 0 or more, or unlimited"
            )
        return int(given) if given else default

    store = os.environ.get("SAVEDWORKER_STORE", "") or text("store")
    if not store:
        raise BadSpec(
            "SavedWorkerExecutor has no store",
            f"set [{SECTION}] store, or SAVEDWORKER_STORE, to s3://… or file:///…",
        )
    environment = text("environment")
    try:
        given = json.loads(environment) if environment else {}
        if not isinstance(given, dict):
            raise ValueError("it is no object")  # noqa: TRY004
    except ValueError as error:
        raise BadSpec(f"[{SECTION}] environment: {error}", 'give JSON such as {"NAME": "value"}') from error
    return Settings(
        store=store,
        fleet=text("fleet", "local"),
        upstream=text("execution_api_server_url") or upstream,
        authorities=_authorities(conf),
        image=text("image", "host"),
        python=text("python"),
        user=text("user") or None,
        memory=written("memory", parse_size),
        cpus=number("cpus", 0.0) or None,
        volumes=tuple(x.strip() for x in text("volumes").split(",") if x.strip()),
        environment={str(k): str(v) for k, v in given.items()},
        checkpoint_interval=written("checkpoint_interval", parse_interval),
        max_migrations=count("max_migrations", None),
        max_cold_starts=count("max_cold_starts", 3),
        wait_for_capacity=written("wait_for_capacity", parse_duration),
        poll_interval=max(0.2, number("poll_interval", 2.0)),
        token_lifetime=max(60.0, number("token_lifetime", 600.0)),
        threads=max(1, int(number("executor_threads", 8))),
        deployment=text("deployment"),
    )


def _authorities(conf: Conf) -> str:
    """What Airflow's own client takes for its certificates, which lie on this machine. Raises BadSpec for one that cannot be read."""
    found = []
    for option in ("ssl_ca_file", "ssl_cert"):
        path = str(conf.get("api", option, fallback="") or "")
        if not path:
            continue
        try:
            # No key that stands beside them: they go into specifications.
            text = "\n".join(_CERTIFICATE.findall(Path(path).read_text()))
            if not text:
                raise ValueError("there is no certificate in it")
            ssl.create_default_context(cadata=text)
        except (OSError, ValueError) as error:  # ssl.SSLError is an OSError
            raise BadSpec(f"[api] {option} = {path}: {error}", "give a file of certificates (PEM)") from error
        found.append(text)
    return "\n".join(found)


def only_here(url: str) -> bool:
    """Whether ``url`` is of this machine's loopback: no instance reaches it."""
    host = urlsplit(url).hostname or ""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost" or host.endswith(".localhost")


def interpreter(settings: Settings, options: TaskOptions) -> str:
    """The Python that runs the task in its worker."""
    if options.python or settings.python:
        return options.python or settings.python
    return sys.executable if (options.image or settings.image) == "host" else "python3"
