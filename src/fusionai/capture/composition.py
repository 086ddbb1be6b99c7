"""Operators that PyTorch itself computes by others, spelt out as it does.

Those operators have no kernel and no derivative of their own: eager PyTorch runs the same composition, so the bits are
the same forward and backward. What the vocabulary has by its own name stays as it is.

Neighbours: `capture.export` decomposes by this table, `capture.lowering` spells what is left.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch._export.utils import _collect_all_valid_cia_ops_for_aten_namespace, _get_decomp_for_cia

from fusionai.capture.lowering import spelt


def composed() -> dict[Any, Callable[..., Any]]:
    """Operator -> its composition, of all that the vocabulary lacks."""
    return {op: _get_decomp_for_cia(op) for op in _collect_all_valid_cia_ops_for_aten_namespace() if not spelt(str(op))}
