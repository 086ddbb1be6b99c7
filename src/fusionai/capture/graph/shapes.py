"""Write symbolic sizes as text in the grammar of `ir.shapes`.

Sizes come from torch's tracer as sympy expressions over its own symbols; the text uses the graph's symbols.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


def spell(expression: Any, symbols: Mapping[str, str]) -> int | str:
    """Return `expression` (sympy) over the graph's symbols. Raises `ValueError` on an unknown symbol (a size that
    depends on data) and on a function that the grammar lacks."""
    if expression.is_Integer:
        return int(expression)
    return _text(expression, symbols)


def _text(expression: Any, symbols: Mapping[str, str]) -> str:
    kind = type(expression).__name__
    if expression.is_Symbol:
        name = symbols.get(str(expression))
        if name is None:
            raise ValueError(f"unknown size {expression}")
        return name
    if expression.is_Integer:
        return str(int(expression)) if expression >= 0 else f"(0-{-int(expression)})"
    arguments = [_text(argument, symbols) for argument in expression.args]
    match kind:
        # Sorted, because sympy's order follows the tracer's symbol names.
        case "Add":
            return f"({'+'.join(sorted(arguments))})"
        case "Mul":
            return f"({'*'.join(sorted(arguments))})"
        case "Pow" if expression.exp.is_Integer and 0 < int(expression.exp) <= 4:
            return f"({'*'.join([arguments[0]] * int(expression.exp))})"
        case "FloorDiv" | "CleanDiv":
            return f"({arguments[0]}//{arguments[1]})"
        case "Mod" | "PythonMod":
            return f"({arguments[0]}%{arguments[1]})"
        case "Max" | "Min":
            arguments.sort()
            result = arguments[0]
            for argument in arguments[1:]:
                result = f"{kind.lower()}({result},{argument})"
            return result
        case _:
            raise ValueError(f"{kind} of {', '.join(arguments)}")
