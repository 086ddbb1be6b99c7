"""Weights of a serving stage: imported one at a time, packed for products, kept once.

The bytes come in the dtypes of the model's files; only what a kernel reads is kept. Neighbours: `packed_graph` says how
each parameter is read, `packed_linear` packs, `serving` runs with `values`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace

import torch

from fusionai.backends.torch.host import DTYPES, to_torch
from fusionai.backends.torch.packed_graph import PackedParameter, ProductWeight, lookup_tables, only_packed, products
from fusionai.backends.torch.packed_linear import PackedLinear, block_pages, pack
from fusionai.backends.torch.packed_siblings import Joined
from fusionai.ir.schema import Graph, ParamSpec
from fusionai.primitives.tensors import ITEMSIZE_BYTES, HostTensor
from fusionai.wire.serving import WeightFormat


class ServingWeights:
    """Weights under import and in use. `graph`: the served graph. `joined`: the graph that runs, whose parameters may
    stack several of the served graph's. `uses`: products by node id. `tables`: parameters that lookups read, kept in
    their file's narrower dtype. `in_blocks`: matrices are stored in blocks, as row programs read them."""

    def __init__(
        self, graph: Graph, joined: Joined, form: WeightFormat, device: torch.device, *, in_blocks: bool = False
    ) -> None:
        self._given = graph.params
        self._graph = graph = joined.graph
        self._form: WeightFormat = form
        self._device = device
        self._parts = joined.parts
        self._stack_of = {part: whole for whole, parts in joined.parts.items() for part in parts}
        self._incomplete: dict[str, dict[str, torch.Tensor]] = {}
        self.uses = products(graph)
        layouts = {(use.weight, use.transposed) for use in self.uses.values()}
        shapes = [graph.params[weight].shape[:: -1 if turned else 1] for weight, turned in layouts]
        self._pages = block_pages(shapes, form) if in_blocks else None
        self.tables = lookup_tables(graph)
        self._only_packed = only_packed(graph, self.uses)
        self._named: dict[str, list[str]] = {}
        for value, spec in self._given.items():
            self._named.setdefault(spec.key, []).append(value)
        self._plain: dict[str, torch.Tensor] = {}
        self._packed: dict[str, dict[int, PackedLinear]] = {}
        self._values: dict[str, torch.Tensor | PackedParameter] | None = None

    def add(self, key: str, tensor: HostTensor) -> None:
        """Import one entry, whose shape and dtype were checked."""
        for name in self._named[key]:
            if name in self._stack_of:
                self._take_part(name, tensor)
            else:
                self._take(name, self._given[name], tensor)
        self._values = None

    def values(self, names: Iterable[str]) -> dict[str, torch.Tensor | PackedParameter]:
        """Return the interpreter's parameters of these names; all weights must have been imported."""
        if self._values is None:
            self._values = {name: self._value(name) for name in self._graph.params}
        return {name: self._values[name] for name in names}

    @property
    def nbytes(self) -> int:
        distinct = {id(product): product.nbytes for group in self._packed.values() for product in group.values()}
        tensors = {
            tensor.untyped_storage().data_ptr(): tensor.untyped_storage().nbytes()
            for group in (self._plain, *self._incomplete.values())
            for tensor in group.values()
        }
        return sum(distinct.values()) + sum(tensors.values())

    def shares(self, value: object) -> bool:
        """Return whether a result shares a weight's memory."""
        if not isinstance(value, torch.Tensor):
            return False
        address = value.untyped_storage().data_ptr()
        return any(tensor.untyped_storage().data_ptr() == address for tensor in self._plain.values())

    def _take(self, name: str, spec: ParamSpec, tensor: HostTensor) -> None:
        if self._pack(name, spec.key, lambda: to_torch(tensor, self._device)) and name in self._only_packed:
            return
        own = to_torch(tensor, self._device, own=True)
        narrow = name in self.tables and ITEMSIZE_BYTES[tensor.dtype] <= ITEMSIZE_BYTES[spec.dtype]
        self._plain[name] = own if narrow else own.to(DTYPES[spec.dtype])

    def _take_part(self, name: str, tensor: HostTensor) -> None:
        """Keep a part until all parts of its stack are here, then stack and pack them."""
        whole = self._stack_of[name]
        here = self._incomplete.setdefault(whole, {})
        here[name] = to_torch(tensor, self._device, own=True)
        if len(here) < len(self._parts[whole]):
            return
        del self._incomplete[whole]
        dtype = DTYPES[self._graph.params[whole].dtype]
        stacked = torch.cat([here[part].to(dtype) for part in self._parts[whole]])
        here.clear()
        if not self._pack(whole, whole, lambda: stacked):
            self._plain[whole] = stacked

    def _pack(self, name: str, key: str, given: Callable[[], torch.Tensor]) -> bool:
        """Pack the weight for each product that reads it; return whether any does."""
        uses = [use for use in self.uses.values() if use.weight == name]
        by_layout: dict[bool, PackedLinear] = {}
        for use in uses:
            if use.transposed not in by_layout:
                plain = given()
                by_layout[use.transposed] = pack(
                    plain.t().contiguous() if use.transposed else plain,
                    None,
                    self._form,
                    key,
                    in_blocks=self._pages is not None,
                    pages=self._pages,
                )
            self._packed.setdefault(name, {})[use.node] = by_layout[use.transposed]
        return bool(uses)

    def _value(self, name: str) -> torch.Tensor | PackedParameter:
        packed = self._packed.get(name)
        plain = self._plain.get(name)
        if packed is None and name not in self.tables:
            assert plain is not None
            return plain
        with_bias = {number: self._biased(product, self.uses[number]) for number, product in (packed or {}).items()}
        return PackedParameter(plain, with_bias)

    def _biased(self, product: PackedLinear, use: ProductWeight) -> PackedLinear:
        if use.bias is None:
            return product
        return replace(product, bias=self._plain[use.bias])
