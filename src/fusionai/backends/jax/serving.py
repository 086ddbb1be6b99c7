"""One serving stage on JAX: weights in the job's format, parts compiled for each number of rows.

Neighbours: `serving.parted` cuts the graph and has caches and attention, `tracing` runs nodes.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

import jax
import jax.numpy as jnp
import numpy as np

from fusionai.backends.binding import with_rows
from fusionai.backends.jax.dtypes import DTYPES, Device, is_floating, to_jax
from fusionai.backends.jax.operators import JaxContext
from fusionai.backends.jax.tracing import Value, abstract, footprint_bytes, program_of
from fusionai.backends.serving.base import largest_pass
from fusionai.backends.serving.parted import Array, Compute, PartedServing, ProgramPart
from fusionai.ir.schema import Graph, ParamSpec
from fusionai.ir.serving import BATCH
from fusionai.primitives.errors import ExecutionError
from fusionai.primitives.tensors import HostTensor
from fusionai.wire.serving import ServeOptions, WeightFormat

KEPT_AS: Final[dict[WeightFormat, Any]] = {"fp32": jnp.float32, "bf16": jnp.bfloat16, "fp16": jnp.float16}
"""Supported weight formats -> JAX dtypes."""
_CONTEXT: Final = JaxContext(training=False, keys={})


class JaxServingProgram(PartedServing):
    """Implements `backends.interface.ServingProgram`."""

    def __init__(self, graph: Graph, *, options: ServeOptions, device: Device, memory_limit_bytes: int | None) -> None:
        super().__init__(graph, options)
        if options.weights not in KEPT_AS:
            raise ExecutionError(
                f"this backend keeps weights as {', '.join(KEPT_AS)}, not as {options.weights}.",
                hint="Use one of those formats, or let machines with backend torch serve the model.",
            )
        self._device = device
        self._whole = program_of(graph, graph.outputs, with_state_writes=False, mixed=False, recompute=False)
        self._check_memory(memory_limit_bytes)
        self._tensors: dict[str, jax.Array] = {}
        """Weights by key, in the format they are kept in."""
        self._sizes: dict[int, dict[str, int]] = {}

    def _import_weight(self, spec: ParamSpec, tensor: HostTensor) -> None:
        self._tensors[spec.key] = self._kept(spec.key, to_jax(tensor, self._device).astype(DTYPES[spec.dtype]))

    @property
    def resident_bytes(self) -> int:
        return self._cache_bytes + sum(tensor.nbytes for tensor in self._tensors.values())

    def _weight(self, key: str) -> Array:
        return np.asarray(self._tensors[key])

    def _compiled(self, part: ProgramPart, rows: int) -> Compute:
        sizes = self._sizes_at(rows)
        dtypes = {name: DTYPES[self._graph.params[name].dtype] for name in part.params}
        params = {name: self._tensors[self._graph.params[name].key] for name in part.params}

        @jax.jit
        def compute(params: dict[str, jax.Array], given: dict[str, Array]) -> dict[str, jax.Array]:
            widened = {name: value.astype(dtypes[name]) for name, value in params.items()}
            values: dict[str, Value] = {
                **sizes,
                **{name: jnp.asarray(value) for name, value in given.items()},
                **widened,
            }
            self._whole.advance(_CONTEXT, part.nodes, values)
            return {name: jnp.asarray(values[name]) for name in part.makes}

        def run(given: Mapping[str, Array]) -> dict[str, Array]:
            placed = {name: jax.device_put(value, self._device) for name, value in given.items()}
            return {name: np.asarray(value) for name, value in compute(params, placed).items()}

        return run

    def _sizes_at(self, rows: int) -> dict[str, int]:
        """Return every size that the graph computes for this number of rows."""
        if rows not in self._sizes:
            given = abstract(
                self._graph, (*self._whole.inputs, *self._whole.params), {**with_rows(self._graph, rows), BATCH: 1}
            )
            found: dict[str, int] = {}

            def run(values: dict[str, jax.Array]) -> None:
                known: dict[str, Value] = dict(values)
                self._whole.advance(_CONTEXT, self._whole.nodes, known)
                found.update({name: value for name, value in known.items() if isinstance(value, int)})

            jax.eval_shape(run, given)
            self._sizes[rows] = found
        return self._sizes[rows]

    def _kept(self, key: str, value: jax.Array) -> jax.Array:
        """Return a weight in the format it is kept in: matrices in the job's format, everything else in the graph's
        dtype."""
        narrow = KEPT_AS[self._options.weights]
        if value.ndim < 2 or not is_floating(value.dtype) or narrow == jnp.float32:
            return value
        kept = value.astype(narrow)
        if not bool(jnp.isfinite(kept).all()) and bool(jnp.isfinite(value).all()):
            most = float(jnp.abs(value).max())
            raise ExecutionError(f"{key} holds {most:g}, out of range for {self._options.weights}.")
        return kept

    def _check_memory(self, limit_bytes: int | None) -> None:
        """Check the limit: weights as kept, caches, and inputs and outputs of the largest pass."""
        width = jnp.dtype(KEPT_AS[self._options.weights]).itemsize
        weights_bytes = 0
        for spec in self._specs.values():
            dtype = jnp.dtype(DTYPES[spec.dtype])
            narrow = len(spec.shape) > 1 and is_floating(dtype)
            weights_bytes += int(np.prod(spec.shape)) * (min(width, dtype.itemsize) if narrow else dtype.itemsize)
        cache_bytes = sum(shape.nbytes(self._options) for shape in self._layers)
        if limit_bytes is not None and weights_bytes + cache_bytes > limit_bytes:
            raise ExecutionError(
                f"the stage takes {weights_bytes} bytes of weights as {self._options.weights} and {cache_bytes} of "
                f"caches; the limit is {limit_bytes}.",
                hint="Use fewer pages or sessions, a smaller weight format or fewer blocks here, or lend more memory.",
            )
        symbols = largest_pass(self._graph, self._options)
        pass_bytes = footprint_bytes(self._graph, self._whole, symbols, (), training=False)
        if limit_bytes is not None and weights_bytes + cache_bytes + pass_bytes > limit_bytes:
            raise ExecutionError(
                f"the stage needs {weights_bytes + cache_bytes + pass_bytes} bytes with the largest pass, the limit is "
                f"{limit_bytes}.",
                hint="Make passes smaller, give this peer fewer blocks or lend more memory.",
            )
