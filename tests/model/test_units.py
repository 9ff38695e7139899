"""Durations and sizes are read as people write them, or refused in one line."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from savedworker.model.errors import Refused
from savedworker.model.units import MAX_SIZE, format_duration, format_size, parse_duration, parse_size


@pytest.mark.parametrize(
    ("text", "seconds"),
    [
        ("30s", 30.0),
        ("5m", 300.0),
        ("1h30m", 5400.0),
        ("1h 30m", 5400.0),
        ("250ms", 0.25),
        ("2d", 172800.0),
        ("1.5h", 5400.0),
        (" 10 s ", 10.0),
        ("90", 90.0),
        ("0", 0.0),
        (7, 7.0),
        (0.5, 0.5),
        (1e-5, 1e-5),
    ],
)
def test_a_duration_is_read(text: str | float, seconds: float) -> None:
    assert parse_duration(text) == pytest.approx(seconds)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "s",
        "-5",
        "-5m",
        "5M",
        "1h30",
        "1e3",
        "nan",
        "inf",
        "5 minutes",
        "5mm",
        "1..5s",
        "٣s",
        "1s;",
        "9" * 400,
        "9" * 9999,
        float("nan"),
        float("inf"),
        -1,
        True,
        10**400,
    ],
)
def test_what_is_no_duration_is_refused(text: str | float) -> None:
    with pytest.raises(Refused, match="is not a duration"):
        parse_duration(text)


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("512MiB", 512 << 20),
        ("4G", 4 << 30),
        ("4gb", 4 << 30),
        ("4Gi", 4 << 30),
        ("0.5KiB", 512),
        ("1T", 1 << 40),
        ("8B", 8),
        ("8 KiB", 8192),
        ("123", 123),
        ("9007199254740993", (1 << 53) + 1),
        (123, 123),
        (4e9, 4_000_000_000),
    ],
)
def test_a_size_is_read(text: str | int, size: int) -> None:
    assert parse_size(text) == size


@pytest.mark.parametrize(
    "text",
    [
        "",
        "B",
        "-1",
        "4 X",
        "lots",
        "1e9",
        "٣",
        "9000000T",
        "9" * 400,
        "4GiBB",
        "1,5G",
        "4\nG",
        True,
        math.inf,
        math.nan,
        10**400,
    ],
)
def test_what_is_no_size_is_refused(text: str | float) -> None:
    with pytest.raises(Refused, match="is not a size"):
        parse_size(text)


words = st.text() | st.text("0123456789.smhdKMGTiB -+e", max_size=60) | st.integers() | st.floats()


@given(words)
def test_nothing_but_refused_comes_out_of_the_parsers(text: str | float) -> None:
    for parse in (parse_duration, parse_size):
        refused: Refused | None = None
        value: float = 0
        try:
            value = parse(text)
        except Refused as error:
            refused = error
        assert math.isfinite(value)
        assert value >= 0
        assert parse is parse_duration or value <= MAX_SIZE
        if refused is not None:
            assert refused.fix
            assert "\n" not in str(refused)
            assert len(str(refused)) < 1000


@given(st.integers(0, 10**9), st.sampled_from(["ms", "s", "m", "h", "d"]))
def test_a_number_with_a_unit_is_that_many(number: int, unit: str) -> None:
    each = {"ms": 0.001, "s": 1, "m": 60, "h": 3600, "d": 86400}[unit]
    assert parse_duration(f"{number}{unit}") == pytest.approx(number * each)


@given(
    st.integers(0, 1 << 20), st.sampled_from(["", "K", "M", "G", "T"]), st.sampled_from(["", "B", "iB", "i"])
)
def test_sizes_are_powers_of_1024(number: int, unit: str, suffix: str) -> None:
    if not unit and suffix.startswith("i"):
        return
    assert parse_size(f"{number}{unit}{suffix}") == number << (10 * " KMGT".index(unit or " "))


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0.42, "0.42s"),
        (3.14, "3.1s"),
        (12, "12s"),
        (59.7, "1m00s"),
        (185, "3m05s"),
        (7800, "2h10m"),
        (3599.9, "1h00m"),
    ],
)
def test_durations_are_shown_short(seconds: float, text: str) -> None:
    assert format_duration(seconds) == text


@pytest.mark.parametrize(
    ("size", "text"),
    [(0, "0 B"), (1023, "1023 B"), (1536, "1.5 KiB"), (5 << 30, "5.0 GiB"), (3 << 40, "3.0 TiB")],
)
def test_sizes_are_shown_short(size: int, text: str) -> None:
    assert format_size(size) == text
