"""What all tests share."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest

_LEADS = ("AWS_", "SAVEDWORKER_")
"""Variables by which a test can lead another one, and its workers, somewhere else."""


@pytest.hookimpl(tryfirst=True)  # before xdist looks at the groups
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """All engine tests run in one process, one after the other: they share one Airflow. So do those of the bed: one bundle."""
    for item in items:
        if item.get_closest_marker("engine"):
            item.add_marker(pytest.mark.xdist_group("engine"))
        elif "tests/bed" in str(item.fspath):
            item.add_marker(pytest.mark.xdist_group("bed"))


def _variables() -> dict[str, str]:
    return {name: value for name, value in os.environ.items() if name.startswith(_LEADS)}


@pytest.fixture(scope="session")
def first_variables() -> dict[str, str]:
    return _variables()


@pytest.fixture(scope="module", autouse=True)
def no_variables_of_others(first_variables: dict[str, str]) -> Iterator[None]:
    """What a file of tests sets in the environment is gone with it, whatever its fixtures' scope."""
    yield
    assert _variables() == first_variables, "fixtures of this file left variables in the environment"
