"""Measures what it costs a task that the relay notes its calls: Variables written one after the other, without an Airflow.

The relay is the agent's own, the store a directory or what SAVEDWORKER_STORE names; the Execution API is a server that says yes.
``not noted``: before the first checkpoint, when there is nothing to go back to. ``noted``: after one. Milliseconds for each call.
"""

from __future__ import annotations

import http.client
import os
import shutil
import statistics
import sys
import tempfile
import threading
import time
import uuid
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

from savedworker.agent.relay.airflow import AirflowRelay, Ties
from savedworker.model.spec import RelaySpec, WorkerSpec
from savedworker.store.backend import open_store
from savedworker.store.worker import WorkerStore

BODY = b'{"val": "' + b"x" * 100 + b'", "description": null}'


class SaysYes(BaseHTTPRequestHandler):
    """The Execution API, as far as it is needed."""

    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True

    def do_PUT(self) -> None:
        self.rfile.read(int(self.headers["Content-Length"]))
        self.send_response(204)
        self.end_headers()

    def log_message(self, format: str, *args: object) -> None:  # noqa: A002 - the base class's name
        return


class Counted:
    """A worker's notes; how many were written, and how many bytes."""

    def __init__(self, worker: WorkerStore) -> None:
        self.worker = worker
        self.notes = self.bytes = 0

    def keep(self, name: str, note: bytes) -> None:
        self.worker.keep_engine_note(name, note)
        self.notes += 1
        self.bytes += len(note)


def measure(calls: int, store: str, upstream: str, noted: bool) -> tuple[list[float], Counted]:
    """Seconds of each of ``calls`` calls."""
    opened = open_store(store)
    opened.ensure()
    worker = WorkerStore(opened, f"cost-{uuid.uuid4().hex[:8]}")
    worker.create_spec(WorkerSpec(id=worker.id, command=("true",)))
    notes = Counted(worker)
    ties = Ties(
        1, worker.load_engine_note, notes.keep, worker.delete_engine_notes, lambda: True, lambda _: True
    )
    relay = AirflowRelay(RelaySpec(kind="airflow", upstream=upstream, task="t"), ties, ("127.0.0.1", 0))
    relay.restored(None)
    relay.start()
    if noted:
        relay.hold("1-1")
        relay.thawed()
        relay.committed("1-1", {"1-1"})
    connection = http.client.HTTPConnection(*relay.address)
    seconds = []
    try:
        for i in range(calls):
            began = time.perf_counter()
            connection.request("PUT", f"/execution/variables/v{i % 7}", body=BODY)
            answer = connection.getresponse()
            answer.read()
            seconds.append(time.perf_counter() - began)
            assert answer.status == 204, answer.status
    finally:
        connection.close()
        relay.stop()
    return seconds, notes


def main() -> None:
    counts = [int(x) for x in sys.argv[1:]] or [200, 1000]
    home = Path(tempfile.mkdtemp(prefix="relay-cost-"))
    store = os.environ.get("SAVEDWORKER_STORE") or f"file://{home}/store"
    api = ThreadingHTTPServer(("127.0.0.1", 0), SaysYes)
    threading.Thread(target=api.serve_forever, daemon=True).start()
    upstream = f"http://127.0.0.1:{api.server_port}/execution/"
    print("| calls with an effect | | median | first 100 | last 100 | in all, s | notes | KiB written |")
    print("|---|---|---|---|---|---|---|---|")
    try:
        for calls in counts:
            for noted in (False, True):
                seconds, notes = measure(calls, store, upstream, noted)
                first, last = (statistics.median(x) * 1000 for x in (seconds[:100], seconds[-100:]))
                print(
                    f"| {calls} | {'noted' if noted else 'not noted'} | {statistics.median(seconds) * 1000:.1f} | {first:.1f} "
                    f"| {last:.1f} | {sum(seconds):.1f} | {notes.notes} | {notes.bytes / 1024:.0f} |"
                )
    finally:
        api.shutdown()
        shutil.rmtree(home, ignore_errors=True)


if __name__ == "__main__":
    main()
