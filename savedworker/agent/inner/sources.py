"""Where this instance gets AWS credentials from, in the order of the SDKs: environment, container, instance.

Standard library only: an instance has no SDK. Sources: "Container credential provider" (SDKs and tools reference), "Retrieve security
credentials from instance metadata" (EC2 user guide, IMDSv2).
"""

from __future__ import annotations

import http.client
import json
import re
import time
import urllib.error
import urllib.request
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Protocol

from savedworker.model.errors import SavedWorkerError

CONTAINER_HOST = "http://169.254.170.2"
REQUEST_TIMEOUT = 1.0
"""Seconds for one request to what is next door."""
_MAX_ANSWER = 1 << 16
_SESSION = 300
_ROLE = re.compile(r"[A-Za-z0-9_+=,.@-]{1,128}")
STATIC_LIFE = timedelta(minutes=30)
"""What is told as the rest of the life of keys that have no end, so that a worker asks again after a move."""


class Unavailable(SavedWorkerError):
    """There are no credentials to be had here at present."""

    code = "credentials_unavailable"


@dataclass(frozen=True)
class Credentials:
    """Keys of a role or a user. ``expires``: when they end, None for keys without an end."""

    access_key: str
    secret_key: str
    token: str = ""
    expires: datetime | None = None
    account: str | None = None

    def __repr__(self) -> str:
        return f"Credentials({self.access_key!r}, expires={self.expires})"


class Source(Protocol):
    """One place that may have credentials."""

    def fetch(self) -> Credentials | None:
        """Credentials as they are now; None when this source is not meant to be used here. Raises Unavailable."""
        ...


def sources(environment: Mapping[str, str], metadata: str) -> list[Source]:
    """The sources of an agent with this environment on an instance whose metadata service is at ``metadata``."""
    return [EnvironmentSource(environment), ContainerSource(environment), InstanceSource(metadata)]


def first(known: Sequence[Source]) -> Credentials:
    """The credentials of the first source that is meant to be used. Raises Unavailable."""
    for source in known:
        found = source.fetch()
        if found is not None:
            return found
    raise Unavailable("this instance has no credentials")


@dataclass(frozen=True)
class EnvironmentSource:
    """The agent's own environment."""

    environment: Mapping[str, str]

    def fetch(self) -> Credentials | None:
        """See ``Source``."""
        access, secret = (
            self.environment.get(name, "") for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY")
        )
        if not access or not secret:
            return None
        return Credentials(access, secret, self.environment.get("AWS_SESSION_TOKEN", ""))


@dataclass(frozen=True)
class ContainerSource:
    """The role of the task whose container the agent is in (ECS and with it AWS Batch; EKS)."""

    environment: Mapping[str, str]

    def fetch(self) -> Credentials | None:
        """See ``Source``."""
        relative = self.environment.get("AWS_CONTAINER_CREDENTIALS_RELATIVE_URI")
        url = (
            CONTAINER_HOST + relative
            if relative
            else self.environment.get("AWS_CONTAINER_CREDENTIALS_FULL_URI")
        )
        if not url:
            return None
        status, text = request("GET", url, self._headers())
        if status != 200:
            raise Unavailable(
                f"the container's credentials service answers {status}", "give the job a role (jobRoleArn)"
            )
        return parse(text, "the container's credentials service")

    def _headers(self) -> dict[str, str]:
        file = self.environment.get("AWS_CONTAINER_AUTHORIZATION_TOKEN_FILE")
        token = self.environment.get("AWS_CONTAINER_AUTHORIZATION_TOKEN")
        if file:
            try:
                token = Path(file).read_text().strip()
            except OSError as error:
                raise Unavailable(f"{file} cannot be read: {error.strerror}") from error
        return {"Authorization": token} if token else {}


@dataclass(frozen=True)
class InstanceSource:
    """The role of the EC2 instance, from its metadata service (IMDSv2)."""

    metadata: str

    def fetch(self) -> Credentials | None:
        """See ``Source``."""
        base = self.metadata.rstrip("/")
        status, token = request(
            "PUT", f"{base}/latest/api/token", {"X-aws-ec2-metadata-token-ttl-seconds": str(_SESSION)}
        )
        if status != 200:
            raise Unavailable(f"the metadata service answers {status} to the request for a session")
        headers = {"X-aws-ec2-metadata-token": token.strip()}
        where = f"{base}/latest/meta-data/iam/security-credentials/"
        status, names = request("GET", where, headers)
        role = names.split("\n", 1)[0].strip()
        if status != 200 or not _ROLE.fullmatch(role):
            raise Unavailable("the instance has no role", "give it an instance profile")
        status, text = request("GET", where + role, headers)
        if status != 200:
            raise Unavailable(f"the metadata service answers {status} for the role {role}")
        return parse(text, "the metadata service")


def parse(text: str, whose: str) -> Credentials:
    """The credentials in a JSON document of either service. Raises Unavailable."""
    try:
        document = json.loads(text)
        if document.get("Code", "Success") != "Success":
            raise Unavailable(f"{whose} says {str(document.get('Code'))[:80]!a}")
        access, secret, token = (
            document["AccessKeyId"],
            document["SecretAccessKey"],
            document.get("Token") or "",
        )
        expires = datetime.fromisoformat(document["Expiration"])
        account = document.get("AccountId")
        if not all(isinstance(value, str) for value in (access, secret, token)) or expires.tzinfo is None:
            raise ValueError("not as documented")
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise Unavailable(
            f"{whose} answers what are no credentials"
        ) from error  # not their text: it may be secret
    return Credentials(access, secret, token, expires, account if isinstance(account, str) else None)


def request(
    method: str,
    url: str,
    headers: Mapping[str, str],
    body: bytes | None = None,
    timeout: float = REQUEST_TIMEOUT,
) -> tuple[int, str]:
    """Status and body of one request. Raises Unavailable when there is no HTTP answer.

    What is next door is asked without any proxy; what is far (https) as the environment says.
    """
    proxies = urllib.request.ProxyHandler() if url.startswith("https:") else urllib.request.ProxyHandler({})
    opener = urllib.request.build_opener(proxies)
    until = time.monotonic() + 3 * timeout
    where = url.split("?", 1)[0]
    try:
        wanted = urllib.request.Request(url, headers=dict(headers), method=method, data=body)
        with opener.open(wanted, timeout=timeout) as response:
            text = b""
            while len(text) < _MAX_ANSWER and (part := response.read1(_MAX_ANSWER - len(text))):
                text += part
                if time.monotonic() > until:
                    raise TimeoutError("its answer makes no end")
            return int(response.status), text.decode(errors="replace")
    except urllib.error.HTTPError as error:
        with error:
            return error.code, ""
    except (OSError, ValueError, http.client.HTTPException) as error:
        reason = getattr(error, "reason", None) or error
        raise Unavailable(f"{where} cannot be reached: {reason}") from error


def now() -> datetime:
    """The wall clock: credentials end by it."""
    return datetime.now(UTC)
