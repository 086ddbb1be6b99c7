"""Numbers as people read them: three or four digits, never an exponent."""

from __future__ import annotations

import pytest

from fusionai.primitives.units import format_bytes, format_count, format_flop, format_seconds, format_speed


@pytest.mark.parametrize(
    ("shown", "told"),
    [
        (format_bytes(999), "999 B"),
        (format_bytes(999_400), "999 kB"),
        (format_bytes(999_600), "1 MB"),
        (format_bytes(1_234_000_000), "1.23 GB"),
        (format_count(999_600), "1M"),
        (format_flop(999_600_000), "1 G"),
        (format_flop(1.234e15), "1.23 P"),
        (format_flop(12_345), "12345"),
        (format_count(134_100_000), "134M"),
        (format_seconds(0.000_9996), "1 ms"),
        (format_seconds(0.9996), "1.00 s"),
        (format_seconds(0.9994), "999 ms"),
        (format_speed(0.5), "0.5"),
        (format_speed(254.31), "254.3"),
        (format_speed(999.96), "1,000"),
        (format_speed(61_120.4), "61,120"),
    ],
)
def test_numbers_are_shown_short(shown: str, told: str) -> None:
    assert shown == told
