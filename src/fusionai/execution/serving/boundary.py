"""The values that travel along a serving pipeline, stage by stage, derived once from the partition.

A pass goes from each stage to the next, so a value that only a later stage needs travels through the stages between.
Every value has one row per position: [1, positions, ...].

`serving.deployment` makes boundaries and sends them in `Load`; `execution.serving.stage` follows them.
"""

from __future__ import annotations

from math import prod
from typing import Final

import msgspec

from fusionai.ir.partition import FEED, Partition
from fusionai.ir.schema import Graph
from fusionai.ir.serving import FROM_SEGMENTS
from fusionai.ir.shapes import bounds
from fusionai.primitives.errors import GraphError
from fusionai.primitives.tensors import ITEMSIZE_BYTES, HostTensor

LARGEST_ROW: Final = 2**24
"""Largest number of elements accepted in one row of a received boundary (chosen)."""


class RowSpec(msgspec.Struct, frozen=True, forbid_unknown_fields=True, array_like=True):
    """A value that travels, of shape [1, positions, *row]."""

    name: str
    dtype: str
    row: tuple[int, ...] = ()

    @property
    def row_bytes(self) -> int:
        return ITEMSIZE_BYTES[self.dtype] * prod(self.row)

    def check(self, tensor: HostTensor, rows: int) -> str | None:
        """Return what is wrong with `tensor` as `rows` rows of this value; None if nothing is."""
        if tensor.dtype == self.dtype and tensor.shape == (1, rows, *self.row):
            return None
        shape = [1, rows, *self.row]
        return f"expected {self.name} as {self.dtype}{shape}, got {tensor.dtype}{list(tensor.shape)}"


class ServingBoundary(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """`receives`: values from the previous stage (the first stage receives from the driver). `sends`: values for the
    next stage, computed here or passed on. `outputs`: outputs the driver may ask for, e.g. `logits`."""

    stage: int
    receives: tuple[RowSpec, ...]
    sends: tuple[RowSpec, ...]
    outputs: tuple[str, ...] = ()

    def made(self, graph: Graph) -> tuple[str, ...]:
        """Return the values of `sends` that this stage computes itself."""
        return tuple(spec.name for spec in self.sends if spec.name in graph.outputs)

    def check(self, graph: Graph) -> None:
        """Raise `GraphError` if this boundary does not fit `graph`. It may come from the network and name anything."""
        place = f"the boundary of stage {self.stage}"
        received, sent = [spec.name for spec in self.receives], [spec.name for spec in self.sends]
        if len({*received}) != len(received) or len({*sent}) != len(sent):
            raise GraphError(f"{place} names a value twice.")
        for spec in (*self.receives, *self.sends):
            if spec.dtype not in ITEMSIZE_BYTES or any(size < 0 for size in spec.row) or prod(spec.row) > LARGEST_ROW:
                raise GraphError(
                    f"{place} has {spec.name} with an invalid row of {spec.dtype}{list(spec.row)} per position."
                )
        for what, named, known in (
            ("inputs of the stage", {*graph.inputs} - FROM_SEGMENTS, {*received}),
            ("values to send", {*sent}, {*graph.outputs, *received}),
            ("outputs", {*self.outputs}, {*graph.outputs}),
        ):
            if unknown := named - known:
                some = ", ".join(sorted(unknown)[:5])
                raise GraphError(f"{place} does not match the graph's {what}: {some}.")


def serving_boundaries(partition: Partition) -> tuple[ServingBoundary, ...]:
    """Return one boundary per stage, in order. Raises `GraphError` for a value that has no row per position."""
    count = len(partition.stages)
    crossing: list[dict[str, RowSpec]] = [{} for _ in range(count + 1)]
    """Values that enter stage i."""
    for route in partition.routes:
        if route.value in FROM_SEGMENTS:
            continue
        graph = partition.stages[route.consumers[0]].graph
        spec = _row_spec(graph, route.value)
        first = 0 if route.producer == FEED else route.producer + 1
        for stage in range(first, max(route.consumers) + 1):
            crossing[stage][route.value] = spec
    sent = {route.value for route in partition.routes}
    return tuple(
        ServingBoundary(
            stage=stage.stage,
            receives=_ordered(crossing[stage.stage]),
            sends=_ordered(crossing[stage.stage + 1]),
            outputs=tuple(
                sorted(
                    meaning for meaning, value in stage.graph.outputs.items() if meaning != value or value not in sent
                )
            ),
        )
        for stage in partition.stages
    )


def _ordered(specs: dict[str, RowSpec]) -> tuple[RowSpec, ...]:
    return tuple(specs[name] for name in sorted(specs))


def _row_spec(graph: Graph, value: str) -> RowSpec:
    """Return the value's row; its sizes must not depend on batch and positions."""
    spec = graph.values[value]
    if len(spec.shape) >= 2 and isinstance(spec.shape[1], str):
        sizes = [bounds(size, graph.symbols) for size in spec.shape[2:]]
        if all(smallest == largest for smallest, largest in sizes):
            return RowSpec(value, spec.dtype, tuple(largest for _, largest in sizes))
    raise GraphError(
        f"value {value} of shape {list(spec.shape)} crosses between stages but has no row per position.",
        hint="Cut this model at other places, or serve it on one machine.",
    )
