"""Arguments of the `fusion.*` operators. Decides which named arguments they have and what each may be.

ATen operators check their own arguments when they run; semantic operators are checked here only. `ir.validate` calls
`check_semantic`, `capture` makes such nodes, backends implement them.
"""

from __future__ import annotations

from collections.abc import Container
from typing import Final, Literal

from fusionai.ir.schema import Arg, Node, Ref
from fusionai.primitives.errors import GraphError

Option = Literal["number", "number?", "size?", "flag", "share", "tensor", "tensor?"]
_SEMANTIC: Final[dict[str, tuple[int, dict[str, Option]]]] = {
    "fusion.attention": (
        3,
        {
            "scale": "number",
            "causal": "flag",
            "window": "size?",
            "softcap": "number?",
            "dropout": "share",
            "sinks": "tensor?",
            "key_mask": "tensor?",
        },
    ),
    "fusion.expert_linear": (3, {"transposed": "flag"}),
    "fusion.embedding_bag": (
        3,
        {"mode": "number", "weights": "tensor?", "by_frequency": "flag", "last_offset": "flag", "padding": "number"},
    ),
    "fusion.linear_scan": (2, {}),
    "fusion.linear_attention": (3, {"decay": "tensor", "beta": "tensor?"}),
    "fusion.dropout": (1, {"p": "share"}),
    "fusion.in_training": (2, {}),
    "fusion.uniform": (1, {}),
}
"""Operator -> (number of positional tensors, kind of each named argument; `?` allows None)."""


def check_semantic(node: Node, tensors: Container[str]) -> None:
    """Raise `GraphError` unless the operator accepts the node's arguments. `tensors` are the names of known tensors."""
    operands, options = _SEMANTIC[node.op]
    found = [arg for arg in node.args if isinstance(arg, Ref) and arg.name in tensors]
    if len(node.args) != operands or len(found) != operands:
        raise GraphError(f"node {node.id} ({node.op}) takes {operands} tensors, then named arguments.")
    for name, arg in node.kwargs.items():
        option = options.get(name)
        if option is None or not _fits(option, arg, tensors):
            raise GraphError(
                f"node {node.id} ({node.op}): argument {name[:64]!r} is unknown or has a value it can't take;"
                f" known are {', '.join(options)}."
            )


def _fits(option: Option, arg: Arg, tensors: Container[str]) -> bool:
    match option:
        case "flag":
            return isinstance(arg, bool)
        case "tensor?" if arg is None:
            return True
        case "tensor" | "tensor?":
            return isinstance(arg, Ref) and arg.name in tensors
        case "size?":
            return arg is None or (isinstance(arg, int) and not isinstance(arg, bool) and arg > 0)
        case "number?" if arg is None:
            return True
        case "number" | "number?" | "share":
            if isinstance(arg, bool) or not isinstance(arg, int | float):
                return False
            return option == "number" or (0 <= arg < 1 if option == "share" else arg > 0)
