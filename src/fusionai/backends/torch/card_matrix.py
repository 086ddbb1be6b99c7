"""A packed matrix on another device than the processor, and its product there.

Levels lie row after row, in four bits two to a byte. The product by PyTorch's operators makes them numbers again in
pieces, because a whole matrix of these would take several times its memory; on cards that run the kernels of
`card_products`, levels are read once and numbers are never written. Neighbours: `packed_linear` makes the levels.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import torch
from torch import Tensor
from torch.nn.functional import linear

from fusionai.backends.torch import card_launch
from fusionai.backends.torch.row_code import Factor

_NUMBERS_OF_A_PIECE: Final = 2**24
"""Numbers that operators unpack at a time; chosen."""
_MOST_ROWS: Final = 64
"""SpacedRows up to which the kernels multiply by floats; the library's are faster for more. Chosen."""


@dataclass(frozen=True, slots=True)
class CardMatrix:
    """A matrix [out, in], or a stack of such below each other. `data`: floats, int8 levels, or two levels to a byte.
    `scales`: bfloat16 [out] for INT8; scale and middle [out, groups, 2] for four bits. `group`: levels that share
    them; 0 for the other formats."""

    factor: Factor
    data: Tensor
    scales: Tensor | None = None
    group: int = 0
    stack: CardMatrix | None = None
    """The matrices of all experts, of which this is one, below each other."""

    @property
    def columns(self) -> int:
        return self.data.shape[0]

    @property
    def count(self) -> int:
        """Summands of each result."""
        return self.data.shape[1] * (2 if self.group else 1)

    @property
    def nbytes(self) -> int:
        return self.data.nbytes + (0 if self.scales is None else self.scales.nbytes)

    def __call__(self, x: Tensor) -> Tensor:
        """Return [rows, out] for x [rows, in]."""
        floats = self.scales is None
        if not (floats and x.shape[0] > _MOST_ROWS) and x.shape[0] and card_launch.unused(x.device) is None:
            try:
                return self._by_kernels(x)
            except torch.OutOfMemoryError:
                raise
            except Exception as error:  # noqa: BLE001 - a compiler fails in many ways, and operators serve instead
                card_launch.failed(error)
        return self.by_operators(x)

    def by_operators(self, x: Tensor) -> Tensor:
        if self.scales is None:
            return linear(x.to(self.data.dtype), self.data)
        step = max(1, _NUMBERS_OF_A_PIECE // self.count)
        pieces = zip(self.data.split(step), self.scales.split(step), strict=True)
        if self.group:
            made = [linear(x, numbers_of_pairs(some, shared.float()).to(x.dtype)) for some, shared in pieces]
        else:
            # The product of levels is exact in them whatever the dtype of x: they have eight bits.
            made = [linear(x, some.to(x.dtype)) * scale.to(x.dtype) for some, scale in pieces]
        return made[0] if len(made) == 1 else torch.cat(made, dim=-1)

    def _by_kernels(self, x: Tensor) -> Tensor:
        rows = x.to(torch.float32).contiguous()
        made = torch.empty((x.shape[0], self.columns), dtype=torch.float32, device=x.device)
        places = torch.arange(x.shape[0], dtype=torch.int32, device=x.device)
        multiply(self, SpacedRows(rows, rows.shape[1]), SpacedRows(made, self.columns), places, x.shape[0])
        return made


@dataclass(frozen=True, slots=True)
class SpacedRows:
    """Memory of rows `width` floats apart."""

    memory: Tensor
    width: int


def multiply(
    matrix: CardMatrix, x: SpacedRows, y: SpacedRows, places: Tensor, rows: int, bias: Tensor | None = None
) -> None:
    """Multiply the rows of x at `places`, int32, and write the results to y at the same places."""
    from fusionai.backends.torch import card_products as kernels

    scales, added = matrix.data if matrix.scales is None else matrix.scales, x.memory if bias is None else bias
    operands = (x.memory, x.width, places, y.memory, y.width, matrix.data, scales, added, int(bias is not None))
    columns, count = matrix.columns, matrix.count
    if rows == 1:
        options = options_of_single(matrix.factor, matrix.group, count, chosen=False)
        grid = -(-columns // options["BLOCK_N"]), 1
        card_launch.launch(kernels.single, grid, *operands, x.memory, columns, count, 1, 0, 1, **options)
        return
    options = options_of_several(matrix.factor, matrix.group, count, rows, card_launch.precision())
    grid = -(-columns // options["BLOCK_N"]), -(-rows // options["ROWS"])
    card_launch.launch(kernels.several, grid, *operands, columns, count, rows, **options)


def options_of_single(factor: Factor, group: int, count: int, *, chosen: bool) -> dict[str, Any]:
    """Return what `card_products.single` is compiled for. `count`: summands."""
    return {**_form(factor, group, count), "CHOSEN": chosen, "BLOCK_N": 16, "BLOCK_K": 128}


def options_of_several(factor: Factor, group: int, count: int, rows: int, precision: str) -> dict[str, Any]:
    """Return what `card_products.several` is compiled for."""
    step = min(group, 64) if group else 32 if factor is Factor.FP32 else 64
    sizes = {"ROWS": 16 if rows <= 16 else 64, "BLOCK_N": 64, "BLOCK_K": step}
    return {**_form(factor, group, count), "PRECISION": precision, **sizes}


def _form(factor: Factor, group: int, count: int) -> dict[str, Any]:
    return {"FORM": int(Factor.INT4_32 if group else factor), "GROUP": group, "ALIGNED": count % 16 == 0}


def multiply_experts(
    matrix: CardMatrix,
    x: SpacedRows,
    y: SpacedRows,
    places: Tensor,
    rows: int,
    indices: Tensor,
    experts: tuple[int, int, int],
) -> None:
    """Multiply each row by the matrices of its experts. `matrix`: those of all experts, below each other. `indices`:
    their numbers, as floats in rows of x's width. `experts`: how many each row chose, the floats between the operands
    of two of them, and how many there are."""
    from fusionai.backends.torch import card_products as kernels

    chosen, step, known = experts
    scales = matrix.data if matrix.scales is None else matrix.scales
    columns = matrix.columns // known
    options = options_of_single(matrix.factor, matrix.group, matrix.count, chosen=True)
    card_launch.launch(
        kernels.single, (-(-columns // options["BLOCK_N"]), rows * chosen), x.memory, x.width, places, y.memory,
        y.width, matrix.data, scales, x.memory, 0, indices, columns, matrix.count, chosen, step, known, **options,
    )  # fmt: skip


LOOK_UP: Final[Mapping[str, Any]] = {"BLOCK": 1024}
"""What `card_products.look_up` is compiled for."""


def look_up(table: Tensor, x: SpacedRows, y: SpacedRows, places: Tensor, rows: int) -> None:
    """Write the rows of a table whose numbers are the first elements of x, as floats, to y at the same places."""
    from fusionai.backends.torch import card_products as kernels

    known, columns = table.shape
    grid = -(-columns // LOOK_UP["BLOCK"]), rows
    operands = (x.memory, x.width, places, y.memory, y.width, table, columns, known)
    card_launch.launch(kernels.look_up, grid, *operands, **LOOK_UP)


def below_each_other(matrices: Sequence[CardMatrix]) -> CardMatrix:
    """Return one matrix of the rows of all, which have one format and length."""
    (form,) = {(one.factor, one.group) for one in matrices}
    scales = [one.scales for one in matrices if one.scales is not None]
    whole = torch.cat([one.data for one in matrices])
    return CardMatrix(form[0], whole, torch.cat(scales) if scales else None, form[1])


def stacked(matrices: Sequence[CardMatrix]) -> list[CardMatrix]:
    """Return the same matrices as parts of one, which their products then need not gather."""
    whole = below_each_other(matrices)
    rows = matrices[0].columns
    owns = [None] * len(matrices) if whole.scales is None else whole.scales.split(rows)
    parts = zip(whole.data.split(rows), owns, strict=True)
    return [CardMatrix(whole.factor, data, own, whole.group, whole) for data, own in parts]


def numbers_of_pairs(pairs: Tensor, of_rows: Tensor) -> Tensor:
    """Return the numbers [out, in] of levels [out, in / 2], two to a byte. `of_rows`: scale and middle [out, groups,
    2]."""
    levels = torch.stack([pairs & 15, pairs >> 4], dim=-1).reshape(*of_rows.shape[:2], -1)
    scale, middle = of_rows.unbind(-1)
    return ((levels.to(of_rows.dtype) - 8) * scale[..., None] + middle[..., None]).flatten(1)
