"""Images: the read-only lower directory below a worker's writable layer."""

from __future__ import annotations

import hashlib
import os
import re
import shutil
import stat
from dataclasses import dataclass
from pathlib import Path

from savedworker.checkpoint.mountinfo import mounts
from savedworker.checkpoint.tools import need, run
from savedworker.model.errors import BadSpec, Fatal, Temporary

_MAX_TABLE = 16 << 20


REGISTRY = "docker://"
_REFERENCE = re.compile(
    r"(?P<host>[A-Za-z0-9.-]+(:[0-9]{1,5})?)/(?P<name>[a-z0-9._/-]+)(:(?P<tag>[\w.-]{1,128}))?(@(?P<digest>sha256:[0-9a-f]{64}))?"
)
_DIGEST = re.compile(r"sha256:[0-9a-f]{64}")
_LOOPBACK = re.compile(r"(localhost|127(\.[0-9]{1,3}){3})(:[0-9]+)?")
_POLICIES = ("/etc/containers/policy.json", os.path.expanduser("~/.config/containers/policy.json"))
_PULL_TIMEOUT = 1800.0
_REFUSED = (
    "unauthorized",
    "denied",
    "manifest unknown",
    "not found",
    "name unknown",
    "repository name not known",
)
"""What registries answer when asking again would not help, as skopeo passes it on (1.9)."""


@dataclass(frozen=True)
class Registry:
    """What is needed to pull from a registry: ``authfile`` has the login, in the form of Docker's ``config.json``."""

    authfile: Path | None = None


def lower_directory(image: str, cache: Path, digest: str = "", registry: Registry = Registry()) -> Path:
    """The directory that holds ``image`` (``host``, an absolute directory, ``oci:DIR[:TAG]`` or ``docker://REF``).

    What has to be unpacked is unpacked once below ``cache``. ``digest``: which one is meant, of an image that a registry has (see
    ``digest_of``). Raises BadSpec when the image is not there, Temporary when its registry does not answer, Fatal.
    """
    if image == "host":
        return _copy_of_root(cache) if _filesystem_type("/") == "overlay" else Path("/")
    if image.startswith(REGISTRY):
        return _pull(image, digest or digest_of(image, registry), cache, registry)
    if image.startswith("oci:"):
        return _unpack(image.removeprefix("oci:"), cache)
    folder = Path(image)
    if not folder.is_dir():
        raise BadSpec(f"image {image} is not a directory", "give the root directory of an unpacked image")
    if not any((folder / name).exists() for name in ("bin", "usr", "sbin")):
        raise BadSpec(
            f"image {image} has no bin, sbin or usr", "give the root directory of an unpacked image"
        )
    return folder


def _filesystem_type(path: str) -> str:
    return next((mount.kind for mount in reversed(mounts()) if mount.point == path), "")


def digest_of(image: str, registry: Registry = Registry()) -> str:
    """The digest that ``image`` stands for at present: empty where no registry has it. Raises as ``lower_directory``."""
    if not image.startswith(REGISTRY):
        return ""
    words = _parts(image)
    if words["digest"]:
        return words["digest"]
    found = _skopeo(image, registry, "inspect", "--no-tags", "--format", "{{.Digest}}", image).strip()
    if not _DIGEST.fullmatch(found):
        raise Fatal(f"image {image}: skopeo tells {found[:80]!a} for its digest")
    return found


def is_digest(text: str) -> bool:
    """Whether ``text`` is a digest as registries name them."""
    return _DIGEST.fullmatch(text) is not None


def registry_host(image: str) -> str:
    """The host (and port) of the registry of ``image``; empty where no registry has it. Raises BadSpec."""
    return _parts(image)["host"] if image.startswith(REGISTRY) else ""


def _parts(image: str) -> dict[str, str]:
    """Host, name, tag and digest. Names without a host are Docker Hub's."""
    reference = image.removeprefix(REGISTRY)
    first = reference.split("/", 1)[0]
    if "/" not in reference or not ("." in first or ":" in first or first == "localhost"):
        reference = f"docker.io/{reference if '/' in reference else 'library/' + reference}"
    match = _REFERENCE.fullmatch(reference)
    if match is None:
        raise BadSpec(f"image {image} is not docker://[HOST/]NAME[:TAG][@sha256:…]", "correct it")
    return {name: value or "" for name, value in match.groupdict().items()}


def _pull(image: str, digest: str, cache: Path, registry: Registry) -> Path:
    if not _DIGEST.fullmatch(digest):
        raise BadSpec(f"image {image}: {digest[:80]!a} is no digest", "give docker://NAME@sha256:…")
    target = cache / f"docker-{digest.removeprefix('sha256:')[:32]}"
    if (target / "rootfs").is_dir():
        return target / "rootfs"
    cache.mkdir(parents=True, exist_ok=True)
    layout = cache / f".pulling-{os.getpid()}"
    shutil.rmtree(layout, ignore_errors=True)
    words = _parts(image)
    source = f"{REGISTRY}{words['host']}/{words['name']}@{digest}"
    try:
        _skopeo(image, registry, "copy", "--quiet", source, f"oci:{layout}:latest")
        return _umoci(f"{layout}:latest", image, target, cache)
    finally:
        shutil.rmtree(layout, ignore_errors=True)


def _skopeo(image: str, registry: Registry, verb: str, *words: str) -> str:
    """The output of a call to skopeo. A registry on loopback is spoken to without TLS, as Docker does."""
    prefix = "src-" if verb == "copy" else ""
    options = [f"--{prefix}tls-verify=false"] if _LOOPBACK.fullmatch(registry_host(image)) else []
    if registry.authfile is not None:
        options.append(f"--{prefix}authfile={registry.authfile}")
    # Without any policy file skopeo refuses to do anything; where there is one, it holds.
    policy = [] if any(map(os.path.exists, _POLICIES)) else ["--insecure-policy"]
    done = run(
        [need("skopeo", "skopeo"), *policy, verb, *options, *words], timeout=_PULL_TIMEOUT, check=False
    )
    if done.returncode == 0:
        return done.stdout
    said = " ".join(done.stderr.split())[-300:]
    if any(word in said.lower() for word in _REFUSED):
        raise BadSpec(
            f"image {image} cannot be had: {said}", "correct the name, or let the instance's role pull it"
        )
    raise Temporary(f"image {image}: its registry gives no usable answer: {said}", retry_after=5.0)


def _copy_of_root(cache: Path) -> Path:
    """This container's own root, copied: it is an overlay, and of files mapped from an overlay on one CRIU finds the wrong mount.

    Only its own file system: what is mounted into it (volumes, ``resolv.conf``) is not part of the image.
    """
    target = cache / "host"
    if target.is_dir():
        return target
    cache.mkdir(parents=True, exist_ok=True)
    scratch = cache / f".copying-{os.getpid()}"
    shutil.rmtree(scratch, ignore_errors=True)
    scratch.mkdir()
    names = [entry for entry in sorted(os.listdir("/")) if not os.path.ismount(f"/{entry}")]
    run(
        [need("cp", "coreutils"), "-ax", "--reflink=auto", "--", *(f"/{name}" for name in names), scratch],
        timeout=_PULL_TIMEOUT,
    )
    for name in ("proc", "sys", "dev", "tmp"):
        (scratch / name).mkdir(exist_ok=True)
    (scratch / "tmp").chmod(0o1777)
    try:
        scratch.rename(target)
    except OSError:  # another process was quicker
        shutil.rmtree(scratch, ignore_errors=True)
    return target


def _unpack(reference: str, cache: Path) -> Path:
    layout, _, tag = reference.partition(":")
    tag = tag or "latest"
    folder = Path(layout)
    if not (folder / "index.json").is_file():
        raise BadSpec(
            f"image oci:{reference}: {folder} has no OCI layout (index.json)", "make one with skopeo or umoci"
        )
    # The index names the manifest by digest, so a changed image is another folder.
    digest = hashlib.sha256((folder / "index.json").read_bytes() + tag.encode()).hexdigest()[:16]
    target = cache / f"oci-{digest}"
    if (target / "rootfs").is_dir():
        return target / "rootfs"
    return _umoci(f"{folder}:{tag}", f"oci:{reference}", target, cache)


def _umoci(layout: str, image: str, target: Path, cache: Path) -> Path:
    """Unpack ``layout`` (``DIR:TAG``) to ``target``; the root directory in it. ``image`` names it in messages."""
    cache.mkdir(parents=True, exist_ok=True)
    scratch = cache / f".unpacking-{os.getpid()}"
    shutil.rmtree(scratch, ignore_errors=True)
    done = run(
        [need("umoci", "umoci"), "unpack", "--image", layout, scratch], timeout=_PULL_TIMEOUT, check=False
    )
    if done.returncode:
        shutil.rmtree(scratch, ignore_errors=True)
        raise BadSpec(
            f"image {image} cannot be unpacked: {done.stderr.strip()[-300:]}",
            "check the layout and the tag",
        )
    try:
        scratch.rename(target)
    except OSError:  # another process was quicker
        shutil.rmtree(scratch, ignore_errors=True)
    return target / "rootfs"


def find_user(lower: Path, user: str | None) -> tuple[int, int, list[int], str]:
    """(uid, gid, supplementary gids, home directory) of ``USER[:GROUP]`` in the image. Raises BadSpec."""
    if user is None:
        return 0, 0, [], "/root"
    name, _, group = user.partition(":")
    people = _table(lower / "etc/passwd", 7)
    groups = _table(lower / "etc/group", 4)
    row = next((p for p in people if name in (p[0], p[2])), None)
    if row is None and not name.isdigit():
        raise BadSpec(
            f"user {name!r} is not in the image's /etc/passwd", "give a number, or a user of the image"
        )
    uid = int(row[2]) if row else int(name)
    gid = int(row[3]) if row else 0
    if group:
        match = next((g for g in groups if group in (g[0], g[2])), None)
        if match is None and not group.isdigit():
            raise BadSpec(
                f"group {group!r} is not in the image's /etc/group", "give a number, or a group of the image"
            )
        gid = int(match[2]) if match else int(group)
    more = [int(g[2]) for g in groups if row and row[0] in g[3].split(",") and int(g[2]) != gid]
    return uid, gid, more, (row[5] if row and row[5] else "/")


def _table(path: Path, columns: int) -> list[list[str]]:
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK)  # an image may have a fifo there
        with os.fdopen(descriptor, "rb") as file:
            if not stat.S_ISREG(os.fstat(descriptor).st_mode):
                return []
            lines = file.read(_MAX_TABLE).decode(errors="replace").splitlines()
    except OSError:
        return []
    rows = [line.split(":") for line in lines if not line.startswith("#")]
    numbers = (2, 3) if columns == 7 else (2,)
    return [row for row in rows if len(row) >= columns and all(_is_id(row[i]) for i in numbers)]


def _is_id(text: str) -> bool:
    """Whether this is the number of a user or group; the largest means nobody."""
    return re.fullmatch(r"[0-9]{1,10}", text) is not None and int(text) < (1 << 32) - 1
