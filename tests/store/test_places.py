"""Places outside of our store: what is there is found and read whatever it is called, and what is written is seen whole or not at all."""

from __future__ import annotations

import os
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import boto3
import pytest

from savedworker.model.errors import Fatal, NotFound, Refused, Unreachable
from savedworker.store import places
from savedworker.store.places import Item, Outgoing, open_place
from tests.store.conftest import BUCKET


class Outside:
    """A folder or a prefix, seen without our code."""

    def __init__(self, url: str, client: Any) -> None:
        self.url, self.client = url, client
        self.prefix = url.split("/", 3)[3]

    def put(self, name: str, content: bytes) -> None:
        if self.client is not None:
            self.client.put_object(Bucket=BUCKET, Key=f"{self.prefix}/{name}", Body=content)
            return
        file = Path("/", self.prefix, name)
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_bytes(content)

    def all(self) -> dict[str, bytes]:
        """Every visible file, also above what was written."""
        if self.client is None:
            root = Path("/", self.prefix)
            return {str(x.relative_to(root)): x.read_bytes() for x in root.rglob("*") if x.is_file()}
        found = self.client.list_objects_v2(Bucket=BUCKET, Prefix=self.prefix + "/").get("Contents", [])
        keys = [x["Key"] for x in found]
        return {
            key.removeprefix(self.prefix + "/"): self.client.get_object(Bucket=BUCKET, Key=key)["Body"].read()
            for key in keys
        }


@pytest.fixture(params=["file", "s3"])
def outside(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Outside]:
    if request.param == "file":
        (tmp_path / "outside").mkdir()
        yield Outside(f"file://{tmp_path}/outside", None)
        return
    endpoint = request.getfixturevalue("s3_endpoint")
    request.getfixturevalue("monkeypatch").setenv("AWS_ENDPOINT_URL", endpoint)
    client = boto3.client("s3", endpoint_url=endpoint)
    yield Outside(f"s3://{BUCKET}/{uuid.uuid4().hex}", client)
    client.close()


def quiet() -> None:
    """Nothing ends the transfer."""


def files(tmp_path: Path, contents: dict[str, bytes]) -> list[Outgoing]:
    made = []
    for number, (name, content) in enumerate(contents.items()):
        file = tmp_path / f"source-{number}"
        file.write_bytes(content)
        made.append(Outgoing(name, file, len(content)))
    return made


def read(url: str) -> dict[str, bytes]:
    place = open_place(url, "w")
    return {item.name: b"".join(place.read(item)) for item in place.find()}


LARGE = os.urandom(9 << 20)
NAMES = {"a": b"1", ".hidden": b"2", "deep/er/b c.txt": b"", "ü#?%20+&.x": b"4", "large": LARGE}


def test_all_names_come_back_with_their_content(outside: Outside) -> None:
    for name, content in NAMES.items():
        outside.put(name, content)
    assert read(outside.url + "/") == NAMES
    assert read(outside.url + "/ü#?x".replace("#?x", "#?%20+&.x").replace("%20", "%2520" if outside.client is None else "%20")) == {"": b"4"}  # fmt: skip
    assert open_place(outside.url + "/a", "w").find() == [Item("", 1)]


def test_all_names_go_out_with_their_content(outside: Outside, tmp_path: Path) -> None:
    place = open_place(outside.url + "/to/", "w")
    place.stage(files(tmp_path, NAMES), quiet)
    assert {k: v for k, v in outside.all().items() if not k.startswith(".savedworker-w")} == {}
    place.commit(quiet)
    assert outside.all() == {f"to/{name}": content for name, content in NAMES.items()}


def test_what_is_there_is_replaced_or_kept_and_nothing_of_ours_is_left(
    outside: Outside, tmp_path: Path
) -> None:
    outside.put("to/a", b"old")
    outside.put("to/other", b"kept")
    for _ in range(2):  # and once more, as after a crash
        place = open_place(outside.url + "/to/", "w")
        place.stage(files(tmp_path, {"a": b"new", "d/b": b"b"}), quiet)
        place.commit(quiet)
    single = open_place(outside.url + "/one", "w")
    single.stage(files(tmp_path, {"": b"1"}), quiet)
    single.commit(quiet)
    assert outside.all() == {"to/a": b"new", "to/d/b": b"b", "to/other": b"kept", "one": b"1"}


def test_what_was_staged_and_abandoned_or_left_by_a_crash_is_not_seen(
    outside: Outside, tmp_path: Path
) -> None:
    contents = files(tmp_path, {"a": b"1", "large": LARGE})
    first = open_place(outside.url + "/to/", "w")
    first.stage(contents, quiet)
    first.abandon()
    assert outside.all() == {}
    open_place(outside.url + "/to/", "w").stage(contents, quiet)  # and dies
    last = open_place(outside.url + "/to/", "w")
    last.stage(contents, quiet)
    last.commit(quiet)
    assert outside.all() == {"to/a": b"1", "to/large": LARGE}


class Stop(Exception):
    """Raised by whoever does not want it any more."""


def test_a_transfer_that_is_not_wanted_any_more_ends_and_shows_nothing(
    outside: Outside, tmp_path: Path
) -> None:
    def stop() -> None:
        raise Stop

    place = open_place(outside.url + "/to/", "w")
    with pytest.raises(Stop):
        place.stage(files(tmp_path, {"large": LARGE}), stop)
    place.stage(files(tmp_path, {"a": b"1", "large": LARGE}), quiet)
    with pytest.raises(Stop):
        place.commit(stop)
    place.abandon()
    assert outside.all() == {}


def test_what_is_not_there_is_said_and_a_folder_without_its_slash_is_explained(outside: Outside) -> None:
    outside.put("to/a", b"1")
    for url in ("/nothing", "/nothing/", "/to/b"):
        with pytest.raises(NotFound):
            open_place(outside.url + url, "w").find()
    with pytest.raises(NotFound):
        open_place(outside.url + "/to", "w").find()


def test_empty_objects_that_stand_for_folders_are_no_files(
    s3_endpoint: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AWS_ENDPOINT_URL", s3_endpoint)
    client = boto3.client("s3", endpoint_url=s3_endpoint)
    prefix = uuid.uuid4().hex
    for key in ("/", "/sub/", "/sub/a", "/empty"):
        client.put_object(Bucket=BUCKET, Key=prefix + key, Body=b"x" if key.endswith("a") else b"")
    client.close()
    found = open_place(f"s3://{BUCKET}/{prefix}/", "w").find()
    assert sorted(item.name for item in found) == ["empty", "sub/a"]


def test_large_files_are_held_back_until_all_are_there(
    s3_endpoint: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """The last request of each is all that is left for the end: what is read then was uploaded before."""
    monkeypatch.setenv("AWS_ENDPOINT_URL", s3_endpoint)
    client = boto3.client("s3", endpoint_url=s3_endpoint)
    prefix = uuid.uuid4().hex
    place = open_place(f"s3://{BUCKET}/{prefix}/", "w")
    outgoing = files(tmp_path, {"one": LARGE, "two": LARGE[::-1]})
    place.stage(outgoing, quiet)
    assert "Contents" not in client.list_objects_v2(Bucket=BUCKET, Prefix=prefix)
    for each in outgoing:
        each.file.unlink()
    place.commit(quiet)
    assert client.get_object(Bucket=BUCKET, Key=f"{prefix}/two")["Body"].read() == LARGE[::-1]
    client.close()


def test_a_bucket_that_is_not_there_and_a_store_that_is_away(
    s3_endpoint: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AWS_ENDPOINT_URL", s3_endpoint)
    with pytest.raises(Refused, match="bucket does not exist"):
        open_place("s3://no-such-bucket-here/x/", "w").find()
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:1")
    with pytest.raises(Unreachable):
        open_place(f"s3://{BUCKET}/x/", "w", timeout=1.0).find()


def test_a_folder_that_cannot_be_written_is_said(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"")
    place = open_place(f"file://{tmp_path}/file/below/x", "w")
    with pytest.raises(Fatal, match="check rights and space"):
        place.stage(files(tmp_path, {"": b"1"}), quiet)
    assert places.HELD_LEAST >= 5 << 20  # S3 takes no smaller part
