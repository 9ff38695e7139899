"""Workers on EC2 and AWS Batch, from the submission to the end: real boto3, real agents in their bundle, real CRIU; AWS itself a stand-in.

Instances execute the user data, jobs the command, that were submitted (see ``cloud``).
"""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from savedworker.model.record import State
from savedworker.model.spec import PlacementPolicy
from tests.bed.bundle import bare_root
from tests.bed.stories import Story, add_boto, keys


@pytest.fixture(scope="module")
def image(bundle: Path) -> Iterator[Path]:
    """A root with the bundle, a shell and boto3: the AMI, and the jobs' image."""
    folder = Path(tempfile.mkdtemp(prefix="sw-ami-", dir="/var/tmp"))
    try:
        bare_root(folder, bundle)
        (folder / "bin").mkdir()
        (folder / "bin/sh").symlink_to("/opt/savedworker/libexec/sh")
        add_boto(folder)
        yield folder
    finally:
        shutil.rmtree(folder)


@pytest.fixture
def story(story_on: Callable[[Path], Story], image: Path) -> Story:
    return story_on(image)


def test_from_one_zone_of_ec2_to_another(story: Story) -> None:
    story.on(story.cloud.ec2_fleet(environment={"AWS_ENDPOINT_URL": os.environ["AWS_ENDPOINT_URL"]}))
    worker = story.begin()
    first = story.machine(worker)
    zone = story.cloud.instance(first)["Placement"]["AvailabilityZone"]
    story.bed.interrupt(first, notice=60)
    story.moved(worker, 2)
    second = story.machine(worker)
    assert story.cloud.instance(second)["Placement"]["AvailabilityZone"] != zone
    used = keys(story.finish(worker, 1))
    assert len(used) == 2, "the credentials of both instances were used, one after the other"
    # Each by itself, or by a controller that was quicker; none was there to be reclaimed any more.
    ended = {x["StateReason"]["Code"] for x in story.cloud.instances()}
    assert ended <= {"Client.InstanceInitiatedShutdown", "Client.UserInitiatedShutdown"}


@pytest.mark.sweep
def test_an_instance_that_is_recommended_to_be_left_has_a_spare_in_another_zone_that_takes_over(
    story: Story,
) -> None:
    story.on(story.cloud.ec2_fleet(environment={"AWS_ENDPOINT_URL": os.environ["AWS_ENDPOINT_URL"]}))
    worker = story.begin()
    first = story.machine(worker)
    story.bed.recommend(first)
    record = story.until(worker, lambda r: len(r.launches) == 2 and r.launches[1].instance, "have a spare")
    spare = str(record.launches[1].instance)
    zones = {x["InstanceId"]: x["Placement"]["AvailabilityZone"] for x in story.cloud.instances()}
    assert zones[spare] != zones[first]
    story.bed.until(lambda: spare in story.bed.living(), "the spare's boot")
    record = story.record(worker)
    assert [x.instance for x in record.incarnations] == [first]
    story.bed.interrupt(first, notice=60)
    story.moved(worker, 2)
    assert story.machine(worker) == spare
    assert len(keys(story.finish(worker, 1))) == 2
    assert len(story.cloud.instances()) == 2


@pytest.mark.sweep
def test_an_instance_of_ec2_that_is_lost_without_notice(story: Story) -> None:
    story.on(story.cloud.ec2_fleet(environment={"AWS_ENDPOINT_URL": os.environ["AWS_ENDPOINT_URL"]}))
    worker = story.begin()
    story.checkpoint(worker)
    first = story.machine(worker)
    story.bed.interrupt(first, notice=None)
    story.moved(worker, 2)
    record = story.finish_again(worker)
    assert record.incarnations[0].end_reason == "no_notice"
    assert story.cloud.instance(first)["StateReason"]["Code"] == "Server.SpotInstanceTermination"


@pytest.mark.parametrize("draining", [False, pytest.param(True, marks=pytest.mark.sweep)])
def test_from_the_spot_queue_of_batch_to_the_on_demand_queue(story: Story, draining: bool) -> None:
    """``draining``: ECS itself stops the container, and nothing in the metadata says why."""
    story.cloud.queues("spot", "on-demand")
    environment = {"AWS_ENDPOINT_URL": os.environ["AWS_ENDPOINT_URL"]}
    story.on(story.cloud.batch_fleet(environment=environment))
    worker = story.begin(placement=PlacementPolicy(on_demand_after_losses=1))
    first = story.machine(worker)
    if draining:
        story.bed.drain(first)
    else:
        story.bed.interrupt(first, notice=60)
    story.moved(worker, 2)
    second = story.machine(worker)
    queues = {x.job_id: x.job_queue.name for x in story.cloud.jobs()}
    assert (queues[first], queues[second]) == ("spot", "on-demand")
    used = keys(story.finish(worker, 1))
    assert len(used) == 2, "the credentials of both tasks were used, one after the other"
    assert len(story.cloud.jobs()) == 2


@pytest.mark.sweep
def test_a_host_of_batch_that_is_lost_without_notice_and_a_queue_that_never_starts_a_job(
    story: Story,
) -> None:
    """C58: the spot queue has nothing any more; the launch moves on to on-demand."""
    story.cloud.queues("spot", "on-demand")
    environment = {"AWS_ENDPOINT_URL": os.environ["AWS_ENDPOINT_URL"]}
    story.on(story.cloud.batch_fleet(environment=environment))
    worker = story.begin(placement=PlacementPolicy(wait_per_choice=3.0, on_demand_after_wait=1.0))
    story.checkpoint(worker)
    first = story.machine(worker)
    story.bed.blocked.add("spot")
    story.bed.interrupt(first, notice=None)
    story.moved(worker, 2)
    story.finish_again(worker)
    reasons = {x.job_id: x.job_stopped_reason for x in story.cloud.jobs()}
    assert reasons[first].startswith("Host EC2 (instance i-")


@pytest.mark.sweep
def test_a_cancelled_worker_leaves_nothing_on_either(story: Story) -> None:
    story.cloud.queues("spot", "on-demand")
    environment = {"AWS_ENDPOINT_URL": os.environ["AWS_ENDPOINT_URL"]}
    for fleet in (
        story.cloud.ec2_fleet(environment=environment),
        story.cloud.batch_fleet(environment=environment),
    ):
        story.on(fleet)
        worker = story.begin()
        story.client.cancel(worker, "enough")
        assert story.until_settled(worker).state is State.CANCELLED
        story.bed.until(lambda: not story.bed.living(), "the end of all machines")
