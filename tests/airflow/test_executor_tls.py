"""Long: an Airflow whose API is served over TLS, with a certificate that only its own configuration knows.

./scripts/test -m sweep tests/airflow/test_executor_tls.py
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial

import pytest

from savedworker.fleet.local import network
from tests.airflow.engine import eventually
from tests.airflow.executor_bed import Bed, Run, executor_bed, in_the_meantime, oracle
from tests.certificates import make_certificates

pytestmark = [pytest.mark.sweep, pytest.mark.engine, pytest.mark.criu, pytest.mark.timeout(600)]

NAMES = ("python", "deferred")


@pytest.fixture(scope="module")
def bed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Bed]:
    made = make_certificates(tmp_path_factory.mktemp("certificates"), network.GATEWAY)
    settings = {
        "AIRFLOW__API__SSL_CERT": str(made.server),
        "AIRFLOW__API__SSL_KEY": str(made.key),
        "AIRFLOW__API__SSL_CA_FILE": str(made.authority),
    }
    with executor_bed(tmp_path_factory.mktemp("tls"), settings) as started:
        yield started


def _agree(run: Run, local: Run) -> bool:
    return run.facts() == local.facts()


def test_tasks_move_and_agree_with_local_executor_where_the_api_is_served_over_tls(bed: Bed) -> None:
    assert bed.airflow.url.startswith("https://")
    runs = {name: bed.run(f"saved_{name}", 10) for name in NAMES}
    worker = runs["python"].running(said="traffic step 1")
    runs["python"].move(worker, 20.0)
    local = oracle(bed, NAMES, dict.fromkeys(NAMES, 10), 300)
    in_the_meantime(runs.values(), lambda: None, 300)
    for name, run in runs.items():
        what = f"{run.facts()} is {local[name].facts()}"
        eventually(partial(_agree, run, local[name]), 30, what, every=2.0)
    record = bed.client.record(worker)
    assert (record.migrations, record.cold_starts) == (1, 0)
    assert bed.client.spec(worker).relay.upstream.startswith("https://")  # type: ignore[union-attr]
    assert bed.refused_heartbeats() == []
