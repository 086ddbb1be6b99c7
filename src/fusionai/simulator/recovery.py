"""How a job gets back to its last committed step and how long that takes, by the rules of the recovery protocol.

Lost stages restart from the newest step for which each of them has a snapshot or the checkpoint, and from which their
neighbours retain what is needed to run the later steps again. If there is no such step, all stages go back to the
checkpoint and run the later steps again (docs/recovery.md, "A round" and "Costs").

`course` keeps track of holdings; `scheduling.problem.stage_costs` gives costs.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from fusionai.scheduling.problem.stage_costs import StageCosts
from fusionai.scheduling.problem.types import Plan, StagePlacement


@dataclass(slots=True)
class Holdings:
    """Which peers hold which states. Call `forget` for a machine that loses its memory."""

    states: dict[tuple[int, str], int] = field(default_factory=dict[tuple[int, str], int])
    """(stage, peer) -> step of its live state."""
    snapshots: dict[tuple[int, str], tuple[int, ...]] = field(default_factory=dict[tuple[int, str], tuple[int, ...]])
    """(stage, guard) -> steps of complete snapshots, the two newest."""
    checkpoint: int = 0
    """Step of the newest complete checkpoint on the owner's disk."""

    def forget(self, peer: str) -> None:
        self.states = {key: step for key, step in self.states.items() if key[1] != peer}
        self.snapshots = {key: steps for key, steps in self.snapshots.items() if key[1] != peer}

    def keep_snapshot(self, stage: int, guard: str, step: int) -> None:
        known = self.snapshots.get((stage, guard), ())
        self.snapshots[stage, guard] = tuple(sorted({*known, step})[-2:])

    def snapshot_steps(self, stage: int, there: frozenset[str]) -> frozenset[int]:
        """Return the steps for which a present peer has a snapshot of this stage."""
        held = (steps for (at, peer), steps in self.snapshots.items() if at == stage and peer in there)
        return frozenset(step for steps in held for step in steps)


@dataclass(frozen=True, slots=True, kw_only=True)
class Restoration:
    """How stages are restored. `base`: step from which the lost stages restart, or all stages if `rollback`. `reached`:
    the step all stages have reached afterwards."""

    base: int
    rollback: bool
    lost: tuple[int, ...]
    reached: int
    rounds_s: float
    loading_s: float
    replay_s: float

    @property
    def seconds(self) -> float:
        return self.rounds_s + self.loading_s + self.replay_s


def restoration(
    plan: Plan,
    costs: StageCosts,
    holdings: Holdings,
    there: frozenset[str],
    *,
    step: int,
    retained_from: int,
) -> Restoration:
    """Restore the stages of `plan` that are not at `step`. `retained_from`: what was sent in this step and later ones
    is still retained."""
    lost = [
        stage
        for stage in plan.stages
        if costs.state_bytes(stage) > 0
        and stage.peer != plan.feed
        and holdings.states.get((stage.stage, stage.peer)) != step
    ]
    bases = {step}
    if lost:
        bases = set(frozenset.intersection(*(holdings.snapshot_steps(stage.stage, there) for stage in lost)))
        bases.add(holdings.checkpoint)
    near = [base for base in bases if retained_from <= base <= step]
    base = max(near, default=holdings.checkpoint)
    if near:
        loading_s = max((_loading_s(stage, base, plan.feed, costs, holdings, there) for stage in lost), default=0.0)
        replay_s = max((_replay_s(stage, plan, costs, step - base) for stage in lost), default=0.0)
    else:
        loading_s = collecting_s(plan.stages, plan.feed, costs, upwards=False)
        replay_s = 0.0
    return Restoration(
        base=base,
        rollback=not near,
        lost=tuple(stage.stage for stage in lost),
        reached=step if near else base,
        rounds_s=2 * round_trip_s(plan, costs),
        loading_s=loading_s,
        replay_s=replay_s,
    )


def round_trip_s(plan: Plan, costs: StageCosts) -> float:
    """Return the round trip between the driver and the farthest member, in seconds."""
    members = {stage.peer for stage in plan.stages} - {plan.feed}
    return max(
        (costs.hop(plan.feed, peer).latency_s + costs.hop(peer, plan.feed).latency_s for peer in members), default=0.0
    )


def collecting_s(stages: Sequence[StagePlacement], owner: str, costs: StageCosts, *, upwards: bool) -> float:
    """Return the seconds to move these stages' states to the owner's machine (`upwards`), or back from its disk."""
    shared: defaultdict[str, float] = defaultdict(float)
    longest_s = 0.0
    for stage in stages:
        size = costs.state_bytes(stage)
        if stage.peer == owner or size == 0:
            continue
        link = costs.hop(stage.peer, owner) if upwards else costs.hop(owner, stage.peer)
        longest_s = max(longest_s, size / link.bandwidth_bytes_per_s + link.latency_s)
        if link.shared:
            shared[owner] += size
    profile = costs.profiles.get(owner)
    if profile is None:
        return longest_s
    own = profile.downlink if upwards else profile.uplink
    return max(longest_s, shared[owner] / own.bandwidth_bytes_per_s)


def _loading_s(
    stage: StagePlacement, base: int, owner: str, costs: StageCosts, holdings: Holdings, there: frozenset[str]
) -> float:
    """Return 0 if the peer holds the snapshot itself, otherwise the shortest transfer, also from the owner's disk."""
    holders = {peer for (at, peer), steps in holdings.snapshots.items() if at == stage.stage and base in steps} & there
    if stage.peer in holders:
        return 0.0
    if base == holdings.checkpoint:
        holders.add(owner)
    size = costs.state_bytes(stage)
    return min(_transfer_s(costs, holder, stage.peer, size) for holder in holders)


def _replay_s(stage: StagePlacement, plan: Plan, costs: StageCosts, steps: int) -> float:
    """Return the stage's compute time without bubbles, or its neighbours' resending time if that is longer."""
    by_number: Mapping[int, StagePlacement] = {one.stage: one for one in plan.stages}
    sending_s = 0.0
    before, after = by_number.get(stage.stage - 1), by_number.get(stage.stage + 1)
    if before is not None:
        sending_s = max(sending_s, _transfer_s(costs, before.peer, stage.peer, costs.forward_bytes(before)))
    if after is not None:
        sending_s = max(sending_s, _transfer_s(costs, after.peer, stage.peer, costs.gradient_bytes(after)))
    return steps * plan.microbatches * max(costs.compute_s(stage, stage.peer), sending_s)


def _transfer_s(costs: StageCosts, sender: str, receiver: str, size_bytes: float) -> float:
    return size_bytes / costs.hop(sender, receiver).bandwidth_bytes_per_s
