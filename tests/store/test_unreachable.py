"""A store that is away, silent, wrong or forbidding says so in time, and lost answers are not lost writes."""

from __future__ import annotations

import socket
import uuid
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import obstore
import pytest

from savedworker.model.errors import AlreadyExists, Conflict, Fatal, NotFound, Refused, Unreachable
from savedworker.store import Store, open_store
from savedworker.store.objects import explain
from tests.timing import within

TIMEOUT = 1.2
SLACK = 0.8
"""Seconds that a busy test machine may add."""

CALLS: dict[str, Callable[[Store], object]] = {
    "get": lambda store: store.get("a"),
    "head": lambda store: store.head("a"),
    "put": lambda store: store.put("a", b"1"),
    "create": lambda store: store.create("a", b"1"),
    "swap": lambda store: store.swap("a", b"1", None),
    "list": lambda store: list(store.list("a")),
    "list_dirs": lambda store: store.list_dirs("a"),
    "delete": lambda store: store.delete(["a"]),
    "get_stream": lambda store: list(store.get_stream("a")),
    "ensure": lambda store: store.ensure(),
}


def unique() -> bytes:
    return uuid.uuid4().hex.encode()


@pytest.fixture
def silent(s3_endpoint: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[Store]:
    """A store at an address that takes connections and never answers."""
    with socket.create_server(("127.0.0.1", 0), backlog=128) as server:
        monkeypatch.setenv("AWS_ENDPOINT_URL_S3", f"http://127.0.0.1:{server.getsockname()[1]}")
        yield open_store("s3://bucket/p", timeout=TIMEOUT)


@pytest.fixture
def closed(s3_endpoint: str, monkeypatch: pytest.MonkeyPatch) -> Store:
    """A store at an address where nobody listens."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    monkeypatch.setenv("AWS_ENDPOINT_URL_S3", f"http://127.0.0.1:{port}")
    return open_store("s3://bucket/p", timeout=TIMEOUT)


@pytest.mark.parametrize("call", CALLS)
@pytest.mark.parametrize("kind", ["silent", "closed"])
def test_an_unreachable_store_fails_within_its_timeout(
    kind: str, call: str, request: pytest.FixtureRequest
) -> None:
    store = request.getfixturevalue(kind)

    def fails() -> None:
        with pytest.raises(Unreachable) as caught:
            CALLS[call](store)
        assert "s3://bucket/p" in str(caught.value)
        assert len(str(caught.value)) < 400

    within(TIMEOUT + SLACK, fails)


def test_a_stalled_bulk_transfer_fails_within_twice_the_timeout(silent: Store) -> None:
    def stalls() -> None:
        with pytest.raises(Unreachable):
            silent.put("a", bytes(3 << 20))
        with pytest.raises(Unreachable):
            silent.put_stream("a", [bytes(3 << 20)])

    within(2 * (2 * TIMEOUT) + SLACK, stalls)


def test_a_host_that_does_not_exist_is_unreachable(s3_endpoint: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://no-such-host.invalid:9000")
    with pytest.raises(Unreachable):
        open_store("s3://bucket/p", timeout=TIMEOUT).get("a")


def test_a_failing_store_is_unreachable_not_a_wrong_answer(proxied: Store, proxy) -> None:  # type: ignore[no-untyped-def]
    proxy.fault = lambda method, path: "before-500"
    store = open_store(proxied.url, timeout=TIMEOUT)

    def fails(call: Callable[[Store], object]) -> None:
        with pytest.raises(Unreachable):
            call(store)

    for call in CALLS.values():
        within(TIMEOUT + SLACK, partial(fails, call))


def test_a_store_that_fails_for_a_moment_is_asked_again(proxied: Store, proxy) -> None:  # type: ignore[no-untyped-def]
    for method, call in [
        ("PUT", "put"),
        ("GET", "get"),
        ("GET", "list"),
        ("POST", "delete"),
        ("HEAD", "head"),
    ]:
        for how in ("before-500", "after-500"):
            proxy.fail_first(method, how, times=2)
            CALLS[call](proxied)
            proxied.put("a", b"1")


@pytest.mark.parametrize("how", ["before-500", "before-drop", "after-500", "after-drop"])
def test_a_create_whose_answer_was_lost_succeeds_once(proxied: Store, proxy, how: str) -> None:  # type: ignore[no-untyped-def]
    data = unique()
    proxy.fail_first("PUT", how, times=2)
    proxied.create("a", data)
    assert proxied.get("a").data == data
    proxy.fail_first("PUT", how, times=2)
    with pytest.raises(AlreadyExists):
        proxied.create("a", unique())
    assert proxied.get("a").data == data


@pytest.mark.parametrize("how", ["before-500", "before-drop", "after-500", "after-drop"])
def test_a_swap_whose_answer_was_lost_succeeds_once(proxied: Store, proxy, how: str) -> None:  # type: ignore[no-untyped-def]
    first = proxied.swap("a", unique(), None)
    data = unique()
    proxy.fail_first("PUT", how)
    second = proxied.swap("a", data, first)
    found = proxied.get("a")
    assert (found.data, found.version) == (data, second)
    proxy.fail_first("PUT", how)
    with pytest.raises(Conflict):
        proxied.swap("a", unique(), first)
    proxied.swap("a", unique(), second)


def test_a_swap_that_lost_its_answer_and_the_race_is_a_conflict(proxied: Store, proxy) -> None:  # type: ignore[no-untyped-def]
    first = proxied.swap("a", unique(), None)
    theirs = unique()

    def fault(method: str, path: str) -> str:
        if method != "PUT":
            return ""
        proxy.fault = lambda method, path: ""
        proxied.swap("a", theirs, first)
        return "before-drop"

    proxy.fault = fault
    with pytest.raises(Conflict):
        proxied.swap("a", unique(), first)
    assert proxied.get("a").data == theirs


def test_a_swap_that_stays_open_is_unreachable(proxied: Store, proxy) -> None:  # type: ignore[no-untyped-def]
    first = proxied.swap("a", unique(), None)
    store = open_store(proxied.url, timeout=TIMEOUT)
    proxy.fault = lambda method, path: "after-drop"

    def fails() -> None:
        with pytest.raises(Unreachable):
            store.swap("a", unique(), first)

    within(TIMEOUT + SLACK, fails)


def test_equal_bytes_of_somebody_else_are_not_taken_for_ours_without_a_doubt(proxied: Store) -> None:
    proxied.create("a", b"same")
    with pytest.raises(AlreadyExists):
        proxied.create("a", b"same")
    version = proxied.get("a").version
    proxied.swap("a", b"other", version)
    with pytest.raises(Conflict):
        proxied.swap("a", b"other", version)


def test_a_bucket_that_does_not_exist_is_named(s3_endpoint: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_ENDPOINT_URL", s3_endpoint)
    store = open_store("s3://no-such-bucket/p", timeout=TIMEOUT)
    for call in ("get", "put", "create", "swap", "list", "ensure", "delete"):
        with pytest.raises(Refused, match=r"no-such-bucket.*does not exist.*Fix"):
            CALLS[call](store)


def test_missing_rights_are_named_and_not_taken_for_an_outage() -> None:
    error = obstore.exceptions.PermissionDeniedError(
        "status code: 403: <Error><Code>AccessDenied</Code></Error>"
    )
    told = explain(error, "s3://b: put a")
    assert isinstance(told, Fatal)
    assert "AccessDenied" in str(told)


@pytest.mark.parametrize(
    ("text", "kind"),
    [
        (
            "Server returned non-2xx status code: 503 Slow Down: <Error><Code>SlowDown</Code></Error>",
            Unreachable,
        ),
        ("Server returned non-2xx status code: 429 Too Many Requests: ", Unreachable),
        (
            "Server returned non-2xx status code: 400 Bad Request: <Error><Code>ExpiredToken</Code></Error>",
            Fatal,
        ),
        ("Server returned non-2xx status code: 301 Moved Permanently: ", Refused),
        ("status code: 404 Not Found: <Error><Code>NoSuchBucket</Code></Error>", Refused),
        ("Error performing PUT http://169.254.169.254/latest/api/token in 1.1s", Fatal),
        ('HTTP error: error sending request\n kind: Connect,\n message: "Connection refused"', Unreachable),
        ("something nobody has seen yet", Unreachable),
    ],
)
def test_every_known_answer_of_a_store_has_its_own_meaning(text: str, kind: type[Exception]) -> None:
    assert type(explain(obstore.exceptions.GenericError(text), "s3://b: get a")) is kind


@pytest.mark.parametrize(
    "url",
    [
        "", "ftp://host/x", "s3://", "s3:///prefix", "s3:bucket", "gs://", "file://relative/x", "file:relative", "http://h/b",
        "s3://b/a?x=1", "s3://b/a#x", "s3://user:pw@b/a", "s3://b/../a", "s3://b/a//b", "s3://b/a b", "s3://b ad/a", "gs://b\xfcro/a", "/tmp/a\0b",
    ],
)  # fmt: skip
def test_a_wrong_url_is_refused_with_a_fix(url: str) -> None:
    with pytest.raises(Refused) as caught:
        open_store(url)
    assert caught.value.fix


def test_all_forms_of_a_store_are_opened(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for url in (
        "store",
        "./store",
        str(tmp_path / "store"),
        (tmp_path / "store").as_uri(),
        f"file://localhost{tmp_path}/store",
    ):
        assert open_store(url).url == (tmp_path / "store").as_uri()
    assert open_store(str(tmp_path / "with space")).url == open_store((tmp_path / "with space").as_uri()).url
    assert open_store("s3://bucket/a/b/").url == "s3://bucket/a/b"
    assert open_store("s3://bucket").url == "s3://bucket"
    assert open_store("gs://bucket/a", options={"skip_signature": True}).url == "gs://bucket/a"


def test_options_that_obstore_does_not_know_are_refused() -> None:
    with pytest.raises(Refused):
        open_store("s3://bucket/a", options={"no_such_option": 1})


def test_the_endpoint_for_s3_comes_before_the_general_one(
    s3_endpoint: str, s3_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:1")
    monkeypatch.setenv("AWS_ENDPOINT_URL_S3", s3_endpoint)
    with pytest.raises(NotFound):
        open_store(s3_url, timeout=TIMEOUT).get("a")


def test_a_directory_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("in the way")
    for place in (tmp_path / "file" / "store", tmp_path / "file"):
        with pytest.raises(Refused, match="not a directory"):
            open_store(str(place)).ensure()
