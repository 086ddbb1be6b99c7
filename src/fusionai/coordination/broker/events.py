"""The facts of a pool, which the broker journals before it acknowledges anything.

A fact is complete: folding the facts over an empty pool (`pool.advance`) gives the pool, at once or after a restart.
What a restart may forget (leases, connections, progress within a phase) is no fact.

`decisions` makes facts, `broker.journal` keeps them, and they move the machines of `membership` and `job`.
"""

from __future__ import annotations

from typing import Annotated, Final, Literal

import msgspec
from msgspec import Meta

from fusionai.wire.messages import Address, Count, Index, Job, Name, Peer, Seconds, Text, WorkShare

Profile = Annotated[bytes, Meta(max_length=65_536)]
"""A `scheduling.PeerProfile` as msgpack; opaque here."""
PlanBytes = Annotated[bytes, Meta(max_length=16_777_216)]
"""A `scheduling.Plan` of version 0 as msgpack; opaque here."""


class MemberPlacement(msgspec.Struct, frozen=True, forbid_unknown_fields=True, array_like=True):
    """One member's part in a plan: the stages it runs, and the stages whose standby it is. A spare that is only a
    standby has no `stages`."""

    peer: Peer
    stages: tuple[Index, ...]
    standbys: tuple[Index, ...] = ()


class _Fact(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True, tag_field="e"):
    """Base: `at_s` is seconds since 1970 on the broker's clock."""

    at_s: Seconds


class InvitationIssued(_Fact, frozen=True, tag="invitation_issued"):
    """`invitation` is the SHA-256 of the token in hex; the token itself is kept nowhere."""

    invitation: Name
    uses: Count
    expires_at_s: Seconds


class PeerEnrolled(_Fact, frozen=True, tag="peer_enrolled"):
    """A key was certified for this pool."""

    peer: Peer
    purpose: Literal["provider", "owner"]
    invitation: Name


class KeyVouched(_Fact, frozen=True, tag="key_vouched"):
    """A member had a further key of its own machine certified (a machine that lends itself and runs jobs has two)."""

    peer: Peer
    purpose: Literal["provider", "owner"]
    sponsor: Peer


class MemberRegistered(_Fact, frozen=True, tag="member_registered"):
    peer: Peer
    boot: Count
    profile: Profile
    addresses: tuple[Address, ...]
    memory_bytes: Count = 0
    """Memory that it lends; 0 in facts of earlier versions."""
    flops_per_s: float = 0.0
    """Speed that it lends, its share of the time included; 0 in facts of earlier versions."""
    fastest_flops_per_s: float = 0.0
    """The highest of all speeds that it has measured, its share of the time included; 0 in facts of earlier
    versions."""


class MemberDraining(_Fact, frozen=True, tag="member_draining"):
    peer: Peer


class MemberLeft(_Fact, frozen=True, tag="member_left"):
    peer: Peer


class MemberLost(_Fact, frozen=True, tag="member_lost"):
    peer: Peer
    boot: Count
    reason: Text


class MemberEvicted(_Fact, frozen=True, tag="member_evicted"):
    """The key counts no more in this pool, however long its certificate is valid."""

    peer: Peer


class InvitationRevoked(_Fact, frozen=True, tag="invitation_revoked"):
    """`invitation` as in `InvitationIssued`. Members that it admitted before stay."""

    invitation: Name


class JobRequested(_Fact, frozen=True, tag="job_requested"):
    job: Job
    title: Name
    owner: Peer
    steps: Count


class JobQueued(_Fact, frozen=True, tag="job_queued"):
    """The job has a place in the queue, or, if it had one before, needs other machines than it asked for."""

    job: Job
    title: Name
    owner: Peer
    steps: Count
    machines: Count
    memory_bytes: Count
    excluded: tuple[Peer, ...]
    priority: Name


class TurnMissed(_Fact, frozen=True, tag="turn_missed"):
    """The job's turn is over and it has not taken its machines."""

    job: Job


class PlanMinted(_Fact, frozen=True, tag="plan_minted"):
    """`version` is the job's plan now. Its members are reserved, those of the earlier plan are released."""

    job: Job
    version: Count
    plan: PlanBytes
    members: tuple[MemberPlacement, ...]


class JobStarted(_Fact, frozen=True, tag="job_started"):
    job: Job


class JobStopAsked(_Fact, frozen=True, tag="job_stop_asked"):
    """`gives_way_to`: the queued job that gets its machines; empty if a member asked for the stop."""

    job: Job
    by: Peer
    gives_way_to: str = ""


class JobUnattended(_Fact, frozen=True, tag="job_unattended"):
    """The job's driver is not connected. Its members stay reserved."""

    job: Job
    reason: Text


class JobAttended(_Fact, frozen=True, tag="job_attended"):
    job: Job


class JobNoted(_Fact, frozen=True, tag="job_noted"):
    """A line for the job's history."""

    job: Job
    text: Text


class JobDone(_Fact, frozen=True, tag="job_done"):
    job: Job
    step: int
    detail: Text


class JobFailed(_Fact, frozen=True, tag="job_failed"):
    job: Job
    step: int
    detail: Text


class WorkCounted(_Fact, frozen=True, tag="work_counted"):
    """Work that a job's owner has reported, as sums since the run began, as far as it counts. `capped`: members of
    which more was reported than they can have done."""

    job: Job
    run: Name
    sequence: Count
    steps: Count
    tokens: Count
    shares: tuple[WorkShare, ...]
    capped: tuple[Peer, ...] = ()


class BytesRelayed(_Fact, frozen=True, tag="bytes_relayed"):
    """The relay on this broker's machine has copied `relayed_bytes` more."""

    peer: Peer
    relayed_bytes: Count


Fact = (
    InvitationIssued
    | PeerEnrolled
    | KeyVouched
    | MemberRegistered
    | MemberDraining
    | MemberLeft
    | MemberLost
    | MemberEvicted
    | InvitationRevoked
    | JobRequested
    | JobQueued
    | TurnMissed
    | PlanMinted
    | JobStarted
    | JobStopAsked
    | JobUnattended
    | JobAttended
    | JobNoted
    | JobDone
    | JobFailed
    | WorkCounted
    | BytesRelayed
)

_DECODER: Final[msgspec.msgpack.Decoder[Fact]] = msgspec.msgpack.Decoder(Fact)
_ENCODER: Final = msgspec.msgpack.Encoder()


def encode(fact: Fact) -> bytes:
    return _ENCODER.encode(fact)


def decode(data: bytes) -> Fact:
    """Raises `msgspec.ValidationError` or `msgspec.DecodeError`; `broker.journal` turns them into `StorageError`."""
    return _DECODER.decode(data)
