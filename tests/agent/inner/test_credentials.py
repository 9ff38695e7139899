"""Credentials for the worker: from wherever the instance has them, in the protocol that SDKs speak, and only for who holds the lease.

The metadata service is the local host's; ECS's credentials service is a stand-in of a few lines, after its documentation.
"""

from __future__ import annotations

import json
import socket
import threading
from collections.abc import Iterator
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from http import HTTPStatus
from pathlib import Path

import pytest
from botocore.credentials import ContainerProvider, RefreshableCredentials
from botocore.utils import ContainerMetadataFetcher

from savedworker.agent.inner import credentials as module
from savedworker.agent.inner import sources as sources_module
from savedworker.agent.inner.credentials import CredentialsService
from savedworker.agent.inner.sources import (
    ContainerSource,
    Credentials,
    EnvironmentSource,
    InstanceSource,
    Source,
    Unavailable,
    first,
    sources,
)
from savedworker.agent.inner.web import Answer, Request, WebServer
from savedworker.checkpoint.network import CREDENTIALS_PATH
from savedworker.fleet.local.metadata import Metadata, MetadataServer, Role, Told

ROLE = Role("worker", "AKIAROLE", "secret", "token", 3600)


class Instance:
    """A metadata service with a role, or without one."""

    def __init__(self) -> None:
        self.role: Role | None = ROLE
        self.metadata = Metadata("i-1", "zone-a", "10.0.0.1", lambda: Told(self.role))
        self.server = MetadataServer(self.metadata, ("127.0.0.1", 0))
        self.url = f"http://127.0.0.1:{self.server.port}"


@pytest.fixture
def instance() -> Iterator[Instance]:
    made = Instance()
    yield made
    made.server.close()


class Task:
    """ECS's credentials service: one path, and a token if it wants one."""

    def __init__(self, wants: str | None = None) -> None:
        self.wants, self.asked = wants, 0
        self.listener = socket.create_server(("127.0.0.1", 0))
        self.server = WebServer(self.listener, self, "task")
        self.url = "http://{}:{}".format(*self.listener.getsockname())

    def answer(self, request: Request) -> Answer:
        self.asked += 1
        if request.headers.get("authorization") != self.wants or request.path != "/v2/credentials/abc":
            return Answer(HTTPStatus.FORBIDDEN)
        end = datetime.now(UTC) + timedelta(hours=6)
        document = {
            "AccessKeyId": "AKIATASK", "SecretAccessKey": "s", "Token": "t", "Expiration": f"{end:%Y-%m-%dT%H:%M:%SZ}",
            "RoleArn": "arn:aws:iam::123456789012:role/job",
        }  # fmt: skip
        return Answer(HTTPStatus.OK, json.dumps(document).encode())

    def close(self) -> None:
        self.server.close()
        self.listener.close()


def test_the_role_of_an_instance_by_a_session_of_imdsv2(instance: Instance) -> None:
    found = InstanceSource(instance.url).fetch()
    assert found is not None
    assert (found.access_key, found.secret_key, found.token) == ("AKIAROLE", "secret", "token")
    assert found.expires is not None
    assert timedelta(minutes=59) < found.expires - datetime.now(UTC) <= timedelta(hours=1)
    assert "secret" not in repr(found)
    instance.role = None
    with pytest.raises(Unavailable, match=r"no role\. Fix: give it an instance profile"):
        InstanceSource(instance.url).fetch()


@pytest.mark.parametrize("how", ["plain", "token", "file"])
def test_the_role_of_a_task_also_where_it_wants_a_token(how: str, tmp_path: Path) -> None:
    task = Task(None if how == "plain" else "very secret")
    environment = {"AWS_CONTAINER_CREDENTIALS_FULL_URI": f"{task.url}/v2/credentials/abc"}
    if how == "token":
        environment["AWS_CONTAINER_AUTHORIZATION_TOKEN"] = "very secret"
    if how == "file":
        (tmp_path / "token").write_text("very secret\n")
        environment["AWS_CONTAINER_AUTHORIZATION_TOKEN_FILE"] = str(tmp_path / "token")
    try:
        found = ContainerSource(environment).fetch()
        assert found is not None
        assert found.access_key == "AKIATASK"
        environment["AWS_CONTAINER_CREDENTIALS_FULL_URI"] += "x"
        with pytest.raises(Unavailable, match="answers 403"):
            ContainerSource(environment).fetch()
    finally:
        task.close()


def test_the_relative_address_of_a_task_is_at_its_fixed_host(monkeypatch: pytest.MonkeyPatch) -> None:
    task = Task()
    monkeypatch.setattr(sources_module, "CONTAINER_HOST", task.url)
    try:
        source = ContainerSource({"AWS_CONTAINER_CREDENTIALS_RELATIVE_URI": "/v2/credentials/abc"})
        assert source.fetch() is not None
    finally:
        task.close()


def test_the_order_is_that_of_the_sdks(instance: Instance) -> None:
    keys = {"AWS_ACCESS_KEY_ID": "AKIAENV", "AWS_SECRET_ACCESS_KEY": "s"}
    container = {"AWS_CONTAINER_CREDENTIALS_FULL_URI": "http://127.0.0.1:1/nobody"}
    assert first(sources(keys | container, instance.url)) == Credentials("AKIAENV", "s")
    with pytest.raises(Unavailable, match=r"127\.0\.0\.1:1/nobody cannot be reached"):
        first(sources(container, instance.url))  # meant to be used: nothing else instead
    assert first(sources({}, instance.url)).access_key == "AKIAROLE"
    assert EnvironmentSource({"AWS_ACCESS_KEY_ID": "alone"}).fetch() is None


@pytest.mark.parametrize(
    "text",
    ["", "{", "[]", "{}", '{"Code": "Failed"}', '{"AccessKeyId": 1, "SecretAccessKey": "very-secret", "Token": "", "Expiration": "2030-01-01T00:00:00Z"}',
     '{"AccessKeyId": "a", "SecretAccessKey": "very-secret", "Token": "", "Expiration": "soon"}'],
)  # fmt: skip
def test_what_cannot_be_read_is_told_without_its_text(text: str) -> None:
    with pytest.raises(Unavailable) as raised:
        sources_module.parse(text, "it")
    assert "very-secret" not in str(raised.value)


class Given:
    """A source that gives what a test puts there."""

    def __init__(self, found: Credentials | None) -> None:
        self.found, self.asked = found, 0

    def fetch(self) -> Credentials | None:
        self.asked += 1
        if self.found is None:
            raise Unavailable("gone")
        return self.found


class Served:
    """The service on loopback."""

    def __init__(self, *known: Source) -> None:
        self.allowed, self.remarks = True, list[str]()
        self.listener = socket.create_server(("127.0.0.1", 0))
        self.service = CredentialsService(known, lambda: self.allowed, self.remarks.append)
        self.service.serve({"tcp": self.listener})
        self.url = "http://{}:{}".format(*self.listener.getsockname()) + CREDENTIALS_PATH

    def get(self, path: str = CREDENTIALS_PATH, **headers: str) -> tuple[int, dict[str, str]]:
        answer = self.service.answer(Request("GET", path, headers))
        return answer.status, json.loads(answer.body)

    def close(self) -> None:
        self.service.close()
        self.listener.close()


def lasting(seconds: float, key: str = "AKIA1") -> Credentials:
    return Credentials(key, "s", "t", datetime.now(UTC) + timedelta(seconds=seconds))


def test_boto_gets_them_and_goes_on_with_those_of_the_next_instance() -> None:
    source = Given(lasting(300))
    served = Served(source)
    try:
        # The relative address would be 169.254.170.2; here a loopback one, which boto also allows.
        provider = ContainerProvider(
            {"AWS_CONTAINER_CREDENTIALS_FULL_URI": served.url},
            ContainerMetadataFetcher(sleep=lambda seconds: None),  # type: ignore[arg-type]
        )
        session = provider.load()
        assert isinstance(session, RefreshableCredentials)
        assert session.get_frozen_credentials()[:3] == ("AKIA1", "s", "t")
        source.found = lasting(7200, "AKIA2")
        assert session.get_frozen_credentials().access_key == "AKIA2"
        served.allowed = False
        source.found = lasting(7200, "AKIA3")
        assert session.get_frozen_credentials().access_key == "AKIA2"  # what it has it has
    finally:
        served.close()


def test_an_incarnation_that_does_not_hold_the_lease_gives_nothing() -> None:
    source = Given(lasting(7200))
    served = Served(source)
    try:
        served.allowed = False
        assert served.get() == (
            403,
            {"code": "Fenced", "message": "this incarnation does not hold the lease"},
        )
        assert source.asked == 0
    finally:
        served.close()


def test_nothing_else_is_answered() -> None:
    served = Served(Given(lasting(7200)))
    try:
        assert served.get("/")[0] == 404
        assert served.get("/latest/meta-data/")[0] == 404
        assert served.get(**{"x-forwarded-for": "10.0.0.1"})[0] == 403
        assert served.service.answer(Request("PUT", CREDENTIALS_PATH)).status == 405
        assert served.get(f"{CREDENTIALS_PATH}?x=1")[0] == 200
    finally:
        served.close()


def test_services_are_not_asked_more_than_once_a_minute_but_before_the_end(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    source = Given(lasting(7200))
    served = Served(source)
    try:
        assert [served.get()[0] for _ in range(3)] == [200] * 3
        assert source.asked == 1
        monkeypatch.setattr(module, "ASK_AGAIN", timedelta(0))
        source.found = lasting(600)
        assert served.get()[0] == 200
        monkeypatch.setattr(module, "ASK_AGAIN", timedelta(minutes=1))
        assert served.get()[0] == 200
        assert source.asked == 3
    finally:
        served.close()


def test_known_ones_are_given_while_they_last_and_trouble_is_told_once() -> None:
    source = Given(lasting(300, "AKIAKEPT"))
    served = Served(source)
    try:
        assert served.get()[0] == 200
        kept, source.found = source.found, None
        assert served.get()[1]["AccessKeyId"] == "AKIAKEPT"
        assert served.remarks == []
        assert kept is not None
        served.service._kept = (
            replace(kept, expires=datetime.now(UTC) + timedelta(seconds=20)),
            datetime.now(UTC),
        )
        assert [served.get()[0] for _ in range(2)] == [503, 503]
        source.found = kept
        assert [served.get()[0] for _ in range(2)] == [200, 200]
        assert served.remarks == ["gone", "there are credentials again"]
    finally:
        served.close()


def test_keys_without_an_end_are_asked_for_again_all_the_same() -> None:
    served = Served(EnvironmentSource({"AWS_ACCESS_KEY_ID": "A", "AWS_SECRET_ACCESS_KEY": "s"}))
    try:
        document = served.get()[1]
        end = datetime.fromisoformat(document["Expiration"])
        assert timedelta(minutes=29) < end - datetime.now(UTC) <= timedelta(minutes=30)
        assert document["Token"] == ""
    finally:
        served.close()


def test_a_worker_that_opens_many_connections_cannot_exhaust_the_agent(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    served = Served(Given(lasting(7200)))
    before = threading.active_count()
    kept = []
    try:
        kept = [socket.create_connection(served.listener.getsockname()) for _ in range(200)]
        with socket.create_connection(served.listener.getsockname(), timeout=10) as last:
            assert last.recv(1) == b""  # closed at once, and only then: all before it were looked at
        assert threading.active_count() - before <= 64
    finally:
        for sock in kept:
            sock.close()
        served.close()
