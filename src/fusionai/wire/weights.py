"""Messages by which members fetch weights from each other, piece by piece, and descriptions of the tensors."""

from __future__ import annotations

from typing import Annotated, Final

import msgspec
from msgspec import Meta

from fusionai.wire.base import (
    Addresses,
    Count,
    Fence,
    Name,
    Peer,
    TensorHeader,
    WireMessage,
)

Digest = Annotated[bytes, Meta(min_length=32, max_length=32)]
"""A SHA-256 digest."""
PIECE_BYTES: Final = 1_048_576
"""Bytes of a weight piece, the unit in which weights are requested and verified."""


class WeightSpec(msgspec.Struct, frozen=True, forbid_unknown_fields=True, array_like=True):
    """One tensor as stored in the model's files. `pieces`: SHA-256 of each piece of `PIECE_BYTES`; the last piece may
    be shorter."""

    key: Name
    dtype: Annotated[str, Meta(max_length=16)]
    shape: Annotated[tuple[Count, ...], Meta(max_length=16)]
    digest: Digest
    """SHA-256 over all bytes of the tensor. Peers request the tensor by it."""
    pieces: Annotated[tuple[Digest, ...], Meta(max_length=65_536)]


class WeightSource(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """A member that has tensors or is fetching them. `digests`: which ones; empty means all."""

    peer: Peer
    addresses: Addresses
    digests: Annotated[tuple[Digest, ...], Meta(max_length=100_000)] = ()


class WeightRefused(WireMessage, frozen=True, kw_only=True, tag="weight_refused"):
    """Member -> driver: `source` sent bytes that do not match this tensor's digests. They were fetched from another
    source."""

    fence: Fence
    stage: Count
    source: Peer
    key: Name


class WeightAsk(WireMessage, frozen=True, kw_only=True, tag="weight_ask"):
    """Member -> member, on a state connection: requests pieces [first, first + count) of a tensor."""

    digest: Digest
    first: Count
    count: Annotated[int, Meta(ge=1, le=64)]


class WeightPieces(WireMessage, frozen=True, kw_only=True, tag="weight_pieces"):
    """Answer to `WeightAsk`: tensor `bytes` (uint8). Without it, the sender does not have the pieces (any more)."""

    digest: Digest
    first: Count
    tensors: Annotated[tuple[TensorHeader, ...], Meta(max_length=1)] = ()
