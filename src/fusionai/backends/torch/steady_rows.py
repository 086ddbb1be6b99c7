"""Numbers of rows that a library's product is called with, so that a row's bits do not depend on the other rows.

Libraries choose kernels by the processor and by the number of rows, and another kernel may add in another order. What a
call does follows from its sizes alone, never from its numbers. So a few sizes are tried when a matrix is loaded, and
later calls have one of those sizes and no other: rows are padded or split (`in_steady_calls`).

A trial must show another order of sums although results are rounded to bfloat16. Its rows are made from rows of the
matrix, so that the exact product is zero: the result is the rounding errors of the sums alone. Neighbour:
`packed_linear` has the products.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from typing import Final

import torch
from torch.nn.functional import pad

Product = Callable[[torch.Tensor], torch.Tensor]
"""[rows, in] -> [rows, out] in the product's own dtype."""
Counts = tuple[int, ...]
"""Ascending. Calls of these numbers of rows give a row the same bits in every place."""

TRIED: Final[Counts] = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64)
TRIED_OF_LARGE: Final[Counts] = (1, 2, 4, 8, 16, 32)
"""Fewer sizes for large matrices: trials take time in proportion to the elements."""
LARGE_ELEMENTS: Final = 2**21
_ROWS: Final = 8
"""Different rows of a trial: the first half cancels, the others are random, of unlike sizes."""
_ALIGNMENT_BYTES: Final = 64
_KNOWN: Final[dict[Hashable, Counts]] = {}


def steady_counts(kind: str, shape: tuple[int, int], make: Callable[[], tuple[Product, torch.Tensor]]) -> Counts:
    """Sizes for products of one `kind` with matrices of `shape` [out, in]. `make`: such a product, and the matrix in
    float32 as the product reads it (whole levels if it is quantised); called if the answer is not known yet."""
    key = (kind, shape, torch.get_num_threads())
    known = _KNOWN.get(key)
    if known is None:
        product, matrix = make()
        known = _KNOWN[key] = tried(product, matrix)
    return known


def in_steady_calls(product: Product, counts: Counts, x: torch.Tensor) -> torch.Tensor:
    """`product` of x [rows, in] in calls of `counts` rows."""
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
    """The sizes whose calls agree with the largest that has no favourite place. One row agrees with itself."""
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
    """x [8, in] for a matrix [out, in]. Of the first four the product with one row of the matrix is exactly zero."""
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
    """What calls of `count` rows make of the rows x; None if it depends on a row's place or on its neighbours."""
    # Every place and every neighbour: a row among copies of itself, and among unlike rows. Calls of few rows can't hold
    # all rows at once, so there each row has copies.
    copies = range(_ROWS if count < _ROWS else 1)
    same = [product(x[row : row + 1].expand(count, -1).contiguous()) for row in copies]
    mixed = torch.cat([product(x[[place % _ROWS for place in places]]) for places in _calls(count)])
    made = mixed[:_ROWS]
    alike = all(torch.equal(one, made[row : row + 1].expand(count, -1)) for row, one in zip(copies, same, strict=True))
    return made if alike and torch.equal(mixed, made[[place % _ROWS for place in range(len(mixed))]]) else None


def _calls(count: int) -> list[range]:
    """Rows by number, `count` of them at a time, until every row had a turn."""
    return [range(first, first + count) for first in range(0, _ROWS, count)]


def aligned(x: torch.Tensor) -> torch.Tensor:
    """Libraries may choose by the address and the strides as well: an operand that begins and lies as fresh memory."""
    begins = x.is_contiguous() and x.data_ptr() % _ALIGNMENT_BYTES == 0
    return x if begins else x.clone(memory_format=torch.contiguous_format)
