"""An object store for schedules: moto in a process of its own, on the bridge where hosts reach it."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator

from savedworker.fleet.local import network
from tests.runtime.world import BRIDGE

SETTINGS = {
    "AWS_ACCESS_KEY_ID": "test",
    "AWS_SECRET_ACCESS_KEY": "test",
    "AWS_REGION": "us-east-1",
    "AWS_DEFAULT_REGION": "us-east-1",
}
BUCKET = "workers"


@contextlib.contextmanager
def moto() -> Iterator[tuple[str, int]]:
    """A server with an empty bucket; its address."""
    network.ensure_bridge()
    program = (
        "import logging, sys, time\n"
        "from moto.server import ThreadedMotoServer\n"
        "logging.getLogger('werkzeug').setLevel(logging.ERROR)\n"
        f"server = ThreadedMotoServer(ip_address={BRIDGE!r}, port=0, verbose=False)\n"
        "server.start()\n"
        "print(server.get_host_and_port()[1], flush=True)\n"
        "sys.stdin.read()\n"
    )
    with subprocess.Popen(
        [sys.executable, "-c", program],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    ) as server:
        try:
            assert server.stdout is not None
            port = int(server.stdout.readline())
            for _ in range(50):
                with contextlib.suppress(OSError):
                    request = urllib.request.Request(f"http://{BRIDGE}:{port}/{BUCKET}", method="PUT")
                    request.add_header(
                        "Authorization",
                        "AWS4-HMAC-SHA256 Credential=test/20260101/us-east-1/s3/aws4_request, SignedHeaders=host, Signature=0",
                    )
                    urllib.request.urlopen(request, timeout=10).read()
                    break
                time.sleep(0.1)
            yield BRIDGE, port
        finally:
            server.kill()


@contextlib.contextmanager
def object_store() -> Iterator[str]:
    """The URL of a bucket, with the environment that reaches it."""
    with moto() as (host, port):
        values = {**SETTINGS, "AWS_ENDPOINT_URL": f"http://{host}:{port}"}
        before = {name: os.environ.get(name) for name in values}
        os.environ.update(values)
        try:
            yield f"s3://{BUCKET}"
        finally:
            for name, value in before.items():
                os.environ.pop(name, None) if value is None else os.environ.update({name: value})
