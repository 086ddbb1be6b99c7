"""Every guard of a module, broken in one way at a time.

Decides what counts as a guard: conditions of `if`, `while`, `case` and comprehensions, their operands, comparisons,
numbers added or compared, numbers with a name, rows of tables. Never touches assertions (they check guards), text for
people, or annotations. Runs nothing.

Neighbour: `guards` runs the tests against each mutant.
"""

from __future__ import annotations

import ast
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from typing import Final, Literal, TypeVar

Kind = Literal["negate", "drop operand", "swap comparison", "off by one", "drop row"]

SWAPS: Final[dict[type[ast.cmpop], type[ast.cmpop]]] = {
    ast.Lt: ast.LtE,
    ast.LtE: ast.Lt,
    ast.Gt: ast.GtE,
    ast.GtE: ast.Gt,
    ast.Eq: ast.NotEq,
    ast.NotEq: ast.Eq,
    ast.In: ast.NotIn,
    ast.NotIn: ast.In,
    ast.Is: ast.IsNot,
    ast.IsNot: ast.Is,
}
ORDERS: Final = (ast.Lt, ast.LtE, ast.Gt, ast.GtE)
PROSE: Final = frozenset({"_brief", "__str__", "__repr__", "STORY_LENGTH"})
"""Functions and numbers that only serve text for people."""


@dataclass(frozen=True, slots=True)
class Mutant:
    """`before` and `after` show the expression that was changed, on one line."""

    line: int
    function: str
    kind: Kind
    before: str
    after: str
    make: Callable[[], str] = field(compare=False)

    @property
    def source(self) -> str:
        """The whole module with this one change."""
        return self.make()

    @property
    def name(self) -> str:
        """The same as long as the guard is: without line numbers."""
        return f"{self.function or 'module'}: {self.before}  ->  {self.after}"

    def __str__(self) -> str:
        return f"line {self.line}, {self.kind}: {self.name}"


Undo = Callable[[], None]


@dataclass(frozen=True, slots=True)
class _Change:
    """One way to break one place. `apply` changes the tree in place and returns what undoes it; `show` gives the place
    as text, before or after."""

    kind: Kind
    anchor: ast.stmt | ast.expr | ast.pattern
    show: Callable[[], str]
    apply: Callable[[], Undo]


def mutants(source: str) -> list[Mutant]:
    """All of them, in the order of the source, no two alike."""
    tree = ast.parse(source)
    functions = _functions(tree)
    found: list[Mutant] = []
    seen: set[tuple[int, int, str, str]] = set()
    for change in sorted(_changes(tree), key=lambda change: (change.anchor.lineno, change.anchor.col_offset)):
        before, after, _ = _shown(change, tree, whole=False)
        place = (change.anchor.lineno, change.anchor.col_offset, before, after)
        if before != after and place not in seen:
            seen.add(place)
            function = functions.get(id(change.anchor), "")
            make = partial(_source, change, tree)
            found.append(Mutant(change.anchor.lineno, function, change.kind, before, after, make))
    return found


def _source(change: _Change, tree: ast.Module) -> str:
    return _shown(change, tree, whole=True)[2]


def _shown(change: _Change, tree: ast.Module, *, whole: bool) -> tuple[str, str, str]:
    """The place before and after, and the module while it is changed; the tree is as before."""
    before = change.show()
    undo = change.apply()
    try:
        return before, change.show(), ast.unparse(tree) if whole else ""
    finally:
        undo()


def _changes(tree: ast.Module) -> Iterator[_Change]:
    for statement in tree.body:
        yield from _of_constant(statement)
    for node in _guarding(tree):
        match node:
            case ast.If() | ast.While() | ast.IfExp():
                yield _Change("negate", node.test, _text(node, "test"), _setting(node, "test", _not(node.test)))
            case ast.match_case(guard=ast.expr() as guard):
                yield _Change("negate", guard, _text(node, "guard"), _setting(node, "guard", _not(guard)))
            case ast.comprehension():
                for index, condition in enumerate(node.ifs):
                    show = _text_of_item(node.ifs, index)
                    yield _Change("negate", condition, show, _replacing(node.ifs, index, _not(condition)))
            case ast.BoolOp():
                for index in range(len(node.values)):
                    yield _Change("drop operand", node, _text(node), _removing(node.values, index))
            case ast.Compare():
                for index, operator in enumerate(node.ops):
                    swapped = _replacing(node.ops, index, SWAPS[type(operator)]())
                    yield _Change("swap comparison", node, _text(node), swapped)
                if isinstance(node.ops[0], ORDERS):
                    yield from _off_by_one(node, node.left, *node.comparators)
            case ast.BinOp(op=ast.Add() | ast.Sub()):
                yield from _off_by_one(node, node.left, node.right)
            case _:
                pass


def _of_constant(statement: ast.stmt) -> Iterator[_Change]:
    """Rows of tables and numbers with a name, at the top of the module."""
    match statement:
        case ast.Assign(value=ast.Dict() as table) | ast.AnnAssign(value=ast.Dict() as table):
            for index, key in enumerate(table.keys):
                if key is not None:
                    yield _Change("drop row", key, _row_text(table, key), _removing_row(table, index))
        case (
            ast.Assign(targets=[ast.Name(id=name)], value=ast.Constant() as number)
            | ast.AnnAssign(target=ast.Name(id=name), value=ast.Constant() as number)
        ) if name not in PROSE:
            yield from _off_by_one(statement, number)
        case _:
            pass


def _off_by_one(node: ast.stmt | ast.expr, *operands: ast.expr) -> Iterator[_Change]:
    """Numbers that are compared for order, added, taken away or given a name."""
    for operand in operands:
        if isinstance(operand, ast.Constant) and type(operand.value) is int:
            for value in (operand.value + 1, operand.value - 1):
                yield _Change("off by one", node, _text(node), _setting(operand, "value", value))


def _guarding(tree: ast.AST) -> Iterator[ast.AST]:
    """Every node that may guard something."""
    for child in ast.iter_child_nodes(tree):
        match child:
            case ast.Assert() | ast.JoinedStr() | ast.Raise():
                pass
            case ast.FunctionDef(name=name, body=body):
                if name not in PROSE:
                    for part in body:
                        yield part
                        yield from _guarding(part)
            case ast.AnnAssign(value=value):
                if value is not None:
                    yield value
                    yield from _guarding(value)
            case _:
                yield child
                yield from _guarding(child)


def _functions(tree: ast.Module) -> dict[int, str]:
    """id(node) -> the function it is in, with its class."""
    named: dict[int, str] = {}

    def visit(node: ast.AST, name: str) -> None:
        named[id(node)] = name
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            name = f"{name}.{node.name}" if name else node.name
        for child in ast.iter_child_nodes(node):
            visit(child, name)

    visit(tree, "")
    return named


def _not(condition: ast.expr) -> ast.expr:
    """Without two negations in a row, and with `!=` for `not ==`: the same mutant is not made twice."""
    match condition:
        case ast.UnaryOp(op=ast.Not(), operand=operand):
            return operand
        case ast.Compare(left=left, ops=[operator], comparators=comparators) if not isinstance(operator, ORDERS):
            return ast.Compare(left, [SWAPS[type(operator)]()], comparators)
        case _:
            return ast.UnaryOp(ast.Not(), condition)


def _text(node: ast.AST, name: str | None = None) -> Callable[[], str]:
    return lambda: ast.unparse(node if name is None else getattr(node, name))


def _text_of_item(items: list[ast.expr], index: int) -> Callable[[], str]:
    return lambda: ast.unparse(items[index])


def _row_text(table: ast.Dict, key: ast.expr) -> Callable[[], str]:
    return lambda: ast.unparse(key) if key in table.keys else "no row"


def _setting(node: ast.AST, name: str, value: object) -> Callable[[], Undo]:
    def apply() -> Undo:
        old = getattr(node, name)
        setattr(node, name, value)
        return lambda: setattr(node, name, old)

    return apply


_Item = TypeVar("_Item", bound=ast.AST)


def _replacing(items: list[_Item], index: int, item: _Item) -> Callable[[], Undo]:
    def apply() -> Undo:
        old = items[index]
        items[index] = item
        return lambda: items.__setitem__(index, old)

    return apply


def _removing(items: list[ast.expr], index: int) -> Callable[[], Undo]:
    def apply() -> Undo:
        old = items.pop(index)
        return lambda: items.insert(index, old)

    return apply


def _removing_row(table: ast.Dict, index: int) -> Callable[[], Undo]:
    def apply() -> Undo:
        key, value = table.keys.pop(index), table.values.pop(index)

        def undo() -> None:
            table.keys.insert(index, key)
            table.values.insert(index, value)

        return undo

    return apply
