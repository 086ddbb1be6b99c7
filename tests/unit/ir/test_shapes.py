"""Dimension expressions: values, ranges, and everything outside the grammar."""

from __future__ import annotations

import pytest

from fusionai.ir.shapes import MAX_DEPTH, MAX_LENGTH, bounds, evaluate, symbols_of
from fusionai.primitives.errors import GraphError

SYMBOLS = {"b": 3, "s": 10}


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("b", 3),
        ("b*s", 30),
        ("s//4+1", 3),
        ("s - b - 1", 6),
        ("(s-b)*2", 14),
        ("s%4", 2),
        ("-b+s", 7),
        ("-7//2", -4),
        ("min(b,s)*max(2, b)", 9),
        ("2*b*s//3%7", 6),
        ("max(0, b-s)", 0),
    ],
)
def test_evaluate(text: str, expected: int) -> None:
    assert evaluate(text, SYMBOLS) == expected


def test_a_number_needs_no_symbols() -> None:
    assert evaluate(7, {}) == 7


@pytest.mark.parametrize(
    "text",
    [
        "",
        " ",
        "__import__('os')",
        "b.__class__",
        "b**2",
        "b/2",
        "b b",
        "(b",
        "b)",
        "b+",
        "min(b)",
        "min(b,s,2)",
        "lambda: 0",
        "1e9",
        "0x10",
        "b;s",
        "b\n+\x00",
        "ⅷ",
        "²",
        "abs(b)",
        "9" * 400,
        "9999999999999999",
    ],
)
def test_outside_the_grammar(text: str) -> None:
    with pytest.raises(GraphError):
        evaluate(text, SYMBOLS)


def test_unknown_symbol_is_named() -> None:
    with pytest.raises(GraphError, match="unknown symbol 'heads'"):
        evaluate("b*heads", SYMBOLS)


def test_depth_and_length_are_capped() -> None:
    deep = "(" * (MAX_DEPTH + 2) + "b" + ")" * (MAX_DEPTH + 2)
    with pytest.raises(GraphError, match="nests deeper"):
        evaluate(deep, SYMBOLS)
    with pytest.raises(GraphError, match="characters"):
        evaluate("b" + "+b" * MAX_LENGTH, SYMBOLS)
    # The longest legal chain is no problem.
    assert evaluate("b" + "+b" * ((MAX_LENGTH - 1) // 2), SYMBOLS) == 3 * (1 + (MAX_LENGTH - 1) // 2)


def test_explosion_is_capped() -> None:
    with pytest.raises(GraphError, match="above"):
        evaluate("*".join(["s"] * 40), {"s": 2**31})


@pytest.mark.parametrize("text", ["s//b", "s%b", "s//(b-3)"])
def test_a_divisor_must_be_positive(text: str) -> None:
    with pytest.raises(GraphError, match="divide"):
        bounds(text, {"b": (0, 3), "s": (1, 10)})


def test_bounds_hold_at_every_point() -> None:
    ranges = {"b": (1, 4), "s": (2, 9)}
    for text in ("s-b", "b*s-7", "(s-b)*(b-3)", "s//b", "(b-s)//3", "s%3", "(b-s)%5", "min(s,2*b)", "max(s-7,b)", "-s"):
        low, high = bounds(text, ranges)
        points = [evaluate(text, {"b": b, "s": s}) for b in range(1, 5) for s in range(2, 10)]
        assert low <= min(points), text
        assert max(points) <= high, text


def test_symbols_of() -> None:
    assert symbols_of("b*(s+1)//2") == {"b", "s"}
    assert symbols_of(4) == frozenset()
