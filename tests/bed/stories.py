"""What is told on the test bed: a worker on a fleet of AWS, and what has to be true of it at the end."""

from __future__ import annotations

import os
import shutil
import sysconfig
from collections.abc import Callable
from pathlib import Path
from typing import Any

from savedworker.controller.client import Client
from savedworker.fleet.local import HostInfo
from savedworker.model.errors import Refused
from savedworker.model.record import State, WorkerRecord
from tests.bed.bundle import PYTHON
from tests.bed.cloud import Bed
from tests.fleet.aws.conftest import REGION, Cloud
from tests.runtime.world import World

BOTO = ("boto3", "botocore", "s3transfer", "jmespath", "dateutil", "urllib3", "six.py")
PROGRAM = """
import os, secrets, sys, time
import boto3
s3 = boto3.client("s3")  # one client, one session, for the whole life
keys = s3._request_signer._credentials
nonce = secrets.token_hex(8)
def opened(name):
    return s3.list_objects_v2(Bucket="gate", Prefix=name).get("KeyCount", 0) > 0
with open("/counted", "w") as file:
    number = 0
    while not opened("end"):
        s3.put_object(Bucket="steps", Key=f"{number:06}", Body=nonce.encode())
        print(nonce, number, keys.access_key, flush=True)
        print(number, file=file, flush=True)
        number += 1
        time.sleep(0.05)
print(nonce, "lines", len(open("/counted").readlines()), number)
"""


def add_boto(root: Path) -> None:
    """Put boto3 into a root file system, at /site."""
    (root / "site").mkdir()
    for name in BOTO:
        source = Path(sysconfig.get_path("purelib"), name)
        copy: Callable[..., Any] = shutil.copytree if source.is_dir() else shutil.copy
        copy(source, root / "site" / name)


class Story(World):
    """A world whose fleet is AWS's."""

    bed: Bed
    cloud: Cloud

    def host_of_launch(self, launch: str) -> HostInfo:
        raise Refused(f"launch {launch} is AWS's")

    def on(self, fleet: Any) -> None:
        self.client = Client("s3://workers/prefix", fleets=lambda _: fleet)
        self.fleet = fleet

    def begin(self, python: str = PYTHON, **fields: Any) -> str:
        """A worker that puts objects with the credentials of wherever it is, until told to end."""
        endpoint = os.environ["AWS_ENDPOINT_URL"]
        env = {"PYTHONPATH": "/site", "AWS_ENDPOINT_URL": endpoint, "AWS_DEFAULT_REGION": REGION}
        worker = self.submit(
            python, "-u", "-c", PROGRAM, fleet=self.fleet.name, credentials="instance", env=env, **fields
        )
        self.until_output(worker, " 5 ", seconds=180)
        return worker

    def machine(self, worker: str) -> str:
        """The instance or job on which the worker runs."""
        incarnation = self.record(worker).incarnation
        assert incarnation is not None
        return incarnation.instance

    def moved(self, worker: str, number: int) -> WorkerRecord:
        """Wait until it runs as incarnation ``number``, and has put something from there."""
        self.until(
            worker,
            lambda r: len(r.incarnations) >= number and r.state in (State.RUNNING, State.CHECKPOINTING),
            f"run as incarnation {number}",
            seconds=120,
        )
        before = self.steps()
        return self.until(
            worker, lambda _: self.steps() > before + 1, f"put something as incarnation {number}", seconds=60
        )

    def steps(self) -> int:
        """How many objects the worker has put."""
        pages = self.cloud.s3.get_paginator("list_objects_v2").paginate(Bucket="steps")
        return sum(page["KeyCount"] for page in pages)

    def finish_again(self, worker: str) -> WorkerRecord:
        """Let a worker end that has done a part of its work again."""
        self.cloud.s3.put_object(Bucket="gate", Key="end", Body=b"")
        record = self.until_settled(worker, 180)
        assert record.state is State.SUCCEEDED, f"{self.output(worker, 'stderr')}\n{self.story(worker)}"
        assert (record.migrations, record.cold_starts) == (1, 0), self.story(worker)
        nonces = {line.split()[0] for line in self.output(worker).splitlines()}
        assert len(nonces) == 1
        self.bed.until(lambda: not self.bed.living(), "the end of all machines", 60)
        return record

    def finish(self, worker: str, moves: int) -> list[list[str]]:
        """Let it end; it was one process all the time, with its file, and nothing is left running. Its lines."""
        self.cloud.s3.put_object(Bucket="gate", Key="end", Body=b"")
        record = self.until_settled(worker, 180)
        assert record.state is State.SUCCEEDED, f"{self.output(worker, 'stderr')}\n{self.story(worker)}"
        assert (record.migrations, record.cold_starts) == (moves, 0), self.story(worker)
        *lines, last = (line.split() for line in self.output(worker).splitlines())
        nonces = {line[0] for line in lines} | {last[0]}
        assert len(nonces) == 1
        numbers = [int(line[1]) for line in lines]
        assert numbers == list(range(len(numbers)))
        assert last[1:] == ["lines", str(len(numbers)), str(len(numbers))]
        stored = self.cloud.s3.list_objects_v2(Bucket="steps", MaxKeys=1000)["Contents"]
        assert len(stored) == min(1000, len(numbers))
        self.bed.until(lambda: not self.bed.living(), "the end of all machines", 60)
        assert {x["State"]["Name"] for x in self.cloud.instances()} <= {"terminated"}
        assert {x.status for x in self.cloud.jobs()} <= {"SUCCEEDED", "FAILED"}
        return lines


def keys(lines: list[list[str]]) -> list[str]:
    """The access keys that were used, in order."""
    return list(dict.fromkeys(line[2] for line in lines))
