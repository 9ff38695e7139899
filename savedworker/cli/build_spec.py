"""From options, spec file and environment to one WorkerSpec. Precedence: argument, spec file, environment, default."""

from __future__ import annotations

import os
import re
import secrets
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import unquote

from savedworker.checkpoint.mountinfo import mounts
from savedworker.cli.exit_status import BadArgument
from savedworker.cli.options import get_fleet
from savedworker.cli.spec_file import read_spec_file
from savedworker.cli.unbuilt import not_built
from savedworker.fleet.base import Fleet
from savedworker.model.errors import BadSpec, Refused
from savedworker.model.spec import Input, Output, Volume, WorkerSpec, check_worker_id, parse_spec
from savedworker.model.units import parse_interval

ENVIRONMENT = {
    "fleet": "SAVEDWORKER_FLEET",
    "image": "SAVEDWORKER_IMAGE",
    "network": "SAVEDWORKER_NETWORK",
    "checkpoint_interval": "SAVEDWORKER_CHECKPOINT_INTERVAL",
    "max_migrations": "SAVEDWORKER_MAX_MIGRATIONS",
}
"""Settings that the caller's environment may give, below arguments and spec file."""

_INTERPRETERS = re.compile(r"(python|pypy|perl|ruby|node|julia|Rscript|bash|dash|zsh|sh)[\d.]*")


@dataclass(frozen=True)
class SpecOptions:
    """What the command line of ``run`` and ``submit`` gave; None and empty mean not given."""

    command: tuple[str, ...] = ()
    name: str | None = None
    fleet: str | None = None
    spec: str | None = None
    checkpoint_interval: str | None = None
    max_migrations: int | None = None
    volumes: tuple[str, ...] = ()
    inputs: tuple[str, ...] = ()
    outputs: tuple[str, ...] = ()
    env: tuple[str, ...] = ()
    memory: int | None = None
    cpus: float | None = None
    user: str | None = None
    network: str | None = None
    credentials: str | None = None
    image: str | None = None
    unbuilt: Mapping[str, object] = field(default_factory=dict)
    """Options that are accepted so that they can be refused by name."""


def build_spec(given: SpecOptions, environ: Mapping[str, str], cwd: Path) -> tuple[WorkerSpec, Fleet]:
    """The spec and its fleet. ``cwd`` is the caller's. Raises BadSpec, BadArgument; creates nothing."""
    for option, value in given.unbuilt.items():
        if value:
            raise not_built(f"--{option}", "leave it out")
    data = read_spec_file(given.spec) if given.spec is not None else {}
    source = given.spec if given.spec not in (None, "-") else "spec"
    if given.command:
        data["command"] = given.command
    if not data.get("command"):
        raise BadArgument("no command is given", "put it after --, or give a --spec file that has one")
    for name in ("memory", "cpus", "user", "credentials"):
        if getattr(given, name) is not None:
            data[name] = getattr(given, name)
    for name in ("fleet", "network", "image", "max_migrations"):
        value = _first(getattr(given, name), data.get(name), environ.get(ENVIRONMENT[name]) or None)
        if value is not None:
            data[name] = value
    _checkpoint_interval(data, given, environ)
    fleet = _fleet(data.get("fleet", "local"))
    local = fleet.embedded
    image = data["image"] = _image(data.get("image", "host"), cwd, local)
    _volumes(data, given, cwd)
    _add(data, "inputs", [Input.parse(text).model_dump() for text in given.inputs], "path")
    _add(data, "outputs", [Output.parse(text).model_dump() for text in given.outputs], "url")
    data["env"] = _environment(data.get("env", {}), given.env, environ, image == "host" and local, source)
    if image == "host" and local and "workdir" not in data and _seen_inside(cwd, data.get("volumes")):
        data["workdir"] = str(cwd)
    data.setdefault("lease_term", fleet.lease_term)
    if given.name is not None:
        data["id"] = check_worker_id(given.name)
    data.setdefault("id", generate_id([str(word) for word in data["command"]]))
    spec = parse_spec(data, source)
    if local:
        _paths_exist(spec)
    return spec, fleet


def generate_id(command: list[str]) -> str:
    """A readable id that nobody else has: ``train-py-7f3a9c``."""
    word = command[0]
    if _INTERPRETERS.fullmatch(Path(word).name):
        # `python -m package.module` is the module, `bash -c '…'` is bash
        rest = command[1:]
        if rest[:1] == ["-m"] and len(rest) > 1:
            word = rest[1]
        else:
            word = next((w for w in rest[:3] if not w.startswith("-")), word) if rest[:1] != ["-c"] else word
    stem = re.sub(r"[^a-z0-9]+", "-", Path(word).name.lower()).strip("-")[:40].strip("-")
    return f"{stem or 'worker'}-{secrets.token_hex(3)}"


def _seen_inside(cwd: Path, volumes: Any) -> bool:
    """Whether the worker sees ``cwd``: its root is this machine's root file system alone, without what is mounted below."""
    targets = (
        [v.get("target") for v in volumes or () if isinstance(v, dict)] if isinstance(volumes, list) else []
    )
    if any(target and cwd.is_relative_to(target) for target in targets):
        return True
    points = {mount.point for mount in mounts()}
    return not any(str(place) in points for place in (cwd, *cwd.parents) if place != place.parent)


def _first(*values: Any) -> Any:
    return next((value for value in values if value is not None), None)


def _checkpoint_interval(data: dict[str, Any], given: SpecOptions, environ: Mapping[str, str]) -> None:
    policy = data.get("checkpoint", {})
    if not isinstance(policy, dict):
        return  # parse_spec says what is wrong
    text = given.checkpoint_interval
    name = "--checkpoint-interval"
    if text is None and "interval" not in policy:
        name = ENVIRONMENT["checkpoint_interval"]
        text = environ.get(name) or None
    if text is not None:
        try:
            data["checkpoint"] = {**policy, "interval": parse_interval(text)}
        except Refused as error:
            raise BadArgument(f"{name}: {error.message}", error.fix) from error


def _fleet(name: Any) -> Fleet:
    try:
        return get_fleet(str(name))
    except Refused as error:
        raise BadArgument(error.message, error.fix) from error


def _image(image: Any, cwd: Path, local: bool) -> Any:
    """A relative directory made absolute, as a shell user expects on this machine."""
    if not isinstance(image, str) or not local or image == "host" or "://" in image or not image:
        return image
    if image.startswith("oci:"):
        folder = image.removeprefix("oci:")
        return f"oci:{cwd / folder}" if folder and not folder.startswith("/") else image
    return str(cwd / image) if image.startswith(("./", "../")) or image in (".", "..") else image


def _volumes(data: dict[str, Any], given: SpecOptions, cwd: Path) -> None:
    """--volume adds to the spec file's; one with the same target replaces it."""
    if not given.volumes:
        return
    added = []
    for text in given.volumes:
        if text.startswith(("./", "../")):
            source, separator, rest = text.partition(":")
            text = os.path.normpath(cwd / source) + separator + rest
        added.append(Volume.parse(text).model_dump())
    _add(data, "volumes", added, "target")


def _add(data: dict[str, Any], name: str, added: list[dict[str, Any]], by: str) -> None:
    """Add to what the file has under ``name``; what is the same ``by`` that is replaced."""
    kept = data.get(name) or []
    if added and isinstance(kept, list):
        new = {each[by] for each in added}
        data[name] = [*(x for x in kept if not (isinstance(x, dict) and x.get(by) in new)), *added]


def _environment(
    base: Any, words: tuple[str, ...], environ: Mapping[str, str], whole_host: bool, source: str | None
) -> dict[str, str]:
    """What the worker's environment adds to PATH, HOME and LANG, which the runtime always sets. Nothing leaks in."""
    if not isinstance(base, dict):
        raise BadSpec(f"{source}: env is not a mapping of names to values", "write it as env: {NAME: value}")
    empty = [str(name) for name, value in base.items() if value is None]
    if empty:
        raise BadSpec(
            f"{source}: env.{empty[0]} has no value", f"write {empty[0]}: '' or give --env {empty[0]}"
        )
    found = dict(base)
    for word in words:
        name, equals, value = word.partition("=")
        if not name:
            raise BadArgument(f"--env {word!r} has no name", "write it as --env NAME or --env NAME=VALUE")
        if not equals:
            if name not in environ:
                raise BadArgument(
                    f"--env {name}: {name} is not set here", f"write --env {name}=VALUE, or export it"
                )
            value = environ[name]
        found[name] = value
    if whole_host and environ.get("PATH"):
        found.setdefault("PATH", environ["PATH"])  # the same `python` as in the caller's shell
    return found


def _paths_exist(spec: WorkerSpec) -> None:
    if spec.image.startswith("oci:"):
        place = spec.image.removeprefix("oci:")
        if not any((Path(folder) / "index.json").is_file() for folder in (place, place.rpartition(":")[0])):
            raise BadArgument(
                f"image {spec.image}: there is no OCI layout in {place}", "check the path: it has index.json"
            )
    elif spec.image != "host" and not Path(spec.image).is_dir():
        raise BadArgument(
            f"image {spec.image}: there is no such directory", "give the root directory of a file system"
        )
    for given in spec.inputs:
        source = Path(unquote(given.url.removeprefix("file://")))
        if given.url.startswith("file://") and not (
            source.is_dir() if given.url.endswith("/") else source.is_file()
        ):
            what = (
                "folder" if given.url.endswith("/") else "file (a folder is written with a slash at its end)"
            )
            raise BadArgument(f"input {given.url}: there is no such {what}", "check the path")
    for volume in spec.volumes:
        if not Path(volume.source).exists():
            raise BadArgument(
                f"volume {volume.source}:{volume.target}: {volume.source} does not exist", "create it first"
            )
