"""Runs a stage for a few rows in one compiled call: fills in addresses, owns the memory, runs passes.

Available only with a single CPU thread and with numba: with several threads, operators multiply faster. Neighbours:
`row_plan` writes the instructions, `row_kernels` runs them, `serving` chooses the rows.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from fusionai.backends.torch.blocked_linear import kernel_module, kernels
from fusionai.backends.torch.packed_graph import PackedParameter, ProductWeight
from fusionai.backends.torch.paged_attention import LayerCache
from fusionai.backends.torch.row_blocks import WIDTH, Blocks
from fusionai.backends.torch.row_code import Field, Form, Op, Unplanned
from fusionai.backends.torch.row_plan import RowPlan, plan_rows
from fusionai.ir.schema import Graph
from fusionai.wire.serving import ServeOptions

log = logging.getLogger(__name__)

BATCH_ROWS: Final = 16
"""Rows computed at once; chosen so that their values stay in the processor's cache."""
_FIRST_SCORES: Final = 256
"""Positions for which score memory is allocated at first, per query of a key head; it grows when needed."""
_CACHES: Final = {"fp32": Form.FP32, "bf16": Form.BF16, "fp16": Form.FP16, "int8": Form.INT8}

Array = npt.NDArray[Any]


@dataclass(frozen=True, slots=True)
class RowPlace:
    """What a row refers to in the caches: its position, the pages of its session, its ring (-1: none)."""

    position: int
    pages: tuple[int, ...]
    ring: int


def planned(
    graph: Graph, wanted: Sequence[str], uses: Mapping[int, ProductWeight], device: torch.device
) -> RowPlan | None:
    """Return the plan that computes the outputs `wanted`, or None if operators must. Compiles the kernel, so that no
    pass waits for it."""
    if device.type != "cpu" or torch.get_num_threads() != 1 or not uses or kernels() is None:
        return None
    try:
        plan = plan_rows(graph, wanted, uses)
    except Unplanned as reason:
        log.debug("stage of %s runs operator by operator: %s", graph.name, reason)
        return None
    return plan if _kernel() is not None else None


def needed_bytes(plan: RowPlan, options: ServeOptions) -> int:
    """Return the most bytes that a program of this plan needs besides weights and caches."""
    positions = options.pages * options.page_tokens
    floats = plan.fixed + BATCH_ROWS * plan.width + 2 * plan.groups * (1 + positions) + _scratch_floats(plan)
    experts = sum(int(line[Field.EXTRA + 2]) for line in plan.code if line[0] == Op.EXPERTS)
    return 4 * (floats + plan.groups * _FIRST_SCORES) + 8 * experts


class RowProgram:
    """A plan with its memory and addresses. `values`: returns parameters as the interpreter takes them; all must be
    loaded. `caches`: node id of an attention -> its cache."""

    def __init__(
        self,
        plan: RowPlan,
        uses: Mapping[int, ProductWeight],
        values: Callable[[Sequence[str]], Mapping[str, Tensor | PackedParameter]],
        caches: Mapping[int, LayerCache],
        options: ServeOptions,
    ) -> None:
        run, products = _kernel(), kernels()
        assert run is not None
        assert products is not None
        self._run = run
        self._plan = plan
        self._page_tokens = options.page_tokens
        self._form = int(_CACHES[options.cache])
        self._code = plan.code.copy()
        # A vector that starts on a cache-line boundary is read in one access.
        self._memory = _aligned(plan.fixed + BATCH_ROWS * plan.width)
        self._rows = self._memory[plan.fixed :].reshape(BATCH_ROWS, plan.width)
        self._scores = _aligned(plan.groups * _FIRST_SCORES)
        self._scratch = _aligned(_scratch_floats(plan))
        # Asking an array for its address takes longer than preparing any other argument of a pass.
        self._memory_at, self._scores_at, self._scratch_at = (
            array.ctypes.data for array in (self._memory, self._scores, self._scratch)
        )
        self._floats = {meaning: prod(shape) for meaning, (_, shape) in plan.outputs.items()}
        self._caches = np.zeros((max(1, len(plan.attentions)), 4), dtype=np.int64)
        for number, node in enumerate(plan.attentions):
            cache_ = caches[node]
            self._caches[number] = (*cache_.addresses, cache_.window or 0, cache_.capacity)
        self._held: list[Blocks] = []
        matrices: list[int] = []
        for line, node in plan.products.items():
            weight = uses[node].weight
            held = values([weight])[weight]
            assert isinstance(held, PackedParameter)
            all_blocks = [product.blocks for product in held.packed[node] if product.blocks is not None]
            addresses = [blocks.data.data_ptr() for blocks in all_blocks]
            (factor,) = {products.factor_of(blocks) for blocks in all_blocks}
            self._held += all_blocks
            self._code[line, Field.EXTRA] = int(factor)
            self._code[line, Field.EXTRA + 3] = products.products(factor).few
            if plan.code[line, 0] == Op.EXPERTS:
                assert len(addresses) == plan.code[line, Field.EXTRA + 2]
                self._code[line, Field.EXTRA + 1] = len(matrices)
                matrices += addresses
            else:
                (self._code[line, Field.EXTRA + 1],) = addresses
        self._matrices = np.array(matrices, dtype=np.int64)
        for place, what in plan.constants.items():
            if isinstance(what, str):
                held = values([what])[what]
                plain = held.plain if isinstance(held, PackedParameter) else held
                assert plain is not None
                self._memory[place : place + plain.numel()] = plain.detach().to(torch.float32).reshape(-1).numpy()
            else:
                self._memory[place] = what

    def run(self, inputs: Mapping[str, Array], places: Sequence[RowPlace]) -> dict[str, Array]:
        """Return outputs [1, rows, ...] by meaning, for inputs [1, rows, ...]. The `places` of a session must
        ascend."""
        count = len(places)
        plan = self._plan
        results = {
            meaning: np.empty((1, count, *shape), dtype=np.float32) for meaning, (_, shape) in plan.outputs.items()
        }
        for begin in range(0, count, BATCH_ROWS):
            rows = slice(begin, min(count, begin + BATCH_ROWS))
            some = places[rows]
            own = self._rows[: len(some)]
            for name, (place, floats) in plan.inputs.items():
                own[:, place : place + floats] = inputs[name][0, rows].reshape(len(some), floats)
            self._compute(some)
            for meaning, (place, shape) in plan.outputs.items():
                made = own[:, place : place + self._floats[meaning]]
                results[meaning][0, rows] = made.reshape(len(some), *shape)
        return results

    @property
    def nbytes(self) -> int:
        """Bytes besides weights and caches."""
        return sum(one.nbytes for one in (self._memory, self._scores, self._scratch, self._matrices))

    def _compute(self, places: Sequence[RowPlace]) -> None:
        pages = max(1, *(len(place.pages) for place in places))
        tables = np.zeros((len(places), pages), dtype=np.int64)
        for table, place in zip(tables, places, strict=True):
            table[: len(place.pages)] = place.pages
        needed = self._plan.groups * (1 + max(place.position for place in places))
        if self._plan.attentions and needed > self._scores.size:
            self._scores = _aligned(2 * needed)
            self._scores_at = self._scores.ctypes.data
        self._run(
            self._code,
            self._memory,
            self._memory_at,
            self._plan.fixed,
            self._plan.width,
            len(places),
            self._caches,
            self._form,
            np.array([place.position for place in places], dtype=np.int64),
            tables,
            np.array([place.ring for place in places], dtype=np.int64),
            self._page_tokens,
            self._scores,
            self._scores_at,
            self._scratch,
            self._scratch_at,
            self._matrices,
        )


def _kernel() -> Callable[..., None] | None:
    """Return the compiled kernel; None if operators compute decoding."""
    module = kernel_module("fusionai.backends.torch.row_kernels", "decoding")
    return None if module is None else module.run


def _scratch_floats(plan: RowPlan) -> int:
    """Return the floats that the operands of all rows take as bfloat16, two per float, or those of 16 operands of an
    expert with their results."""
    most = 0
    for line in plan.products:
        columns, count = (int(size) for size in plan.code[line, Field.DIMS : Field.DIMS + 2])
        experts = plan.code[line, 0] == Op.EXPERTS
        most = max(most, count + columns + -columns % WIDTH if experts else (count + 1) // 2)
    return BATCH_ROWS * most


def _aligned(floats: int) -> npt.NDArray[np.float32]:
    """Return zeros that start on a cache-line boundary."""
    whole = np.zeros(floats + 16, dtype=np.float32)
    ahead = -whole.ctypes.data % 64 // 4
    return whole[ahead : ahead + floats]
