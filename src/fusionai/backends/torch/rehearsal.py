"""Runs one microbatch of a stage forward and backward without memory, and counts what it would take.

Operators run on torch's `meta` device, where tensors have shapes and no memory, and autograd runs their gradients, so
everything is counted that lives at the peak: saved tensors, gradients on their way, copies of weights in bfloat16,
weights that are unpacked. Autocast knows no such device, so products get their operands in bfloat16 here.

Left to `compiled_stage`: state, microbatches in flight, updates, and the check of every value against the graph.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any, Final

import torch
from torch import Tensor

from fusionai.backends.torch.host import DTYPES
from fusionai.backends.torch.interpreter import Interpreter, StoredWeight
from fusionai.backends.torch.live_memory import counted_memory
from fusionai.backends.torch.operators import TorchContext
from fusionai.backends.torch.recomputation import run_in_segments, segments
from fusionai.ir.schema import Graph
from fusionai.ir.weights import stored_bytes

META: Final = torch.device("meta")
"""Torch's device for tensors without memory."""
NO_GRADIENT: Final = frozenset({"fusion.linear_attention"})
"""Operators whose gradient is not run without memory."""


@dataclass
class HalfProducts:
    """Gives products their operands in bfloat16, as autocast does: each weight is converted once in a microbatch."""

    _copies: dict[int, Tensor] = field(default_factory=dict[int, Tensor])

    def of(self, compute: Callable[..., Any]) -> Callable[..., Any]:
        def halved(*args: Any, **options: Any) -> Any:
            named = {name: self._half(value) for name, value in options.items()}
            return compute(*map(self._half, args), **named)

        return halved

    @contextmanager
    def once(self) -> Generator[None]:
        """Keep the copies until the block ends, as autocast does."""
        try:
            yield
        finally:
            self._copies.clear()

    def _half(self, value: Any) -> Any:
        if not isinstance(value, Tensor) or value.dtype != torch.float32:
            return value
        if not (value.is_leaf and value.requires_grad):
            return value.to(torch.bfloat16)
        if id(value) not in self._copies:
            self._copies[id(value)] = value.to(torch.bfloat16)
        return self._copies[id(value)]


@dataclass(frozen=True, slots=True)
class Rehearsed:
    """Bytes of one microbatch besides parameters and their gradients: the most in its forward and backward passes, and
    what is kept between the two."""

    peak_bytes: int
    kept_bytes: int


def rehearsed(
    graph: Graph,
    interpreter: Interpreter,
    shapes: Mapping[str, tuple[int, ...]],
    context: TorchContext,
    *,
    grad_inputs: frozenset[str],
    recompute: bool,
    halves: HalfProducts | None,
) -> Rehearsed:
    """Run a microbatch in training without memory. `interpreter` must be compiled for `META`. Raises what operators
    raise that have no gradient on this device."""
    with counted_memory(META) as count:
        # Made here, because the count takes a view of an unknown tensor for a new one.
        by_key = {graph.params[name].key: _parameter(graph, name) for name in interpreter.params}
        params = {name: by_key[graph.params[name].key] for name in interpreter.params}
        held_bytes = count.now_bytes
        inputs: dict[str, Any] = {}
        for name, shape in shapes.items():
            dtype = graph.values[name].dtype
            if name not in interpreter.inputs:
                continue
            if dtype == "symint":
                inputs[name] = 1
                continue
            made = torch.empty(shape, dtype=DTYPES[dtype], device=META, requires_grad=name in grad_inputs)
            inputs[name] = made.view_as(made)
        precision = nullcontext if halves is None else halves.once
        with torch.enable_grad(), precision():
            if recompute:
                outputs, _ = run_in_segments(interpreter, segments(interpreter), context, inputs, params, precision)
            else:
                outputs, _ = interpreter.run(context, inputs, params)
        kept_bytes = count.now_bytes - held_bytes
        started = {"loss": outputs["loss"]} if "loss" in outputs else outputs
        roots = [value for value in started.values() if isinstance(value, Tensor) and value.requires_grad]
        if roots:
            torch.autograd.backward(roots, [torch.empty_like(root) for root in roots])
    return Rehearsed(count.peak_bytes - held_bytes, kept_bytes)


def _parameter(graph: Graph, name: str) -> Tensor | StoredWeight:
    """Return a parameter, which is counted elsewhere."""
    spec = graph.params[name]
    if spec.stored:
        packed = torch.empty(stored_bytes(spec.shape, spec.stored), dtype=torch.uint8, device=META)
        return StoredWeight(packed, spec)
    made = torch.empty(spec.shape, dtype=DTYPES[spec.dtype], device=META, requires_grad=spec.trainable)
    if spec.trainable:
        made.register_post_accumulate_grad_hook(_sum)
    return made


def _sum(parameter: Tensor) -> None:
    """Drop a gradient that was added to the sum, which is counted elsewhere."""
    parameter.grad = None
