"""Merges the products of one value into a single product, and the operators applied alike to each of their results.

With few rows, starting an operator costs more than running it, so a pass of one token gains from every operator saved.
Results do not change: only operators that move elements or compute each of them exactly are merged. Nodes that repeat
another node's computation are dropped too. Neighbours: `serving` runs the result, `serving` stacks the
matrices.
"""

from __future__ import annotations

import heapq
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import Final

import msgspec

from fusionai.backends.torch.packed_graph import ProductWeight, products
from fusionai.ir.graph import consumers, prune, reads, references, referring, rewired
from fusionai.ir.levels import LevelLayout, level_layout
from fusionai.ir.schema import Arg, Graph, ListArg, Node, ParamSpec, Ref, ValueSpec
from fusionai.ir.serving_cost import STACKED_BYTES

_ROWS: Final = 16
"""Results are cut at multiples of this many elements, because other cuts would change the memory alignment that a
separate product has."""
_POINTWISE: Final = frozenset({"aten.mul.Tensor", "aten.add.Tensor", "aten.sub.Tensor"})
"""Operators of two operands that may be merged: each element is computed exactly."""
_UNARY: Final = frozenset({"aten.neg.default", "aten._to_copy.default"})
"""Operators of one operand that may be merged."""


@dataclass(frozen=True, slots=True)
class Joined:
    """A graph with merged products. `parts`: parameter of `graph` -> the original's parameters that it stacks along the
    first dimension."""

    graph: Graph
    parts: Mapping[str, tuple[str, ...]]


def join_siblings(graph: Graph, *, packed: bool = False, most_bytes: float = STACKED_BYTES) -> Joined:
    """Return a graph with the same outputs and fewer nodes; attention nodes keep their ids. The graph is not validated
    again. `packed`: matrices are kept as quantised files hold them, so only those with one layout are stacked.
    `most_bytes`: bytes up to which matrices are merged."""
    draft = _Draft(_without_repeats(graph))
    for group in _groups(draft.graph, packed=packed, most_bytes=most_bytes):
        draft.join_products(group)
    while draft.fresh:
        draft.follow(draft.fresh.pop())
    return Joined(draft.finished(), draft.parts)


@dataclass(frozen=True, slots=True)
class _Bundle:
    """Values stored consecutively along `dim` of the value `base`; `sizes` are their sizes along it."""

    base: str
    members: tuple[str, ...]
    dim: int
    sizes: tuple[int, ...]


class _Draft:
    """A graph under transformation."""

    def __init__(self, graph: Graph) -> None:
        self.graph = graph
        self.values = dict(graph.values)
        self.params = dict(graph.params)
        self.parts: dict[str, tuple[str, ...]] = {}
        self.nodes = {node.id: node for node in graph.nodes}
        self.rank = {node.id: number for number, node in enumerate(graph.nodes)}
        self.readers = consumers(graph)
        self.bundles: list[_Bundle] = []
        self.place: dict[str, tuple[int, int]] = {}
        """Member -> (its bundle, its index there)."""
        self.fresh: list[int] = []
        self._views: dict[tuple[int, int, int], str] = {}
        self._next = 1 + max((node.id for node in graph.nodes), default=0)

    def join_products(self, uses: Sequence[ProductWeight]) -> None:
        nodes = [self.nodes[use.node] for use in uses]
        sizes = tuple(self.params[use.weight].shape[0] for use in uses)
        stacked = [self._stack([use.weight for use in uses])]
        if all(use.bias is not None for use in uses):
            stacked.append(self._stack([use.bias for use in uses if use.bias is not None]))
        args = (nodes[0].args[0], *(Ref(name) for name in stacked))
        self._replace(nodes, args, len(self.values[nodes[0].outputs[0]].shape) - 1, sizes)

    def follow(self, number: int) -> None:
        """Merge the nodes that treat neighbouring members of a bundle alike."""
        alike: dict[tuple[str, ...], dict[int, Node]] = {}
        for member in self.bundles[number].members:
            for node in self.readers.get(member, ()):
                if node.id in self.nodes and (key := self._key(node)) is not None:
                    alike.setdefault(key, {}).setdefault(self.place[member][1], node)
        for nodes in alike.values():
            for run in _runs(sorted(nodes)):
                self._merge([nodes[position] for position in run], run[0])

    def finished(self) -> Graph:
        """Return the graph, with slices of bundles for members that nodes still read on their own."""
        read = {value for node in self.nodes.values() for value in reads(node)} | set(self.graph.outputs.values())
        for number, bundle in enumerate(self.bundles):
            for position, member in enumerate(bundle.members):
                if member in read:
                    self._view(number, position, position + 1, member)
        whole = msgspec.structs.replace(self.graph, values=self.values, params=self.params, nodes=self._ordered())
        return prune(whole, list(self.graph.outputs))

    def _key(self, node: Node) -> tuple[str, ...] | None:
        """Return a key that is equal for nodes that may be merged; None if a node can't be merged."""
        places = {self.place.get(value) for arg in node.args for value in references(arg)} - {None}
        positions = {place[1] for place in places if place is not None}
        runs_along = {(bundle.dim, bundle.sizes) for bundle in self._bundles_of(node)}
        shape = self.values[node.outputs[0]].shape
        if len(positions) != 1 or len(runs_along) != 1 or len(node.outputs) != 1:
            return None
        dim = self._dim_after(node, next(iter(runs_along))[0])
        if dim is None or any(True for arg in node.kwargs.values() for _ in references(arg)):
            return None
        args = node.args
        if node.op == "aten.reshape.default":
            args = (args[0], self._sizes_with(node, 0))
        rest = (*shape[:dim], *shape[dim + 1 :])
        return (node.op, repr([self._faceless(arg) for arg in args]), repr(node.kwargs), repr(rest))

    def _faceless(self, arg: Arg) -> Arg:
        """Return `arg` with members replaced by the names of their bundles."""
        return referring(arg, lambda name: f"of {self.place[name][0]}" if name in self.place else name)

    def _bundles_of(self, node: Node) -> list[_Bundle]:
        names = [value for arg in node.args for value in references(arg) if value in self.place]
        return [self.bundles[self.place[name][0]] for name in names]

    def _dim_after(self, node: Node, dim: int) -> int | None:
        """Return the dimension along which the results of merged nodes follow each other; None if they don't."""
        source = next(value for arg in node.args for value in references(arg) if value in self.place)
        shape, result = self.values[source].shape, self.values[node.outputs[0]].shape
        rank = len(shape)
        match node.op:
            case op if op in _UNARY:
                return dim
            case op if op in _POINTWISE:
                others = [value for arg in node.args for value in references(arg) if value not in self.place]
                same = len(result) == rank and all(
                    len(self.values[name].shape) == rank for name in reads(node) if name in self.place
                )
                return dim if same and all(self._spreads(name, dim - rank) for name in others) else None
            case "aten.slice.Tensor":
                along = node.args[1] if len(node.args) > 1 else 0
                return dim if isinstance(along, int) and along % rank != dim else None
            case "aten.cat.default":
                along = node.args[1] if len(node.args) > 1 else 0
                every = all(value in self.place for value in reads(node))
                return dim if every and isinstance(along, int) and along % rank != dim else None
            case "aten.transpose.int":
                first, second = (arg % rank if isinstance(arg, int) else -1 for arg in node.args[1:3])
                return {first: second, second: first}.get(dim, dim)
            case "aten.reshape.default":
                heads = len(result) == rank + 1 and dim == rank - 1 and result[:dim] == shape[:dim]
                items = node.args[1].items if isinstance(node.args[1], ListArg) else ()
                fixed = all(isinstance(size, int) for size in (*result[dim:], shape[dim]))
                return dim if heads and fixed and len(items) == len(result) and -1 not in items[:dim] else None
            case _:
                return None

    def _spreads(self, name: str, from_end: int) -> bool:
        """Return whether an operand has the same value along a whole dimension."""
        shape = self.values[name].shape
        return len(shape) < -from_end or shape[from_end] == 1

    def _sizes_with(self, node: Node, heads: int) -> ListArg:
        """Return the sizes of a reshape that splits the last dimension into `heads` heads."""
        shape = self.values[node.outputs[0]].shape
        assert isinstance(node.args[1], ListArg)
        return ListArg((*node.args[1].items[: len(shape) - 2], heads, int(shape[-1])))

    def _merge(self, nodes: Sequence[Node], first: int) -> None:
        bundle = self._bundles_of(nodes[0])[0]
        dim = self._dim_after(nodes[0], bundle.dim)
        assert dim is not None
        sizes = tuple(int(self.values[node.outputs[0]].shape[dim]) for node in nodes)
        args = tuple(self._together(arg, first, first + len(nodes)) for arg in nodes[0].args)
        if nodes[0].op == "aten.reshape.default":
            args = (args[0], self._sizes_with(nodes[0], sum(sizes)))
        self._replace(nodes, args, dim, sizes)

    def _together(self, arg: Arg, first: int, end: int) -> Arg:
        return referring(arg, lambda name: self._view(self.place[name][0], first, end) if name in self.place else name)

    def _replace(self, nodes: Sequence[Node], args: tuple[Arg, ...], dim: int, sizes: tuple[int, ...]) -> None:
        members = tuple(node.outputs[0] for node in nodes)
        spec = self.values[members[0]]
        base = "~".join(members)
        self.values[base] = ValueSpec((*spec.shape[:dim], sum(sizes), *spec.shape[dim + 1 :]), spec.dtype)
        for node in nodes:
            del self.nodes[node.id]
        self._add(msgspec.structs.replace(nodes[0], args=args, outputs=(base,)), min(self.rank[n.id] for n in nodes))
        for position, member in enumerate(members):
            self.place[member] = (len(self.bundles), position)
        self.fresh.append(len(self.bundles))
        self.bundles.append(_Bundle(base, members, dim, sizes))

    def _view(self, number: int, first: int, end: int, name: str | None = None) -> str:
        """Return the value that holds exactly members `first` to `end` of a bundle."""
        bundle = self.bundles[number]
        if name is None and (first, end) == (0, len(bundle.members)):
            return bundle.base
        known = self._views.get((number, first, end))
        if known is not None and name is None:
            return known
        start, size = sum(bundle.sizes[:first]), sum(bundle.sizes[first:end])
        value = f"{bundle.base}[{first}:{end}]" if name is None else name
        spec = self.values[bundle.base]
        shape = (*spec.shape[: bundle.dim], size, *spec.shape[bundle.dim + 1 :])
        self.values[value] = ValueSpec(shape, spec.dtype)
        self._views[number, first, end] = value
        maker = next(node for node in self.nodes.values() if bundle.base in node.outputs)
        args = (Ref(bundle.base), bundle.dim, start, start + size)
        self._add(
            Node(id=0, op="aten.slice.Tensor", args=args, outputs=(value,), path=maker.path, block=maker.block),
            self.rank[maker.id],
        )
        return value

    def _stack(self, names: Sequence[str]) -> str:
        specs = [self.params[name] for name in names]
        joined = "~".join(names)
        shape = (sum(spec.shape[0] for spec in specs), *specs[0].shape[1:])
        self.params[joined] = ParamSpec(key=joined, kind="parameter", shape=shape, dtype=specs[0].dtype)
        self.values[joined] = ValueSpec(shape, specs[0].dtype)
        self.parts[joined] = tuple(names)
        return joined

    def _add(self, node: Node, rank: int) -> None:
        self.nodes[self._next] = msgspec.structs.replace(node, id=self._next)
        self.rank[self._next] = rank
        self._next += 1

    def _ordered(self) -> tuple[Node, ...]:
        """Return the nodes in a valid order that stays close to the original one."""
        made_by = {value: node.id for node in self.nodes.values() for value in node.outputs}
        waits = {node.id: {made_by[value] for value in reads(node) if value in made_by} for node in self.nodes.values()}
        blocks: dict[int, list[int]] = {}
        for number, needed in waits.items():
            for other in needed:
                blocks.setdefault(other, []).append(number)
        ready = [(self.rank[number], number) for number, needed in waits.items() if not needed]
        heapq.heapify(ready)
        ordered: list[Node] = []
        while ready:
            _, number = heapq.heappop(ready)
            ordered.append(self.nodes[number])
            for other in blocks.get(number, ()):
                waits[other].discard(number)
                if not waits[other]:
                    heapq.heappush(ready, (self.rank[other], other))
        assert len(ordered) == len(self.nodes), "siblings read the same, so none waits for another"
        return tuple(ordered)


def _groups(graph: Graph, *, packed: bool, most_bytes: float) -> list[list[ProductWeight]]:
    """Return groups of products of one value that may be merged: nothing else reads their matrices, and these are
    small."""
    readers = consumers(graph)
    by_operand: dict[tuple[Arg, bool, LevelLayout | None], list[ProductWeight]] = {}
    made = {node.id: node for node in graph.nodes}
    for use in products(graph).values():
        node = made[use.node]
        own = [name for name in (use.weight, use.bias) if name is not None]
        rows = graph.params[use.weight].shape[0]
        alone = all(len(readers[name]) == 1 and name not in graph.outputs.values() for name in own)
        if node.op == "aten.linear.default" and alone and rows % _ROWS == 0:
            layout = level_layout(graph.params[use.weight]) if packed else None
            by_operand.setdefault((node.args[0], use.bias is None, layout), []).append(use)
    return [
        group
        for group in by_operand.values()
        if len(group) > 1 and 4 * sum(prod(graph.params[use.weight].shape) for use in group) <= most_bytes
    ]


def _runs(positions: Sequence[int]) -> list[list[int]]:
    """Return runs of consecutive numbers, each of two or more, from ascending `positions`."""
    runs: list[list[int]] = []
    for position in positions:
        if runs and runs[-1][-1] == position - 1:
            runs[-1].append(position)
        else:
            runs.append([position])
    return [run for run in runs if len(run) > 1]


def _without_repeats(graph: Graph) -> Graph:
    """Return the graph without nodes that repeat an earlier node's operator on the same arguments."""
    known: dict[tuple[str, str, str], Node] = {}
    same: dict[str, str] = {}
    kept: list[Node] = []
    shown = set(graph.outputs.values())
    for node in graph.nodes:
        call = rewired(node, lambda name: same.get(name, name))
        key = (call.op, repr(call.args), repr(call.kwargs))
        first = known.get(key)
        if first is None or node.op.startswith("fusion.") or not shown.isdisjoint(node.outputs):
            known.setdefault(key, call)
            kept.append(call)
        else:
            same.update(zip(node.outputs, first.outputs, strict=True))
    return msgspec.structs.replace(graph, nodes=tuple(kept))
