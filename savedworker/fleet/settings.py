"""How fleets are configured: one file that names them, and variables that go before it.

    fleets:
      spot:
        kind: ec2
        subnets: [subnet-1, subnet-2]
        …

A field of a fleet is taken from the environment (``SAVEDWORKER_FLEET_<NAME>_<FIELD>``), else from the file, else it has its default. What
a worker's spec says (memory, processors, placement) goes before all of these. Credentials are in neither: boto3 finds them.
"""

from __future__ import annotations

import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypeVar

import yaml
from pydantic import BaseModel, ConfigDict, ValidationError

from savedworker.model.errors import Refused

FILE = "SAVEDWORKER_FLEETS"
"""Environment variable with the path of the fleet file."""
PREFIX = "SAVEDWORKER_FLEET_"
DEFAULT_FILE = Path("/etc/savedworker/fleets.yaml")
CONFIGURED = ("ec2", "aws-batch")
"""Kinds that take a name and their settings from here."""
MAX_BYTES = 1 << 20

_NAME = re.compile(r"[a-z0-9]([a-z0-9-]{0,61}[a-z0-9])?")
_SECRET_NAME = re.compile(r"(?i)(secret_?(access_?)?key|access_?key(_?id)?|session_?token|password)$")
_SECRET_VALUE = re.compile(r"\b(AKIA|ASIA)[A-Z0-9]{12,}\b")


class _TextLoader(yaml.SafeLoader):
    """YAML in which every plain scalar but null is text: a digest of digits, or a tag ``007``, stays what was written."""


_TextLoader.yaml_implicit_resolvers = {
    first: [pair for pair in pairs if pair[0] in ("tag:yaml.org,2002:null", "tag:yaml.org,2002:merge")]
    for first, pairs in yaml.SafeLoader.yaml_implicit_resolvers.items()
}

Settings = TypeVar("Settings", bound=BaseModel)


class FleetSettings(BaseModel):
    """What the settings of every kind of fleet share."""

    model_config = ConfigDict(frozen=True, extra="forbid", str_strip_whitespace=True)


def kinds() -> dict[str, str]:
    """The kind of every fleet that is configured, by its name. Raises Refused for a file that cannot be used."""
    found = {name: fields["kind"] for name, fields in _read().items()}
    for kind in CONFIGURED:
        if any(variable.startswith(_prefix(kind)) for variable in os.environ):
            found.setdefault(kind, kind)  # by variables alone
    return found


def load(name: str, model: type[Settings], environ: Mapping[str, str] | None = None) -> Settings:
    """The settings of fleet ``name``. Raises Refused: what is wrong, where, and the fix."""
    environ = os.environ if environ is None else environ
    data = {field: value for field, value in _read(environ).get(name, {}).items() if field != "kind"}
    prefix = _prefix(name)
    for field in model.model_fields:
        text = environ.get(prefix + field.upper())
        if text:
            data[field] = _from_variable(prefix + field.upper(), text)
    refuse_credentials(data, f"fleet {name}")
    try:
        return model.model_validate(data)
    except ValidationError as error:
        problem = error.errors(include_url=False)[0]
        where = ".".join(str(part) for part in problem["loc"])
        text = problem["msg"].removeprefix("Value error, ")
        if problem["type"] == "missing":
            text = "this is missing"
        elif problem["type"] == "extra_forbidden":
            text = "there is no such setting"
        raise Refused(
            f"fleet {name}: {where}: {text}" if where else f"fleet {name}: {text}",
            f"correct it in {_place(environ)}, or set {prefix}{str(problem['loc'][0]).upper() if problem['loc'] else 'FIELD'}; "
            "docs/aws.md lists the settings",
        ) from error


def _prefix(name: str) -> str:
    """Of the variables of fleet ``name``."""
    return PREFIX + re.sub(r"[^A-Z0-9]", "_", name.upper()) + "_"


def refuse_credentials(data: Any, where: str) -> None:
    """Raise Refused if ``data`` holds anything that looks like a credential."""
    if isinstance(data, Mapping):
        for name, value in data.items():
            if _SECRET_NAME.search(str(name)) or str(name) == "SAVEDWORKER_KEY":
                raise _no_credentials(f"{where}.{name}")
            refuse_credentials(value, f"{where}.{name}")
    elif isinstance(data, list | tuple):
        for value in data:
            refuse_credentials(value, where)
    elif isinstance(data, str) and _SECRET_VALUE.search(data):
        raise _no_credentials(where)


def _no_credentials(where: str) -> Refused:
    return Refused(
        f"{where} is a credential, and none belongs into the settings of a fleet",
        "remove it and use roles: instance_profile, job_role, and boto3's own chain where the controller runs",
    )


def _place(environ: Mapping[str, str]) -> str:
    return environ.get(FILE) or str(_default_file(environ))


def _default_file(environ: Mapping[str, str]) -> Path:
    own = environ.get("XDG_CONFIG_HOME", "")
    home = Path(own) if Path(own).is_absolute() else Path(environ.get("HOME") or "/nonexistent") / ".config"
    file = home / "savedworker/fleets.yaml"
    return file if file.is_file() else DEFAULT_FILE


def _read(environ: Mapping[str, str] | None = None) -> dict[str, dict[str, Any]]:
    """The fleets in the file, by name; empty where there is no file and none is asked for."""
    environ = os.environ if environ is None else environ
    named = environ.get(FILE)
    file = Path(named) if named else _default_file(environ)
    if not named and not file.is_file():
        return {}
    try:
        with file.open("rb") as opened:
            raw = opened.read(MAX_BYTES + 1)
    except OSError as error:
        raise Refused(f"the fleet file {file} cannot be read: {error.strerror}", f"correct {FILE}") from error
    if len(raw) > MAX_BYTES:
        raise Refused(f"the fleet file {file} is longer than {MAX_BYTES} bytes", f"correct {FILE}")
    try:
        document = yaml.load(raw.decode(), _TextLoader)  # a SafeLoader: it makes plain data only
    except (yaml.YAMLError, UnicodeDecodeError, RecursionError) as error:
        text = " ".join(str(error).split())[:200]
        raise Refused(f"the fleet file {file} is not YAML: {text}", "correct it") from error
    fleets = document.get("fleets") if isinstance(document, dict) else None
    if not isinstance(fleets, dict) or set(document) != {"fleets"}:
        raise Refused(
            f"the fleet file {file} is no mapping with the one member 'fleets'",
            "write it as fleets: {NAME: {kind: ec2, …}}",
        )
    for name, fields in fleets.items():
        if not isinstance(name, str) or not _NAME.fullmatch(name) or name == "local":
            raise Refused(
                f"{file}: {name!r} cannot name a fleet",
                "use lower-case letters, digits and '-'; 'local' is this machine",
            )
        if not isinstance(fields, dict) or not isinstance(fields.get("kind"), str):
            raise Refused(f"{file}: fleet {name} has no kind", f"add kind: one of {', '.join(CONFIGURED)}")
        if name in CONFIGURED and fields["kind"] != name:
            raise Refused(f"{file}: fleet {name} is of kind {fields['kind']}", "choose another name for it")
    return fleets


def _from_variable(name: str, text: str) -> Any:
    """A variable is text, a list with commas, or YAML in brackets."""
    if text.lstrip().startswith(("[", "{")):
        try:
            return yaml.load(text, _TextLoader)
        except yaml.YAMLError as error:
            raise Refused(
                f"{name} is not YAML: {' '.join(str(error).split())[:200]}", "correct it"
            ) from error
    return [part.strip() for part in text.split(",")] if "," in text else text
