"""Fields of a specification as people write them, in a spec file or an engine: ``{"interval": "5m", "bandwidth": "4MiB"}``."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, TypeVar

from savedworker.model.errors import BadSpec, Refused
from savedworker.model.spec import POLICIES
from savedworker.model.units import parse_duration, parse_interval, parse_size

T = TypeVar("T")

_PARSERS: dict[str, dict[str, Callable[[Any], Any]]] = {
    "checkpoint": {
        "interval": parse_interval,
        "wait_for_match": parse_duration,
        "bandwidth": parse_size,
        "memory_budget": parse_size,
    },
    "placement": {
        "wait_for_capacity": parse_duration,
        "avoid_reclaimed": parse_duration,
        "wait_per_choice": parse_duration,
        "on_demand_after_wait": parse_duration,
        "spare_for": parse_duration,
    },
}
"""Fields of policies that have a written form; the others are the same everywhere."""


def read(parse: Callable[[Any], T], value: Any, where: str) -> T:
    """``value`` as ``parse`` reads it. Raises BadSpec that says ``where`` it stands, and what is wrong with it."""
    try:
        return parse(value)
    except Refused as error:
        raise BadSpec(f"{where}: {error.message}", error.fix) from error


def read_policy(name: str, given: Any, source: str) -> dict[str, Any]:
    """The policy ``name`` (``checkpoint``, ``placement``) with its durations and sizes in the forms of WorkerSpec.

    What is not given stays away, so that policies can be laid over one another; None is a value. Fields that are unknown or out
    of range are left to ``parse_spec``. Raises BadSpec that begins with ``source``.
    """
    if not isinstance(given, Mapping):
        known = ", ".join(POLICIES[name].model_fields)
        raise BadSpec(f"{source}: {name}: this must be a mapping of fields", f"its fields are: {known}")
    found = dict(given)
    for field, parse in _PARSERS[name].items():
        if found.get(field) is not None:
            found[field] = read(parse, found[field], f"{source}: {name}.{field}")
    return found


def read_checkpoint(given: Any, interval: Any, source: str) -> dict[str, Any]:
    """As ``read_policy("checkpoint", …)``, where ``checkpoint_interval`` is the short form of one field. None means not given."""
    found = {} if given is None else read_policy("checkpoint", given, source)
    if interval is None:
        return found
    if "interval" in found:
        raise BadSpec(
            f"{source}: checkpoint_interval and checkpoint.interval are one field", "give one of them"
        )
    return {**found, "interval": read(parse_interval, interval, f"{source}: checkpoint_interval")}


def read_placement(given: Any, source: str) -> dict[str, Any]:
    """As ``read_policy("placement", …)``. None means not given."""
    return {} if given is None else read_policy("placement", given, source)
