"""Convert host tensors to flat numpy arrays and back, for sums computed outside a backend.

Used by `execution.training.codecs`, `execution.sketches` and `execution.training.exchange`.
"""

from __future__ import annotations

import numpy as np

from fusionai.primitives.tensors import HostTensor

_NUMPY = {"float64": np.float64, "float32": np.float32, "float16": np.float16}


def as_array(tensor: HostTensor) -> np.ndarray:
    """Return the values as a flat array. bfloat16 is widened to float32, which numpy has no type for."""
    if tensor.dtype == "bfloat16":
        widened = np.frombuffer(tensor.data, np.uint16).astype(np.uint32) << np.uint32(16)
        return widened.view(np.float32)
    return np.frombuffer(tensor.data, _NUMPY[tensor.dtype])


def as_bytes(array: np.ndarray, dtype: str) -> bytes:
    """Return the bytes of `array` as `dtype`, rounded half to even if `dtype` is narrower."""
    if dtype != "bfloat16":
        return array.astype(_NUMPY[dtype], copy=False).tobytes()
    bits = array.astype(np.float32, copy=False).view(np.uint32)
    rounded = bits + np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1))
    nan = np.isnan(array)
    return np.where(nan, np.uint16(0x7FC0), (rounded >> np.uint32(16)).astype(np.uint16)).tobytes()
