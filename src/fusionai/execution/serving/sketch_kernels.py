"""Inner loop of `execution.serving.sketches` over rows, compiled with numba.

Every sum adds a row's numbers one by one in ascending order, so a row's mark does not depend on the rows processed with
it. The product of a sign and a number is exact, so a fused multiply-add rounds the same as two operations, and equal
rows have bitwise equal marks on every machine. Four rows are processed side by side, because each addition waits for
the previous one. Compiled through `scheduling.kernels.compiled`.
"""

from __future__ import annotations

from typing import Any

import numpy as np


def signed_sums(rows: Any, signs: Any, sums: Any) -> None:
    """Write sums float32 [count, 16]: rows float32 [count, width] times signs float32 [width, 16] of 1 and -1."""
    count, width = rows.shape
    lanes = signs.shape[1]
    totals = np.empty((4, lanes), np.float32)
    row = 0
    while row < count:
        last = count - 1
        # If fewer than four rows are left, the last row is repeated in place of the missing ones.
        a, b, c, d = row, min(row + 1, last), min(row + 2, last), min(row + 3, last)
        totals[:] = np.float32(0.0)
        for at in range(width):
            first, second, third, fourth = rows[a, at], rows[b, at], rows[c, at], rows[d, at]
            for lane in range(lanes):
                sign = signs[at, lane]
                totals[0, lane] += first * sign
                totals[1, lane] += second * sign
                totals[2, lane] += third * sign
                totals[3, lane] += fourth * sign
        for number in range(min(4, count - row)):
            for lane in range(lanes):
                sums[row + number, lane] = totals[number, lane]
        row += 4
