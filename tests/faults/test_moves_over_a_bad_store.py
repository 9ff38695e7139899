"""A whole move, from the next instance's boot until the worker runs there, while the store answers that instance badly.

At every kind of request that it makes, and (``-m sweep``) at every single one. In the end the worker is there with all of its state, from
the newest checkpoint or, with the reason in its history, from an older one; nothing is done twice, and nothing half is left.
"""

from __future__ import annotations

import contextlib
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from savedworker.model import events as ev
from savedworker.model.record import State, WorkerRecord
from savedworker.store.worker import WorkerStore
from tests.faults.bed import FREE, TERM, Bed, environment
from tests.faults.checks import complaints
from tests.faults.proxy import Proxy, Rule, Trouble
from tests.faults.s3 import BUCKET, SETTINGS, moto
from tests.runtime.world import BRIDGE

pytestmark = [pytest.mark.criu, pytest.mark.timeout(400)]

RUNS = (State.RUNNING, State.CHECKPOINTING)
STAGES = {
    "the spec": ("GET", r"/spec\.json", 0),
    "the first look at the record": ("GET", r"/record\.json", 0),
    "a later look at the record": ("GET", r"/record\.json", 3),
    "the manifest": ("GET", r"/manifest\.json", 0),
    "the taking of the lease": ("PUT", r"/record\.json", 0),
    "what follows in the record": ("PUT", r"/record\.json", 1),
    "the history": ("PUT", "/events/", 0),
    "the index of the layer": ("GET", "/chunks/", 0),
    "small images, memory and files": ("GET", "/chunks/", 3),
    "the end of the log before": ("GET", "/logs/|list-type.*logs", 0),
    "the beginning of the log": ("PUT", "/logs/", 0),
}
BRIEF: tuple[Trouble, ...] = (
    "503", "slow_down", "500_after", "reset", "reset_after", "hang", "hang_after", "truncate", "altered", "denied",
)  # fmt: skip
LASTING: tuple[Trouble, ...] = ("503", "reset", "hang", "truncate", "altered", "missing", "denied")
FOR = TERM + 1.0
"""Seconds for which a trouble lasts: longer than a lease that cannot be renewed meanwhile."""


@pytest.fixture(scope="module")
def behind() -> Iterator[tuple[str, int]]:
    with moto() as address, pytest.MonkeyPatch.context() as patch:
        for name, value in SETTINGS.items():
            patch.setenv(name, value)
        yield address


@contextlib.contextmanager
def saved_twice(behind: tuple[str, int]) -> Iterator[Bed]:
    """A truth worker over a proxy, which has two checkpoints."""
    with tempfile.TemporaryDirectory(prefix="sw-", dir="/var/tmp") as name:
        proxy = Proxy(BRIDGE, behind)
        folder = Path(name)
        with environment(folder, AWS_ENDPOINT_URL=proxy.url):
            bed = Bed(folder, seed=23, store=f"s3://{BUCKET}/{folder.name}")
            bed.proxy = proxy
            try:
                bed.tracker.hold_at(100)
                worker = bed.begin(steps=120, interval=1.0)
                bed.until(
                    worker, lambda r: len(r.checkpoints) == 2 and r.state is State.RUNNING, "be saved twice"
                )
                yield bed
            finally:
                proxy.clear()
                bed.close()
                proxy.close()


def move(bed: Bed, rule: Rule, lasts: float = 0.0) -> WorkerRecord:
    """Move the worker; ``rule`` is for its next host, and ``lasts`` that many seconds. Back when it runs there."""
    host = bed.holder()
    assert host is not None
    assert bed.proxy is not None
    rule.spared = frozenset({BRIDGE, host.address})
    bed.proxy.add(rule)
    bed.client.preempt(bed.worker, 20.0)
    if lasts:
        assert bed.wait(lambda: rule.hits, 40), f"nothing of the kind was asked\n{bed.story(bed.worker)}"
        time.sleep(lasts)  # the trouble's own length
        rule.times = 0
    record = bed.until(
        bed.worker, lambda r: r.state.terminal or (r.moves >= 1 and r.state in RUNS), "run on elsewhere", 90
    )
    bed.tracker.hold_at(FREE)
    return record


def is_right(bed: Bed, rule: Rule) -> None:
    """The worker ends with all that it did. Every checkpoint that was passed over is in its history, with the reason.

    From nothing it began only if all of them were.
    """
    record = bed.finish()
    assert rule.hits, "nothing of the kind was asked"
    assert complaints(bed, record) == [], bed.story(bed.worker)
    assert record.state is State.SUCCEEDED
    events = [x.event for x in WorkerStore(bed.client.store, bed.worker).events()]
    passed_over = {x.number: x.detail for x in events if isinstance(x, ev.RestoreFailed)}
    assert all(passed_over.values())
    for entry in record.checkpoints:
        assert entry.unusable is None or entry.unusable == passed_over[entry.number]
    for started in record.incarnations[1:]:
        if started.started_at is not None and started.restored_from is None:
            before = {
                x.number
                for x in events
                if isinstance(x, ev.CheckpointCommitted) and x.incarnation < started.number
            }
            dropped = {n for x in events if isinstance(x, ev.CheckpointCommitted) for n in x.dropped}
            assert before - dropped <= passed_over.keys(), bed.story(bed.worker)


def brief(bed: Bed, rule: Rule) -> None:
    """One bad answer: the very checkpoint that was to be restored is, perhaps a moment later."""
    record = move(bed, rule)
    if rule.trouble != "denied":
        assert all(x.unusable is None for x in record.checkpoints), "one bad answer cost a checkpoint"
    is_right(bed, rule)
    assert record.cold_starts == 0, bed.story(bed.worker)


def lasting(bed: Bed, rule: Rule) -> None:
    record = move(bed, rule, FOR)
    is_right(bed, rule)
    if rule.trouble not in ("altered", "missing"):
        assert record.cold_starts == 0, bed.story(bed.worker)


def some(troubles: tuple[Trouble, ...]) -> list[tuple[str, Trouble]]:
    """Every stage with one trouble, and every trouble at some stage."""
    return [(stage, troubles[n % len(troubles)]) for n, stage in enumerate(STAGES)]


def pairs(chosen: list[tuple[str, Trouble]], troubles: tuple[Trouble, ...]) -> list[Any]:
    """The ``chosen`` pairs of a stage and a trouble; in the sweep all others that an answer to such a request can have."""
    others = [
        pytest.param(stage, trouble, marks=pytest.mark.sweep)
        for stage in STAGES
        for trouble in troubles
        if (stage, trouble) not in chosen
        and (STAGES[stage][0] == "GET" or trouble not in ("truncate", "altered", "missing"))
    ]
    return [*chosen, *others]


def rule_for(stage: str, trouble: Trouble, times: int = 1) -> Rule:
    method, path, skip = STAGES[stage]
    return Rule(trouble, method, path, times=times, skip=skip, seconds=3.0)


FIXED_BRIEF = some(BRIEF)
FIXED_LASTING: list[tuple[str, Trouble]] = [
    ("a later look at the record", "missing"),
    ("the manifest", "denied"),
    ("the taking of the lease", "503"),
    ("what follows in the record", "reset"),
    ("the history", "hang"),
    ("small images, memory and files", "altered"),
]
"""A few: each takes as long as the trouble."""


@pytest.mark.parametrize(("stage", "trouble"), pairs(FIXED_BRIEF, BRIEF))
def test_one_bad_answer_in_a_move_costs_no_state(
    behind: tuple[str, int], stage: str, trouble: Trouble
) -> None:
    with saved_twice(behind) as bed:
        brief(bed, rule_for(stage, trouble))


@pytest.mark.parametrize(("stage", "trouble"), pairs(FIXED_LASTING, LASTING))
def test_a_store_that_is_bad_for_longer_than_a_lease_costs_time(
    behind: tuple[str, int], stage: str, trouble: Trouble
) -> None:
    with saved_twice(behind) as bed:
        lasting(bed, rule_for(stage, trouble, times=10**6))


@dataclass
class OneInstance(Rule):
    """The first client that suffers is the only one: its own network, disk or memory is what is bad."""

    def applies(self, client: str, method: str, path: str) -> bool:
        hit = super().applies(client, method, path)
        if hit:
            self.client = client
        return hit


def test_an_instance_that_reads_everything_altered_costs_no_checkpoint(behind: tuple[str, int]) -> None:
    """Another one reads the same checkpoint whole, and the worker goes on from where it was."""
    with saved_twice(behind) as bed:
        rule = OneInstance("altered", "GET", "/chunks/", times=10**6)
        record = move(bed, rule)
        events = [x.event for x in WorkerStore(bed.client.store, bed.worker).events()]
        failed = [x for x in events if isinstance(x, ev.RestoreFailed)]
        assert [(x.incarnation, x.unusable) for x in failed] == [(2, True)] * 2, bed.story(bed.worker)
        newest = max(x.number for x in failed)
        assert [x.restored_from for x in record.incarnations] == [None, None, newest]
        assert record.incarnations[1].end_reason == "failed"
        assert all(x.sound for x in record.checkpoints)
        (left,) = [x for x in events if isinstance(x, ev.LeaseReleased)]
        assert left.detail.endswith(f"another instance tries checkpoint {newest} again")
        is_right(bed, rule)


@pytest.mark.sweep
@pytest.mark.timeout(7200)
@pytest.mark.parametrize("trouble", BRIEF)
def test_one_bad_answer_at_every_single_request_of_a_move(behind: tuple[str, int], trouble: Trouble) -> None:
    """The n-th request of the next host, for every n up to the one after which the worker runs there."""
    none = Rule(trouble, times=0)
    with saved_twice(behind) as bed:
        move(bed, none)
        assert bed.proxy is not None
        count = sum(client not in none.spared for client, _, _ in bed.proxy.requests)
    assert count > 20
    for n in range(count):
        with saved_twice(behind) as bed:
            brief(bed, Rule(trouble, skip=n, seconds=3.0))


def test_a_worker_that_runs_goes_on_although_nobody_may_say_so(behind: tuple[str, int]) -> None:
    """The store refuses the word that it was restored. Its agent dies of that, and the next one finds it and says it."""
    with saved_twice(behind) as bed:
        before = bed.holder()
        assert before is not None
        assert bed.proxy is not None
        bed.arm("agent.restored.before", "hang:100")
        bed.client.preempt(bed.worker, 20.0)
        assert bed.wait(lambda: bed.was_hit("agent.restored.before"), 60), bed.story(bed.worker)
        host = bed.holder()
        assert host is not None
        assert host.address != before.address
        rule = bed.proxy.add(
            Rule("denied", path=r"/record\.json", times=1000, spared=frozenset({BRIDGE, before.address}))
        )
        bed.let_go("agent.restored.before")

        def restarted() -> bool:
            now = bed.find(host.launch)
            return now is not None and now.agent_pid not in (None, host.agent_pid)

        assert bed.wait(restarted, 60), bed.story(bed.worker)
        rule.times = 0
        bed.tracker.hold_at(FREE)
        is_right(bed, rule)
        record = bed.record(bed.worker)
        assert (len(record.incarnations), record.migrations, record.cold_starts) == (2, 1, 0)
        restored = [x.event for x in WorkerStore(bed.client.store, bed.worker).events()]
        assert [x.kind for x in restored].count("restore_failed") == 0
