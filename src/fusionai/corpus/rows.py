"""Builds rows for training: masks tokens (masked language models), packs short samples into rows of full length.

`corpus.source` and `corpus.chat_source` use this."""

from __future__ import annotations

from typing import Final

import numpy as np
import numpy.typing as npt

IGNORED: Final = -100
"""The label that every loss ignores."""


def mask_rows(
    tokens: npt.NDArray[np.int64], *, key: int, fraction: float, mask_id: int, end_id: int, vocabulary: int
) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
    """`tokens` [rows, length] -> (input_ids, labels), both of that shape. Labels are `IGNORED` where no token is
    masked. End-of-document tokens are never masked; at least one token is, so that the loss is defined."""
    counters = np.arange(tokens.size, dtype=np.uint64).reshape(tokens.shape)
    chance, kind, replacement = (_draws(counters, key, stream) for stream in range(3))
    allowed = tokens != end_id
    chosen = allowed & (chance < np.uint64(int(fraction * 2**64)))
    if not chosen.any():
        # Mask the position closest to being chosen; in rows of nothing but end tokens, any position.
        ranked = np.where(allowed, chance, np.uint64(2**64 - 1)) if allowed.any() else chance
        chosen.flat[int(np.argmin(ranked))] = True
    share = kind % np.uint64(10)
    inputs = np.where(chosen & (share < 8), np.int64(mask_id), tokens)
    inputs = np.where(chosen & (share == 8), (replacement % np.uint64(vocabulary)).astype(np.int64), inputs)
    return inputs, np.where(chosen, tokens, np.int64(IGNORED))


def _draws(counters: npt.NDArray[np.uint64], key: int, stream: int) -> npt.NDArray[np.uint64]:
    """64 random bits per counter: SplitMix64 of (key, stream, counter), like `permutation.mix` on arrays."""
    with np.errstate(over="ignore"):
        value = counters * np.uint64(3) + np.uint64(stream) + np.uint64(key)
        value = value * np.uint64(0x9E3779B97F4A7C15)
        value = (value ^ (value >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        value = (value ^ (value >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        return value ^ (value >> np.uint64(31))


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
