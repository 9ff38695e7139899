"""Stored documents: canonical JSON with a format version, read back into frozen pydantic models."""

from __future__ import annotations

import json
import logging
from collections.abc import Callable
from typing import TypeVar

from pydantic import BaseModel, ValidationError

from savedworker.model.base import FORMAT
from savedworker.model.errors import Corrupt, Refused

log = logging.getLogger(__name__)

MAX_DOCUMENT = 64 << 20
"""Bytes; a longer document is not ours."""

_M = TypeVar("_M", bound=BaseModel)
_T = TypeVar("_T")


def read_twice(read: Callable[[], _T]) -> _T:
    """``read``, and once more when it raises Corrupt: what was altered on its way is whole then, what is damaged stays so."""
    try:
        return read()
    except Corrupt as error:
        log.warning("%s: it is read again", error)
        return read()


def dump(model: BaseModel) -> bytes:
    """``model`` as canonical JSON: sorted keys, no spaces, UTF-8, one final newline. Equal models give equal bytes.

    Raises Refused for one that is too long to be read again.
    """
    text = json.dumps(
        model.model_dump(mode="json"),
        sort_keys=True,
        separators=(",", ":"),
        ensure_ascii=False,
        allow_nan=False,
    )
    data = text.encode() + b"\n"
    if len(data) > MAX_DOCUMENT:
        raise Refused(
            f"{type(model).__name__} would be too long for a document ({len(data)} bytes)",
            "report this with what the worker has in memory and in /dev/shm",
        )
    return data


def load(kind: type[_M], data: bytes, where: str = "") -> _M:
    """The document of ``kind`` in ``data``; ``where`` names it in messages.

    Raises Refused for one that a newer version of the product wrote, Corrupt for everything else that is not one.
    """
    name = where or kind.__name__
    if len(data) > MAX_DOCUMENT:
        raise Corrupt(f"{name} is too long for a document ({len(data)} bytes)")
    try:
        document = json.loads(data)
    except (ValueError, RecursionError) as error:
        raise Corrupt(f"{name} is not a JSON document ({error})") from error
    version = document.get("format") if isinstance(document, dict) else None
    if type(version) is not int or version < 1:
        raise Corrupt(f"{name} has no format version")
    if version > FORMAT:
        raise Refused(
            f"{name} was written by a newer version of Saved Worker (format {version}; this one reads up to {FORMAT})",
            "upgrade Saved Worker here",
        )
    try:
        return kind.model_validate_json(data)
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
        place = ".".join(str(part) for part in first["loc"]) or "document"
        raise Corrupt(f"{name} is damaged: {place}: {first['msg']}") from error
