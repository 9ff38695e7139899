"""One request to the engine's interface, on a connection of its own."""

from __future__ import annotations

import http.client
import json
import ssl
from collections.abc import Mapping
from http import HTTPStatus
from urllib.parse import urlsplit

from savedworker.agent.inner.web import Answer
from savedworker.model.units import format_size

HOP = frozenset(
    {
        "accept-encoding",
        "authorization",
        "connection",
        "content-length",
        "host",
        "keep-alive",
        "proxy-authorization",
        "te",
        "trailer",
        "transfer-encoding",
        "upgrade",
    }
)
"""Headers that concern one connection only, and those that the relay sets itself."""
MAX_BODY = 256 << 20
"""Bytes of a request or an answer that are relayed."""


class Upstream:
    """The interface below ``base``. For any number of threads. ``authorities``: see ``RelaySpec``. Raises ssl.SSLError."""

    def __init__(self, base: str, authorities: str = "") -> None:
        parts = urlsplit(base)
        self._host, self._port, self._secure = parts.hostname or "", parts.port, parts.scheme == "https"
        self._prefix = parts.path.rstrip("/")
        self._tls = ssl.create_default_context() if self._secure else None
        if self._tls is not None and authorities:
            self._tls.load_verify_locations(cadata=authorities)

    def send(
        self, method: str, path: str, headers: Mapping[str, str], body: bytes, token: str, timeout: float
    ) -> Answer:
        """Send it. ``path`` begins with a slash and counts from the base. Raises OSError, http.client.HTTPException.

        An answer that is too long to be relayed is as if it were refused: the next one would be no shorter.
        """
        connection: http.client.HTTPConnection
        if self._tls is not None:
            connection = http.client.HTTPSConnection(
                self._host, self._port, timeout=timeout, context=self._tls
            )
        else:
            connection = http.client.HTTPConnection(self._host, self._port, timeout=timeout)
        try:
            given = {k: v for k, v in headers.items() if k.lower() not in HOP}
            if token:
                given["Authorization"] = f"Bearer {token}"
            connection.request(method, self._prefix + path, body=body or None, headers=given)
            response = connection.getresponse()
            content = response.read(MAX_BODY + 1)
            if len(content) > MAX_BODY:
                return _too_long(path)
            found = {k.lower(): v for k, v in response.getheaders() if k.lower() not in HOP}
            return Answer(response.status, content, found)
        finally:
            connection.close()


def _too_long(path: str) -> Answer:
    message = (
        f"the answer for {path.partition('?')[0]} has more than {format_size(MAX_BODY)}, the most that is relayed to a saved worker; "
        "fix: keep the value in a file or an object store, and pass its address"
    )
    detail = {"detail": {"reason": "too_long", "message": message}}
    kind = {"content-type": "application/json"}
    return Answer(HTTPStatus.REQUEST_ENTITY_TOO_LARGE, json.dumps(detail).encode(), kind)
