"""A stage's state as a stream of chunks of limited size.

`execution.training.runtime` exports and imports chunks; `training.checkpoints` stores them.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Final, Protocol, TypeVar

from fusionai.primitives.tensors import HostTensor
from fusionai.wire.messages import TensorHeader

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
