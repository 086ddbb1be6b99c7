"""Makes the plan after peers were lost, and plans with better standbys when machines join.

Cuts stay, and stages whose peers still run stay unchanged, so running work is not disturbed. A lost stage goes to its
standby, which has its snapshot. Otherwise it goes to an idle machine it fits on, which receives the snapshot or the
checkpoint. Otherwise, if memory permits, it goes to a machine that has already taken a lost stage. In exact mode only
machines with equal fingerprints may take over. If no machine can take a stage, `WaitingForMachines` says which machine
is missing and why the available ones can't.

A machine that was lost, or that failed as a standby, may be used in plans again after a wait, which doubles with each
consecutive loss (`Loss`). A machine that has joined again waits for at most `LONGEST_SETTLE_S`, because a new process
may work better. A process that fails repeatedly without ending waits for up to `LONGEST_RETRY_S`: each attempt costs a
plan, a load of weights and a log line, and its cause has not changed.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Final

import msgspec

from fusionai.primitives.errors import PlanError
from fusionai.primitives.units import format_bytes
from fusionai.scheduling.problem.stage_costs import StageCosts
from fusionai.scheduling.problem.types import Certificate, Excluded, PeerProfile, Plan, Problem, StagePlacement, Standby
from fusionai.scheduling.serving.prediction import predict_serving
from fusionai.scheduling.standby.assignment import matched, may_stand_by, with_standbys
from fusionai.scheduling.training.prediction import predict


@dataclass(frozen=True, slots=True)
class Unplaced:
    """A lost stage that no machine can take. `fingerprint`: required fingerprint; empty if any will do. `refusals`: the
    reason for each available machine."""

    stage: int
    memory_bytes: int
    """Memory that a machine must lend for the stage."""
    fingerprint: str
    lost_peer: str
    refusals: tuple[Excluded, ...]


@dataclass(frozen=True, slots=True)
class WaitingForMachines:
    """Result without a plan: the stages that wait for machines to join."""

    stages: tuple[Unplaced, ...]

    @property
    def sentence(self) -> str:
        """The wait in words: `waiting for a peer that lends 1.2 GB and computes the same bits as ada did (stage 1)`."""
        wanted = [_wish(stage) for stage in self.stages]
        if len(wanted) == 1:
            return f"waiting for a peer that {wanted[0]}"
        return f"waiting for {len(wanted)} peers: " + "; ".join(f"one that {wish}" for wish in wanted)


def replaced(
    plan: Plan, problem: Problem, lost: frozenset[str], candidates: Sequence[PeerProfile] = ()
) -> Plan | WaitingForMachines:
    """Return `plan` (version 0) without the peers in `lost`, or `WaitingForMachines` if a stage finds no machine.

    The peers in `lost` no longer have their state. `candidates`: machines that may be used now; one of `lost` among
    them has come back without state. Standbys that are not lost are available in any case. Standbys are assigned anew
    from the remaining machines, those with snapshots of running stages first. Raises `PlanError` if the job owner's own
    process is among `lost`."""
    if plan.feed in lost:
        raise PlanError(f"the job owner's own process {plan.feed!r} can't be replaced; it is restarted instead.")
    known = with_profiles(problem, candidates)
    costs = StageCosts(known, plan)
    gone = [stage for stage in plan.stages if stage.peer in lost]
    living = {stage.peer for stage in plan.stages} - lost
    offered = {candidate.peer for candidate in candidates}
    standbys = {standby.peer for standby in plan.standbys} - lost
    idle = {
        peer: costs.profiles[peer]
        for peer in sorted((offered | standbys) - living - {plan.feed})
        if peer in costs.profiles
    }
    placing = _Placing(plan, costs, idle, frozenset(standbys))
    placing.place(gone)
    unplaced = tuple(placing.unplaced(stage) for stage in gone if stage.stage not in placing.taken)
    if unplaced:
        return WaitingForMachines(unplaced)
    stages = tuple(placing.taken.get(stage.stage, stage) for stage in plan.stages)
    bare = _predicted(plan, costs, stages, tuple(peer for peer in idle if peer not in {s.peer for s in stages}))
    survivors = tuple(
        standby
        for standby in plan.standbys
        if standby.peer in bare.spares and standby.stage not in {s.stage for s in gone}
    )
    return with_standbys(msgspec.structs.replace(bare, standbys=survivors), known)


def reinforced(plan: Plan, problem: Problem, candidates: Sequence[PeerProfile]) -> Plan | None:
    """Return `plan` (version 0) with better standbys, or standbys for stages that have none; None if nothing improves.
    New standbys come from `candidates` and the present standbys. One on another machine is better than another device
    of the stage's machine, an exact one better than an inexact one. A standby is never exchanged for an equally good
    one."""
    known = with_profiles(problem, candidates)
    placed = {stage.peer for stage in plan.stages} | {plan.feed}
    there = {candidate.peer for candidate in candidates} | {standby.peer for standby in plan.standbys}
    wider = msgspec.structs.replace(plan, version=0, spares=tuple(sorted(there - placed)))
    better = with_standbys(wider, known)
    costs, stages = StageCosts(known, plan), {stage.stage: stage for stage in plan.stages}

    def worth(standby: Standby) -> int:
        return 1 + standby.exact + 2 * (not costs.beside(stages[standby.stage], standby.peer))

    before, after = (sum(map(worth, one.standbys)) for one in (plan, better))
    return better if after > before else None


def handed_over(
    plan: Plan, problem: Problem, leaving: frozenset[str], candidates: Sequence[PeerProfile]
) -> Plan | None:
    """Return `plan` (version 0) with the stages of the `leaving` peers on other machines; None if no machine can take
    over. The leaving peers become standbys of their stages, so their state is available until the next peer has it. A
    leaving peer that is only a standby is dropped at once."""
    found = replaced(plan, problem, leaving, candidates)
    if isinstance(found, WaitingForMachines):
        return None
    moved = {stage.stage: stage.peer for stage in plan.stages if stage.peer in leaving}
    kept = [standby for standby in found.standbys if standby.stage not in moved]
    standbys = [*kept, *(Standby(stage=stage, peer=peer, exact=True) for stage, peer in moved.items())]
    return msgspec.structs.replace(
        found,
        standbys=tuple(sorted(standbys, key=lambda standby: standby.stage)),
        snapshot_every=found.snapshot_every or ((plan.snapshot_every or 1) if moved else 0),
    )


def moved(plan: Plan, problem: Problem, stage: int, to: str, candidates: Sequence[PeerProfile]) -> Plan | None:
    """Return `plan` (version 0) with one stage moved to `to`, which runs none. The former peer stands by for the stage
    if it runs nothing else and has the memory; the other standbys stay if they can. Returns None if `to` can't run the
    stage, or if another stage would lose its standby."""
    known = with_profiles(problem, candidates)
    costs = StageCosts(known, plan)
    former = next(placed for placed in plan.stages if placed.stage == stage)
    placing = _Placing(plan, costs, {to: costs.profiles[to]}, frozenset((to,)))
    placing.place([former])
    if stage not in placing.taken:
        return None
    stages = tuple(placing.taken.get(placed.stage, placed) for placed in plan.stages)
    working = {placed.peer for placed in stages}
    spares = {former.peer, *(standby.peer for standby in plan.standbys), *plan.spares} - working - {plan.feed}
    bare = _predicted(plan, costs, stages, tuple(sorted(spares)))
    kept = [standby for standby in plan.standbys if standby.peer in spares and standby.stage != stage]
    if former.peer in spares and may_stand_by(bare, known, placing.taken[stage], former.peer):
        exact = costs.exact(former, costs.profiles[former.peer])
        kept.append(msgspec.structs.replace(costs.standby(placing.taken[stage], former.peer), exact=exact))
    found = with_standbys(msgspec.structs.replace(bare, standbys=tuple(kept)), known)
    return found if _keeps_standbys(plan, found) else None


def with_standby(plan: Plan, problem: Problem, stage: int, peer: str, candidates: Sequence[PeerProfile]) -> Plan | None:
    """Return `plan` (version 0) with `peer`, which runs no stage, as the standby of `stage`. Returns None if `peer` has
    no room for that, or if another stage would lose its standby."""
    known = with_profiles(problem, candidates)
    costs = StageCosts(known, plan)
    placed = next(one for one in plan.stages if one.stage == stage)
    if not may_stand_by(plan, known, placed, peer):
        return None
    wanted = costs.standby(placed, peer)
    there = {peer, *(standby.peer for standby in plan.standbys), *plan.spares} - {one.peer for one in plan.stages}
    kept = tuple(standby for standby in plan.standbys if standby.stage != stage and standby.peer != peer)
    wider = msgspec.structs.replace(
        plan, version=0, spares=tuple(sorted(there - {plan.feed})), standbys=(wanted, *kept), snapshot_every=0
    )
    found = with_standbys(wider, known)
    return found if _keeps_standbys(plan, found) and wanted in found.standbys else None


def _keeps_standbys(before: Plan, after: Plan) -> bool:
    return {standby.stage for standby in before.standbys} <= {standby.stage for standby in after.standbys}


class _Placing:
    """Assigns lost stages to idle machines."""

    def __init__(self, plan: Plan, costs: StageCosts, idle: dict[str, PeerProfile], standbys: frozenset[str]) -> None:
        self.plan = plan
        self.costs = costs
        self.idle = idle
        self.standby_of = {standby.stage: standby.peer for standby in plan.standbys if standby.peer in standbys}
        self.taken: dict[int, StagePlacement] = {}
        self.load: defaultdict[str, int] = defaultdict(int)
        self.lost: list[StagePlacement] = []

    def place(self, lost: list[StagePlacement]) -> None:
        self.lost = lost
        order = sorted(lost, key=lambda s: (-s.memory_bytes, s.stage))

        def own_standby(stage: StagePlacement) -> list[str]:
            standby = self.standby_of.get(stage.stage)
            if standby is None or standby not in self.idle or self._refusal(stage, standby) is not None:
                return []
            return [standby] if self.costs.exact(stage, self.idle[standby]) else []

        # First assign as many stages as possible to their standbys, then the others, one stage per machine.
        first = matched([own_standby(stage) for stage in order])
        for index, peer in matched([self._ranked(stage) for stage in order], first).items():
            self._give(order[index], peer)
        for stage in order:
            if stage.stage not in self.taken:
                for peer in self._ranked(stage)[:1]:
                    self._give(stage, peer)

    def unplaced(self, stage: StagePlacement) -> Unplaced:
        refusals = [
            Excluded(peer=peer, reason=reason)
            for peer in self.idle
            if (reason := self._refusal(stage, peer)) is not None
        ]
        return Unplaced(
            stage=stage.stage,
            memory_bytes=self._least_bytes(stage),
            fingerprint=self.costs.fingerprint(stage) if self.costs.problem.takeover == "exact" else "",
            lost_peer=self.costs.name(stage.peer),
            refusals=tuple(refusals),
        )

    def _ranked(self, stage: StagePlacement) -> list[str]:
        def key(peer: str) -> tuple[bool, bool, bool, int, float, str]:
            return (
                not self.costs.exact(stage, self.idle[peer]),
                self.standby_of.get(stage.stage) != peer,
                # A machine that lost one of its devices may be about to lose the others.
                any(self.costs.beside(gone, peer) for gone in self.lost),
                self.load[peer],
                self.costs.compute_s(stage, peer),
                peer,
            )

        return sorted((peer for peer in self.idle if self._refusal(stage, peer) is None), key=key)

    def _give(self, stage: StagePlacement, peer: str) -> None:
        profile = self.idle[peer]
        room = profile.memory_bytes - self.load[peer] - self._base_bytes(stage)
        excess = max(0, stage.memory_bytes - room)
        fewer = -(-excess // stage.in_flight_bytes) if excess > 0 else 0
        placed = msgspec.structs.replace(
            stage,
            peer=peer,
            in_flight=stage.in_flight - fewer,
            compute_s=self.costs.compute_s(stage, peer),
            recompute_s=self.costs.recompute_s(stage, peer),
            memory_bytes=stage.memory_bytes - fewer * stage.in_flight_bytes,
            memory_limit_bytes=profile.memory_bytes,
            fingerprint=profile.fingerprint,
        )
        self.taken[stage.stage] = placed
        self.load[peer] += placed.memory_bytes + self._base_bytes(stage)

    def _refusal(self, stage: StagePlacement, peer: str) -> str | None:
        profile, costs = self.idle[peer], self.costs
        reason = costs.refusal(stage, profile, exact=costs.problem.takeover == "exact")
        if reason is not None:
            return reason
        needed, lent = self._least_bytes(stage), profile.memory_bytes - self.load[peer]
        if needed > lent:
            return f"it lends {format_bytes(lent)}, the stage takes {format_bytes(needed)}."
        return None

    def _base_bytes(self, stage: StagePlacement) -> int:
        """Return the bytes of the snapshot that the stage is restored from, kept until the snapshot line has passed it.
        0 in serving, which restores nothing."""
        return 0 if self.plan.task == "serve" else self.costs.state_bytes(stage)

    def _least_bytes(self, stage: StagePlacement) -> int:
        """Return the stage's memory with the fewest microbatches in flight that keep the pipeline busy. Those are one
        for each stage of the replica from this one on."""
        after = sum(one.replica == stage.replica and one.stage >= stage.stage for one in self.plan.stages)
        fewest = min(stage.in_flight, self.plan.microbatches_of(stage), after)
        return stage.memory_bytes - (stage.in_flight - fewest) * stage.in_flight_bytes + self._base_bytes(stage)


def _predicted(plan: Plan, costs: StageCosts, stages: tuple[StagePlacement, ...], spares: tuple[str, ...]) -> Plan:
    prediction = predict_serving(stages, costs) if plan.task == "serve" else predict(stages, costs)
    tokens = plan.microbatches * costs.problem.microbatch_tokens
    speed = tokens / prediction.step_s
    return msgspec.structs.replace(
        plan,
        version=0,
        stages=stages,
        spares=spares,
        standbys=(),
        snapshot_every=0,
        excluded=tuple(entry for entry in plan.excluded if entry.peer not in {s.peer for s in stages}),
        step_time_s=prediction.step_s,
        tokens_per_s=speed,
        bottleneck=prediction.bottleneck,
        reduction_s=prediction.reduction_s,
        commit_s=prediction.commit_s,
        certificate=Certificate.of(
            "lost stages taken over, the others kept; bound of the plan before",
            speed,
            plan.certificate.bound_tokens_per_s,
        ),
    )


def with_profiles(problem: Problem, candidates: Sequence[PeerProfile]) -> Problem:
    """Return `problem` with the profiles of `candidates` added; they replace older profiles of the same peers."""
    profiles = {peer.peer: peer for peer in problem.peers} | {peer.peer: peer for peer in candidates}
    return msgspec.structs.replace(problem, peers=tuple(profiles[name] for name in sorted(profiles)))


def offered(problem: Problem, candidates: Sequence[PeerProfile]) -> Problem:
    """Return `problem` with the machines of `candidates` alone, and without a running plan."""
    there = {peer.peer: peer for peer in candidates}
    peers = tuple(there[name] for name in sorted(there))
    excluded = tuple(peer for peer in problem.excluded if peer in there)
    return msgspec.structs.replace(problem, peers=peers, excluded=excluded, incumbent=None)


def _wish(stage: Unplaced) -> str:
    bits = f" and computes the same bits as {stage.lost_peer} did" if stage.fingerprint else ""
    return f"lends {format_bytes(stage.memory_bytes)}{bits} (stage {stage.stage})"


SETTLE_S: Final = 1.0
"""Seconds after a first loss after which the broker must have heard from the machine."""
LONGEST_SETTLE_S: Final = 30.0
"""Longest wait of a machine that has joined again since its loss, in seconds."""
LONGEST_RETRY_S: Final = 3600.0
"""Longest wait of a process that was lost but never ended, in seconds. Losing one machine for an hour costs less than
an attempt every half minute costs the others."""
STEADY_S: Final = 120.0
"""Seconds of working between two losses after which the count of losses starts again: in a long job every machine is
lost occasionally."""


@dataclass(frozen=True, slots=True)
class Loss:
    """The last of `times` consecutive losses, at `at_s`."""

    at_s: float
    times: int
    sound_s: float | None = None
    """Time since which the machine works again: it runs a stage, or could take one over. None: not yet."""

    def wait_s(self, *, rejoined: bool) -> float:
        """Return how many seconds after the loss the broker must have heard from the machine. `rejoined`: the machine
        has joined again since."""
        return min(_doubled_s(self.times), LONGEST_SETTLE_S if rejoined else LONGEST_RETRY_S)

    def is_over(self, heard_s: float, *, rejoined: bool) -> bool:
        """Return whether a machine last heard at `heard_s` may be used again."""
        return heard_s - self.at_s >= self.wait_s(rejoined=rejoined)

    def is_there(self, heard_s: float) -> bool:
        """Return whether the machine was heard since this loss, whatever the number of losses. That is enough for a job
        that waits for this machine and for no other."""
        return heard_s - self.at_s >= SETTLE_S

    @property
    def is_given_up(self) -> bool:
        """Whether this is the first consecutive loss whose wait exceeds `LONGEST_SETTLE_S`; callers report it."""
        return self.times > 1 and _doubled_s(self.times - 1) <= LONGEST_SETTLE_S < _doubled_s(self.times)


def _doubled_s(times: int) -> float:
    """Return the doubled wait; the exponent is bounded so that the float can't overflow."""
    return SETTLE_S * 2.0 ** min(times - 1, 32)


def lost(known: Loss | None, now_s: float) -> Loss:
    """Return the state after a loss at `now_s`; `known` is the loss before."""
    if known is None or (known.sound_s is not None and now_s - known.sound_s > STEADY_S):
        return Loss(now_s, 1)
    return Loss(now_s, known.times + 1)


def sound(known: Loss, now_s: float) -> Loss:
    """Return the state after the machine was seen working at `now_s`; only the first time after a loss counts."""
    return known if known.sound_s is not None else replace(known, sound_s=now_s)
