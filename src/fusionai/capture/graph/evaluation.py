"""Add to a training graph the computations that its module does differently in evaluation.

The module is traced once in each mode, and both traces are lowered to the IR. If a value of the training trace is the
same in evaluation (dropout passes its operand on, batch normalisation uses its running statistics), it also serves as
evaluation's value. Where the traces differ, `fusion.in_training` selects one of the two values, as early in the
computation as the traces allow: a branch in one layer leaves the layers after it unchanged.

Whether a second trace is needed is decided by `capture.tracing.by_mode`."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from typing import Any, Final

import msgspec
import torch

from fusionai.capture.graph.lowering import Lowered
from fusionai.ir.graph import SYMINT, reads, renamed
from fusionai.ir.schema import Arg, ListArg, Node, Ref, ValueSpec
from fusionai.ir.serving import BY_MODE, RANDOM

_IDENTITIES: Final = frozenset(
    {"fusion.dropout", "aten.clone.default", "aten.alias.default", "aten.detach.default", "aten.contiguous.default"}
)
"""Operators whose result in evaluation is their first operand."""
_TRAINED_NORM: Final = "aten._native_batch_norm_legit_functional.default"
_NORM: Final = "aten.batch_norm.default"
_SUFFIX: Final = "_in_evaluation"

_Key = tuple[Any, ...]
"""Identifies a value in evaluation: equal keys of two traces mean equal values."""


class Apart(Exception):
    """Training and evaluation differ in a way that selecting between values can't express; the message says how."""


def with_evaluation(
    trained: Lowered,
    evaluated: Lowered,
    constants: Mapping[str, torch.Tensor],
    evaluation_constants: Mapping[str, torch.Tensor],
) -> dict[str, torch.Tensor]:
    """Change `trained` so that its outputs outside training are those of `evaluated`. Returns the constants that it
    reads in addition to its own. If it raises `Apart`, `trained` is unchanged."""
    numbers: dict[_Key, int] = {}
    traces = _Trace(trained, constants, numbers), _Trace(evaluated, evaluation_constants, numbers)
    return _Union(*traces, evaluation_constants).made()


class _Trace:
    """The values of one trace, each with the number of its value in evaluation."""

    def __init__(self, lowered: Lowered, constants: Mapping[str, torch.Tensor], numbers: dict[_Key, int]) -> None:
        self.lowered = lowered
        self.numbers = numbers
        self.makers = {value: node for node in lowered.nodes for value in node.outputs}
        self.of: dict[str, int] = {}
        """Value -> number of its value in evaluation."""
        self.first: dict[int, str] = {}
        """Number -> first value with this number."""
        self._draws: dict[_Key, int] = {}
        for value in lowered.inputs:
            self._is(value, ("input", value))
        for value, key in (*lowered.parameters.items(), *lowered.buffers.items()):
            self._is(value, ("state", key))
        for value, key in lowered.constants.items():
            self._is(value, ("constant", _contents(constants[key])))
        for node in lowered.nodes:
            self._number(node)

    def _is(self, value: str, key: _Key) -> None:
        self._same(value, self.numbers.setdefault(key, len(self.numbers)))

    def _same(self, value: str, number: int) -> None:
        self.of[value] = number
        self.first.setdefault(number, value)

    def _number(self, node: Node) -> None:
        operands = node.args
        match node.op:
            case op if op in _IDENTITIES:
                self._same(node.outputs[0], self._operand(operands[0]))
            case op if op == BY_MODE:
                self._same(node.outputs[0], self._operand(operands[1]))
            case op if op == _TRAINED_NORM:
                x, weight, bias, mean, variance, _, momentum, eps = operands
                plain = (x, weight, bias, mean, variance, False, momentum, eps, False)
                self._is(node.outputs[0], (_NORM, self._spelt(plain), (), 0))
                for value in node.outputs[1:3]:
                    self._is(value, ("of training", self._spelt(operands), value))
                self._same(node.outputs[3], self._operand(mean))
                self._same(node.outputs[4], self._operand(variance))
            case _:
                kwargs = {**node.kwargs, **({"dropout": 0.0} if "dropout" in node.kwargs else {})}
                key: _Key = (node.op, self._spelt(operands), self._spelt(tuple(sorted(kwargs.items()))))
                if node.op == RANDOM:
                    # Each draw is a value of its own; draws of one module are distinguished by their order.
                    key = (*key, node.path)
                    self._draws[key] = self._draws.get(key, -1) + 1
                    key = (*key, self._draws[key])
                for index, value in enumerate(node.outputs):
                    self._is(value, (*key, index))

    def _operand(self, arg: Arg) -> int:
        assert isinstance(arg, Ref)
        return self.of[arg.name]

    def _spelt(self, arg: Any) -> Any:
        match arg:
            case Ref():
                return ("value", self.of[arg.name])
            case ListArg():
                return ("list", *(self._spelt(item) for item in arg.items))
            case tuple():
                return tuple(self._spelt(item) for item in arg)
            case _:
                return (type(arg).__name__, repr(arg))


class _Union:
    def __init__(self, trained: _Trace, evaluated: _Trace, constants: Mapping[str, torch.Tensor]) -> None:
        self.trained = trained
        self.evaluated = evaluated
        self.constants = constants
        self.values: dict[str, ValueSpec] = {}
        """Specs of the values added to `trained`."""
        self.state: dict[str, str] = {}
        """Value of `evaluated` for state that `trained` does not read -> its value in the union."""
        self.taken: dict[str, str] = {}
        """Value of `evaluated` -> the value of the union that stands for it."""
        self.added: dict[str, Node] = {}
        """Value -> node of evaluation that computes it."""
        self.choices: dict[tuple[str, str], Node] = {}
        """(value in training, value in evaluation) -> the node that selects one."""
        self.partner: dict[int, int] = {}
        """Node of `trained` -> number of the value of `evaluated` that it computes outside training."""
        self.pairs: list[tuple[Node, tuple[Arg, ...], dict[str, Arg]]] = []
        """Nodes of `trained` with the operands and keyword arguments that theirs must be paired with."""

    def made(self) -> dict[str, torch.Tensor]:
        lowered, wanted = self.trained.lowered, self.evaluated.lowered.outputs
        if missing := sorted(lowered.outputs.keys() - wanted.keys()):
            raise Apart(f"evaluation gives no {missing[0]!r}")
        outputs = {meaning: self.paired(value, wanted[meaning]) for meaning, value in lowered.outputs.items()}
        changed: dict[int, Node] = {}
        while self.pairs:
            node, args, kwargs = self.pairs.pop()
            changed[node.id] = msgspec.structs.replace(
                node,
                args=(*map(self._argument, node.args, args), *node.args[len(args) :]),
                kwargs={name: self._argument(arg, kwargs.get(name, arg)) for name, arg in node.kwargs.items()},
            )
        kept = (changed.get(node.id, node) for node in lowered.nodes)
        made = (*kept, *self.added.values(), *self.choices.values())
        lowered.nodes = _in_order({value: node for node in made for value in node.outputs})
        lowered.values.update(self.values)
        lowered.outputs = outputs
        return self._take_state()

    def _take_state(self) -> dict[str, torch.Tensor]:
        mine, theirs = self.trained.lowered, self.evaluated.lowered
        constants: dict[str, torch.Tensor] = {}
        for value, name in self.state.items():
            if value in theirs.constants:
                key = theirs.constants[value]
                mine.constants[name] = f"{key}{_SUFFIX}"
                constants[f"{key}{_SUFFIX}"] = self.constants[key]
            elif value in theirs.parameters:
                mine.parameters[name] = theirs.parameters[value]
            else:
                mine.buffers[name] = theirs.buffers[value]
        return constants

    # ------------------------------------------------------------------------------------------------------ pairing

    def paired(self, value: str, wanted: str) -> str:
        """Return a value that equals `value` in training and evaluation's `wanted` outside training."""
        trained, evaluated = self.trained, self.evaluated
        if trained.of[value] == evaluated.of[wanted]:
            return value
        node, other = trained.makers.get(value), evaluated.makers.get(wanted)
        while other is not None and other.op in _IDENTITIES and isinstance(other.args[0], Ref):
            wanted = other.args[0].name
            other = evaluated.makers.get(wanted)
        # If evaluation needs this value unchanged elsewhere, it can't be redefined in place.
        if node is None or trained.of[value] in evaluated.first:
            return self.choice(value, wanted)
        operands = self._operands(node, value, wanted, other)
        if operands is None or self.partner.setdefault(node.id, evaluated.of[wanted]) != evaluated.of[wanted]:
            return self.choice(value, wanted)
        if operands not in self.pairs:
            self.pairs.append(operands)
        return value

    def _operands(
        self, node: Node, value: str, wanted: str, other: Node | None
    ) -> tuple[Node, tuple[Arg, ...], dict[str, Arg]] | None:
        """Return the operands with which `node` gives `wanted` as its result `value` outside training, if any."""
        if node.op in _IDENTITIES:
            return (node, (Ref(wanted),), {}) if self._may_pair(node.args[0], Ref(wanted)) else None
        if other is None:
            return None
        args, kwargs = other.args, dict(other.kwargs)
        if node.op == _TRAINED_NORM and other.op == _NORM:
            # (x, weight, bias, mean, variance, training, momentum, eps), then a switch that depends on the device.
            same = node.args[6:8] == other.args[6:8] and all(map(self._may_pair, node.args[:5], args[:5]))
            return (node, args[:5], {}) if same and value == node.outputs[0] else None
        if node.op != other.op or len(node.outputs) != 1 or len(node.args) != len(args):
            return None
        if node.kwargs.keys() != kwargs.keys():
            return None
        named = [(arg, kwargs[name]) for name, arg in node.kwargs.items() if name != "dropout"]
        if not all(self._may_pair(one, two) for one, two in (*zip(node.args, args, strict=True), *named)):
            return None
        return node, args, {name: arg for name, arg in kwargs.items() if name != "dropout"}

    def _may_pair(self, one: Arg, two: Arg) -> bool:
        match one, two:
            case Ref(), Ref():
                if self.trained.of[one.name] == self.evaluated.of[two.name]:
                    return True
                mine = self.trained.lowered.values[one.name]
                return mine == self.evaluated.lowered.values[two.name] and mine.dtype != SYMINT
            case ListArg(), ListArg():
                return len(one.items) == len(two.items) and all(map(self._may_pair, one.items, two.items))
            case _:
                return type(one) is type(two) and one == two

    def _argument(self, one: Arg, two: Arg) -> Arg:
        match one, two:
            case Ref(), Ref():
                return Ref(self.paired(one.name, two.name))
            case ListArg(), ListArg():
                return ListArg(tuple(map(self._argument, one.items, two.items)))
            case _:
                return one

    # --------------------------------------------------------------------------------------------------- substitution

    def choice(self, value: str, wanted: str) -> str:
        """Return the result of a node that selects by the mode."""
        mine, theirs = self.trained.lowered.values[value], self.evaluated.lowered.values[wanted]
        if mine != theirs or mine.dtype == SYMINT:
            raise Apart(
                f"a value is {mine.dtype}{list(mine.shape)} in training and {theirs.dtype}{list(theirs.shape)} in "
                "evaluation"
            )
        taken = self.take(wanted)
        if (value, taken) not in self.choices:
            name = self._name(f"in_training_{len(self.choices)}", mine)
            maker = self.trained.makers.get(value) or self.evaluated.makers.get(wanted)
            path = "" if maker is None else maker.path
            self.choices[value, taken] = Node(
                id=0, op=BY_MODE, args=(Ref(value), Ref(taken)), outputs=(name,), path=path
            )
        return self.choices[value, taken].outputs[0]

    def take(self, wanted: str) -> str:
        """Return the value of the union for evaluation's `wanted`: an equal one of training, or its own computation."""
        theirs = self.evaluated
        pending = [wanted]
        while pending:
            value = pending[-1]
            stands = self.taken.get(value) or self.trained.first.get(theirs.of[value])
            node = theirs.makers.get(value)
            if stands is None and node is None:
                stands = self.state[value] = self._name(f"{value}{_SUFFIX}", theirs.lowered.values[value])
            if stands is not None:
                self.taken[value] = stands
                pending.pop()
                continue
            assert node is not None
            if missing := [name for name in reads(node) if name not in self.taken]:
                pending.extend(missing)
                continue
            for name in node.outputs:
                base, _, index = name.partition(".")
                ending = f"{_SUFFIX}.{index}" if index else _SUFFIX
                self.taken[name] = self._name(f"{base}{ending}", theirs.lowered.values[name])
            made = renamed(node, self.taken)
            self.added.update(dict.fromkeys(made.outputs, made))
        return self.taken[wanted]

    def _name(self, name: str, spec: ValueSpec) -> str:
        while name in self.trained.lowered.values or name in self.values:
            name = f"{name}_"
        self.values[name] = spec
        return name


def _in_order(makers: Mapping[str, Node]) -> list[Node]:
    """Return the nodes sorted so that each follows its operands, otherwise in the given order, and renumbered."""
    placed: list[Node] = []
    seen: set[str] = set()
    for first in makers:
        pending = [first]
        while pending:
            node = makers[pending[-1]]
            if pending[-1] in seen:
                pending.pop()
            elif missing := [name for name in reads(node) if name in makers and name not in seen]:
                pending.extend(missing)
            else:
                seen.update(node.outputs)
                placed.append(msgspec.structs.replace(node, id=len(placed)))
    return placed


def _contents(constant: torch.Tensor) -> str:
    held = constant.detach().cpu().contiguous()
    data = held.reshape(-1).view(torch.uint8).numpy().tobytes() if held.numel() else b""
    return f"{held.dtype}{list(held.shape)}{hashlib.sha256(data).hexdigest()}"
