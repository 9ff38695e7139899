"""Sizes as people write them, in settings."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import BeforeValidator, Field

from savedworker.model.errors import Refused
from savedworker.model.units import parse_size


def _size(value: Any) -> Any:
    if not isinstance(value, str):
        return value
    try:
        return parse_size(value)
    except Refused as error:
        raise ValueError(error.message) from error


Size = Annotated[int, BeforeValidator(_size), Field(ge=0, lt=1 << 62)]
"""Bytes; in the file also ``1GiB``."""
