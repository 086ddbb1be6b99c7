"""Messages of any job: opening a connection, adopting a fence, losing a stage or a link, fetching weights."""

from __future__ import annotations

from typing import Annotated, Final, Literal

import msgspec
from msgspec import Meta

from fusionai.wire.base import (
    Blob,
    Count,
    Fence,
    Job,
    Name,
    Neighbour,
    Peer,
    Placement,
    RefusalCode,
    TensorHeader,
    Text,
    WireMessage,
)


class OpenJob(WireMessage, frozen=True, kw_only=True, tag="open_job"):
    """First message on a connection between members of a job: the dialling side shows its ticket."""

    job: Job
    fence: Fence
    ticket: Blob
    placement: Placement = b""
    """The placement of this round, signed by the job's owner. The owner itself needs none."""
    task: Literal["train", "serve"] = "train"
    """Kind of worker that the listener opens if it has no part in this job yet."""
    twin_of: Job | None = None
    """The dialling member's own job if that is another replica of the model; `ticket` is then for that job."""


class Enlist(WireMessage, frozen=True, kw_only=True, tag="enlist"):
    """Driver -> member, first message of every round and once per member: adopt this (higher) fence. It defines the
    member's whole part in the job: the member drops stages that `neighbours` places elsewhere and keeps snapshots."""

    fence: Fence
    job: Job
    neighbours: Annotated[tuple[Neighbour, ...], Meta(max_length=4096)]
    standbys: Annotated[tuple[Count, ...], Meta(max_length=4096)] = ()
    """Stages whose snapshots the receiver keeps."""
    partition: Name = ""
    """Identifies the cut of the graph. Snapshots of another cut are dropped."""
    ticket: Blob
    """The receiver's own ticket, for the connections it dials."""
    placement: Placement
    """Signed by the job's owner and shown with the ticket. Members accept no connection from a key that it does not
    name."""


class SnapshotAt(msgspec.Struct, frozen=True, forbid_unknown_fields=True, array_like=True, order=True):
    """A complete state of `stage` after `step` steps."""

    stage: Count
    step: Count


class Enlisted(WireMessage, frozen=True, kw_only=True, tag="enlisted"):
    """Member -> driver, answer to `Enlist`: the snapshots it holds. Its stages answer with `Status`."""

    fence: Fence
    fingerprint: Name
    snapshots: Annotated[tuple[SnapshotAt, ...], Meta(max_length=4096)] = ()


class Detach(WireMessage, frozen=True, kw_only=True, tag="detach"):
    """Driver -> member: the job is over for this member. Drop all its stages and snapshots."""

    fence: Fence
    reason: Text = ""


class StageFailed(WireMessage, frozen=True, kw_only=True, tag="stage_failed"):
    """Member -> driver: the stage can't go on."""

    fence: Fence
    stage: Count
    code: RefusalCode
    reason: Text


class LinkLost(WireMessage, frozen=True, kw_only=True, tag="link_lost"):
    """Member -> driver: the connection to `peer` broke, fell silent or could not be opened."""

    fence: Fence
    peer: Peer
    reason: Text


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
    """A member that has tensors or is fetching them. `digests`: which ones; empty means all. `ticket`: the broker's for
    it, which says where it listens; empty for the owner, which is asked over its own connection."""

    peer: Peer
    ticket: Blob = b""
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
