"""The EC2 fleet against moto (a stand-in): real boto3, requests validated by botocore."""

from __future__ import annotations

import base64
import subprocess
from datetime import timedelta
from typing import Any

import pytest
from moto.ec2.models import ec2_backends

from savedworker.fleet.aws import marks
from savedworker.fleet.base import (
    Chooses,
    Diagnoses,
    Fleet,
    Keeps,
    LaunchRequest,
    NoCapacity,
    Tidies,
)
from savedworker.fleet.ec2.pools import Card, Type, suitable
from savedworker.fleet.ec2.settings import Ec2Settings
from savedworker.fleet.ec2.user_data import Boot, render
from savedworker.model.decisions import InstanceView
from savedworker.model.errors import Refused, SavedWorkerError, Temporary
from savedworker.model.fingerprint import Fingerprint, Gpu
from savedworker.model.placement import Fit
from savedworker.model.record import Reason
from tests.fleet.aws.conftest import ACCOUNT, REGION, STORE, Cloud, refusal, request

X86 = Fingerprint(machine="x86_64")


def overrides(asked: dict[str, Any]) -> set[tuple[str, str]]:
    return {
        (x["InstanceType"], x["SubnetId"])
        for config in asked["LaunchTemplateConfigs"]
        for x in config["Overrides"]
    }


def template_of(cloud: Cloud, asked: dict[str, Any]) -> Any:
    named = asked["LaunchTemplateConfigs"][0]["LaunchTemplateSpecification"]
    (version,) = cloud.ec2.describe_launch_template_versions(
        LaunchTemplateName=named["LaunchTemplateName"], Versions=[named["Version"]]
    )["LaunchTemplateVersions"]
    return version["LaunchTemplateData"]


# One instance for a launch --------------------------------------------------------------------------------------------


def test_it_is_a_fleet_that_chooses_keeps_and_diagnoses(cloud: Cloud):
    fleet: object = cloud.ec2_fleet()
    assert isinstance(fleet, Fleet)
    assert isinstance(fleet, Chooses)
    assert isinstance(fleet, Keeps)
    assert isinstance(fleet, Tidies)
    assert isinstance(fleet, Diagnoses)


def test_a_launch_makes_one_instance_whoever_repeats_it(cloud: Cloud):
    """C14, on EC2: a controller that dies after the call leaves an instance that the next one finds."""
    first = cloud.ec2_fleet().launch(request())
    again = cloud.ec2_fleet().launch(request())  # another controller, with nothing written down
    assert first.instance == again.instance
    assert first.zone in (f"{REGION}a", f"{REGION}b")
    assert first.instance_type in ("m5.large", "m5.xlarge", "m6i.large")
    assert (again.zone, again.instance_type) == (first.zone, first.instance_type)
    assert len(cloud.instances()) == 1
    (asked,) = cloud.made("create_fleet")
    assert (
        asked["ClientToken"] == "l-1-0"
    )  # and where the look-up comes too early, EC2 itself makes no second one
    assert asked["Type"] == "instant"


def test_an_instance_is_asked_for_as_the_documents_say(cloud: Cloud):
    fleet = cloud.ec2_fleet(tags={"team": "a"}, volume_size=100)
    made = cloud.instance(fleet.launch(request()).instance)
    (asked,) = cloud.made("create_fleet")
    assert asked["SpotOptions"] == {
        "AllocationStrategy": "price-capacity-optimized",
        "InstanceInterruptionBehavior": "terminate",
    }
    assert asked["TargetCapacitySpecification"] == {
        "TotalTargetCapacity": 1,
        "DefaultTargetCapacityType": "spot",
    }
    subnets = cloud.subnets("a", "b")
    assert overrides(asked) == {
        (kind, subnet) for kind in ("m5.large", "m5.xlarge", "m6i.large") for subnet in subnets
    }
    tags = {tag["Key"]: tag["Value"] for tag in made["Tags"]}
    assert (tags[marks.WORKER], tags[marks.LAUNCH], tags["team"]) == ("w", "l-1", "a")
    assert tags[marks.STORE] == marks.store_mark(STORE)
    data = template_of(cloud, asked)
    assert data["MetadataOptions"]["HttpTokens"] == "required"
    assert data["MetadataOptions"]["HttpPutResponseHopLimit"] == 1
    assert data["MetadataOptions"]["InstanceMetadataTags"] == "enabled"
    assert data["InstanceInitiatedShutdownBehavior"] == "terminate"
    assert data["IamInstanceProfile"] == {"Name": "worker"}
    assert data["BlockDeviceMappings"][0]["Ebs"]["VolumeSize"] == 100


def test_on_demand_is_asked_for_by_choice(cloud: Cloud):
    fleet = cloud.ec2_fleet(max_price=0.05)
    made = cloud.instance(fleet.launch(request(choice="on-demand")).instance)
    (asked,) = cloud.made("create_fleet")
    assert "InstanceLifecycle" not in made
    assert asked["OnDemandOptions"] == {"AllocationStrategy": "lowest-price"}
    assert "MaxPrice" not in asked["LaunchTemplateConfigs"][0]["Overrides"][0]  # a limit for spot only
    fleet.launch(request("l-2", choice="spot"))
    assert cloud.made("create_fleet")[1]["LaunchTemplateConfigs"][0]["Overrides"][0]["MaxPrice"] == "0.05"
    with pytest.raises(Refused, match="no market"):
        cloud.ec2_fleet(markets=["spot"]).launch(request("l-3", choice="on-demand"))


def test_all_launches_of_a_fleet_share_one_template_that_names_none_of_them(cloud: Cloud):
    fleet = cloud.ec2_fleet()
    for launch in ("l-1", "l-2"):
        fleet.launch(request(launch, worker="some-worker"))
    cloud.ec2_fleet().launch(request("l-3"))
    templates = cloud.ec2.describe_launch_templates()["LaunchTemplates"]
    assert len(templates) == 1
    script = base64.b64decode(template_of(cloud, cloud.made("create_fleet")[0])["UserData"]).decode()
    assert "some-worker" not in script
    assert "l-1" not in script


def test_the_users_own_template_is_kept_but_for_what_the_product_needs(cloud: Cloud):
    cloud.ec2.create_launch_template(
        LaunchTemplateName="mine",
        LaunchTemplateData={
            "ImageId": cloud.image,
            "InstanceType": "t3.micro",
            "KeyName": "ann",
            "EbsOptimized": True,
            "InstanceMarketOptions": {"MarketType": "spot"},
            "MetadataOptions": {"HttpTokens": "optional", "HttpPutResponseHopLimit": 3},
        },
    )
    fleet = cloud.ec2_fleet(image=None, launch_template="mine:1")
    fleet.launch(request())
    data = template_of(cloud, cloud.made("create_fleet")[0])
    assert (data["ImageId"], data["KeyName"], data["EbsOptimized"]) == (cloud.image, "ann", True)
    assert data["MetadataOptions"]["HttpTokens"] == "required"
    assert "InstanceType" not in data
    assert "InstanceMarketOptions" not in data
    with pytest.raises(SavedWorkerError):
        cloud.ec2_fleet(launch_template="nobodys").launch(request("l-2"))


def age(cloud: Cloud, seconds: float) -> None:
    """Let every template of the region be that much older."""
    for kept in ec2_backends[ACCOUNT][REGION].launch_templates.values():
        kept.create_time -= timedelta(seconds=seconds)


def names(cloud: Cloud) -> set[str]:
    return {x["LaunchTemplateName"] for x in cloud.ec2.describe_launch_templates()["LaunchTemplates"]}


def test_templates_of_earlier_settings_go_a_day_later_and_nobody_elses(cloud: Cloud):
    cloud.ec2.create_launch_template(LaunchTemplateName="mine", LaunchTemplateData={"ImageId": cloud.image})
    cloud.ec2_fleet(tags={"team": "a"}).launch(request("l-0"))  # equal content
    before = names(cloud)
    cloud.ec2_fleet(key_name="ann").launch(request("l-1"))
    (old,) = names(cloud) - before
    other_store = LaunchRequest("l-2", "w", "s3://others/x", request().spec)
    cloud.ec2_fleet(key_name="ann").launch(other_store)
    other_fleet = cloud.ec2_fleet(key_name="ann")
    other_fleet.name = "cheap"
    other_fleet.launch(request("l-3"))
    fleet = cloud.ec2_fleet()
    fleet.launch(request("l-4"))
    there = names(cloud)
    assert len(there) == 5
    assert fleet.tidy(STORE, {}) == []  # a controller that has not been told yet may still use it
    age(cloud, 86401)
    assert fleet.tidy(STORE, {}, dry_run=True) == [f"launch template {old}"]
    assert names(cloud) == there
    assert fleet.tidy(STORE, {}) == [f"launch template {old}"]
    assert names(cloud) == there - {old}
    assert fleet.tidy(STORE, {}) == []
    assert len([x for x in cloud.instances() if x["State"]["Name"] == "running"]) == 5


def test_a_template_that_somebody_deleted_is_made_again(cloud: Cloud, monkeypatch: pytest.MonkeyPatch):
    """Another controller, with other settings, tidied. moto says so by an exception; EC2 may do it in the answer, too."""
    fleet = cloud.ec2_fleet()
    fleet.launch(request("l-1"))
    (name,) = names(cloud)
    cloud.ec2.delete_launch_template(LaunchTemplateName=name)
    with pytest.raises(Refused, match="no such launch template"):
        fleet.launch(request("l-2"))
    assert fleet.launch(request("l-3")).instance
    assert names(cloud) == {name}
    missing = {"ErrorCode": "InvalidLaunchTemplateName.NotFoundException", "ErrorMessage": "gone"}
    cloud.ec2.delete_launch_template(LaunchTemplateName=name)
    with monkeypatch.context() as patch:
        patch.setattr(cloud.aws.client("ec2"), "create_fleet", lambda **_: {"Errors": [missing]})
        with pytest.raises(Refused, match="no such launch template"):
            fleet.launch(request("l-4"))
    assert fleet.launch(request("l-5")).instance


# Where ----------------------------------------------------------------------------------------------------------------


def test_what_was_reclaimed_is_left_and_still_used_when_nothing_else_is_there(cloud: Cloud):
    """C56, by default and within one launch: other zone and type first, the very pool last."""
    fleet = cloud.ec2_fleet(instance_types=["m5.large", "m5.xlarge"])
    zone_a = f"{REGION}a"
    fleet.launch(request(avoid=(zone_a, "m5.large", f"m5.large@{zone_a}")))
    (asked,) = cloud.made("create_fleet")
    assert overrides(asked) == {("m5.xlarge", cloud.subnets("b")[0])}
    only = cloud.ec2_fleet(instance_types=["m5.large"], subnets=cloud.subnets("a"))
    only.launch(request("l-2", avoid=(zone_a, "m5.large", f"m5.large@{zone_a}")))
    assert overrides(cloud.made("create_fleet")[1]) == {("m5.large", cloud.subnets("a")[0])}


def test_a_group_of_pools_without_capacity_is_followed_by_the_next_within_one_launch(
    cloud: Cloud, monkeypatch: pytest.MonkeyPatch
):
    """moto has capacity always: the answer of the first call is a stand-in."""
    fleet = cloud.ec2_fleet(instance_types=["m5.large"])
    client = cloud.aws.client("ec2")
    real = client.create_fleet

    def full_at_first(**parameters: Any) -> Any:
        if parameters["ClientToken"].endswith("-0"):
            return {
                "FleetId": "fleet-1",
                "Errors": [{"ErrorCode": "InsufficientInstanceCapacity", "ErrorMessage": "none left"}],
                "Instances": [],
            }
        return real(**parameters)

    monkeypatch.setattr(client, "create_fleet", full_at_first)
    zone_b = f"{REGION}b"
    made = fleet.launch(request(avoid=(zone_b,)))
    first, second = cloud.made("create_fleet")
    assert overrides(first) == {("m5.large", cloud.subnets("a")[0])}
    assert overrides(second) == {("m5.large", cloud.subnets("b")[0])}
    assert made.zone == zone_b
    assert len({first["ClientToken"], second["ClientToken"]}) == 2


def test_a_refused_call_is_followed_by_the_next_group_too(cloud: Cloud, monkeypatch: pytest.MonkeyPatch):
    fleet = cloud.ec2_fleet(instance_types=["m5.large"])
    client = cloud.aws.client("ec2")
    real = client.create_fleet

    def unsupported_at_first(**parameters: Any) -> Any:
        if parameters["ClientToken"].endswith("-0"):
            raise refusal("Unsupported")
        return real(**parameters)

    monkeypatch.setattr(client, "create_fleet", unsupported_at_first)
    assert fleet.launch(request(avoid=(f"{REGION}b",))).zone == f"{REGION}b"


def test_a_repeated_request_is_the_same_to_the_letter(cloud: Cloud, monkeypatch: pytest.MonkeyPatch):
    """Else EC2 refuses it (IdempotentParameterMismatch) instead of naming the instance that is there."""
    client = cloud.aws.client("ec2")
    real = client.describe_instance_types
    types = ["m5.large", "m6i.large", "m5.xlarge"]
    for launch in ("l-1", "l-2"):
        cloud.ec2_fleet(instance_types=types).launch(request(launch))
        types.reverse()

        def turned(**parameters: Any) -> Any:
            answer = real(**parameters)
            return {**answer, "InstanceTypes": answer["InstanceTypes"][::-1]}

        monkeypatch.setattr(client, "describe_instance_types", turned)
    first, second = cloud.made("create_fleet")
    assert first["LaunchTemplateConfigs"] == second["LaunchTemplateConfigs"]


def test_types_that_are_too_small_are_left_out_and_none_left_is_said_plainly(cloud: Cloud):
    fleet = cloud.ec2_fleet()
    fleet.launch(request(spec={"memory": 10 << 30, "cpus": 3}))
    assert {kind for kind, _ in overrides(cloud.made("create_fleet")[0])} == {"m5.xlarge"}
    with pytest.raises(Refused, match=r"m5.large: 2 processors, not 64.*Fix: list other instance_types"):
        fleet.launch(request("l-2", spec={"cpus": 64}))
    assert len(cloud.made("create_fleet")) == 1


def test_a_type_that_an_agent_found_unfit_is_not_tried_again_and_nothing_is_downloaded_for_that(
    cloud: Cloud,
):
    """C43: the record remembers which type lacked a CPU feature; another is tried."""
    fleet = cloud.ec2_fleet(instance_types=["m5.large", "m6i.large"])
    fleet.launch(request(fit=Fit(X86, ran_on=("m6i.large",), unfit=("m5.large",))))
    assert {kind for kind, _ in overrides(cloud.made("create_fleet")[0])} == {"m6i.large"}
    with pytest.raises(
        NoCapacity, match="found that it does not fit"
    ):  # waits for a match, and then by policy
        fleet.launch(request("l-2", fit=Fit(X86, unfit=("m5.large", "m6i.large"))))


def test_processors_that_probably_lack_features_come_last(cloud: Cloud):
    fleet = cloud.ec2_fleet(instance_types=["m5.large", "m6i.large", "m5a.large"])
    fleet.launch(request(fit=Fit(X86, ran_on=("m6i.large",))))
    assert {kind for kind, _ in overrides(cloud.made("create_fleet")[0])} == {"m6i.large"}
    alike = cloud.ec2_fleet(instance_types=["m5.large", "m6i.large"], alike=[["m5", "m6i"]])
    alike.launch(request("l-2", fit=Fit(X86, ran_on=("m6i.large",))))
    assert {kind for kind, _ in overrides(cloud.made("create_fleet")[1])} == {"m5.large", "m6i.large"}


def test_gpus_of_the_checkpoint_decide(cloud: Cloud):
    fleet = cloud.ec2_fleet(instance_types=["g4dn.xlarge", "g5.xlarge", "g4dn.12xlarge", "m5.large"])
    t4 = Gpu(model="Tesla T4", memory=16 << 30, driver="550")
    fleet.launch(request(fit=Fit(Fingerprint(machine="x86_64", gpus=(t4,)), ran_on=("g4dn.xlarge",))))
    assert {kind for kind, _ in overrides(cloud.made("create_fleet")[0])} == {"g4dn.xlarge"}
    first = cloud.ec2_fleet(instance_types=["g4dn.xlarge", "g5.xlarge"], gpu_model="T4", gpu_count=1)
    first.launch(request("l-2"))
    assert {kind for kind, _ in overrides(cloud.made("create_fleet")[1])} == {"g4dn.xlarge"}


A100 = "NVIDIA A100-SXM4-40GB"
RTX = "NVIDIA RTX PRO 6000 Blackwell Server Edition"
CARDS = {
    "p4d.24xlarge": Card("A100", 40 << 30),
    "p4de.24xlarge": Card("A100", 80 << 30),
    "g7e.2xlarge": Card("RTX PRO Server 6000", 96 << 30),
    "g6.xlarge": Card("L4", 24 << 30),
    "g6e.xlarge": Card("L40S", 48 << 30),
    "odd.large": Card("Some other name", 96 << 30),
}


@pytest.mark.parametrize(
    ("gpu", "ran_on", "fits"),
    [
        (Gpu(model=A100, memory=42_298_834_944, driver="550"), "p4d.24xlarge", {"p4d.24xlarge"}),
        (Gpu(model=A100, memory=85_899_345_920, driver="550"), "p4de.24xlarge", {"p4de.24xlarge"}),
        (Gpu(model=RTX, memory=102_641_958_912, driver="570"), "g7e.2xlarge", {"g7e.2xlarge"}),
        (Gpu(model="NVIDIA L4", memory=24_152_899_584, driver="550"), "g6.xlarge", {"g6.xlarge"}),
        (Gpu(model="NVIDIA L40S", memory=48_305_799_168, driver="550"), "g6e.xlarge", {"g6e.xlarge"}),
        # What nobody can tell by its names is at least welcome where it came from.
        (Gpu(model="Brand New", memory=96 << 30, driver="1"), "odd.large", {"odd.large"}),
    ],
)
def test_a_gpu_of_the_same_name_with_another_memory_is_another_one(gpu: Gpu, ran_on: str, fits: set[str]):
    settings = Ec2Settings.model_validate({"instance_types": sorted(CARDS), "image": "ami-1"})
    types = [Type(name, 8, 64 << 30, ("x86_64",), (card,)) for name, card in CARDS.items()]
    fit = Fit(Fingerprint(machine="x86_64", gpus=(gpu,)), ran_on=(ran_on,))
    offered = {(name, "a") for name in CARDS}
    found = suitable(types, offered, {"a"}, request().spec, fit, settings)
    assert {pool.type for pool in found.pools} == fits
    assert found.fixable


def test_what_one_size_of_a_family_was_found_to_lack_makes_the_others_come_last(cloud: Cloud):
    """Learned from an agent that refused: their processors are the same."""
    fleet = cloud.ec2_fleet(instance_types=["m5.large", "m5.xlarge", "m6i.large", "m6i.xlarge"])
    fleet.launch(request(fit=Fit(X86, ran_on=("m5.large",), unfit=("m6i.large",))))
    assert {kind for kind, _ in overrides(cloud.made("create_fleet")[0])} == {"m5.large", "m5.xlarge"}
    # Not where it has run: then that one instance was odd.
    fleet.launch(request("l-2", fit=Fit(X86, ran_on=("m5.large", "m6i.xlarge"), unfit=("m6i.large",))))
    tried = {kind for kind, _ in overrides(cloud.made("create_fleet")[1])}
    assert tried == {"m5.large", "m5.xlarge", "m6i.xlarge"}


# How it ends ----------------------------------------------------------------------------------------------------------


def test_describe_and_terminate(cloud: Cloud):
    fleet = cloud.ec2_fleet()
    instance = fleet.launch(request()).instance
    views = fleet.describe(["l-1", "l-2"])
    assert (views["l-1"].state, views["l-1"].instance) == ("running", instance)
    assert views["l-2"] == InstanceView("unknown")
    fleet.terminate("l-1")
    fleet.terminate("l-1")
    fleet.terminate("l-2")
    cloud.end_instance(instance, "Client.UserInitiatedShutdown")
    ended = fleet.describe(["l-1"])["l-1"]
    assert (ended.state, ended.final, ended.detail) == ("ended", None, "not wanted any more")
    assert len(cloud.made("terminate_instances")) == 1


@pytest.mark.parametrize(
    ("code", "outcome", "words", "final"),
    [
        ("Server.SpotInstanceTermination", "gone", "reclaimed", None),
        ("Server.SpotInstanceShutdown", "gone", "reclaimed", None),
        ("Server.ScheduledStop", "gone", "retired", None),
        ("Server.InsufficientInstanceCapacity", "capacity", "no capacity", None),
        ("Server.InternalError", "failed", "could not start", None),
        ("Client.InternalError", "failed", "encrypted volume", None),
        ("Client.InvalidSnapshot.NotFound", "failed", "snapshot", None),
        ("Client.VolumeLimitExceeded", "capacity", "quota", None),
        ("Client.InstanceInitiatedShutdown", "gone", "ended itself", None),
        ("Client.InstanceTerminated", "gone", "image of it", None),
        ("Client.UserInitiatedHibernate", "gone", "hibernated", None),
        ("Client.UserInitiatedShutdown", "gone", "whoever ended instance", Reason.CANCELLED),
        ("Server.SomethingNew", "gone", "Server.SomethingNew", None),
    ],
)
def test_every_state_reason_has_its_meaning(
    cloud: Cloud, code: str, outcome: str, words: str, final: Reason | None
):
    fleet = cloud.ec2_fleet(instance_types=["m5.large"])
    cloud.end_instance(fleet.launch(request()).instance, code)
    view = fleet.describe(["l-1"])["l-1"]
    assert (view.state, view.outcome, view.final) == ("ended", outcome, final)
    assert words in view.detail


def test_an_instance_that_is_shutting_down_may_still_execute(cloud: Cloud):
    """Only "terminated" frees the lease: a moment before, two incarnations could run."""
    fleet = cloud.ec2_fleet(instance_types=["m5.large"])
    instance = fleet.launch(request()).instance
    cloud.end_instance(instance, "Server.SpotInstanceTermination", "shutting-down")
    assert fleet.describe(["l-1"])["l-1"].state == "running"
    cloud.end_instance(instance, "Server.SpotInstanceTermination", "stopped")
    assert fleet.describe(["l-1"])["l-1"].state == "ended"


def test_a_person_who_ends_the_instance_means_it_unless_the_fleet_says_otherwise(cloud: Cloud):
    fleet = cloud.ec2_fleet(instance_types=["m5.large"], terminated_by_hand="replace")
    cloud.end_instance(fleet.launch(request()).instance, "Client.UserInitiatedShutdown")
    assert fleet.describe(["l-1"])["l-1"].final is None


def test_a_drill_is_no_persons_end(cloud: Cloud):
    fleet = cloud.ec2_fleet(instance_types=["m5.large"])
    fleet.launch(request())
    with pytest.raises(Refused, match="Fault Injection"):
        fleet.preempt("l-1", 30.0)
    fleet.preempt("l-1", None)
    view = fleet.describe(["l-1"])["l-1"]
    assert (view.state, view.final, view.detail) == ("ended", None, "preempted without notice")
    with pytest.raises(Refused, match="has no instance"):
        fleet.preempt("l-1", None)


def test_owned_are_the_living_instances_of_one_store(cloud: Cloud):
    fleet = cloud.ec2_fleet(instance_types=["m5.large"])
    first = fleet.launch(request("l-1", worker="a")).instance
    second = fleet.launch(request("l-2", worker="b")).instance
    fleet.terminate("l-1")
    cloud.end_instance(second, "Client.UserInitiatedShutdown", "stopped")  # it still costs its volume
    assert [(x.launch, x.worker, x.instance) for x in fleet.owned(STORE)] == [("l-2", "b", second)]
    assert fleet.owned("s3://other") == []
    assert first != second


# Keys, user data ------------------------------------------------------------------------------------------------------

ARN = "arn:aws:ssm:eu-west-1:123456789012:parameter/savedworker/key"


def test_the_stores_key_is_in_nothing_that_aws_keeps(cloud: Cloud):
    secret = {"SAVEDWORKER_KEY": "c2VjcmV0IHNlY3JldCBzZWNyZXQgc2VjcmV0IQ=="}
    with pytest.raises(Refused, match=r"no way to give it.*key_from"):
        cloud.ec2_fleet().launch(request(environment=secret))
    assert cloud.made("create_fleet") == []
    fleet = cloud.ec2_fleet(instance_types=["m5.large"], key_from=ARN)
    fleet.launch(request(environment=secret))
    script = base64.b64decode(template_of(cloud, cloud.made("create_fleet")[0])["UserData"]).decode()
    assert f"--key-from {ARN}" in script
    assert secret["SAVEDWORKER_KEY"] not in repr(cloud.calls) + script
    file = cloud.ec2_fleet(instance_types=["m5.large"], key_file="/etc/savedworker/keys/key")
    file.launch(request("l-2", environment={"SAVEDWORKER_KEY_FILE": "/home/ann/key"}))
    script = base64.b64decode(template_of(cloud, cloud.made("create_fleet")[1])["UserData"]).decode()
    assert "export SAVEDWORKER_KEY_FILE=/etc/savedworker/keys/key" in script
    assert "/home/ann" not in script


def test_user_data_is_a_shell_script_that_quotes_what_it_is_given():
    script = render(
        Boot(
            agent=("/opt/savedworker/bin/savedworker", "agent", "--store", "s3://b/it's $HOME"),
            environment={"A": "x'y `z` $(false)"},
            bundle="s3://b/bundle.tar.gz",
            bundle_sha256="0" * 64,
        )
    )
    assert script.startswith("#!/bin/sh\n")
    assert subprocess.run(["sh", "-n"], input=script, text=True, capture_output=True).stderr == ""
    with pytest.raises(Refused, match="EC2 takes 16384"):
        render(Boot(agent=("a",), environment={"A": "x" * 16384}))


def run_user_data(tmp_path: Any, agent: str, **more: Any) -> tuple[subprocess.CompletedProcess[str], str]:
    """Execute the script with programs of ours in PATH: a ``shutdown`` that writes down that it was called."""
    for name, text in {
        "shutdown": f'#!/bin/sh\necho "$@" >>{tmp_path}/ended\n',
        "agent": f"#!/bin/sh\n{agent}\n",
        "sync": "#!/bin/sh\n",
    }.items():
        (tmp_path / name).write_text(text)
        (tmp_path / name).chmod(0o755)
    script = render(Boot(agent=(str(tmp_path / more.pop("program", "agent")), "agent"), **more))
    done = subprocess.run(
        ["sh"],
        input=script,
        text=True,
        capture_output=True,
        timeout=60,
        env={"PATH": f"{tmp_path}:/usr/bin:/bin"},
    )
    ended = tmp_path / "ended"
    return done, ended.read_text() if ended.exists() else ""


def test_the_instance_ends_with_its_agent_however_that_ends(tmp_path: Any):
    done, ended = run_user_data(tmp_path, 'echo "$@ $A"; exit 3', environment={"A": "it's"})
    assert done.stdout == "agent it's\n"
    assert ended == "-h now\n"


def test_the_instance_ends_when_no_agent_can_be_had(tmp_path: Any):
    done, ended = run_user_data(tmp_path, "", program="missing")
    assert "the fleet has no bundle" in done.stderr
    assert ended == "-h now\n"


def test_a_bundle_that_is_another_one_is_not_executed(tmp_path: Any):
    curl = tmp_path / "curl"
    curl.write_text('#!/bin/sh\nwhile [ "$1" != -o ]; do shift; done\necho foreign >"$2"\n')
    curl.chmod(0o755)
    done, ended = run_user_data(
        tmp_path, "", program="missing", bundle="https://example.com/b.tar", bundle_sha256="0" * 64
    )
    assert "is another one than bundle_sha256 says" in done.stderr
    assert ended == "-h now\n"


# What goes wrong ------------------------------------------------------------------------------------------------------


def failing(
    cloud: Cloud, monkeypatch: pytest.MonkeyPatch, operation: str, code: str, status: int = 400
) -> list[int]:
    """``operation`` is answered with ``code``; a stand-in, as moto does not produce these. Returns a list that counts calls."""
    client = cloud.aws.client("ec2")
    calls: list[int] = []

    def fail(**_: Any) -> Any:
        calls.append(1)
        raise refusal(code, status)

    monkeypatch.setattr(client, operation, fail)
    return calls


@pytest.mark.parametrize(
    ("code", "kind"),
    [
        ("InsufficientInstanceCapacity", NoCapacity),
        ("MaxSpotInstanceCountExceeded", NoCapacity),
        ("UnauthorizedOperation", Refused),
        ("ExpiredToken", Temporary),
        ("InternalError", Temporary),
    ],
)
def test_an_error_of_the_call_is_the_next_choice_waiting_or_failing(
    cloud: Cloud, monkeypatch: pytest.MonkeyPatch, code: str, kind: type[SavedWorkerError]
):
    failing(cloud, monkeypatch, "create_fleet", code)
    with pytest.raises(kind, match="as AWS says") as caught:
        cloud.ec2_fleet(instance_types=["m5.large"]).launch(request())
    assert str(caught.value).count("starting an instance") == 1
    assert str(caught.value).count(code) == 1


def test_throttling_is_met_with_bounded_retries(cloud: Cloud, monkeypatch: pytest.MonkeyPatch):
    calls = failing(cloud, monkeypatch, "describe_instances", "RequestLimitExceeded")
    with pytest.raises(Temporary, match="slow down"):
        cloud.ec2_fleet().describe(["l-1"])
    assert len(calls) == 6


def test_settings_that_cannot_work_are_refused():
    for fields, text in (
        (
            {"instance_types": "m5.large", "image": "ami-1", "environment": {"A;reboot": "x"}},
            "no name of a variable",
        ),
        (
            {"instance_types": "m5.large", "image": "ami-1", "tags": {"a/b": "x"}},
            "metadata service shows no others",
        ),
        (
            {"instance_types": "m5.large", "image": "ami-1", "tags": {"savedworker:launch": "x"}},
            "savedworker:",
        ),
        ({"instance_types": ["m5.large"]}, "image is missing"),
        ({"instance_types": [], "image": "ami-1"}, "instance_types"),
        ({"instance_types": "m5.large", "image": "ami-1", "gpu_model": "T4"}, "gpu_count"),
        ({"instance_types": "m5.large", "image": "ami-1", "markets": []}, "markets"),
    ):
        with pytest.raises(ValueError, match=text):
            Ec2Settings.model_validate(fields)
