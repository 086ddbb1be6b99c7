"""Dimension expressions: parse, evaluate and bound them. Decides the grammar; never uses eval, never simplifies.

    expression := term (("+" | "-") term)*
    term       := factor (("*" | "//" | "%") factor)*
    factor     := "-" factor | number | symbol | ("min" | "max") "(" expression "," expression ")" | "(" expression ")"

`//` and `%` round towards minus infinity, as in Python. `ir.validate` bounds sizes with `bounds`; `ir.cost` and
backends compute them with `evaluate`.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Final, Literal

from fusionai.ir.schema import Dim
from fusionai.primitives.errors import GraphError

MAX_LENGTH: Final = 256
MAX_DEPTH: Final = 16
MAX_NUMBER: Final = 2**48
"""Upper limit on literals and intermediate results: no real size is larger."""

_TOKEN: Final = re.compile(r"\s*(?:(\d{1,15})|([A-Za-z_][A-Za-z0-9_]{0,31})|(//|[-+*%(),]))")
SYMBOL: Final = re.compile(r"[A-Za-z_][A-Za-z0-9_]{0,31}")

BinaryName = Literal["+", "-", "*", "//", "%", "min", "max"]


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
    """Return the size of `dim` at these symbol values. Raises `GraphError` for a bad expression or an unknown
    symbol."""
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
        expression = self.sum(0)
        if self.peek() is not None:
            raise self.error()
        return expression

    def sum(self, depth: int) -> Expression:
        left = self.term(depth)
        while (token := self.peek()) in ("+", "-"):
            self.position += 1
            left = Binary(token, left, self.term(depth))
        return left

    def term(self, depth: int) -> Expression:
        left = self.factor(depth)
        while (token := self.peek()) in ("*", "//", "%"):
            self.position += 1
            left = Binary(token, left, self.factor(depth))
        return left

    def factor(self, depth: int) -> Expression:
        if depth > MAX_DEPTH:
            raise GraphError(f"dimension expression {self.text!r} nests deeper than {MAX_DEPTH}.")
        token = self.take()
        if token == "-":
            return Binary("-", Number(0), self.factor(depth + 1))
        if token == "(":
            inner = self.sum(depth + 1)
            self.expect(")")
            return inner
        if token.isdecimal():
            return Number(int(token))
        if token in ("min", "max"):
            self.expect("(")
            left = self.sum(depth + 1)
            self.expect(",")
            right = self.sum(depth + 1)
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
            return _checked(combine(op, left, right, text), text)


def combine(op: BinaryName, left: tuple[int, int], right: tuple[int, int], text: str) -> tuple[int, int]:
    """Interval of `left op right`. Raises `GraphError` if a divisor may be zero or negative."""
    match op:
        case "+":
            return left[0] + right[0], left[1] + right[1]
        case "-":
            return left[0] - right[1], left[1] - right[0]
        case "*":
            corners = [a * b for a in left for b in right]
            return min(corners), max(corners)
        case "//":
            _positive(right, text)
            corners = [a // b for a in left for b in right]
            return min(corners), max(corners)
        case "%":
            _positive(right, text)
            if left[0] == left[1] and right[0] == right[1]:
                return left[0] % right[0], left[0] % right[0]
            return 0, right[1] - 1
        case "min":
            return min(left[0], right[0]), min(left[1], right[1])
        case "max":
            return max(left[0], right[0]), max(left[1], right[1])


def _positive(divisor: tuple[int, int], text: str) -> None:
    if divisor[0] <= 0:
        raise GraphError(f"dimension expression {text!r} may divide by zero or a negative size.")


def _checked(interval: tuple[int, int], text: str) -> tuple[int, int]:
    if max(abs(interval[0]), abs(interval[1])) > MAX_NUMBER:
        raise GraphError(f"dimension expression {text!r} reaches sizes above {MAX_NUMBER}.")
    return interval
