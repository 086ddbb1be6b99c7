"""Host tensors on their way: a stage's state as chunks of limited size, headers of messages, numpy arrays and back.

`execution.training.runtime` exports and imports chunks, `training.checkpoints` stores them, and `execution.sketches`,
`execution.training.codecs` and `execution.training.exchange` compute with the arrays.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Final, Protocol, TypeVar

import numpy as np

from fusionai.primitives.tensors import HostTensor
from fusionai.wire.messages import Message, TensorHeader

CHUNK_BYTES: Final = 32 * 2**20
"""Bytes per chunk: large enough to amortise a message, small enough to bound memory. A larger tensor travels alone."""


class Sized(Protocol):
    """A tensor, packed or not."""

    @property
    def nbytes(self) -> int: ...


Some = TypeVar("Some", bound=Sized)


def chunks(entries: Iterable[tuple[str, Some]]) -> Iterator[list[tuple[str, Some]]]:
    """Group entries in order. Every chunk stays below `CHUNK_BYTES`, except one with a single larger tensor."""
    chunk: list[tuple[str, Some]] = []
    size_bytes = 0
    for name, tensor in entries:
        if chunk and size_bytes + tensor.nbytes > CHUNK_BYTES:
            yield chunk
            chunk, size_bytes = [], 0
        chunk.append((name, tensor))
        size_bytes += tensor.nbytes
    if chunk:
        yield chunk


def headers(tensors: Mapping[str, HostTensor]) -> tuple[TensorHeader, ...]:
    """Return the descriptions of a message's tensors, in order."""
    return tuple(TensorHeader(name, tensor.dtype, tensor.shape, tensor.layout) for name, tensor in tensors.items())


def by_name(message: Message, tensors: Sequence[HostTensor]) -> dict[str, HostTensor]:
    """Return a message's tensors by the names in its headers."""
    return {header.name: tensor for header, tensor in zip(getattr(message, "tensors", ()), tensors, strict=True)}


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
