"""Sizes of values: expressions over a graph's symbols, and upper bounds on what an operator may return.

    expression := term (("+" | "-") term)*
    term       := factor (("*" | "//" | "%") factor)*
    factor     := "-" factor | number | symbol | ("min" | "max") "(" expression "," expression ")" | "(" expression ")"

`//` and `%` round towards minus infinity, as in Python. Never uses eval, never simplifies.

The shape that a graph declares for a result is never trusted: `largest_elements` bounds it from operands and arguments
at the symbols' largest sizes, deliberately coarsely (a strided convolution as if its stride were 1). `ir.operators`
names each operator's rule; `ir.validate` compares with its limits."""

from __future__ import annotations

import operator
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import zip_longest
from math import prod
from typing import Final, Literal

from fusionai.ir.graph import references
from fusionai.ir.operators import OPERATORS
from fusionai.ir.schema import Arg, Dim, ListArg, Node, Ref
from fusionai.primitives.errors import GraphError

MAX_LENGTH: Final = 256
MAX_DEPTH: Final = 16
MAX_NUMBER: Final = 2**48
"""Upper limit on literals and intermediate results: no real size is larger."""

_TOKEN: Final = re.compile(r"\s*(?:(\d{1,15})|([A-Za-z_][A-Za-z0-9_]{0,31})|(//|[-+*%(),]))")
SYMBOL: Final = re.compile(r"[A-Za-z_][A-Za-z0-9_]{0,31}")

BinaryName = Literal["+", "-", "*", "//", "%", "min", "max"]
_OF_TERMS: Final[Mapping[str | None, BinaryName]] = {"+": "+", "-": "-"}
_OF_FACTORS: Final[Mapping[str | None, BinaryName]] = {"*": "*", "//": "//", "%": "%"}


@dataclass(frozen=True, slots=True)
class Number:
    value: int


@dataclass(frozen=True, slots=True)
class Symbol:
    name: str


@dataclass(frozen=True, slots=True)
class Binary:
    op: BinaryName
    left: Expression
    right: Expression


Expression = Number | Symbol | Binary


def evaluate(dim: Dim, symbols: Mapping[str, int]) -> int:
    """Return the size of `dim` at these symbol values. Raises `GraphError` if that is impossible."""
    if isinstance(dim, int):
        return dim
    lowest, _ = _interval(parse(dim), {name: (value, value) for name, value in symbols.items()}, dim)
    return lowest


def bounds(dim: Dim, symbols: Mapping[str, tuple[int, int]]) -> tuple[int, int]:
    """Return (smallest, largest) size of `dim` over all symbol values in their ranges. Uses interval arithmetic, so the
    bounds are never too tight but sometimes too wide (`s - s` is not known to be 0)."""
    if isinstance(dim, int):
        return dim, dim
    return _interval(parse(dim), symbols, dim)


def symbols_of(dim: Dim) -> frozenset[str]:
    """Names of the symbols in `dim`."""
    if isinstance(dim, int):
        return frozenset()
    pending: list[Expression] = [parse(dim)]
    found: set[str] = set()
    while pending:
        match pending.pop():
            case Number():
                pass
            case Symbol(name):
                found.add(name)
            case Binary(_, left, right):
                pending += (left, right)
    return frozenset(found)


@lru_cache(maxsize=4096)
def parse(text: str) -> Expression:
    """Parse an expression. Raises `GraphError` if it is outside the grammar, too long or too deep."""
    if len(text) > MAX_LENGTH:
        raise GraphError(f"dimension expression has {len(text)} characters, the limit is {MAX_LENGTH}.")
    return _Parser(text).parse()


class _Parser:
    """Recursive descent parser; depth is bounded by `MAX_DEPTH`."""

    def __init__(self, text: str) -> None:
        self.text = text
        self.tokens = _tokens(text)
        self.position = 0

    def parse(self) -> Expression:
        expression = self.chain(0)
        if self.peek() is not None:
            raise self.error()
        return expression

    def chain(self, depth: int, *, of_factors: bool = False) -> Expression:
        """Parse terms joined by + and -, or factors joined by *, // and %."""
        joints = _OF_FACTORS if of_factors else _OF_TERMS
        left = self.factor(depth) if of_factors else self.chain(depth, of_factors=True)
        while (joint := joints.get(self.peek())) is not None:
            self.position += 1
            left = Binary(joint, left, self.factor(depth) if of_factors else self.chain(depth, of_factors=True))
        return left

    def factor(self, depth: int) -> Expression:
        if depth > MAX_DEPTH:
            raise GraphError(f"dimension expression {self.text!r} nests deeper than {MAX_DEPTH}.")
        token = self.take()
        if token == "-":
            return Binary("-", Number(0), self.factor(depth + 1))
        if token == "(":
            inner = self.chain(depth + 1)
            self.expect(")")
            return inner
        if token.isdecimal():
            return Number(int(token))
        if token in ("min", "max"):
            self.expect("(")
            left = self.chain(depth + 1)
            self.expect(",")
            right = self.chain(depth + 1)
            self.expect(")")
            return Binary(token, left, right)
        if SYMBOL.fullmatch(token) is None:
            raise self.error()
        return Symbol(token)

    def peek(self) -> str | None:
        return self.tokens[self.position] if self.position < len(self.tokens) else None

    def take(self) -> str:
        token = self.peek()
        if token is None:
            raise self.error()
        self.position += 1
        return token

    def expect(self, wanted: str) -> None:
        if self.take() != wanted:
            raise self.error()

    def error(self) -> GraphError:
        return GraphError(
            "expected a dimension expression of numbers, symbols, + - * // % min max and parentheses,"
            f" got {self.text!r}."
        )


def _tokens(text: str) -> tuple[str, ...]:
    found: list[str] = []
    position = 0
    end = len(text.rstrip())
    while position < end:
        match = _TOKEN.match(text, position)
        if match is None:
            raise GraphError(f"dimension expression {text!r} has an unexpected {text[position:].lstrip()[:1]!r}.")
        found.append(match[0].strip())
        position = match.end()
    return tuple(found)


def _interval(expression: Expression, symbols: Mapping[str, tuple[int, int]], text: str) -> tuple[int, int]:
    # A chain `a+a+a...` leans left and is at most MAX_LENGTH / 2 deep, far below the interpreter's recursion limit.
    match expression:
        case Number(value):
            return value, value
        case Symbol(name):
            if name not in symbols:
                raise GraphError(f"dimension expression {text!r} uses the unknown symbol {name!r}.")
            return symbols[name]
        case Binary(op, left_expression, right_expression):
            left = _interval(left_expression, symbols, text)
            right = _interval(right_expression, symbols, text)
            made = combine(op, left, right, text)
            if max(abs(made[0]), abs(made[1])) > MAX_NUMBER:
                raise GraphError(f"dimension expression {text!r} reaches sizes above {MAX_NUMBER}.")
            return made


_APPLIED: Final[Mapping[BinaryName, Callable[[int, int], int]]] = {
    "+": operator.add, "-": operator.sub, "*": operator.mul, "//": lambda a, b: a // b, "%": operator.mod,
    "min": min, "max": max,
}  # fmt: skip


def combine(op: BinaryName, left: tuple[int, int], right: tuple[int, int], text: str) -> tuple[int, int]:
    """Interval of `left op right`. Raises `GraphError` if a divisor may be zero or negative."""
    if op in ("//", "%") and right[0] <= 0:
        raise GraphError(f"dimension expression {text!r} may divide by zero or a negative size.")
    if op == "%" and (left[0] != left[1] or right[0] != right[1]):
        return 0, right[1] - 1
    # All other operations are monotone in each operand, so their extremes are at the ends of the intervals.
    corners = [_APPLIED[op](a, b) for a in left for b in right]
    return min(corners), max(corners)


Sizes = tuple[int, ...]


class Operands:
    """What is known about the values that a node reads: largest sizes of tensors, ranges of symbolic integers."""

    def __init__(self, node: Node, tensors: Mapping[str, Sizes], integers: Mapping[str, tuple[int, int]]) -> None:
        self.node = node
        self._tensors = tensors
        self._integers = integers

    def argument(self, position: int, name: str) -> Arg:
        """Return an argument by position, else by name, else None."""
        if position < len(self.node.args):
            return self.node.args[position]
        return self.node.kwargs.get(name)

    def tensor(self, position: int, name: str) -> Sizes:
        arg = self.argument(position, name)
        if isinstance(arg, Ref) and arg.name in self._tensors:
            return self._tensors[arg.name]
        raise self.error(f"a tensor as argument {name!r}")

    def tensors(self, *args: Arg) -> list[Sizes]:
        """Largest sizes of the tensors among these arguments, by default all, including those in lists."""
        given = args or (*self.node.args, *self.node.kwargs.values())
        return [self._tensors[name] for arg in given for name in references(arg) if name in self._tensors]

    def integers(self, position: int, name: str) -> list[tuple[int, int]]:
        """Ranges of a list of sizes. A single size counts as a list of one, None as an empty list."""
        arg = self.argument(position, name)
        if arg is None:
            return []
        items = arg.items if isinstance(arg, ListArg) else (arg,)
        return [self._range(item, name) for item in items]

    def numbers(self) -> list[tuple[float, float]]:
        """Ranges of the positional numbers, in order."""
        return [
            (arg, arg) if isinstance(arg, float) else self._range(arg, "number")
            for arg in self.node.args
            if not isinstance(arg, bool)
        ]

    def error(self, expected: str) -> GraphError:
        return GraphError(f"node {self.node.id} ({self.node.op}): expected {expected}.")

    def _range(self, arg: Arg, name: str) -> tuple[int, int]:
        if isinstance(arg, int) and not isinstance(arg, bool):
            return arg, arg
        if isinstance(arg, Ref) and arg.name in self._integers:
            return self._integers[arg.name]
        raise self.error(f"whole numbers in argument {name!r}")


def largest_elements(operands: Operands) -> int:
    """Return the most elements that any result of the node can have. Raises `GraphError` if that is undetermined."""
    node = operands.node
    match OPERATORS[node.op].growth:
        case "operand":
            return max((prod(sizes) for sizes in operands.tensors()), default=1)
        case "broadcast":
            return prod(_broadcast(operands.tensors()))
        case "sizes":
            return _sizes(operands)
        case "repeat":
            copies = prod(max(1, high) for _, high in operands.integers(1, "repeats"))
            return prod(operands.tensor(0, "self")) * copies
        case "arange":
            return _arange(operands)
        case "join":
            return sum(prod(sizes) for sizes in operands.tensors())
        case "matmul":
            return _matmul(operands)
        case "conv":
            return _conv(operands)
        case "conv_transpose":
            return _conv_transpose(operands)
        case "lookup":
            return _lookup(operands)
        case "one_hot":
            ((_, classes),) = operands.integers(1, "num_classes") or [(-1, -1)]
            if classes < 1:
                raise operands.error("the number of classes")
            return prod(operands.tensor(0, "self")) * classes
        case "pad":
            return _pad(operands)
        case "window":
            source = operands.tensor(0, "self")
            spatial = 3 if "3d" in node.op else 2
            return prod(_padded(source, spatial, operands.integers(3, "padding")))
        case "windows":
            return _windows(operands)
        case "grid":
            source, places = operands.tensor(0, "input"), operands.tensor(1, "grid")
            return prod(source[:2]) * prod(places[1:-1])
        case "unpool":
            source, sizes = operands.tensor(0, "self"), operands.integers(2, "output_size")
            return prod(source[: -len(sizes)]) * prod(max(1, high) for _, high in sizes)
        case "adaptive":
            sizes = [max(1, high) for _, high in operands.integers(1, "output_size")]
            source = operands.tensor(0, "self")
            return prod(source[: max(0, len(source) - len(sizes))]) * prod(sizes)


def _broadcast(shapes: Sequence[Sizes]) -> Sizes:
    # Takes the maximum even if an operand has size 0, because all sizes here are upper bounds.
    backward = zip_longest(*(reversed(sizes) for sizes in shapes), fillvalue=1)
    return tuple(max(sizes) for sizes in backward)[::-1]


def _sizes(operands: Operands) -> int:
    position = next((i for i, arg in enumerate(operands.node.args) if isinstance(arg, ListArg)), 0)
    sizes = [high for _, high in operands.integers(position, "size")]
    if operands.node.op != "aten.expand.default":
        return prod(max(0, size) for size in sizes)
    # expand: -1 keeps the operand's size.
    source = operands.tensor(0, "self")
    kept = (1,) * max(0, len(sizes) - len(source)) + source
    return prod(before if size < 0 else size for size, before in zip(sizes, kept, strict=False))


def _windows(operands: Operands) -> int:
    """Bound for sliding windows: each element occurs once per position in the window. `col2im`: the given size."""
    source = operands.tensor(0, "self")
    match operands.node.op:
        case "aten.unfold.default":
            ((_, size),) = operands.integers(2, "size")
            return prod(source) * max(1, size)
        case "aten.im2col.default":
            kernel = prod(max(1, high) for _, high in operands.integers(1, "kernel_size"))
            return prod(_padded(source, 2, operands.integers(3, "padding"))) * kernel
        case _:
            return prod(source[:-1]) * prod(max(1, high) for _, high in operands.integers(1, "output_size"))


def _arange(operands: Operands) -> int:
    if operands.node.op == "aten.linspace.default":
        ((_, steps),) = operands.integers(2, "steps")
        return max(1, steps)
    start, end, step = (0, 0), (0, 0), (1, 1)
    match operands.numbers():
        case [end]:
            pass
        case [start, end]:
            pass
        case [start, end, step]:
            pass
        case _:
            raise operands.error("one to three numbers")
    if step[0] <= 0 <= step[1]:
        raise operands.error("a step that is not 0")
    span = max(abs(end[1] - start[0]), abs(end[0] - start[1]))
    return int(span / min(abs(step[0]), abs(step[1]))) + 1


def _matmul(operands: Operands) -> int:
    match operands.node.op:
        case "aten.linear.default":
            left, weight = operands.tensor(0, "input"), operands.tensor(1, "weight")
            return prod(left[:-1]) * (weight[0] if len(weight) == 2 else 1)
        case "fusion.attention":
            query, value = operands.tensor(0, "q"), operands.tensor(2, "v")
            return prod(query[:-1]) * value[-1] if query and value else 1
        case "fusion.expert_linear":
            rows, weight = operands.tensor(0, "x"), operands.tensor(1, "weight")
            return prod(rows[:-1]) * max(weight[1:], default=1)
        case "aten._trilinear.default":
            return _trilinear(operands)
        case "aten._cdist_forward.default":
            left, right = operands.tensor(0, "x1"), operands.tensor(1, "x2")
            return prod(_broadcast([left[:-2], right[:-2]])) * prod(left[-2:-1]) * prod(right[-2:-1])
        case "aten.addmm.default" | "aten.baddbmm.default":
            left, right = operands.tensor(1, "mat1"), operands.tensor(2, "mat2")
        case _:
            left, right = operands.tensor(0, "self"), operands.tensor(1, "other")
    batch = _broadcast([left[:-2], right[:-2]])
    return prod(batch) * prod(left[-2:-1]) * (right[-1] if len(right) > 1 else 1)


def _trilinear(operands: Operands) -> int:
    """Bound for `_trilinear`: three operands with inserted dimensions, multiplied and summed over some dimensions."""
    shapes: list[Sizes] = []
    for place in range(3):
        sizes = list(operands.tensor(place, f"i{place + 1}"))
        for dim, _ in sorted(operands.integers(3 + place, f"expand{place + 1}")):
            sizes.insert(dim, 1)
        shapes.append(tuple(sizes))
    summed = {dim for dim, _ in operands.integers(6, "sumdim")}
    return prod(size for dim, size in enumerate(_broadcast(shapes)) if dim not in summed)


def _conv(operands: Operands) -> int:
    source, weight = operands.tensor(0, "input"), operands.tensor(1, "weight")
    if len(weight) < 3:
        raise operands.error("a convolution weight of rank 3 or more")
    spatial = len(weight) - 2
    padding = operands.argument(4, "padding")
    # "same" and "valid" never enlarge.
    pads = [] if isinstance(padding, str) else operands.integers(4, "padding")
    padded = _padded(source, spatial, pads)
    return prod(padded[: -spatial - 1]) * weight[0] * prod(padded[-spatial:])


def _conv_transpose(operands: Operands) -> int:
    source, weight = operands.tensor(0, "input"), operands.tensor(1, "weight")
    if len(weight) != 4 or len(source) < 3:
        raise operands.error("an image and a weight of rank 4")
    stride, dilation = _largest(operands, 3, "stride", 1), _largest(operands, 7, "dilation", 1)
    extra, groups = _largest(operands, 5, "output_padding", 0), _largest(operands, 6, "groups", 1)
    spatial = prod(
        size * stride + dilation * kernel + extra for size, kernel in zip(source[-2:], weight[2:], strict=True)
    )
    return prod(source[:-3]) * weight[1] * groups * spatial


def _largest(operands: Operands, position: int, name: str, default: int) -> int:
    return max((high for _, high in operands.integers(position, name)), default=default)


def _padded(source: Sizes, spatial: int, pads: Sequence[tuple[int, int]]) -> Sizes:
    highs = [max(0, high) for _, high in pads] or [0]
    around = highs * spatial if len(highs) == 1 else highs
    if len(around) != spatial or len(source) < spatial:
        raise GraphError(f"padding {around} does not fit a tensor of rank {len(source)}.")
    return source[:-spatial] + tuple(size + 2 * pad for size, pad in zip(source[-spatial:], around, strict=True))


def _pad(operands: Operands) -> int:
    source = operands.tensor(0, "self")
    pads = [high for _, high in operands.integers(1, "pad")]
    if len(pads) % 2 or len(pads) > 2 * len(source):
        raise operands.error("a pair of paddings per padded dimension")
    sizes = list(source)
    for i in range(0, len(pads), 2):
        sizes[-1 - i // 2] += max(0, pads[i]) + max(0, pads[i + 1])
    return prod(sizes)


def _lookup(operands: Operands) -> int:
    match operands.node.op:
        case "aten.embedding.default":
            return prod(operands.tensor(1, "indices")) * prod(operands.tensor(0, "weight")[1:])
        case "fusion.embedding_bag":
            return prod(operands.tensor(2, "offsets")) * prod(operands.tensor(0, "weight")[1:])
        case "aten.gather.default":
            return prod(operands.tensor(2, "index"))
        case "aten.index_select.default":
            # The selected dimension's size is at least 1 if any index is in range.
            return prod(operands.tensor(0, "self")) * prod(operands.tensor(2, "index"))
        case _:
            return _index(operands)


def _index(operands: Operands) -> int:
    """Bound for `x[i, None, j]`: the indices broadcast, and dimensions without an index stay."""
    source = operands.tensor(0, "self")
    indices = operands.argument(1, "indices")
    if not isinstance(indices, ListArg) or len(indices.items) > len(source):
        raise operands.error("a list of at most one index per dimension")
    kept = [size for size, index in zip_longest(source, indices.items) if index is None]
    return prod(_broadcast(operands.tensors(indices))) * prod(kept)
