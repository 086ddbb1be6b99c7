"""Weights of a serving stage: under import, and as products, lookups and other operators read them.

Weights are imported one at a time, in the dtypes of the model's files, packed for products, and kept once. With the
format `packed`, matrices of quantised files stay as they lie there, if a product can read their levels (`ir.levels`).
Neighbours: `packed_linear` packs, `packed_siblings` says which matrices are stacked, `serving` uses the weights.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from math import prod

import torch
from torch import Tensor

from fusionai.backends.torch import packed_graph
from fusionai.backends.torch.host import DTYPES, to_torch
from fusionai.backends.torch.packed_linear import (
    PackedLinear,
    block_pages,
    by_parts,
    fill_levels,
    for_levels,
    merged,
    pack,
    packed_bytes,
    together,
)
from fusionai.backends.torch.packed_siblings import Joined
from fusionai.ir.levels import Array, LevelLayout, Levels, level_layout, levels_of, numbers_of
from fusionai.ir.packed import packed_bytes as file_bytes
from fusionai.ir.schema import Graph, ParamSpec
from fusionai.primitives.errors import ExecutionError
from fusionai.primitives.tensors import ITEMSIZE_BYTES, HostTensor, tensor_bytes
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
        self._incomplete: dict[str, dict[str, Tensor]] = {}
        self._packed_parts: dict[str, dict[str, PackedLinear]] = {}
        self.uses = packed_graph.products(graph)
        self._layouts = kept_layouts(self._given, joined, form) if in_blocks else {}
        """Parameters of `graph` that products multiply by as their files hold them."""
        self._table_layouts = kept_tables(graph, self._layouts, form) if in_blocks else {}
        self._tables: dict[str, PackedTable] = {}
        ways = {(use.weight, use.transposed) for use in self.uses.values()}
        stacks = [(matrices_of(graph.params[weight], turned), self._layouts.get(weight)) for weight, turned in ways]
        matrices = [(shape, layout) for (count, *shape), layout in stacks for _ in range(count)]
        self._pages = block_pages(matrices, form) if in_blocks else None
        self.tables = packed_graph.lookup_tables(graph)
        self._only_packed = packed_graph.only_packed(graph, self.uses)
        self._named: dict[str, list[str]] = {}
        for value, spec in self._given.items():
            self._named.setdefault(spec.key, []).append(value)
        self._plain: dict[str, Tensor] = {}
        self._packed: dict[str, dict[int, list[PackedLinear]]] = {}
        self._values: dict[str, Tensor | packed_graph.PackedParameter] | None = None

    def add(self, key: str, tensor: HostTensor) -> None:
        """Import one entry, whose shape and dtype were checked."""
        for name in self._named[key]:
            if name in self._stack_of:
                self._take_part(name, tensor)
            else:
                self._take(name, self._given[name], tensor)
        self._values = None

    def joined(self, keys: Iterable[str]) -> frozenset[str]:
        """Return the keys of all parts of the stacks that hold one of `keys`, and `keys`."""
        found = frozenset(keys)
        wholes = {self._stack_of[name] for key in found for name in self._named[key] if name in self._stack_of}
        whole = found | {self._given[part].key for stack in wholes for part in self._parts[stack]}
        return found if whole == found else self.joined(whole)

    def keep_packed(self, spec: ParamSpec, data: memoryview) -> bool:
        """Keep a weight in the packed bytes that came; False if its numbers are needed."""
        names = self._named[spec.key]
        wholes = [self._stack_of.get(name, name) for name in names]
        if not all(whole in self._layouts or whole in self._table_layouts for whole in wholes):
            return False
        for name, whole in zip(names, wholes, strict=True):
            if (layout := self._layouts.get(whole)) is not None:
                self._fill(name, whole, layout, spec, data)
            if (layout := self._table_layouts.get(name)) is not None:
                self._tables[name] = PackedTable.of(spec, layout, bytes(data))
        self._values = None
        return True

    def _fill(self, name: str, whole: str, layout: LevelLayout, spec: ParamSpec, data: memoryview) -> None:
        """Write a matrix, its part of a stack, or the matrices of experts into the memory of their products."""
        uses = [use for use in self.uses.values() if use.weight == whole]
        turned = uses[0].transposed
        if whole not in self._packed:
            count, *shape = matrices_of(self._graph.params[whole], turned)
            products = [for_levels(shape, layout, self._pages) for _ in range(count)]
            self._packed[whole] = {use.node: products for use in uses}
        before = itertools.takewhile(lambda part: part != name, self._parts.get(whole, ()))
        first = sum(self._given[part].shape[0] for part in before)
        _, rows, _ = matrices_of(self._given[name], turned)
        rows_of = levels_of(spec, layout, data, transposed=turned)
        for number, product in enumerate(next(iter(self._packed[whole].values()))):
            assert product.blocks is not None
            fill_levels(product.blocks, first, rows, lambda some, at=number * rows: rows_of(at + some), layout)

    def values(self, names: Iterable[str]) -> dict[str, Tensor | packed_graph.PackedParameter]:
        """Return the interpreter's parameters of these names; all weights must have been imported."""
        if self._values is None:
            self._values = {name: self._value(name) for name in self._graph.params}
        return {name: self._values[name] for name in names}

    @property
    def nbytes(self) -> int:
        products = [product for group in self._packed.values() for kept in group.values() for product in kept]
        products += [part for parts in self._packed_parts.values() for part in parts.values()]
        distinct = {id(product): product.nbytes for product in products}
        tensors = {
            tensor.untyped_storage().data_ptr(): tensor.untyped_storage().nbytes()
            for group in (self._plain, *self._incomplete.values())
            for tensor in group.values()
        }
        tables = sum(len(table.data) for table in self._tables.values())
        return sum(distinct.values()) + sum(tensors.values()) + tables

    def shares(self, value: object) -> bool:
        """Return whether a result shares a weight's memory."""
        if not isinstance(value, Tensor):
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
        uses = [use for use in self.uses.values() if use.weight == whole]
        if uses and by_parts(self._device):
            packed = self._packed_parts.setdefault(whole, {})
            packed[name] = pack(to_torch(tensor, self._device), None, self._form, name)
            if len(packed) == len(self._parts[whole]):
                del self._packed_parts[whole]
                product = merged([packed[part] for part in self._parts[whole]])
                self._packed[whole] = {use.node: [product] for use in uses}
            return
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

    def _pack(self, name: str, key: str, given: Callable[[], Tensor]) -> bool:
        """Pack the weight for each product that reads it; return whether any does."""
        uses = [use for use in self.uses.values() if use.weight == name]
        by_layout: dict[bool, list[PackedLinear]] = {}
        for use in uses:
            if use.transposed not in by_layout:
                plain = given()
                made = [
                    pack(
                        one.t().contiguous() if use.transposed else one,
                        None,
                        self._form,
                        key,
                        in_blocks=self._pages is not None,
                        pages=self._pages,
                    )
                    for one in (plain.unbind(0) if plain.dim() == 3 else [plain])
                ]
                by_layout[use.transposed] = together(made) if len(made) > 1 else made
            self._packed.setdefault(name, {})[use.node] = by_layout[use.transposed]
        return bool(uses)

    def _value(self, name: str) -> Tensor | packed_graph.PackedParameter:
        packed = self._packed.get(name)
        plain = self._plain.get(name)
        if packed is None and name not in self.tables:
            assert plain is not None
            return plain
        with_bias = {number: self._biased(kept, self.uses[number]) for number, kept in (packed or {}).items()}
        table = self._tables.get(name)
        return packed_graph.PackedParameter(plain, with_bias, None if table is None else table.rows)

    def _biased(self, kept: list[PackedLinear], use: packed_graph.ProductWeight) -> list[PackedLinear]:
        return kept if use.bias is None else [replace(product, bias=self._plain[use.bias]) for product in kept]


@dataclass(frozen=True, slots=True)
class PackedTable:
    """A table of a quantised file, of which rows are looked up. `data`: the bytes as they came. `rows_of` reads rows
    from them."""

    spec: ParamSpec
    layout: LevelLayout
    data: bytes
    rows_of: Callable[[Array], Levels]

    @classmethod
    def of(cls, spec: ParamSpec, layout: LevelLayout, data: bytes) -> PackedTable:
        """Raises `GraphError` for bytes that contradict the packing: all of them are read once."""
        return cls(spec, layout, data, levels_of(spec, layout, memoryview(data)))

    def rows(self, indices: Tensor) -> Tensor:
        """Return rows in float32, [*indices.shape, columns]. Raises `ExecutionError` for a row that is not there."""
        count, columns = self.spec.shape
        chosen = indices.reshape(-1).numpy()
        if chosen.size and not 0 <= int(chosen.min()) <= int(chosen.max()) < count:
            raise ExecutionError(f"{self.spec.key} has {count} rows, row {int(chosen.max())} was looked up.")
        if not chosen.size:
            return torch.zeros((*indices.shape, columns))
        made = numbers_of(self.rows_of(chosen), self.layout)
        return torch.from_numpy(made).reshape(*indices.shape, columns)


def kept_layouts(given: Mapping[str, ParamSpec], joined: Joined, form: WeightFormat) -> dict[str, LevelLayout]:
    """Return the layouts of the parameters of the joined graph that products multiply by as their files hold them.
    `given`: parameters of the graph that was joined."""
    if form != "packed":
        return {}
    found: dict[str, LevelLayout] = {}
    uses = packed_graph.products(joined.graph)
    readable = packed_graph.only_packed(joined.graph, uses) | packed_graph.lookup_tables(joined.graph)
    for name in {use.weight for use in uses.values()} & readable:
        ways = {use.transposed for use in uses.values() if use.weight == name}
        turned = ways.pop()
        if ways or (turned and len(joined.graph.params[name].shape) == 2):
            continue
        layouts = {level_layout(given[part], transposed=turned) for part in joined.parts.get(name, (name,))}
        layout = layouts.pop()
        if layout is not None and not layouts:
            found[name] = layout
    return found


def matrices_of(spec: ParamSpec, transposed: bool) -> tuple[int, int, int]:
    """Return how many matrices a product's weight has, and the shape [out, in] of each."""
    *count, rows, columns = spec.shape
    return (prod(count), columns, rows) if transposed else (prod(count), rows, columns)


def kept_tables(graph: Graph, kept: Mapping[str, LevelLayout], form: WeightFormat) -> dict[str, LevelLayout]:
    """Return the layouts of the parameters whose rows are looked up as their files hold them. `kept`: those that
    products read so."""
    if form != "packed":
        return {}
    multiplied = {use.weight for use in packed_graph.products(graph).values()}
    layouts = {
        name: level_layout(graph.params[name])
        for name in packed_graph.lookup_tables(graph)
        if name in kept or name not in multiplied
    }
    return {name: layout for name, layout in layouts.items() if layout is not None}


def weight_bytes(graph: Graph, form: WeightFormat, *, in_blocks: bool = False) -> int:
    """Return the bytes of all parameters as they are kept: packed for products, plain for other readers."""
    layouts = kept_layouts(graph.params, Joined(graph, {}), form) if in_blocks else {}
    tables = kept_tables(graph, layouts, form) if in_blocks else {}
    uses = packed_graph.products(graph)
    plainless = packed_graph.only_packed(graph, uses)
    total_bytes = 0
    for name, spec in graph.params.items():
        orientations = {use.transposed for use in uses.values() if use.weight == name}
        for transposed in orientations:
            count, rows, columns = matrices_of(spec, transposed)
            total_bytes += count * packed_bytes(rows, columns, form, in_blocks=in_blocks, layout=layouts.get(name))
        if name in tables:
            total_bytes += file_bytes(spec.packed)
        elif not orientations or name not in plainless:
            total_bytes += tensor_bytes(spec.dtype, spec.shape)
    return total_bytes


def import_bytes(
    graph: Graph, joined: Joined, form: WeightFormat, *, in_blocks: bool = False, in_parts: bool = False
) -> int:
    """Return the bytes of the largest tensor, which exists unpacked while it is packed; a stacked one exists together
    with its parts, unless they are packed one by one (`in_parts`), and then packed. What is kept as its file holds it
    is read in small pieces."""
    layouts = kept_layouts(graph.params, joined, form) if in_blocks else {}
    kept = {part for whole in layouts for part in joined.parts.get(whole, (whole,))}
    kept |= kept_tables(joined.graph, layouts, form).keys() if in_blocks else set()
    alone = max((prod(spec.shape) * 4 for name, spec in graph.params.items() if name not in kept), default=0)
    stacks = [joined.graph.params[name].shape for name in joined.parts if name not in layouts]
    matrices = [(rows, columns) for rows, *rest in stacks for columns in rest]
    stacked = [packed_bytes(*shape, form) for shape in matrices] if in_parts else [8 * prod(shape) for shape in stacks]
    return max(alone, *stacked, 0)
