"""What an instance asks for by itself: who it is, and the store's key. The metadata service is a stand-in, SSM and Secrets Manager are moto."""

from __future__ import annotations

import hashlib
import hmac
import io
import json
import os
import re
import shutil
import subprocess
import tarfile
import threading
from collections.abc import Iterator
from datetime import UTC, datetime
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import boto3
import pytest
from botocore.auth import SigV4Auth
from botocore.awsrequest import AWSRequest
from botocore.credentials import Credentials as BotoCredentials

from savedworker.agent import whereabouts
from savedworker.fleet.aws import secret
from savedworker.fleet.aws.metadata import Credentials, InstanceMetadata
from savedworker.fleet.aws.secret import authorization, fetch_key
from savedworker.fleet.ec2.user_data import Boot, render
from savedworker.model.errors import Refused, Temporary
from tests.fleet.aws.conftest import ACCOUNT, REGION, Cloud

KEY = "c2VjcmV0IHNlY3JldCBzZWNyZXQgc2VjcmV0IQ=="
ROLE = {"AccessKeyId": "ASIAEXAMPLE", "SecretAccessKey": "hidden", "Token": "session-token"}


class Service:
    """EC2's metadata service, version 2 only. ``documents`` are below /latest/meta-data/."""

    def __init__(self) -> None:
        self.documents: dict[str, str] = {
            "instance-id": "i-0123",
            "instance-type": "m5.large",
            "placement/availability-zone": "eu-west-1a",
            "tags/instance/savedworker:worker": "w",
            "tags/instance/savedworker:launch": "l-1",
            "iam/security-credentials/": "worker\n",
            "iam/security-credentials/worker": json.dumps(ROLE),
        }
        self.trouble = 0
        self.served = 0
        service = self

        class Handler(BaseHTTPRequestHandler):
            def do_PUT(self) -> None:
                self._answer(200, "token" if self.headers["X-aws-ec2-metadata-token-ttl-seconds"] else "")

            def do_GET(self) -> None:
                service.served += 1
                if self.headers["X-aws-ec2-metadata-token"] != "token":
                    self._answer(401, "")
                elif service.trouble > 0:
                    service.trouble -= 1
                    self._answer(503, "")
                else:
                    text = service.documents.get(self.path.removeprefix("/latest/meta-data/"))
                    self._answer(404 if text is None else 200, text or "")

            def _answer(self, status: int, text: str) -> None:
                body = text.encode()
                self.send_response(status)
                self.send_header("Content-Length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

            def log_message(self, format: str, *args: Any) -> None:  # noqa: A002
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._thread = threading.Thread(target=self._server.serve_forever, daemon=True)
        self._thread.start()
        self.url = f"http://127.0.0.1:{self._server.server_port}"

    def metadata(self) -> InstanceMetadata:
        return InstanceMetadata(self.url, timeout=2.0, patience=5.0)

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()


@pytest.fixture
def service() -> Iterator[Service]:
    service = Service()
    yield service
    service.close()


def test_what_is_not_given_is_asked_for(service: Service, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.delenv("AWS_BATCH_JOB_ID", raising=False)
    found = whereabouts.find(service.metadata())
    assert found == whereabouts.Whereabouts("w", "l-1", "i-0123", "eu-west-1a", "m5.large")
    given = whereabouts.find(service.metadata(), "other", "l-2", "mine", "here")
    assert given == whereabouts.Whereabouts("other", "l-2", "mine", "here", "m5.large")


def test_in_a_job_the_instance_is_the_job(service: Service, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("AWS_BATCH_JOB_ID", "job-1")
    assert whereabouts.find(service.metadata(), "w", "l-1").instance == "job-1"


def test_a_job_that_cannot_reach_the_service_still_runs(monkeypatch: pytest.MonkeyPatch):
    """C22: that it sees no notices is then said by the monitor (tests/notice)."""
    monkeypatch.setenv("AWS_BATCH_JOB_ID", "job-1")
    nobody = InstanceMetadata("http://127.0.0.1:9", patience=0.0)
    assert whereabouts.find(nobody, "w", "l-1") == whereabouts.Whereabouts("w", "l-1", "job-1", None, None)
    monkeypatch.delenv("AWS_BATCH_JOB_ID")
    with pytest.raises(Refused, match="has no name"):
        whereabouts.find(nobody, "w", "l-1")
    with pytest.raises(Temporary, match="does not answer"):
        whereabouts.find(nobody)


def test_an_instance_that_may_not_see_its_tags_says_so(service: Service):
    del service.documents["tags/instance/savedworker:launch"]
    with pytest.raises(Refused, match=r"no tag savedworker:launch.*InstanceMetadataTags"):
        whereabouts.find(service.metadata())


def test_the_service_is_given_time(service: Service):
    service.trouble = 2
    assert service.metadata().get("instance-id") == "i-0123"
    assert service.served == 3


def test_the_key_comes_from_a_parameter_or_a_secret(service: Service, cloud: Cloud):
    ssm = boto3.client("ssm")
    ssm.put_parameter(Name="/savedworker/key", Value=f"{KEY}\n", Type="SecureString")
    ssm.put_parameter(Name="plain-name", Value=KEY, Type="SecureString")
    made = boto3.client("secretsmanager").create_secret(Name="key", SecretString=KEY)["ARN"]
    prefix = f"arn:aws:ssm:{REGION}:{ACCOUNT}:parameter"
    for arn in (f"{prefix}/savedworker/key", f"{prefix}/plain-name", made):
        assert fetch_key(arn, service.metadata()) == KEY


def test_a_key_that_may_not_be_had_is_refused_with_what_to_do(
    service: Service, cloud: Cloud, monkeypatch: pytest.MonkeyPatch
):
    arn = f"arn:aws:ssm:{REGION}:{ACCOUNT}:parameter/none"
    with pytest.raises(Refused, match=r"cannot be read: 400 NotFound.*docs/aws/instance-policy.json"):
        fetch_key(arn, service.metadata())
    with pytest.raises(Refused, match="no SSM parameter and no secret"):
        fetch_key("arn:aws:s3:::bucket", service.metadata())
    boto3.client("ssm").put_parameter(Name="none", Value=" ", Type="String")
    with pytest.raises(Refused, match="holds no text"):
        fetch_key(arn, service.metadata())
    service.documents["iam/security-credentials/"] = ""
    with pytest.raises(Refused, match=r"no role.*instance_profile"):
        fetch_key(arn, service.metadata())
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:9")
    service.documents["iam/security-credentials/"] = "worker"
    with pytest.raises(Temporary):
        fetch_key(arn, service.metadata())


@pytest.mark.parametrize("aws_service", ["ssm", "secretsmanager"])
def test_the_signature_is_botocores(aws_service: str):
    """Ours is 20 lines of the standard library, so that an instance needs no boto3."""
    body = b'{"Name": "/savedworker/key", "WithDecryption": true}'
    url = f"https://{aws_service}.{REGION}.amazonaws.com/"
    request = AWSRequest(
        "POST", url, {"Content-Type": "application/x-amz-json-1.1", "X-Amz-Target": "T"}, body
    )
    SigV4Auth(BotoCredentials("AKID", "secret", "token"), aws_service, REGION).add_auth(request)
    headers = {
        name.lower(): value for name, value in request.headers.items() if name.lower() != "authorization"
    }
    headers["host"] = f"{aws_service}.{REGION}.amazonaws.com"
    ours = authorization(headers, body, aws_service, REGION, Credentials("AKID", "secret", "token"))
    assert ours == request.headers["Authorization"]


def test_the_date_of_a_request_is_that_of_the_clock_given(
    service: Service, cloud: Cloud, monkeypatch: pytest.MonkeyPatch
):
    seen: list[dict[str, str]] = []
    real = secret.authorization

    def watched(headers: dict[str, str], *rest: Any) -> str:
        seen.append(dict(headers))
        return real(headers, *rest)

    monkeypatch.setattr(secret, "authorization", watched)
    boto3.client("ssm").put_parameter(Name="k", Value=KEY, Type="SecureString")
    fetch_key(
        f"arn:aws:ssm:{REGION}:{ACCOUNT}:parameter/k",
        service.metadata(),
        now=lambda: datetime(2026, 1, 2, 3, 4, 5, tzinfo=UTC),
    )
    assert seen[0]["x-amz-date"] == "20260102T030405Z"
    assert seen[0]["x-amz-security-token"] == "session-token"


# The bundle -----------------------------------------------------------------------------------------------------------


class Bucket(Service):
    """An S3 that remembers how it was asked. Signatures are checked by the test: moto checks none."""

    def __init__(self, content: bytes) -> None:
        self.requests: list[tuple[str, dict[str, str]]] = []
        super().__init__()
        bucket = self

        def serve(handler: BaseHTTPRequestHandler) -> None:
            bucket.requests.append((handler.path, {k.lower(): v for k, v in handler.headers.items()}))
            handler.send_response(200)
            handler.send_header("Content-Length", str(len(content)))
            handler.end_headers()
            handler.wfile.write(content)

        self._server.RequestHandlerClass.do_GET = serve  # type: ignore[attr-defined]


def bundle_with(agent: str) -> bytes:
    packed = io.BytesIO()
    with tarfile.open(fileobj=packed, mode="w:gz") as archive:
        info = tarfile.TarInfo("bin/savedworker")
        info.size, info.mode = len(agent.encode()), 0o755
        archive.addfile(info, io.BytesIO(agent.encode()))
    return packed.getvalue()


def signature(path: str, headers: dict[str, str], secret_key: str) -> str:
    """What the signature of a GET has to be, from what was sent (AWS General Reference, Signature Version 4)."""
    match = re.search(r"Credential=[^/]+/(\S+), ?SignedHeaders=([^,]+)", headers["authorization"])
    assert match is not None
    scope, signed = match.groups()
    lines = "".join(f"{name}:{headers[name].strip()}\n" for name in signed.split(";"))
    payload = headers["x-amz-content-sha256"]
    canonical = f"GET\n{path}\n\n{lines}\n{signed}\n{payload}"
    text = f"AWS4-HMAC-SHA256\n{headers['x-amz-date']}\n{scope}\n{hashlib.sha256(canonical.encode()).hexdigest()}"
    key = f"AWS4{secret_key}".encode()
    for part in scope.split("/"):
        key = hmac.new(key, part.encode(), hashlib.sha256).digest()
    return hmac.new(key, text.encode(), hashlib.sha256).hexdigest()


def test_user_data_fetches_the_bundle_with_the_instances_role_and_runs_its_agent(
    service: Service, tmp_path: Path
):
    """Executed with the real curl; only the metadata service and the bucket stand elsewhere than on EC2."""
    content = bundle_with('#!/bin/sh\necho "agent: $*"\n')
    bucket = Bucket(content)
    prefix = tmp_path / "opt"
    real = shutil.which("curl")
    curl = f"""#!/bin/sh
for word; do
    shift
    case $word in http://169.254.169.254/*) word={service.url}/${{word#http://169.254.169.254/}} ;; esac
    set -- "$@" "$word"
done
printf '%s\\n' "$*" >>{tmp_path}/arguments
exec {real} "$@"
"""
    shutdown = f"#!/bin/sh\ntouch {tmp_path}/ended\n"
    for name, text in {"curl": curl, "shutdown": shutdown, "sync": "#!/bin/sh\n"}.items():
        (tmp_path / name).write_text(text)
        (tmp_path / name).chmod(0o755)
    script = render(
        Boot(
            agent=(str(prefix / "bin/savedworker"), "agent", "--supervise"),
            environment={"AWS_REGION": REGION, "AWS_ENDPOINT_URL": bucket.url},
            bundle="s3://workers/agents/bundle.tar.gz",
            bundle_sha256=hashlib.sha256(content).hexdigest(),
        )
    ).replace("PREFIX=/opt/savedworker", f"PREFIX={prefix}")
    assert str(prefix) in script
    try:
        done = subprocess.run(
            ["sh"],
            input=script,
            text=True,
            capture_output=True,
            timeout=60,
            env={"PATH": f"{tmp_path}:{os.environ['PATH']}"},
        )
    finally:
        bucket.close()
    assert done.stdout.endswith("agent: agent --supervise\n"), done.stderr
    assert (tmp_path / "ended").exists()
    ((path, headers),) = bucket.requests
    assert path == "/workers/agents/bundle.tar.gz"
    assert headers["x-amz-security-token"] == ROLE["Token"]
    assert "x-amz-security-token" in headers["authorization"]  # S3 refuses one that is not signed
    assert headers["authorization"].endswith(f"Signature={signature(path, headers, ROLE['SecretAccessKey'])}")
    shown = (tmp_path / "arguments").read_text()
    assert ROLE["SecretAccessKey"] not in shown  # the list of processes is for everybody
    assert ROLE["Token"] not in shown
