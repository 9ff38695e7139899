"""Master keys for tests."""

from __future__ import annotations

import base64
import hashlib
from pathlib import Path

from savedworker.store.sealing import Sealing, sealing_from_environment


def key(n: int = 1) -> bytes:
    """The master key number ``n``."""
    return hashlib.sha256(f"key {n}".encode()).digest()


def text(*keys: bytes) -> str:
    return " ".join(base64.b64encode(each).decode() for each in keys)


def sealing(*keys: bytes) -> Sealing:
    """What a process has whose SAVEDWORKER_KEY holds ``keys``."""
    return sealing_from_environment({"SAVEDWORKER_KEY": text(*keys)})


def key_file(path: Path, *keys: bytes) -> Path:
    """A key file as it should be."""
    path.write_text(text(*keys).replace(" ", "\n") + "\n")
    path.chmod(0o600)
    return path
