"""Convert an exported program to the IR: names, the closed argument grammar, semantic operators, dead code.

Views become reshapes, because strides at capture mean nothing where the graph runs. Device constants become "the
stage's device", results of multi-output operations belong to their node, assertions are dropped, and tied parameters
become one. Operations that the IR can't express are collected as `Unsupported`, never guessed."""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Final

import msgspec
import torch
from torch import fx
from torch.export import ExportedProgram

from fusionai.capture.graph.copies import LayerCopies
from fusionai.capture.graph.repetition import Repetition
from fusionai.capture.graph.values import Inexpressible, plain_argument, value_spec
from fusionai.capture.tasks import InputSpec
from fusionai.capture.tracing import code_lines
from fusionai.capture.tracing.complex_parts import REFUSED
from fusionai.ir.graph import needed_nodes, reads, renamed
from fusionai.ir.operators import OPERATORS
from fusionai.ir.schema import Arg, Graph, ListArg, Node, Ref, ValueSpec
from fusionai.primitives.errors import ModelError

PREFIX: Final = "module."
"""Prefix of the owner's module inside `TaskModule`."""

_SIZE_OPS: Final[Mapping[Any, str]] = {
    operator.add: "sym.add",
    operator.sub: "sym.sub",
    operator.mul: "sym.mul",
    operator.floordiv: "sym.floordiv",
    operator.mod: "sym.mod",
    operator.neg: "sym.neg",
    torch.sym_max: "sym.max",
    torch.sym_min: "sym.min",
}
_DROPPED_KWARGS: Final = frozenset({"layout", "pin_memory", "non_blocking"})
_ASSERTIONS: Final = ("aten._assert", "aten.sym_constrain", "aten._functional_assert", "aten._functional_sym_constrain")
_SAME: Final = frozenset({"aten.alias.default", "aten.lift_fresh_copy.default", "aten.lift_fresh.default"})
"""Operators whose result is their operand: no node is emitted for them."""
_REPETITION: Final = frozenset({"fusion.traced_layer.default", "fusion.repeated.default"})
_SIZED_BY_VALUES: Final = frozenset(
    {"aten.nonzero.default", "aten.masked_select.default", "aten._unique2.default", "aten.unique_dim.default"}
    | {"aten.unique_consecutive.default", "aten.bincount.default", "aten.repeat_interleave.Tensor"}
)
"""Operators that a larger vocabulary would not make possible: the size of the result depends on data."""


@dataclass(frozen=True, slots=True)
class Unsupported:
    """An operation that the IR can't express, the first module that uses it, and the line of the model's code (as
    `capture.tracing.code_lines` formats it, empty if there is none)."""

    op: str
    path: str
    reason: str
    line: str = ""


@dataclass(slots=True)
class Lowered:
    """A graph under construction: the tables map values to the module's names of parameters, buffers, constants."""

    nodes: list[Node] = field(default_factory=list)
    values: dict[str, ValueSpec] = field(default_factory=dict)
    parameters: dict[str, str] = field(default_factory=dict)
    """Value -> name of a parameter of the module; tied parameters are one value, named by the first name."""
    buffers: dict[str, str] = field(default_factory=dict)
    constants: dict[str, str] = field(default_factory=dict)
    inputs: tuple[str, ...] = ()
    outputs: dict[str, str] = field(default_factory=dict)
    state_writes: dict[str, str] = field(default_factory=dict)
    unsupported: list[Unsupported] = field(default_factory=list)


def lower(
    program: ExportedProgram,
    inputs: tuple[InputSpec, ...],
    aliases: Mapping[str, tuple[str, ...]],
    repetition: Repetition,
) -> Lowered:
    """Convert `program` to the IR. `aliases`: first name of a shared parameter or buffer -> its further names. Raises
    `Unlike` if layers of `repetition` can't be copied."""
    canonical = {name: first for first, others in aliases.items() for name in (first, *others)}
    return _Lowering(program, inputs, canonical, repetition).run()


class _Consequence(Exception):
    """This operation uses a refused one; only the cause is reported."""


class _Lowering:
    def __init__(
        self,
        program: ExportedProgram,
        inputs: tuple[InputSpec, ...],
        canonical: Mapping[str, str],
        repetition: Repetition,
    ) -> None:
        self.program = program
        self.specs = inputs
        self.canonical = canonical
        self.result = Lowered()
        self.names: dict[fx.Node, Arg | tuple[str, ...]] = {}
        """FX node -> its replacement: a reference, a number, or the results of a multi-output node."""
        self.tied: dict[str, str] = {}
        """Canonical name -> the single value of that parameter."""
        self.symbols: dict[str, str] = {}
        self.constant_values: set[str] = set()
        signature = program.graph_signature
        tables = (
            (signature.inputs_to_parameters, self.result.parameters),
            (signature.inputs_to_buffers, self.result.buffers),
            (signature.inputs_to_lifted_tensor_constants, self.result.constants),
        )
        self.given = {name: (target, table) for targets, table in tables for name, target in targets.items()}
        """Placeholder -> (its name in the module, the table it belongs in). Built once, because the signature rebuilds
        its dictionaries on every access."""
        self.copies = LayerCopies(self.result.nodes, self.result.values, self.tied, canonical, repetition)

    def run(self) -> Lowered:
        user_inputs = iter(self.specs)
        for node in self.program.graph.nodes:
            try:
                self.visit(node, user_inputs)
            except _Consequence:
                continue
            except Inexpressible as refusal:
                self.refuse(node, _op_name(node), str(refusal))
        self.drop_dead()
        self.rename()
        return self.result

    def visit(self, node: fx.Node, user_inputs: Iterator[InputSpec]) -> None:
        refused = node.meta.get(REFUSED)
        if refused is not None:
            raise Inexpressible(refused) if refused else _Consequence
        match node.op:
            case "placeholder" if node.name in self.given:
                self.state(node, *self.given[node.name])
            case "placeholder":
                self.user_input(node, next(user_inputs))
            case "call_function":
                self.spell(node)
            case "output":
                self.outputs(node)
            case _:
                raise Inexpressible("the trace kept a sub-graph (control flow)")

    def state(self, node: fx.Node, target: str, table: dict[str, str]) -> None:
        key = target.removeprefix(PREFIX)
        key = self.canonical.get(key, key)
        if key not in self.tied:
            value = node.name.replace("_module_", "_", 1)
            self.tied[key] = value
            table[value] = key
            self.result.values[value] = self.spec(node.meta["val"])
            if table is self.result.constants:
                self.constant_values.add(value)
        self.names[node] = Ref(self.tied[key])

    def user_input(self, node: fx.Node, spec: InputSpec) -> None:
        for size, dim in zip(node.meta["val"].shape, spec.dims, strict=True):
            if isinstance(dim, str) and isinstance(size, torch.SymInt):
                self.symbols[str(size.node.expr)] = dim
        self.result.inputs = (*self.result.inputs, spec.name)
        self.result.values[spec.name] = self.spec(node.meta["val"])
        self.names[node] = Ref(spec.name)

    def spell(self, node: fx.Node) -> None:
        if node.target is operator.getitem:
            source, index = node.args
            results = self.names.get(source) if isinstance(source, fx.Node) else None
            if not isinstance(results, tuple) or not isinstance(index, int):
                raise _Consequence
            self.names[node] = Ref(results[index])
            return
        name = _op_name(node)
        if name.startswith(_ASSERTIONS):
            return
        if name in _REPETITION:
            self.names[node] = self.copies.take(name, [self.argument(arg) for arg in node.args])
            return
        if name == "aten._local_scalar_dense.default":
            raise Inexpressible("it makes a Python number of a tensor's value, as item() does: keep it a tensor")
        if isinstance(node.meta.get("val"), torch.SymFloat):
            if any(source not in self.names for source in node.all_input_nodes):
                raise _Consequence
            raise Inexpressible(
                "it makes a fraction of a size that varies, and sizes are whole numbers. Make the size n a tensor "
                "first, as in x.new_full((), n) ** 0.5"
            )
        if node.target is operator.pow and node.args[1] == 2:
            self.emit(node, "sym.mul", (node.args[0], node.args[0]), {})
            return
        if node.target in _SIZE_OPS:
            self.emit(node, _SIZE_OPS[node.target], node.args, {})
            return
        if isinstance(node.meta.get("val"), torch.SymBool | bool):
            # Comparisons of sizes feed assertions. If one feeds anything else, the model branches on a size.
            if any(user.op == "output" or not _op_name(user).startswith(_ASSERTIONS) for user in node.users):
                raise Inexpressible("it compares sizes and computes with the result")
            return
        if name in _SAME or (name == "aten.clone.default" and self.is_constant(node.args[0])):
            self.names[node] = self.argument(node.args[0])
            return
        if name in _REWRITES:
            _REWRITES[name](self, node)
        elif form := _FORMS.get(name):
            named = dict(zip(form.names, node.args[form.operands :], strict=False))
            self.emit(node, form.op, node.args[: form.operands], named)
        else:
            self.emit(node, _OTHER_NAMES.get(name, name), node.args, node.kwargs)

    def emit_first(self, node: fx.Node, op: str, args: tuple[Any, ...], kwargs: Mapping[str, Any], others: str) -> None:
        """Emit an operator whose only result is the first of the node's. Refuses a model that uses the others."""
        if any(user.args[1] != 0 and user.users for user in node.users if user.target is operator.getitem):
            raise Inexpressible(f"the model uses {others}")
        self.emit(node, op, args, kwargs, node.meta["val"][0])
        self.names[node] = (node.name,)

    def emit(self, node: fx.Node, op: str, args: tuple[Any, ...], kwargs: Mapping[str, Any], value: Any = None) -> None:
        """Add a node to the graph. `value`: its traced result, by default that of `node`."""
        if op not in OPERATORS:
            # Emitted all the same, so that a report can list the model's other problems.
            by_values = "the size of its result depends on values of its operands"
            self.refuse(node, op, by_values if op in _SIZED_BY_VALUES else "it is not in the operator vocabulary")
        spelt_args = tuple(self.argument(arg) for arg in args)
        spelt_kwargs = {name: self.argument(value) for name, value in kwargs.items() if name not in _DROPPED_KWARGS}
        value = node.meta["val"] if value is None else value
        if isinstance(value, tuple | list):
            outputs = tuple(f"{node.name}.{index}" for index in range(len(value)))
            specs = tuple(self.spec(item) for item in value)
            self.names[node] = outputs
        else:
            outputs, specs = (node.name,), (self.spec(value),)
            self.names[node] = Ref(node.name)
        self.result.values.update(zip(outputs, specs, strict=True))
        number = len(self.result.nodes)
        self.result.nodes.append(
            Node(id=number, op=op, args=spelt_args, kwargs=spelt_kwargs, outputs=outputs, path=_path(node))
        )

    def argument(self, value: Any) -> Arg:
        match value:
            case fx.Node():
                spelt = self.names.get(value)
                if value not in self.names or isinstance(spelt, tuple):
                    raise _Consequence
                return spelt
            case list() | tuple():
                return ListArg(tuple(self.argument(item) for item in value))
            case _:
                return plain_argument(value)

    def spec(self, value: Any) -> ValueSpec:
        return value_spec(value, self.symbols)

    def is_constant(self, value: Any) -> bool:
        if not isinstance(value, fx.Node):
            return False
        spelt = self.names.get(value)
        return isinstance(spelt, Ref) and spelt.name in self.constant_values

    def outputs(self, node: fx.Node) -> None:
        signature = self.program.graph_signature
        by_name = {result.name: result for result in node.all_input_nodes}
        for target in signature.parameters_to_mutate.values():
            raise ModelError(
                f"forward changes the parameter {target.removeprefix(PREFIX)}, and only the optimizer may do that.",
                hint="Compute the changed weight as another tensor, or keep what forward changes in a buffer. An "
                "nn.Embedding with max_norm changes its weight too.",
            )
        for name, target in signature.buffers_to_mutate.items():
            written = self.names.get(by_name[name])
            key = target.removeprefix(PREFIX)
            if isinstance(written, Ref):
                self.result.state_writes[written.name] = self.canonical.get(key, key)
        # The task returns a dictionary; the program's output tree holds its keys in order.
        tree = self.program.call_spec.out_spec
        meanings: list[Any] = [] if tree is None else tree.context
        for meaning, name in zip(meanings, signature.user_outputs, strict=True):
            value = self.names.get(by_name[name]) if name in by_name else None
            if isinstance(value, Ref):
                self.result.outputs[str(meaning)] = value.name

    def refuse(self, node: fx.Node, op: str, reason: str) -> None:
        path, line = _path(node), code_lines.of_recorded(node.meta.get("stack_trace"))
        if all(found.op != op for found in self.result.unsupported):
            self.result.unsupported.append(Unsupported(op, path, reason, line))

    def drop_dead(self) -> None:
        """Keep the nodes that outputs and state writes need, and number them in order."""
        wanted = {*self.result.outputs.values(), *self.result.state_writes}
        kept = needed_nodes(Graph(nodes=tuple(self.result.nodes)), wanted)
        used = wanted | {value for node in kept for value in (*reads(node), *node.outputs)} | set(self.result.inputs)
        # A buffer that is written but never read must stay in the table.
        written = set(self.result.state_writes.values())
        used |= {value for value, key in self.result.buffers.items() if key in written}
        self.result.nodes = [msgspec.structs.replace(node, id=index) for index, node in enumerate(kept)]
        self.result.values = {name: spec for name, spec in self.result.values.items() if name in used}
        for table in (self.result.parameters, self.result.buffers, self.result.constants):
            for value in [value for value in table if value not in used]:
                del table[value]

    def rename(self) -> None:
        """Name results by operator and number, so that the names do not depend on how the graph was made."""
        result = self.result
        taken = {*result.inputs, *result.parameters, *result.buffers, *result.constants}
        counts: dict[str, int] = {}
        names: dict[str, str] = {}
        for node in result.nodes:
            base = node.op.split(".")[1] if "." in node.op else node.op
            while True:
                count = counts[base] = counts.get(base, -1) + 1
                name = f"{base}_{count}" if count else base
                if name not in taken:
                    break
            several = len(node.outputs) > 1
            names.update({old: f"{name}.{i}" if several else name for i, old in enumerate(node.outputs)})
        result.nodes = [renamed(node, names) for node in result.nodes]
        result.values = {names.get(name, name): spec for name, spec in result.values.items()}
        result.outputs = {meaning: names.get(name, name) for meaning, name in result.outputs.items()}
        result.state_writes = {names.get(name, name): key for name, key in result.state_writes.items()}


@dataclass(frozen=True, slots=True)
class _Form:
    """How an operator is written in the IR: as `op`, with the first `operands` arguments by position and those after
    them under `names`. Further arguments are dropped."""

    op: str
    operands: int
    names: tuple[str, ...] = ()


_FORMS: Final[Mapping[str, _Form]] = {
    "fusion.attention.default": _Form(
        "fusion.attention", 3, ("sinks", "key_mask", "scale", "causal", "window", "softcap", "dropout")
    ),
    "fusion.expert_linear.default": _Form("fusion.expert_linear", 3, ("transposed",)),
    "fusion.in_training.default": _Form("fusion.in_training", 2),
    "fusion.linear_attention.default": _Form("fusion.linear_attention", 3, ("decay", "beta")),
    "fusion.linear_scan.default": _Form("fusion.linear_scan", 2),
    "fusion.uniform.default": _Form("fusion.uniform", 1),
    # Without `sparse`: a dense gradient has the same numbers, with zeros in the other rows.
    "aten.embedding.default": _Form("aten.embedding.default", 4),
}


def _embedding_bag(lowering: _Lowering, node: fx.Node) -> None:
    given = dict(zip(_BAG_ARGUMENTS, node.args, strict=False)) | dict(node.kwargs)
    kwargs = {
        "mode": given.get("mode", 0), "weights": given.get("per_sample_weights"),
        "by_frequency": given.get("scale_grad_by_freq", False), "last_offset": given.get("include_last_offset", False),
        "padding": given.get("padding_idx", -1),
    }  # fmt: skip
    lowering.emit_first(node, "fusion.embedding_bag", node.args[:3], kwargs, "results of it other than the bags")


_BAG_ARGUMENTS: Final = (
    "weight", "indices", "offsets", "scale_grad_by_freq", "mode", "sparse", "per_sample_weights", "include_last_offset",
    "padding_idx",
)  # fmt: skip


def _dropout(lowering: _Lowering, node: fx.Node) -> None:
    x, p, training = (*node.args, *node.kwargs.values())[:3]
    if not isinstance(p, float | int) or not isinstance(training, bool | None):
        raise Inexpressible("its probability depends on the data")
    with_mask = isinstance(node.meta["val"], tuple | list)
    if training is False or p == 0:
        identity = lowering.argument(x)
        lowering.names[node] = (identity.name,) if with_mask and isinstance(identity, Ref) else identity
    elif with_mask:
        lowering.emit_first(node, "fusion.dropout", (x,), {"p": float(p)}, "the dropout mask itself")
    else:
        lowering.emit(node, "fusion.dropout", (x,), {"p": float(p)})


def _copy(lowering: _Lowering, node: fx.Node) -> None:
    """Emit the source, expanded to the target's shape: like `copy`, which has no derivative of its own."""
    args: tuple[Any, ...] = node.args
    target, source = args[:2]
    if source.meta["val"].dtype != node.meta["val"].dtype:
        raise Inexpressible("it writes a tensor of another dtype; cast it first")
    if lowering.spec(source.meta["val"]) == lowering.spec(node.meta["val"]):
        # The overwritten target has no part in the result. An alias makes a new value, because a buffer may be written
        # with it.
        lowering.emit(node, "aten.alias.default", (source,), {})
    else:
        lowering.emit(node, "aten.expand_as.default", (source, target), {})


def _normalise(lowering: _Lowering, node: fx.Node) -> None:
    """Emit batch normalisation by running statistics. The contents of its further results depend on the device."""
    x, weight, bias, mean, variance, momentum, eps = node.args
    args = (x, weight, bias, mean, variance, False, momentum, eps, False)
    lowering.emit_first(node, "aten.batch_norm.default", args, {}, "its saved statistics")


_OTHER_NAMES: Final[Mapping[str, str]] = {
    "aten.max.other": "aten.maximum.default",
    "aten.min.other": "aten.minimum.default",
    "aten.fill.Scalar": "aten.full_like.default",
    # Zeros instead of uninitialised memory, which a graph must not reveal; it is overwritten anyway.
    "aten.new_empty.default": "aten.new_zeros.default",
    "aten.special_xlogy.default": "aten.xlogy.Tensor",
    "aten.swapaxes.default": "aten.transpose.int",
    "aten.swapdims.default": "aten.transpose.int",
    "aten.view.default": "aten.reshape.default",
    "aten._unsafe_view.default": "aten.reshape.default",
    **{
        f"aten.{long}.{overload}": f"aten.{short}.{overload}"
        for short, overloads, names in (
            ("mul", "Tensor Scalar", "multiply"), ("sub", "Tensor Scalar", "subtract"),
            ("div", "Tensor Scalar", "true_divide"), ("div", "Tensor Scalar Tensor_mode Scalar_mode", "divide"),
            ("gt", "Tensor Scalar", "greater"), ("ge", "Tensor Scalar", "greater_equal"),
            ("lt", "Tensor Scalar", "less"), ("le", "Tensor Scalar", "less_equal"),
            ("ne", "Tensor Scalar", "not_equal"), ("clamp", "default Tensor", "clip"),
            ("neg", "default", "negative"), ("abs", "default", "absolute"), ("trunc", "default", "fix"),
            ("expm1", "default", "special_expm1"), ("log1p", "default", "special_log1p"),
            ("erf", "default", "special_erf"), ("erfc", "default", "special_erfc"),
            ("erfinv", "default", "special_erfinv"), ("sigmoid", "default", "special_expit"),
            ("exp2", "default", "special_exp2"), ("lgamma", "default", "special_gammaln"),
            ("split", "Tensor", "unsafe_split"), ("split_with_sizes", "default", "unsafe_split_with_sizes"),
            ("index", "Tensor", "_unsafe_index"), ("index_put", "default", "_unsafe_index_put"),
            ("dot", "default", "vdot"), ("cat", "default", "concat concatenate"),
        )
        for overload in overloads.split()
        for long in names.split()
    },
}  # fmt: skip
"""Operators with the arguments of another one that stands for them."""

_REWRITES: Final[Mapping[str, Callable[[_Lowering, fx.Node], None]]] = {
    "aten._embedding_bag.default": _embedding_bag,
    "aten.dropout.default": _dropout,
    "aten.native_dropout.default": _dropout,
    "aten.copy.default": _copy,
    "aten.fill.Tensor": _copy,
    "aten._native_batch_norm_legit_no_training.default": _normalise,
}


def spelt(op: str) -> bool:
    """Return whether an operator can be expressed, whatever its arguments."""
    known = any(op in table for table in (OPERATORS, _FORMS, _OTHER_NAMES, _REWRITES, _SAME))
    return known or op.startswith(_ASSERTIONS)


def _op_name(node: fx.Node) -> str:
    target = node.target
    return str(target) if isinstance(target, torch._ops.OpOverload) else getattr(target, "__name__", str(target))


def _path(node: fx.Node) -> str:
    stack = node.meta.get("nn_module_stack")
    if not stack:
        return ""
    path = list(stack.values())[-1][0]
    path = path if isinstance(path, str) and not path.startswith("_empty") else ""
    return path.removeprefix("module").removeprefix(".") if path.startswith("module") else ""
