"""An S3 to measure against: moto in a network namespace of its own, plain, behind a delay, or with a limited link.

moto is one Python process on the same cores, so what it takes is the limit of all figures (PLATFORM.md: 170 to 400 MiB/s). It
keeps objects in files below the scratch folder, not in memory. The link is a veth pair; ``tc tbf`` limits it both ways. The delay is
a proxy that holds each request back, since this kernel has no netem.
"""

from __future__ import annotations

import contextlib
import os
import resource
import shutil
import socket
import subprocess
import sys
import threading
import time
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from savedworker.model.errors import Fatal

OURS, THEIRS, PORT = "198.51.100.233", "198.51.100.234", 5000
"""Of a block that is kept for documentation (RFC 5737): nobody else has it."""
BUCKET = "bench"
_SERVER = """
import logging, sys
from moto.server import ThreadedMotoServer
logging.getLogger("werkzeug").setLevel(logging.ERROR)
server = ThreadedMotoServer(ip_address=sys.argv[1], port=int(sys.argv[2]), verbose=False)
server.start()
print("ready", flush=True)
sys.stdin.read()
"""
_PIECE = 1 << 18


@dataclass(frozen=True)
class Kind:
    """One way to reach it. ``delay`` in seconds before each request, ``rate`` in bits per second."""

    delay: float = 0.0
    rate: int = 0

    def __str__(self) -> str:
        said = "s3:// (moto on the same cores"
        if self.delay:
            said += f", each request {self.delay * 1000:g} ms late"
        if self.rate:
            said += f", a link of {self.rate / 1e6:g} Mbit/s"
        return f"{said})"


KINDS = {
    "s3": Kind(),
    "s3-delayed": Kind(delay=0.03),
    "s3-capped": Kind(rate=1_000_000_000),
}


@contextlib.contextmanager
def s3(kind: Kind, scratch: Path) -> Iterator[str]:
    """The URL of an empty bucket; this process's environment leads to it meanwhile. Raises Fatal."""
    name = f"swb-{os.getpid()}"
    files = scratch / f"sw-bench-s3-{os.getpid()}"
    files.mkdir()
    with contextlib.ExitStack() as after:
        after.callback(shutil.rmtree, files, ignore_errors=True)
        _ip("netns", "add", name)
        after.callback(_ip, "netns", "del", name)
        link, end = f"{name[:13]}a", f"{name[:13]}b"
        _ip("link", "add", link, "type", "veth", "peer", "name", end, "netns", name)
        _ip("addr", "add", f"{OURS}/30", "dev", link)
        _ip("link", "set", link, "up")
        _ip("-n", name, "addr", "add", f"{THEIRS}/30", "dev", end)
        _ip("-n", name, "link", "set", end, "up")
        _ip("-n", name, "link", "set", "lo", "up")
        if kind.rate:
            for prefix, device in (((), link), (("ip", "netns", "exec", name), end)):
                limit = f"rate {kind.rate}bit burst 1mb latency 50ms".split()
                _run(*prefix, "tc", "qdisc", "add", "dev", device, "root", "tbf", *limit)
        server = after.enter_context(_server(name, files))
        after.callback(server.kill)
        endpoint = f"http://{THEIRS}:{PORT}"
        if kind.delay:
            endpoint = after.enter_context(_delaying(kind.delay))
        settings = {
            "AWS_ENDPOINT_URL": endpoint,
            "AWS_ACCESS_KEY_ID": "bench",
            "AWS_SECRET_ACCESS_KEY": "bench",
            "AWS_REGION": "us-east-1",
        }
        before = {variable: os.environ.get(variable) for variable in settings}
        after.callback(_restore, before)
        os.environ.update(settings)
        _make_bucket()
        yield f"s3://{BUCKET}/bench"


def _make_bucket() -> None:
    """As soon as moto answers, which is a moment after it says that it is ready."""
    request = urllib.request.Request(f"http://{THEIRS}:{PORT}/{BUCKET}", method="PUT")
    request.add_header(
        "Authorization",
        "AWS4-HMAC-SHA256 Credential=bench/20260101/us-east-1/s3/aws4_request, SignedHeaders=host, Signature=0",
    )
    directly = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    until = time.monotonic() + 30
    while True:
        try:
            directly.open(request, timeout=10).read()
            return
        except OSError as error:
            if time.monotonic() > until:
                raise Fatal(
                    f"moto does not answer: {error}", "see whether something else uses its port"
                ) from error
            time.sleep(0.05)


@contextlib.contextmanager
def _server(name: str, files: Path) -> Iterator[subprocess.Popen[str]]:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)  # moto holds a file for each object
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    try:
        process = subprocess.Popen(
            ["ip", "netns", "exec", name, sys.executable, "-c", _SERVER, THEIRS, str(PORT)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
            env={**os.environ, "TMPDIR": str(files), "MOTO_S3_DEFAULT_KEY_BUFFER_SIZE": "65536"},
        )
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    with process:
        try:
            if process.stdout is None or process.stdout.readline() != "ready\n":
                raise Fatal("moto does not start", "pip install 'moto[server]'")
            yield process
        finally:
            process.kill()


@contextlib.contextmanager
def _delaying(seconds: float) -> Iterator[str]:
    """The address of a proxy that holds each request back for ``seconds``, and nothing else."""
    listener = socket.create_server(("127.0.0.1", 0))

    def accept() -> None:
        with contextlib.suppress(OSError):
            while True:
                client, _ = listener.accept()
                server = socket.create_connection((THEIRS, PORT))
                turn = _Turn()
                for source, target, is_client in ((client, server, True), (server, client, False)):
                    threading.Thread(
                        target=_pump, args=(source, target, turn, seconds if is_client else 0.0), daemon=True
                    ).start()

    threading.Thread(target=accept, daemon=True).start()
    try:
        yield f"http://127.0.0.1:{listener.getsockname()[1]}"
    finally:
        listener.close()


class _Turn:
    """Whether the server spoke last: then what the client says is a new request."""

    def __init__(self) -> None:
        self.new_request = True


def _pump(source: socket.socket, target: socket.socket, turn: _Turn, delay: float) -> None:
    buffer = bytearray(_PIECE)
    with contextlib.suppress(OSError):
        while size := source.recv_into(buffer):
            if delay and turn.new_request:
                time.sleep(delay)
            turn.new_request = not delay
            target.sendall(memoryview(buffer)[:size])
    with contextlib.suppress(OSError):
        target.shutdown(socket.SHUT_WR)


def _restore(before: dict[str, str | None]) -> None:
    for variable, value in before.items():
        if value is None:
            os.environ.pop(variable, None)
        else:
            os.environ[variable] = value


def _ip(*words: str) -> None:
    _run("ip", *words)


def _run(*words: str) -> None:
    done = subprocess.run(words, capture_output=True, text=True, check=False)
    if done.returncode:
        raise Fatal(f"{' '.join(words)}: {done.stderr.strip()}", "run as root, with iproute2 installed")
