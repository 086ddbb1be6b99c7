"""A tensor's bytes in pieces: sizes, hashes, and whether a description is one. Pure.

Decides what a well-formed `WeightSpec` is; every size follows from dtype and shape. Neighbours: `weight_manifest` makes
specs, `weight_store` keeps what fits them, `execution.weights` fetches.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable

from fusionai.primitives.errors import StorageError
from fusionai.primitives.tensors import tensor_bytes
from fusionai.wire.serving import PIECE_BYTES, WeightSpec


def spec_bytes(spec: WeightSpec) -> int:
    """Bytes of the tensor. Raises `StorageError` for a spec that contradicts itself."""
    try:
        nbytes = tensor_bytes(spec.dtype, spec.shape)
    except ValueError as problem:
        raise StorageError(f"the description of {spec.key} is no tensor: {problem}.") from None
    if len(spec.pieces) != pieces_of(nbytes):
        raise StorageError(
            f"the description of {spec.key} has {len(spec.pieces)} hashes, its {nbytes} bytes take {pieces_of(nbytes)}."
        )
    return nbytes


def pieces_of(nbytes: int) -> int:
    return -(-nbytes // PIECE_BYTES)


def piece_bytes(nbytes: int, piece: int) -> int:
    """How long this piece of a tensor of `nbytes` is."""
    return min(PIECE_BYTES, nbytes - piece * PIECE_BYTES)


def make_spec(key: str, dtype: str, shape: tuple[int, ...], pieces: Iterable[bytes | memoryview]) -> WeightSpec:
    """Hash a tensor that comes piece by piece, each `PIECE_BYTES` but the last."""
    whole = hashlib.sha256()
    hashes: list[bytes] = []
    for piece in pieces:
        whole.update(piece)
        hashes.append(hashlib.sha256(piece).digest())
    return WeightSpec(key=key, dtype=dtype, shape=shape, digest=whole.digest(), pieces=tuple(hashes))


def good_pieces(spec: WeightSpec, first: int, data: memoryview) -> int:
    """How many whole pieces at the start of `data` are those of the tensor from `first` on."""
    nbytes = spec_bytes(spec)
    offset = 0
    for piece in range(first, len(spec.pieces)):
        end = offset + piece_bytes(nbytes, piece)
        if end > len(data) or hashlib.sha256(data[offset:end]).digest() != spec.pieces[piece]:
            return piece - first
        offset = end
    return len(spec.pieces) - first
