"""Decides how every stage gets to the official step, from what all members report. Pure.

A stage is fine at C applied steps, or at C-1 with step C-1 prepared: the last record then completes it (rules 4 and 5
of the recovery protocol, docs/recovery.md). The others are lost. They start from the newest step `base` at which the
state of each exists somewhere and every neighbour still has what it sent from there on; a neighbour that has not joins
them if its own state of that step exists. If there is no such step, all stages go back to the checkpoint.

Differs from the protocol's paper form in three points: a checkpoint counts as a snapshot of every stage, a stage
without state can start anywhere, and a snapshot may be passed on by any member that holds it.

Neighbours: `coordination.training.rounds` asks and turns the answer into commands.
"""

from __future__ import annotations

from collections.abc import Mapping, Set
from dataclasses import dataclass, field

from fusionai.coordination.training.interface import Roles, StageReported
from fusionai.coordination.training.stage_interface import Source


@dataclass(frozen=True, slots=True, kw_only=True)
class Restoration:
    """`sources`: the stages to restore at `base` and from what; the other stages lose nothing. `holders`: for those
    that take a snapshot another member holds, that member. `rollback`: all stages start at the checkpoint, and the
    steps from there are run and voted on like new ones."""

    base: int
    sources: Mapping[int, Source]
    holders: Mapping[int, str]
    rollback: bool = False


@dataclass(slots=True)
class RestoringRound:
    """Answers of members and stages in one round, up to the moment when all stages are ready."""

    positions: dict[int, StageReported] = field(default_factory=dict[int, StageReported])
    snapshots: dict[str, frozenset[tuple[int, int]]] = field(default_factory=dict[str, frozenset[tuple[int, int]]])
    """Member -> the (stage, step) of the snapshots it holds."""
    restoration: Restoration | None = None
    """Decision of this round, once all members have answered."""
    loaded: set[int] = field(default_factory=set[int])
    ready: set[int] = field(default_factory=set[int])
    replayed: dict[int, int] = field(default_factory=dict[int, int])
    """Replaying stage -> its next step."""


def decide(
    roles: Roles,
    positions: Mapping[int, StageReported],
    snapshots: Mapping[str, Set[tuple[int, int]]],
    *,
    committed: int,
    checkpoint: int | None,
    records_from: int,
) -> Restoration:
    """`snapshots`: living member -> its (stage, step). `checkpoint`: step of the newest complete one, None where the
    first state is initialised again; a job that begins with a given state has one of step 0. `records_from`:
    the oldest commit record at hand."""
    lost = frozenset(stage for stage in roles.stages if not is_fine(positions[stage], committed, records_from))
    if not lost:
        return Restoration(base=committed, sources={}, holders={})
    known = {step for held in snapshots.values() for _, step in held}
    beginning = checkpoint or 0
    for base in sorted({*known, beginning, committed}, reverse=True):
        if not records_from <= base <= committed:
            continue
        restored = _closure(roles, positions, snapshots, lost, base, committed, checkpoint)
        if restored is None:
            continue
        if len(restored) == len(roles.places) and base == beginning:
            break
        sources: dict[int, Source] = {}
        for stage in sorted(restored):
            source = _source(roles, snapshots, stage, base, checkpoint)
            assert source is not None, "the closure has one for each"
            sources[stage] = source
        return Restoration(base=base, sources=sources, holders=_holders(roles, snapshots, sources, base))
    everybody: dict[int, Source] = {stage: _from_checkpoint(roles, stage, checkpoint) for stage in roles.stages}
    return Restoration(base=beginning, sources=everybody, holders={}, rollback=True)


def is_fine(position: StageReported, committed: int, records_from: int) -> bool:
    """Whether the stage is at `committed`, or the last record takes it there."""
    missed = position.applied == committed - 1 == position.prepared and records_from < committed
    return position.applied == committed or missed


def _closure(
    roles: Roles,
    positions: Mapping[int, StageReported],
    snapshots: Mapping[str, Set[tuple[int, int]]],
    lost: frozenset[int],
    base: int,
    committed: int,
    checkpoint: int | None,
) -> frozenset[int] | None:
    """Return all stages that must start from `base` with the lost ones; None if no state of it exists for one."""
    restored = lost
    while True:
        if any(_source(roles, snapshots, stage, base, checkpoint) is None for stage in restored):
            return None
        if base == committed:
            return restored
        beside = {other for stage in restored for other in roles.neighbours[stage]} - restored
        forgetful = {stage for stage in beside if positions[stage].retained_from > base}
        if not forgetful:
            return restored
        restored |= forgetful


def _source(
    roles: Roles, snapshots: Mapping[str, Set[tuple[int, int]]], stage: int, base: int, checkpoint: int | None
) -> Source | None:
    if stage in roles.stateless:
        return "initialise"
    if any((stage, base) in held for held in snapshots.values()):
        return "snapshot"
    return _from_checkpoint(roles, stage, checkpoint) if base == (checkpoint or 0) else None


def _from_checkpoint(roles: Roles, stage: int, checkpoint: int | None) -> Source:
    return "import" if checkpoint is not None and stage not in roles.stateless else "initialise"


def _holders(
    roles: Roles, snapshots: Mapping[str, Set[tuple[int, int]]], sources: Mapping[int, Source], base: int
) -> dict[int, str]:
    """Who has to pass a snapshot on: the standby if it can, otherwise any holder."""
    holders: dict[int, str] = {}
    for stage, source in sources.items():
        wanted = (stage, base)
        if source != "snapshot" or wanted in snapshots.get(roles.places[stage], frozenset()):
            continue
        standby = roles.standbys.get(stage, "")
        if wanted in snapshots.get(standby, frozenset()):
            holders[stage] = standby
        else:
            holders[stage] = min(peer for peer, held in snapshots.items() if wanted in held)
    return holders
