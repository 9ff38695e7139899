"""Fixtures of the fault tests."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.faults.bed import Bed, environment


@pytest.fixture
def bed(request: pytest.FixtureRequest) -> Iterator[Bed]:
    """A truth worker's surroundings, not begun yet."""
    with tempfile.TemporaryDirectory(prefix="sw-", dir="/var/tmp") as name, environment(Path(name)):
        made = Bed(Path(name), seed=sum(request.node.name.encode()))
        try:
            yield made
        finally:
            made.close()
