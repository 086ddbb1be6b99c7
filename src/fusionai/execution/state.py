"""A stage's state as a stream of chunks of bounded size. Decides the chunk size; knows no framework.

Neighbours: `execution.runtime` exports and imports, `training.checkpoints` stores.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Final, Protocol, TypeVar

from fusionai.primitives.tensors import HostTensor
from fusionai.wire.messages import TensorHeader

CHUNK_BYTES: Final = 32 * 2**20
"""Enough to amortise a message, little enough to bound memory. A single larger tensor travels alone."""


class Sized(Protocol):
    """A tensor, packed or not."""

    @property
    def nbytes(self) -> int: ...


Some = TypeVar("Some", bound=Sized)


def chunks(entries: Iterable[tuple[str, Some]]) -> Iterator[list[tuple[str, Some]]]:
    """Group entries in order; every chunk but one with a single large tensor stays below `CHUNK_BYTES`."""
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
    """What a message says of the tensors that follow it."""
    return tuple(TensorHeader(name, tensor.dtype, tensor.shape, tensor.layout) for name, tensor in tensors.items())
