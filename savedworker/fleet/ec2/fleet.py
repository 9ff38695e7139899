"""Ec2Fleet: one EC2 instance for each launch, found again by its tags."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from datetime import UTC, datetime
from typing import Any

from savedworker.fleet import settings as files
from savedworker.fleet.aws import marks
from savedworker.fleet.aws.agent_command import agent_environment, agent_words, check_key
from savedworker.fleet.aws.errors import worst
from savedworker.fleet.aws.looks import LOOK_EVERY, Looks
from savedworker.fleet.aws.session import Aws, code_of, said
from savedworker.fleet.base import Launched, LaunchRequest, NoCapacity, Owned
from savedworker.fleet.ec2 import template
from savedworker.fleet.ec2.ending import view
from savedworker.fleet.ec2.pools import Suitable, Type, suitable
from savedworker.fleet.ec2.settings import Ec2Settings
from savedworker.fleet.ec2.user_data import Boot, render
from savedworker.fleet.finding import Finding
from savedworker.model import defaults
from savedworker.model.decisions import InstanceView
from savedworker.model.errors import Refused, SavedWorkerError
from savedworker.model.placement import Choice, Pool, best_pools
from savedworker.model.spec import WorkerSpec

log = logging.getLogger(__name__)

KEEP_CATALOG = 600.0
"""Seconds for which types, offerings and subnets are not asked for again."""
AT_ONCE = 200
"""Most values of one filter."""
OVERRIDES = 300
"""Most pairs of type and subnet that one CreateFleet takes."""


class Ec2Fleet:
    """Instances of EC2.

    Args:
        name: In the fleet file, or ``ec2`` for settings from the environment alone.
        settings: Instead of those.
        aws: Instead of a connection made from the settings.
        look_every: Seconds for which what EC2 says of instances is not asked for again.
    """

    lease_term = defaults.LEASE_TERM
    embedded = False
    kind = "ec2"
    notice = defaults.GRACE_EC2

    def __init__(
        self,
        name: str = "ec2",
        settings: Ec2Settings | None = None,
        aws: Aws | None = None,
        look_every: float = LOOK_EVERY,
    ) -> None:
        self.name = name
        self.settings = settings or files.load(name, Ec2Settings)
        self.aws = aws or Aws(self.settings.region, self.settings.profile)
        self._lock = threading.Lock()
        self._catalog: tuple[float, list[Type], set[tuple[str, str]], dict[str, str]] | None = None
        self._templates: dict[str, str] = {}
        self._looks = Looks(self._look, look_every)

    def choices(self, spec: WorkerSpec) -> Sequence[Choice]:
        """The markets. Prices are EC2's business: its strategies weigh them over all pools."""
        return tuple(Choice(market, market) for market in self.settings.markets)

    def launch(self, request: LaunchRequest) -> Launched:
        """Have CreateFleet make one instance, in the best pools that it can. Raises NoCapacity, Refused or Temporary."""
        check_key(self.settings, self.name, request.environment)
        self._looks.forget(request.launch)
        there = self._instances([request.launch])
        if there:
            return self._launched(there[0])
        groups = best_pools(self.suitable(request).pools, request.avoid)
        used = self._ensure_template(request)
        problems: list[tuple[str, str]] = []
        for number, group in enumerate(groups):
            asked = self.create_fleet_request(request, group, number, used)
            try:
                answer = self.aws.call("ec2", "create_fleet", "starting an instance", **asked)
            except NoCapacity as error:
                problems.append(said(error))
                continue
            except Refused as error:
                self._forget_templates([said(error)])
                raise
            for made in answer.get("Instances", ()):
                for instance in made.get("InstanceIds", ()):
                    subnet = made.get("LaunchTemplateAndOverrides", {}).get("Overrides", {}).get("SubnetId")
                    zone = self._zones().get(subnet) if subnet else None
                    return Launched(instance, zone, made.get("InstanceType"))
            problems += [
                (x.get("ErrorCode", ""), x.get("ErrorMessage", "")) for x in answer.get("Errors", ())
            ]
        self._forget_templates(problems)
        raise worst(problems, f"starting an instance of fleet {self.name}")

    def describe(self, launches: Sequence[str]) -> Mapping[str, InstanceView]:
        """What is known of each launch."""
        return self._looks(launches)

    def _look(self, launches: Sequence[str]) -> Mapping[str, InstanceView]:
        found: dict[str, list[Any]] = {launch: [] for launch in launches}
        for instance in self._instances(launches):
            found.setdefault(_tag(instance, marks.LAUNCH), []).append(instance)
        cancels = self.settings.terminated_by_hand == "cancel"
        return {launch: view(found[launch], cancels) for launch in launches}

    def terminate(self, launch: str) -> None:
        """End the instance of ``launch``."""
        self._looks.forget(launch)
        self._end([x["InstanceId"] for x in self._instances([launch]) if _lives(x)], "not wanted any more")

    def preempt(self, launch: str, notice: float | None) -> None:
        """Drill: end the instance at once. A warning only AWS itself can give. Raises Refused."""
        if notice is not None:
            raise Refused(
                "only EC2 gives a notice before it takes an instance",
                "use --no-notice, or AWS Fault Injection Service (aws:ec2:send-spot-instance-interruptions)",
            )
        self._looks.forget(launch)
        living = [x["InstanceId"] for x in self._instances([launch]) if _lives(x)]
        if not living:
            raise Refused(f"launch {launch} has no instance", "wait until the worker runs")
        self._end(living, "preempted without notice")

    def owned(self, store_url: str) -> Sequence[Owned]:
        """The instances of workers of that store that have not ended."""
        wanted = [
            {"Name": f"tag:{marks.STORE}", "Values": [marks.store_mark(store_url)]},
            {"Name": "instance-state-name", "Values": ["pending", "running", "stopping", "stopped"]},
        ]
        return [
            Owned(_tag(x, marks.LAUNCH), _tag(x, marks.WORKER), str(x["InstanceId"]))
            for x in self._described(wanted)
        ]

    def tidy(self, store_url: str, environment: Mapping[str, str], *, dry_run: bool = False) -> Sequence[str]:
        """Delete the launch templates that earlier settings made. Should somebody still have those, they are made again."""
        spec = WorkerSpec(id="any", command=("true",))
        request = LaunchRequest("l-any", spec.id, store_url, spec, environment=environment)
        current = template.template_name(self.name, self.template_data(request))
        left = template.unused(self.aws, self.name, store_url, (current,), datetime.now(UTC))
        for each in () if dry_run else left:
            template.delete(self.aws, each)
        return [f"launch template {each.name}" for each in left]

    def diagnose(self, store_url: str) -> Iterator[Finding]:
        """Credentials, permissions, network, image, types, bucket."""
        from savedworker.fleet.ec2.doctor import diagnose

        yield from diagnose(self, store_url)

    # How an instance is asked for

    def create_fleet_request(
        self, request: LaunchRequest, group: Sequence[Pool], number: int, template_name: str
    ) -> dict[str, Any]:
        """The parameters of CreateFleet for the ``number``-th group of pools of this launch."""
        market = request.choice or self.settings.markets[0]
        if market not in self.settings.markets:
            raise Refused(f"fleet {self.name} has no market {market}", "correct markets of the fleet")
        zones = self._zones()
        price = (
            {"MaxPrice": f"{self.settings.max_price:g}"}
            if self.settings.max_price is not None and market == "spot"
            else {}
        )
        overrides = [
            {"InstanceType": pool.type, "SubnetId": subnet, **price}
            for pool in group
            for subnet, zone in sorted(zones.items())
            if zone == pool.zone
        ]
        tags = {
            **self.settings.tags,
            **marks.tags(request.worker, request.launch, request.store_url, self.name),
        }
        listed = [{"Key": key, "Value": value} for key, value in sorted(tags.items())]
        return {
            # The same launch never makes a second instance, whoever repeats this call.
            "ClientToken": f"{request.launch}-{number}",
            "Type": "instant",
            "LaunchTemplateConfigs": [
                {
                    "LaunchTemplateSpecification": {"LaunchTemplateName": template_name, "Version": "1"},
                    "Overrides": overrides[:OVERRIDES],
                }
            ],
            "TargetCapacitySpecification": {"TotalTargetCapacity": 1, "DefaultTargetCapacityType": market},
            **(
                {
                    "SpotOptions": {
                        "AllocationStrategy": "price-capacity-optimized",
                        "InstanceInterruptionBehavior": "terminate",
                    }
                }
                if market == "spot"
                else {"OnDemandOptions": {"AllocationStrategy": "lowest-price"}}
            ),
            "TagSpecifications": [{"ResourceType": kind, "Tags": listed} for kind in ("fleet", "instance")],
        }

    def boot(self, request: LaunchRequest) -> Boot:
        """What the instance is told."""
        key = ("--key-from", self.settings.key_from) if self.settings.key_from else ()
        return Boot(
            agent=agent_words(self.settings, request.store_url, self.kind, "agent", key),
            environment=agent_environment(self.settings, request, self.aws.region),
            bundle=self.settings.bundle or "",
            bundle_sha256=self.settings.bundle_sha256 or "",
        )

    def template_data(self, request: LaunchRequest) -> dict[str, Any]:
        """The content of the launch template: the same for all launches with these settings and this store."""
        own = (
            template.users_own(self.aws, self.settings.launch_template)
            if self.settings.launch_template
            else None
        )
        return template.template_data(self.settings, render(self.boot(request)), own)

    def _ensure_template(self, request: LaunchRequest) -> str:
        data = self.template_data(request)
        name = template.template_name(self.name, data)
        if name not in self._templates:
            self._templates[name] = template.ensure(
                self.aws, self.name, request.store_url, data, self.settings.tags
            )
        return self._templates[name]

    def _forget_templates(self, problems: Sequence[tuple[str, str]]) -> None:
        """Somebody deleted one: the next launch makes it again."""
        if any(code.startswith("InvalidLaunchTemplate") for code, _ in problems):
            self._templates.clear()

    def suitable(self, request: LaunchRequest) -> Suitable:
        """The pools that can take the worker. Raises NoCapacity or Refused when there are none."""
        types, offered, zones = self.catalog()
        found = suitable(types, offered, set(zones.values()), request.spec, request.fit, self.settings)
        if found.pools:
            return found
        why = "; ".join(f"{name}: {reason}" for name, reason in sorted(found.why_not.items())[:4])
        text = f"no type of fleet {self.name} can take worker {request.worker}: {why or 'there are none'}"
        fix = "list other instance_types or subnets, or ask for less memory and cpus"
        if found.fixable:
            raise NoCapacity(text, fix)
        raise Refused(text, fix)

    # What EC2 knows

    def _zones(self) -> dict[str, str]:
        return self.catalog()[2]

    def catalog(self) -> tuple[list[Type], set[tuple[str, str]], dict[str, str]]:
        """Types, what is offered where (pairs of type and zone), and the zone of each subnet."""
        with self._lock:
            now = time.monotonic()
            if self._catalog is None or now - self._catalog[0] > KEEP_CATALOG:
                types = self._types()
                self._catalog = (now, types, self._offered([x.name for x in types]), self._subnets())
            return self._catalog[1:]

    def _types(self) -> list[Type]:
        named = [{"Name": "instance-type", "Values": list(self.settings.instance_types)}]
        pages = self.aws.pages(
            "ec2", "describe_instance_types", "looking for types", "InstanceTypes", Filters=named
        )
        # In one order: a repeated request has to be the same to the letter.
        types = sorted((Type.parse(x) for x in pages), key=lambda x: x.name)
        if not types:
            raise Refused(
                f"fleet {self.name}: there are no types {', '.join(self.settings.instance_types)}",
                "correct instance_types",
            )
        return types

    def _offered(self, types: Sequence[str]) -> set[tuple[str, str]]:
        found: set[tuple[str, str]] = set()
        for start in range(0, len(types), AT_ONCE):
            pages = self.aws.pages(
                "ec2",
                "describe_instance_type_offerings",
                "looking for types",
                "InstanceTypeOfferings",
                LocationType="availability-zone",
                Filters=[{"Name": "instance-type", "Values": list(types[start : start + AT_ONCE])}],
            )
            found |= {(x["InstanceType"], x["Location"]) for x in pages}
        return found

    def _subnets(self) -> dict[str, str]:
        wanted: dict[str, Any] = (
            {"SubnetIds": list(self.settings.subnets)}
            if self.settings.subnets
            else {"Filters": [{"Name": "default-for-az", "Values": ["true"]}]}
        )
        found = {
            str(x["SubnetId"]): str(x["AvailabilityZone"])
            for x in self.aws.pages("ec2", "describe_subnets", "looking for subnets", "Subnets", **wanted)
        }
        if not found:
            raise Refused(f"fleet {self.name}: the region has no default subnets", "set subnets")
        return found

    def _instances(self, launches: Sequence[str]) -> list[Any]:
        found: list[Any] = []
        for start in range(0, len(launches), AT_ONCE):
            wanted = {"Name": f"tag:{marks.LAUNCH}", "Values": list(launches[start : start + AT_ONCE])}
            found += self._described([wanted])
        return found

    def _described(self, filters: Sequence[Any]) -> list[Any]:
        pages = self.aws.pages(
            "ec2", "describe_instances", "looking for instances", "Reservations", Filters=list(filters)
        )
        return [instance for reservation in pages for instance in reservation.get("Instances", ())]

    def _launched(self, instance: Mapping[str, Any]) -> Launched:
        zone = instance.get("Placement", {}).get("AvailabilityZone")
        return Launched(str(instance["InstanceId"]), zone, instance.get("InstanceType"))

    def _end(self, instances: Sequence[str], why: str) -> None:
        if not instances:
            return
        try:
            self.aws.call(
                "ec2",
                "create_tags",
                "marking what is ended",
                Resources=list(instances),
                Tags=[{"Key": marks.ENDED, "Value": why}],
            )
        except Refused as error:
            log.warning("%s; it is ended all the same", error)
        try:
            self.aws.call("ec2", "terminate_instances", "ending instances", InstanceIds=list(instances))
        except SavedWorkerError as error:
            if not code_of(error.__cause__ or error).startswith("InvalidInstanceID"):
                raise


def _tag(instance: Mapping[str, Any], key: str) -> str:
    return next((str(tag["Value"]) for tag in instance.get("Tags", ()) if tag["Key"] == key), "")


def _lives(instance: Mapping[str, Any]) -> bool:
    return instance.get("State", {}).get("Name") not in ("terminated", "shutting-down")
