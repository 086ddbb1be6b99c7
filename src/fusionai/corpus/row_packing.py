"""Which conversations share a row. Decides it from their lengths alone; splits none, loses none.

Best-fit decreasing (Johnson 1973, at most 11/9 of the fewest rows and a bit): the longest first, each where the least
room is left over. Neighbour: `chat_source` cuts rows so.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt


def packed(lengths: npt.NDArray[np.int64], capacity: int) -> list[list[int]]:
    """Rows of indices into `lengths` (each 1 to `capacity`), ascending in a row; rows by their first one."""
    rows: list[list[int]] = []
    with_room: dict[int, list[int]] = {}
    rooms = 0
    """Bit r: some row has room for exactly r more."""
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
