"""Fixtures of the checkpoint tests that run a real worker."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.checkpoint.bench import Bench


@pytest.fixture
def bench() -> Iterator[Bench]:
    """A worker's bench, taken away afterwards."""
    folder = Path(tempfile.mkdtemp(prefix="sw-bench-", dir="/var/tmp"))
    made = Bench(folder)
    try:
        yield made
    finally:
        made.close()  # raises while anything is mounted below
        shutil.rmtree(folder)
