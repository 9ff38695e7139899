"""Images that a registry has: pulled by digest, once, with the login that the registry wants.

The registry is a stand-in: the pull side of the distribution protocol over an OCI layout, on loopback. skopeo and umoci are real.
"""

from __future__ import annotations

import base64
import hashlib
import http.server
import json
import subprocess
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from botocore.auth import SigV4Auth
from botocore.awsrequest import AWSRequest
from botocore.credentials import Credentials as BotoCredentials
from moto.server import ThreadedMotoServer

from savedworker.agent.inner.sources import Credentials
from savedworker.agent.registry import log_in
from savedworker.checkpoint.images import Registry, digest_of, lower_directory, registry_host
from savedworker.model.errors import BadSpec, Fatal, Temporary

LOGIN = base64.b64encode(b"AWS:secret").decode()


class StandIn:
    """A registry with one name, ``some/image``."""

    def __init__(self, layout: Path, wants: str | None = None) -> None:
        self.layout, self.wants, self.asked = layout, wants, list[str]()
        stand_in = self

        class Handler(http.server.BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_GET(self) -> None:
                stand_in.asked.append(self.path)
                status, kind, body = stand_in.answer(self.path, self.headers.get("Authorization"))
                self.send_response(status)
                self.send_header("Content-Type", kind)
                self.send_header("Content-Length", str(len(body)))
                if status == 401:
                    self.send_header("WWW-Authenticate", 'Basic realm="it"')
                if "manifests" in self.path and status == 200:
                    digest = hashlib.sha256(body).hexdigest()
                    self.send_header("Docker-Content-Digest", f"sha256:{digest}")
                self.end_headers()
                if self.command == "GET":
                    self.wfile.write(body)

            do_HEAD = do_GET

            def log_message(self, format: str, *args: object) -> None:  # noqa: A002
                return

        self.server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.host = f"127.0.0.1:{self.server.server_port}"
        threading.Thread(target=self.server.serve_forever, args=(0.05,), daemon=True).start()

    def answer(self, path: str, login: str | None) -> tuple[int, str, bytes]:
        plain = "application/json"
        if self.wants is not None and login != f"Basic {self.wants}":
            return 401, plain, b'{"errors": [{"code": "UNAUTHORIZED"}]}'
        if path == "/v2/":
            return 200, plain, b"{}"
        what, _, which = path.removeprefix("/v2/some/image/").partition("/")
        if which.startswith("sha256:"):
            file = self.layout / "blobs/sha256" / which.removeprefix("sha256:")
        else:
            file = self.layout / "blobs/sha256" / self.digest(which).removeprefix("sha256:")
        if what not in ("manifests", "blobs") or not file.is_file():
            return 404, plain, b'{"errors": [{"code": "MANIFEST_UNKNOWN", "message": "manifest unknown"}]}'
        kind = (
            "application/vnd.oci.image.manifest.v1+json"
            if what == "manifests"
            else "application/octet-stream"
        )
        return 200, kind, file.read_bytes()

    def digest(self, tag: str) -> str:
        for each in json.loads((self.layout / "index.json").read_text())["manifests"]:
            if each["annotations"]["org.opencontainers.image.ref.name"] == tag:
                return str(each["digest"])
        return "sha256:none"

    def close(self) -> None:
        self.server.shutdown()
        self.server.server_close()


def fill(layout: Path, work: Path, content: str) -> None:
    """Make the tag v1 of ``layout`` an image with that content."""
    root = work / content
    subprocess.run(["umoci", "unpack", "--image", f"{layout}:v1", root], check=True)
    (root / "rootfs/usr").mkdir(exist_ok=True)
    (root / "rootfs/usr/hello").write_text(content)
    subprocess.run(["umoci", "repack", "--image", f"{layout}:v1", root], check=True)


@pytest.fixture
def layout(tmp_path: Path) -> Path:
    made = tmp_path / "layout"
    subprocess.run(["umoci", "init", "--layout", made], check=True)
    subprocess.run(["umoci", "new", "--image", f"{made}:v1"], check=True)
    fill(made, tmp_path, "one")
    return made


@pytest.fixture
def registry(layout: Path) -> Iterator[StandIn]:
    made = StandIn(layout)
    yield made
    made.close()


def test_a_worker_keeps_the_image_that_its_tag_named_at_the_first_start(
    registry: StandIn, layout: Path, tmp_path: Path
) -> None:
    image = f"docker://{registry.host}/some/image:v1"
    first = digest_of(image)
    assert first == registry.digest("v1")
    there = lower_directory(image, tmp_path / "cache", first)
    assert (there / "usr/hello").read_text() == "one"
    fill(layout, tmp_path, "two")
    assert digest_of(image) != first
    assert (lower_directory(image, tmp_path / "elsewhere", first) / "usr/hello").read_text() == "one"
    assert (lower_directory(image, tmp_path / "cache") / "usr/hello").read_text() == "two"
    registry.close()
    assert lower_directory(image, tmp_path / "cache", first) == there  # nobody is asked for what is here
    assert not [x for x in (tmp_path / "cache").iterdir() if x.name.startswith(".")]
    assert digest_of(f"{image}@{first}") == first
    with pytest.raises(Temporary, match="no usable answer"):
        digest_of(image)


def test_what_the_registry_does_not_have_is_the_specs_fault(registry: StandIn, tmp_path: Path) -> None:
    for image in ("some/image:v2", "other/image:v1", f"some/image@sha256:{'0' * 64}"):
        with pytest.raises(BadSpec, match="cannot be had"):
            lower_directory(f"docker://{registry.host}/{image}", tmp_path / "cache")


def test_a_registry_that_wants_a_login_gets_it_and_else_says_so(layout: Path, tmp_path: Path) -> None:
    registry = StandIn(layout, wants=LOGIN)
    image = f"docker://{registry.host}/some/image:v1"
    try:
        with pytest.raises(BadSpec, match="cannot be had"):
            digest_of(image)
        file = tmp_path / "auth.json"
        file.write_text(json.dumps({"auths": {registry.host: {"auth": LOGIN}}}))
        digest = digest_of(image, Registry(file))
        there = lower_directory(image, tmp_path / "cache", digest, Registry(file))
        assert (there / "usr/hello").read_text() == "one"
    finally:
        registry.close()


@pytest.mark.parametrize(
    ("image", "host"),
    [
        ("docker://alpine", "docker.io"),
        ("docker://me/mine:1", "docker.io"),
        ("docker://ghcr.io/a/b:x@sha256:" + "0" * 64, "ghcr.io"),
        ("docker://localhost:5000/a", "localhost:5000"),
        (
            "docker://123456789012.dkr.ecr.eu-west-1.amazonaws.com/a:1",
            "123456789012.dkr.ecr.eu-west-1.amazonaws.com",
        ),
        ("oci:/layout", ""),
        ("host", ""),
    ],
)
def test_where_an_image_is(image: str, host: str) -> None:
    assert registry_host(image) == host


class Given:
    def fetch(self) -> Credentials:
        return Credentials("AKIAROLE", "secret", "token")


def test_ecr_is_logged_in_to_by_the_role(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """moto answers as ECR does: base64 of ``AWS:`` and a password. That the signature is right, the next test shows."""
    server = ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    try:
        monkeypatch.setenv("AWS_ENDPOINT_URL", "http://{}:{}".format(*server.get_host_and_port()))
        host = "123456789012.dkr.ecr.eu-west-1.amazonaws.com"
        found = log_in(f"docker://{host}/some/image:v1", [Given()], tmp_path / "state")
        assert found.authfile is not None
        assert found.authfile.stat().st_mode & 0o777 == 0o600
        auth = json.loads(found.authfile.read_text())["auths"][host]["auth"]
        assert base64.b64decode(auth).startswith(b"AWS:")
    finally:
        server.stop()
    assert log_in("docker://ghcr.io/a/b", [Given()], tmp_path) == Registry()
    monkeypatch.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:1")
    with pytest.raises(Fatal, match="no login to its registry"):
        log_in(f"docker://{host}/some/image:v1", [Given()], tmp_path)


def test_the_request_is_signed_as_boto_signs_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[dict[str, str]] = []

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            seen.append({name.lower(): value for name, value in self.headers.items()})
            self.send_response(500)
            self.end_headers()

        def log_message(self, format: str, *args: object) -> None:  # noqa: A002
            return

    server = http.server.HTTPServer(("127.0.0.1", 0), Handler)
    threading.Thread(target=server.serve_forever, args=(0.05,), daemon=True).start()
    url = f"http://127.0.0.1:{server.server_port}"
    monkeypatch.setenv("AWS_ENDPOINT_URL", url)
    with pytest.raises(Fatal, match="ECR answers 500"):
        log_in("docker://123456789012.dkr.ecr.eu-west-1.amazonaws.com/a", [Given()], tmp_path)
    server.shutdown()
    server.server_close()
    (sent,) = seen
    signed = sent["authorization"].partition("SignedHeaders=")[2].partition(",")[0].split(";")
    again = AWSRequest("POST", f"{url}/", {name: sent[name] for name in signed if name != "host"}, b"{}")
    again.context["timestamp"] = sent["x-amz-date"]
    signer = SigV4Auth(BotoCredentials("AKIAROLE", "secret", "token"), "ecr", "eu-west-1")
    canonical = signer.canonical_request(again)
    assert sent["authorization"].endswith(signer.signature(signer.string_to_sign(again, canonical), again))
