"""Fetches the store's key from SSM or Secrets Manager on an instance, by the instance's role. Standard library only: boto3 is not there.

Sources: "Signature Version 4 signing process" (AWS General Reference), the API references of GetParameter and GetSecretValue.
"""

from __future__ import annotations

import hashlib
import hmac
import json
import os
import urllib.error
import urllib.request
from collections.abc import Callable
from datetime import UTC, datetime
from urllib.parse import urlsplit

from savedworker.fleet.aws.metadata import Credentials, InstanceMetadata
from savedworker.model.errors import Refused, Temporary

_TIMEOUT = 10.0


def fetch_key(
    arn: str, metadata: InstanceMetadata, now: Callable[[], datetime] = lambda: datetime.now(UTC)
) -> str:
    """The text of the parameter or secret ``arn``. Raises Refused when it may not be read, Temporary when nobody answers."""
    parts = arn.split(":", 5)
    if len(parts) != 6 or parts[2] not in ("ssm", "secretsmanager"):
        raise Refused(f"{arn} is no SSM parameter and no secret", "correct key_from of the fleet")
    _, partition, service, region, _, resource = parts
    credentials = metadata.role_credentials()
    if credentials is None:
        raise Refused(
            "this instance has no role to fetch the store's key with", "set instance_profile of the fleet"
        )
    if service == "ssm":
        name = resource.removeprefix("parameter")
        name = name if "/" in name[1:] else name.lstrip("/")  # only names with a path begin with a slash
        target, body = "AmazonSSM.GetParameter", {"Name": name, "WithDecryption": True}
    else:
        target, body = "secretsmanager.GetSecretValue", {"SecretId": arn}
    endpoint = (
        os.environ.get(f"AWS_ENDPOINT_URL_{'SSM' if service == 'ssm' else 'SECRETS_MANAGER'}")
        or os.environ.get("AWS_ENDPOINT_URL")
        or f"https://{service}.{region}.amazonaws.com{'.cn' if partition == 'aws-cn' else ''}"
    ).rstrip("/")
    answer = _post(endpoint, service, region, target, json.dumps(body).encode(), credentials, now(), arn)
    value = answer.get("Parameter", {}).get("Value") if service == "ssm" else answer.get("SecretString")
    if not isinstance(value, str) or not value.strip():
        raise Refused(f"{arn} holds no text", "put the key into it: openssl rand -base64 32")
    return " ".join(value.split())


def _post(
    endpoint: str,
    service: str,
    region: str,
    target: str,
    body: bytes,
    credentials: Credentials,
    now: datetime,
    arn: str,
) -> dict[str, dict[str, str]]:
    headers = {
        "content-type": "application/x-amz-json-1.1",
        "host": urlsplit(endpoint).netloc,
        "x-amz-date": now.strftime("%Y%m%dT%H%M%SZ"),
        "x-amz-security-token": credentials.token,
        "x-amz-target": target,
    }
    headers["authorization"] = authorization(headers, body, service, region, credentials)
    request = urllib.request.Request(f"{endpoint}/", data=body, headers=headers, method="POST")
    try:
        with urllib.request.urlopen(request, timeout=_TIMEOUT) as response:
            answer: dict[str, dict[str, str]] = json.loads(response.read(1 << 20))
            return answer
    except urllib.error.HTTPError as error:
        said = error.read(4096).decode(errors="replace")
        error.close()
        if error.code >= 500 or "Throttl" in said:
            raise Temporary(f"{arn}: AWS answers {error.code}") from error
        kind = next(
            (word for word in ("AccessDenied", "NotFound", "Decrypt", "Signature") if word in said), ""
        )
        raise Refused(
            f"{arn} cannot be read: {error.code} {kind}".rstrip(),
            "see that it exists, and that the instance's role has docs/aws/instance-policy.json for it",
        ) from error
    except (OSError, ValueError) as error:
        raise Temporary(f"{arn}: {getattr(error, 'reason', error)}") from error


def authorization(
    headers: dict[str, str], body: bytes, service: str, region: str, credentials: Credentials
) -> str:
    """The header ``Authorization`` of a POST to ``/`` with these (lower-case) headers."""
    date = headers["x-amz-date"]
    names = ";".join(sorted(headers))
    lines = "".join(f"{name}:{headers[name]}\n" for name in sorted(headers))
    canonical = f"POST\n/\n\n{lines}\n{names}\n{hashlib.sha256(body).hexdigest()}"
    scope = f"{date[:8]}/{region}/{service}/aws4_request"
    signed = f"AWS4-HMAC-SHA256\n{date}\n{scope}\n{hashlib.sha256(canonical.encode()).hexdigest()}"
    key = f"AWS4{credentials.secret_key}".encode()
    for part in scope.split("/"):
        key = hmac.new(key, part.encode(), hashlib.sha256).digest()
    signature = hmac.new(key, signed.encode(), hashlib.sha256).hexdigest()
    return f"AWS4-HMAC-SHA256 Credential={credentials.access_key}/{scope}, SignedHeaders={names}, Signature={signature}"
