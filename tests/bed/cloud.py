"""AWS without AWS: moto answers the API, and this boots what was asked for as machines and containers of this machine.

An instance is a host of the local fleet that executes *the very user data* that was submitted, as its first process; a job is a privileged
container on such a host that executes *the very command*. Metadata and credentials services are at their link-local addresses.
What AWS would say of an end (StateReason, statusReason) is put into moto, as AWS documents it. All of it is a stand-in.
"""

from __future__ import annotations

import base64
import json
import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from savedworker.fleet.base import LaunchRequest
from savedworker.fleet.local import LocalFleet
from savedworker.model.errors import Refused, SavedWorkerError
from savedworker.model.spec import WorkerSpec
from tests.bed.outer import CREDENTIALS, Job
from tests.fleet.aws.conftest import REGION, Cloud

PLACES = ("a", "b")
STOP_TIMEOUT = 30.0
"""Seconds between SIGTERM and SIGKILL that ECS gives a container."""
ECS_EXITED = "Essential container in task exited"
SHUTDOWN = "/sbin/shutdown"
_NOTHING = "#!/bin/sh\n# The machine ends with its first process, which is the user data.\nexit 0\n"


@dataclass
class Machine:
    """One instance or job that was booted."""

    name: str
    interrupted: bool = False
    told_to_end: float | None = None
    container_exit: int | None = None
    ended: bool = False


@dataclass
class Bed:
    """Boots what appears in ``cloud``. ``image``: the root of AMIs and of jobs' images."""

    cloud: Cloud
    folder: Path
    image: Path
    blocked: set[str] = field(default_factory=set)
    """Queues that have no capacity: their jobs stay RUNNABLE."""

    def __post_init__(self) -> None:
        self.machines: dict[str, Machine] = {}
        self.problems: list[BaseException] = []
        self._hosts = LocalFleet()
        self._stop = threading.Event()
        self._lock = threading.Lock()
        self._thread = threading.Thread(target=self._watch, daemon=True)
        self._thread.start()

    def close(self) -> None:
        """End every machine that is left."""
        self._stop.set()
        self._thread.join(timeout=60)
        for name in self.machines:
            self._hosts.terminate(name)
        if self.problems:
            raise self.problems[0]

    # What a cloud does ------------------------------------------------------------------------------------------

    def interrupt(self, name: str, notice: float | None) -> None:
        """Reclaim the host of an instance or job: told in its metadata ``notice`` seconds before, or not at all for None."""
        with self._lock:
            self.machines[name].interrupted = True
        self._hosts.preempt(name, notice)

    def recommend(self, name: str) -> None:
        """Recommend in the metadata of an instance to leave it (a rebalance recommendation)."""
        self._hosts.rebalance(name)

    def drain(self, job: str) -> None:
        """ECS stops the container of a job whose host is reclaimed (ECS_ENABLE_SPOT_INSTANCE_DRAINING): SIGTERM."""
        self._signal(job, signal.SIGTERM)

    def living(self) -> list[str]:
        """Instances and jobs that run."""
        return [name for name, machine in self.machines.items() if not machine.ended]

    def _watch(self) -> None:
        while not self._stop.wait(0.2):
            try:
                self._look_at_instances()
                self._look_at_jobs()
            except SavedWorkerError:
                continue  # the next look goes on
            except Exception as error:
                self.problems.append(error)
                return

    # EC2 --------------------------------------------------------------------------------------------------------

    def _look_at_instances(self) -> None:
        for instance in self.cloud.instances():
            name, state = instance["InstanceId"], instance["State"]["Name"]
            machine = self.machines.get(name)
            if machine is None:
                if state == "running":
                    self._boot_instance(instance)
                continue
            if machine.ended:
                continue
            if state != "running":  # by TerminateInstances
                self._hosts.terminate(name)
                machine.ended = True
            elif (view := self._hosts.describe([name])[name]).state == "ended":
                machine.ended = True
                by_itself = "preempted" not in view.detail or "before" in view.detail
                reason = "Client.InstanceInitiatedShutdown" if by_itself else "Server.SpotInstanceTermination"
                self.cloud.end_instance(name, reason)

    def _boot_instance(self, instance: Any) -> None:
        name = instance["InstanceId"]
        tags = {tag["Key"]: tag["Value"] for tag in instance.get("Tags", ())}
        documents = {
            "meta-data/instance-id": name,
            "meta-data/instance-type": instance["InstanceType"],
            "meta-data/placement/availability-zone": instance["Placement"]["AvailabilityZone"],
            **{f"meta-data/tags/instance/{key}": value for key, value in tags.items()},
        }
        script = self._user_data(name, tags)
        files = {"/var/lib/cloud/user-data": script, SHUTDOWN: _NOTHING}
        job = Job(
            str(self.image),
            ("/bin/sh", "/var/lib/cloud/user-data"),
            {"PATH": "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin", "HOME": "/root"},
            machine=True,
            files=files,
        )
        self._boot(name, job, documents)

    def _user_data(self, instance: str, tags: dict[str, str]) -> str:
        answer = self.cloud.ec2.describe_instance_attribute(InstanceId=instance, Attribute="userData")
        encoded = answer.get("UserData", {}).get("Value")
        if not encoded:  # moto gives an instance of a fleet none of its template
            versions = self.cloud.ec2.describe_launch_template_versions(
                LaunchTemplateId=tags["aws:ec2launchtemplate:id"],
                Versions=[tags["aws:ec2launchtemplate:version"]],
            )
            encoded = versions["LaunchTemplateVersions"][0]["LaunchTemplateData"]["UserData"]
        return base64.b64decode(encoded).decode()

    # Batch ------------------------------------------------------------------------------------------------------

    def _look_at_jobs(self) -> None:
        for kept in self.cloud.jobs():
            name, queue = kept.job_id, kept.job_queue.name
            machine = self.machines.get(name)
            if machine is None:
                if kept.status in ("SUCCEEDED", "FAILED"):
                    continue
                if kept.stop:
                    self.cloud.job(name, "FAILED", kept.job_stopped_reason)
                elif queue in self.blocked:
                    self.cloud.job(name, "RUNNABLE")
                else:
                    self._boot_job(kept)
                continue
            if machine.ended:
                continue
            if kept.stop and machine.told_to_end is None:  # TerminateJob
                machine.told_to_end = time.monotonic()
                self._signal(name, signal.SIGTERM)
            if machine.told_to_end is not None and time.monotonic() > machine.told_to_end + STOP_TIMEOUT:
                self._hosts.terminate(name)
            view = self._hosts.describe([name])[name]
            if view.state == "ended":
                self._end_job(kept, machine, view.outcome, view.detail)

    def _boot_job(self, kept: Any) -> None:
        name = kept.job_id
        container = self.cloud.batch.describe_jobs(jobs=[name])["jobs"][0]["container"]
        environment = {each["name"]: each["value"] for each in container["environment"]}
        environment |= {"AWS_BATCH_JOB_ID": name, "AWS_BATCH_JQ_NAME": kept.job_queue.name}
        definition = kept.job_definition.container_properties
        assert definition["privileged"], "Batch has no other way to give the agent its capabilities"
        (mounted,) = definition["mountPoints"]
        role = {}
        if definition.get("jobRoleArn"):
            environment["AWS_CONTAINER_CREDENTIALS_RELATIVE_URI"] = CREDENTIALS
            role = self._role(name) | {"arn": definition["jobRoleArn"]}
        job = Job(
            str(self.image),
            tuple(container["command"]),
            {"PATH": "/usr/sbin:/usr/bin:/sbin:/bin", **environment},
            scratch=mounted["containerPath"],
            role=role,
        )
        documents = {
            "meta-data/instance-id": f"i-{name.replace('-', '')[:17]}",
            "meta-data/placement/availability-zone": f"{REGION}{PLACES[len(self.machines) % 2]}",
        }
        self.cloud.job(name, "STARTING")
        self._boot(name, job, documents)
        self.cloud.job(name, "RUNNING")

    def _end_job(self, kept: Any, machine: Machine, outcome: str, detail: str) -> None:
        machine.ended = True
        kept.job_stopped = True
        lost = "preempted" in detail and "before" not in detail
        if kept.stop:
            self.cloud.job(machine.name, "FAILED", kept.job_stopped_reason, {"exitCode": 143})
        elif lost:
            host = f"i-{machine.name.replace('-', '')[:17]}"
            self.cloud.job(machine.name, "FAILED", f"Host EC2 (instance {host}) terminated.", {})
        else:
            code = 0 if outcome == "gone" else 1
            status = "FAILED" if code else "SUCCEEDED"
            self.cloud.job(machine.name, status, ECS_EXITED, {"exitCode": code})

    # Both -------------------------------------------------------------------------------------------------------

    def _role(self, name: str) -> dict[str, str]:
        """Short-lived, so that whoever uses them asks again and again. Everybody has another access key."""
        return {
            "access_key": f"ASIA{name.replace('-', '')[:16].upper()}",
            "secret_key": "secret",
            "token": "token",
            "seconds": "300",
        }

    def _boot(self, name: str, job: Job, documents: dict[str, str]) -> None:
        self.machines[name] = Machine(name)
        role = {**self._role(name), "name": "worker", "seconds": 300}
        told = self.folder / f"{name}.metadata.json"
        told.write_text(json.dumps({"role": role, "documents": documents}))
        fleet = LocalFleet(
            agent=(sys.executable, "-m", "tests.bed.outer", str(job.write(self.folder / f"{name}.job.json"))),
            restart_limit=0,
        )
        spec = WorkerSpec(id="machine", command=("true",))
        fleet.launch(
            LaunchRequest(name, "machine", "file:///nowhere", spec, environment={local_metadata(): str(told)})
        )

    def _signal(self, name: str, number: int) -> None:
        with suppress(Refused, ProcessLookupError):
            pid = self._hosts.host(name).agent_pid
            if pid is not None:
                os.kill(pid, number)

    def until(self, condition: Callable[[], object], what: str, seconds: float = 60.0) -> None:
        """Wait until ``condition`` holds."""
        end = time.monotonic() + seconds
        while not condition():
            if self.problems:
                raise self.problems[0]
            if time.monotonic() > end:
                raise AssertionError(f"{what} did not come within {seconds:.0f} s: {self.machines}")
            time.sleep(0.1)


def local_metadata() -> str:
    """The variable that says what a host's metadata service tells."""
    from savedworker.fleet.local.host_daemon import METADATA

    return METADATA
