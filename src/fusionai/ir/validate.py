"""Checks whether a graph may be executed. Decides legality and limits; repairs and executes nothing.

Received graphs go through `parse`, graphs made locally through `validate`. A graph that passes has only known
operators, arguments in the closed grammar, one producer per value, nodes in topological order, and no value that could
exceed `GraphLimits.value_bytes` at the symbols' largest sizes, whatever its declaration says.

`ir.operators` is the allow-list, `ir.shapes` bounds declared sizes and results.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass
from typing import Final

import msgspec
import numpy as np

from fusionai.ir import schema
from fusionai.ir.graph import SYMINT
from fusionai.ir.operators import OPERATORS, WORDS, check_semantic
from fusionai.ir.packed import check_packing
from fusionai.ir.shapes import SYMBOL, BinaryName, Operands, Sizes, bounds, combine, largest_elements
from fusionai.ir.weights import form_of
from fusionai.primitives.errors import GraphError
from fusionai.primitives.tensors import FLOAT_DTYPES, ITEMSIZE_BYTES


@dataclass(frozen=True, slots=True, kw_only=True)
class GraphLimits:
    """Limits on what a graph may request. A peer lowers the byte limits to what it lends to the job."""

    json_bytes: int = 16 * 2**20
    json_depth: int = 32
    nodes: int = 200_000
    values: int = 800_000
    params: int = 100_000
    blocks: int = 10_000
    interface: int = 4096
    """Limit on the number of inputs, and on the number of outputs."""
    symbols: int = 16
    symbol_size: int = 2**31
    rank: int = 16
    args: int = 32
    results: int = 4096
    list_items: int = 4096
    list_depth: int = 3
    name_characters: int = 512
    aliases: int = 64
    init_ops: int = 8
    value_bytes: int = 2**42
    """Limit on any single value at the symbols' largest sizes."""
    parameter_bytes: int = 2**44
    """Limit on all parameters and buffers together."""
    constant_bytes: int = 2**32
    """Limit on all constants together, because their bytes travel with the graph."""

    @classmethod
    def for_memory(cls, lent_bytes: int) -> GraphLimits:
        """Return the limits on a machine that lends this much memory. Values and parameters may be declared larger than
        they are ever held: a pass computes some rows of a value, and a parameter may be kept with fewer bits."""
        usual = cls()
        return cls(
            json_bytes=max(2**20, min(usual.json_bytes, lent_bytes // JSON_EXPANSION)),
            value_bytes=min(usual.value_bytes, DECLARED_BEYOND * lent_bytes),
            parameter_bytes=min(usual.parameter_bytes, DECLARED_BEYOND * lent_bytes),
            constant_bytes=min(usual.constant_bytes, lent_bytes),
        )


JSON_EXPANSION: Final = 32
"""Bytes that a graph takes in memory for a byte of its JSON, at most; chosen."""
DECLARED_BEYOND: Final = 64
"""How many times what is lent a graph may declare of values or parameters; chosen."""
DEFAULT_LIMITS: Final = GraphLimits()


_STRING: Final = re.compile(rb'"(?:[^"\\]|\\.)*"', re.DOTALL)
_INIT_ARITY: Final = {
    "fill": 1,
    "normal": 2,
    "uniform": 2,
    "mul": 1,
    "add": 1,
    "erfinv": 0,
    "clamp": 2,
    "fill_row": 2,
    "shared": 1,
}
_INIT_STARTS: Final = frozenset({"fill", "normal", "uniform"})
_MAX_INTEGER: Final = 2**63
_SIZE_OPERATORS: Final[dict[str, tuple[BinaryName, int]]] = {
    "sym.add": ("+", 2),
    "sym.sub": ("-", 2),
    "sym.mul": ("*", 2),
    "sym.floordiv": ("//", 2),
    "sym.mod": ("%", 2),
    "sym.max": ("max", 2),
    "sym.min": ("min", 2),
    "sym.neg": ("-", 1),
}


class _Version(msgspec.Struct, frozen=True):
    ir: int


def parse(data: bytes | memoryview, limits: GraphLimits = DEFAULT_LIMITS) -> schema.Graph:
    """Decode and validate untrusted JSON. Raises `GraphError` for anything but a legal graph within the limits."""
    size = len(data) if isinstance(data, bytes) else data.nbytes
    if size > limits.json_bytes:
        raise GraphError(f"graph of {size} bytes is above the limit of {limits.json_bytes}.")
    _check_depth(data, limits)
    try:
        version = msgspec.json.decode(data, type=_Version).ir
        _check_version(version)
        graph = schema.decode(data)
    except (msgspec.MsgspecError, UnicodeError, RecursionError, ValueError, OverflowError) as error:
        raise GraphError(f"not a graph: {error}.") from error
    return validate(graph, limits)


def validate(graph: schema.Graph, limits: GraphLimits = DEFAULT_LIMITS) -> schema.Graph:
    """Return the graph unchanged. Raises `GraphError`, naming the entity, if it is not legal."""
    try:
        _Check(graph, limits).run()
    except (RecursionError, OverflowError, UnicodeError) as error:
        raise GraphError(f"graph exceeds the limits: {error}.") from error
    return graph


def _check_version(version: int) -> None:
    if version != schema.IR_VERSION:
        raise GraphError(
            f"graph has IR version {version}, this build reads version {schema.IR_VERSION}.",
            hint="Run the same release on both sides.",
        )


def _check_depth(data: bytes | memoryview, limits: GraphLimits) -> None:
    """Check the bracket depth outside strings before a decoder recurses into the data."""
    structure = np.frombuffer(_STRING.sub(b"", bytes(data)), dtype=np.uint8)
    opening = (structure == ord("[")) | (structure == ord("{"))
    closing = (structure == ord("]")) | (structure == ord("}"))
    depth = int(np.cumsum(opening.astype(np.int8) - closing.astype(np.int8), dtype=np.int32).max(initial=0))
    if depth > limits.json_depth:
        raise GraphError(f"graph nests {depth} deep, the limit is {limits.json_depth}.")


class _Check:
    """One pass over a graph, which records what is known about each value when it reaches the value's producer."""

    def __init__(self, graph: schema.Graph, limits: GraphLimits) -> None:
        self.graph = graph
        self.limits = limits
        self.sizes: dict[str, Sizes] = {}
        """Largest sizes of each tensor that has been declared."""
        self.integers: dict[str, tuple[int, int]] = {}
        """Range of each symbolic integer made so far."""
        self.made: set[str] = set()

    def run(self) -> None:
        _check_version(self.graph.ir)
        self._counts()
        self._symbols()
        for name, spec in self.graph.values.items():
            self._value(name, spec)
        self._params()
        self._inputs()
        self._nodes()
        self._outputs()
        self._state_writes()

    def _counts(self) -> None:
        graph, limits = self.graph, self.limits
        for what, count, limit in (
            ("nodes", len(graph.nodes), limits.nodes),
            ("values", len(graph.values), limits.values),
            ("parameters", len(graph.params), limits.params),
            ("symbols", len(graph.symbols), limits.symbols),
            ("inputs", len(graph.inputs), limits.interface),
            ("outputs", len(graph.outputs), limits.interface),
            ("state writes", len(graph.state_writes), limits.params),
        ):
            if count > limit:
                raise GraphError(f"graph has {count} {what}, the limit is {limit}.")
        self._name(graph.name, "graph name", empty=True)

    def _symbols(self) -> None:
        for name, (smallest, largest) in self.graph.symbols.items():
            if SYMBOL.fullmatch(name) is None or name in ("min", "max"):
                raise GraphError(f"expected a symbol of letters, digits and _, got {name[:64]!r}.")
            if not 1 <= smallest <= largest <= self.limits.symbol_size:
                raise GraphError(
                    f"symbol {name!r}: expected 1 <= smallest <= largest <= {self.limits.symbol_size},"
                    f" got {smallest} and {largest}."
                )

    def _value(self, name: str, spec: schema.ValueSpec) -> None:
        self._name(name, "value name")
        if len(spec.shape) > self.limits.rank:
            raise GraphError(f"value {name!r} has rank {len(spec.shape)}, the limit is {self.limits.rank}.")
        if spec.dtype == SYMINT:
            if spec.shape:
                raise GraphError(f"value {name!r} is a symbolic integer, its shape must be empty.")
            return
        if spec.dtype not in ITEMSIZE_BYTES:
            raise GraphError(
                f"value {name!r}: expected a dtype of {', '.join(ITEMSIZE_BYTES)}, got {spec.dtype[:32]!r}."
            )
        sizes: list[int] = []
        for dim in spec.shape:
            smallest, largest = bounds(dim, self.graph.symbols)
            if largest < 0 or (smallest < 0 and isinstance(dim, int)):
                raise GraphError(f"value {name!r} has the negative size {dim}.")
            sizes.append(largest)
        self.sizes[name] = tuple(sizes)
        self._bytes(f"value {name!r}", math.prod(sizes), spec.dtype)

    def _bytes(self, what: str, elements: int, dtype: str) -> None:
        needed_bytes = elements * ITEMSIZE_BYTES[dtype]
        if needed_bytes > self.limits.value_bytes:
            raise GraphError(
                f"{what} may take {needed_bytes} bytes at the largest sizes, the limit is {self.limits.value_bytes}."
            )

    def _params(self) -> None:
        keys: set[str] = set()
        total_bytes = constant_bytes = 0
        for value, spec in self.graph.params.items():
            declared = self.graph.values.get(value)
            if declared is None or declared.shape != spec.shape or declared.dtype != spec.dtype:
                got = "nothing" if declared is None else f"{declared.dtype[:32]} {list(declared.shape)}"
                raise GraphError(
                    f"parameter {spec.key[:64]!r} and value {value[:64]!r} disagree: the value must have the"
                    f" parameter's shape and dtype, it is declared as {got}."
                )
            self._param(spec)
            for key in (spec.key, *spec.aliases):
                if key in keys:
                    raise GraphError(f"parameter key {key!r} appears twice.")
                keys.add(key)
            size_bytes = math.prod(spec.shape) * ITEMSIZE_BYTES[spec.dtype]
            total_bytes += size_bytes
            constant_bytes += size_bytes if spec.kind == "constant" else 0
            self.made.add(value)
        if total_bytes > self.limits.parameter_bytes:
            raise GraphError(f"parameters take {total_bytes} bytes, the limit is {self.limits.parameter_bytes}.")
        if constant_bytes > self.limits.constant_bytes:
            raise GraphError(f"constants take {constant_bytes} bytes, the limit is {self.limits.constant_bytes}.")

    def _param(self, spec: schema.ParamSpec) -> None:
        if len(spec.aliases) > self.limits.aliases:
            raise GraphError(
                f"parameter {spec.key[:64]!r} has {len(spec.aliases)} aliases, the limit is {self.limits.aliases}."
            )
        for key in (spec.key, *spec.aliases):
            self._name(key, "parameter key")
            # Keys become names of state entries and of files in checkpoints.
            if "/" in key or "\\" in key or ".." in key or key.startswith("."):
                raise GraphError(f"parameter key {key!r} must not look like a path.")
        if spec.trainable and (spec.kind != "parameter" or spec.dtype not in FLOAT_DTYPES):
            raise GraphError(
                f"{spec.kind} {spec.key!r} of {spec.dtype} can't be trainable, only parameters of a floating dtype can."
            )
        if spec.stored != form_of(spec, spec.stored):
            what = f"{spec.kind} {spec.key!r} ({spec.dtype} {list(spec.shape)})"
            raise GraphError(f"{what} can't be kept as {spec.stored}; that is for large frozen float32 matrices.")
        if spec.packed:
            self._packed(spec)
        if not 0 <= spec.order < _MAX_INTEGER:
            raise GraphError(f"parameter {spec.key!r}: expected an order from 0 to 2**63, got {spec.order}.")
        if spec.init is not None:
            self._init(spec, spec.init)

    def _packed(self, spec: schema.ParamSpec) -> None:
        for packing in spec.packed:
            check_packing(packing)
        numbers = sum(math.prod(packing.shape) for packing in spec.packed)
        if spec.trainable or spec.stored or spec.dtype != "float32" or numbers != math.prod(spec.shape):
            what = f"{spec.kind} {spec.key!r} ({spec.dtype} {list(spec.shape)})"
            raise GraphError(f"{what} can't come packed as {numbers} numbers; that is for frozen float32 weights.")

    def _init(self, spec: schema.ParamSpec, steps: tuple[schema.InitOp, ...]) -> None:
        begun = steps[1:] if steps and steps[0].op == "shared" else steps
        if len(steps) > self.limits.init_ops or not begun or begun[0].op not in _INIT_STARTS:
            raise GraphError(
                f"initialisation of {spec.key!r}: expected 1 to {self.limits.init_ops} steps starting with"
                f" {', '.join(sorted(_INIT_STARTS))}."
            )
        for step in steps:
            if len(step.args) != _INIT_ARITY[step.op] or not all(math.isfinite(arg) for arg in step.args):
                raise GraphError(
                    f"initialisation of {spec.key!r}: {step.op} takes {_INIT_ARITY[step.op]} finite numbers,"
                    f" got {len(step.args)}."
                )
            match step.op, step.args:
                case ("uniform" | "clamp", (low, high)) if low > high:
                    raise GraphError(f"initialisation of {spec.key!r}: {step.op} from {low} to {high} is empty.")
                case ("normal", (_, std)) if std < 0:
                    raise GraphError(f"initialisation of {spec.key!r}: negative standard deviation {std}.")
                case ("shared", (number,)) if step is not steps[0] or number != int(number) or not 0 <= number < 2**53:
                    raise GraphError(f"initialisation of {spec.key!r}: shared draws need a whole number, first of all.")
                case ("fill_row", (row, _)) if not spec.shape or row != int(row) or not 0 <= row < spec.shape[0]:
                    raise GraphError(f"initialisation of {spec.key!r}: row {row} is not in shape {list(spec.shape)}.")
                case _:
                    pass

    def _inputs(self) -> None:
        for name in self.graph.inputs:
            spec = self.graph.values.get(name)
            if spec is None or spec.dtype == SYMINT:
                raise GraphError(f"input {name[:64]!r} must be a declared tensor.")
            self._make(name, "input")

    def _nodes(self) -> None:
        ids: set[int] = set()
        for node in self.graph.nodes:
            if node.id in ids or not 0 <= node.id < 2**31:
                raise GraphError(f"expected unique node ids from 0 to 2**31, got {node.id}.")
            ids.add(node.id)
            self._node(node)
        unmade = set(self.graph.values) - self.made
        if unmade:
            raise GraphError(f"value {min(unmade)!r} has no producer.")

    def _node(self, node: schema.Node) -> None:
        operator = OPERATORS.get(node.op)
        if operator is None:
            raise GraphError(
                f"node {node.id}: operator {node.op[:64]!r} is not allowed.",
                hint="`fusion check MODEL` lists what a model needs and what is unsupported.",
            )
        if len(node.args) + len(node.kwargs) > self.limits.args:
            count = len(node.args) + len(node.kwargs)
            raise GraphError(f"node {node.id} ({node.op}) has {count} arguments, the limit is {self.limits.args}.")
        if not 0 <= node.block < self.limits.blocks:
            raise GraphError(f"node {node.id} ({node.op}) is in block {node.block}, the limit is {self.limits.blocks}.")
        self._name(node.path, "module path", empty=True)
        for arg in node.args:
            self._arg(node, arg, 0)
        for name, arg in node.kwargs.items():
            self._name(name, "argument name")
            self._arg(node, arg, 0)
        self._results(node)
        if operator.category == "size":
            self._size_node(node)
            return
        if node.op.startswith("fusion."):
            check_semantic(node, self.sizes)
        most = largest_elements(Operands(node, self.sizes, self.integers))
        for name in node.outputs:
            self._bytes(f"result {name!r} of node {node.id} ({node.op})", most, self.graph.values[name].dtype)

    def _results(self, node: schema.Node) -> None:
        operator = OPERATORS[node.op]
        count = len(node.outputs)
        if not 1 <= count <= self.limits.results or (operator.results is not None and count != operator.results):
            wanted = operator.results or f"1 to {self.limits.results}"
            raise GraphError(f"node {node.id} ({node.op}) must list {wanted} results, it lists {count}.")
        for name in node.outputs:
            spec = self.graph.values.get(name)
            if spec is None:
                raise GraphError(f"node {node.id} ({node.op}) makes {name[:64]!r}, which is not declared.")
            if (spec.dtype == SYMINT) != (operator.category == "size"):
                wanted = SYMINT if operator.category == "size" else "a tensor"
                raise GraphError(f"node {node.id} ({node.op}): {name!r} must be {wanted}, it must not be {spec.dtype}.")
            self._make(name, f"node {node.id}")

    def _make(self, name: str, maker: str) -> None:
        if name in self.made:
            raise GraphError(f"value {name!r} has two producers, the second is {maker}.")
        self.made.add(name)

    def _arg(self, node: schema.Node, arg: schema.Arg, depth: int) -> None:
        match arg:
            case None | bool() | schema.DeviceArg() | schema.MemoryFormatArg() | schema.FloatArg():
                pass
            case int():
                if not -_MAX_INTEGER <= arg < _MAX_INTEGER:
                    raise GraphError(f"node {node.id} ({node.op}) has a whole number beyond 64 bits.")
            case float():
                if not math.isfinite(arg):
                    raise GraphError(f"node {node.id} ({node.op}): {arg} must be spelled as a float argument.")
            case str():
                if arg not in WORDS:
                    raise GraphError(f"node {node.id} ({node.op}): {arg[:32]!r} is not an allowed string argument.")
            case schema.DTypeArg(name):
                if name not in ITEMSIZE_BYTES:
                    raise GraphError(f"node {node.id} ({node.op}): unknown dtype {name[:32]!r}.")
            case schema.Ref(name):
                if name not in self.made:
                    raise GraphError(f"node {node.id} ({node.op}) reads {name[:64]!r}, which nothing before it makes.")
            case schema.ListArg(items):
                if depth >= self.limits.list_depth or len(items) > self.limits.list_items:
                    raise GraphError(
                        f"node {node.id} ({node.op}) has a list that is too deep or too long: {len(items)} items at"
                        f" depth {depth}, the limits are {self.limits.list_items} and {self.limits.list_depth - 1}."
                    )
                for item in items:
                    self._arg(node, item, depth + 1)

    def _size_node(self, node: schema.Node) -> None:
        if node.kwargs:
            raise GraphError(f"node {node.id} ({node.op}) takes no named arguments.")
        (name,) = node.outputs
        if node.op == "aten.sym_size.int":
            match node.args:
                case (schema.Ref(tensor), int(dim)) if tensor in self.sizes and not isinstance(dim, bool):
                    shape = self.graph.values[tensor].shape
                    if -len(shape) <= dim < len(shape):
                        self.integers[name] = bounds(shape[dim], self.graph.symbols)
                        return
                case _:
                    pass
            raise GraphError(f"node {node.id} ({node.op}): expected a tensor and one of its dimensions as arguments.")
        op, arity = _SIZE_OPERATORS[node.op]
        if len(node.args) != arity:
            raise GraphError(f"node {node.id} ({node.op}) takes {arity} arguments, got {len(node.args)}.")
        ranges = [self._integer(node, arg) for arg in node.args]
        left, right = ranges if arity == 2 else ((0, 0), ranges[0])
        made = combine(op, left, right, f"node {node.id} ({node.op})")
        if max(abs(made[0]), abs(made[1])) >= _MAX_INTEGER:
            raise GraphError(f"node {node.id} ({node.op}) reaches numbers beyond 64 bits.")
        self.integers[name] = made

    def _integer(self, node: schema.Node, arg: schema.Arg) -> tuple[int, int]:
        if isinstance(arg, int) and not isinstance(arg, bool):
            return arg, arg
        if isinstance(arg, schema.Ref) and arg.name in self.integers:
            return self.integers[arg.name]
        raise GraphError(f"node {node.id} ({node.op}) takes whole numbers and sizes only.")

    def _outputs(self) -> None:
        fixed = {*self.graph.inputs, *self.graph.params}
        for meaning, name in self.graph.outputs.items():
            self._name(meaning, "output meaning")
            if name not in self.sizes or name in fixed:
                raise GraphError(f"output {meaning!r} must be a tensor some node makes, got {name[:64]!r}.")

    def _state_writes(self) -> None:
        buffers = {spec.key: spec for spec in self.graph.params.values() if spec.kind == "buffer"}
        fixed = {*self.graph.inputs, *self.graph.params}
        seen: set[str] = set()
        for name, key in self.graph.state_writes.items():
            buffer = buffers.get(key)
            if buffer is None or key in seen:
                raise GraphError(f"state write of {name[:64]!r} must go to a buffer of its own, got {key[:64]!r}.")
            seen.add(key)
            spec = self.graph.values.get(name)
            if spec is None or name in fixed or spec.shape != buffer.shape or spec.dtype != buffer.dtype:
                raise GraphError(
                    f"state write to {key!r}: expected a value of {buffer.dtype} {list(buffer.shape)} that a node"
                    f" makes, got {name[:64]!r}."
                )

    def _name(self, name: str, what: str, *, empty: bool = False) -> None:
        if len(name) > self.limits.name_characters or not name.isprintable() or not (name or empty):
            raise GraphError(
                f"expected a {what} of 1 to {self.limits.name_characters} printable characters, got {name[:64]!r}."
            )
