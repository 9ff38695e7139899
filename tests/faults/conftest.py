"""Fixtures of the fault tests."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from savedworker.store.backend import Store, open_store
from tests.faults.bed import Bed, environment
from tests.faults.proxy import Proxy
from tests.faults.s3 import BUCKET, SETTINGS, moto

TIMEOUT = 4.0
"""Seconds after which a store that is in trouble counts as away. A quarter of it has to do for one answer, also on a busy machine."""


@pytest.fixture
def bed(request: pytest.FixtureRequest) -> Iterator[Bed]:
    """A truth worker's surroundings, not begun yet."""
    with tempfile.TemporaryDirectory(prefix="sw-", dir="/var/tmp") as name, environment(Path(name)):
        made = Bed(Path(name), seed=sum(request.node.name.encode()))
        try:
            yield made
        finally:
            made.close()


@pytest.fixture(scope="module")
def proxy() -> Iterator[Proxy]:
    """Does to an S3 behind it what a test asks for."""
    with moto() as behind:
        made = Proxy("127.0.0.1", behind)
        yield made
        made.close()


@pytest.fixture(scope="module")
def store(proxy: Proxy) -> Iterator[Store]:
    """A place in that S3, as the proxy shows it."""
    with pytest.MonkeyPatch.context() as patch:
        for name, value in SETTINGS.items():
            patch.setenv(name, value)
        patch.setenv("AWS_ENDPOINT_URL", proxy.url)
        yield open_store(f"s3://{BUCKET}/{os.urandom(4).hex()}", timeout=TIMEOUT)
