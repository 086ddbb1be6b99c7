"""Frozen weights in fewer bits on torch: unpacked to float32 by each reader, and kept packed for backward.

The float32 values live only while the operator that reads them runs, and again during its part of backward. A lookup
unpacks only the requested rows. Neighbours: `ir.stored` defines the forms, `interpreter` wraps operators with a
`PackedReading`, `program` holds the bytes.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass
from math import prod
from typing import Any, Final

import torch
import torch.nn.functional as F

from fusionai.backends.torch.operators import with_index_checks
from fusionai.ir.graph import reads
from fusionai.ir.schema import Node, ParamSpec, Stored
from fusionai.ir.stored import group_of

EMBEDDING: Final = "aten.embedding.default"


class StoredWeight:
    """A packed weight. `data`: flat uint8 in the layout of `ir.stored`. `shape`: shape of the float32 tensor."""

    def __init__(self, data: torch.Tensor, spec: ParamSpec) -> None:
        self.data = data
        self.shape = tuple(spec.shape)
        self._form: Stored = spec.stored
        self._columns = spec.shape[-1]
        self._rows = prod(spec.shape[:-1])

    def open(self, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        """Return the whole weight, unpacked in float32 and converted to `dtype`."""
        return self._floats(None).view(self.shape).to(dtype)

    def rows(self, numbers: torch.Tensor) -> torch.Tensor:
        """Return these rows of a matrix: float32 [*numbers.shape, columns]."""
        return self._floats(numbers.reshape(-1)).view(*numbers.shape, self._columns)

    def _floats(self, rows: torch.Tensor | None) -> torch.Tensor:
        count, columns = self._rows * self._columns, self._columns

        def taken(part: torch.Tensor) -> torch.Tensor:
            return part if rows is None else part.index_select(0, rows)

        match self._form:
            case "int8":
                scales = taken(self.data[count:].view(torch.bfloat16).view(self._rows, 1))
                return taken(self.data[:count].view(torch.int8).view(self._rows, columns)).float() * scales.float()
            case "int4":
                group = group_of(self.shape)
                assert group is not None, "a graph is checked before it is loaded"
                codes = taken(self.data[: count // 2].view(self._rows, columns // 2))
                levels = torch.stack([codes & 15, codes >> 4], dim=-1).view(-1, group).float()
                pairs = taken(self.data[count // 2 :].view(torch.bfloat16).view(self._rows, -1)).reshape(-1, 2).float()
                return (levels.sub_(8).mul_(pairs[:, :1]).add_(pairs[:, 1:])).view(-1, columns)
            case _:
                return taken(self.data.view(torch.bfloat16).view(self._rows, columns)).float()


@dataclass(frozen=True, slots=True)
class PackedReading:
    """How one stage reads packed weights. `values`: their value names. `again`: backward recomputes activations and
    unpacks weights with them."""

    values: Collection[str] = ()
    again: bool = False

    def of(self, node: Node, compute: Callable[..., Any], *, half: bool) -> Callable[..., Any]:
        """Return `compute` wrapped so that it gets unpacked tensors for packed weights. `half`: it computes in
        bfloat16."""
        if not any(name in self.values for name in reads(node)):
            return compute
        if node.op == EMBEDDING:
            return with_index_checks(node.op, _looked_up)
        dtype = torch.bfloat16 if half else torch.float32
        return lambda *args, **options: _opened(compute, args, options, dtype, again=self.again)


AS_THEY_ARE: Final = PackedReading()
"""No packed weights."""


def _looked_up(table: StoredWeight | torch.Tensor, indices: torch.Tensor, *_rest: Any, **_named: Any) -> torch.Tensor:
    """Look up rows. A lookup's options concern only its gradient, and a frozen table has none. When sizes are measured,
    the table is a plain tensor."""
    return table.rows(indices) if isinstance(table, StoredWeight) else F.embedding(indices, table)


def _opened(
    compute: Callable[..., Any], args: tuple[Any, ...], options: dict[str, Any], dtype: torch.dtype, *, again: bool
) -> Any:
    weights: dict[int, StoredWeight] = {}
    """Address of the unpacked storage -> packed weight."""

    def opened(value: Any) -> Any:
        match value:
            case StoredWeight():
                made = value.open(dtype)
                weights[made.untyped_storage().data_ptr()] = value
                return made
            case list():
                return [opened(item) for item in value]
            case _:
                return value

    args = tuple(map(opened, args))
    options = {name: opened(value) for name, value in options.items()}
    if not weights or again or not torch.is_grad_enabled():
        return compute(*args, **options)

    def pack(saved: torch.Tensor) -> Callable[[], torch.Tensor]:
        weight = weights.get(saved.untyped_storage().data_ptr())
        if weight is None:
            kept = saved.detach()
            return lambda: kept
        size, stride, offset = saved.size(), saved.stride(), saved.storage_offset()
        return lambda: weight.open(dtype).as_strided(size, stride, offset)

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda made: made()):
        return compute(*args, **options)
