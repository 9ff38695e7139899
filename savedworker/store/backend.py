"""``open_store``: one object-store prefix behind one class, the same on a directory, S3 and Google Cloud Storage."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import unquote, urlsplit

from savedworker.model.errors import Refused
from savedworker.store.base import Backend, Data, Found, ObjectInfo, Version, check_key, check_prefix, is_key
from savedworker.store.local import LocalBackend
from savedworker.store.sealing import NO_KEY, Sealing, sealing_from_environment

if TYPE_CHECKING:
    from obstore.store import ClientConfig, GCSStore, RetryConfig, S3Store

__all__ = ["Found", "ObjectInfo", "Store", "Version", "open_store"]

BUCKET = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,221}")
_FORMS = "write it as file:///DIRECTORY, a plain directory, s3://BUCKET/PREFIX or gs://BUCKET/PREFIX"


class Store:
    """Objects under keys such as ``workers/a/spec.json``. Thread-safe. Not usable in a child made by ``os.fork()``.

    Every method raises Refused for a malformed key, Unreachable when the store gives no usable answer in time, and Fatal
    for missing rights or space. Writes are atomic and, when they return, durable. After Unreachable from a write it is
    unknown whether it took place. A key is either always written with ``swap`` or never.
    """

    def __init__(self, url: str, backend: Backend, sealing: Sealing = NO_KEY) -> None:
        self.url = url
        """In one normal form, without credentials."""
        self.sealing = sealing
        """How workers are sealed. Objects are read and written here as they are: ``WorkerStore`` seals and opens."""
        self._backend = backend

    def __repr__(self) -> str:
        return f"Store({self.url!r})"

    def get(self, key: str) -> Found:
        """The object's bytes and version. Raises NotFound."""
        return self._backend.get(check_key(key))

    def head(self, key: str) -> ObjectInfo | None:
        """Size and time of the object, None if there is none."""
        return self._backend.head(check_key(key))

    def put(self, key: str, data: Data) -> None:
        """Write, whatever is there."""
        self._backend.put(check_key(key), data)

    def create(self, key: str, data: Data) -> None:
        """Write if there is nothing. Raises AlreadyExists.

        Never for one's own write: after a lost answer the object is read back, and bytes equal to ``data`` count as ours.
        """
        self._backend.create(check_key(key), data)

    def swap(self, key: str, data: Data, expected: Version | None) -> Version:
        """Write if the key is still at version ``expected`` (None: does not exist), and return the new version.

        Raises Conflict if it is not. ``data`` must be unlike anything ever written under the key (hold a nonce): then a
        lost answer is resolved by reading back. On an object store Conflict can also mean that the answer was lost
        *and* somebody has replaced our write since; look for the nonce's effect when that matters.
        """
        return self._backend.swap(check_key(key), data, expected)

    def put_stream(self, key: str, parts: Iterable[bytes]) -> None:
        """Write the concatenation of ``parts``, holding a few of them; nothing is visible if ``parts`` raises."""
        self._backend.put_stream(check_key(key), parts)

    def get_stream(self, key: str, chunk_size: int = 1 << 20) -> Iterator[bytes]:
        """The object in pieces of ``chunk_size`` bytes (the last may be shorter). Raises NotFound at the call."""
        return self._backend.get_stream(check_key(key), chunk_size)

    def list(self, prefix: str = "", *, after: str | None = None) -> Iterator[ObjectInfo]:
        """All objects below the directory ``prefix``, with keys greater than ``after``.

        In the order of keys, except on S3 directory buckets. Names that are no keys of ours are left out.
        """
        if after is not None:
            check_key(after)
        return self._backend.list(check_prefix(prefix), after)

    def list_dirs(self, prefix: str = "") -> Sequence[str]:
        """Sorted names of the directories right below ``prefix`` that hold objects."""
        return self._backend.list_dirs(check_prefix(prefix))

    def delete(self, keys: Iterable[str]) -> None:
        """Delete; what is not there is fine. Stops at the first failure, and can then be repeated."""
        self._backend.delete([check_key(key) for key in keys])

    def ensure(self) -> None:
        """Make the local directory, or see that the bucket can be listed. Raises Refused, Fatal, Unreachable."""
        self._backend.ensure()

    def leftovers(self, *, remove: bool) -> tuple[int, int]:
        """Count, and remove, what writers that died a day ago or earlier left of unfinished objects: how many, and their bytes."""
        return self._backend.leftovers(remove=remove)


def open_store(
    url: str,
    *,
    timeout: float = 30.0,
    options: Mapping[str, Any] | None = None,
    sealing: Sealing | None = None,
) -> Store:
    """The store at ``url``: ``file:///DIRECTORY``, a plain directory, ``s3://BUCKET/PREFIX`` or ``gs://BUCKET/PREFIX``.

    Nothing is contacted yet. ``timeout`` in seconds: an unreachable store raises Unreachable within it. ``options`` go
    to obstore's S3Store or GCSStore (for example ``credential_provider``). S3 reads the usual ``AWS_*`` variables,
    ``AWS_ENDPOINT_URL_S3`` before ``AWS_ENDPOINT_URL``; with an endpoint, requests are path-style.
    Raises Refused for anything else.
    """
    if not url or "\0" in url:
        raise Refused(f"{url!r} is not a store", _FORMS)
    if timeout <= 0:
        raise Refused(f"a time limit of {timeout:g} s is none", "give more than 0")
    if sealing is None:
        sealing = sealing_from_environment()
    scheme, separator, _ = url.partition("://")
    if not separator:
        if ":" in url.split("/", 1)[0]:
            raise Refused(f"{url!r} is not a store", _FORMS)
        return _local(Path(url).expanduser(), timeout, sealing)
    parts = urlsplit(url)
    if parts.query or parts.fragment:
        raise Refused(f"{url!r} is not a store: it has a '?' or '#' part", _FORMS)
    if scheme == "file":
        if parts.netloc not in ("", "localhost") or not parts.path.startswith("/"):
            raise Refused(
                f"{url!r} is not an absolute directory", "write it as file:///DIRECTORY, with three slashes"
            )
        return _local(Path(unquote(parts.path)), timeout, sealing)
    if scheme not in ("s3", "gs"):
        raise Refused(f"{url!r} has an unknown scheme", _FORMS)
    prefix = parts.path.strip("/")
    if parts.netloc and not BUCKET.fullmatch(parts.netloc):
        raise Refused(
            f"{parts.netloc!r} is not the name of a bucket",
            "letters, digits, dots, hyphens and underscores make one",
        )
    if not parts.netloc or "@" in parts.netloc or ":" in parts.netloc:
        raise Refused(f"{url!r} names no bucket", f"write it as {scheme}://BUCKET/PREFIX")
    if prefix and not is_key(prefix):
        raise Refused(
            f"{url!r} has an unusable prefix", "use letters, digits and ._-+=,:~ between single slashes"
        )
    return _objects(scheme, parts.netloc, prefix, timeout, dict(options or {}), sealing)


def _local(path: Path, timeout: float, sealing: Sealing) -> Store:
    root = Path(os.path.abspath(path))
    return Store(root.as_uri(), LocalBackend(root, timeout=timeout), sealing)


def _objects(
    scheme: str, bucket: str, prefix: str, timeout: float, options: dict[str, Any], sealing: Sealing
) -> Store:
    from obstore.exceptions import (
        BaseError,  # here, so that a program that uses a directory goes without obstore
    )

    from savedworker.store.objects import ObjectBackend

    url = f"{scheme}://{bucket}/{prefix}".rstrip("/")
    connect = partial(connect_s3 if scheme == "s3" else connect_gs, bucket, prefix or None, options)
    try:
        backend = ObjectBackend(url, connect, timeout=timeout, by_generation=scheme == "gs")
        return Store(url, backend, sealing)
    except (BaseError, ValueError, TypeError) as error:
        why = str(error).partition("\n")[0]
        raise Refused(f"{url} cannot be opened: {why}", "check the options and the environment") from error


def connect_s3(
    bucket: str, prefix: str | None, options: dict[str, Any], client: ClientConfig, retry: RetryConfig
) -> S3Store:
    from obstore.store import S3Store

    settings: dict[str, Any] = dict(options)
    endpoint = (
        settings.pop("endpoint", None)
        or os.environ.get("AWS_ENDPOINT_URL_S3")
        or os.environ.get("AWS_ENDPOINT_URL")
    )
    if endpoint:
        settings["endpoint"] = endpoint
        settings.setdefault("virtual_hosted_style_request", False)
        if endpoint.startswith("http://"):
            client = {**client, "allow_http": True}
    client = {**client, **settings.pop("client_options", {})}
    return S3Store(bucket, prefix=prefix, client_options=client, retry_config=retry, **settings)


def connect_gs(
    bucket: str, prefix: str | None, options: dict[str, Any], client: ClientConfig, retry: RetryConfig
) -> GCSStore:
    from obstore.store import GCSStore

    settings: dict[str, Any] = dict(options)
    client = {**client, **settings.pop("client_options", {})}
    return GCSStore(bucket, prefix=prefix, client_options=client, retry_config=retry, **settings)
