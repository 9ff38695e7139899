"""Fixtures of the test bed."""

from __future__ import annotations

import logging
import shutil
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import moto.batch.models
import pytest
from moto.moto_api import state_manager
from moto.server import ThreadedMotoServer

from savedworker.fleet.aws.session import Aws
from savedworker.fleet.local import network
from tests.bed import bundle as bundles
from tests.bed.cloud import Bed
from tests.bed.stories import Story
from tests.fleet.aws.conftest import REGION, Cloud, _described, _environment, _forget
from tests.runtime.conftest import gone
from tests.runtime.world import BRIDGE


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if "tests/bed" in str(item.fspath):
            item.add_marker(pytest.mark.criu)


@pytest.fixture(scope="session")
def bundle() -> Iterator[Path]:
    """The agent's bundle, as scripts/make-bundle makes it."""
    folder = Path(tempfile.mkdtemp(prefix="sw-bundle-", dir="/var/tmp"))
    try:
        yield bundles.make(folder)
    finally:
        shutil.rmtree(folder)


@pytest.fixture(scope="session")
def bare_root(bundle: Path) -> Iterator[Path]:
    """A root with the bundle and nothing else, for containers' images."""
    folder = Path(tempfile.mkdtemp(prefix="sw-root-", dir="/var/tmp"))
    try:
        yield bundles.bare_root(folder, bundle)
    finally:
        shutil.rmtree(folder)


@pytest.fixture
def cloud(monkeypatch: pytest.MonkeyPatch) -> Iterator[Cloud]:
    """moto where hosts reach it. Jobs stay as they are until the bed moves them."""
    network.ensure_bridge()
    logging.getLogger("werkzeug").setLevel(logging.ERROR)
    server = ThreadedMotoServer(ip_address=BRIDGE, port=0, verbose=False)
    server.start()
    endpoint = "http://{}:{}".format(*server.get_host_and_port())
    _environment(monkeypatch, endpoint)
    monkeypatch.setattr(moto.batch.models.Job, "run", lambda self: None)
    monkeypatch.setattr(moto.batch.models.Job, "describe", _described)
    state_manager.set_transition("batch::job", {"progression": "manual", "times": 1_000_000})
    try:
        made = Cloud(Aws(pause=0.05))
        for bucket in ("workers", "steps", "gate"):
            made.s3.create_bucket(Bucket=bucket, CreateBucketConfiguration={"LocationConstraint": REGION})
        yield made
    finally:
        state_manager.unset_transition("batch::job")
        _forget()
        server.stop()


@pytest.fixture
def story_on(
    cloud: Cloud, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[Callable[[Path], Story]]:
    """Makes a story whose machines and containers have the root that is given."""
    with tempfile.TemporaryDirectory(prefix="sw-", dir="/var/tmp") as local:
        monkeypatch.setenv("SAVEDWORKER_LOCAL_DIR", local)
        made = Story(tmp_path, "s3://workers/prefix")
        made.cloud = cloud
        beds: list[Bed] = []

        def on(image: Path) -> Story:
            made.bed = Bed(cloud, tmp_path, image)
            beds.append(made.bed)
            return made

        try:
            yield on
        finally:
            try:
                made.close()
            finally:
                for bed in beds:
                    bed.close()
        assert gone(local) == []
