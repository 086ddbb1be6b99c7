"""Which conversations share a row, decided by their lengths alone. Every conversation stays whole and is used once.

Best-fit decreasing (Johnson 1973; at most about 11/9 of the fewest possible rows): the longest first, each into the row
where the least room remains. Neighbour: `chat_source` builds the rows.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt


def packed(lengths: npt.NDArray[np.int64], capacity: int) -> list[list[int]]:
    """Rows of indices into `lengths` (each length 1 to `capacity`), ascending within a row; rows sorted by first
    index."""
    rows: list[list[int]] = []
    with_room: dict[int, list[int]] = {}
    rooms = 0
    """Bit r is set if some row has room for exactly r more tokens."""
    for index in np.argsort(-lengths, kind="stable").tolist():
        length = int(lengths[index])
        enough = rooms >> length
        if enough:
            room = length + ((enough & -enough).bit_length() - 1)
            row = with_room[room].pop()
            if not with_room[room]:
                rooms &= ~(1 << room)
        else:
            room, row = capacity, len(rows)
            rows.append([])
        rows[row].append(index)
        if left := room - length:
            with_room.setdefault(left, []).append(row)
            rooms |= 1 << left
    return sorted(sorted(row) for row in rows)
