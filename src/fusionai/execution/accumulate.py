"""Sum of the gradients that several consumers return for one value, in a fixed order.

The order is that of autograd in one process: the last consumer's gradient arrives first, earlier ones are added to it.
Neighbours: `execution.work` sums, `execution.codecs` takes the number formats.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from fusionai.primitives.errors import ExecutionError
from fusionai.primitives.tensors import HostTensor, host_tensor

_NUMPY = {"float64": np.float64, "float32": np.float32, "float16": np.float16}


def total_gradient(by_consumer: Mapping[int, HostTensor]) -> HostTensor:
    """Gradients by consumer stage, all of one dtype and shape. One consumer: its gradient as it is."""
    ordered = [by_consumer[consumer] for consumer in sorted(by_consumer, reverse=True)]
    first = ordered[0]
    if len(ordered) == 1:
        return first
    if any((other.dtype, other.shape) != (first.dtype, first.shape) for other in ordered):
        kinds = [f"{tensor.dtype}{list(tensor.shape)}" for tensor in ordered]
        raise ExecutionError(f"gradients of one value must agree in dtype and shape, got {', '.join(kinds)}.")
    total = as_array(first)
    for other in ordered[1:]:
        total = total + as_array(other)
    return host_tensor(first.dtype, first.shape, as_bytes(total, first.dtype))


def as_array(tensor: HostTensor) -> np.ndarray:
    """Flat; bfloat16 as float32."""
    if tensor.dtype == "bfloat16":
        widened = np.frombuffer(tensor.data, np.uint16).astype(np.uint32) << np.uint32(16)
        return widened.view(np.float32)
    return np.frombuffer(tensor.data, _NUMPY[tensor.dtype])


def as_bytes(array: np.ndarray, dtype: str) -> bytes:
    """Rounded to even where `dtype` is narrower."""
    if dtype != "bfloat16":
        return array.astype(_NUMPY[dtype], copy=False).tobytes()
    bits = array.astype(np.float32, copy=False).view(np.uint32)
    rounded = bits + np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1))
    nan = np.isnan(array)
    return np.where(nan, np.uint16(0x7FC0), (rounded >> np.uint32(16)).astype(np.uint16)).tobytes()
