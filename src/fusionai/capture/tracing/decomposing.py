"""Replaces operators of an exported program by what they consist of.

`torch.export`'s own `run_decompositions` traces the whole program twice more, which is most of the time that capturing
a model takes. Where no operator changes its operands, the program is functional already. Only the replaced nodes are
traced then, each by itself, and the others stay as they are. The result is the same."""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Final, cast

import torch
from torch import fx
from torch._dispatch.python import enable_python_dispatcher
from torch._export.utils import _is_cia_op, _is_preservable_cia_op, _special_op_to_preserve_cia
from torch._higher_order_ops.wrap import wrap_with_set_grad_enabled
from torch._ops import HigherOrderOperator, OpOverload
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.export import ExportedProgram, exported_program
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils import _pytree as pytree

Decompositions = Mapping[Any, Callable[..., Any]]
_SIZE: Final = torch.ops.aten.sym_size.int
_BY_GRADIENT: Final = frozenset((torch.ops.aten.lstm.input, torch.ops.aten.lstm.data, torch.ops.aten.matmul.default))
"""Operators that consist of others if an operand requires a gradient, which nodes by themselves do not show."""


class _OnlyWhole(Exception):
    """The program has to be traced as a whole."""


def decomposed(program: ExportedProgram, table: Decompositions, mode: FakeTensorMode) -> ExportedProgram:
    """Return `program` with the operators of `table` replaced, and the composite ones that torch does not keep. It may
    be the same object, changed. `mode`: that of its fake tensors."""
    composite, others = exported_program._split_decomp_table_to_cia_and_python_decomp(dict(table))
    replaced = {op for op, made in composite.items() if made is not _special_op_to_preserve_cia}
    kept = exported_program._override_composite_implicit_decomp(composite)
    try:
        with mode, torch.no_grad(), kept, enable_python_dispatcher():
            _Decomposing(program, others, replaced | others.keys()).run()
    except _OnlyWhole:
        return program.run_decompositions(dict(table))
    return program


class _Decomposing:
    """Builds the new graph node by node. `table`: operators that are not composite; `replaced`: all operators to be
    replaced."""

    def __init__(self, program: ExportedProgram, table: Decompositions, replaced: set[Any]) -> None:
        self._program = program
        self._table = dict(table)
        self._replaced = replaced
        self._graph = fx.Graph()
        self._sizes: dict[str, fx.Node] = {}
        """Expression -> the first node with this size."""
        self._inputs: dict[Any, tuple[fx.Node, int]] = {}
        """Size, and its symbol -> (placeholder with this size, its dimension)."""
        self._last: fx.Node | None = None
        """The last placeholder, or the last size of one."""

    def run(self) -> None:
        module = self._program.graph_module
        self._copied(module, {}, None)
        self._graph.eliminate_dead_code()
        self._rename(module.graph, self._graph)
        module.graph = self._graph
        module.recompile()

    def _copied(self, module: fx.GraphModule, made: dict[fx.Node, Any], region: fx.Node | None) -> Any:
        """Copy the nodes of the program, or of a `region` of it. `made`: node -> its copy, or copies of several
        results; holds the placeholders of a region. Return the copies of what it returns."""
        for node in module.graph.nodes:
            if node.op == "output":
                results = fx.map_arg(node.args[0], made.__getitem__)
                if region is None:
                    self._graph.output(results).meta = dict(node.meta)
                return results
            if node.op == "get_attr" and not isinstance(getattr(module, node.target, None), fx.GraphModule):
                raise _OnlyWhole
            if node not in made and node.op != "get_attr":
                made[node] = self._copy(module, node, made, region)
        raise AssertionError("a graph ends with its output")

    def _copy(self, module: fx.GraphModule, node: fx.Node, made: Mapping[fx.Node, Any], region: fx.Node | None) -> Any:
        if node.op == "placeholder":
            return self._placeholder(node)
        if node.target is wrap_with_set_grad_enabled:
            _, part, *operands = cast("tuple[Any, ...]", node.args)
            inner: fx.GraphModule = getattr(module, part.target)
            given = (made[one] if isinstance(one, fx.Node) else one for one in operands)
            placeholders = inner.graph.find_nodes(op="placeholder")
            return self._copied(inner, dict(zip(placeholders, given, strict=True)), region or node)
        if node.target is operator.getitem and not isinstance(results := made[node.all_input_nodes[0]], fx.Node):
            return results[node.args[1]]
        if not self._is_functional(node):
            raise _OnlyWhole
        if self._is_replaced(node.target):
            return self._parts(node, made, region)
        if any(not isinstance(made[one], fx.Node) for one in node.all_input_nodes):
            raise _OnlyWhole
        return self._added(node, made, _meta(node, region))

    def _placeholder(self, node: fx.Node) -> fx.Node:
        copy = self._last = self._graph.node_copy(node)
        value = node.meta["val"]
        for dim, size in enumerate(value.shape if isinstance(value, torch.Tensor) else ()):
            if isinstance(size, torch.SymInt):
                self._inputs[str(size.node.expr)] = self._inputs[size.node] = copy, dim
        return copy

    @staticmethod
    def _is_functional(node: fx.Node) -> bool:
        if node.op != "call_function" or isinstance(node.target, HigherOrderOperator):
            return False
        return not (isinstance(node.target, OpOverload) and node.target._schema.is_mutable)

    def _is_replaced(self, op: Any) -> bool:
        if op in self._replaced:
            if op in _BY_GRADIENT:
                raise _OnlyWhole
            return True
        return isinstance(op, OpOverload) and _is_cia_op(op) and not _is_preservable_cia_op(op)

    def _parts(self, node: fx.Node, made: Mapping[fx.Node, Any], region: fx.Node | None) -> Any:
        """Trace one operator and add what it consists of. Return its results."""
        leaves, spec = pytree.tree_flatten((node.args, node.kwargs))
        at = [place for place, leaf in enumerate(leaves) if isinstance(leaf, fx.Node)]

        def call(*given: Any) -> Any:
            filled = list(leaves)
            for place, value in zip(at, given, strict=True):
                filled[place] = value
            args, kwargs = pytree.tree_unflatten(filled, spec)
            return cast("OpOverload", node.target)(*args, **kwargs)

        operands = [made[leaves[place]] for place in at]
        if not all(isinstance(one, fx.Node) for one in operands):
            raise _OnlyWhole
        try:
            traced = make_fx(call, decomposition_table=self._table)(*(leaves[place].meta["val"] for place in at))
        except RuntimeError as error:  # such as a branch on data: the whole trace says where in the model it is
            raise _OnlyWhole from error
        inner = dict(zip(traced.graph.find_nodes(op="placeholder"), operands, strict=True))
        for one in traced.graph.nodes:
            if one.op == "output":
                return fx.map_arg(one.args[0], inner.__getitem__)
            if one in inner:
                continue
            if not self._is_functional(one) or one.target is torch.ops.aten.sym_numel.default:
                raise _OnlyWhole
            value = one.meta["val"]
            if isinstance(value, torch.SymInt) and (one.target is _SIZE or str(value.node.expr) in self._sizes):
                inner[one] = self._size(str(value.node.expr), value)
            else:
                inner[one] = self._added(one, inner, {**_meta(node, region), "val": value})
        raise AssertionError("a graph ends with its output")

    def _added(self, node: fx.Node, made: Mapping[fx.Node, Any], meta: dict[str, Any]) -> fx.Node:
        copy = self._graph.node_copy(node, made.__getitem__)
        copy.meta = meta
        value = meta.get("val")
        if isinstance(value, torch.SymInt):
            self._sizes.setdefault(str(value.node.expr), copy)
        return copy

    def _size(self, expression: str, value: torch.SymInt) -> fx.Node:
        """Return the node with this size. Sizes of results are computed from those of inputs."""
        if expression not in self._sizes:
            source = self._inputs.get(value.node) or self._inputs.get(expression)
            if source is None or self._last is None:
                raise _OnlyWhole
            with self._graph.inserting_after(self._last):
                size = self._graph.call_function(_SIZE, source)
            size.meta = {"val": value}
            self._sizes[expression] = self._last = size
        return self._sizes[expression]

    def _rename(self, old: fx.Graph, new: fx.Graph) -> None:
        """Let the program's signature name its results as they are named in the new graph."""
        for before, now in zip(_nodes(old.output_node().args), _nodes(new.output_node().args), strict=True):
            if before.name != now.name:
                self._program.graph_signature.replace_all_uses(before.name, now.name)


def _meta(node: fx.Node, region: fx.Node | None) -> dict[str, Any]:
    """Return what is known about a node. Nodes of a region belong to the module that the region is in."""
    stack = (region or node).meta.get("nn_module_stack")
    return node.meta if stack is None else {**node.meta, "nn_module_stack": stack}


def _nodes(values: Any) -> Iterator[fx.Node]:
    return (leaf for leaf in pytree.tree_leaves(values) if isinstance(leaf, fx.Node))
