"""Logging in to the registry of a worker's image, by the instance's role where it is Amazon's (ECR).

Others take what ``REGISTRY_AUTH_FILE`` of the agent names (Docker's ``config.json``), which skopeo reads by itself. Standard library only.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from urllib.parse import urlsplit

from savedworker.agent.inner.sources import Source, Unavailable, first, request
from savedworker.checkpoint.images import Registry, registry_host
from savedworker.fleet.aws.metadata import Credentials
from savedworker.fleet.aws.secret import authorization
from savedworker.model.errors import Fatal

_ECR = re.compile(
    r"[0-9]{12}\.dkr\.ecr(?P<fips>-fips)?\.(?P<region>[a-z0-9-]+)\.(?P<domain>amazonaws\.com(\.cn)?)"
)
_TARGET = "AmazonEC2ContainerRegistry_V20150921.GetAuthorizationToken"
_BASE64 = re.compile(r"[A-Za-z0-9+/=]{1,8192}")


def log_in(image: str, known: Sequence[Source], folder: Path) -> Registry:
    """What it takes to pull ``image``: for ECR a login that lasts 12 hours, kept in ``folder``. Raises BadSpec, Fatal."""
    host = registry_host(image)
    match = _ECR.fullmatch(host)
    if match is None:
        return Registry()
    try:
        token = _token(
            match["region"], f"api.ecr{match['fips'] or ''}.{match['region']}.{match['domain']}", known
        )
    except Unavailable as error:
        raise Fatal(
            f"image {image}: no login to its registry: {error}",
            "give the instance's role ecr:GetAuthorizationToken and AmazonEC2ContainerRegistryReadOnly",
        ) from error
    file = folder / "registry.json"
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    file.unlink(missing_ok=True)
    with os.fdopen(os.open(file, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as out:
        json.dump({"auths": {host: {"auth": token}}}, out)
    return Registry(file)


def _token(region: str, host: str, known: Sequence[Source]) -> str:
    """ECR's authorization token, which is Docker's ``auth`` already. Raises Unavailable."""
    endpoint = (
        os.environ.get("AWS_ENDPOINT_URL_ECR") or os.environ.get("AWS_ENDPOINT_URL") or f"https://{host}"
    ).rstrip("/")
    found = first(known)
    headers = {
        "content-type": "application/x-amz-json-1.1",
        "host": urlsplit(endpoint).netloc,
        "x-amz-date": f"{datetime.now(UTC):%Y%m%dT%H%M%SZ}",
        "x-amz-target": _TARGET,
        **({"x-amz-security-token": found.token} if found.token else {}),
    }
    signer = Credentials(found.access_key, found.secret_key, found.token)
    headers["authorization"] = authorization(headers, b"{}", "ecr", region, signer)
    status, text = request("POST", f"{endpoint}/", headers, b"{}", timeout=10.0)
    if status != 200:
        raise Unavailable(f"ECR answers {status} to the request for a token")
    try:
        token = json.loads(text)["authorizationData"][0]["authorizationToken"]
    except (ValueError, KeyError, IndexError, TypeError) as error:
        raise Unavailable("ECR answers what is no token") from error
    if not isinstance(token, str) or not _BASE64.fullmatch(token):
        raise Unavailable("ECR answers what is no token")
    return token
