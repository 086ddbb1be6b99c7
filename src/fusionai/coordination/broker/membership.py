"""One process that lends a machine, from certificate to departure, and the invitations into a pool.

A member is (peer, boot number): a process started anew is a new member in the old one's place. `idle` members form the
backup pool, except those that *rest*: a machine lost several times in a short time gets no work for a while
(`rests_until_s`). Resting is no phase, because it follows from the journalled losses and the time.

`decisions` decides who may enrol, `presence` when a member is lost, `assignment` which members get stages."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Final

from fusionai.coordination.broker.events import (
    KeyVouched,
    MemberDraining,
    MemberLeft,
    MemberLost,
    MemberRegistered,
    PeerEnrolled,
)
from fusionai.coordination.machine import Machine, State, Transition, in_each
from fusionai.primitives.ids import JobId, PeerId, short


@dataclass(frozen=True, slots=True, kw_only=True)
class Invitation:
    """An invitation into the pool. Only the SHA-256 of its token is known here (`digest`)."""

    digest: str
    uses_left: int
    expires_at_s: float
    """Seconds since 1970."""
    peers: tuple[str, ...] = ()
    """Keys that were certified by it."""


REMEMBERED_BOOTS: Final = 16
REMEMBERED_LOSSES: Final = 16


@dataclass(frozen=True, slots=True)
class Reserved:
    """A plan gives this member stages of a job, as executor or as standby. Follows from `PlanMinted`."""

    job: JobId
    stages: tuple[int, ...]
    standbys: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class Released:
    """The job no longer needs this member. Follows from `PlanMinted`, `JobDone` or `JobFailed`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Member(State):
    """`profile` and `addresses`: as registered by the process. `job` is set while it has a part in one."""

    peer: PeerId
    boot: int = 0
    profile: bytes = b""
    addresses: tuple[str, ...] = ()
    memory_bytes: int = 0
    flops_per_s: float = 0.0
    """What it lends, by its profile."""
    fastest_flops_per_s: float = 0.0
    """The highest of all speeds that it has measured."""
    job: JobId | None = None
    stages: tuple[int, ...] = ()
    """Stages it runs; empty for a spare that is only a standby."""
    standbys: tuple[int, ...] = ()
    """Stages whose snapshots it keeps as their standby."""
    leaving: bool = False
    """Its owner asked it to leave after its present work. Kept over a loss of the same process."""
    losses: tuple[float, ...] = ()
    """Times at which this machine was lost, also with earlier processes; seconds since 1970, oldest first."""
    sponsor: PeerId | None = None
    """The member that had this key certified, if no invitation did."""
    earlier_boots: tuple[int, ...] = ()
    """Boot numbers of this machine's earlier processes: their messages no longer count."""


def enrolled(fact: PeerEnrolled) -> Member:
    """Return the member for a certified key whose process has not registered yet."""
    peer = PeerId(fact.peer)
    return Member(entity=f"member {short(peer)}", phase="joining", peer=peer, story=("PeerEnrolled -> joining",))


def vouched(fact: KeyVouched) -> Member:
    """Return the member for a further key of a member's own machine."""
    peer = PeerId(fact.peer)
    return Member(
        entity=f"member {short(peer)}",
        phase="joining",
        peer=peer,
        sponsor=PeerId(fact.sponsor),
        story=("KeyVouched -> joining",),
    )


def successor(member: Member, fact: MemberRegistered) -> Member:
    """Return the member for a new process of the same machine. It keeps neither place nor story of the old one."""
    fresh = Member(
        entity=member.entity,
        phase="joining",
        peer=member.peer,
        sponsor=member.sponsor,
        losses=member.losses,
        earlier_boots=(*member.earlier_boots, member.boot)[-REMEMBERED_BOOTS:],
    )
    return MEMBERSHIP.advance(fresh, fact)


def rests_until_s(member: Member, *, losses: int, window_s: float, rest_s: float) -> float:
    """Return until when a machine lost `losses` times within `window_s` rests, in seconds since 1970; else 0.0. Each
    loss costs a job one recovery, so such a machine is worse than no spare."""
    if not 0 < losses <= len(member.losses):
        return 0.0
    newest = max(member.losses)
    return newest + rest_s if sum(newest - lost_s <= window_s for lost_s in member.losses) >= losses else 0.0


def _register(member: Member, fact: MemberRegistered) -> Member:
    """Register again from the same process. The member keeps its place if a job still reserves it."""
    known = replace(
        member,
        boot=fact.boot,
        profile=fact.profile,
        addresses=fact.addresses,
        memory_bytes=fact.memory_bytes,
        flops_per_s=fact.flops_per_s,
        fastest_flops_per_s=fact.fastest_flops_per_s,
    )
    match member.phase:
        case "active" | "draining" | "idle":
            return known
        case "lost" if member.job is not None:
            return replace(known, phase="draining" if member.leaving else "active")
        case _:
            return replace(_apart(known), phase="idle", leaving=False)


def _reserve(member: Member, event: Reserved) -> Member:
    """Reserve the member. One that drains may stay in its job's next plan, and still drains."""
    phase = "draining" if member.phase == "draining" else "active"
    return replace(member, phase=phase, job=event.job, stages=event.stages, standbys=event.standbys)


def _release(member: Member, _: Released) -> Member:
    phase = {"active": "idle", "draining": "left"}.get(member.phase, member.phase)
    return replace(_apart(member), phase=phase)


def _drain(member: Member, _: MemberDraining) -> Member:
    return replace(member, phase="draining", leaving=True)


def _leave(member: Member, _: MemberLeft) -> Member:
    return replace(_apart(member), phase="left")


def _lose(member: Member, fact: MemberLost) -> Member:
    """Mark as lost. `job` stays set until the job's next plan or end releases the member."""
    return replace(member, phase="lost", losses=(*member.losses, fact.at_s)[-REMEMBERED_LOSSES:])


def _apart(member: Member) -> Member:
    """Return the member without a part in any job."""
    return replace(member, job=None, stages=(), standbys=())


_PRESENT: Final = ("idle", "active", "draining")

MEMBERSHIP: Final[Machine[Member]] = Machine(
    "membership",
    (
        Transition(("joining",), MemberRegistered, ("idle",), _register),
        *in_each(_PRESENT, MemberRegistered, (), _register, "same process"),
        Transition(("idle",), Reserved, ("active",), _reserve),
        *in_each(("active", "draining"), Reserved, (), _reserve, "new plan of its job"),
        Transition(("active",), Released, ("idle",), _release),
        Transition(("draining",), Released, ("left",), _release),
        Transition(("active",), MemberDraining, ("draining",), _drain),
        Transition((*_PRESENT, "joining", "lost"), MemberLeft, ("left",), _leave),
        Transition(_PRESENT, MemberLost, ("lost",), _lose, "lease expired"),
        Transition(("lost",), Released, ("lost",), _release),
        Transition(
            ("lost",), MemberRegistered, ("idle", "active", "draining"), _register, "same process, back in its place"
        ),
        Transition(("left",), MemberRegistered, ("idle",), _register, "back as a spare"),
    ),
    initial=("joining",),
)
