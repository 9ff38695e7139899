"""What a worker uses that the machine does not give to everybody: named up front, or brought back (kind RESOURCE)."""

from __future__ import annotations

import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from savedworker.model.record import Reason, State
from savedworker.model.spec import Volume
from tests.runtime.squashed import USER, Share
from tests.runtime.world import World


@pytest.fixture
def share() -> Iterator[Share]:
    folder = Path(tempfile.mkdtemp(prefix="sw-share-", dir="/var/tmp"))  # pytest's own is for root alone
    folder.chmod(0o755)
    target = folder / "share"
    target.mkdir()
    made = Share(target)
    try:
        yield made
    finally:
        made.close()
        target.rmdir()
        folder.rmdir()


def test_a_share_that_refuses_root_is_told_at_once(world: World, share: Share) -> None:
    """C40. Its user may use it, but root can neither mount it into a container nor open its files for a restore."""
    assert (
        b"first"
        in subprocess.run(
            ["cat", f"{share.target}/data"],
            user=USER,
            group=USER,
            extra_groups=[],
            capture_output=True,
            check=True,
        ).stdout
    )
    volume = Volume(source=str(share.target), target="/data")
    worker = world.submit("cat", "/data/data", user="1000:1000", volumes=(volume,))
    record = world.until_settled(worker)
    assert (record.state, record.reason) == (State.FAILED, Reason.SPEC_ERROR)
    assert f"volume source {share.target} refuses root (Permission denied)" in record.detail
    assert "no_root_squash" in record.detail
    assert len(record.launches) == 1


def test_what_cannot_be_started_says_why_and_is_tried_elsewhere_a_few_times(
    world: World, tmp_path: Path
) -> None:
    source = tmp_path / "there"
    source.mkdir()
    worker = world.submit("true", volumes=(Volume(source=str(source), target="/data"),))
    source.rmdir()
    record = world.until_settled(worker, 240)
    assert (record.state, record.reason) == (State.FAILED, Reason.INTERNAL)
    assert (
        f"volume source {source} cannot be used on this instance: No such file or directory" in record.detail
    )
    assert record.detail.startswith("5 instances in a row ended before the worker could start")
