"""Reading a spec file: YAML or JSON, with durations, sizes and volumes as people write them."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import yaml

from savedworker.cli.unbuilt import not_built
from savedworker.model.errors import BadSpec
from savedworker.model.spec import POLICIES, Input, Output, Volume
from savedworker.model.units import parse_duration, parse_size
from savedworker.model.written import read, read_policy

MAX_BYTES = 1 << 20
"""Longest spec file in bytes."""

_UNITS: dict[str, Callable[[Any], Any]] = {
    "lease_term": parse_duration,
    "orphan_after": parse_duration,
    "retention": parse_duration,
    "memory": parse_size,
}
_WRITTEN: dict[str, type[Volume | Input | Output]] = {"volumes": Volume, "inputs": Input, "outputs": Output}
_UNBUILT = ("gpus",)


class _TextLoader(yaml.SafeLoader):
    """YAML in which every plain scalar but null is text: an argument ``010`` or ``no`` stays what was written."""


_TextLoader.yaml_implicit_resolvers = {
    first: [pair for pair in pairs if pair[0] in ("tag:yaml.org,2002:null", "tag:yaml.org,2002:merge")]
    for first, pairs in yaml.SafeLoader.yaml_implicit_resolvers.items()
}


def _mapping(loader: _TextLoader, node: yaml.MappingNode) -> dict[Any, Any]:
    seen = set()
    for key, _ in node.value:
        if isinstance(key, yaml.ScalarNode) and key.tag != "tag:yaml.org,2002:merge":
            if key.value in seen:
                raise yaml.constructor.ConstructorError(
                    None, None, f"{key.value!r} is given twice", key.start_mark
                )
            seen.add(key.value)
    loader.flatten_mapping(node)
    return loader.construct_mapping(node, deep=True)


_TextLoader.add_constructor("tag:yaml.org,2002:map", _mapping)


def read_spec_file(path: str) -> dict[str, Any]:
    """The fields in the file ``path`` (``-``: stdin), in the forms of WorkerSpec. Raises BadSpec with place and fix."""
    name = "spec on stdin" if path == "-" else path
    try:
        raw = sys.stdin.buffer.read(MAX_BYTES + 1) if path == "-" else _read(Path(path))
        text = raw.decode()
    except OSError as error:
        raise BadSpec(f"the spec file {name} cannot be read: {error.strerror}", "check the path") from error
    except UnicodeDecodeError as error:
        raise BadSpec(f"{name}: byte {error.start} is not UTF-8", "save it as UTF-8") from error
    if len(raw) > MAX_BYTES:
        raise BadSpec(f"{name} is longer than {MAX_BYTES} bytes", "give the right file")
    data = _parse(text, name)
    if not isinstance(data, dict):
        found = "empty" if data is None else f"a {type(data).__name__}"
        raise BadSpec(f"{name}: a spec is a mapping of fields, and this is {found}", "see docs/spec.md")
    return _friendly(data, name)


def _read(path: Path) -> bytes:
    with path.open("rb") as file:
        return file.read(MAX_BYTES + 1)


def _parse(text: str, name: str) -> Any:
    if text.lstrip().startswith("{"):
        try:
            return json.loads(text, parse_int=str, parse_float=str, object_pairs_hook=_once)
        except json.JSONDecodeError as error:
            if name.endswith(".json"):
                where = f"{name}, line {error.lineno}, column {error.colno}"
                raise BadSpec(f"{where}: not JSON: {error.msg}", "correct that line") from error
        except RecursionError as error:
            raise BadSpec(f"{name}: not JSON: it is nested too deeply", "correct the file") from error
        except _Twice as error:
            raise BadSpec(f"{name}: {error.args[0]!r} is given twice", "keep one of them") from error
    try:
        return yaml.load(text, _TextLoader)  # a SafeLoader: it makes plain data only
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        where = f"{name}, line {mark.line + 1}, column {mark.column + 1}" if mark else name
        raise BadSpec(f"{where}: not YAML: {error.problem or error.context}", "correct that line") from error
    except (yaml.YAMLError, RecursionError) as error:
        raise BadSpec(f"{name}: not YAML: {' '.join(str(error).split())}", "correct the file") from error


class _Twice(Exception):
    """A key is given twice in one JSON object."""


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for key, value in pairs:
        if key in found:
            raise _Twice(key)
        found[key] = value
    return found


def _friendly(data: dict[Any, Any], name: str) -> dict[str, Any]:
    for field in _UNBUILT:
        if field in data:
            raise not_built(f"{name}: {field}", "leave it out")
    if "command" in data and not isinstance(data["command"], list):
        raise BadSpec(
            f"{name}: command is not a list of words", "write it as [python, train.py], there is no shell"
        )
    found = dict(data)
    for field, parse in _UNITS.items():
        if found.get(field) is not None:
            found[field] = read(parse, found[field], f"{name}: {field}")
    for group in POLICIES:
        if group in found:
            found[group] = read_policy(group, found[group], name)
    for field, kind in _WRITTEN.items():
        if isinstance(found.get(field), list):
            found[field] = [_written(x, kind, f"{name}: {field}") for x in found[field]]
    return found


def _written(entry: Any, kind: type[Volume | Input | Output], where: str) -> Any:
    """An entry that is written in one word, as its fields; any other as it is."""
    if not isinstance(entry, str):
        return entry
    return read(kind.parse, entry, where).model_dump()
