"""WorkerSpec: what to run and how to keep it, fixed for the worker's whole life."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from pathlib import PurePosixPath
from typing import Annotated, Any, Literal, TypeVar

from pydantic import AfterValidator, Field, ValidationError, field_validator, model_validator

from savedworker.model import defaults
from savedworker.model.base import Document, Frozen, Seconds
from savedworker.model.errors import BadSpec

_ID = re.compile(r"[a-z0-9]([a-z0-9._-]{0,61}[a-z0-9])?")
_NAME_OR_NUMBER = r"([0-9]{1,10}|[a-z_][a-z0-9_-]{0,31})"
_USER = re.compile(f"{_NAME_OR_NUMBER}(:{_NAME_OR_NUMBER})?")
_ENV_NAME = re.compile(r"[^=\0]+")
_RESERVED = ("/proc", "/sys", "/dev/shm", "/dev/pts", "/dev/mqueue", "/.savedworker")


def check_worker_id(worker_id: str) -> str:
    """Return ``worker_id`` if it can name a worker (also a path component and a host name), else raise BadSpec."""
    if not _ID.fullmatch(worker_id) or ".." in worker_id:
        raise BadSpec(
            f"worker id {worker_id!r} is not usable",
            "use 1 to 63 lower-case letters, digits, '.', '_' or '-', beginning and ending with a letter or digit",
        )
    return worker_id


class Volume(Frozen):
    """A host path made visible in the worker. Its files are not part of a checkpoint."""

    source: str
    target: str
    read_only: bool = False

    @field_validator("source", "target")
    @classmethod
    def _absolute(cls, value: str) -> str:
        path = PurePosixPath(value)
        if not path.is_absolute() or ".." in path.parts or "\0" in value:
            raise ValueError(f"{value!r} must be an absolute path without '..'")
        return "/" + "/".join(path.parts[1:])  # POSIX keeps two leading slashes

    @field_validator("target")
    @classmethod
    def _not_reserved(cls, value: str) -> str:
        if value == "/" or any(value == r or value.startswith(r + "/") for r in _RESERVED):
            raise ValueError(f"{value!r} belongs to the worker's runtime")
        return value

    @classmethod
    def parse(cls, text: str) -> Volume:
        """The volume in ``SRC:DST[:ro|rw]``. Raises BadSpec."""
        parts = text.split(":")
        if len(parts) not in (2, 3) or (len(parts) == 3 and parts[2] not in ("ro", "rw")):
            raise BadSpec(f"volume {text!r} is not SRC:DST[:ro|rw]", "for example --volume /data:/data:ro")
        try:
            return cls(source=parts[0], target=parts[1], read_only=len(parts) == 3 and parts[2] == "ro")
        except ValidationError as error:
            raise BadSpec(f"volume {text!r}: {first_problem(error)}", "give two absolute paths") from error


_REGISTRY_IMAGE = re.compile(
    r"docker://([A-Za-z0-9.-]+(:[0-9]{1,5})?/)?[a-z0-9][a-z0-9._/-]*(:[\w.-]{1,128})?(@sha256:[0-9a-f]{64})?"
)
_PLACE = re.compile(r"(s3|gs)://[A-Za-z0-9][A-Za-z0-9._-]{0,221}/[^\0]+|file:///[^\0]+")
_INPUT = re.compile(r"((?:s3|gs|file)://.+):(/[^:]*)")
_OUTPUT = re.compile(r"(/.*?):((?:s3|gs|file)://.+)")


def _place(value: str) -> str:
    if not _PLACE.fullmatch(value) or {"..", "."} & set(value.split("/")):
        raise ValueError(f"{value!r} is not s3://BUCKET/NAME, gs://BUCKET/NAME or file:///PATH")
    return value


def _inner_path(value: str) -> str:
    path = PurePosixPath(value)
    if not path.is_absolute() or ".." in path.parts or "\0" in value or value.strip("/") == "":
        raise ValueError(f"{value!r} must be an absolute path below / without '..'")
    return "/" + "/".join(path.parts[1:]) + ("/" if value.endswith("/") else "")


Place = Annotated[str, AfterValidator(_place)]
"""A URL outside of our store: an object or a file, or with a slash at its end all that is below it."""
InnerPath = Annotated[str, AfterValidator(_inner_path)]
"""A path that the worker sees; a slash at its end says that it is a folder."""


class Input(Frozen):
    """What is fetched into the worker's files before its first start."""

    url: Place
    path: InnerPath

    @classmethod
    def parse(cls, text: str) -> Input:
        """The input in ``URL:PATH``. Raises BadSpec."""
        match = _INPUT.fullmatch(text)
        if match is None:
            raise BadSpec(f"input {text!r} is not URL:PATH", "for example --input s3://bucket/data/:/data")
        return _parsed(cls, text, url=match[1], path=match[2])


class Output(Frozen):
    """What is published of the worker's files once it has succeeded."""

    path: InnerPath
    url: Place

    @classmethod
    def parse(cls, text: str) -> Output:
        """The output in ``PATH:URL``. Raises BadSpec."""
        match = _OUTPUT.fullmatch(text)
        if match is None:
            raise BadSpec(
                f"output {text!r} is not PATH:URL", "for example --output /out/model.pt:s3://bucket/model.pt"
            )
        return _parsed(cls, text, path=match[1], url=match[2])


_Transfer = TypeVar("_Transfer", Input, Output)


def _parsed(kind: type[_Transfer], text: str, **fields: str) -> _Transfer:
    try:
        return kind(**fields)
    except ValidationError as error:
        raise BadSpec(
            f"{kind.__name__.lower()} {text!r}: {first_problem(error)}", "give a URL and an absolute path"
        ) from error


class CheckpointPolicy(Frozen):
    """When checkpoints are taken and what happens when none can be used."""

    interval: Seconds | Literal["auto"] | None = defaults.CHECKPOINT_INTERVAL
    """Seconds between periodic checkpoints; null turns them off (a notice still takes one), ``auto`` adapts them."""
    bandwidth: int | None = Field(default=None, ge=1 << 10, lt=1 << 63)
    """Bytes per second that periodic checkpoints, and reading ahead for them, may send to the store; null is no limit."""
    memory_budget: int | None = Field(default=None, ge=defaults.MEMORY_BUDGET_LEAST, lt=1 << 63)
    """Bytes of memory that the agent may use beside the worker; null is what its instance is configured with."""
    keep: int = Field(default=defaults.CHECKPOINTS_KEPT, ge=1, le=1_000_000)
    restores_without_progress: int = Field(default=defaults.RESTORES_WITHOUT_PROGRESS, ge=1, le=1_000_000)
    when_unrestorable: Literal["cold_start", "fail"] = "cold_start"
    max_cold_starts: int | None = Field(default=None, ge=0, lt=1 << 63)
    """How often the worker may begin again from nothing; null is no limit. Past it, as ``when_unrestorable: fail``."""
    wait_for_match: Seconds = defaults.WAIT_FOR_MATCH


class PlacementPolicy(Frozen):
    """Where and how long to look for instances."""

    wait_for_capacity: Seconds = defaults.WAIT_FOR_CAPACITY
    avoid_reclaimed: Seconds = defaults.AVOID_RECLAIMED_PLACE
    wait_per_choice: Seconds = defaults.WAIT_PER_CHOICE
    """Seconds for which a launch may wait before the fleet's next choice (a queue, on-demand) is tried, where it has several."""
    on_demand_after_losses: int | None = Field(default=defaults.ON_DEMAND_AFTER_LOSSES, ge=0, lt=1 << 31)
    """Losses of spot instances within an hour after which on-demand is used; null never, 0 from the beginning."""
    on_demand_after_wait: Seconds | None = defaults.ON_DEMAND_AFTER_WAIT
    """Seconds without spot capacity after which on-demand is used; null never."""
    spare_for: Seconds | None = defaults.SPARE_FOR
    """Seconds for which a spare instance waits that is launched when EC2 recommends to leave; null launches none."""


POLICIES: dict[str, type[Frozen]] = {"checkpoint": CheckpointPolicy, "placement": PlacementPolicy}
"""The fields of WorkerSpec that are groups of fields, which people give in part."""


class RelaySpec(Frozen):
    """The engine's own interface, which the worker reaches only through a relay of its agent, at a fixed inner address.

    ``kind`` says whose interface it is. ``upstream`` is its base URL as instances reach it; ``task`` is the name by which the
    engine knows the worker (for Airflow: the task instance's id). ``authorities``: certificates (PEM) by which an upstream's over
    TLS may be signed, beside those that the instance trusts.
    """

    kind: Literal["airflow"]
    upstream: str
    authorities: str = ""
    task: str = Field(pattern=r"^[A-Za-z0-9._-]{1,100}$")

    @field_validator("upstream")
    @classmethod
    def _upstream(cls, value: str) -> str:
        if not re.fullmatch(r"https?://[^\s/?#@]+(/[^\s?#]*)?", value):
            raise ValueError(f"{value!r} is not a base URL such as http://airflow.example:8080/execution/")
        return value


class WorkerSpec(Document):
    """What to run and how to keep it. Immutable once the worker is created.

    ``command`` is an argument vector (no shell). ``image`` is ``host``, an absolute root directory,
    ``oci:DIR[:TAG]`` or ``docker://NAME[:TAG]``. ``engine`` holds what the engine wants to find again (names only, no secrets).
    """

    id: str
    command: tuple[str, ...] = Field(min_length=1)
    env: dict[str, str] = Field(default_factory=dict)
    user: str | None = None
    workdir: str = "/"
    image: str = "host"
    network: Literal["private", "host"] = "private"
    credentials: Literal["none", "instance"] = "none"
    """``instance``: the worker may use what the instance it is on has of AWS credentials, also after a move."""
    volumes: tuple[Volume, ...] = ()
    inputs: tuple[Input, ...] = ()
    """Fetched before the first start, and again before a cold start; part of the worker's files from then on."""
    outputs: tuple[Output, ...] = ()
    """Published when the worker has succeeded, before anybody is told that it has."""
    memory: int | None = Field(default=None, lt=1 << 63)
    cpus: float | None = Field(default=None, le=1_000_000, allow_inf_nan=False)
    syscalls: Literal["guarded", "all"] = "guarded"
    """``guarded`` answers ENOSYS to system calls whose state cannot be saved (io_uring and others)."""
    fleet: str = "local"
    checkpoint: CheckpointPolicy = CheckpointPolicy()
    placement: PlacementPolicy = PlacementPolicy()
    max_migrations: int | None = Field(default=None, ge=0, lt=1 << 63)
    lease_term: float = Field(
        default=defaults.LEASE_TERM, ge=defaults.LEASE_TERM_LEAST, le=86400, allow_inf_nan=False
    )
    orphan_after: float = Field(default=defaults.ORPHAN_AFTER, gt=0, allow_inf_nan=False)
    """Seconds without any engine after which the worker is checkpointed and its instance ends; an engine resumes it."""
    retention: Seconds = defaults.RETENTION
    engine: dict[str, str] = Field(default_factory=dict)
    relay: RelaySpec | None = None

    @field_validator("id")
    @classmethod
    def _id(cls, value: str) -> str:
        try:
            return check_worker_id(value)
        except BadSpec as error:
            raise ValueError(f"{error.message}; {error.fix}") from error

    @field_validator("command")
    @classmethod
    def _command(cls, value: tuple[str, ...]) -> tuple[str, ...]:
        if not value[0] or any("\0" in word for word in value):
            raise ValueError("the command needs a program name and no NUL characters")
        return value

    @field_validator("env")
    @classmethod
    def _env(cls, value: dict[str, str]) -> dict[str, str]:
        for name, content in value.items():
            if not _ENV_NAME.fullmatch(name) or "\0" in content:
                raise ValueError(f"environment variable {name!r} cannot be set")
            if name == "SAVEDWORKER_KEY":
                raise ValueError(f"{name} is the key of the store, which no worker may have")
        return value

    @field_validator("user")
    @classmethod
    def _user(cls, value: str | None) -> str | None:
        if value is None:
            return value
        numbers = [int(part) for part in value.split(":") if part.isdecimal()]
        if not _USER.fullmatch(value) or max(numbers, default=0) >= (1 << 32) - 1:
            raise ValueError(f"user {value!r} is not a name or number, with an optional :group")
        return value

    @field_validator("memory")
    @classmethod
    def _memory(cls, value: int | None) -> int | None:
        if value is not None and value < defaults.MEMORY_LEAST:
            raise ValueError(
                f"{value} bytes are too few to start anything; give {defaults.MEMORY_LEAST >> 20}MiB or more"
            )
        return value

    @field_validator("cpus")
    @classmethod
    def _cpus(cls, value: float | None) -> float | None:
        if value is not None and value < defaults.CPUS_LEAST:
            raise ValueError(
                f"{value:g} is too little to start anything; give {defaults.CPUS_LEAST:g} or more"
            )
        return value

    @field_validator("workdir")
    @classmethod
    def _workdir(cls, value: str) -> str:
        if not PurePosixPath(value).is_absolute() or "\0" in value:
            raise ValueError(f"{value!r} must be an absolute path")
        return value

    @field_validator("image")
    @classmethod
    def _image(cls, value: str) -> str:
        if value.startswith("docker://"):
            if not _REGISTRY_IMAGE.fullmatch(value):
                raise ValueError(f"image {value!r} is not docker://[HOST/]NAME[:TAG][@sha256:…]")
            return value
        if value != "host" and (not value.startswith(("/", "oci:/")) or "\0" in value):
            raise ValueError(
                f"image {value!r} is not 'host', an absolute directory, oci:/DIR[:TAG] or docker://NAME[:TAG]"
            )
        return value

    @model_validator(mode="after")
    def _volumes_differ(self) -> WorkerSpec:
        targets = [v.target for v in self.volumes]
        if len(set(targets)) != len(targets):
            raise ValueError("two volumes have the same target")
        return self

    @model_validator(mode="after")
    def _inputs_and_outputs_are_files_of_the_worker(self) -> WorkerSpec:
        paths = [x.path.rstrip("/") for x in self.inputs]
        if len(set(paths)) != len(paths):
            raise ValueError("two inputs have the same path")
        urls = [x.url.rstrip("/") for x in self.outputs]
        if len(set(urls)) != len(urls):
            raise ValueError("two outputs have the same URL")
        elsewhere = (*_RESERVED, *(volume.target for volume in self.volumes))
        for path in (*paths, *(x.path.rstrip("/") for x in self.outputs)):
            for other in elsewhere:
                if path == other or path.startswith(other + "/"):
                    what = "belongs to the worker's runtime" if other in _RESERVED else "is on a volume"
                    raise ValueError(f"{path!r} {what}, so it can be neither input nor output")
        return self

    @model_validator(mode="after")
    def _credentials_need_a_network(self) -> WorkerSpec:
        if self.credentials == "instance" and self.network == "host":
            raise ValueError(
                "credentials cannot be served with network 'host', where the worker reaches the instance's own service"
            )
        return self

    @model_validator(mode="after")
    def _relay_is_reached(self) -> WorkerSpec:
        if self.relay is not None and self.network != "private":
            raise ValueError("relay: only a worker with network=private can reach it")
        return self

    @model_validator(mode="after")
    def _can_be_stored(self) -> WorkerSpec:
        for name in type(self).model_fields:
            for text in _texts(getattr(self, name)):
                if not text.isascii() and _lone_surrogate(text):
                    raise ValueError(f"{name}: {text!a} is not Unicode text, so it cannot be stored")
        return self


def _texts(value: Any) -> Iterator[str]:
    if isinstance(value, str):
        yield value
    elif isinstance(value, Mapping):
        yield from _texts((*value.keys(), *value.values()))
    elif isinstance(value, tuple):
        for part in value:
            yield from _texts(part)
    elif isinstance(value, Volume):
        yield from (value.source, value.target)
    elif isinstance(value, Input | Output):
        yield from (value.url, value.path)
    elif isinstance(value, RelaySpec):
        yield value.upstream


def _lone_surrogate(text: str) -> bool:
    """True for what Python makes of bytes that are not UTF-8."""
    return any("\ud800" <= c <= "\udfff" for c in text)


def parse_spec(data: Any, source: str = "spec") -> WorkerSpec:
    """A WorkerSpec from parsed YAML or JSON. Raises BadSpec naming the field that is wrong and where (``source``)."""
    if not isinstance(data, dict):
        raise BadSpec(
            f"{source}: a worker specification is a mapping, not {type(data).__name__}", "see docs/spec.md"
        )
    try:
        return WorkerSpec.model_validate(data)
    except ValidationError as error:
        raise BadSpec(f"{source}: {first_problem(error)}", _fix(error)) from error


def _fix(error: ValidationError) -> str:
    problem = error.errors(include_url=False)[0]
    *groups, _ = problem["loc"] or ("",)
    if problem["type"] == "extra_forbidden" and len(groups) == 1 and groups[0] in POLICIES:
        return f"use one of: {', '.join(POLICIES[str(groups[0])].model_fields)}"
    return "correct that field"


_ALTERNATIVES = ("constrained-float", "literal['auto']")
"""What pydantic adds to the place of a problem when a field may be of several kinds; the first kind's problem is told."""


def first_problem(error: ValidationError) -> str:
    """The first problem in one line: where, and what."""
    problem = error.errors(include_url=False)[0]
    words = [str(part) for part in problem["loc"] if part not in _ALTERNATIVES]
    where = ".".join(word if word.isprintable() else ascii(word) for word in words)
    text = problem["msg"].removeprefix("Value error, ")
    if problem["type"] == "tuple_type":
        text = "this must be a list"
    elif problem["type"] == "extra_forbidden":
        text = "there is no such field"
    elif problem["type"] == "model_type":
        text = "this must be a mapping of fields"
    elif problem["type"] == "missing":
        text = "this field is missing"
    return f"{where}: {text}" if where else text
