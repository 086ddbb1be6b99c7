"""The table from operator names to ONNX builders: what this backend can run. Resolves no name that it receives.

A function gets the builder, then the arguments of torch's operator. Losses, and operators whose result sizes depend on
the data, are not supported. Neighbours: `building` calls these; the other modules of this package implement them by
kind.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any, Final

from fusionai.backends.onnxruntime.arithmetic import ARITHMETIC
from fusionai.backends.onnxruntime.drawing import DRAWING
from fusionai.backends.onnxruntime.products import PRODUCTS
from fusionai.backends.onnxruntime.reductions import REDUCTIONS
from fusionai.backends.onnxruntime.scans import SCANS
from fusionai.backends.onnxruntime.shaping import SHAPING

OPERATORS: Final[Mapping[str, Callable[..., Any]]] = MappingProxyType(
    {**ARITHMETIC, **SHAPING, **REDUCTIONS, **PRODUCTS, **SCANS, **DRAWING}
)
