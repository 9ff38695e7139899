"""What AWS's errors mean, entry by entry; how often a call is repeated; and that no credential gets into anything."""

from __future__ import annotations

from typing import Any

import pytest
from botocore.exceptions import ClientError, EndpointConnectionError, NoCredentialsError
from botocore.stub import Stubber

from savedworker.fleet.aws.errors import RULES, as_error, rule_for, worst
from savedworker.fleet.aws.session import TRIES, Aws
from savedworker.fleet.base import NoCapacity
from savedworker.model.errors import Refused, Temporary
from tests.fleet.aws.conftest import refusal

NEXT = """InsufficientInstanceCapacity InsufficientCapacity InsufficientHostCapacity InsufficientReservedInstanceCapacity
    InsufficientFreeAddressesInSubnet UnfulfillableCapacity Unsupported UnsupportedOperation VcpuLimitExceeded
    InstanceLimitExceeded MaxSpotInstanceCountExceeded SpotInstanceCountLimitExceeded VolumeLimitExceeded SpotMaxPriceTooLow"""
WAIT = """PendingVerification AuthFailure InvalidClientTokenId UnrecognizedClientException SignatureDoesNotMatch ExpiredToken
    ExpiredTokenException RequestExpired RequestLimitExceeded Throttling ThrottlingException ThrottledException
    TooManyRequestsException RequestThrottled EC2ThrottledException InternalError InternalFailure Unavailable
    ServiceUnavailable ServerException RequestTimeout"""
FAIL = """InvalidSpotMaxPrice UnauthorizedOperation AccessDenied AccessDeniedException OptInRequired Blocked
    InvalidAMIID.NotFound InvalidAMIID.Malformed InvalidAMIID.Unavailable InvalidSubnetID.NotFound InvalidGroup.NotFound
    InvalidSecurityGroupID.NotFound InvalidKeyPair.NotFound InvalidInstanceType InvalidLaunchTemplateId.NotFound
    InvalidLaunchTemplateName.NotFoundException InvalidIamInstanceProfileArn.Malformed ClientException
    IdempotentParameterMismatch"""
KINDS: dict[str, type[Exception]] = {
    **dict.fromkeys(NEXT.split(), NoCapacity),
    **dict.fromkeys(WAIT.split(), Temporary),
    **dict.fromkeys(FAIL.split(), Refused),
}


def test_every_entry_of_the_table_is_tested():
    assert set(KINDS) == set(RULES)


@pytest.mark.parametrize("code", sorted(RULES))
def test_every_code_means_the_next_choice_waiting_or_failing_in_plain_words(code: str):
    error = as_error("starting an instance", code, "AWS's own words.")
    assert type(error) is KINDS[code]
    assert error.message.startswith(f"starting an instance: {RULES[code].words} ({code}: AWS's own words")
    assert "\n" not in str(error)
    if type(error) is Refused:
        assert error.fix


def test_unknown_codes_fail_unless_the_service_is_at_fault():
    assert rule_for("SomethingNew").meaning == "fail"
    assert rule_for("SomethingNew", 503).meaning == "wait"
    assert rule_for("NewThrottlingError").meaning == "throttled"
    assert "SomethingNew" in str(as_error("x", "SomethingNew", "m"))


@pytest.mark.parametrize(
    "code",
    [
        "InsufficientVolumeCapacity",
        "InsufficientCapacityOnHost",
        "NetworkInterfaceLimitExceeded",
        "FleetQuotaExceeded",
    ],
)
def test_codes_of_the_kind_of_a_lack_are_one_although_nobody_listed_them(code: str):
    error = as_error("starting an instance", code, "AWS's own words.")
    assert isinstance(error, NoCapacity)
    assert code in error.message
    assert rule_for("RequestLimitExceeded").meaning == "throttled"


def test_of_several_errors_the_most_hopeful_counts_and_the_others_are_named():
    none = ("InsufficientInstanceCapacity", "no m5.large")
    wrong = ("UnauthorizedOperation", "no role")
    assert isinstance(worst([wrong, none], "starting"), NoCapacity)
    assert "elsewhere UnauthorizedOperation" in str(worst([wrong, none], "starting"))
    assert isinstance(worst([wrong, wrong], "starting"), Refused)
    assert isinstance(worst([], "starting"), NoCapacity)


def calling(aws: Aws, monkeypatch: pytest.MonkeyPatch, *answers: Any) -> list[int]:
    """The next calls of DescribeInstances end so, the last one again and again: a stand-in."""
    left, calls = list(answers), []

    def answer(**_: Any) -> Any:
        calls.append(1)
        found = left.pop(0) if len(left) > 1 else left[0]
        if isinstance(found, BaseException):
            raise found
        return found

    monkeypatch.setattr(aws.client("ec2"), "describe_instances", answer)
    return calls


def test_a_throttled_call_is_repeated_until_it_passes(aws: Aws, monkeypatch: pytest.MonkeyPatch):
    slow = refusal("RequestLimitExceeded", 503)
    calls = calling(aws, monkeypatch, slow, slow, {"Reservations": []})
    assert aws.call("ec2", "describe_instances", "looking") == {"Reservations": []}
    assert len(calls) == 3


def test_the_repeats_are_bounded(aws: Aws, monkeypatch: pytest.MonkeyPatch):
    calls = calling(aws, monkeypatch, refusal("ThrottlingException"))
    with pytest.raises(Temporary, match="slow down"):
        aws.call("ec2", "describe_instances", "looking")
    assert len(calls) == TRIES


@pytest.mark.parametrize("code", ["UnauthorizedOperation", "InsufficientInstanceCapacity"])
def test_what_will_not_change_at_once_is_not_repeated(aws: Aws, monkeypatch: pytest.MonkeyPatch, code: str):
    calls = calling(aws, monkeypatch, refusal(code))
    with pytest.raises((Refused, NoCapacity)):
        aws.call("ec2", "describe_instances", "looking")
    assert len(calls) == 1


@pytest.mark.parametrize(
    ("error", "text"),
    [
        (NoCredentialsError(), "no AWS credentials.*give the controller a role"),
        (EndpointConnectionError(endpoint_url="https://ec2.nowhere"), "Could not connect"),
    ],
)
def test_without_credentials_or_network_it_is_waited(
    aws: Aws, monkeypatch: pytest.MonkeyPatch, error: Exception, text: str
):
    calling(aws, monkeypatch, error)
    with pytest.raises(Temporary, match=text):
        aws.call("ec2", "describe_instances", "looking")


def test_an_answer_of_the_wire_is_read_as_botocore_reads_it(aws: Aws):
    """The same through botocore's own parser of answers (Stubber), where the code is not put there by hand."""
    client = aws.client("ec2")
    with Stubber(client) as stubber:
        stubber.add_client_error(
            "create_fleet", "MaxSpotInstanceCountExceeded", "Max spot instance count exceeded"
        )
        with pytest.raises(NoCapacity, match="quota of spot instances is used up"):
            aws.call(
                "ec2",
                "create_fleet",
                "starting",
                LaunchTemplateConfigs=[],
                TargetCapacitySpecification={"TotalTargetCapacity": 1},
            )


def test_a_parameter_that_is_none_is_refused_before_it_is_sent(aws: Aws):
    with pytest.raises(Refused, match="Invalid type"):
        aws.call("ec2", "describe_instances", "looking", InstanceIds="not a list")


def test_a_region_and_a_profile_that_are_not_there(monkeypatch: pytest.MonkeyPatch, tmp_path: Any):
    for name in ("AWS_REGION", "AWS_DEFAULT_REGION", "AWS_PROFILE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("AWS_CONFIG_FILE", str(tmp_path / "none"))
    with pytest.raises(Refused, match=r"no AWS region.*set region"):
        Aws().client("ec2")
    with pytest.raises(Refused, match="nobody"):
        Aws(region="eu-west-1", profile="nobody").client("ec2")


def test_a_refusal_is_what_boto3_raises():
    assert isinstance(refusal("X"), ClientError)
