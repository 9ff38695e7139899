"""CRIU's image of open files is mended before a restore, whole or not at all."""

from __future__ import annotations

from pathlib import Path

import pytest

from savedworker.checkpoint import criu_image
from savedworker.checkpoint.criu_image import bytes_field, fields, number_field
from savedworker.checkpoint.open_files_image import rearm_timers
from savedworker.model.errors import Fatal

MAGIC = criu_image.magic(criu_image.IMAGE, 0x56303138)
TIMER = 12


def timer(number: int, ticks: int, left: tuple[int, int], every: tuple[int, int]) -> bytes:
    values = {
        1: number,
        2: 0o2000000,
        4: 1,
        5: ticks,
        6: 0,
        7: left[0],
        8: left[1],
        9: every[0],
        10: every[1],
    }
    message = b"".join(number_field(field, value) for field, value in values.items())
    return number_field(1, 17) + number_field(2, number) + bytes_field(TIMER, message)


def timers(image: Path) -> list[dict[int, object]]:
    found: list[dict[int, object]] = []

    def look(entry: bytes) -> bytes:
        for field, value, _ in fields(entry):
            if field == TIMER and isinstance(value, bytes):
                found.append({number: content for number, content, _ in fields(value)})
        return entry

    criu_image.rewrite(image, MAGIC, look)
    return found


def test_a_periodic_timer_with_unread_expiries_is_switched_on_again_and_no_other_is_touched(
    tmp_path: Path,
) -> None:
    image = tmp_path / "files.img"
    entries = [
        timer(1, ticks=3, left=(0, 0), every=(0, 20_000_000)),
        timer(2, ticks=0, left=(0, 0), every=(5, 0)),  # switched off by the program
        timer(3, ticks=3, left=(0, 0), every=(0, 0)),  # once, and it is over
        timer(4, ticks=3, left=(1, 5), every=(2, 0)),
        number_field(1, 1) + number_field(2, 5) + bytes_field(3, b"\x08\x07"),
    ]
    image.write_bytes(criu_image.pack(MAGIC, entries))
    before = timers(image)
    rearm_timers(image)
    after = timers(image)
    assert after[0] == {**before[0], 8: 1}
    assert after[1:] == before[1:]
    rearm_timers(image)
    assert timers(image) == after


@pytest.mark.parametrize(
    "broken", [b"", b"nonsense", MAGIC + b"\x10\x00\x00\x00\x08", MAGIC + b"\x02\x00\x00\x00\x0b\x00"]
)
def test_an_image_that_cannot_be_understood_is_refused_and_left_as_it_is(
    tmp_path: Path, broken: bytes
) -> None:
    image = tmp_path / "files.img"
    image.write_bytes(broken)
    with pytest.raises(Fatal):
        rearm_timers(image)
    assert image.read_bytes() == broken
    assert list(tmp_path.iterdir()) == [image]
