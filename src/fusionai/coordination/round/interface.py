"""What the driver machines of training and serving jobs share: roles of a plan version, events, commands.

An event enters the machine with its fence, from one queue; the machine answers with commands, which a shell performs
in order. `coordination.training.interface` and `coordination.serving.interface` add what only their kind of job has.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal, Self

import msgspec
from msgspec import Struct

from fusionai.coordination.round.verification import Check, Outcome
from fusionai.wire.base import Fence

FaultKind = Literal["peer", "standby", "link", "stage", "probe", "late", "leaving", "faulty"]


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanRoles:
    version: int
    owner: str
    places: Mapping[int, str]
    """Stage -> peer that runs it."""
    standbys: Mapping[int, str] = field(default_factory=dict[int, str])
    """Stage -> warm standby, which holds the stage's snapshots (training) or weights (serving)."""
    beside: frozenset[tuple[int, str]] = frozenset()
    """(stage, standby) on one machine: such a standby does not check the stage's work."""
    partition: str = ""
    """Name of the cut. State of another cut's stages can't be used."""

    @property
    def stages(self) -> tuple[int, ...]:
        return tuple(sorted(self.places))

    @property
    def members(self) -> frozenset[str]:
        return frozenset(self.places.values()) | frozenset(self.standbys.values())

    def checkers(self, standbys: Mapping[int, str]) -> dict[int, str]:
        """Return those of `standbys`, by stage, that may check the stage's work."""
        return {stage: peer for stage, peer in standbys.items() if (stage, peer) not in self.beside}

    def stages_of(self, peer: str) -> tuple[int, ...]:
        return tuple(stage for stage, place in sorted(self.places.items()) if place == peer)

    def moves(self, other: Self) -> bool:
        """Return whether a stage runs elsewhere, or is another one, under `other`."""
        return self.partition != other.partition or dict(self.places) != dict(other.places)


# ------------------------------------------------------------------------------------------------------- events


class DriverEvent(Struct, frozen=True, kw_only=True):
    """`fence`: the round that the event belongs to; a machine ignores events of other rounds. None: any round."""

    fence: Fence | None = None


class MemberEnlisted(DriverEvent, frozen=True):
    """Answer to `Enlist`. `snapshots`: (stage, step) of every snapshot that the member holds."""

    peer: str
    snapshots: frozenset[tuple[int, int]] = frozenset()


class PeerLost(DriverEvent, frozen=True):
    """A member's process ended, was silent beyond the deadline, or can't be reached."""

    peer: str
    reason: str


class LinkBroken(DriverEvent, frozen=True):
    """A member lost its connection to another member; both may still be running."""

    reporter: str
    other: str
    reason: str


class StageFailure(DriverEvent, frozen=True):
    """A stage can't go on, but its peer can. `fatal`: it would fail on every peer (a graph that no backend can run).
    `peer`: the peer whose stage failed, for a standby that failed to load; empty: the one that runs the stage."""

    stage: int
    reason: str
    fatal: bool = False
    peer: str = ""


class StopAsked(DriverEvent, frozen=True):
    """The job's owner, or its broker, ends the job."""

    reason: str


class CommandFailed(DriverEvent, frozen=True):
    """The driver's own machine could not perform a command (disk full, data unreadable)."""

    reason: str


# ----------------------------------------------------------------------------------------------------- commands


class AskPlan(Struct, frozen=True):
    """Request a plan without these peers (they may serve again if no other peer can). The answer, however long it
    takes, is an event with the new roles. A later request replaces an earlier one. `urgent`: a stage has no peer."""

    without: frozenset[str]
    reason: str
    urgent: bool = True


class ReportFault(Struct, frozen=True):
    """Report a fault to the user. `stages` wait because of it; `successors`: peers that take them over at once.
    `step`: of a training job, the step in progress."""

    kind: FaultKind
    peer: str
    stages: tuple[int, ...]
    reason: str
    step: int = 0
    successors: Mapping[int, str] = msgspec.field(default_factory=dict[int, str])


class ReportCheck(Struct, frozen=True):
    """Report to the user the outcome of a check, with the reason. `partners`: see `CheckVerdict`."""

    check: Check
    outcome: Outcome
    reason: str
    partners: tuple[str, ...] = ()


class Distrust(Struct, frozen=True):
    """Exclude this peer from all later plans of the job, because it gave wrong results. Nothing that it computed,
    probes included, is a reference for other peers any more."""

    peer: str
    reason: str


class EndJob(Struct, frozen=True):
    """End the job. `failed`: why the job can't go on. `early`: why it needs no further steps. `steps`: of a training
    job, the number of committed steps."""

    steps: int = 0
    stopped: str | None = None
    early: str | None = None
    failed: str | None = None


SharedCommand = AskPlan | ReportFault | ReportCheck | Distrust | EndJob
