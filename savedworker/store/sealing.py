"""Encryption and authenticity of what leaves the instance: master keys, the keys of one worker, and its sealed objects.

A worker that is created where a key is configured is *sealed* for life: everything of it but its record, its events and the names
of its objects. From the master key and a random salt of the worker four keys are derived (HKDF-SHA256): for the contents of chunks,
for their names, for documents, for logs. All encryption is AES-256-GCM with a random nonce of 96 bits.

A sealed object (spec, manifest, log piece) is::

    4 bytes  magic "SWSE"
    1 byte   format version
    1 byte   zero
    2 bytes  length of the head, little-endian; 0 except in the spec
    head     in the spec: 32 bytes of salt and the label of the master key
    12 bytes nonce
    rest     ciphertext and tag

Authenticated with it: the kind of the object, the worker's id, the object's key in the store, and all bytes before the nonce. So what
is of another worker, number, stream or offset does not open. Chunks keep their own header (``store/chunks.py``), authenticated likewise.
"""

from __future__ import annotations

import base64
import binascii
import os
import stat
import struct
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Literal, Protocol

from blake3 import blake3

from savedworker.model.errors import Corrupt, NoKey, Refused
from savedworker.store.base import Data

KEY_FILE, KEY, ALLOW_PLAIN = "SAVEDWORKER_KEY_FILE", "SAVEDWORKER_KEY", "SAVEDWORKER_ALLOW_PLAIN"
"""Environment variables: where the master keys are, or the keys themselves; and ``1`` to execute workers made without a key."""

Kind = Literal["spec", "manifest", "log", "begin", "engine"]
"""What a sealed object is."""

KEY_SIZE = 32
"""Bytes of every key."""
OVERHEAD = 12 + 16
"""Bytes by which encryption makes anything longer: nonce and tag."""

_MAGIC = b"SWSE"
_VERSION = 1
_HEADER = struct.Struct("<4sBBH")
_SALT = 32
_NONCE = 12
_MAX_LABEL = 4096
_MAX_KEY_FILE = 64 << 10
_DOCS = "see docs/encryption.md"
_MAKE = "make one with: openssl rand -base64 32"


class KeyRing(Protocol):
    """Where master keys are. Methods may be called from several threads.

    A key file and a variable today. A cloud's key service would draw a secret for every worker and let the service wrap it: the
    wrapped secret is then the label, and ``find`` unwraps it.
    """

    def begin(self, worker_id: str) -> tuple[str, bytes]:
        """The label (kept in the worker's spec, in plain) and the 32 secret bytes for a new worker. Raises Refused."""
        ...

    def find(self, label: str, worker_id: str) -> bytes:
        """The secret behind ``label``. Raises NoKey when there is none, Refused when the keys cannot be read."""
        ...

    def environment(self) -> dict[str, str]:
        """What an agent must find in its environment to have the same keys. May hold secrets."""
        ...

    def describe(self) -> str:
        """The key of new workers and where it is from, for people. Holds no secret. Raises Refused."""
        ...

    def files(self) -> tuple[Path, ...]:
        """Files on this machine that hold keys: no worker may see them."""
        ...


class Sealer(Protocol):
    """Seals and opens what is stored of one worker. Thread-safe."""

    flags: int
    """Of the headers of its chunks: 1 when they are sealed."""
    chunk_overhead: int
    """Bytes by which a chunk becomes longer, besides its header."""
    overhead: int
    """Bytes by which every object but the spec and the chunks becomes longer."""

    def chunk_name(self, data: Data) -> str:
        """The name of the chunk with plaintext ``data``: 64 hexadecimal digits, equal for equal content of one worker."""
        ...

    def seal_chunk(self, name: str, header: bytes, body: Data) -> tuple[Data, ...]:
        """What follows ``header`` in the store, in parts."""
        ...

    def open_chunk(self, name: str, header: Data, body: Data) -> Data:
        """The ``body`` that was sealed. Raises Corrupt."""
        ...

    def seal(self, kind: Kind, key: str, data: bytes) -> bytes:
        """``data`` as the object at ``key`` in the store."""
        ...

    def open(self, kind: Kind, key: str, data: bytes) -> bytes:
        """What was sealed as ``kind`` for ``key``. Raises Corrupt for anything else."""
        ...


class Plain:
    """The sealer of a worker without a key: everything is stored as it is."""

    flags = 0
    chunk_overhead = 0
    overhead = 0

    def chunk_name(self, data: Data) -> str:
        """The BLAKE3 of ``data``."""
        return str(blake3(data).hexdigest())

    def seal_chunk(self, name: str, header: bytes, body: Data) -> tuple[Data, ...]:
        """``body``."""
        return (body,)

    def open_chunk(self, name: str, header: Data, body: Data) -> Data:
        """``body``."""
        return body

    def seal(self, kind: Kind, key: str, data: bytes) -> bytes:
        """``data``."""
        return data

    def open(self, kind: Kind, key: str, data: bytes) -> bytes:
        """``data``. A sealed document of a plain worker is refused; log pieces are any bytes."""
        if kind not in ("log", "begin") and is_sealed(data):
            raise Corrupt(f"{key} is sealed, and its worker is not")
        return data


PLAIN = Plain()


class Sealed:
    """The sealer of a worker with a key. ``label`` and ``secret`` are a KeyRing's, ``salt`` the worker's own."""

    flags = 1
    chunk_overhead = OVERHEAD
    overhead = _HEADER.size + OVERHEAD

    def __init__(self, worker_id: str, label: str, salt: bytes, secret: bytes) -> None:
        from cryptography.hazmat.primitives.ciphers.aead import (
            AESGCM,  # here: most commands go without, and it is a large library
        )

        derive = partial(_derive, secret, salt, worker_id)
        self.label = label
        self._worker = worker_id
        self._head = salt + label.encode()
        self._names = derive("chunk names")
        self._chunks = AESGCM(derive("chunks"))
        self._documents = AESGCM(derive("documents"))
        self._logs = AESGCM(derive("logs"))

    def __repr__(self) -> str:
        return f"Sealed({self._worker!r}, {self.label!r})"

    def chunk_name(self, data: Data) -> str:
        """A BLAKE3 of ``data`` under a key of the worker: it tells nobody else what the content is."""
        return str(blake3(data, key=self._names).hexdigest())

    def seal_chunk(self, name: str, header: bytes, body: Data) -> tuple[Data, ...]:
        """Nonce and ciphertext."""
        nonce = os.urandom(_NONCE)
        return nonce, self._chunks.encrypt(nonce, body, self._chunk_place(name, header))

    def open_chunk(self, name: str, header: Data, body: Data) -> Data:
        """The body, if nobody altered it, its header or its name."""
        from cryptography.exceptions import InvalidTag

        view = memoryview(body)
        if len(view) < OVERHEAD:
            raise Corrupt(f"chunk {name} is truncated")
        try:
            return self._chunks.decrypt(view[:_NONCE], view[_NONCE:], self._chunk_place(name, header))
        except InvalidTag:
            raise Corrupt(
                f"chunk {name} is altered, or was sealed for another worker, place or key"
            ) from None

    def seal(self, kind: Kind, key: str, data: bytes) -> bytes:
        """The sealed object; only the spec tells how to find the key again."""
        head = self._head if kind == "spec" else b""
        header = _HEADER.pack(_MAGIC, _VERSION, 0, len(head)) + head
        nonce = os.urandom(_NONCE)
        return header + nonce + self._cipher(kind).encrypt(nonce, data, self._place(kind, key, header))

    def open(self, kind: Kind, key: str, data: bytes) -> bytes:
        """What was sealed, if it was for this very place."""
        from cryptography.exceptions import InvalidTag

        if not is_sealed(data):
            raise Corrupt(f"{key} is not sealed, and its worker is")
        head = _head(data, key)
        if head != (self._head if kind == "spec" else b""):
            raise Corrupt(f"{key} is altered: it names another key or salt than its worker's")
        header, rest = data[: _HEADER.size + len(head)], memoryview(data)[_HEADER.size + len(head) :]
        if len(rest) < OVERHEAD:
            raise Corrupt(f"{key} is truncated")
        try:
            return self._cipher(kind).decrypt(rest[:_NONCE], rest[_NONCE:], self._place(kind, key, header))
        except InvalidTag:
            raise Corrupt(f"{key} is altered, or was sealed for another worker, place or key") from None

    def _cipher(self, kind: Kind) -> _Aead:
        return self._logs if kind in ("log", "begin") else self._documents

    def _place(self, kind: Kind, key: str, header: Data) -> bytes:
        """What is authenticated with an object. No part before the header can hold a NUL."""
        return b"\0".join((b"savedworker/1", kind.encode(), self._worker.encode(), key.encode(), header))

    def _chunk_place(self, name: str, header: Data) -> bytes:
        return b"\0".join((b"savedworker/1", b"chunk", self._worker.encode(), name.encode(), header))


class _Aead(Protocol):
    def encrypt(self, nonce: Data, data: Data, associated_data: Data | None) -> bytes: ...
    def decrypt(self, nonce: Data, data: Data, associated_data: Data | None) -> bytes: ...


def is_sealed(data: bytes) -> bool:
    """Whether ``data`` is a sealed object, as far as its first bytes tell."""
    return data[:4] == _MAGIC


def _head(data: bytes, key: str) -> bytes:
    """The head of a sealed object, not authenticated yet. Raises Corrupt, and Refused when a newer version sealed it."""
    if len(data) < _HEADER.size:
        raise Corrupt(f"{key} is truncated ({len(data)} bytes)")
    _, version, zero, length = _HEADER.unpack_from(data)
    if version > _VERSION:
        raise Refused(f"{key} was sealed by a newer version of Saved Worker", "upgrade Saved Worker here")
    if version < 1 or zero or len(data) < _HEADER.size + length:
        raise Corrupt(f"{key} is truncated or damaged")
    return data[_HEADER.size : _HEADER.size + length]


def _derive(secret: bytes, salt: bytes, worker_id: str, purpose: str) -> bytes:
    from cryptography.hazmat.primitives.hashes import SHA256
    from cryptography.hazmat.primitives.kdf.hkdf import HKDF

    info = f"savedworker/1\0{purpose}\0{worker_id}".encode()
    return bytes(HKDF(algorithm=SHA256(), length=KEY_SIZE, salt=salt, info=info).derive(secret))


@dataclass(frozen=True)
class Sealing:
    """How a store's workers are sealed: with which keys, and whether workers made without one are executed all the same.

    Without a ``ring`` new workers are plain, and sealed ones cannot be read.
    """

    ring: KeyRing | None = None
    allow_plain: bool = False

    def begin(self, worker_id: str) -> Sealer:
        """The sealer of a new worker. Raises Refused when the key cannot be read."""
        if self.ring is None:
            return PLAIN
        label, secret = self.ring.begin(worker_id)
        return Sealed(worker_id, label, os.urandom(_SALT), secret)

    def find(self, worker_id: str, key: str, spec: bytes) -> Sealer:
        """The sealer of the worker whose stored spec, at ``key``, is ``spec``. Raises NoKey, Corrupt, Refused."""
        if not is_sealed(spec):
            return PLAIN
        head = _head(spec, key)
        try:
            label = head[_SALT:].decode("ascii")
        except UnicodeDecodeError:
            label = ""
        if not label.isprintable() or not 0 < len(label) <= _MAX_LABEL:
            raise Corrupt(f"{key} is damaged: it names no key")
        if self.ring is None:
            raise NoKey(
                f"worker {worker_id} is sealed with key {label[:80]}, and no key is configured here",
                f"set {KEY_FILE} to the file that holds it; {_DOCS}",
            )
        return Sealed(worker_id, label, head[:_SALT], self.ring.find(label, worker_id))

    def environment(self) -> dict[str, str]:
        """What an agent must find in its environment to seal in the same way. May hold secrets."""
        if self.ring is None:
            return {}
        return self.ring.environment() | ({ALLOW_PLAIN: "1"} if self.allow_plain else {})


NO_KEY = Sealing()


def sealing_from_environment(environ: Mapping[str, str] | None = None, *, key_file: str = "") -> Sealing:
    """What SAVEDWORKER_KEY_FILE or SAVEDWORKER_KEY, and SAVEDWORKER_ALLOW_PLAIN, say. Raises Refused in one line.

    ``key_file``, when given, goes before the first two.
    """
    given = os.environ if environ is None else environ
    allow = given.get(ALLOW_PLAIN) or "0"
    if allow not in ("0", "1"):
        raise Refused(f"{ALLOW_PLAIN}={allow!r} is neither 0 nor 1", "set it to 1, or unset it")
    file, text = (key_file, None) if key_file else (given.get(KEY_FILE), given.get(KEY))
    if file and text:
        raise Refused(f"{KEY_FILE} and {KEY} are both set", "unset one of them")
    ring: KeyRing | None = None
    if file:
        ring = _KeyFile(Path(os.path.abspath(Path(file).expanduser())))
        ring.describe()  # what is wrong with it is said at once
    elif text:
        ring = _Keys(_parse(text, KEY), KEY)
    return Sealing(ring, allow == "1") if ring else NO_KEY


@dataclass(frozen=True)
class _Keys:
    """Master keys in memory: the first is for new workers."""

    keys: tuple[bytes, ...] = field(repr=False)
    where: str

    def begin(self, worker_id: str) -> tuple[str, bytes]:
        return key_id(self.keys[0]), self.keys[0]

    def find(self, label: str, worker_id: str) -> bytes:
        for key in self.keys:
            if key_id(key) == label:
                return key
        raise NoKey(
            f"worker {worker_id} is sealed with key {label[:80]}, and {self.where} holds {' '.join(map(key_id, self.keys))}",
            f"add that key below the present one; {_DOCS}",
        )

    def environment(self) -> dict[str, str]:
        return {KEY: " ".join(base64.b64encode(key).decode() for key in self.keys)}

    def describe(self) -> str:
        older = f", and {len(self.keys) - 1} more for older workers" if len(self.keys) > 1 else ""
        return f"key {key_id(self.keys[0])} of {self.where}{older}"

    def files(self) -> tuple[Path, ...]:
        return ()


@dataclass(frozen=True)
class _KeyFile:
    """Master keys in a file, which is read whenever a key is needed: so a rotation reaches programs that run."""

    path: Path

    def begin(self, worker_id: str) -> tuple[str, bytes]:
        return self._read().begin(worker_id)

    def find(self, label: str, worker_id: str) -> bytes:
        return self._read().find(label, worker_id)

    def environment(self) -> dict[str, str]:
        return {KEY_FILE: str(self.path)}

    def describe(self) -> str:
        return self._read().describe()

    def files(self) -> tuple[Path, ...]:
        return tuple(dict.fromkeys((self.path, self.path.resolve())))

    def _read(self) -> _Keys:
        try:
            # Not blocking: it may be a fifo.
            with os.fdopen(os.open(self.path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC), "rb") as file:
                status = os.fstat(file.fileno())
                if not stat.S_ISREG(status.st_mode) or status.st_size > _MAX_KEY_FILE:
                    raise Refused(f"{self.path} is not a key file", _MAKE)
                if status.st_mode & 0o077:
                    raise Refused(
                        f"the key file {self.path} has mode {stat.S_IMODE(status.st_mode):04o}: others may get at it",
                        f"chmod 600 {self.path}",
                    )
                text = file.read(_MAX_KEY_FILE).decode("ascii")
        except OSError as error:
            raise Refused(
                f"the key file {self.path} cannot be read: {error.strerror}", f"check {KEY_FILE}"
            ) from error
        except UnicodeDecodeError:
            raise Refused(f"{self.path} is not a key file: one key a line, in base64", _MAKE) from None
        lines = (line for line in text.splitlines() if not line.lstrip().startswith("#"))
        return _Keys(_parse("\n".join(lines), str(self.path)), str(self.path))


def _parse(text: str, where: str) -> tuple[bytes, ...]:
    """The keys in ``text``, 32 bytes each in base64, with white space between. The text itself stands in no message."""
    keys = []
    for n, word in enumerate(text.split(), 1):
        try:
            key = base64.b64decode(word, validate=True)
        except (binascii.Error, ValueError):
            key = b""
        if len(key) != KEY_SIZE:
            raise Refused(f"key {n} of {where} is not {KEY_SIZE} bytes in base64", _MAKE)
        keys.append(key)
    if not keys:
        raise Refused(f"{where} holds no key", _MAKE)
    return tuple(keys)


def key_id(key: bytes) -> str:
    """Names a master key and tells nothing of it: 16 hexadecimal digits."""
    return _derive(key, b"", "", "key id")[:8].hex()
