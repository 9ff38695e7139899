"""Inputs are there when the worker begins, outputs when it has succeeded: complete, of one end, whoever is killed in between."""

from __future__ import annotations

import os
from pathlib import Path

import boto3
import pytest

from savedworker.model.record import Reason, State
from savedworker.model.spec import Input, Output
from tests.faults.s3 import BUCKET, object_store
from tests.runtime.gate import PRELUDE, Gate
from tests.runtime.world import World

PROGRAM = (
    PRELUDE
    + """
import secrets
words = sorted((f, open("/in/" + f).read()) for f in os.listdir("/in"))
nonce = secrets.token_hex(8)
os.makedirs("/out/sub")
open("/out/nonce", "w").write(nonce)
say("began", nonce, words)
wait_for("end")
for number in range(3):
    open(f"/out/sub/{number}", "w").write(nonce)
open("/result", "w").write(repr(words))
"""
)


class Story:
    """A worker with a folder of inputs, a folder of outputs and a single one."""

    def __init__(self, world: World, folder: Path) -> None:
        self.world, self.folder = world, folder
        self.gate = Gate(folder / "gate")
        (folder / "in").mkdir()
        for name in ("a", "b"):
            (folder / "in" / name).write_text(name.upper())
        (folder / "to").mkdir()
        (folder / "to/other").write_text("of somebody else")
        self.worker = ""

    def submit(self) -> None:
        self.worker = self.world.python(
            PROGRAM,
            volumes=(self.gate.volume,),
            inputs=(Input(url=f"file://{self.folder}/in/", path="/in"),),
            outputs=(
                Output(path="/out", url=f"file://{self.folder}/to/"),
                Output(path="/result", url=f"file://{self.folder}/result"),
            ),
        )

    def nonce(self) -> str:
        return self.world.until_output(self.worker, "began").split()[1]

    def events(self, name: str) -> int:
        return len([e for e in self.world.report(self.worker).timeline if e.event == name])

    def is_published(self) -> None:
        """All of it, of one end, and nothing of ours beside it."""
        record = self.world.until_settled(self.worker)
        assert record.state is State.SUCCEEDED, self.world.story(self.worker)
        nonces = {line.split()[1] for line in self.world.output(self.worker).splitlines()}
        seen = {
            str(x.relative_to(self.folder)): x.read_text()
            for x in (self.folder / "to").rglob("*")
            if x.is_file()
        }
        (nonce,) = {text for name, text in seen.items() if name != "to/other"}
        assert nonce in nonces
        assert set(seen) == {"to/other", "to/nonce", "to/sub/0", "to/sub/1", "to/sub/2"}
        assert (self.folder / "result").read_text() == "[('a', 'A'), ('b', 'B')]"
        assert not list(self.folder.rglob(".savedworker-*"))
        assert self.events("outputs_published") == 1


@pytest.fixture
def story(world: World, tmp_path: Path) -> Story:
    return Story(world, tmp_path)


@pytest.fixture
def crash(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder in which a file arms a crash point."""
    folder = tmp_path / "crash"
    (folder / "seen").mkdir(parents=True)
    monkeypatch.setenv("SAVEDWORKER_CRASH", str(folder))
    return folder


def test_they_travel_with_the_worker(story: Story) -> None:
    story.submit()
    nonce = story.nonce()
    for file in (story.folder / "in").iterdir():
        file.unlink()  # nobody fetches them twice
    story.world.preempt(story.worker, notice=20)
    assert sorted(x.name for x in (story.folder / "to").iterdir()) == ["other"]
    story.gate.open("end")
    story.is_published()
    assert (story.folder / "to/sub/0").read_text() == nonce
    assert story.world.record(story.worker).migrations == 1
    assert story.events("inputs_fetched") == 1


AGENT_DIES = ["inputs.found", "inputs.fetched", "outputs.planned", "outputs.staged", "outputs.visible.file", "outputs.visible.file@3", "outputs.committed", "outputs.published"]  # fmt: skip
IN_CI = {"inputs.fetched", "outputs.visible.file@3"}


@pytest.mark.parametrize(
    "point", [x if x in IN_CI else pytest.param(x, marks=pytest.mark.sweep) for x in AGENT_DIES]
)
def test_an_agent_that_dies_in_between_is_no_matter(story: Story, crash: Path, point: str) -> None:
    name, _, nth = point.partition("@")
    (crash / name).write_text(f"@{nth}" if nth else "")
    story.gate.open("end")
    story.submit()
    story.is_published()
    assert (crash / f"{name}.hit").exists()


@pytest.mark.parametrize(
    "point", ["outputs.staged", pytest.param("outputs.visible.file", marks=pytest.mark.sweep)]
)
def test_an_instance_that_is_lost_in_between_leaves_the_rest_to_the_next(
    story: Story, crash: Path, point: str
) -> None:
    story.submit()
    nonce = story.nonce()
    story.world.checkpoint(story.worker)
    (crash / point).write_text("=hang:600")
    story.gate.open("end")
    lease = story.world.record(story.worker).lease
    assert lease is not None
    story.world.until(story.worker, lambda r: (crash / f"{point}.hit").exists(), f"get to {point}")
    story.world.fleet.preempt(lease.launch, None)
    story.is_published()
    record = story.world.record(story.worker)
    assert (record.migrations, record.cold_starts) == (1, 0)
    assert (story.folder / "to/nonce").read_text() == nonce


@pytest.mark.sweep
@pytest.mark.parametrize("point", ["outputs.staged", "outputs.visible.large", "outputs.visible.small"])
def test_on_an_object_store_too(world: World, crash: Path, point: str) -> None:
    with object_store() as url:
        client = boto3.client("s3", endpoint_url=os.environ["AWS_ENDPOINT_URL"])
        client.put_object(Bucket=BUCKET, Key="in/a", Body=b"A")
        (crash / point).write_text("")
        program = "import os; os.mkdir('/out'); open('/out/large', 'wb').write(bytes(9 << 20)); open('/out/small', 'w').write(open('/a').read())"
        worker = world.python(
            program,
            inputs=(Input(url=f"{url}/in/a", path="/a"),),
            outputs=(Output(path="/out", url=f"{url}/out/"),),
        )
        assert world.until_settled(worker).state is State.SUCCEEDED, world.story(worker)
        assert (crash / f"{point}.hit").exists()
        assert client.get_object(Bucket=BUCKET, Key="out/small")["Body"].read() == b"A"
        assert client.head_object(Bucket=BUCKET, Key="out/large")["ContentLength"] == 9 << 20
        client.close()


def test_a_worker_that_fails_publishes_nothing(world: World, tmp_path: Path) -> None:
    worker = world.python(
        "open('/x', 'w').write('1'); raise SystemExit(3)",
        outputs=(Output(path="/x", url=f"file://{tmp_path}/x"),),
    )
    record = world.until_settled(worker)
    assert (record.reason, record.exit_code) == (Reason.EXIT, 3)
    assert not (tmp_path / "x").exists()


def test_an_input_or_output_that_is_not_there_is_said(world: World, tmp_path: Path) -> None:
    wrong = world.python("pass", inputs=(Input(url=f"file://{tmp_path}/none", path="/in"),))
    missing = world.python("pass", outputs=(Output(path="/none", url=f"file://{tmp_path}/x"),))
    record = world.until_settled(wrong)
    assert (record.reason, record.exit_code) == (Reason.SPEC_ERROR, None)
    assert f"input file://{tmp_path}/none" in record.detail
    record = world.until_settled(missing)
    assert (record.reason, record.exit_code) == (Reason.SPEC_ERROR, 0)
    assert record.detail.startswith("it succeeded, but output /none is not there")


def test_a_cancel_while_an_input_is_fetched_ends_it(story: Story, crash: Path) -> None:
    (crash / "inputs.found").write_text("=hang:100")
    story.submit()
    story.world.until(story.worker, lambda r: (crash / "inputs.found.hit").exists(), "fetch")
    story.world.client.cancel(story.worker, "nobody wants it")
    (crash / "inputs.found.hit").unlink()  # it goes on
    record = story.world.until_settled(story.worker)
    assert record.state is State.CANCELLED
    assert [i.end_reason for i in record.incarnations] == ["cancelled"]
    assert story.world.output(story.worker) == ""
