"""Every field of the policies as people write it, beside the value that it stands for. No value is a default."""

from __future__ import annotations

from typing import Any

from savedworker.model.spec import POLICIES, WorkerSpec

WRITTEN: dict[str, dict[str, tuple[Any, Any]]] = {
    "checkpoint": {
        "interval": ("90s", 90.0),
        "bandwidth": ("4MiB", 4 << 20),
        "memory_budget": ("512MiB", 512 << 20),
        "keep": (3, 3),
        "restores_without_progress": (5, 5),
        "when_unrestorable": ("fail", "fail"),
        "max_cold_starts": (7, 7),
        "wait_for_match": ("1h30m", 5400.0),
    },
    "placement": {
        "wait_for_capacity": ("2h", 7200.0),
        "avoid_reclaimed": ("10m", 600.0),
        "wait_per_choice": (45, 45.0),
        "on_demand_after_losses": (0, 0),
        "on_demand_after_wait": ("5m", 300.0),
        "spare_for": (None, None),
    },
}
assert {x: set(WRITTEN[x]) for x in WRITTEN} == {x: set(POLICIES[x].model_fields) for x in POLICIES}

FIELDS = [(group, field) for group, fields in WRITTEN.items() for field in fields]

NULLS = [
    (group, field)
    for group, model in POLICIES.items()
    for field, info in model.model_fields.items()
    if "None" in str(info.annotation)
]
"""Fields for which null is a value."""

WRONG: list[tuple[dict[str, Any], str, str]] = [
    (
        {"checkpoint": {"intervall": "5m"}},
        "checkpoint.intervall: there is no such field",
        "use one of: interval, ",
    ),
    ({"placement": {"keep": 3}}, "placement.keep: there is no such field", "use one of: wait_for_capacity, "),
    ({"placement": {"co\nlour": 1}}, "placement.'co\\nlour': there is no such field", "use one of: "),
    ({"checkpoint": {"interval": "often"}}, "checkpoint.interval: 'often' is not a duration", "write it as"),
    (
        {"checkpoint": {"interval": "0.5"}},
        "checkpoint.interval: a checkpoint interval of '0.5' is too",
        "give",
    ),
    ({"checkpoint": {"bandwidth": "fast"}}, "checkpoint.bandwidth: 'fast' is not a size", "write it as"),
    ({"checkpoint": {"bandwidth": "5"}}, "checkpoint.bandwidth: Input should be greater", "correct"),
    ({"checkpoint": {"keep": "few"}}, "checkpoint.keep: Input should be a valid integer", "correct"),
    ({"checkpoint": {"keep": None}}, "checkpoint.keep: Input should be a valid integer", "correct"),
    (
        {"checkpoint": {"when_unrestorable": "cry"}},
        "checkpoint.when_unrestorable: Input should be",
        "correct",
    ),
    ({"checkpoint": "5m"}, "checkpoint: this must be a mapping of fields", "its fields are: interval, "),
    ({"placement": ["spare_for"]}, "placement: this must be a mapping of fields", "its fields are: "),
    ({"placement": {"spare_for": "5 min"}}, "placement.spare_for: '5 min' is not a duration", "write it as"),
    ({"placement": {"spare_for": [5]}}, "placement.spare_for: '[", "write it as"),
    ({"placement": {"wait_for_capacity": None}}, "placement.wait_for_capacity: Input should be", "correct"),
    (
        {"placement": {"on_demand_after_losses": -1}},
        "placement.on_demand_after_losses: Input should",
        "correct",
    ),
]
"""Policies that are refused, with the message that follows the name of the file or task, and the beginning of the fix."""


def as_written(group: str) -> dict[str, Any]:
    """All fields of a policy, as people write them."""
    return {field: given for field, (given, _) in WRITTEN[group].items()}


def as_read(group: str) -> dict[str, Any]:
    """The same as WorkerSpec has them."""
    return {field: value for field, (_, value) in WRITTEN[group].items()}


def of(spec: WorkerSpec, group: str) -> dict[str, Any]:
    """A policy of ``spec``, all of its fields."""
    return dict(getattr(spec, group).model_dump())


def refusal(error: BaseException | str, source: str, message: str, fix: str) -> bool:
    """Whether ``error`` is one line that begins with ``source`` and ``message``, and has that fix."""
    text = str(error)
    return text.startswith(f"{source}: {message}") and f". Fix: {fix}" in text and "\n" not in text
