"""Finds numbers of rows for calls of a library's product with which a row's bits do not depend on the other rows.

Libraries choose kernels by the processor and by the number of rows, and another kernel may sum in another order. The
kernel follows from a call's sizes alone, never from the values. So a few sizes are tried when a matrix is loaded, and
later calls use only sizes that passed: rows are padded or split (`in_steady_calls`).

A trial must reveal another order of sums even if results are rounded to bfloat16. Its rows are made from rows of the
matrix so that the exact product is zero: the result then consists of rounding errors only. Neighbour: `packed_linear`
has the products.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import Final

import torch
from torch.nn.functional import pad

Product = Callable[[torch.Tensor], torch.Tensor]
"""Maps [rows, in] to [rows, out] in the product's own dtype."""
Counts = tuple[int, ...]
"""Numbers of rows, ascending. Calls with these numbers of rows give a row the same bits at every place."""

TRIED: Final[Counts] = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64)
"""Numbers of rows that are tried; chosen."""
TRIED_OF_LARGE: Final[Counts] = (1, 2, 4, 8, 16, 32)
"""Fewer sizes for large matrices, because a trial's time is proportional to the elements."""
LARGE_ELEMENTS: Final = 2**21
"""Elements above which a matrix counts as large; chosen."""
_ROWS: Final = 8
"""Distinct rows of a trial: the first half cancels to zero, the others are random, of different magnitudes."""
_ALIGNMENT_BYTES: Final = 64
_KNOWN: Final[dict[Hashable, Counts]] = {}
"""(kind, shape, threads) -> numbers of rows that passed."""


def steady_counts(kind: str, shape: tuple[int, int], make: Callable[[], tuple[Product, torch.Tensor]]) -> Counts:
    """Return the numbers of rows for products of one `kind` with matrices of `shape` [out, in].

    `make` returns such a product, and the matrix in float32 as the product reads it (integer levels if quantised). It
    is called only if the answer is not known yet.
    """
    key = (kind, shape, torch.get_num_threads())
    known = _KNOWN.get(key)
    if known is None:
        product, matrix = make()
        known = _KNOWN[key] = tried(product, matrix)
    return known


def in_steady_calls(product: Product, counts: Counts, x: torch.Tensor) -> torch.Tensor:
    """Return `product` of x [rows, in], computed in calls of `counts` rows."""
    rows, most = x.shape[0], counts[-1]
    whole = rows - rows % most
    parts = [product(aligned(part)) for part in x[:whole].split(most)] if whole else []
    if whole < rows or not parts:
        rest = rows - whole
        size = next(count for count in counts if count >= rest)
        last = x[whole:]
        parts.append(product(aligned(pad(last, (0, 0, 0, size - rest)) if size > rest else last))[:rest])
    return parts[0] if len(parts) == 1 else torch.cat(parts)


def tried(product: Product, matrix: torch.Tensor) -> Counts:
    """Return the numbers of rows that agree with the largest one that passes. One row always passes."""
    x = trial_rows(matrix)
    by_bits: list[tuple[torch.Tensor, list[int]]] = []
    for count in TRIED if matrix.numel() <= LARGE_ELEMENTS else TRIED_OF_LARGE:
        made = _steady(product, x, count)
        if made is None:
            continue
        for other, counts in by_bits:
            if torch.equal(made, other):
                counts.append(count)
                break
        else:
            by_bits.append((made, [count]))
    return tuple(max((counts for _, counts in by_bits), key=lambda counts: counts[-1]))


def trial_rows(matrix: torch.Tensor) -> torch.Tensor:
    """Return x [8, in] for a matrix [out, in]. Each of the first four has an exactly zero product with one row of the
    matrix."""
    generator = torch.Generator().manual_seed(1)
    columns = matrix.shape[1]
    x = torch.randn((_ROWS, columns), generator=generator)
    x *= torch.tensor([1.0, 1.0, 1.0, 1.0, 1.0, 100.0, 0.01, 1.0])[:, None]
    places = torch.linspace(0, matrix.shape[0] - 1, _ROWS // 2).round().to(torch.int64)
    for number, row in enumerate(matrix[places.to(matrix.device)].to("cpu", torch.float32)):
        first, second = torch.randperm(columns, generator=generator)[: columns - columns % 2].reshape(2, -1)
        x[number] = 0.0
        x[number, first], x[number, second] = row[second], -row[first]
    return x.to(matrix.device)


def _steady(product: Product, x: torch.Tensor, count: int) -> torch.Tensor | None:
    """Return the results for the rows x in calls of `count` rows; None if they depend on a row's place or its
    neighbours."""
    # Tried at every place and with every neighbour: a row among copies of itself, and among different rows. Calls of
    # few rows can't hold all rows at once, so each row is tried among copies there.
    copies = range(_ROWS if count < _ROWS else 1)
    same = [product(x[row : row + 1].expand(count, -1).contiguous()) for row in copies]
    mixed = torch.cat([product(x[[place % _ROWS for place in places]]) for places in _calls(count)])
    made = mixed[:_ROWS]
    alike = all(torch.equal(one, made[row : row + 1].expand(count, -1)) for row, one in zip(copies, same, strict=True))
    return made if alike and torch.equal(mixed, made[[place % _ROWS for place in range(len(mixed))]]) else None


def _calls(count: int) -> list[range]:
    """Return row numbers in groups of `count`, until every row has occurred."""
    return [range(first, first + count) for first in range(0, _ROWS, count)]


def aligned(x: torch.Tensor) -> torch.Tensor:
    """Return x at an aligned address and contiguous, like fresh memory: libraries may also choose kernels by address
    and strides."""
    begins = x.is_contiguous() and x.data_ptr() % _ALIGNMENT_BYTES == 0
    return x if begins else x.clone(memory_format=torch.contiguous_format)
