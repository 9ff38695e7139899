"""CRIU's image files: magic numbers, then entries that are protobuf messages. Only what is needed to read and change some."""

from __future__ import annotations

import os
import struct
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path

from savedworker.model.errors import Fatal

IMAGE, SERVICE = 0x54564319, 0x55105940
"""The first number of an image, and of a file beside the images; CRIU 4.2.1, criu/include/magic.h."""
_LENGTH = struct.Struct("<I")
_MAX_IMAGE = 256 << 20
"""Bytes of an image that is read whole; one open file takes about a hundred."""


def magic(first: int, second: int) -> bytes:
    """How a file begins."""
    return struct.pack("<II", first, second)


def pack(beginning: bytes, entries: Iterable[bytes]) -> bytes:
    """The content of an image file."""
    return beginning + b"".join(_LENGTH.pack(len(entry)) + entry for entry in entries)


def rewrite(image: Path, beginning: bytes, change: Callable[[bytes], bytes]) -> None:
    """Rewrite ``image`` (whole, or not at all) with each entry changed by ``change``. Raises Fatal."""
    try:
        size = image.stat().st_size
        data = image.read_bytes() if size <= _MAX_IMAGE else b""
    except OSError as error:
        raise Fatal(
            f"{image.name} cannot be read: {error.strerror}", "report this with the version of CRIU"
        ) from error
    if size > _MAX_IMAGE:
        raise Fatal(
            f"{image.name} has {size} bytes, which is too many", "report this with the version of CRIU"
        )
    try:
        new = pack(beginning, [change(entry) for entry in entries(data, beginning)])
    except (IndexError, ValueError, struct.error) as error:
        raise Fatal(
            f"{image.name} cannot be understood: {error}", "report this with the version of CRIU"
        ) from error
    if new != data:
        scratch = image.with_name(f".{image.name}.new")
        scratch.write_bytes(new)
        os.rename(scratch, image)


def entries(data: bytes, beginning: bytes) -> Iterator[bytes]:
    """The entries of an image that begins with ``beginning``. Raises ValueError, struct.error."""
    if data[: len(beginning)] != beginning:
        raise ValueError("it begins with another number")
    at = len(beginning)
    while at < len(data):
        (length,) = _LENGTH.unpack_from(data, at)
        at += _LENGTH.size
        if at + length > len(data):
            raise ValueError("it ends within an entry")
        yield data[at : at + length]
        at += length


def fields(message: bytes) -> Iterator[tuple[int, bytes | int, bytes]]:
    """Field number, value and all bytes of each field of a message. A value is an int or bytes; fixed-width ones are b""."""
    at = 0
    while at < len(message):
        start = at
        key, at = _varint(message, at)
        value: bytes | int = b""
        match key & 7:
            case 0:
                value, at = _varint(message, at)
            case 1:
                at += 8
            case 2:
                length, at = _varint(message, at)
                value = message[at : at + length]
                at += length
            case 5:
                at += 4
            case kind:
                raise ValueError(f"wire type {kind}")
        if at > len(message):
            raise ValueError("a field is cut off")
        yield key >> 3, value, message[start:at]


def number_field(field: int, value: int) -> bytes:
    """A field that holds a number."""
    return _number(field << 3) + _number(value)


def bytes_field(field: int, value: bytes) -> bytes:
    """A field that holds a string, bytes or a message."""
    return _number(field << 3 | 2) + _number(len(value)) + value


def _varint(data: bytes, at: int) -> tuple[int, int]:
    result = shift = 0
    while True:
        byte = data[at]
        at += 1
        result |= (byte & 127) << shift
        shift += 7
        if byte < 128:
            return result, at
        if shift > 63:
            raise ValueError("a number is too long")


def _number(value: int) -> bytes:
    out = bytearray()
    while value > 127:
        out.append(value & 127 | 128)
        value >>= 7
    out.append(value)
    return bytes(out)
