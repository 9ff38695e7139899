"""An agent begins nothing with a worker that it cannot open or must not trust; keys stay where no worker sees them."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from savedworker.agent import main
from savedworker.agent.config import AgentConfig, hiding_places
from savedworker.checkpoint.container import first_runtime
from savedworker.model import events as ev
from savedworker.model.record import WorkerRecord
from savedworker.model.spec import Volume, WorkerSpec
from savedworker.store.backend import open_store
from savedworker.store.documents import dump
from savedworker.store.sealing import NO_KEY
from savedworker.store.worker import WorkerStore
from tests.hostile.material import AT, MANIFEST
from tests.store.keys import key, key_file, sealing, text

SPEC = WorkerSpec(id="w", command=("true",))


def config(tmp_path: Path) -> AgentConfig:
    return AgentConfig(
        store=(tmp_path / "store").as_uri(),
        worker="w",
        launch="l",
        fleet="other",
        instance="i",
        zone=None,
        state_dir=tmp_path / "state",
    )


@pytest.fixture
def worker(tmp_path: Path) -> WorkerStore:
    """A sealed worker with one launch."""
    made = WorkerStore(open_store(str(tmp_path / "store"), sealing=sealing(key())), "w")
    made.store.ensure()
    made.create_spec(SPEC)
    made.create_record(WorkerRecord(id="w", created_at=AT))
    made.record_event(ev.LaunchRequested(at=AT, launch="l"))
    return made


@pytest.mark.parametrize(
    ("environ", "spec", "why"),
    [
        ({}, None, "no key is configured here"),
        ({"SAVEDWORKER_KEY": text(key(2))}, None, "is sealed with key"),
        ({"SAVEDWORKER_KEY": text(key())}, dump(SPEC), "made without a key"),
        ({"SAVEDWORKER_KEY": text(key())}, b"rubbish", "made without a key"),
        ({"SAVEDWORKER_KEY": text(key()), "SAVEDWORKER_ALLOW_PLAIN": "1"}, b"rubbish", "not a JSON document"),
        (
            {"SAVEDWORKER_KEY": text(key()), "SAVEDWORKER_MEMORY_BUDGET": "1MiB"},
            None,
            "SAVEDWORKER_MEMORY_BUDGET: a memory budget of 1.0 MiB is too small",
        ),
    ],
)
def test_an_agent_that_must_not_begin_leaves_and_says_why(
    worker: WorkerStore,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    environ: dict[str, str],
    spec: bytes | None,
    why: str,
) -> None:
    monkeypatch.delenv("SAVEDWORKER_KEY", raising=False)
    for name, value in environ.items():
        monkeypatch.setenv(name, value)
    if spec is not None:
        worker.store.put("workers/w/spec.json", spec)
    assert main.run(config(tmp_path)) == main.DONE
    launch = worker.load_record().record.launch("l")
    assert launch is not None
    assert (launch.state, launch.outcome) == ("ending", "failed")
    assert why in launch.detail
    assert "SAVEDWORKER_KEY" not in os.environ  # what the agent starts does not inherit it


def test_a_key_file_in_a_folder_of_its_own_is_hidden_with_it_and_elsewhere_alone(tmp_path: Path) -> None:
    own, shared = tmp_path / "own", tmp_path / "shared"
    for folder in (own, shared):
        folder.mkdir()
        key_file(folder / "key", key())
    key_file(own / "key.old", key(2))
    assert hiding_places([own / "key"]) == (own, own / "key")
    (shared / "readme").write_text("for all")
    assert hiding_places([shared / "key"]) == (shared / "key",)
    assert hiding_places([tmp_path / "not" / "there"]) == (tmp_path / "not" / "there",)


def test_the_key_file_is_masked_in_a_worker_on_the_hosts_root(tmp_path: Path) -> None:
    file = key_file(tmp_path / "key", key())
    (tmp_path / "readme").write_text("for all")
    assert str(file) in first_runtime(SPEC, hiding_places([file])).masked
    beside = SPEC.model_copy(update={"volumes": (Volume(source="/srv", target=f"{tmp_path}/data"),)})
    assert str(file) in first_runtime(beside, hiding_places([file])).masked
    other_root = SPEC.model_copy(update={"image": "/srv/root"})
    assert first_runtime(other_root, hiding_places([file])).masked == ()


def test_an_instance_whose_key_file_the_worker_could_read_does_not_restore_it(
    worker: WorkerStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = key_file(tmp_path / "key", key())
    monkeypatch.setenv("SAVEDWORKER_KEY_FILE", str(file))
    agent = main._Agent(config(tmp_path))

    def masking(*folders: Path) -> str:
        runtime = MANIFEST.runtime.model_copy(update={"masked": tuple(map(str, folders))})
        return agent._exposed_key(SPEC, MANIFEST.model_copy(update={"runtime": runtime}))

    assert f"could read the key file {file}" in masking(tmp_path / "elsewhere")
    assert masking(file) == ""
    assert masking(tmp_path) == ""


def test_no_worker_is_given_the_key(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="the key of the store, which no worker may have"):
        WorkerSpec(id="w", command=("true",), env={"SAVEDWORKER_KEY": "x"})


def test_a_plain_store_goes_on_as_ever(tmp_path: Path) -> None:
    assert NO_KEY.environment() == {}
    assert open_store(str(tmp_path)).sealing == NO_KEY
