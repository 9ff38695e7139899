"""What all tests share."""

from __future__ import annotations

import pytest


@pytest.hookimpl(tryfirst=True)  # before xdist looks at the groups
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """All engine tests run in one process, one after the other: they share one Airflow. So do those of the bed: one bundle."""
    for item in items:
        if item.get_closest_marker("engine"):
            item.add_marker(pytest.mark.xdist_group("engine"))
        elif "tests/bed" in str(item.fspath):
            item.add_marker(pytest.mark.xdist_group("bed"))
