"""Tasks of a real Airflow under SavedWorkerExecutor: what they are under LocalExecutor, while their hosts are taken away."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from functools import partial

import pytest

from savedworker.model.spec import CheckpointPolicy, PlacementPolicy
from tests.airflow.engine import eventually
from tests.airflow.executor_bed import Bed, Run, executor_bed, in_the_meantime, oracle

pytestmark = [pytest.mark.engine, pytest.mark.criu, pytest.mark.timeout(420)]

SUITE = ("python", "mapped", "deferred", "reschedule", "retried")
"""Of the whole suite (in the sweep) so much as a few minutes allow."""
STEPS = {"python": 24}
"""So many that there is time to move it, also on a machine that is slow to see how far it is."""


@pytest.fixture(scope="module")
def bed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Bed]:
    with executor_bed(tmp_path_factory.mktemp("executor")) as started:
        yield started


PERIODIC = 36


class Mover(threading.Thread):
    """Takes the host of the run's task away once it has said ``said``."""

    def __init__(self, run: Run, said: str, notice: float | None) -> None:
        super().__init__(daemon=True)
        self.run_, self.said, self.notice = run, said, notice
        self.problem: BaseException | None = None
        self.start()

    def run(self) -> None:
        try:
            self.run_.move(self.run_.running(said=self.said), self.notice)
        except BaseException as error:
            self.problem = error

    def finish(self) -> None:
        self.join(120)
        if self.problem is not None:
            raise self.problem


def _agree(run: Run, local: Run) -> bool:
    """It takes a moment until all lines are in the log, of either."""
    return run.facts() == local.facts()


def test_the_suite_agrees_with_local_executor_while_hosts_are_taken_away(bed: Bed) -> None:
    """States, tries, XComs and log lines; one task moves with notice, another is lost without."""
    saved = {name: bed.run(f"saved_{name}", STEPS.get(name, 2)) for name in SUITE}
    lost = bed.run("saved_periodic", PERIODIC)
    movers = [Mover(saved["python"], "traffic step 1", 20.0), Mover(lost, "traffic step 12", None)]
    local = oracle(bed, SUITE, STEPS, 300)
    in_the_meantime([*saved.values(), lost], lambda: None, 300)
    for mover in movers:
        mover.finish()

    for name in SUITE:
        what = f"{name}: {saved[name].facts()} is {local[name].facts()}"
        eventually(partial(_agree, saved[name], local[name]), 30, what, every=2.0)
        assert saved[name].callbacks() == local[name].callbacks(), name
    (worker,) = saved["python"].workers()
    assert (worker.migrations, worker.cold_starts) == (1, 0)
    assert bed.stored_secrets(worker.id) == []
    (move,) = (x for x in saved["python"].marks() if x.startswith("moved from"))
    assert "on a notice" in move
    assert "nothing was lost" in move

    (task,) = lost.tasks()
    assert (task["state"], task["try_number"]) == ("success", 1), lost.told()
    assert lost.callbacks() == []
    steps = [x for x in lost.log() if x.startswith("traffic step")]
    assert list(dict.fromkeys(steps)) == [f"traffic step {i}" for i in range(PERIODIC)]
    marks = lost.marks()
    assert any("done again below" in x for x in marks) == (len(steps) > PERIODIC)
    assert any("without a notice" in x for x in marks)
    assert bed.refused_heartbeats() == []


def test_a_task_that_is_lost_reads_what_it_had_written_when_it_was_saved(bed: Bed) -> None:
    """Since then it has overwritten it: Airflow's database does not go back with the task."""
    run = bed.run("saved_reads", 30)
    worker = run.running(said="first is written")
    spec = bed.client.spec(worker)
    assert spec.checkpoint == CheckpointPolicy(interval=None, max_cold_starts=3)
    assert spec.placement == PlacementPolicy(spare_for=None, on_demand_after_wait=1200.0)
    bed.client.checkpoint(worker)
    name = bed.labels(worker)["ti_id"]
    bed.airflow.call("POST", "/api/v2/variables", {"key": f"go_{name}", "value": "go"})
    eventually(partial(_said, bed, worker, "third is written"), 60, "it has overwritten it")
    assert bed.airflow.call("GET", f"/api/v2/variables/mine_{name}")["value"] == "third"
    run.move(worker, None)
    assert run.ended() == "success", run.told()
    record = bed.client.record(worker)
    assert (record.migrations, record.cold_starts) == (1, 0)
    assert run.log().count("third is written") == 2, "it was done again"
    assert bed.airflow.xcom(run.dag, run.id, "work") == ["first", "second", "second", "third"]
    assert bed.airflow.call("GET", f"/api/v2/variables/mine_{name}")["value"] == "third"
    assert bed.refused_heartbeats() == []


def _said(bed: Bed, worker: str, text: str) -> bool:
    return text in bed.output(worker)
