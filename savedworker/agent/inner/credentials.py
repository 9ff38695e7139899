"""AWS credentials for the worker, in the container-credentials protocol at its fixed address.

The worker gets ``AWS_CONTAINER_CREDENTIALS_RELATIVE_URI`` in its environment, which every AWS SDK reads, once. Whatever instance it
is on, the same address answers with what *that* instance has; sessions that exist refresh themselves from it. Only for a spec
that says ``credentials: instance``, and only while the lease is proven.
"""

from __future__ import annotations

import json
import logging
import socket
import threading
from collections.abc import Callable, Mapping, Sequence
from datetime import UTC, datetime, timedelta
from http import HTTPStatus

from savedworker.agent.inner.sources import STATIC_LIFE, Credentials, Source, Unavailable, first, now
from savedworker.agent.inner.web import Answer, Request, WebServer
from savedworker.checkpoint.network import CREDENTIALS, CREDENTIALS_PATH

log = logging.getLogger(__name__)

ASK_AGAIN = timedelta(seconds=60)
"""How long an answer is given again without asking: both services limit how often they are asked."""
FRESH = timedelta(minutes=16)
"""Those that end sooner are asked for anew: from 15 minutes before the end on SDKs want others."""
USABLE = timedelta(seconds=30)
"""Known ones are given when their service does not answer and they last at least so long."""
_HEADERS = {"content-type": "application/json", "cache-control": "no-store"}


class CredentialsService:
    """Answers one path. ``allowed`` says whether this incarnation still holds its lease; ``remark`` gets what people should know."""

    name = "credentials"
    endpoint = CREDENTIALS

    def __init__(
        self, known: Sequence[Source], allowed: Callable[[], bool], remark: Callable[[str], None]
    ) -> None:
        self._sources = known
        self._allowed = allowed
        self._remark = remark
        self._lock = threading.Lock()
        self._kept: tuple[Credentials, datetime] | None = None
        self._problem = ""
        self._server: WebServer | None = None

    def serve(self, listeners: Mapping[str, socket.socket]) -> None:
        """See ``Service``."""
        self._server = WebServer(listeners["tcp"], self, "credentials")

    def close(self) -> None:
        """See ``Service``."""
        if self._server is not None:
            self._server.close()
            self._server = None

    def answer(self, request: Request) -> Answer:
        """The answer to one request of the worker."""
        if request.path.partition("?")[0] != CREDENTIALS_PATH:
            return _refusal(HTTPStatus.NOT_FOUND, "NotFound", f"there is nothing but {CREDENTIALS_PATH}")
        if request.method != "GET":
            return _refusal(HTTPStatus.METHOD_NOT_ALLOWED, "MethodNotAllowed", "use GET")
        if "x-forwarded-for" in request.headers:  # a proxy inside would hand them to others
            return _refusal(HTTPStatus.FORBIDDEN, "Forwarded", "ask without a proxy")
        if not self._allowed():
            return _refusal(HTTPStatus.FORBIDDEN, "Fenced", "this incarnation does not hold the lease")
        try:
            found = self._current()
        except Unavailable as error:
            self._say(str(error))
            return _refusal(HTTPStatus.SERVICE_UNAVAILABLE, "CredentialsUnavailable", str(error))
        self._say("")
        if not self._allowed():  # the service may have taken its time
            return _refusal(HTTPStatus.FORBIDDEN, "Fenced", "this incarnation does not hold the lease")
        return Answer(HTTPStatus.OK, json.dumps(document(found)).encode(), _HEADERS)

    def _current(self) -> Credentials:
        with self._lock:
            if self._kept is not None:
                kept, at = self._kept
                if timedelta(0) <= now() - at < ASK_AGAIN and _lasts(kept, FRESH):
                    return kept
            try:
                found = first(self._sources)
            except Unavailable as error:
                if self._kept is not None and _lasts(self._kept[0], USABLE):
                    log.warning("known credentials are given again: %s", error)
                    return self._kept[0]
                raise
            self._kept = found, now()
            return found

    def _say(self, problem: str) -> None:
        """Have people see each new problem, once."""
        if problem != self._problem:
            self._problem = problem
            self._remark(problem or "there are credentials again")


def document(found: Credentials) -> dict[str, str]:
    """The document of the container-credentials protocol."""
    expires = (found.expires or now() + STATIC_LIFE).astimezone(UTC)
    more = {"AccountId": found.account} if found.account else {}
    return {
        "AccessKeyId": found.access_key,
        "SecretAccessKey": found.secret_key,
        "Token": found.token,
        "Expiration": f"{expires:%Y-%m-%dT%H:%M:%SZ}",
        **more,
    }


def _lasts(found: Credentials, least: timedelta) -> bool:
    return found.expires is None or found.expires - now() > least


def _refusal(status: HTTPStatus, code: str, message: str) -> Answer:
    return Answer(status, json.dumps({"code": code, "message": message}).encode(), _HEADERS)
