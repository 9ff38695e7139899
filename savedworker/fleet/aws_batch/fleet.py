"""BatchFleet: one AWS Batch job for each launch, found again by its name."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from savedworker.fleet import settings as files
from savedworker.fleet.aws import marks
from savedworker.fleet.aws.agent_command import check_key
from savedworker.fleet.aws.looks import LOOK_EVERY, Looks
from savedworker.fleet.aws.session import Aws
from savedworker.fleet.aws_batch import job
from savedworker.fleet.aws_batch.ending import DRILL, ENDED, OURS, WAITING, view
from savedworker.fleet.aws_batch.settings import BatchSettings, Queue
from savedworker.fleet.base import Launched, LaunchRequest, Owned
from savedworker.fleet.finding import Finding
from savedworker.model import defaults
from savedworker.model.decisions import InstanceView
from savedworker.model.errors import Refused
from savedworker.model.placement import Choice
from savedworker.model.spec import WorkerSpec

log = logging.getLogger(__name__)

AT_ONCE = 100
"""Most jobs that one DescribeJobs takes."""
REMEMBERED = 10_000
"""Launches whose jobs' ids are remembered."""


class BatchFleet:
    """Jobs of AWS Batch.

    Args:
        name: In the fleet file, or ``aws-batch`` for settings from the environment alone.
        settings: Instead of those.
        aws: Instead of a connection made from the settings.
        look_every: Seconds for which what AWS says of jobs is not asked for again.
    """

    lease_term = defaults.LEASE_TERM
    embedded = False
    kind = job.KIND

    def __init__(
        self,
        name: str = job.KIND,
        settings: BatchSettings | None = None,
        aws: Aws | None = None,
        look_every: float = LOOK_EVERY,
    ) -> None:
        self.name = name
        self.settings = settings or files.load(name, BatchSettings)
        self.aws = aws or Aws(self.settings.region, self.settings.profile)
        self._looks = Looks(self._look, look_every)
        self._ids: dict[str, tuple[str, ...]] = {}
        """Of the jobs that were found: ``describe`` then asks for them, and not for their names in every queue."""

    @property
    def notice(self) -> float:
        """Seconds from SIGTERM to SIGKILL on the hosts, less a little."""
        return float(self.settings.stop_timeout - job.SPARE)

    def choices(self, spec: WorkerSpec) -> Sequence[Choice]:
        """The queues."""
        return tuple(Choice(x.name, x.market, x.price, x.zones) for x in self.settings.queues)

    def launch(self, request: LaunchRequest) -> Launched:
        """Submit a job, unless there is one of that name. Raises NoCapacity, Refused or Temporary."""
        check_key(self.settings, self.name, request.environment)
        self._looks.forget(request.launch)
        there = self._jobs([request.launch])[request.launch]
        if there:
            return Launched(str(min(there, key=_age)["jobId"]))
        wanted = job.definition(self.settings, request.spec)
        self._ensure_definition(wanted)
        parameters = job.submission(
            self.settings,
            request,
            self.name,
            self._queue(request.choice),
            wanted["jobDefinitionName"],
            self.aws.region,
        )
        submitted = str(self.aws.call("batch", "submit_job", "submitting a job", **parameters)["jobId"])
        first = self._first_of(request.launch) or submitted
        # Known by its id from now on: a list of jobs may be older than the job.
        self._ids[request.launch] = tuple(dict.fromkeys((first, submitted)))
        return Launched(first)

    def describe(self, launches: Sequence[str]) -> Mapping[str, InstanceView]:
        """What is known of each launch."""
        return self._looks(launches)

    def _look(self, launches: Sequence[str]) -> Mapping[str, InstanceView]:
        cancels = self.settings.terminated_by_hand == "cancel"
        known = {job_id: launch for launch in launches for job_id in self._ids.get(launch, ())}
        found: dict[str, list[Any]] = {launch: [] for launch in launches}
        for each in self._described(list(known)):
            found[known[each["jobId"]]].append(each)
        found |= self._jobs([launch for launch in launches if not found[launch]])
        for launch, jobs in found.items():
            if jobs:
                self._ids[launch] = tuple(each["jobId"] for each in jobs)
        while len(self._ids) > REMEMBERED:
            self._ids.pop(next(iter(self._ids)))
        return {launch: view(jobs, cancels) for launch, jobs in found.items()}

    def terminate(self, launch: str) -> None:
        """End the job of ``launch``, whatever its state."""
        self._end(launch, f"{OURS}not wanted any more")

    def preempt(self, launch: str, notice: float | None) -> None:
        """Drill: end the job. A warning only AWS itself can give. Raises Refused."""
        if notice is not None:
            raise Refused(
                "only AWS gives a notice before it takes a host",
                "use --no-notice, or AWS Fault Injection Service on the host (aws:ec2:send-spot-instance-interruptions)",
            )
        if not self._end(launch, f"{DRILL}preempted without notice"):
            raise Refused(f"launch {launch} has no job", "wait until the worker runs")

    def owned(self, store_url: str) -> Sequence[Owned]:
        """The jobs of workers of that store that have not ended."""
        found: list[Any] = []
        for queue in self.settings.queues:
            found += [x["jobId"] for x in self._listed(queue, f"{job.PREFIX}*") if x["status"] not in ENDED]
        mark = marks.store_mark(store_url)
        living = []
        for each in self._described(found):
            tags = job.tags_of(each)
            if tags.get(marks.STORE) == mark and each["status"] not in ENDED:
                launch = tags.get(marks.LAUNCH) or job.launch_of(each["jobName"])
                living.append(Owned(launch, tags.get(marks.WORKER, ""), str(each["jobId"])))
        return living

    def diagnose(self, store_url: str) -> Iterator[Finding]:
        """Credentials, queues and what is behind them, image, roles, bucket."""
        from savedworker.fleet.aws_batch.doctor import diagnose

        yield from diagnose(self, store_url)

    def _queue(self, choice: str | None) -> Queue:
        if choice is None:
            return self.settings.queues[0]
        for queue in self.settings.queues:
            if queue.name == choice:
                return queue
        raise Refused(f"fleet {self.name} has no queue {choice}", "correct queues of the fleet")

    def _ensure_definition(self, wanted: Mapping[str, Any]) -> None:
        """Register the definition if nobody has. Its name is that of its content, so any revision that is active is right."""
        there = self.aws.call(
            "batch",
            "describe_job_definitions",
            "looking for the job definition",
            jobDefinitionName=wanted["jobDefinitionName"],
            status="ACTIVE",
        )
        if not there.get("jobDefinitions"):
            self.aws.call("batch", "register_job_definition", "registering the job definition", **wanted)

    def _listed(self, queue: Queue, name: str) -> Iterator[Any]:
        """The summaries of the jobs in ``queue`` with that name; a star at its end stands for anything."""
        yield from self.aws.pages(
            "batch",
            "list_jobs",
            "looking for jobs",
            "jobSummaryList",
            jobQueue=queue.queue,
            filters=[{"name": "JOB_NAME", "values": [name]}],
        )

    def _jobs(self, launches: Sequence[str]) -> dict[str, list[Any]]:
        """All jobs of each launch, in every queue: a launch may have been submitted with nobody left to write that down."""
        ids: list[str] = []
        for launch in launches:
            for queue in self.settings.queues:
                ids += [x["jobId"] for x in self._listed(queue, job.job_name(launch))]
        found: dict[str, list[Any]] = {launch: [] for launch in launches}
        for each in self._described(ids):
            found.setdefault(job.launch_of(each["jobName"]), []).append(each)
        return found

    def _described(self, ids: Sequence[str]) -> list[Any]:
        found: list[Any] = []
        for start in range(0, len(ids), AT_ONCE):
            answer = self.aws.call(
                "batch", "describe_jobs", "looking for jobs", jobs=list(ids[start : start + AT_ONCE])
            )
            found += answer.get("jobs", ())
        return found

    def _end(self, launch: str, reason: str) -> int:
        """End all jobs of ``launch``; how many were there. TerminateJob takes them in every state."""
        self._looks.forget(launch)
        living = [x for x in self._jobs([launch])[launch] if x["status"] not in ENDED]
        for each in living:
            self._end_job(each, reason)
        return len(living)

    def _first_of(self, launch: str) -> str | None:
        """Batch has no client token. Of two controllers that submitted the same launch at once, the first job stays."""
        living = sorted((x for x in self._jobs([launch])[launch] if x["status"] not in ENDED), key=_age)
        for each in living[1:]:
            if each["status"] in WAITING:
                self._end_job(each, f"{OURS}submitted twice at the same moment")
        return str(living[0]["jobId"]) if living else None

    def _end_job(self, each: Mapping[str, Any], reason: str) -> None:
        self.aws.call("batch", "terminate_job", "ending a job", jobId=each["jobId"], reason=reason)


def _age(each: Mapping[str, Any]) -> tuple[int, str]:
    return int(each.get("createdAt", 0)), str(each["jobId"])
