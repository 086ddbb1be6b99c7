"""The loop of `execution.serving_marks` over rows, as numba compiles it.

Every sum adds the row's numbers one after the other, in ascending order, so a row's marks do not depend on the rows it
is multiplied with. A sign times a number is exact, so a processor that fuses the two operations rounds as one that does
not: marks of equal rows have equal bits on every machine. Four rows go side by side, because each sum waits for the one
before. Neighbour: `scheduling.compiled`.
"""

from __future__ import annotations

from typing import Any

import numpy as np


def signed_sums(rows: Any, signs: Any, sums: Any) -> None:
    """rows float32 [count, width] times signs float32 [width, 16] of 1 and -1 -> sums float32 [count, 16]."""
    count, width = rows.shape
    lanes = signs.shape[1]
    totals = np.empty((4, lanes), np.float32)
    row = 0
    while row < count:
        last = count - 1
        # The last row stands in for rows that are not there.
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
