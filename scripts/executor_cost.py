"""Measures tasks that do nothing, one after the other, in a real Airflow: first under LocalExecutor, then as saved workers.

``queued to running``: from the scheduler's decision to the task's own start, as Airflow's database has it. ``whole task``: until it has its
end. ``processor``: seconds of the whole machine, less what the idle Airflow uses in that time.
"""

from __future__ import annotations

import shutil
import statistics
import sys
import tempfile
import time
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

from savedworker.controller.client import Client
from savedworker.fleet.local import LocalFleet, network
from savedworker.model.decisions import settled
from savedworker.store.backend import open_store
from scripts.local_airflow import LocalAirflow

DAG = """
from airflow.providers.standard.operators.python import PythonOperator
from airflow.sdk import DAG

for name, executor in (("local", "LocalExecutor"), ("saved", "saved")):
    with DAG(name, schedule=None) as dag:
        PythonOperator(task_id="work", python_callable=lambda: None, executor=executor)
    globals()[name] = dag
"""


@dataclass
class Cost:
    """Seconds, medians over the tasks; bytes in the store for each."""

    queued: float
    whole: float
    processor: float
    stored: int


def busy() -> float:
    """Seconds that all processors of this machine have worked."""
    fields = [int(x) for x in Path("/proc/stat").read_text().split()[1:8]]
    return (sum(fields) - sum(fields[3:5])) / 100.0  # without idle and iowait


def _at(text: str) -> datetime:
    return datetime.fromisoformat(text)


def measure(airflow: LocalAirflow, dag: str, tasks: int, store: Path) -> Cost:
    """Run the DAG ``tasks`` times. Raises AirflowTrouble when one does not end."""
    began = busy(), time.monotonic()
    time.sleep(10.0)
    idle = (busy() - began[0]) / (time.monotonic() - began[1])
    queued, whole, processor = [], [], []
    size = _size(store)
    for _ in range(tasks):
        before = busy(), time.monotonic()
        run = airflow.trigger(dag)
        airflow.wait(
            lambda run=run: airflow.run_state(dag, run) == "success", 120, f"{dag} to end", every=0.2
        )
        ti: dict[str, Any] = airflow.task(dag, run, "work")
        time.sleep(6.0)  # what follows the task's end is its cost too
        processor.append(busy() - before[0] - idle * (time.monotonic() - before[1]))
        queued.append((_at(ti["start_date"]) - _at(ti["queued_when"])).total_seconds())
        whole.append((_at(ti["end_date"]) - _at(ti["queued_when"])).total_seconds())
    return Cost(
        statistics.median(queued),
        statistics.median(whole),
        statistics.median(processor),
        (_size(store) - size) // tasks,
    )


def _size(folder: Path) -> int:
    return sum(x.stat().st_size for x in folder.rglob("*") if x.is_file()) if folder.exists() else 0


def main() -> None:
    tasks = int(sys.argv[1]) if len(sys.argv) > 1 else 5
    home = Path(tempfile.mkdtemp(prefix="executor-cost-"))
    (home / "dags").mkdir()
    (home / "dags/cost.py").write_text(DAG)
    network.ensure_bridge()
    settings = {
        "SAVEDWORKER_STORE": f"file://{home}/store",
        "SAVEDWORKER_LOCAL_DIR": str(home / "hosts"),
        "AIRFLOW__CORE__EXECUTOR": "LocalExecutor,saved:airflow_provider_savedworker.executors.SavedWorkerExecutor",
        "AIRFLOW__LOGGING__LOGGING_CONFIG_CLASS": "airflow_provider_savedworker.log.config.LOGGING_CONFIG",
    }
    airflow = LocalAirflow(home / "airflow", home / "dags", settings, host=network.GATEWAY)
    fleet = LocalFleet(home / "hosts")
    client = Client(open_store(settings["SAVEDWORKER_STORE"]), fleets=lambda _: fleet)
    try:
        airflow.start()
        costs = {name: measure(airflow, name, tasks, home / "store") for name in ("local", "saved")}
    finally:
        airflow.stop()
        client.store.ensure()
        for worker in [x.id for x in client.list()]:
            client.cancel(worker, "the end of the measurement")
            while not settled(client.reconcile(worker)):
                time.sleep(0.2)
    shutil.rmtree(home, ignore_errors=True)
    print(f"| {tasks} tasks, medians | LocalExecutor | SavedWorkerExecutor |\n|---|---|---|")
    local, saved = costs["local"], costs["saved"]
    print(f"| queued to running, seconds | {local.queued:.1f} | {saved.queued:.1f} |")
    print(f"| whole task, seconds | {local.whole:.1f} | {saved.whole:.1f} |")
    print(f"| processor, seconds | {local.processor:.1f} | {saved.processor:.1f} |")
    print(f"| in the store, KiB | {local.stored / 1024:.0f} | {saved.stored / 1024:.0f} |")


if __name__ == "__main__":
    main()
