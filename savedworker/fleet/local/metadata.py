"""The instance metadata service of a local host, as EC2's: tokens, identity, interruption and rebalance notices.

Paths, status codes and formats follow the EC2 user guide ("Use the Instance Metadata Service", "Spot Instance interruption
notices", "EC2 instance rebalance recommendations", "Retrieve security credentials from instance metadata"), so that the same monitor watches both.
"""

from __future__ import annotations

import json
import logging
import secrets
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from math import ceil
from socketserver import TCPServer

log = logging.getLogger(__name__)

TOKEN_HEADER = "X-aws-ec2-metadata-token"
TTL_HEADER = "X-aws-ec2-metadata-token-ttl-seconds"
MAX_TTL = 21600
MAX_TOKENS = 10_000


@dataclass(frozen=True)
class Role:
    """An instance profile's role. ``seconds``: the life of the credentials that are given out."""

    name: str
    access_key: str
    secret_key: str
    token: str
    seconds: float

    def document(self) -> str:
        """What ``iam/security-credentials/NAME`` answers."""
        now = datetime.now(UTC)
        return json.dumps(
            {
                "Code": "Success",
                "LastUpdated": f"{now:%Y-%m-%dT%H:%M:%SZ}",
                "Type": "AWS-HMAC",
                "AccessKeyId": self.access_key,
                "SecretAccessKey": self.secret_key,
                "Token": self.token,
                "Expiration": f"{now + timedelta(seconds=self.seconds):%Y-%m-%dT%H:%M:%SZ}",
            },
            indent=2,
        )


@dataclass(frozen=True)
class Told:
    """What a service tells besides an instance's own facts. ``documents``: by path below ``/latest/``, also instead of those."""

    role: Role | None = None
    documents: Mapping[str, str] = field(default_factory=dict)


class Metadata:
    """What the service tells at present. All methods may be called from any thread."""

    def __init__(self, instance: str, zone: str, address: str, told: Callable[[], Told] = Told) -> None:
        """``told`` is asked at every request: what there is besides then."""
        self._told = told
        self._lock = threading.Lock()
        self._tokens: dict[str, float] = {}
        self._identity = {
            "accountId": "000000000000",
            "architecture": "x86_64",
            "availabilityZone": zone,
            "imageId": "local",
            "instanceId": instance,
            "instanceType": "local",
            "privateIp": address,
            "region": zone.rpartition("-")[0],
            "version": "2017-09-30",
        }
        self._action: str | None = None
        self._rebalance: str | None = None

    def interrupt(self, seconds: float) -> float:
        """Announce termination ``seconds`` from now, rounded up to the format's whole second; returns seconds until then."""
        now = time.time()
        at = ceil(now + seconds)
        with self._lock:
            self._action = datetime.fromtimestamp(at, UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
        return at - now

    def rebalance(self) -> None:
        """Announce an elevated risk, from now on."""
        with self._lock:
            self._rebalance = datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")

    def withdraw(self) -> None:
        """Take back all that was announced."""
        with self._lock:
            self._action = self._rebalance = None

    def new_token(self, ttl: float) -> str:
        """A token that is good for ``ttl`` seconds."""
        now = time.monotonic()
        with self._lock:
            if len(self._tokens) >= MAX_TOKENS:
                self._tokens = {token: end for token, end in self._tokens.items() if end > now}
            token = secrets.token_urlsafe(40)
            self._tokens[token] = now + ttl
        return token

    def knows(self, token: str | None) -> bool:
        """Whether ``token`` is good."""
        with self._lock:
            return token is not None and self._tokens.get(token, 0.0) > time.monotonic()

    def drop_tokens(self) -> None:
        """Forget every token, as when they expire."""
        with self._lock:
            self._tokens.clear()

    def get(self, path: str) -> str | None:
        """The document at ``path``; None where there is none."""
        with self._lock:
            action, rebalance = self._action, self._rebalance
        meta: dict[str, str | None] = {
            "instance-id": self._identity["instanceId"],
            "instance-type": self._identity["instanceType"],
            "instance-life-cycle": "spot",
            "local-ipv4": self._identity["privateIp"],
            "placement/availability-zone": self._identity["availabilityZone"],
            "placement/region": self._identity["region"],
            "events/recommendations/rebalance": rebalance and json.dumps({"noticeTime": rebalance}),
            "spot/instance-action": action and json.dumps({"action": "terminate", "time": action}),
        }
        told = self._told()
        if told.role is not None:
            meta[f"iam/security-credentials/{told.role.name}"] = told.role.document()
        documents = {f"meta-data/{name}": text for name, text in meta.items()}
        documents["dynamic/instance-identity/document"] = json.dumps(self._identity, indent=2)
        documents |= told.documents
        wanted = path.strip("/").partition("/")[2]
        if documents.get(wanted) is not None:
            return documents[wanted]
        prefix = f"{wanted}/" if wanted else ""
        below = {
            n.removeprefix(prefix)
            for n, text in documents.items()
            if text is not None and n.startswith(prefix)
        }
        entries = {name.partition("/")[0] + ("/" if "/" in name else "") for name in below}
        return "\n".join(sorted(entries)) or None


class MetadataServer:
    """Serves ``metadata`` on ``address`` from threads of its own until it is closed. Raises OSError."""

    def __init__(self, metadata: Metadata, address: tuple[str, int]) -> None:
        class Handler(_Handler):
            source = metadata

        self._server = _Server(address, Handler)
        self.port = int(self._server.server_address[1])
        threading.Thread(target=self._server.serve_forever, args=(0.1,), daemon=True, name="metadata").start()

    def close(self) -> None:
        """Stop answering."""
        self._server.shutdown()
        self._server.server_close()


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    block_on_close = False

    def server_bind(
        self,
    ) -> None:  # without HTTPServer's reverse look-up of the address, which can take seconds
        self.allow_reuse_address = True
        TCPServer.server_bind(self)
        self.server_name, self.server_port = "metadata", int(self.server_address[1])


class _Handler(BaseHTTPRequestHandler):
    source: Metadata
    protocol_version = "HTTP/1.1"
    server_version = "EC2ws"
    timeout = 10.0

    def do_PUT(self) -> None:
        if self.path != "/latest/api/token":
            return self._answer(HTTPStatus.NOT_FOUND)
        if "X-Forwarded-For" in self.headers:
            return self._answer(HTTPStatus.FORBIDDEN)
        ttl = self.headers.get(TTL_HEADER, "")
        if not (ttl.isascii() and ttl.isdigit() and 1 <= int(ttl) <= MAX_TTL):
            return self._answer(HTTPStatus.BAD_REQUEST)
        return self._answer(HTTPStatus.OK, self.source.new_token(int(ttl)), {TTL_HEADER: ttl})

    def do_GET(self) -> None:
        if not self.source.knows(self.headers.get(TOKEN_HEADER)):
            return self._answer(HTTPStatus.UNAUTHORIZED)
        if self.path.strip("/").partition("/")[0] != "latest":
            return self._answer(HTTPStatus.NOT_FOUND)
        document = self.source.get(self.path.partition("?")[0])
        return self._answer(HTTPStatus.NOT_FOUND if document is None else HTTPStatus.OK, document or "")

    def _answer(self, status: HTTPStatus, text: str = "", headers: dict[str, str] | None = None) -> None:
        body = text.encode()
        self.send_response(status)
        self.send_header("Content-Type", "text/plain")
        self.send_header("Content-Length", str(len(body)))
        for name, value in (headers or {}).items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None:  # noqa: A002 - the base class's name
        log.debug(format, *args)
