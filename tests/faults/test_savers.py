"""A store that fails at any stage of a checkpoint, and two savers at once: nothing half is visible, and the worker runs on."""

from __future__ import annotations

import shutil
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from savedworker.checkpoint.save import Saver
from savedworker.model.errors import AlreadyExists, NotFound, SavedWorkerError
from savedworker.model.manifest import Manifest, StreamPosition
from savedworker.store.backend import Store, open_store
from savedworker.store.chunks import ChunkStore
from savedworker.store.worker import WorkerStore
from tests.checkpoint.bench import Bench
from tests.faults.conftest import TIMEOUT
from tests.faults.proxy import Proxy, Rule, Trouble

pytestmark = pytest.mark.criu

HOLDS = """
import hashlib, os, time
data = bytearray(os.urandom(12 << 20))
with open("/srv/kept", "wb") as file:
    file.write(os.urandom(5 << 20))
first = hashlib.sha256(data).hexdigest()
while True:
    print("same", hashlib.sha256(data).hexdigest() == first, flush=True)
    time.sleep(0.05)
"""


@pytest.fixture(scope="module")
def running(store: Store) -> Iterator[Bench]:
    """One worker that all faults are done to: it has to survive each of them."""
    folder = Path(tempfile.mkdtemp(prefix="sw-bench-", dir="/var/tmp"))
    bench = Bench(folder)
    bench.chunks = WorkerStore(store, "bench").chunks
    try:
        bench.python(HOLDS)
        bench.until_output("same True\n")
        yield bench
    finally:
        bench.close()
        shutil.rmtree(folder)


def save(bench: Bench, documents: WorkerStore) -> Manifest:
    bench.taken += 1
    saved = bench.saver.save(f"1-{bench.taken}", "requested", documents.publish_manifest)
    bench.manifest = saved.manifest
    return saved.manifest


STAGES = {
    "the look at what is there": ("GET", r"list-type"),
    "the first chunk": ("PUT", "/chunks/"),
    "a later chunk": ("PUT", "/chunks/"),
    "the manifest": ("PUT", "manifest"),
}


@pytest.mark.parametrize("trouble", ["503", "slow_down", "reset", "hang", "full", "denied"])
@pytest.mark.parametrize("stage", STAGES)
def test_a_store_that_fails_at_any_stage_fails_the_checkpoint_alone(
    running: Bench, store: Store, proxy: Proxy, stage: str, trouble: Trouble
) -> None:
    documents = WorkerStore(store, "bench")
    documents.__dict__["chunks"] = running.chunks
    before = documents.list_checkpoints()
    running.saver._base.clear()  # so that there is something to store
    running.chunks.forget([key for key, _ in running.chunks.list()])
    method, path = STAGES[stage]
    rule = proxy.add(
        Rule(trouble, method, path, times=10**6, skip=3 if "later" in stage else 0, seconds=TIMEOUT)
    )
    began = time.monotonic()
    try:
        with pytest.raises(SavedWorkerError) as failed:
            save(running, documents)
    finally:
        proxy.clear()
    assert rule.hits
    assert time.monotonic() - began < 60
    assert str(failed.value)
    assert documents.list_checkpoints() == before, "half a checkpoint is visible"
    with pytest.raises(NotFound):
        documents.load_manifest(f"1-{running.taken}")
    running.writes_on()
    assert not list(running.container.home.path.glob("images-*"))


def test_what_was_interrupted_is_saved_again_and_is_whole(running: Bench, store: Store) -> None:
    """C33. Leftovers of all those tries, in the store and on the disk, are in nobody's way."""
    documents = WorkerStore(store, "bench")
    documents.__dict__["chunks"] = running.chunks
    began = time.monotonic()
    manifest = save(running, documents)
    assert time.monotonic() - began < 60
    assert documents.load_manifest(manifest.number) == manifest
    running.restore()
    running.writes_on()
    assert "same False" not in running.text


@pytest.fixture
def twins() -> Iterator[list[Bench]]:
    """Two that run and both believe to be the same worker, on one store."""
    folders = [Path(tempfile.mkdtemp(prefix="sw-bench-", dir="/var/tmp")) for _ in range(2)]
    made = [Bench(folder) for folder in folders]
    try:
        yield made
    finally:
        for bench, folder in zip(made, folders, strict=True):
            bench.close()
            shutil.rmtree(folder)


def test_of_two_savers_of_one_worker_one_gets_the_number_and_all_that_it_names_is_its_own(
    twins: list[Bench],
) -> None:
    """As of an agent that lost its lease and does not know it yet: a manifest is created once."""
    url = f"file://{twins[0].folder}/store"
    for bench in twins:
        bench.python(HOLDS)
        bench.until_output("same True\n")
    found: list[Manifest | SavedWorkerError] = []
    won: list[Manifest] = []
    for number in ("1-1", "1-2", "1-3"):

        def take(bench: Bench, number: str = number) -> Manifest | SavedWorkerError:
            documents = WorkerStore(open_store(url), "bench")
            bench.saver = Saver(bench.container, documents.chunks, StreamPosition)
            try:
                return bench.saver.save(number, "requested", documents.publish_manifest).manifest
            except SavedWorkerError as error:
                return error

        with ThreadPoolExecutor(2) as pool:
            found = list(pool.map(take, twins))
        won = [x for x in found if isinstance(x, Manifest)]
        lost = [x for x in found if not isinstance(x, Manifest)]
        assert (len(won), len(lost)) == (1, 1), found
        assert isinstance(lost[0], AlreadyExists)
        assert WorkerStore(open_store(url), "bench").load_manifest(number) == won[0]
        for bench in twins:
            bench.writes_on()
    winner = twins[found.index(won[0])]
    winner.chunks = ChunkStore(open_store(url), "bench")
    winner.restore(won[0])
    winner.writes_on()
    assert "same False" not in winner.text
