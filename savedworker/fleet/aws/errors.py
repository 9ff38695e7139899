"""What AWS's error codes mean for a launch: the next choice, waiting, or failing. One table, with a plain message for each."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from savedworker.fleet.base import NoCapacity
from savedworker.model.errors import Refused, SavedWorkerError, Temporary

Meaning = Literal["next", "wait", "throttled", "fail"]
"""``next``: another place or time may do. ``wait``: the same request later. ``throttled``: likewise, and soon. ``fail``: it stays wrong."""


@dataclass(frozen=True)
class Rule:
    """What an error code means, in words, and what a person can do."""

    meaning: Meaning
    words: str
    fix: str = ""


_CAPACITY = Rule("next", "no capacity there now")
_QUOTA = "raise the quota in Service Quotas, or use other types"
_CREDENTIALS = "renew them: boto3 takes them from roles, SSO or the environment"
_PERMISSION = "give the controller's role the policy docs/aws/controller-policy.json; savedworker doctor --fleet NAME names what is missing"
_THROTTLED = Rule("throttled", "AWS asks to slow down")
_TROUBLE = Rule("wait", "AWS has trouble")

RULES: dict[str, Rule] = {
    # Capacity
    "InsufficientInstanceCapacity": _CAPACITY,
    "InsufficientCapacity": _CAPACITY,
    "InsufficientHostCapacity": _CAPACITY,
    "InsufficientReservedInstanceCapacity": _CAPACITY,
    "InsufficientFreeAddressesInSubnet": Rule(
        "next", "the subnet has no free address", "use a larger subnet, or more of them"
    ),
    "UnfulfillableCapacity": _CAPACITY,
    "Unsupported": Rule("next", "that type is not offered in that zone", "list more types or subnets"),
    "UnsupportedOperation": Rule("next", "that type cannot be started so", "list other types"),
    # Quotas: another market or type may have room
    "VcpuLimitExceeded": Rule("next", "the account's quota of processors is used up", _QUOTA),
    "InstanceLimitExceeded": Rule("next", "the account's quota of instances is used up", _QUOTA),
    "MaxSpotInstanceCountExceeded": Rule("next", "the account's quota of spot instances is used up", _QUOTA),
    "SpotInstanceCountLimitExceeded": Rule(
        "next", "the account's quota of spot instances is used up", _QUOTA
    ),
    "VolumeLimitExceeded": Rule(
        "next", "the account's quota of volumes is used up", "raise the quota of EBS storage"
    ),
    # Price
    "SpotMaxPriceTooLow": Rule(
        "next", "the spot price is above max_price", "raise max_price, or leave it out"
    ),
    "InvalidSpotMaxPrice": Rule("fail", "max_price is no price", "give dollars per hour, or leave it out"),
    # Permission
    "UnauthorizedOperation": Rule("fail", "not permitted", _PERMISSION),
    "AccessDenied": Rule("fail", "not permitted", _PERMISSION),
    "AccessDeniedException": Rule("fail", "not permitted", _PERMISSION),
    "OptInRequired": Rule(
        "fail", "the account is not subscribed to this", "subscribe to the image or service in the console"
    ),
    "Blocked": Rule("fail", "the account is blocked", "ask AWS support"),
    "PendingVerification": Rule("wait", "AWS is still verifying the account for this region"),
    # Credentials: they come and go, and a worker must not die of it
    "AuthFailure": Rule("wait", "AWS does not accept the credentials", _CREDENTIALS),
    "InvalidClientTokenId": Rule("wait", "AWS does not accept the credentials", _CREDENTIALS),
    "UnrecognizedClientException": Rule("wait", "AWS does not accept the credentials", _CREDENTIALS),
    "SignatureDoesNotMatch": Rule(
        "wait", "AWS does not accept the credentials", f"{_CREDENTIALS}; see that the clock is right"
    ),
    "ExpiredToken": Rule("wait", "the credentials have run out", _CREDENTIALS),
    "ExpiredTokenException": Rule("wait", "the credentials have run out", _CREDENTIALS),
    "RequestExpired": Rule("wait", "the request was too old when it came", "set this machine's clock"),
    # Throttling and trouble
    "RequestLimitExceeded": _THROTTLED,
    "Throttling": _THROTTLED,
    "ThrottlingException": _THROTTLED,
    "ThrottledException": _THROTTLED,
    "TooManyRequestsException": _THROTTLED,
    "RequestThrottled": _THROTTLED,
    "EC2ThrottledException": _THROTTLED,
    "InternalError": _TROUBLE,
    "InternalFailure": _TROUBLE,
    "Unavailable": _TROUBLE,
    "ServiceUnavailable": _TROUBLE,
    "ServerException": _TROUBLE,
    "RequestTimeout": _TROUBLE,
    # What is wrong in the settings
    "IdempotentParameterMismatch": Rule(
        "fail", "the fleet's settings changed while this launch was made", "nothing: another one follows"
    ),
    "InvalidAMIID.NotFound": Rule(
        "fail", "there is no such image", "correct image: AMIs differ from region to region"
    ),
    "InvalidAMIID.Malformed": Rule("fail", "that is no image", "correct image"),
    "InvalidAMIID.Unavailable": Rule("fail", "the image cannot be used", "correct image"),
    "InvalidSubnetID.NotFound": Rule("fail", "there is no such subnet", "correct subnets, or the region"),
    "InvalidGroup.NotFound": Rule("fail", "there is no such security group", "correct security_groups"),
    "InvalidSecurityGroupID.NotFound": Rule(
        "fail", "there is no such security group", "correct security_groups"
    ),
    "InvalidKeyPair.NotFound": Rule("fail", "there is no such key pair", "correct key_name"),
    "InvalidInstanceType": Rule("fail", "there is no such type", "correct instance_types"),
    "InvalidLaunchTemplateId.NotFound": Rule(
        "fail", "there is no such launch template", "correct launch_template"
    ),
    "InvalidLaunchTemplateName.NotFoundException": Rule(
        "fail", "there is no such launch template", "correct launch_template"
    ),
    "InvalidIamInstanceProfileArn.Malformed": Rule(
        "fail", "that is no instance profile", "correct instance_profile"
    ),
    "ClientException": Rule("fail", "AWS Batch refuses", "correct the settings of the fleet"),
}
"""Every code that is known; the rest is judged by its HTTP status."""


def rule_for(code: str, status: int = 400) -> Rule:
    """What ``code`` means. Unknown ones fail, unless the service itself is at fault (5xx)."""
    if code in RULES:
        return RULES[code]
    if code.startswith("Insufficient"):
        return _CAPACITY
    if code.endswith(("LimitExceeded", "CountExceeded", "QuotaExceeded", "QuotaExceededException")):
        return Rule("next", "a quota of the account is used up", _QUOTA)
    if status >= 500:
        return _TROUBLE
    if "Throttl" in code:
        return _THROTTLED
    return Rule("fail", f"refused with {code or 'no code'}", "see AWS's message")


def as_error(doing: str, code: str, message: str, status: int = 400) -> SavedWorkerError:
    """The error to raise when ``doing`` ended with ``code``: NoCapacity, Temporary or Refused."""
    rule = rule_for(code, status)
    text = " ".join(f"{doing}: {rule.words} ({code or 'no code'}: {message})".split()).rstrip(".")
    if rule.meaning == "next":
        return NoCapacity(text, rule.fix)
    if rule.meaning == "fail":
        return Refused(text, rule.fix)
    return Temporary(text, retry_after=5.0, fix=rule.fix)


def worst(errors: list[tuple[str, str]], doing: str) -> SavedWorkerError:
    """One error for several ``(code, message)`` of one request of which nothing came: capacity, else waiting, else failing.

    One place without capacity is reason enough to try again: what is wrong with the others shows in the message.
    """
    ranked = sorted(
        dict.fromkeys(errors),
        key=lambda e: ("next", "throttled", "wait", "fail").index(rule_for(e[0]).meaning),
    )
    if not ranked:
        return NoCapacity(f"{doing}: AWS gave no instance and no reason")
    code, message = ranked[0]
    others = sorted({c for c, _ in ranked[1:]} - {code})
    return as_error(doing, code, message + (f"; elsewhere {', '.join(others)}" if others else ""))
