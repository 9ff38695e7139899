"""Every kind of bad answer from an object store, at every request that a restore makes: what comes back is right, or nothing does.

Here the restore itself, without an agent; ``test_moves_over_a_bad_store.py`` has the whole of a move.
"""

from __future__ import annotations

import re
import shutil
import tempfile
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from savedworker.checkpoint.keys import read_index
from savedworker.model.errors import Corrupt, Fatal, SavedWorkerError, Unreachable
from savedworker.model.manifest import Manifest
from savedworker.store.backend import Store
from savedworker.store.worker import WorkerStore
from tests.checkpoint.bench import Bench
from tests.faults.conftest import TIMEOUT
from tests.faults.proxy import Proxy, Rule, Trouble

pytestmark = [pytest.mark.criu, pytest.mark.timeout(600)]

PROVES = """
import hashlib, os, random, sys, time
memory = bytearray(random.Random(7).randbytes(9 << 20))
os.makedirs("/srv/many")
for n in range(4):
    with open(f"/srv/many/{n}", "wb") as file:
        file.write(random.Random(n).randbytes(20_000 << n))
with open("/dev/shm/shared", "wb") as file:
    file.write(random.Random(8).randbytes(1 << 20))
with open("/dev/shm/large", "wb") as file:
    file.write(random.Random(9).randbytes(9 << 20))
def digest():
    whole = hashlib.sha256(memory)
    for name in ["/dev/shm/shared", "/dev/shm/large", *(f"/srv/many/{n}" for n in range(4))]:
        with open(name, "rb") as file:
            whole.update(file.read())
    return whole.hexdigest()
first = digest()
print("ready", flush=True)
sys.stdin.close()
while not os.path.exists("/srv/change"):
    time.sleep(0.02)
memory[5 << 20] ^= 255
with open("/dev/shm/large", "r+b") as file:
    file.seek(5 << 20)
    file.write(b"changed")
first = digest()
while True:
    print("right" if digest() == first else "wrong", flush=True)
    time.sleep(0.03)
"""


@dataclass
class Saved:
    """One checkpoint, told against a base, that all troubles are done to the restores of."""

    bench: Bench
    manifest: Manifest
    proxy: Proxy

    @property
    def stages(self) -> dict[str, str]:
        """The path of a chunk that a restore reads in each of its stages."""
        manifest, chunks = self.manifest, self.bench.chunks
        memory = max(manifest.image_memory, key=lambda x: x.size)
        (large,) = manifest.shm_memory
        keys = {
            "the index of the layer": manifest.layer.chunks[0],
            "the index of /dev/shm": manifest.shm.chunks[0],
            "the small images": manifest.packed.chunks[0],
            "the base of the memory": memory.groups[0].key,
            "what changed of the memory": memory.deltas[0].key,
            "a file of the layer": next(iter(read_index(manifest.layer, chunks).chunk_keys())),
            "a file of /dev/shm": next(iter(read_index(manifest.shm, chunks).chunk_keys())),
            "the base of a large one": large.groups[1].key,
            "what changed of it": large.deltas[0].key,
        }
        return {stage: f"/chunks/{key}" for stage, key in keys.items()}

    def restore(self) -> None:
        """A restore, after which the worker is seen to have all of its memory and files."""
        self.bench.restore(self.manifest)
        before = self.bench.text.count("\n")
        self.bench.until(lambda: self.bench.text.count("\n") > before + 1, "go on")
        assert "wrong" not in self.bench.text

    def try_restore(self, rule: Rule) -> SavedWorkerError | None:
        """A restore while ``rule`` holds: the worker runs and is right, or this is why not, and nothing of it is left."""
        self.proxy.add(rule)
        began = time.monotonic()
        try:
            self.restore()
        except SavedWorkerError as error:
            failed: SavedWorkerError | None = error
        else:
            failed = None
        finally:
            self.proxy.clear()
        assert time.monotonic() - began < 60
        assert failed is None or (str(failed) and self.left() == [])
        return failed

    def left(self) -> list[str]:
        """Mounts, homes and processes of restores that failed."""
        folder = str(self.bench.folder)
        mounts = [x for x in Path("/proc/self/mountinfo").read_text().splitlines() if folder in x]
        return [*mounts, *map(str, self.bench.folder.glob("home-*")), *map(str, self.bench.container.pids())]


@pytest.fixture(scope="module")
def saved(store: Store, proxy: Proxy) -> Iterator[Saved]:
    folder = Path(tempfile.mkdtemp(prefix="sw-bench-", dir="/var/tmp"))
    bench = Bench(folder)
    bench.chunks = WorkerStore(store, "bench").chunks
    try:
        bench.python(PROVES)
        bench.until_output("ready\n")
        bench.save()
        (bench.container.home.rootfs / "srv/change").touch()
        bench.until_output("right\n")
        bench.save()
        assert bench.manifest is not None
        made = Saved(bench, bench.manifest, proxy)
        assert all(made.stages.values())
        yield made
    finally:
        bench.close()
        shutil.rmtree(folder)


PASSING: tuple[Trouble, ...] = (
    "503", "slow_down", "500_after", "reset", "hang", "truncate", "altered", "slow",
)  # fmt: skip
LASTING: dict[Trouble, type[SavedWorkerError]] = {
    "503": Unreachable,
    "slow_down": Unreachable,
    "reset": Unreachable,
    "hang": Unreachable,
    "truncate": Unreachable,
    "denied": Fatal,
    "altered": Corrupt,
    "missing": Corrupt,
}
STAGES = (
    "the index of the layer",
    "the index of /dev/shm",
    "the small images",
    "the base of the memory",
    "what changed of the memory",
    "a file of the layer",
    "a file of /dev/shm",
    "the base of a large one",
    "what changed of it",
)


def passes(saved: Saved, trouble: Trouble, path: str) -> None:
    """One bad answer costs time, or one more try of the same restore, and never the checkpoint."""
    rule = Rule(trouble, "GET", path, seconds=TIMEOUT if trouble == "hang" else 0.3)
    error = saved.try_restore(rule)
    assert rule.hits
    if error is not None:
        assert isinstance(error, Unreachable), f"{trouble} at {path}: {error!r}"
        assert saved.try_restore(Rule("503", times=0)) is None


def lasts(saved: Saved, trouble: Trouble, path: str) -> None:
    """A store that stays bad is told from damage, and no restore comes of it. Afterwards the same checkpoint is whole."""
    rule = Rule(trouble, "GET", path, times=10**6, seconds=TIMEOUT)
    error = saved.try_restore(rule)
    assert rule.hits
    assert type(error) is LASTING[trouble], f"{trouble} at {path}: {error!r}"


def some(troubles: Iterable[Trouble], always: Trouble) -> list[tuple[str, Trouble]]:
    """Every stage with the trouble ``always``, and every trouble at some stage."""
    rotated = [(STAGES[n % len(STAGES)], trouble) for n, trouble in enumerate(troubles)]
    return sorted({*rotated, *((stage, always) for stage in STAGES)})


@pytest.mark.parametrize(("stage", "trouble"), some(PASSING, "altered"))
def test_a_restore_survives_one_bad_answer_at_any_stage(saved: Saved, stage: str, trouble: Trouble) -> None:
    passes(saved, trouble, saved.stages[stage])


@pytest.mark.parametrize(("stage", "trouble"), some(LASTING, "altered"))
def test_a_restore_over_a_store_that_stays_bad_fails_and_leaves_nothing(
    saved: Saved, stage: str, trouble: Trouble
) -> None:
    lasts(saved, trouble, saved.stages[stage])


def test_what_could_not_be_restored_is_whole_when_the_store_is(saved: Saved) -> None:
    saved.restore()


@pytest.mark.sweep
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("trouble", sorted({*PASSING, *LASTING}))
def test_the_same_at_every_single_request(saved: Saved, trouble: Trouble) -> None:
    saved.proxy.requests.clear()
    saved.restore()
    paths = sorted({path for _, method, path in saved.proxy.requests if method == "GET"})
    assert len(paths) > 10
    for path in paths:
        if trouble in PASSING:
            passes(saved, trouble, re.escape(path))
        if trouble in LASTING:
            lasts(saved, trouble, re.escape(path))
    saved.restore()
