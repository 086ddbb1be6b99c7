"""Decompose operators that PyTorch itself computes by other operators, exactly as it does.

These operators have no kernel and no derivative of their own: eager PyTorch runs the same composition, so forward and
backward have the same bits. Operators that the vocabulary contains are not decomposed.

Neighbours: `capture.export` decomposes by this table, `capture.lowering` converts the result.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

from torch._export.utils import _collect_all_valid_cia_ops_for_aten_namespace, _get_decomp_for_cia

from fusionai.capture.lowering import spelt

_SIMPLE: Final = ("linalg_norm", "linalg_matrix_norm", "linalg_matmul", "linalg_vecdot", "linalg_multi_dot")
"""Linear-algebra operators that consist of sums and products. The other ones solve systems and check whether a solution
exists, which is a branch on data that a trace can't hold."""


def composed() -> dict[Any, Callable[..., Any]]:
    """Return operator -> its composition, for all operators that the vocabulary lacks."""
    lacking = [op for op in _collect_all_valid_cia_ops_for_aten_namespace() if not spelt(str(op))]
    return {op: _get_decomp_for_cia(op) for op in lacking if not _solves(op)}


def _solves(op: Any) -> bool:
    name = op.overloadpacket.__name__
    return name.startswith("linalg_") and name not in _SIMPLE
