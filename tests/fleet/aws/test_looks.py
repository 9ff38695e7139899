"""Many workers are watched with few requests, by any number of threads, and nobody acts on what was changed meanwhile."""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence

import pytest

from savedworker.fleet.aws.looks import Looks
from savedworker.fleet.ec2 import Ec2Fleet
from savedworker.model.decisions import InstanceView
from savedworker.model.errors import Refused, Temporary
from tests.fleet.aws.conftest import Cloud, request


class Source:
    """What is asked, and when."""

    def __init__(self) -> None:
        self.asked: list[list[str]] = []
        self.now = 0.0
        self.trouble: list[Exception] = []

    def look(self, launches: Sequence[str]) -> Mapping[str, InstanceView]:
        self.asked.append(sorted(launches))
        if self.trouble:
            raise self.trouble.pop()
        return {x: InstanceView("running", f"i-{len(self.asked)}") for x in launches}

    def looks(self) -> Looks:
        return Looks(self.look, every=5.0, clock=lambda: self.now)


def test_what_is_known_is_not_asked_for_again_for_a_while_and_then_all_together():
    source = Source()
    looks = source.looks()
    assert looks(["a"])["a"].instance == "i-1"
    assert looks(["a"])["a"].instance == "i-1"
    assert looks(["a", "b"])["b"].instance == "i-2"  # a new one is looked for at once, and alone
    source.now = 5.0
    assert looks(["a"])["a"].instance == "i-3"
    assert source.asked == [["a"], ["b"], ["a", "b"]]


def test_what_nobody_asks_for_is_left_out():
    source = Source()
    looks = source.looks()
    looks(["a", "b"])
    source.now = 61.0
    looks(["b"])
    assert source.asked[-1] == ["b"]


def test_what_was_done_something_to_is_looked_at_anew():
    source = Source()
    looks = source.looks()
    looks(["a", "b"])
    looks.forget("a")
    looks.forget("never heard of")
    assert looks(["a", "b"])["a"].instance == "i-2"
    assert source.asked == [["a", "b"], ["a"]]


def test_a_failure_is_told_and_not_remembered():
    source = Source()
    looks = source.looks()
    source.trouble = [Temporary("later")]
    with pytest.raises(Temporary):
        looks(["a"])
    assert looks(["a"])["a"].state == "running"


def test_a_permission_that_is_missing_says_nothing_of_instances():
    source = Source()
    source.trouble = [Refused("not permitted", "permit it")]
    with pytest.raises(Temporary, match=r"not permitted\. Fix: permit it"):
        source.looks()(["a"])


def test_threads_that_come_meanwhile_share_one_look():
    source = Source()
    looks = source.looks()
    launches = [f"l-{n}" for n in range(40)]
    looks(launches)
    source.now = 5.0
    threads = [threading.Thread(target=looks, args=([x],)) for x in launches]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(source.asked) == 2


def test_a_fleet_sees_what_it_did_itself_at_once(cloud: Cloud):
    slow = Ec2Fleet(
        "spot", cloud.ec2_fleet(instance_types=["m5.large"]).settings, cloud.aws, look_every=3600.0
    )
    assert slow.describe(["l-1"])["l-1"].state == "unknown"
    instance = slow.launch(request()).instance
    assert slow.describe(["l-1"])["l-1"].state == "running"
    asked = len(cloud.made("describe_instances"))
    slow.describe(["l-1"])
    assert len(cloud.made("describe_instances")) == asked
    slow.terminate("l-1")
    cloud.end_instance(instance, "Client.UserInitiatedShutdown")
    assert slow.describe(["l-1"])["l-1"].state == "ended"
