"""Converts between host tensors and JAX arrays. Never changes a bit, and always copies, so no memory is shared.

Neighbours: `program` calls these at its boundary, `primitives.tensors` defines host tensors.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from fusionai.backends.jax.promotion import DTYPES, Device
from fusionai.primitives.errors import ExecutionError
from fusionai.primitives.tensors import HostTensor, host_tensor

NAMES: dict[np.dtype[Any], str] = {jnp.dtype(dtype): name for name, dtype in DTYPES.items()}


def to_jax(tensor: HostTensor, device: Device) -> jax.Array:
    values = np.frombuffer(tensor.data, jnp.dtype(DTYPES[tensor.dtype])).reshape(tensor.shape)
    return jax.device_put(values.copy(), device)


def to_host(value: jax.Array | int) -> HostTensor:
    """Return the bytes of an array; a size computed in the graph becomes an int64 of shape ()."""
    array = np.asarray(value, np.int64) if isinstance(value, int) else np.asarray(value)
    name = NAMES.get(array.dtype)
    if name is None:
        raise ExecutionError(f"a tensor of dtype {array.dtype} can't leave the backend; known: {', '.join(DTYPES)}.")
    return host_tensor(name, array.shape, array.tobytes())
