"""Stores to test against: a directory, moto's S3, and that S3 behind a proxy that loses answers."""

from __future__ import annotations

import http.client
import logging
import os
import threading
import uuid
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import boto3
import pytest
from moto.server import ThreadedMotoServer

from savedworker.store import Store, open_store

BUCKET = "saved-worker-tests"


SETTINGS = {"AWS_ACCESS_KEY_ID": "test", "AWS_SECRET_ACCESS_KEY": "test", "AWS_REGION": "us-east-1"}


def s3_client(endpoint: str) -> Any:
    """A client of the server there, whatever the environment says."""
    return boto3.client(
        "s3",
        endpoint_url=endpoint,
        region_name=SETTINGS["AWS_REGION"],
        aws_access_key_id="test",
        aws_secret_access_key="test",
    )


@pytest.fixture(scope="session")
def s3_server() -> Iterator[str]:
    """A moto S3 server with a bucket."""
    logging.getLogger("werkzeug").setLevel(logging.ERROR)
    server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    host, port = server.get_host_and_port()
    endpoint = f"http://{host}:{port}"
    client = s3_client(endpoint)
    client.create_bucket(Bucket=BUCKET)
    client.close()
    yield endpoint
    server.stop()


@pytest.fixture
def s3_endpoint(s3_server: str, monkeypatch: pytest.MonkeyPatch) -> str:
    """That server, and for this test the AWS variables that lead to it."""
    for name in list(os.environ):
        if name.startswith("AWS_") and name != "AWS_CA_BUNDLE":
            monkeypatch.delenv(name)
    for name, value in SETTINGS.items():
        monkeypatch.setenv(name, value)
    return s3_server


@pytest.fixture
def s3_url() -> str:
    return f"s3://{BUCKET}/{uuid.uuid4().hex}"


@pytest.fixture(params=["file", "s3"])
def url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """The URL of an empty store of each kind; the environment leads to it."""
    if request.param == "file":
        return (tmp_path / "store").as_uri()
    patch = request.getfixturevalue("monkeypatch")
    patch.setenv("AWS_ENDPOINT_URL", request.getfixturevalue("s3_endpoint"))
    return str(request.getfixturevalue("s3_url"))


@pytest.fixture
def store(url: str) -> Store:
    return open_store(url, timeout=10)


Fault = Callable[[str, str], str]
"""(method, path) -> "" to pass on, or "before" / "after" (whether the request reaches S3) with "500" or "drop"."""


class FaultyProxy:
    """An HTTP proxy in front of S3. ``fault`` decides per request; ``requests`` are the methods and paths seen."""

    def __init__(self, upstream: str) -> None:
        host, port = upstream.removeprefix("http://").split(":")
        self.fault: Fault = lambda method, path: ""
        self.requests: list[tuple[str, str]] = []
        proxy = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def handle_any(self) -> None:
                body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
                proxy.requests.append((self.command, self.path))
                fault = proxy.fault(self.command, self.path)
                status, headers, answer = 500, [], b""
                if not fault.startswith("before"):
                    connection = http.client.HTTPConnection(host, int(port), timeout=20)
                    # The Host header stays as the client signed it.
                    connection.putrequest(self.command, self.path, skip_host=True, skip_accept_encoding=True)
                    for name, value in self.headers.items():
                        connection.putheader(name, value)
                    connection.endheaders(body)
                    response = connection.getresponse()
                    status, headers, answer = response.status, response.getheaders(), response.read()
                    connection.close()
                if fault.endswith("drop"):
                    self.close_connection = True
                    self.connection.close()
                    return
                if fault.endswith("500"):
                    status, headers, answer = 500, [], b"<Error><Code>InternalError</Code></Error>"
                self.send_response_only(status)
                for name, value in headers:
                    if name.lower() not in ("content-length", "transfer-encoding", "connection"):
                        self.send_header(name, value)
                length = (
                    dict(headers).get("Content-Length", "0") if self.command == "HEAD" else str(len(answer))
                )
                self.send_header("Content-Length", length)
                self.end_headers()
                if self.command != "HEAD":
                    self.wfile.write(answer)

            do_GET = do_PUT = do_POST = do_HEAD = do_DELETE = handle_any

            def log_message(self, format: str, *args: object) -> None:  # noqa: A002 - the base class's name
                return

        class Server(ThreadingHTTPServer):
            daemon_threads = True

            def handle_error(self, request: object, client_address: object) -> None:
                return  # connections are dropped on purpose

        self._server = Server(("127.0.0.1", 0), Handler)
        self.endpoint = f"http://127.0.0.1:{self._server.server_port}"
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.05,), daemon=True)
        self._thread.start()

    def stop(self) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()

    def fail_first(self, method: str, how: str, times: int = 1) -> None:
        """Let the first ``times`` requests with ``method`` fail in the way ``how``, and all others through."""
        left = times

        def fault(seen: str, path: str) -> str:
            nonlocal left
            if seen == method and left > 0:
                left -= 1
                return how
            return ""

        self.fault = fault


@pytest.fixture
def proxy(s3_endpoint: str) -> Iterator[FaultyProxy]:
    faulty = FaultyProxy(s3_endpoint)
    yield faulty
    faulty.stop()


@pytest.fixture
def proxied(proxy: FaultyProxy, s3_url: str, monkeypatch: pytest.MonkeyPatch) -> Store:
    """A store on S3 behind ``proxy``."""
    monkeypatch.setenv("AWS_ENDPOINT_URL", proxy.endpoint)
    return open_store(s3_url, timeout=8)
