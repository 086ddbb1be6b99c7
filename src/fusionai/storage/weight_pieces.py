"""A tensor's bytes in pieces: sizes, hashes, and validation of descriptions. Pure.

Decides what a well-formed `WeightSpec` is; all sizes follow from dtype and shape. `weight_manifest` makes specs,
`weight_store` keeps data that matches them, `execution.weights.fetching` fetches.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable

from fusionai.primitives.errors import StorageError
from fusionai.primitives.tensors import tensor_bytes
from fusionai.wire.serving import PIECE_BYTES, WeightSpec


def spec_bytes(spec: WeightSpec) -> int:
    """Return the tensor's size in bytes. Raises `StorageError` for an inconsistent spec."""
    try:
        nbytes = tensor_bytes(spec.dtype, spec.shape)
    except ValueError as problem:
        raise StorageError(f"the description of {spec.key} is invalid: {problem}.") from None
    if len(spec.pieces) != pieces_of(nbytes):
        raise StorageError(
            f"the description of {spec.key} has {len(spec.pieces)} hashes, its {nbytes} bytes take {pieces_of(nbytes)}."
        )
    return nbytes


def pieces_of(nbytes: int) -> int:
    return -(-nbytes // PIECE_BYTES)


def piece_bytes(nbytes: int, piece: int) -> int:
    """Return the size in bytes of this piece of a tensor of `nbytes`."""
    return min(PIECE_BYTES, nbytes - piece * PIECE_BYTES)


def make_spec(key: str, dtype: str, shape: tuple[int, ...], pieces: Iterable[bytes | memoryview]) -> WeightSpec:
    """Hash a tensor given in pieces, each of `PIECE_BYTES` except the last."""
    whole = hashlib.sha256()
    hashes: list[bytes] = []
    for piece in pieces:
        whole.update(piece)
        hashes.append(hashlib.sha256(piece).digest())
    return WeightSpec(key=key, dtype=dtype, shape=shape, digest=whole.digest(), pieces=tuple(hashes))


def good_pieces(spec: WeightSpec, first: int, data: memoryview) -> int:
    """Return how many complete pieces at the start of `data` match the tensor's pieces from `first` on."""
    nbytes = spec_bytes(spec)
    offset = 0
    for piece in range(first, len(spec.pieces)):
        end = offset + piece_bytes(nbytes, piece)
        if end > len(data) or hashlib.sha256(data[offset:end]).digest() != spec.pieces[piece]:
            return piece - first
        offset = end
    return len(spec.pieces) - first
