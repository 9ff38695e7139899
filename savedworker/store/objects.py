"""An object store through obstore: S3 and what speaks its protocol, and Google Cloud Storage.

**Time.** No call outlasts ``timeout`` except bulk transfers (more than BULK bytes, or streams), where a connection that stalls
half-way may take twice that: their requests need time in proportion to their size. An unreachable store is noticed
while connecting, in all of them.

**Lost answers.** A conditional write whose answer is lost may have taken place, and then its repetition finds the condition
broken by itself. obstore would repeat it silently, so conditional writes go through a client that never repeats;
we repeat, and after a doubtful try read back: bytes equal to ours are our write. Callers make their bytes unique (a nonce).
If our write took place unseen *and* was replaced before we could look, the answer is Conflict; nothing in S3 can tell.
"""

from __future__ import annotations

import re
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from typing import TYPE_CHECKING, TypeVar

import obstore
from obstore.exceptions import (
    AlreadyExistsError,
    BaseError,
    PermissionDeniedError,
    PreconditionError,
    UnauthenticatedError,
)

from savedworker.model.errors import (
    AlreadyExists,
    Conflict,
    Corrupt,
    Fatal,
    NotFound,
    Refused,
    SavedWorkerError,
    Unreachable,
)
from savedworker.store.base import MAX_WHOLE, Data, Found, ObjectInfo, Version, is_component, is_key

if TYPE_CHECKING:
    from obstore import ObjectMeta, PutMode, PutResult
    from obstore.store import ClientConfig, GCSStore, RetryConfig, S3Store

BULK = 1 << 20
"""Writes of more bytes than this use the bulk client, and several parts of PART bytes at a time."""
PART = 5 << 20
"""Bytes of one part of a multipart upload; S3 allows no less. Small parts keep each request short."""
PARTS_AT_ONCE = 4

_STATUS = re.compile(r"status code: (\d{3})")
_CODE = re.compile(r"<Code>([A-Za-z0-9]+)</Code>(?:<Message>([^<]{0,200})</Message>)?")
_KIND = re.compile(r"kind: (Connect|Timeout|Request|Decode|Interrupted)")
_OS_MESSAGE = re.compile(r'message: "([^"]{1,120})"')
_PASSING = {408, 425, 429}
_T = TypeVar("_T")

Connect = Callable[["ClientConfig", "RetryConfig"], "S3Store | GCSStore"]
"""Makes an obstore client with the given time limits."""


class ObjectBackend:
    """``where`` names the store in messages. ``by_generation`` selects Google's way of naming versions, else ETags."""

    def __init__(self, where: str, connect: Connect, *, timeout: float, by_generation: bool = False) -> None:
        self._where = where
        self._timeout = timeout
        self._by_generation = by_generation
        dial = timedelta(seconds=min(5.0, timeout / 4))
        attempt = timedelta(seconds=timeout / 4)
        again: RetryConfig = {
            "max_retries": 10,
            "retry_timeout": timedelta(seconds=timeout / 2),
            "backoff": {
                "init_backoff": timedelta(seconds=0.1),
                "max_backoff": timedelta(seconds=timeout / 10),
                "base": 2,
            },
        }
        never: RetryConfig = {"max_retries": 0, "retry_timeout": timedelta(seconds=timeout / 4)}
        self._documents = connect({"connect_timeout": dial, "timeout": attempt}, again)
        self._once = connect({"connect_timeout": dial, "timeout": attempt}, never)
        self._uploads = connect({"connect_timeout": dial, "timeout": timedelta(seconds=timeout)}, again)
        # A download has no size known in advance: bound the silence, not the whole.
        whole = timedelta(seconds=max(600.0, timeout))
        self._downloads = connect({"connect_timeout": dial, "read_timeout": attempt, "timeout": whole}, again)

    def get(self, key: str) -> Found:
        with self._errors("get", key):
            return self._found(self._downloads, key)

    def head(self, key: str) -> ObjectInfo | None:
        try:
            with self._errors("head", key):
                return _info(obstore.head(self._documents, key), key)
        except NotFound:
            return None

    def put(self, key: str, data: Data) -> None:
        with self._errors("put", key):
            if len(data) > BULK:
                obstore.put(self._uploads, key, data, chunk_size=PART, max_concurrency=PARTS_AT_ONCE)
            else:
                obstore.put(self._documents, key, data, use_multipart=False)

    def create(self, key: str, data: Data) -> None:
        try:
            self._conditional(key, data, None)
        except Conflict:
            raise AlreadyExists(f"{key} exists already") from None

    def swap(self, key: str, data: Data, expected: Version | None) -> Version:
        return self._conditional(key, data, expected)

    def put_stream(self, key: str, parts: Iterable[Data]) -> None:
        callers: list[BaseException] = []

        def guarded() -> Iterator[Data]:
            try:
                yield from parts
            except BaseException as error:
                callers.append(error)
                raise

        try:
            with self._errors("put", key):
                obstore.put(self._uploads, key, guarded(), chunk_size=PART, max_concurrency=PARTS_AT_ONCE)
        except Exception:
            if callers:  # the parts' own trouble must not pass for the store's
                raise callers[0] from None
            raise

    def get_stream(self, key: str, chunk_size: int) -> Iterator[bytes]:
        with self._errors("get", key):
            result = obstore.get(self._downloads, key)
        return self._pieces(result, key, chunk_size)

    def list(self, prefix: str, after: str | None) -> Iterator[ObjectInfo]:
        with self._errors("list", prefix):
            stream = obstore.list(self._documents, prefix or None, offset=after, chunk_size=1000)
        while True:
            with self._errors("list", prefix):
                page = next(stream, None)
            if page is None:
                return
            for meta in page:
                if is_key(meta["path"]):
                    yield _info(meta, meta["path"])

    def list_dirs(self, prefix: str) -> Sequence[str]:
        with self._errors("list", prefix):
            found = obstore.list_with_delimiter(self._documents, prefix or None)
        names = (path.rstrip("/").rpartition("/")[2] for path in found["common_prefixes"])
        return sorted(name for name in names if is_component(name))

    def delete(self, keys: Sequence[str]) -> None:
        if not keys:
            return
        try:
            with self._errors("delete", keys[0]):
                obstore.delete(self._documents, list(keys))
        except NotFound:  # Google answers 404, and then the rest of the batch is left
            if len(keys) > 1:
                for key in keys:
                    self.delete([key])

    def ensure(self) -> None:
        with self._errors("list", ""):
            obstore.list_with_delimiter(self._documents, "savedworker-probe")

    def leftovers(self, *, remove: bool) -> tuple[int, int]:
        return (
            0,
            0,
        )  # unfinished multipart uploads are for a lifecycle rule of the bucket: no listing shows them here

    def _conditional(self, key: str, data: Data, expected: Version | None) -> Version:
        """Write if the key is at version ``expected`` (None: absent). Raises Conflict; Unreachable if the outcome is open."""
        give_up = time.monotonic() + self._timeout / 2
        doubtful = False
        pause = 0.05
        while True:
            failure: SavedWorkerError | None = None
            try:
                return self._put_once(key, data, expected)
            except Conflict:
                pass  # by somebody else, by our own lost try, or a 409 that S3 means as "again"
            except Unreachable as error:
                failure = error
                doubtful = True
            try:
                with self._errors("get", key):
                    found = self._found(self._once, key)
            except NotFound:
                current = None
            except Unreachable as error:
                failure = error
                current = expected
            else:
                if doubtful and found.data == data:
                    return found.version
                current = found.version
            if current != expected:
                raise Conflict(f"{key} was written by somebody else in the meantime")
            if time.monotonic() > give_up:
                raise failure or Unreachable(
                    f"{self._where}: {key} cannot be written: the store keeps refusing"
                )
            time.sleep(pause)
            pause = min(1.0, pause * 2)

    def _put_once(self, key: str, data: Data, expected: Version | None) -> Version:
        mode: PutMode
        if expected is None:
            mode = "create"
        elif self._by_generation:
            mode = {"version": expected}
        else:
            mode = {"e_tag": expected}
        try:
            with self._errors("put", key):
                return self._version(obstore.put(self._once, key, data, mode=mode, use_multipart=False))
        except (AlreadyExists, NotFound):
            raise Conflict(f"{key} was written or deleted by somebody else in the meantime") from None

    def _found(self, client: S3Store | GCSStore, key: str) -> Found:
        result = obstore.get(client, key)
        if result.meta["size"] > MAX_WHOLE:
            raise Corrupt(f"{key} is too long to be ours ({result.meta['size']} bytes)")
        return Found(bytes(result.bytes()), self._version(result.meta))

    def _version(self, meta: PutResult | ObjectMeta) -> Version:
        version = meta["version" if self._by_generation else "e_tag"]
        if not version:
            raise Fatal(f"{self._where} names no versions", "use a store with ETags and conditional writes")
        return Version(version)

    def _pieces(self, result: obstore.GetResult, key: str, size: int) -> Iterator[bytes]:
        stream = iter(result.stream(min_chunk_size=size))
        rest = bytearray()
        while True:
            with self._errors("get", key):
                piece = next(stream, None)
            if piece is None:
                break
            rest += piece
            while len(rest) >= size:
                yield bytes(rest[:size])
                del rest[:size]
        if rest:
            yield bytes(rest)

    @contextmanager
    def _errors(self, verb: str, key: str) -> Iterator[None]:
        try:
            yield
        except SavedWorkerError:
            raise
        except (BaseError, FileNotFoundError) as error:
            raise explain(error, f"{self._where}: {verb} {key}".rstrip()) from error


def clients_for_places(connect: Connect, timeout: float) -> tuple[S3Store | GCSStore, S3Store | GCSStore]:
    """A client for short requests, and one for transfers of any size, of which only the silence is bounded."""
    dial = timedelta(seconds=min(5.0, timeout / 4))
    again: RetryConfig = {"max_retries": 10, "retry_timeout": timedelta(seconds=timeout)}
    short = connect({"connect_timeout": dial, "timeout": timedelta(seconds=timeout)}, again)
    whole = timedelta(hours=6)
    long = connect(
        {"connect_timeout": dial, "read_timeout": timedelta(seconds=timeout), "timeout": whole}, again
    )
    return short, long


def explain(error: Exception, what: str) -> SavedWorkerError:
    """obstore's ``error`` as ours. Its text is matched here and nowhere else (obstore 0.12, object_store's RetryError)."""
    text = str(error)
    status = int(match[1]) if (match := _STATUS.search(text)) else 0
    code = match[1] if (match := _CODE.search(text)) else ""
    said = (
        f"{code or status}: {match[2]}"
        if match and match[2]
        else code or (f"HTTP status {status}" if status else "")
    )
    if "169.254.169.254" in text or "metadata.google.internal" in text:
        aws = "AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY"
        setting = "GOOGLE_APPLICATION_CREDENTIALS" if what.startswith("gs://") else aws
        return Fatal(f"{what}: no credentials found", f"set {setting}, or give the instance a role")
    if code == "NoSuchBucket":
        return Refused(f"{what}: the bucket does not exist", "create it, or correct the store's URL")
    if isinstance(error, FileNotFoundError):
        return NotFound(f"{what}: does not exist")
    if isinstance(error, AlreadyExistsError):
        return AlreadyExists(f"{what}: exists already")
    if isinstance(error, PreconditionError):
        return Conflict(f"{what}: was written by somebody else")
    if isinstance(error, PermissionDeniedError | UnauthenticatedError) or status in (401, 403):
        return Fatal(
            f"{what}: refused ({said or 'no permission'})", "check the credentials and the bucket's policy"
        )
    if status == 301:
        return Refused(f"{what}: the bucket is in another region", "set AWS_REGION to the bucket's region")
    if 400 <= status < 500 and status not in _PASSING:
        return Fatal(f"{what}: refused ({said})", "check the store's URL, region and credentials")
    if not said:
        kinds = _KIND.findall(text)
        said = " ".join([*kinds[:1], *_OS_MESSAGE.findall(text)[-1:]]).lower() or text.splitlines()[0][:200]
    return Unreachable(
        f"{what}: no usable answer ({said})", fix="check the network, the endpoint and the store's status"
    )


def _info(meta: ObjectMeta, key: str) -> ObjectInfo:
    return ObjectInfo(key, meta["size"], meta["last_modified"])
