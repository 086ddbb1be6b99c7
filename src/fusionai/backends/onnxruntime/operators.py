"""The table from operator names to ONNX. Decides what this backend can run; resolves no name it receives.

A function gets the builder, then what torch's operator gets. Losses, and operators whose results' sizes depend on the
data, are not here. Neighbours: `building` calls these; the modules beside this one have them by kind.
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
