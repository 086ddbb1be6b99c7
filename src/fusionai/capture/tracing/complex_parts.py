"""Replace complex values of a trace by pairs of real ones, so that the IR and every backend stay real.

Rotary positions are often written with complex numbers (`torch.polar`, `view_as_complex`). Each complex value of the
exported program is replaced by its real and its imaginary part, computed by real operators in the order of PyTorch's
own formulas (`capture.tracing.complex_rules`): (a + bi)(c + di) = (ac - bd) + (ad + bc)i. A complex constant or buffer
is stored in PyTorch's layout, with its parts in a last dimension of 2. Complex parameters, inputs and results, and
functions without a rule, are left in place and marked with the reason; `capture.graph.lowering` refuses them."""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import torch
from torch import fx
from torch._guards import detect_fake_mode
from torch.export import ExportedProgram

REFUSED: Final = "fusion_refused"
"""Key in a node's meta: why the node can't be lowered; empty if the refusal of another node is the cause."""
MARKS: Final = frozenset({"fusion.traced_layer.default", "fusion.repeated.default"})
"""Operators that stand for repeated layers (`capture.graph.repetition`)."""
REAL_DTYPES: Final[Mapping[torch.dtype, torch.dtype]] = {
    torch.complex64: torch.float32,
    torch.complex128: torch.float64,
}
_aten: Final = torch.ops.aten


class NoForm(Exception):
    """An operation on complex values has no form in real ones; the message says why."""


@dataclass(frozen=True, slots=True)
class Pair:
    """A complex tensor. None means that this part is zero everywhere; at most one part is None."""

    real: fx.Node | None
    imaginary: fx.Node | None


Operand = fx.Node | Pair | complex
"""A real tensor, a complex one, or a number."""
Rule = Callable[["Parts", fx.Node, tuple[Any, ...], dict[str, Any]], "Pair | fx.Node | list[Any]"]
"""Takes the node's arguments, with pairs for complex values; returns the replacement of its result."""


def real_parts(program: ExportedProgram, rules: Mapping[str, Rule]) -> None:
    """Replace every complex value of `program`, in place."""
    values = [node.meta.get("val") for node in program.graph.nodes]
    if not any(is_complex(value) for value in values):
        return
    Parts(program, rules, detect_fake_mode(values)).run()


def is_complex(value: Any) -> bool:
    match value:
        case torch.Tensor():
            return value.is_complex()
        case list() | tuple():
            return any(is_complex(item) for item in value)
        case _:
            return isinstance(value, complex)


class Parts:
    """One pass over a program. Rules make nodes with `call`, before the node that is being visited."""

    def __init__(self, program: ExportedProgram, rules: Mapping[str, Rule], mode: Any) -> None:
        self.program = program
        self.graph = program.graph
        self.rules = rules
        self.mode = mode
        self.pairs: dict[fx.Node, Pair] = {}
        self.lists: dict[fx.Node, list[Any]] = {}
        """Replacements of the results of a node that has several."""
        self.stored: dict[fx.Node, str] = {}
        """Placeholders of complex buffers and constants, whose parts are made at their first use."""
        self.seen_apart: dict[fx.Node, Pair] = {}
        """Results of `view_as_real`: selecting a part of such a result returns the part itself."""
        self.at = next(iter(self.graph.nodes))
        self.meta: dict[str, Any] = {}

    def run(self) -> None:
        replaced: list[fx.Node] = []
        for node in list(self.graph.nodes):
            if node.op == "placeholder":
                self.placeholder(node)
            elif node.op == "call_function":
                if self.visit(node):
                    replaced.append(node)
            elif node.op == "output":
                for result in node.all_input_nodes:
                    if result in self.pairs:
                        self.mark(
                            result, "it is a result of the model, and results are real: return torch.view_as_real of it"
                        )
        for node in reversed(replaced):
            if REFUSED in node.meta:
                continue
            if node.users:
                # Only refused nodes still use it.
                node.meta[REFUSED] = ""
            else:
                self.graph.erase_node(node)
        self.program.graph_module.recompile()

    def placeholder(self, node: fx.Node) -> None:
        value = node.meta.get("val")
        if not isinstance(value, torch.Tensor) or value.dtype not in REAL_DTYPES:
            return
        signature = self.program.graph_signature
        target = {**signature.inputs_to_buffers, **signature.inputs_to_lifted_tensor_constants}.get(node.name)
        if target is None or target in signature.buffers_to_mutate.values():
            # Parameters and inputs: lowering refuses them by their dtype.
            return
        with self.mode:
            node.meta["val"] = torch.view_as_real(value.resolve_conj())
        self.stored[node] = target

    def visit(self, node: fx.Node) -> bool:
        """Process one node; returns whether it is replaced by others."""
        name = str(node.target)
        args: Sequence[fx.Node] = node.all_input_nodes
        complex_args = any(
            arg in self.pairs or arg in self.stored or arg in self.lists or is_complex(arg.meta.get("val"))
            for arg in args
        )
        given: tuple[Any, ...] = node.args
        if node.target is operator.getitem and given[0] in self.lists:
            return self.keep(node, self.lists[given[0]][given[1]])
        if name == "aten.select.int" and given[0] in self.seen_apart:
            source, dim, index = given
            rank = source.meta["val"].ndim
            pair = self.seen_apart[source]
            if dim in (rank - 1, -1) and index in (0, 1):
                self.enter(node)
                return self.keep(node, self.full(pair)[index])
        if not complex_args and not is_complex(node.meta.get("val")):
            return False
        if name.startswith("aten._assert"):
            # An assertion about the dtype or device seen while tracing.
            return True
        if any(REFUSED in arg.meta or (is_complex(arg.meta.get("val")) and not self.known(arg)) for arg in args):
            node.meta[REFUSED] = ""
            return False
        self.enter(node)
        spelt = tuple(self.spelt(arg) for arg in node.args)
        kwargs = {key: self.spelt(arg) for key, arg in node.kwargs.items()}
        try:
            if name in MARKS:
                return self.keep(node, self.marked(node, spelt))
            rule = self.rules.get(name)
            if rule is None:
                raise NoForm("it has no rule for complex values")
            return self.keep(node, rule(self, node, spelt, kwargs))
        except NoForm as reason:
            self.mark(node, f"{reason}")
            return False

    def known(self, arg: fx.Node) -> bool:
        return arg in self.pairs or arg in self.stored or arg in self.lists

    def enter(self, node: fx.Node) -> None:
        """Place the nodes made from now on before `node`, in its module."""
        self.at = node
        self.meta = {key: node.meta[key] for key in ("nn_module_stack", "stack_trace") if key in node.meta}

    def keep(self, node: fx.Node, made: Pair | fx.Node | list[Any]) -> bool:
        """Let `made` replace the node. One with a real result becomes an alias: the program knows results by name."""
        match made:
            case Pair():
                self.pairs[node] = made
                return True
            case list():
                self.lists[node] = made
                return True
            case _:
                node.target, node.args, node.kwargs = _aten.alias.default, (made,), {}
                return False

    def mark(self, node: fx.Node, reason: str) -> None:
        node.meta[REFUSED] = f"on complex values {reason}"

    def spelt(self, arg: Any) -> Any:
        match arg:
            case fx.Node() if arg in self.stored:
                if arg not in self.pairs:
                    self.pairs[arg] = self.parted(arg)
                return self.pairs[arg]
            case fx.Node() if arg in self.pairs:
                return self.pairs[arg]
            case list() | tuple():
                return [self.spelt(item) for item in arg]
            case _:
                return arg

    def parted(self, stored: fx.Node) -> Pair:
        meta, owner = self.meta, self.stored[stored].rpartition(".")[0]
        self.meta = {"nn_module_stack": {"": (owner, "")}}
        pair = self.halves(stored)
        self.meta = meta
        return pair

    def halves(self, pairs: fx.Node) -> Pair:
        """Return the parts of a tensor that has them in a last dimension of 2."""
        last = pairs.meta["val"].ndim - 1
        return Pair(*(self.call(_aten.select.int, pairs, last, index) for index in (0, 1)))

    def call(self, target: Any, *args: Any, **kwargs: Any) -> Any:
        """Make a node and return it; for an operator with several results, return their list."""
        values = fx.map_arg((args, kwargs), lambda arg: arg.meta["val"])
        with self.mode:
            made = target(*values[0], **values[1])
        node = self.insert(target, args, kwargs, made)
        if isinstance(made, list | tuple):
            return [self.insert(operator.getitem, (node, index), {}, value) for index, value in enumerate(made)]
        return node

    def insert(self, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any], value: Any) -> fx.Node:
        """Make a node with the traced result `value`."""
        with self.graph.inserting_before(self.at):
            node = self.graph.call_function(target, args, kwargs)
        node.meta = {**self.meta, "val": value}
        return node

    def full(self, pair: Pair) -> tuple[fx.Node, fx.Node]:
        """Return both parts; a part that is None becomes a tensor of zeros."""
        real, imaginary = pair.real, pair.imaginary
        if real is None:
            assert imaginary is not None
            return self.call(_aten.zeros_like.default, imaginary), imaginary
        return real, self.call(_aten.zeros_like.default, real) if imaginary is None else imaginary

    def marked(self, node: fx.Node, args: tuple[Any, ...]) -> list[Any]:
        """Convert a repeated layer's mark or copy: it takes and returns the parts one by one."""

        def flat(items: Sequence[Any]) -> list[fx.Node]:
            return [part for item in items for part in (self.full(item) if isinstance(item, Pair) else (item,))]

        lists = [flat(arg) if isinstance(arg, list) else arg for arg in args]
        values: list[torch.Tensor] = []
        complex_at = [is_complex(value) for value in node.meta["val"]]
        for value, apart in zip(node.meta["val"], complex_at, strict=True):
            with self.mode:
                plain = torch.empty(value.shape, dtype=REAL_DTYPES[value.dtype]) if apart else value
            values.extend([plain, plain] if apart else [plain])
        made = self.insert(node.target, tuple(lists), {}, values)
        parts = iter([self.insert(operator.getitem, (made, at), {}, value) for at, value in enumerate(values)])
        return [Pair(next(parts), next(parts)) if apart else next(parts) for apart in complex_at]
