"""Describes a tensor that is made of parts of other tensors: which elements of which tensor follow each other.

Files name and split weights differently from a module in memory: an expert's matrices are separate tensors in a file
and one stacked tensor in memory. An `Assembly` says how one is built from the other, in flat elements, so that any part
can be read without the rest. Decides what a well-formed assembly is; sizes are checked against the tensors before
anything is allocated. Needs no framework.

`capture.models.conversion` computes assemblies, `weight_manifest` reads by them, `checkpoint` writes by them, `reader`
reads the written tensors."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from math import prod
from typing import Annotated

import msgspec
from msgspec import Meta

from fusionai.primitives.errors import StorageError
from fusionai.primitives.tensors import ITEMSIZE_BYTES, HostTensor, host_tensor

Shape = tuple[int, ...]


class Extent(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """`count` elements of `tensor` from element `first` on, in memory order."""

    tensor: str
    first: Annotated[int, Meta(ge=0)]
    count: Annotated[int, Meta(ge=1)]


class Assembly(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A tensor of this shape whose memory is the concatenation of the extents."""

    shape: Annotated[tuple[Annotated[int, Meta(ge=0)], ...], Meta(max_length=16)]
    extents: tuple[Extent, ...]

    @property
    def sources(self) -> tuple[str, ...]:
        """Names of the tensors it uses, each once, in the order of first use."""
        return tuple(dict.fromkeys(extent.tensor for extent in self.extents))


def whole(tensor: str, shape: Shape) -> Assembly:
    """Return an assembly that is the whole tensor under another name."""
    count = prod(shape)
    return Assembly(shape, (Extent(tensor, 0, count),) if count else ())


def assembled(name: str, assembly: Assembly, read: Callable[[str], HostTensor]) -> HostTensor:
    """Build the tensor `name`. `read` returns a source tensor, mapped. Raises `StorageError` if the parts do not
    fit."""
    sources = {tensor: read(tensor) for tensor in assembly.sources}
    dtypes = sorted({tensor.dtype for tensor in sources.values()})
    if len(dtypes) != 1:
        raise StorageError(f"{name}: expected parts of one type, got {' and '.join(dtypes) or 'none'}.")
    itemsize = ITEMSIZE_BYTES[dtypes[0]]
    if (elements := sum(extent.count for extent in assembly.extents)) != prod(assembly.shape):
        raise StorageError(f"{name}: expected parts for the shape {list(assembly.shape)}, got {elements} elements.")
    for extent in assembly.extents:
        if (extent.first + extent.count) * itemsize > sources[extent.tensor].nbytes:
            raise StorageError(
                f"{name}: expected {extent.tensor} to have at least {extent.first + extent.count} elements."
            )
    if len(assembly.extents) == 1:
        extent = assembly.extents[0]
        data = sources[extent.tensor].data[extent.first * itemsize : (extent.first + extent.count) * itemsize]
        return HostTensor(dtypes[0], assembly.shape, data)
    buffer = memoryview(bytearray(prod(assembly.shape) * itemsize))
    start = 0
    for extent in assembly.extents:
        nbytes = extent.count * itemsize
        first = extent.first * itemsize
        buffer[start : start + nbytes] = sources[extent.tensor].data[first : first + nbytes]
        start += nbytes
    return host_tensor(dtypes[0], assembly.shape, buffer.toreadonly())


def inverted(assemblies: Mapping[str, Assembly], shapes: Mapping[str, Shape]) -> dict[str, Assembly]:
    """Return how the sources, of these shapes, are rebuilt from the tensors made of them. Raises `ValueError` if an
    element of a source is in none of them or in several."""
    pieces: dict[str, list[tuple[int, Extent]]] = {source: [] for source in shapes}
    for name, assembly in assemblies.items():
        start = 0
        for extent in assembly.extents:
            if extent.tensor in pieces:
                pieces[extent.tensor].append((extent.first, Extent(name, start, extent.count)))
            start += extent.count
    made: dict[str, Assembly] = {}
    for source, found in pieces.items():
        extents: list[Extent] = []
        end = 0
        for first, extent in sorted(found, key=lambda piece: piece[0]):
            if first != end:
                raise ValueError(f"element {min(first, end)} of {source} is not in exactly one tensor")
            end += extent.count
            extents.append(extent)
        if end != prod(shapes[source]):
            raise ValueError(f"element {end} of {source} is in no tensor")
        made[source] = Assembly(shapes[source], tuple(extents))
    return made
