"""CRIU's images and what is kept beside them, when the store gives something else: an error at once, or the image as it was."""

from __future__ import annotations

import json
import os
import struct
import time
from pathlib import Path
from typing import Any

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from savedworker.checkpoint import affinity, criu_image
from savedworker.checkpoint.mountinfo import plain
from savedworker.checkpoint.open_files_image import _MAGIC, OpenRegularFile, forget_sizes, rearm_timers
from savedworker.checkpoint.unix_sockets import _socket
from savedworker.checkpoint.watches import _OVERLAY_HEADER
from savedworker.model.errors import Fatal
from tests.hostile.material import anything, few

VARINT = st.integers(0, 1 << 69)
FIELD = st.one_of(
    st.tuples(st.integers(0, 20), VARINT).map(lambda x: criu_image.number_field(*x)),
    st.tuples(st.integers(0, 20), st.binary(max_size=20)).map(lambda x: criu_image.bytes_field(*x)),
    st.tuples(st.integers(0, 20), VARINT).map(
        lambda x: criu_image._number(x[0] << 3 | 2) + criu_image._number(x[1])
    ),
    st.binary(max_size=12),
)
MESSAGE = st.lists(FIELD, max_size=6).map(b"".join)
NESTED = st.tuples(st.sampled_from([3, 12]), MESSAGE).map(lambda x: criu_image.bytes_field(*x))
IMAGE = st.one_of(
    st.lists(st.one_of(MESSAGE, NESTED), max_size=5).map(lambda entries: criu_image.pack(_MAGIC, entries)),
    st.binary(max_size=60),
    st.binary(max_size=60).map(lambda rest: _MAGIC + rest),
    st.integers(0, (1 << 32) - 1).map(lambda n: _MAGIC + struct.pack("<I", n) + b"x" * 9),
)


@few
@given(IMAGE)
@example(b"")
@example(_MAGIC + b"\xff\xff\xff\xff")
@example(criu_image.pack(_MAGIC, [b"\x80" * 1000]))
@example(criu_image.pack(_MAGIC, [b"\x1a\xff\xff\xff\xff\xff\xff\xff\xff\xff\x7f"]))
@example(criu_image.pack(_MAGIC, [criu_image.bytes_field(3, criu_image.bytes_field(6, b"../../etc/\xff\0"))]))
def test_any_image_of_open_files_is_rewritten_whole_or_left_as_it_was(
    tmp_path_factory: Any, content: bytes
) -> None:
    image = tmp_path_factory.mktemp("image") / "files.img"
    image.write_bytes(content)

    def picks(file: OpenRegularFile) -> bool:
        assert file.path == "" or file.path.startswith("/")
        return True

    for mend in (rearm_timers, lambda x: forget_sizes(x, picks)):
        before = image.read_bytes()
        started = time.monotonic()
        try:
            mend(image)
        except Fatal:
            assert image.read_bytes() == before
        assert time.monotonic() - started < 30
        assert len(image.read_bytes()) <= 2 * len(content) + 100
    assert os.listdir(image.parent) == ["files.img"]


def test_an_image_that_is_missing_or_as_large_as_a_disk_is_an_error_at_once(tmp_path: Path) -> None:
    image = tmp_path / "files.img"
    with pytest.raises(Fatal, match="cannot be read"):
        rearm_timers(image)
    image.touch()
    os.truncate(image, 1 << 42)
    with pytest.raises(Fatal, match="too many"):
        rearm_timers(image)


@few
@given(st.binary(max_size=80))
def test_fields_of_any_bytes_come_to_an_end(data: bytes) -> None:
    try:
        found = list(criu_image.fields(data))
    except (ValueError, IndexError):
        return
    assert b"".join(raw for _, _, raw in found) == data


@few
@given(st.one_of(st.dictionaries(st.text(max_size=5), anything, max_size=5), anything).map(json.dumps))
@example("[" * 100_000)
@example('{"1": [1e999]}')
@example('{"1": [' + "9" * 4000 + "]}")
@example('{"-1": ["0"], "1": [-7, 0, 1000000000]}')
def test_any_document_of_affinities_is_a_note_and_never_an_error(tmp_path_factory: Any, text: str) -> None:
    folder = tmp_path_factory.mktemp("images")
    (folder / affinity.NAME).write_text(text)
    before = os.sched_getaffinity(0)
    try:
        assert len(affinity.bring_back([os.getpid()], folder)) <= 1
    finally:
        os.sched_setaffinity(0, before)


@few
@given(st.binary(min_size=16, max_size=90))
@example(b"\0" * 90)
def test_a_message_about_sockets_comes_to_an_end(message: bytes) -> None:
    """From the kernel, not from a stranger; yet a length of 0 in it must not mean for ever."""
    try:
        _socket(message)
    except struct.error:
        return


@few
@given(st.text(max_size=40))
def test_a_mount_point_of_any_name_is_read(field: str) -> None:
    assert isinstance(plain(field), str)
    assert _OVERLAY_HEADER.size == 24
