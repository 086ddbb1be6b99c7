"""Operators that PyTorch itself computes by others, spelt out as it does.

Those operators have no kernel and no derivative of their own: eager PyTorch runs the same composition, so the bits are
the same forward and backward. What the vocabulary has by its own name stays as it is.

Neighbours: `capture.export` decomposes by this table, `capture.lowering` spells what is left.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

from torch._export.utils import _collect_all_valid_cia_ops_for_aten_namespace, _get_decomp_for_cia

from fusionai.capture.lowering import spelt

_SIMPLE: Final = ("linalg_norm", "linalg_matrix_norm", "linalg_matmul", "linalg_vecdot", "linalg_multi_dot")
"""Of the operators of linear algebra those that are sums and products. The others solve, and look at whether they
could, which a trace can't."""


def composed() -> dict[Any, Callable[..., Any]]:
    """Operator -> its composition, of all that the vocabulary lacks."""
    lacking = [op for op in _collect_all_valid_cia_ops_for_aten_namespace() if not spelt(str(op))]
    return {op: _get_decomp_for_cia(op) for op in lacking if not _solves(op)}


def _solves(op: Any) -> bool:
    name = op.overloadpacket.__name__
    return name.startswith("linalg_") and name not in _SIMPLE
