"""Compiles a graph into a flat list of calls over registers. Fixes the order of calls and when a value is dropped.

Compiled once per set of wanted outputs: nodes that no wanted output needs are left out. Every value, constant argument
and parameter has a register; one instruction is one call. A value is dropped after its last use, so that only
autograd's references keep it alive.

Frozen weights in fewer bits are unpacked to float32 by each reader, and kept packed for backward. The float32 values
live only while the operator that reads them runs, and again during its part of backward. A lookup unpacks only the
requested rows. Neighbours: `operators` gives the calls, `ir.weights` defines packed forms, `program` runs the result,
`compiled_stage` runs it without memory.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from functools import partial
from math import prod
from operator import itemgetter
from types import MappingProxyType
from typing import Any, Final

import torch
import torch.nn.functional as F
from torch import Tensor

from fusionai.backends import binding
from fusionai.backends.binding import IN_FLOAT32, OPERATOR_FAILURES, first_line
from fusionai.backends.torch.host import DTYPES
from fusionai.backends.torch.operators import CONTEXTUAL, PLAIN, TorchContext, checked, deferrable_linear
from fusionai.ir.graph import needed_nodes, reads, references
from fusionai.ir.operators import IN_BFLOAT16, OPERATORS
from fusionai.ir.schema import (
    Arg,
    DeviceArg,
    DTypeArg,
    FloatArg,
    Graph,
    ListArg,
    MemoryFormatArg,
    Node,
    ParamSpec,
    Ref,
    Stored,
)
from fusionai.ir.weights import group_of
from fusionai.primitives.errors import ExecutionError, FusionError

EMBEDDING: Final = "aten.embedding.default"


class StoredWeight:
    """A packed weight. `data`: flat uint8 in the layout of `ir.weights`. `shape`: shape of the float32 tensor."""

    def __init__(self, data: Tensor, spec: ParamSpec) -> None:
        self.data = data
        self.shape = tuple(spec.shape)
        self._form: Stored = spec.stored
        self._columns = spec.shape[-1]
        self._rows = prod(spec.shape[:-1])

    def open(self, dtype: torch.dtype = torch.float32) -> Tensor:
        """Return the whole weight, unpacked in float32 and converted to `dtype`."""
        return self._floats(None).view(self.shape).to(dtype)

    def rows(self, numbers: Tensor) -> Tensor:
        """Return these rows of a matrix: float32 [*numbers.shape, columns]."""
        return self._floats(numbers.reshape(-1)).view(*numbers.shape, self._columns)

    def _floats(self, rows: Tensor | None) -> Tensor:
        count, columns = self._rows * self._columns, self._columns

        def taken(part: Tensor) -> Tensor:
            return part if rows is None else part.index_select(0, rows)

        match self._form:
            case "int8":
                scales = taken(self.data[count:].view(torch.bfloat16).view(self._rows, 1))
                return taken(self.data[:count].view(torch.int8).view(self._rows, columns)).float() * scales.float()
            case "int4":
                group = group_of(self.shape)
                assert group is not None, "a graph is checked before it is loaded"
                codes = taken(self.data[: count // 2].view(self._rows, columns // 2))
                levels = torch.stack([codes & 15, codes >> 4], dim=-1).view(-1, group).float()
                pairs = taken(self.data[count // 2 :].view(torch.bfloat16).view(self._rows, -1)).reshape(-1, 2).float()
                return (levels.sub_(8).mul_(pairs[:, :1]).add_(pairs[:, 1:])).view(-1, columns)
            case _:
                return taken(self.data.view(torch.bfloat16).view(self._rows, columns)).float()


@dataclass(frozen=True, slots=True)
class PackedReading:
    """How one stage reads packed weights. `values`: their value names. `again`: backward recomputes activations and
    unpacks weights with them."""

    values: Collection[str] = ()
    again: bool = False

    def of(self, node: Node, compute: Callable[..., Any], *, half: bool) -> Callable[..., Any]:
        """Return `compute` wrapped so that it gets unpacked tensors for packed weights. `half`: it computes in
        bfloat16."""
        if not any(name in self.values for name in reads(node)):
            return compute
        if node.op == EMBEDDING:
            return checked(node.op, _looked_up)
        dtype = torch.bfloat16 if half else torch.float32
        return lambda *args, **options: _opened(compute, args, options, dtype, again=self.again)


AS_THEY_ARE: Final = PackedReading()
"""No packed weights."""


def _looked_up(table: StoredWeight | Tensor, indices: Tensor, *_rest: Any, **_named: Any) -> Tensor:
    """Look up rows. A lookup's options concern only its gradient, and a frozen table has none. When sizes are measured,
    the table is a plain tensor."""
    return table.rows(indices) if isinstance(table, StoredWeight) else F.embedding(indices, table)


def _opened(
    compute: Callable[..., Any], args: tuple[Any, ...], options: dict[str, Any], dtype: torch.dtype, *, again: bool
) -> Any:
    weights: dict[int, StoredWeight] = {}
    """Address of the unpacked storage -> packed weight."""

    def opened(value: Any) -> Any:
        match value:
            case StoredWeight():
                made = value.open(dtype)
                weights[made.untyped_storage()._cdata] = value
                return made
            case list():
                return [opened(item) for item in value]
            case _:
                return value

    args = tuple(map(opened, args))
    options = {name: opened(value) for name, value in options.items()}
    if not weights or again or not torch.is_grad_enabled():
        return compute(*args, **options)

    def pack(saved: Tensor) -> Callable[[], Tensor]:
        weight = weights.get(saved.untyped_storage()._cdata)
        if weight is None:
            kept = saved.detach()
            return lambda: kept
        size, stride, offset = saved.size(), saved.stride(), saved.storage_offset()
        return lambda: weight.open(dtype).as_strided(size, stride, offset)

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda made: made()):
        return compute(*args, **options)


Registers = list[Any]
Instruction = Callable[[Registers], None]

_TAKE_DEVICE: Final = frozenset(
    name for name in OPERATORS if name.split(".")[1] in ("arange", "full", "zeros", "ones", "empty", "scalar_tensor")
)
"""Operators that make a tensor from numbers alone. Without a device argument they would always use the host."""
_MEMORY_FORMATS: Final = {
    "contiguous": torch.contiguous_format,
    "channels_last": torch.channels_last,
    "preserve": torch.preserve_format,
}


@dataclass(frozen=True, slots=True)
class Step:
    """One node: its call, and the registers that no later step reads."""

    node: Node
    run: Instruction
    dead: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Interpreter:
    """A compiled graph. `inputs` and `params`: value name -> register, for the values that the wanted outputs need.
    `outputs`: meaning -> register. `writes`: buffer key -> register of its new value."""

    steps: tuple[Step, ...]
    template: Registers
    values: dict[str, int]
    inputs: dict[str, int]
    params: dict[str, int]
    outputs: dict[str, int]
    writes: dict[str, int]

    def run(
        self, context: TorchContext, inputs: Mapping[str, Any], params: Mapping[str, Any]
    ) -> tuple[dict[str, Any], dict[str, Tensor]]:
        """Return (outputs by meaning, new buffer values by key). `inputs` and `params` are keyed by value name and may
        contain more than needed. A parameter is a tensor or whatever the kernels of its readers accept. Raises
        `ExecutionError` naming the node that failed."""
        registers = self.start(context, inputs, params)
        self.advance(registers, 0, len(self.steps))
        return self.results(registers)

    def advance(self, registers: Registers, start: int, stop: int) -> None:
        """Run steps [start, stop). Raises `ExecutionError` naming the node that failed; that memory ran out is left to
        the caller, who may try again."""
        node: Node | None = None
        try:
            for step in self.steps[start:stop]:
                node = step.node
                step.run(registers)
                for register in step.dead:
                    registers[register] = None
        except torch.OutOfMemoryError:
            raise
        except FusionError as error:
            raise ExecutionError(f"{describe(node)}: {error.message}", hint=error.hint) from error
        except OPERATOR_FAILURES as error:
            raise ExecutionError(f"{describe(node)} failed: {first_line(error)}") from error

    def start(self, context: TorchContext, inputs: Mapping[str, Any], params: Mapping[str, Any]) -> Registers:
        registers = self.blank(context)
        for name, register in self.params.items():
            registers[register] = params[name]
        for name, register in self.inputs.items():
            registers[register] = inputs[name]
        return registers

    def blank(self, context: TorchContext) -> Registers:
        """Return registers with the constants set, but no inputs and parameters."""
        registers = self.template.copy()
        registers[_CONTEXT] = context
        return registers

    def results(self, registers: Registers) -> tuple[dict[str, Any], dict[str, Tensor]]:
        outputs = {meaning: registers[register] for meaning, register in self.outputs.items()}
        return outputs, {key: registers[register] for key, register in self.writes.items()}


_CONTEXT: Final = 0


def compile_graph(
    graph: Graph,
    wanted: Collection[str],
    *,
    with_state_writes: bool,
    device: torch.device,
    mixed: bool = False,
    deferred: Collection[int] = (),
    kernels: Mapping[int, Callable[..., Any]] = MappingProxyType({}),
    stored: PackedReading = AS_THEY_ARE,
    halve: Callable[[Callable[..., Any]], Callable[..., Any]] | None = None,
) -> Interpreter:
    """Compile what `wanted` (output meanings) needs, and state writes if `with_state_writes`.

    `device`: the device that `DeviceArg` stands for. `mixed`: products may be in bfloat16, reductions convert their
    operands to float32. `deferred`: linear layers (node ids) that may defer their weight gradient. `kernels`: node id
    -> function to call, with the node's own arguments, instead of its operator. `stored`: parameters that are given as
    `StoredWeight`. `halve`: wraps products, where autocast knows no device.

    Raises `ExecutionError` on an operator this backend lacks.
    """
    outputs = {meaning: value for meaning, value in graph.outputs.items() if meaning in wanted}
    writes = dict(graph.state_writes) if with_state_writes else {}
    nodes = needed_nodes(graph, {*outputs.values(), *writes})
    builder = _Builder(device, mixed, deferred, kernels, stored, halve)
    calls = [(node, builder.instruction(node)) for node in nodes]
    kept = {builder.value(name) for name in (*outputs.values(), *writes)}
    last_use: dict[int, int] = {}
    for position, node in enumerate(nodes):
        for name in (*node.outputs, *reads(node)):
            last_use[builder.value(name)] = position
    dead: list[list[int]] = [[] for _ in nodes]
    for register, position in last_use.items():
        if register not in kept:
            dead[position].append(register)
    used = builder.values
    return Interpreter(
        steps=tuple(Step(node, run, tuple(dead[position])) for position, (node, run) in enumerate(calls)),
        template=builder.template,
        values=used,
        inputs={name: used[name] for name in graph.inputs if name in used},
        params={name: used[name] for name in graph.params if name in used},
        outputs={meaning: used[value] for meaning, value in outputs.items()},
        writes={key: used[value] for value, key in writes.items()},
    )


def describe(node: Node | None) -> str:
    """Return how an error names a node; None stands for the stage."""
    return "the stage" if node is None else binding.describe(node)


@dataclass
class _Builder:
    """Allocates registers and builds instructions. See `compile_graph` for what it is given."""

    device: torch.device
    mixed: bool
    deferred: Collection[int]
    kernels: Mapping[int, Callable[..., Any]]
    stored: PackedReading
    halve: Callable[[Callable[..., Any]], Callable[..., Any]] | None
    template: Registers = field(default_factory=lambda: [None])
    values: dict[str, int] = field(default_factory=dict[str, int])

    def value(self, name: str) -> int:
        register = self.values.get(name)
        if register is None:
            register = self.values[name] = self._register(None)
        return register

    def instruction(self, node: Node) -> Instruction:
        compute = PLAIN.get(node.op)
        leading: list[int] = []
        if node.id in self.deferred:
            compute, leading = _linear, [_CONTEXT]
        if compute is None:
            compute = CONTEXTUAL.get(node.op)
            leading = [_CONTEXT, self._register(node.id)]
        if compute is None:
            raise ExecutionError(f"{describe(node)}: this backend has no operator {node.op}.")
        own = self.kernels.get(node.id)
        if own is None:
            compute = checked(node.op, compute, leading=len(leading))
        else:
            # A kernel for packed weights has checked them when it packed them; one for attention checks no operand.
            compute, leading = checked(node.op, own) if node.op == "fusion.attention" else own, []
        if self.mixed and OPERATORS[node.op].category in IN_FLOAT32:
            compute = _in_float32(compute)
        if self.halve is not None and OPERATORS[node.op].category in IN_BFLOAT16:
            compute = self.halve(compute)
        compute = self.stored.of(node, compute, half=self.mixed and OPERATORS[node.op].category in IN_BFLOAT16)
        lists: list[tuple[int, Callable[[Registers], list[Any]]]] = []
        positional = [*leading, *(self._operand(arg, lists) for arg in node.args)]
        fixed = {name: self._constant(arg) for name, arg in node.kwargs.items() if not any(references(arg))}
        if fixed:
            compute = partial(compute, **fixed)
        named = [(name, self._operand(arg, lists)) for name, arg in node.kwargs.items() if name not in fixed]
        if node.op in _TAKE_DEVICE and "device" not in node.kwargs:
            named.append(("device", self._register(self.device)))
        targets = [self.value(name) for name in node.outputs]
        if OPERATORS[node.op].results == 1 and len(targets) == 1 and positional and not named and not lists:
            return _direct(compute, positional, targets[0])
        return _store(_call(compute, positional, named), targets, lists)

    def _operand(self, arg: Arg, lists: list[tuple[int, Callable[[Registers], list[Any]]]]) -> int:
        if isinstance(arg, Ref):
            return self.value(arg.name)
        if isinstance(arg, ListArg) and any(isinstance(item, Ref | ListArg) for item in arg.items):
            # A list that contains values is built anew for each run, into its own register.
            register = self._register(None)
            getters = [self._operand(item, lists) for item in arg.items]
            gather = itemgetter(*getters, getters[0])
            lists.append((register, lambda registers: list(gather(registers)[:-1])))
            return register
        return self._register(self._constant(arg))

    def _constant(self, arg: Arg) -> Any:
        match arg:
            case DTypeArg(name):
                return DTYPES[name]
            case DeviceArg():
                return self.device
            case MemoryFormatArg(name):
                return _MEMORY_FORMATS[name]
            case FloatArg(name):
                return float(name)
            case ListArg(items):
                return [self._constant(item) for item in items]
            case _:
                return arg

    def _register(self, constant: Any) -> int:
        self.template.append(constant)
        return len(self.template) - 1


def _linear(context: TorchContext, x: Tensor, weight: Tensor) -> Tensor:
    return deferrable_linear(context.left, x, weight)


def _direct(compute: Callable[..., Any], positional: list[int], target: int) -> Instruction:
    """Return an instruction for the most frequent case, with as little Python overhead as possible."""
    if len(positional) == 1:
        only = positional[0]

        def unary(registers: Registers) -> None:
            registers[target] = compute(registers[only])

        return unary
    if len(positional) == 2:
        left, right = positional

        def binary(registers: Registers) -> None:
            registers[target] = compute(registers[left], registers[right])

        return binary
    gather = itemgetter(*positional)

    def several(registers: Registers) -> None:
        registers[target] = compute(*gather(registers))

    return several


def _call(
    compute: Callable[..., Any], positional: list[int], named: list[tuple[str, int]]
) -> Callable[[Registers], Any]:
    if named:
        names = tuple(named)

        def call_named(registers: Registers) -> Any:
            return compute(
                *[registers[register] for register in positional],
                **{name: registers[register] for name, register in names},
            )

        return call_named
    if not positional:
        return lambda _: compute()
    if len(positional) == 1:
        only = positional[0]
        return lambda registers: compute(registers[only])
    gather = itemgetter(*positional)
    return lambda registers: compute(*gather(registers))


def _store(
    call: Callable[[Registers], Any], targets: list[int], lists: list[tuple[int, Callable[[Registers], list[Any]]]]
) -> Instruction:
    if len(targets) == 1:
        target = targets[0]

        def store(registers: Registers) -> None:
            result = call(registers)
            # A split into one piece still returns a list.
            registers[target] = result[0] if isinstance(result, list | tuple) else result
    else:

        def store(registers: Registers) -> None:
            for target, result in zip(targets, call(registers), strict=True):
                registers[target] = result

    if not lists:
        return store

    def build_lists(registers: Registers) -> None:
        for register, build in lists:
            registers[register] = build(registers)
        store(registers)
        for register, _ in lists:
            registers[register] = None

    return build_lists


def _in_float32(compute: Callable[..., Any]) -> Callable[..., Any]:
    def widen(value: Any) -> Any:
        return value.float() if isinstance(value, Tensor) and value.dtype == torch.bfloat16 else value

    return lambda *args, **kwargs: compute(
        *[widen(value) for value in args], **{name: widen(value) for name, value in kwargs.items()}
    )
