from __future__ import annotations

import pytest

from fusionai.dashboard.live import sparkline


@pytest.mark.parametrize(
    ("values", "width", "line"),
    [
        ([], 5, ""),
        ([1.0], 0, ""),
        ([1.0, 1.0], 5, "▁▁"),
        ([8, 7, 6, 5, 4, 3, 2, 1], 8, "█▇▆▅▄▃▂▁"),
        ([0, 0, 4, 4], 2, "▁█"),
        ([0, float("nan"), 1], 3, "▁x█"),
        ([float("inf")], 3, "x"),
    ],
)
def test_line(values: list[float], width: int, line: str) -> None:
    assert sparkline(values, width) == line


def test_ascii_for_terminals_without_unicode() -> None:
    assert sparkline([0, 1], 2, ascii_only=True) == "_@"
