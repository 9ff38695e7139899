"""The suite that runs under LocalExecutor and under SavedWorkerExecutor: each DAG twice, ``local_…`` and ``saved_…``.

A task that paces itself does so by the run's ``conf`` (``steps``, each of half a second), so that a test can move it in the middle.
"""

from __future__ import annotations

import http.server
import threading
import time
import urllib.request
from datetime import timedelta
from typing import Any

from airflow.providers.standard.operators.empty import EmptyOperator
from airflow.providers.standard.operators.python import PythonOperator
from airflow.providers.standard.sensors.python import PythonSensor
from airflow.providers.standard.triggers.temporal import TimeDeltaTrigger
from airflow.sdk import DAG, BaseHook, BaseOperator, TaskGroup, Variable, get_current_context, task

CONFIG = {"checkpoint": {"interval": None}, "placement": {"spare_for": None, "on_demand_after_wait": "20m"}}
STEP = 0.5


def steps() -> int:
    return int((get_current_context()["dag_run"].conf or {}).get("steps", 3))


def pace(what: str) -> int:
    """Say the number of each step; how many there were."""
    for i in range(steps()):
        print(f"{what} step {i}", flush=True)
        time.sleep(STEP)
    return steps()


def traffic() -> dict[str, Any]:
    """XCom, Variable and Connection traffic all along, and a return value."""
    context = get_current_context()
    ti = context["ti"]
    name = f"counter_{ti.id}"
    for i in range(steps()):
        print(f"traffic step {i}", flush=True)
        ti.xcom_push(f"step{i % 3}", i)
        Variable.set(name, f"value {i}")
        assert Variable.get(name) == f"value {i}"
        assert BaseHook.get_connection("suite").login == "somebody"
        time.sleep(STEP)
    return {"steps": steps(), "last": Variable.get(name), "try": ti.try_number}


def reads_what_it_wrote() -> list[str]:
    """Writes, waits until it may go on (by then it is saved), reads, and overwrites, and reads; it may be lost then."""
    context = get_current_context()
    name = f"mine_{context['ti'].id}"
    read = []
    Variable.set(name, "first")
    print("first is written", flush=True)
    while Variable.get(f"go_{context['ti'].id}", default=None) is None:
        time.sleep(STEP)
    for following in ("second", "third"):
        read.append(Variable.get(name))
        Variable.set(name, following)
        read.append(Variable.get(name))
    print("third is written", flush=True)
    pace("afterwards")
    return read


def with_thread_and_server() -> int:
    """A thread counts and a server in the process answers, and neither notices a move."""
    counted = []

    def count() -> None:
        for i in range(steps()):
            counted.append(i)
            time.sleep(STEP)

    class Answer(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200)
            self.send_header("Content-Length", "2")
            self.end_headers()
            self.wfile.write(b"ok")

        def log_message(self, *_: Any) -> None:
            return

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Answer)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    thread = threading.Thread(target=count)
    thread.start()
    for i in range(steps()):
        with urllib.request.urlopen(f"http://127.0.0.1:{server.server_address[1]}/") as answer:
            assert answer.read() == b"ok"
        print(f"server step {i}", flush=True)
        time.sleep(STEP)
    thread.join()
    return len(counted)


def fails_once() -> str:
    """A user's own error in the first try."""
    pace("fails_once")
    ti = get_current_context()["ti"]
    if ti.try_number == 1:
        raise ValueError("the user's own error")
    return f"try {ti.try_number}"


def third_look() -> bool:
    """True at the third look: each counts itself in a Variable, which outlives the process between two."""
    ti = get_current_context()["ti"]
    name = f"looks_{ti.dag_id}_{ti.run_id}".replace(":", "_").replace("+", "_")
    looks = int(Variable.get(name, default="0")) + 1
    Variable.set(name, f"{looks:05d}")
    print(f"look {looks}", flush=True)
    pace("sensor")
    return looks >= 3


class Defers(BaseOperator):
    """Works, is deferred, and works again; each stretch is a worker of its own.

    For eight seconds: LocalExecutor's own event about the first stretch may otherwise meet the second, and fail it.
    """

    def execute(self, context: Any) -> None:
        pace("before")
        self.defer(trigger=TimeDeltaTrigger(timedelta(seconds=8)), method_name="resumed")

    def resumed(self, context: Any, event: Any = None) -> str:
        pace("after")
        return f"try {context['ti'].try_number}"


def called(context: Any) -> None:
    """A callback of Airflow's for failures and retries: leaves a Variable."""
    ti = context["ti"]
    run = "".join(x if x.isalnum() else "-" for x in ti.run_id)
    Variable.set(f"callback_{ti.dag_id}_{run}_{ti.task_id}_{ti.try_number}", "called")


def make(kind: str, executor: str) -> None:
    common: dict[str, Any] = {
        "schedule": None,
        "catchup": False,
        "default_args": {
            "executor": executor,
            "executor_config": CONFIG if kind == "saved" else {},
            "retry_delay": timedelta(seconds=1),
            "on_failure_callback": called,
            "on_retry_callback": called,
        },
    }

    with DAG(f"{kind}_python", **common) as python:
        PythonOperator(task_id="work", python_callable=traffic)

    with DAG(f"{kind}_mapped", **common) as mapped:

        @task
        def numbers() -> list[int]:
            return [1, 2, 3]

        @task
        def square(number: int) -> int:
            pace(f"square {number}")
            return number * number

        @task
        def total(squares: list[int]) -> int:
            return sum(squares)

        total(square.expand(number=numbers()))  # type: ignore[arg-type]

    with DAG(f"{kind}_deferred", **common) as deferred:
        Defers(task_id="work")

    # As for Defers: LocalExecutor's own event about one look may otherwise meet the next one, and fail it.
    for mode, interval in (("poke", 5.0), ("reschedule", 10.0)):
        with DAG(f"{kind}_{mode}", **common) as sensor:
            PythonSensor(
                task_id="wait", python_callable=third_look, mode=mode, poke_interval=interval, timeout=600
            )
        globals()[sensor.dag_id] = sensor

    with DAG(f"{kind}_retried", **common) as retried:
        PythonOperator(task_id="work", python_callable=fails_once, retries=1)

    with DAG(f"{kind}_failed", **common) as failed:
        PythonOperator(task_id="work", python_callable=fails_once)

    with DAG(f"{kind}_branches", **common) as branches:

        @task.branch
        def choose() -> str:
            pace("choose")
            return "taken.inner"

        with TaskGroup("taken") as taken:
            PythonOperator(task_id="inner", python_callable=lambda: pace("inner"))
        left_out = PythonOperator(task_id="left_out", python_callable=lambda: pace("left out"))
        join = EmptyOperator(task_id="join", trigger_rule="none_failed_min_one_success")
        choose() >> [taken, left_out] >> join
        PythonOperator(task_id="never", python_callable=lambda: None, trigger_rule="one_failed").set_upstream(
            join
        )

    with DAG(f"{kind}_server", **common) as server:
        PythonOperator(task_id="work", python_callable=with_thread_and_server)

    with DAG(f"{kind}_periodic", **common) as periodic:
        config = {"checkpoint": {"interval": "4s"}} if kind == "saved" else {}
        PythonOperator(task_id="work", python_callable=traffic, executor_config=config)

    with DAG(f"{kind}_reads", **common) as reads:
        PythonOperator(task_id="work", python_callable=reads_what_it_wrote)

    with DAG(f"{kind}_timed", **common) as timed:
        PythonOperator(
            task_id="work",
            python_callable=lambda: pace("timed"),
            execution_timeout=timedelta(seconds=30),
        )

    with DAG(f"{kind}_quiet", **common) as quiet:  # makes no call before the one that ends it
        PythonOperator(task_id="work", python_callable=lambda: pace("quiet"), do_xcom_push=False)

    for dag in (timed, quiet, periodic, reads, python, mapped, deferred, retried, failed, branches, server):
        globals()[dag.dag_id] = dag


make("local", "LocalExecutor")
make("saved", "saved")
