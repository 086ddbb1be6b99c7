"""Chooses how often stages with a standby take snapshots: one interval K for the whole job, with its reason.

All stages take snapshots on the same steps, so K is one number. Three goals determine it:

- *cheap*: snapshots should cost at most 5 % more. On the link this is 5 % of what crosses the stage's cuts anyway
  (K >= 20 * state / boundary bytes per step) or 5 % of the time the link is idle; of the peer's time it is 5 % for
  copying and encrypting. `cheap` is the least K that satisfies all of these.
- *possible*: the same with 50 % instead of 5 %, so `possible` <= `cheap`. Both never need more of a link than it
  carries (K >= transfer time / step time, for a standby with all its stages together).
- *short replay*: when a peer is lost, its stand-in replays up to 2K - 1 steps of that stage's compute, without
  bubbles. `brief` is the largest K for which the replay stays under two seconds, at least 1.

K is `brief`, raised to `possible` if lower and reduced to `cheap` if higher (a larger K gains nothing). K is also at
most 64, and at most what the memory beside the stages allows: every stage retains what it sent in the last 2K + 1
steps.

The costs are those of the recovery protocol (docs/recovery.md): state / K of traffic per step, 2K + 1 steps retained,
2K - 1 replayed. K affects only the speed of a run, never its results: while a snapshot takes longer than planned, the
feed is slowed down. `assignment` calls this module; `stage_costs` has the costs.
"""

from __future__ import annotations

from collections import defaultdict
from math import ceil, floor, inf
from typing import Final

import msgspec

from fusionai.primitives.units import format_bytes, format_seconds
from fusionai.scheduling.problem.stage_costs import StageCosts
from fusionai.scheduling.problem.types import Plan, Problem, StagePlacement
from fusionai.scheduling.training.prediction import reduced_bytes

MOST_STEPS: Final = 64
"""Largest interval K, in steps; chosen."""
EXTRA: Final = 0.05
"""Fraction of link and time that snapshots may use, unless a short replay needs more."""
HASTY_EXTRA: Final = 0.50
"""The same fraction if K must be small for a short replay."""
REPLAY_S: Final = 2.0
"""Longest replay to aim for, in seconds of compute; chosen."""
COPY_BYTES_PER_S: Final = 1e9
"""Speed of copying, encrypting and sending a state with one thread of an ordinary machine."""


class SnapshotInterval(msgspec.Struct, frozen=True, forbid_unknown_fields=True, kw_only=True):
    """Interval of the snapshots. `every`: K in steps, 0 if no stage has a standby. `reason`: a sentence for the
    user."""

    every: int
    reason: str
    replay_s: float = 0.0
    """Predicted compute seconds of the longest replay, 2K - 1 steps."""


def snapshot_interval(plan: Plan, problem: Problem) -> SnapshotInterval:
    """Return K for the standbys in `plan.standbys`; costs are compared with `plan.step_time_s`."""
    if not plan.standbys:
        return SnapshotInterval(every=0, reason="no stage has a warm standby, so no snapshots are taken.")
    if plan.task == "serve":
        return SnapshotInterval(
            every=0, reason="weights don't change: a warm standby holds them, and caches are rebuilt."
        )
    costs = StageCosts(problem, plan)
    stages = {stage.stage: stage for stage in plan.stages}
    pairs = [(stages[standby.stage], standby.peer) for standby in plan.standbys]
    cheap, why_cheap = _least(plan, costs, pairs, EXTRA)
    possible, why_possible = _least(plan, costs, pairs, HASTY_EXTRA)
    compute_s = max(plan.microbatches_of(stage) * costs.compute_s(stage, peer) for stage, peer in pairs)
    brief = max(1, floor((REPLAY_S / compute_s + 1) / 2)) if compute_s > 0 else MOST_STEPS
    held, holder = _held(plan, costs)
    every = min(max(possible, min(brief, cheap)), MOST_STEPS, max(1, held))
    if every == held < max(possible, min(brief, cheap)):
        why = f"memory of {holder} holds no more steps for a replay"
    elif every == 1:
        why = "a snapshot costs little beside a step"
    elif every == possible > brief:
        why = why_possible
    elif every == cheap:
        why = why_cheap
    elif every == MOST_STEPS:
        why = f"never rarer than every {MOST_STEPS} steps"
    else:
        why = f"so that a replay takes at most {format_seconds(REPLAY_S)}"
    replay_s = (2 * every - 1) * compute_s
    steps = "step" if every == 1 else f"{every} steps"
    return SnapshotInterval(
        every=every,
        reason=f"a snapshot every {steps}: {why}; a lost peer's stand-in replays at most {format_seconds(replay_s)}.",
        replay_s=replay_s,
    )


def _sent_bytes(plan: Plan, costs: StageCosts, stage: StagePlacement) -> float:
    """Return the bytes that `stage` sends in a step, to neighbours and to other replicas."""
    return plan.microbatches_of(stage) * costs.sent_bytes(stage) + reduced_bytes(plan, costs, stage)


def _least(plan: Plan, costs: StageCosts, pairs: list[tuple[StagePlacement, str]], extra: float) -> tuple[int, str]:
    """Return the least K at which snapshots cost at most the fraction `extra`, and a sentence that names the limit."""
    step_s = plan.step_time_s
    arriving_s: defaultdict[str, float] = defaultdict(float)
    worst, why = 1.0, ""
    for stage, standby in pairs:
        state = costs.snapshot_bytes(stage)
        transfer_s = costs.snapshot_s(stage, standby)
        if costs.hop(stage.peer, standby).shared:
            arriving_s[standby] += state / costs.profiles[standby].downlink.bandwidth_bytes_per_s
        boundary = _beside_bytes(plan, costs, stage, standby)
        idle_s = step_s - (boundary / costs.profiles[stage.peer].uplink.bandwidth_bytes_per_s if boundary > 0 else 0.0)
        by_idle = transfer_s / (extra * idle_s) if idle_s > 0 else inf
        by_traffic = state / (extra * boundary) if boundary > 0 else inf
        link = max(min(by_idle, by_traffic), transfer_s / step_s)
        if link > worst:
            worst = link
            why = f"stage {stage.stage} sends its {format_bytes(state)} over its link in {format_seconds(transfer_s)}"
        copying_s = state / COPY_BYTES_PER_S
        if copying_s / (extra * step_s) > worst:
            worst = copying_s / (extra * step_s)
            why = f"copying the {format_bytes(state)} of stage {stage.stage} takes {format_seconds(copying_s)}"
    # A standby receives nothing else, but all its stages send their snapshots at once.
    for standby, seconds in arriving_s.items():
        if seconds / step_s > worst:
            worst = seconds / step_s
            why = f"the snapshots for {costs.name(standby)} take {format_seconds(seconds)} over its link"
    # Rounding must not raise K by a step.
    return min(ceil(worst * (1 - 1e-9)), MOST_STEPS), why


def _beside_bytes(plan: Plan, costs: StageCosts, stage: StagePlacement, standby: str) -> float:
    """Return the bytes that `stage` sends per step over the link that also carries its snapshots."""
    if not costs.hop(stage.peer, standby).shared:
        return 0.0
    sent = 0.0
    for other in plan.stages:
        if plan.is_next(stage, other) and costs.hop(stage.peer, other.peer).shared:
            sent += costs.forward_bytes(stage) if other.stage > stage.stage else costs.gradient_bytes(stage)
    return plan.microbatches_of(stage) * sent


def _held(plan: Plan, costs: StageCosts) -> tuple[int, str]:
    """Return the largest K for which every peer has room for what it retains, and the peer that limits it. K is 0 if
    memory is too small even for K = 1."""
    free: dict[str, int] = {}
    sent: defaultdict[str, float] = defaultdict(float)
    for stage in plan.stages:
        free[stage.peer] = free.get(stage.peer, costs.memory_bytes(stage)) - stage.memory_bytes
        sent[stage.peer] += _sent_bytes(plan, costs, stage)
    least, holder = MOST_STEPS, ""
    for peer, room in free.items():
        if sent[peer] > 0 and floor((room / sent[peer] - 1) / 2) < least:
            least = floor((room / sent[peer] - 1) / 2)
            holder = costs.name(peer)
    return max(0, least), holder


def room_to_retain(plan: Plan, costs: StageCosts) -> str | None:
    """Return the peer whose memory is too small for work with snapshots even with K = 1, or None."""
    held, holder = _held(plan, costs)
    return None if held >= 1 else holder
