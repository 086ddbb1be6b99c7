"""Result dtypes of operands with several dtypes, by torch's rules, which are the graph's.

Tensors with dimensions determine the dtype; tensors of rank 0 and plain numbers change it only if they are of a higher
kind (a float among integers). JAX's own rules differ: an integer times 0.5 would become float64. Neighbours: the
operator modules.

Conversions between host tensors and JAX arrays never change a bit, and always copy, so no memory is shared.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Final

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from fusionai.primitives.errors import ExecutionError
from fusionai.primitives.tensors import ITEMSIZE_BYTES, HostTensor, host_tensor

DTYPES: Final[dict[str, Any]] = {name: getattr(jnp, name) for name in ITEMSIZE_BYTES}
"""Dtype name in a graph -> JAX dtype."""
Scalar = bool | int | float
Device = Any
"""JAX's device class, which has no public name for type checkers."""


def result_type(*operands: Array | Scalar) -> np.dtype[Any]:
    """Return the dtype that `torch.result_type` gives, for any number of operands."""
    tensors = [x.dtype for x in operands if isinstance(x, Array) and x.ndim]
    points = [x.dtype for x in operands if isinstance(x, Array) and not x.ndim]
    numbers = [_of_number(x) for x in operands if not isinstance(x, Array)]
    found = _over(_joined(tensors), _over(_joined(points), _joined(numbers)))
    assert found is not None, "an operator has operands"
    return found


def promoted(*operands: Array | Scalar) -> list[Array]:
    """Return all operands converted to their result dtype."""
    dtype = result_type(*operands)
    return [jnp.asarray(x, dtype) for x in operands]


def floating(x: Array) -> Array:
    """Return integers and booleans as float32, for functions whose results are floats."""
    return x if jnp.issubdtype(x.dtype, jnp.floating) else x.astype(jnp.float32)


def is_floating(dtype: Any) -> bool:
    return bool(jnp.issubdtype(dtype, jnp.floating))


def _of_number(x: Scalar) -> np.dtype[Any]:
    if isinstance(x, bool):
        return jnp.dtype(jnp.bool_)
    return jnp.dtype(jnp.int64) if isinstance(x, int) else jnp.dtype(jnp.float32)


def _joined(dtypes: Sequence[Any]) -> np.dtype[Any] | None:
    if not dtypes:
        return None
    found = jnp.dtype(dtypes[0])
    for other in dtypes[1:]:
        found = jnp.promote_types(found, other)
    return found


def _over(higher: np.dtype[Any] | None, lower: np.dtype[Any] | None) -> np.dtype[Any] | None:
    """Combine two dtypes as `combine_categories` in torch's c10 does."""
    if higher is None or lower is None:
        return lower if higher is None else higher
    if is_floating(higher):
        return higher
    if higher == jnp.bool_ or is_floating(lower):
        return jnp.promote_types(higher, lower)
    return higher


NAMES: dict[np.dtype[Any], str] = {jnp.dtype(dtype): name for name, dtype in DTYPES.items()}


def to_jax(tensor: HostTensor, device: Device) -> Array:
    values = np.frombuffer(tensor.data, jnp.dtype(DTYPES[tensor.dtype])).reshape(tensor.shape)
    return jax.device_put(values.copy(), device)


def to_host(value: Array | int) -> HostTensor:
    """Return the bytes of an array; a size computed in the graph becomes an int64 of shape ()."""
    array = np.asarray(value, np.int64) if isinstance(value, int) else np.asarray(value)
    name = NAMES.get(array.dtype)
    if name is None:
        raise ExecutionError(f"a tensor of dtype {array.dtype} can't leave the backend; known: {', '.join(DTYPES)}.")
    return host_tensor(name, array.shape, array.tobytes())
