"""Saving a worker that is larger than the agent's memory budget stays within it."""

from __future__ import annotations

from pathlib import Path

import pytest

from savedworker.agent.config import MEMORY_BUDGET, memory_budget
from savedworker.model.errors import Refused
from savedworker.model.spec import CheckpointPolicy, WorkerSpec
from tests.checkpoint.bench import Bench

MIB = 1 << 20
CHANGES = """
import os, time
data = bytearray(os.urandom(448 << 20))
print("ready", flush=True)
at = 0
while True:
    data[at : at + (64 << 20)] = os.urandom(64 << 20)  # the costliest kind: changes that do not shrink
    at = (at + (64 << 20)) % len(data)
    print("tick", flush=True)
    time.sleep(0.05)
"""


def memory(what: str) -> int:
    """Bytes; VmHWM is the peak since it was forgotten."""
    line = next(x for x in Path("/proc/self/status").read_text().splitlines() if x.startswith(f"{what}:"))
    return int(line.split()[1]) << 10


@pytest.mark.criu
def test_a_worker_much_larger_than_the_budget_is_saved_and_restored_within_it(bench: Bench) -> None:
    bench.chunks.spend(256 * MIB)
    bench.python(CHANGES)
    bench.until_output("tick")
    for hold in (False, True):
        Path("/proc/self/clear_refs").write_text("5")  # proc(5): the peak begins anew
        before = memory("VmRSS")
        saved = bench.save(hold=hold)
        assert saved.manifest.bytes_image > 440 * MIB
        assert memory("VmHWM") - before < (256 - 96) * MIB, "beside what an agent has in use anyway"
    Path("/proc/self/clear_refs").write_text("5")
    before = memory("VmRSS")
    bench.restore()
    assert memory("VmHWM") - before < (256 - 96) * MIB
    bench.writes_on()


def test_a_budget_is_the_specifications_or_the_instances_and_never_a_silly_one() -> None:
    plain = WorkerSpec(id="w", command=("x",))
    own = plain.model_copy(update={"checkpoint": CheckpointPolicy(memory_budget=300 * MIB)})
    assert memory_budget(plain, {MEMORY_BUDGET: "512MiB"}) == 512 * MIB
    assert memory_budget(own, {MEMORY_BUDGET: "512MiB"}) == 300 * MIB
    assert memory_budget(plain, {MEMORY_BUDGET: ""}) == memory_budget(plain, {})
    for silly in ("lots", "-1", "0", "1MiB", "9000TiB"):
        with pytest.raises(Refused, match=MEMORY_BUDGET) as refused:
            memory_budget(plain, {MEMORY_BUDGET: silly})
        assert refused.value.fix
