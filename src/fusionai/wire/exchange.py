"""Messages of an exchange between replicas in which the machines that hold the same parameters send to each other.

The job owner's driver sends `ExchangeRound` to its stages: who takes part, and where the others' stages are. Stages
send `ExchangePart` to each other. The state with which a replica begins later takes the same way.
`coordination.training.joint_rounds` decides the rounds, `coordination.training.twin_round` is a stage's part in one,
`execution.training.twins` performs it.
"""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec
from msgspec import Meta

from fusionai.wire.base import Blob, Count, Fence, Job, Peer, TensorHeader, WireMessage
from fusionai.wire.codecs import PackedTensor

RoundPart = Literal["difference", "mean"]
"""`difference`: a replica's pseudo-gradient of a share, to the replica that sums the share. `mean`: the sum divided by
the number of replicas, to all replicas."""
PartKind = Literal[RoundPart, "state"]
"""`state`: agreed parameters and outer momentum of a share, to a replica that begins later."""


class TwinStage(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """A stage of another replica that holds some parameters of the receiver of the message."""

    member: Count
    """Place of its replica among the members of the round."""
    job: Job
    stage: Count
    peer: Peer
    fence: Fence
    """Present fence of its job."""
    ticket: Blob = b""
    """The broker's ticket for the peer, which says where it listens; empty for the owner, which no member dials."""
    wants: bool
    """Whether it still waits for this round's update."""
    attempt: Count = 0
    """How often it asked again under this fence because a connection ended; everything is sent to it again."""
    keys: Annotated[tuple[tuple[Count, Count], ...], Meta(max_length=100_000)]
    """Parameters that both stages hold: half-open ranges of the receiver's trainable parameters, sorted by name."""


class DifferenceReady(WireMessage, frozen=True, kw_only=True, tag="difference_ready"):
    """Stage -> driver: the last optimizer step before an exchange between replicas is applied. The stage waits for an
    `ExchangeRound`."""

    fence: Fence
    stage: Count
    step: Count
    attempt: Count = 0
    """How often the stage has asked again under this fence, because a connection of a twin ended."""


class StateWanted(WireMessage, frozen=True, kw_only=True, tag="state_wanted"):
    """Stage -> driver: the stage belongs to a replica that begins later, and needs the state that the others have
    agreed on before its first step."""

    fence: Fence
    stage: Count
    attempt: Count = 0
    """How often the stage has asked again under this fence, because a connection of a twin ended."""


class ExchangeRound(WireMessage, frozen=True, kw_only=True, tag="exchange_round"):
    """Driver -> stage: a round that the owner has journalled. It is sent again when a stage of another replica begins
    to wait for the round, or no longer does. Or a welcome: each member sends its share of the agreed state to a replica
    that begins later or was late."""

    fence: Fence
    stage: Count
    step: Count
    number: Count
    """Number of the round, from 1."""
    place: Count
    """Place of the stage's own replica among the members."""
    weights: Annotated[tuple[Annotated[float, Meta(gt=0)], ...], Meta(min_length=1, max_length=4096)]
    """Relative size of each member's share, in the order in which differences are summed."""
    twins: Annotated[tuple[TwinStage, ...], Meta(max_length=100_000)]
    kept_from: Count
    """What was sent in earlier rounds may be dropped."""
    is_welcome: bool = False
    """Whether this is a welcome. Then `step` ended the round whose result the state is, `number` counts welcomes,
    `weights` divide the state among its senders, `place` is their number at the stage that receives it, and `twins` are
    at the senders its stages, and at it the senders' ones."""


class ExchangePart(WireMessage, frozen=True, kw_only=True, tag="exchange_part"):
    """Stage -> stage of another replica: part of a round's differences or means, one flat piece for each parameter.
    Through the driver where the stages have no link."""

    fence: Fence
    """Fence of the receiver's job."""
    job: Job
    """The receiver's job."""
    stage: Count
    """The receiver."""
    number: Count
    """Number of the round or welcome."""
    member: Count
    """Place of the sender's replica among the members of the round or welcome."""
    kind: PartKind
    packed: Annotated[tuple[PackedTensor, ...], Meta(max_length=100_000)] = ()
    tensors: Annotated[tuple[TensorHeader, ...], Meta(max_length=100_000)] = ()


class ExchangeWhole(WireMessage, frozen=True, kw_only=True, tag="exchange_whole"):
    """Stage -> driver: the stage has all means of a round, and adopts them when `ExchangeAdopt` arrives."""

    fence: Fence
    stage: Count
    number: Count


class ExchangeAdopt(WireMessage, frozen=True, kw_only=True, tag="exchange_adopt"):
    """Driver -> stage: every stage of every member has had all means of a round, and the owner has journalled it. The
    stage adopts them."""

    fence: Fence
    stage: Count
    number: Count


class ExchangeMissing(WireMessage, frozen=True, kw_only=True, tag="exchange_missing"):
    """Stage -> driver, answer to an `ExchangeRound` of a step that it has applied: it does not have what it sent in
    that round any more."""

    fence: Fence
    stage: Count
    number: Count
