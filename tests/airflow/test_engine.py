"""Tasks of a real Airflow as saved workers: what a user sees, does and loses. One Airflow serves all tests."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import socket
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from tests.airflow.engine import Engine, Run, eventually, running_engine

pytestmark = [pytest.mark.engine, pytest.mark.criu, pytest.mark.timeout(400)]


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engine]:
    with running_engine(tmp_path_factory.mktemp("airflow")) as started:
        yield started


@dataclass
class Early:
    """Runs that nobody disturbs: they begin together, before the tests that look at them."""

    good: Run
    bad: Run
    timed: Run
    mapped: Run


SECRET = "rose-hip/and=barberry"


@pytest.fixture(scope="module")
def early(engine: Engine) -> Early:
    connection = {"connection_id": "secretive", "conn_type": "generic", "password": SECRET}
    engine.airflow.call("POST", "/api/v2/connections", connection)
    return Early(
        timed=engine.count("worker_timed", 600),
        mapped=engine.run("worker_mapped", ""),
        good=engine.count("worker_plain", 5),
        bad=engine.run("worker_plain", "echo so long; exit 3"),
    )


def test_a_task_ends_as_its_process_does_with_every_line_once_and_the_report_as_xcom(
    engine: Engine, early: Early
) -> None:
    good, bad = early.good, early.bad
    assert good.ended() == "success"
    report = engine.airflow.xcom("worker_plain", good.id, "work")
    assert (report["state"], report["exit_code"], report["migrations"], report["cold_starts"]) == (
        "succeeded",
        0,
        0,
        0,
    )
    assert report["id"] == good.worker()
    spec = engine.client.spec(good.worker())
    assert (spec.checkpoint.max_cold_starts, spec.placement.spare_for) == (9, None), "as its DAG says"
    assert good.output() == [f"tick {i}" for i in range(5)]
    assert (good.tries(), good.callbacks()) == ([(1, "success")], ["success 1"])
    link = engine.airflow.xcom("worker_plain", good.id, "work", "_link_SavedWorkerLink")
    assert link.startswith(engine.airflow.url)

    assert bad.ended() == "failed"
    log = bad.log()
    assert log.count("so long") == 1
    assert len([x for x in log if "exit code 3" in x]) == 1
    assert engine.airflow.xcom("worker_plain", bad.id, "work", "report")["exit_code"] == 3
    assert (bad.tries(), bad.callbacks()) == ([(1, "failed")], ["failure 1"])


def test_tasks_of_a_mapped_function_have_a_worker_each_and_are_skipped_by_exit_code(
    engine: Engine, early: Early
) -> None:
    run = early.mapped
    assert run.ended() == "success"
    states = [engine.airflow.task(run.dag, run.id, "work", i)["state"] for i in range(3)]
    assert states == ["success", "success", "skipped"]
    reports = [
        engine.airflow.xcom(run.dag, run.id, "work", key, map_index=i)
        for i, key in enumerate(("return_value", "return_value", "report"))
    ]
    assert [x["exit_code"] for x in reports] == [0, 0, 99]
    labels = [engine.client.spec(x["id"]).engine for x in reports]
    assert [(x["dag_id"], x["run_id"], x["task_id"], x["map_index"], x["try_number"]) for x in labels] == [
        (run.dag, run.id, "work", str(i), "1") for i in range(3)
    ]


def test_a_secret_that_airflow_knows_is_masked_when_a_worker_says_it(engine: Engine, early: Early) -> None:
    """The triggerer, which relays for the mapped ones, never saw the connection that it is from."""
    run = early.mapped
    assert run.ended() == "success"
    for i in range(3):
        log = engine.airflow.log(run.dag, run.id, "work", map_index=i)
        assert [x for x in log if x.startswith("number ")] == [f"number {i}, token ***, at ***"]
        assert SECRET not in str(engine.airflow.task(run.dag, run.id, "work", i))  # with the rendered fields
    log = engine.airflow.log(run.dag, run.id, "synchronous")
    assert [x for x in log if x.startswith("token ")] == ["token ***"]
    files = [x.read_text() for x in (engine.home / "logs").rglob("*") if x.is_file()]
    assert files
    assert not [x for x in files if SECRET in x]


def test_execution_timeout_of_a_deferred_task_cancels_its_worker(engine: Engine, early: Early) -> None:
    run = early.timed
    worker = run.worker()
    assert run.ended() == "failed"
    eventually(lambda: engine.client.record(worker).state == "cancelled", 180, "the worker is cancelled")
    # Whoever is the first to cancel: the task, which is told of the timeout, or its trigger, which sees it wait no longer.
    assert "TaskDeferralTimeout" in engine.client.record(worker).detail
    gone_within_a_minute(run, worker, time.monotonic())
    assert (run.tries(), run.callbacks(), run.after()) == ([(1, "failed")], ["failure 1"], "upstream_failed")


def gone_within_a_minute(run: Run, worker: str, acted: float) -> None:
    """The worker is cancelled, its instance gone and nothing of it runs, at most 60 s after the user acted."""
    client = run.engine.client
    left = acted + 60 - time.monotonic()
    eventually(lambda: client.record(worker).state == "cancelled", left, "the worker is cancelled")
    left = acted + 60 - time.monotonic()
    eventually(
        lambda: all(x.state == "ended" for x in client.record(worker).launches),
        left,
        "its instances are gone",
    )
    if run.dag_has_ended():  # otherwise a new try counts there already
        before = run.ticks()
        time.sleep(2.5)
        assert run.ticks() == before


def test_a_user_who_marks_or_clears_a_deferred_task_or_its_run_ends_the_worker(engine: Engine) -> None:
    runs = [engine.count("worker_plain", 600) for _ in range(4)]
    workers = [run.running() for run in runs]
    for run in runs:
        run.wait_for("deferred")
    failed, success, cleared, of_failed_run = runs
    # Two of them are on their way from one instance to another.
    for worker in (workers[1], workers[3]):
        engine.client.preempt(worker, 10.0)
    acted = time.monotonic()
    failed.set_state("failed")
    success.set_state("success")
    cleared.clear()
    of_failed_run.fail_run()
    for run, worker in zip(runs, workers, strict=True):
        gone_within_a_minute(run, worker, acted)
    assert (failed.state(), success.state()) == ("failed", "success")
    # What was cleared runs again, as a new try with a new worker.
    eventually(lambda: cleared.worker() != workers[2], 180, "the cleared task has a new worker")
    second = cleared.worker()
    cleared.wait_for("deferred")
    eventually(lambda: engine.client.record(second).incarnation, 180, "the second worker has an instance")
    first_ended = engine.client.record(workers[2]).incarnations[-1].ended_at
    assert first_ended is not None
    assert first_ended <= engine.client.record(second).incarnations[0].taken_at
    acted = time.monotonic()
    cleared.set_state("failed")
    gone_within_a_minute(cleared, second, acted)


def test_a_user_who_clears_a_deferred_task_of_a_paused_dag_ends_its_worker(engine: Engine) -> None:
    """Airflow does not take the trigger away until the task is scheduled again, which a paused DAG never does."""
    run = engine.count("worker_plain", 600)
    worker = run.running()
    run.wait_for("deferred")
    engine.airflow.call("PATCH", "/api/v2/dags/worker_plain", {"is_paused": True})
    try:
        acted = time.monotonic()
        run.clear()
        gone_within_a_minute(run, worker, acted)
        run.set_state("failed")
    finally:
        engine.airflow.call("PATCH", "/api/v2/dags/worker_plain", {"is_paused": False})


def test_a_triggerer_that_is_killed_or_freezes_never_touches_the_worker(
    engine: Engine,
) -> None:
    run = engine.count("worker_plain", 600)
    worker = run.running()
    run.wait_for("deferred")
    launches = len(run.record().launches)

    engine.airflow.kill_component("triggerer")
    time.sleep(3)
    engine.airflow.start_component("triggerer")
    seen = len(run.output())
    eventually(lambda: len(run.output()) >= seen + 5, 180, "the new triggerer relays")

    # Frozen for longer than Airflow waits, so that another triggerer takes the trigger; then both run.
    frozen = engine.airflow.pids("triggerer")
    engine.airflow.kill_component("triggerer", signal.SIGSTOP)
    successor = engine.airflow.start_component("triggerer")
    seen = len(run.output())
    eventually(lambda: len(run.output()) >= seen + 3, 180, "the successor relays")
    for pid in frozen:
        os.kill(pid, signal.SIGCONT)
    time.sleep(10)
    for pid in frozen:
        os.kill(pid, signal.SIGKILL)
    assert successor.poll() is None

    record = engine.client.record(worker)
    assert record.state == "running"
    assert (len(record.incarnations), len(record.launches)) == (1, launches)
    output = run.output()
    assert sorted(set(output), key=lambda x: int(x.split()[1])) == [
        f"tick {i}" for i in range(len(set(output)))
    ]
    assert len(output) - len(set(output)) <= 3  # a batch that was relayed in the moment of a kill
    acted = time.monotonic()
    run.set_state("success")
    gone_within_a_minute(run, worker, acted)


def test_a_user_who_marks_a_task_while_no_triggerer_lives_ends_its_worker(engine: Engine) -> None:
    run = engine.count("worker_plain", 600)
    worker = run.running()
    run.wait_for("deferred")
    engine.airflow.kill_component("triggerer")
    acted = time.monotonic()
    run.set_state("failed")
    try:
        gone_within_a_minute(run, worker, acted)
    finally:
        engine.airflow.start_component("triggerer")


FRAIL = """
i=0
while [ $i -lt 600 ]; do
    echo "$i" >> /shared/ticks
    i=$((i + 1))
    sleep 1
    [ ! -e /shared/die ] || { rm /shared/die; kill -TERM $$; }
done
"""
"""Counts, and is ended by SIGTERM when the test says so: once, however soon the next try begins."""


def test_a_task_whose_process_and_worker_are_both_killed_never_ends_well(engine: Engine) -> None:
    """C06 and C19: SIGTERM for supervisor and task process, SIGKILL later, and the worker is lost 0, 1 or 5 s after.

    One worker is ended by a signal instead, and one is left alone; that one ends well, in the second try.
    """
    healthy = engine.count("worker_synchronous", 40)
    frail = engine.run("worker_synchronous", FRAIL)
    lost = {delay: engine.run("worker_synchronous", FRAIL) for delay in (0, 1, 5)}
    runs = [healthy, frail, *lost.values()]
    workers = {run.id: run.running(ticks=3) for run in runs}
    unfinished = [frail, *lost.values()]
    for run in runs:
        assert run.state() == "running"
    processes = [pid for run in runs for pid in run.processes()]

    def never_success() -> None:
        for run in unfinished:
            state = run.state()
            assert state in ("running", "up_for_retry", "scheduled", "queued"), (run.tries(), run.log())
            assert run.after() is None

    for pid in processes:
        os.kill(pid, signal.SIGTERM)
    began = time.monotonic()
    for delay, run in lost.items():
        time.sleep(max(0.0, began + delay - time.monotonic()))
        engine.client.preempt(workers[run.id], None)
        if delay == 1:
            (frail.volume / "die").touch()
        never_success()
    assert engine.client.record(workers[healthy.id]).state == "running"
    for pid in processes:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    eventually(
        lambda: engine.client.record(workers[frail.id]).signal, 60, "the frail worker is ended by its signal"
    )

    until = time.monotonic() + 150
    waiting = {run.id: run for run in unfinished}
    while waiting:
        never_success()
        assert time.monotonic() < until, f"no second try of {list(waiting)}"
        for run in list(waiting.values()):
            if run.task()["try_number"] == 2 and run.state() == "running":
                del waiting[run.id]
        time.sleep(0.5)
    for run in lost.values():
        assert run.worker() == workers[run.id]
        eventually(lambda run=run: len(run.record().incarnations) == 2, 180, "the worker goes on")  # type: ignore[misc]
    eventually(lambda: frail.worker() != workers[frail.id], 180, "the worker that ended has a successor")
    assert engine.client.record(workers[frail.id]).signal == signal.SIGTERM
    never_success()
    for run in unfinished:
        run.fail_run()

    assert healthy.ended() == "success"
    assert (healthy.worker(), healthy.after()) == (workers[healthy.id], "success")
    assert healthy.tries() == [(1, "failed"), (2, "success")]
    assert healthy.ticks() == list(range(40))
    assert len(engine.client.record(workers[healthy.id]).incarnations) == 1


def test_a_user_ends_the_worker_of_a_task_that_does_not_defer(engine: Engine) -> None:
    run = engine.count("worker_synchronous", 600)
    worker = run.running()
    acted = time.monotonic()
    run.set_state("failed")
    gone_within_a_minute(run, worker, acted)
    assert run.state() == "failed"


def test_a_connection_has_its_form_and_is_tested_in_airflows_own_pages(engine: Engine) -> None:
    (form,) = [
        x
        for x in engine.airflow.call("GET", "/ui/connections/hook_meta")
        if x["connection_type"] == "savedworker"
    ]
    assert set(form["extra_fields"]) == {"store", "fleet", "checkpoint_interval", "key_file"}
    body = {
        "connection_id": "mine",
        "conn_type": "savedworker",
        "extra": f'{{"store": "file://{engine.home}/another-store", "fleet": "local"}}',
    }
    answer = engine.airflow.call("POST", "/api/v2/connections/test", body)
    assert answer["status"], answer


def until(name: str) -> str:
    """What a program does until the test puts that file onto its volume."""
    return f"until [ -e /shared/{name} ]; do sleep 0.2; done"


def preempt(engine: Engine, run: Run, worker: str, incarnation: int, notice: float | None) -> None:
    """Reclaim the worker's instance, and wait until it runs as ``incarnation``."""
    engine.client.preempt(worker, notice)
    eventually(
        lambda: (
            len(engine.client.record(worker).incarnations) == incarnation
            and engine.client.record(worker).state == "running"
        ),
        180,
        f"incarnation {incarnation} runs",
    )


def test_three_moves_cost_no_try_and_no_callback_also_when_the_scheduler_is_killed_during_one(
    engine: Engine,
) -> None:
    """With the scheduler go its executor, and the process of a task that does not defer, which goes on as try 2."""
    run = engine.count("worker_plain", 15, then=until("end"))
    beside = engine.count("worker_synchronous", 60)
    worker = run.running(ticks=3)
    run.wait_for("deferred")
    preempt(engine, run, worker, 2, notice=10.0)
    assert run.state() == "deferred"
    other = beside.running(ticks=3)
    processes = beside.processes()

    engine.client.preempt(worker, 10.0)
    engine.client.preempt(other, 10.0)
    engine.airflow.kill_component("scheduler")
    eventually(lambda: not any(map(alive, processes)), 10, "the task's process is gone with the scheduler")
    eventually(
        lambda: len(engine.client.record(worker).incarnations) == 3, 180, "moves while there is no scheduler"
    )
    engine.airflow.start_component("scheduler")
    eventually(lambda: engine.client.record(worker).state == "running", 60, "incarnation 3 runs")
    assert run.state() == "deferred"
    preempt(engine, run, worker, 4, notice=10.0)
    (run.volume / "end").touch()

    assert run.ended() == "success"
    report = engine.airflow.xcom("worker_plain", run.id, "work")
    assert (report["migrations"], report["cold_starts"], report["lost_seconds"]) == (3, 0, 0)
    assert (run.tries(), run.callbacks()) == ([(1, "success")], ["success 1"])
    assert run.output() == [f"tick {i}" for i in range(15)]
    assert run.ticks() == list(range(15))

    assert beside.ended() == "success"
    assert beside.worker() == other
    assert beside.tries() == [(1, "failed"), (2, "success")]
    assert beside.ticks() == list(range(60))
    assert len(engine.client.record(other).incarnations) == 2


HOLDS_WHAT_CANNOT_BE_SAVED = """
exec python3 -u - <<'END'
import os, socket, time
first = not os.path.exists("/shared/begun")
open("/shared/begun", "w").close()
outside = socket.socket(socket.AF_UNIX)
if first:
    outside.connect("/shared/outside.socket")
number = 0
while first or number < 5:
    print("tick", number)
    with open("/shared/ticks", "a") as file:
        print(number, file=file)
    number += 1
    time.sleep(0.5)
END
"""
"""Its first life has no end, and a connection to a process outside; its second comes to one."""


def test_a_reclaim_whose_checkpoint_fails_is_a_loss_that_costs_no_try_and_shows_no_exit_code(
    engine: Engine,
) -> None:
    """C31: nothing of it can be saved when its instance goes, so that it begins again, by the product's policy and not by a retry."""
    run = engine.run("worker_plain", HOLDS_WHAT_CANNOT_BE_SAVED)
    with socket.socket(socket.AF_UNIX) as listening:
        listening.bind(str(run.volume / "outside.socket"))
        listening.listen()
        listening.settimeout(180)
        connection, _ = listening.accept()
        worker = run.running(ticks=3)
        run.wait_for("deferred")
        eventually(
            lambda: "outside" in str(engine.client.record(worker).unprotected_reasons),
            60,
            "it is said that the worker is not protected",
        )
        engine.client.preempt(worker, 6.0)
        eventually(lambda: len(engine.client.record(worker).incarnations) == 2, 120, "it begins again")
        connection.close()
    assert run.ended() == "success"
    assert (run.tries(), run.callbacks()) == ([(1, "success")], ["success 1"])
    report = engine.airflow.xcom("worker_plain", run.id, "work")
    assert (report["migrations"], report["cold_starts"], report["exit_code"]) == (0, 1, 0)
    assert report["incarnations"][0]["end_reason"] == "notice"
    log = "\n".join(run.log())
    for said in ("checkpoint 1-1 failed", "ended without a new checkpoint", "started from nothing"):
        assert said in log
    assert "exit code 0" in log
    assert not re.search(r"exit (code|status) (1[0-9][0-9])", log)


def alive(pid: int) -> bool:
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    return False


def test_five_moves_and_one_real_failure_use_one_retry(engine: Engine) -> None:
    """The first try moves three times and then fails by itself; the second moves twice and succeeds."""
    once = (
        f"if [ ! -e /shared/failed ]; then {until('fail')}; touch /shared/failed; exit 7; fi; {until('end')}"
    )
    run = engine.count("worker_retried", 5, then=once)
    worker = run.running()
    for incarnation in (2, 3, 4):
        preempt(engine, run, worker, incarnation, notice=8.0)
    (run.volume / "fail").touch()
    eventually(lambda: run.worker() != worker, 120, "the second try has a worker")
    second = run.worker()
    eventually(lambda: engine.client.record(second).state == "running", 180, "the second worker runs")
    for incarnation in (2, 3):
        preempt(engine, run, second, incarnation, notice=8.0)
    (run.volume / "end").touch()
    assert run.ended() == "success"
    assert run.tries() == [(1, "failed"), (2, "success")]
    assert sorted(run.callbacks()) == ["retry 1", "success 2"]
    report = engine.airflow.xcom("worker_retried", run.id, "work")
    assert (report["migrations"], report["cold_starts"]) == (2, 0)
    assert engine.client.record(worker).exit_code == 7
