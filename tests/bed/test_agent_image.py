"""The agent's image and bundle, made by executing docker/agent.Dockerfile itself: on a Debian from debootstrap, without Docker.

Long, because it fetches a Debian and packages; the same agent in a container is in CI with a bundle made on this machine.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import subprocess
import sys
import tarfile
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.bed import dockerfile
from tests.bed.bundle import ROOT
from tests.bed.dockerfile import Stage
from tests.bed.outer import Job
from tests.bed.stories import Story, add_boto, keys
from tests.bed.test_container import COUNTER, InContainers, is_the_same
from tests.runtime.conftest import gone
from tests.runtime.world import World

pytestmark = [pytest.mark.sweep, pytest.mark.timeout(1800)]


PLAIN = """
FROM debian:trixie-slim
RUN apt-get update -qq && DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends ca-certificates curl python3
"""


@pytest.fixture(scope="module")
def built() -> Iterator[dict[str, Stage]]:
    """All stages of the Dockerfile."""
    folder = Path(tempfile.mkdtemp(prefix="sw-image-", dir="/var/tmp"))
    try:
        debian = folder / "debian"
        mirror = dockerfile.machine_mirror()
        subprocess.run(
            ["debootstrap", "--variant=minbase", "trixie", debian, mirror], check=True, capture_output=True
        )
        # A mirror that is frozen, so that builds can be repeated, has release files that ran out.
        (debian / "etc/apt/apt.conf.d/90test").write_text('Acquire::Check-Valid-Until "false";\n')
        images = {"debian:trixie-slim": debian}
        index = dockerfile.machine_index()
        stages = dockerfile.build(ROOT / "docker/agent.Dockerfile", ROOT, folder / "stages", images, index)
        (folder / "plain.Dockerfile").write_text(PLAIN)
        plain = dockerfile.build(folder / "plain.Dockerfile", ROOT, folder / "plain", images, index)[""]
        add_boto(plain.root)
        yield {**stages, "plain": plain}
    finally:
        shutil.rmtree(folder)


def test_its_command_is_the_doctor_and_the_doctor_is_content(built: dict[str, Stage], tmp_path: Path) -> None:
    image = built[""]
    assert image.command == ("/opt/savedworker/bin/savedworker", "doctor")
    job = Job(str(image.root), (*image.command, "--store", "/tmp/store", "--json"), {"PATH": "/usr/bin:/bin"})
    done = subprocess.run(
        [sys.executable, "-m", "tests.bed.outer", job.write(tmp_path / "job")],
        cwd=tmp_path,
        capture_output=True,
        text=True,
    )
    found = json.loads(done.stdout)
    assert [x for x in found if not x["ok"]] == []
    versions = {x["check"]: x["detail"].split(",")[0] for x in found}
    assert versions["criu"] >= "4.1"
    assert versions["runc"] >= "1.2"


def test_a_worker_moves_between_containers_of_this_image(
    built: dict[str, Stage], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with tempfile.TemporaryDirectory(prefix="sw-", dir="/var/tmp") as local:
        monkeypatch.setenv("SAVEDWORKER_LOCAL_DIR", local)
        (tmp_path / "store").mkdir()
        world = World(tmp_path)
        world.fleet = InContainers(tmp_path, built[""].root, tmp_path / "store")
        try:
            worker = world.submit("/usr/bin/python3", "-u", "-c", COUNTER, "400")
            world.until_output(worker, " 5\n")
            world.preempt(worker, notice=25)
            is_the_same(world, worker)
        finally:
            world.close()
        assert gone(local) == []


def test_the_archive_is_the_bundle(built: dict[str, Stage], tmp_path: Path) -> None:
    """What an instance's user data unpacks to /opt/savedworker."""
    with tarfile.open(built["archive"].root / "savedworker-bundle.tar.gz") as archive:
        archive.extractall(tmp_path, filter="fully_trusted")
    for name in ("bin/savedworker", "bin/criu", "bin/runc", "libexec/python3"):
        there = built[""].root / "opt/savedworker" / name
        assert (
            hashlib.sha256((tmp_path / name).read_bytes()).digest()
            == hashlib.sha256(there.read_bytes()).digest()
        )
        assert (tmp_path / name).stat().st_mode & 0o111


def test_user_data_installs_the_bundle_where_an_image_has_none(
    built: dict[str, Stage], story_on: Callable[[Path], Story]
) -> None:
    """A plain Debian with curl: the fleet's user data fetches the archive from the bucket with the instance's role, checks and unpacks it."""
    plain = built["plain"].root
    archive = built["archive"].root / "savedworker-bundle.tar.gz"
    story = story_on(plain)
    story.cloud.s3.upload_file(str(archive), "workers", "bundle.tar.gz")
    fleet = story.cloud.ec2_fleet(
        environment={"AWS_ENDPOINT_URL": os.environ["AWS_ENDPOINT_URL"]},
        bundle="s3://workers/bundle.tar.gz",
        bundle_sha256=hashlib.sha256(archive.read_bytes()).hexdigest(),
    )
    story.on(fleet)
    worker = story.begin(python="/usr/bin/python3")
    story.bed.interrupt(story.machine(worker), notice=60)
    story.moved(worker, 2)
    assert len(keys(story.finish(worker, 1))) == 2
