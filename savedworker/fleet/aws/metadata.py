"""What an instance of EC2 knows of itself: its metadata service, version 2. Standard library only: every instance has it.

Source: EC2 user guide, "Use the Instance Metadata Service".
"""

from __future__ import annotations

import json
import time
import urllib.error
import urllib.request
from dataclasses import dataclass

from savedworker.model.errors import Temporary

DEFAULT = "http://169.254.169.254"
_TTL = 300
_LIMIT = 1 << 20


@dataclass(frozen=True)
class Credentials:
    """What a role gives for a while."""

    access_key: str
    secret_key: str
    token: str


class InstanceMetadata:
    """The metadata service at ``base``. ``timeout``: seconds for one request, ``patience``: seconds for which one that fails is repeated."""

    def __init__(self, base: str = DEFAULT, timeout: float = 2.0, patience: float = 30.0) -> None:
        self._base = base.rstrip("/")
        self._timeout = timeout
        self._patience = patience
        # Proxies are for the world outside; the metadata service is next door.
        self._opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
        self._token: str | None = None

    def get(self, path: str) -> str | None:
        """The text of ``/latest/meta-data/PATH``; None when there is no such thing. Raises Temporary when nobody answers."""
        until = time.monotonic() + self._patience
        while True:
            try:
                return self._get(path)
            except OSError as error:
                if time.monotonic() >= until:
                    raise Temporary(
                        f"the metadata service at {self._base} does not answer: {error}"
                    ) from error
                time.sleep(0.5)

    def tag(self, key: str) -> str | None:
        """A tag of this instance, where the instance may see them (InstanceMetadataTags)."""
        return self.get(f"tags/instance/{key}")

    def role_credentials(self) -> Credentials | None:
        """Of the instance's role; None without a role."""
        roles = (self.get("iam/security-credentials/") or "").split()
        text = self.get(f"iam/security-credentials/{roles[0]}") if roles else None
        if text is None:
            return None
        found = json.loads(text)
        return Credentials(found["AccessKeyId"], found["SecretAccessKey"], found["Token"])

    def _get(self, path: str) -> str | None:
        if self._token is None:
            headers = {"X-aws-ec2-metadata-token-ttl-seconds": str(_TTL)}
            self._token = self._request("PUT", "/latest/api/token", headers)
        try:
            return self._request(
                "GET", f"/latest/meta-data/{path}", {"X-aws-ec2-metadata-token": self._token or ""}
            )
        except urllib.error.HTTPError as error:
            error.close()
            if error.code == 404:
                return None
            self._token = None  # it may have run out
            raise

    def _request(self, method: str, path: str, headers: dict[str, str]) -> str:
        request = urllib.request.Request(f"{self._base}{path}", headers=headers, method=method)
        with self._opener.open(request, timeout=self._timeout) as response:
            return str(response.read(_LIMIT).decode(errors="replace")).strip()
