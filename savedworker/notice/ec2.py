"""Notices of EC2, from its instance metadata service: spot interruptions and rebalance recommendations.

Sources: EC2 user guide, "Spot Instance interruption notices" (poll every 5 s), "EC2 instance rebalance recommendations",
"Use the Instance Metadata Service" (IMDSv2 sessions, hop limit).
"""

from __future__ import annotations

import contextlib
import hashlib
import http.client
import json
import re
import time
from collections.abc import Iterator
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime
from http import HTTPStatus
from typing import Literal
from urllib.parse import urlsplit

from savedworker.notice.base import Notice, Polling

Kind = Literal["interruption", "rebalance"]

TOKEN_TTL = 6 * 3600
"""Seconds that a session token is asked for; 6 h is the most that EC2 gives."""
CLOCK_TOLERANCE = 2.0
"""Seconds by which this instance's clock may differ from the service's, which tells whole seconds, before it counts as wrong."""
_PATHS: tuple[tuple[Kind, str], ...] = (
    ("interruption", "spot/instance-action"),
    ("rebalance", "events/recommendations/rebalance"),
)


_WORD = re.compile(r"[A-Za-z-]{1,32}")
_TIME = re.compile(r"[0-9T:+.Z-]{10,40}")
_TOKEN = re.compile(r"[!-~]{1,4096}")
_MAX_ANSWER = 1 << 16


class _Unavailable(Exception):
    """The service did not answer usefully; the text is what ``problem`` says."""


class Ec2Monitor(Polling):
    """Watches the metadata service of an EC2 instance (or of a local host, which has the same).

    Args:
        metadata: Base URL of the service.
        poll: Seconds between two looks.
        timeout: Seconds for one request.
    """

    source = "ec2"

    def __init__(
        self, metadata: str = "http://169.254.169.254", poll: float = 5.0, timeout: float = 1.0
    ) -> None:
        super().__init__(poll)
        self._base = metadata.rstrip("/")
        self._timeout = timeout
        self._connection: http.client.HTTPConnection | None = None
        self._token: str | None = None
        self._token_end = 0.0
        self._tokenless = False
        self._instance: str | None = None
        self._standing: dict[Kind, Notice] = {}
        self._told: datetime | None = None

    def look(self) -> Iterator[Notice]:
        """Ask the service once; yields what has changed. A failure is no change, and is what ``problem`` then tells."""
        try:
            yield from self._look()
        finally:
            self._hang_up()

    def _look(self) -> Iterator[Notice]:
        problem = None
        for kind, path in _PATHS:
            try:
                text = self._get(f"/latest/meta-data/{path}")
                notice = None if text is None else self._parse(kind, text)
            except _Unavailable as error:
                problem = str(error)
                break
            before = self._standing.get(kind)
            if before is not None and (notice is None or notice.id != before.id):
                del self._standing[kind]
                yield Notice(
                    before.id, self.source, kind, before.deadline, "withdrawn by EC2", withdrawn=True
                )
            if notice is not None and kind not in self._standing:
                self._standing[kind] = notice
                yield notice
        self._problem = problem

    def _parse(self, kind: Kind, text: str) -> Notice | None:
        try:
            document = json.loads(text)
            at = document["time" if kind == "interruption" else "noticeTime"]
            action = document["action"] if kind == "interruption" else "rebalance"
            if not _WORD.fullmatch(action) or not _TIME.fullmatch(at):
                raise ValueError("not an action and a time")
            when = datetime.fromisoformat(at)
            if when.tzinfo is None:
                when = when.replace(tzinfo=UTC)
        except (ValueError, KeyError, TypeError, OverflowError, RecursionError) as error:
            raise _Unavailable(
                f"the metadata service answers a {kind} notice that cannot be read: {text[:200]!a}"
            ) from error
        known = self._standing.get(kind)
        notice_id = hashlib.sha256(
            f"{self.source} {self._instance_id()} {kind} {action} {at}".encode()
        ).hexdigest()[:16]
        if known is not None and known.id == notice_id:
            return known
        if kind == "rebalance":
            return Notice(notice_id, self.source, kind, None, f"rebalance recommended at {at}")
        # The only place where the wall clock counts, and once: the service gives no duration.
        left = max(0.0, (when - self._now()).total_seconds())
        return Notice(notice_id, self.source, kind, time.monotonic() + left, f"{action} at {at}")

    def _now(self) -> datetime:
        """The wall clock, or the service's where ours is wrong: it tells the time with every answer, to the second."""
        own = datetime.now(UTC)
        if self._told is None or abs((own - self._told).total_seconds()) <= CLOCK_TOLERANCE:
            return own
        return self._told

    def _hear(self, date: str | None) -> None:
        with contextlib.suppress(ValueError, TypeError, IndexError, OverflowError):
            told = parsedate_to_datetime(date or "")
            self._told = told if told.tzinfo else told.replace(tzinfo=UTC)

    def _instance_id(self) -> str:
        """Part of the id: two instances can be told to go in the same second."""
        if self._instance is None:
            self._instance = self._get("/latest/meta-data/instance-id") or ""
        return self._instance

    def _get(self, path: str) -> str | None:
        """The document at ``path``; None for 404. Raises _Unavailable."""
        for _ in range(2):
            token = self._session()
            status, text = self._request("GET", path, {"X-aws-ec2-metadata-token": token} if token else {})
            if status == 200:
                return text
            if status == 404:
                return None
            if status == 401:  # the session ended early, or sessions were made compulsory: begin a new one
                self._token = None
                self._tokenless = False
                continue
            raise _Unavailable(self._refusal(status, path))
        raise _Unavailable(f"the metadata service at {self._base} does not accept the token that it gave")

    def _session(self) -> str | None:
        """A session token (IMDSv2); None where the service wants none. Raises _Unavailable."""
        if self._tokenless:
            return None
        if self._token is not None and time.monotonic() < self._token_end:
            return self._token
        asked = time.monotonic()
        headers = {"X-aws-ec2-metadata-token-ttl-seconds": str(TOKEN_TTL)}
        try:
            status, text = self._request("PUT", "/latest/api/token", headers)
        except _Unavailable as error:
            self._do_without_token(error)
            return None
        if status in (404, 405, 501):  # an old or imitated service that knows no sessions
            self._tokenless = True
            return None
        if status != 200 or not text:
            raise _Unavailable(self._refusal(status, "/latest/api/token"))
        token = text.strip()
        if not _TOKEN.fullmatch(token):
            raise _Unavailable("the metadata service answers a session token that cannot be used")
        self._token = token
        self._token_end = asked + 0.9 * TOKEN_TTL
        return self._token

    def _do_without_token(self, failure: _Unavailable) -> None:
        """Tell a service that is not there from one whose token cannot reach us: its hop limit holds for that answer only.

        Raises _Unavailable, unless the service still answers without tokens (IMDSv1).
        """
        status, _ = self._request("GET", "/latest/meta-data/instance-id", {})
        if status != 200:
            raise _Unavailable(
                "the metadata service is there, but its token does not arrive: the instance's hop limit is too low for a "
                "container. Fix: aws ec2 modify-instance-metadata-options --http-put-response-hop-limit 2"
            ) from failure
        self._tokenless = True

    def _refusal(self, status: int, path: str) -> str:
        if status == 403:
            return "the metadata service refuses (403): it is turned off for this instance. Fix: set HttpEndpoint to enabled"
        return f"the metadata service answers {status} for {path}"

    def _body(self, response: http.client.HTTPResponse) -> str:
        """A small document, from a service that may send it drop by drop."""
        until = time.monotonic() + 3 * self._timeout
        body = b""
        while len(body) < _MAX_ANSWER and (part := response.read1(_MAX_ANSWER - len(body))):
            body += part
            if time.monotonic() > until:
                raise TimeoutError("its answer makes no end")
        return body.decode(errors="replace")

    def _request(self, method: str, path: str, headers: dict[str, str]) -> tuple[int, str]:
        """Status and body. Raises _Unavailable when there is no HTTP answer.

        The requests of one look share a connection: this is done all the time, and beside the worker.
        """
        again = self._connection is not None  # which the service may have closed by now
        try:
            return self._exchange(method, path, headers)
        except (OSError, ValueError, http.client.HTTPException) as error:  # time-outs, resets, nonsense
            self._hang_up()
            if again and isinstance(error, ConnectionError):
                return self._request(method, path, headers)
            raise _Unavailable(f"the metadata service at {self._base} cannot be reached: {error}") from error

    def _exchange(self, method: str, path: str, headers: dict[str, str]) -> tuple[int, str]:
        where = urlsplit(self._base)
        if self._connection is None:  # http.client knows no proxies: they are for the world outside
            self._connection = http.client.HTTPConnection(
                where.hostname or "", where.port, timeout=self._timeout
            )
        self._connection.request(method, where.path + path, headers=headers)
        response = self._connection.getresponse()
        self._hear(response.headers.get("Date"))
        body = self._body(response)
        whole = response.isclosed() or response.length == 0
        response.close()
        if not whole:
            self._hang_up()
        return int(response.status), body if response.status == HTTPStatus.OK else ""

    def _hang_up(self) -> None:
        if self._connection is not None:
            self._connection.close()
            self._connection = None
