"""Chooses how a job continues after it has lost a peer, or when the pool offers more machines.

`stand_in` comes first: a machine that computes the same bits takes over at once. If there is none, `otherwise` returns
the alternative. Either a machine of other numerics takes the lost stage and the cut stays, or the model is cut anew
over the machines that remain and continues at the newest checkpoint. The cut stays unless the new cut is faster by
`FASTER`, or keeps the bits and the state is lost anyway. A job that demands equal bits (`exact`, `refuse`) only gets a
new cut, over machines that all compute its bits. The caller decides when the grace period begins and ends.

When machines are back, `widened` finds a wider cut for a training job. A new division of a served model makes every
stage load again and every session be recomputed. `Regrowth` therefore waits until no session runs and the pool has been
unchanged for a while, and the plan of `regrown` must be faster by the factor `REGROWN`. After each move the next one
waits longer, so that a machine that comes and goes causes at most one move per hour.

`takeover` places lost stages, `replicated` and `planner` cut anew; `client` and `simulator` call this module.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import sqrt
from typing import Final, Literal

import msgspec

from fusionai.primitives.errors import PlanError
from fusionai.scheduling.planner import plan as planned
from fusionai.scheduling.problem.stage_costs import StageCosts
from fusionai.scheduling.problem.types import PeerProfile, Plan, Problem, StagePlacement, Standby, TolerantTakeover
from fusionai.scheduling.serving.prediction import predict_serving, together
from fusionai.scheduling.standby.assignment import may_stand_by, with_standbys
from fusionai.scheduling.standby.straggling import GAIN
from fusionai.scheduling.standby.takeover import WaitingForMachines, handed_over, offered, replaced, with_profiles
from fusionai.scheduling.training.cut_bits import same_sums
from fusionai.scheduling.training.prediction import predict
from fusionai.scheduling.training.replicated import plan as planned_replicas
from fusionai.scheduling.training.replicated import with_replicas

Takeover = Literal["any", "exact", "tolerant", "refuse"]
"""Machines that may replace a lost peer. `any`: one that computes the same bits, after a grace period any machine.
`exact`: only one that computes the same bits; the job waits for it. `tolerant`: any machine at once. `refuse`: as
`exact`, but the job ends instead of waiting."""
GRACE_S: Final = 30.0
"""Default time to wait for a machine that computes the same bits: a restarted process is back in 10 s, a restarted
machine in a minute."""
MOST_TAKEOVERS: Final = 64
"""Most takeovers that a plan lists: if there are more, the first and the newest."""
MOVE_STEPS: Final = 10
"""Cost of changing the cut, in steps: a checkpoint is written, read and sent."""
FASTER: Final = 1.25
"""Factor in tokens per second from which a new cut is worth going back to the checkpoint."""


@dataclass(frozen=True, slots=True)
class Otherwise:
    """A plan (version 0) that changes the cut or, unless `exact`, the bits; a stand-in would change neither."""

    plan: Plan
    exact: bool
    """True if the plan keeps the bits of the plan before (`keeps_bits`)."""
    recut: bool
    """True if the stages hold other blocks than before."""
    takers: frozenset[str]
    """Peers that get stages they did not have."""

    def words(self, problem: Problem) -> str:
        """Human-readable form, such as `going on with bob, of other numerics (tolerant, not bit-exact)`."""
        names = {peer.peer: peer.name or peer.peer for peer in problem.peers}
        peers = dict.fromkeys(stage.peer for stage in self.plan.stages if stage.peer in self.takers)
        who = ", ".join(names.get(peer, peer) for peer in peers)
        machines = "1 machine" if len(peers) == 1 else f"{len(peers)} machines"
        if self.recut:
            bits = "" if self.exact else ", which do not all compute the same bits"
            return f"cutting the model anew over {machines} ({who}){bits}"
        return f"going on with {who}, of other numerics (tolerant, not bit-exact)"


@dataclass(frozen=True, slots=True)
class Nothing:
    """The connected machines can't continue the job; `reason` is human-readable."""

    reason: str


def numerics(takeover: Takeover) -> Literal["exact", "tolerant"]:
    """The value of `Problem.takeover`: whether standbys and plans may use machines of other numerics at all."""
    return "tolerant" if takeover in ("any", "tolerant") else "exact"


def stand_in(
    plan: Plan, problem: Problem, lost: frozenset[str], candidates: Sequence[PeerProfile], takeover: Takeover
) -> Plan | WaitingForMachines:
    """Replace the lost peers at once; unless the job is `tolerant`, with machines that compute the same bits."""
    strict: Literal["exact", "tolerant"] = "tolerant" if takeover == "tolerant" else "exact"
    found = replaced(plan, msgspec.structs.replace(problem, takeover=strict), lost, candidates)
    if isinstance(found, WaitingForMachines) or problem.takeover == "exact":
        return found
    return with_standbys(found, problem)  # a tolerant job may also get inexact standbys


def otherwise(
    plan: Plan, problem: Problem, lost: frozenset[str], candidates: Sequence[PeerProfile], takeover: Takeover
) -> Otherwise | Nothing:
    """The best alternative if `stand_in` waits. `candidates`: all usable peers, those with stages included."""
    there = [peer for peer in candidates if peer.peer not in lost]
    alike = recut(plan, problem, _alike(plan, there))
    if takeover in ("exact", "refuse"):
        bits = isinstance(alike, Nothing) or alike.exact
        return alike if bits else Nothing("another cut over those that remain gives other bits")
    cut = _faster(alike, recut(plan, problem, there)) if len(_alike(plan, there)) < len(there) else alike
    kept = replaced(plan, msgspec.structs.replace(problem, takeover="tolerant"), lost, candidates)
    if isinstance(kept, WaitingForMachines):
        return cut
    if isinstance(cut, Otherwise):
        kept_per_s, cut_per_s = kept.tokens_per_s, cut.plan.tokens_per_s
        # Without a snapshot both continue at the checkpoint, so the new cut keeps the bits at no extra cost.
        if cut_per_s > FASTER * kept_per_s or (
            cut.exact and cut_per_s * FASTER >= kept_per_s and not _has_standbys(plan, lost)
        ):
            return cut
    takers = frozenset(stage.peer for stage in kept.stages) - {stage.peer for stage in plan.stages}
    return Otherwise(kept, exact=keeps_bits(plan, kept, problem), recut=False, takers=takers)


def _alike(plan: Plan, there: Sequence[PeerProfile]) -> list[PeerProfile]:
    """The peers that compute the bits of `plan` with any cut; none if the machines of `plan` differ themselves."""
    prints = {stage.fingerprint for stage in plan.stages if stage.peer != plan.feed}
    return [peer for peer in there if prints == {peer.fingerprint} != {""}]


def _faster(alike: Otherwise | Nothing, cut: Otherwise | Nothing) -> Otherwise | Nothing:
    """The cut over machines of equal numerics, unless the other one is faster by `FASTER`."""
    if isinstance(alike, Nothing) or isinstance(cut, Nothing):
        return cut if isinstance(alike, Nothing) else alike
    return cut if cut.plan.tokens_per_s > FASTER * alike.plan.tokens_per_s else alike


def keeps_bits(before: Plan, after: Plan, problem: Problem) -> bool:
    """Return whether every stage of `after` computes the bits of `before`. Gradients must be added in the same order.
    With the same cut each stage must keep its numerics, with another cut all machines must have equal numerics."""
    if not same_sums(before, after, problem):
        return False
    if before.ranges == after.ranges:
        pairs = zip(before.stages, after.stages, strict=True)
        return all(_same_numerics(one, other) for one, other in pairs)
    prints = {stage.fingerprint for one in (before, after) for stage in one.stages if stage.peer != one.feed}
    return before.replicas == after.replicas and len(prints) == 1 and "" not in prints


def recorded(before: Plan, after: Plan, problem: Problem, step: int, tolerance: float) -> Plan:
    """`after` with the tolerant takeovers that `before` lists, plus `after` itself if it changes the bits. `step`:
    number of committed steps when it follows `before`; at 0 no result exists that could differ."""
    listed = before.tolerant_takeovers
    if step and not keeps_bits(before, after, problem):
        same = before.ranges == after.ranges
        stages = [
            stage
            for stage in after.stages
            if stage.peer != after.feed and not (same and _same_numerics(before.stages[stage.stage], stage))
        ]
        listed += (
            TolerantTakeover(
                step=step,
                stages=tuple(stage.stage for stage in stages),
                peers=tuple(dict.fromkeys(stage.peer for stage in stages)),
                recut=not same,
                tolerance=tolerance,
            ),
        )
    if len(listed) > MOST_TAKEOVERS:
        listed = (listed[0], *listed[-MOST_TAKEOVERS + 1 :])
    return msgspec.structs.replace(after, tolerant_takeovers=listed)


def recut(plan: Plan, problem: Problem, candidates: Sequence[PeerProfile]) -> Otherwise | Nothing:
    """Return the best plan over `candidates`, with any number of stages, or why they can't hold the model. The recipe's
    stages, spares, required and pinned machines are dropped: they were chosen for a pool that has changed."""
    if not candidates:
        return Nothing("none of those that remain computes the same bits")
    known = offered(problem, candidates)
    posed = msgspec.structs.replace(
        known,
        links=known.links_among({peer.peer for peer in known.everyone}),
        stages=None,
        spares_wanted=None,
        required=(),
        pinned={},
    )
    try:
        found = served_with(plan, posed) if plan.task == "serve" else _trained(posed)
    except PlanError as error:
        return Nothing(f"those that remain can't hold the model: {error.message.rstrip('.')}")
    if found is None:
        return Nothing("those that remain have no room for the caches that were promised")
    same = plan.ranges == found.ranges
    kept = {(stage.stage, stage.peer) for stage in plan.stages} if same else set[tuple[int, str]]()
    takers = frozenset(stage.peer for stage in found.stages if (stage.stage, stage.peer) not in kept) - {found.feed}
    return Otherwise(found, exact=keeps_bits(plan, found, problem), recut=not same, takers=takers)


def _trained(posed: Problem) -> Plan:
    """A plan with as many replicas as before, which keeps the order of sums; with one replica if that fits nowhere."""
    try:
        return planned_replicas(posed)
    except PlanError:
        if posed.replicas == 1:
            raise
    return planned_replicas(with_replicas(posed, 1))


def served_with(plan: Plan, posed: Problem) -> Plan | None:
    """A new plan with the sizes of the running job, because its sessions rely on its pages; None if they don't fit."""
    sizes = plan.serving
    assert sizes is not None, "a serving plan has its sizes"
    wanted = msgspec.structs.replace(posed.needs, cache_tokens=(sizes.pages - 1) * sizes.page_tokens)
    found = planned(msgspec.structs.replace(posed, serving=wanted))
    assert found.serving is not None, "a serving plan has its sizes"
    if found.serving.pages < sizes.pages:
        return None
    kept = msgspec.structs.replace(
        sizes,
        passes_in_flight=found.serving.passes_in_flight,
        tokens_per_s_together=found.serving.tokens_per_s_together,
    )
    return msgspec.structs.replace(found, serving=kept)


def _has_standbys(plan: Plan, lost: frozenset[str]) -> bool:
    """Return whether connected standbys have snapshots of all lost stages."""
    kept = {standby.stage for standby in plan.standbys if standby.peer not in lost}
    return all(stage.stage in kept for stage in plan.stages if stage.peer in lost)


def handed_on(
    plan: Plan, problem: Problem, leaving: frozenset[str], candidates: Sequence[PeerProfile], takeover: Takeover
) -> Plan | None:
    """The plan for peers that leave in order if no machine of the same numerics can take their stages. Like
    `otherwise`, but the leaving peers stay in the plan as standbys until their state has moved. None if there is no
    alternative, or if the leaving peers have no memory to stand by."""
    if takeover in ("any", "tolerant"):
        found = handed_over(plan, msgspec.structs.replace(problem, takeover="tolerant"), leaving, candidates)
        if found is not None:
            return found
    cut = otherwise(plan, problem, leaving, candidates, takeover)
    if isinstance(cut, Nothing):
        return None
    found, known = cut.plan, with_profiles(problem, candidates)
    standbys = {standby.stage: standby for standby in found.standbys}
    pool = [stage for stage in found.stages if stage.peer != found.feed]
    for peer in sorted(leaving & {stage.peer for stage in plan.stages}):
        free = [stage for stage in pool if stage.stage not in standbys] or pool
        place = next((stage for stage in free if may_stand_by(found, known, stage, peer)), None)
        if place is None:
            return None
        beside = StageCosts(known, found).beside(place, peer)
        standbys[place.stage] = Standby(stage=place.stage, peer=peer, exact=False, beside=beside)
    every = found.snapshot_every or plan.snapshot_every or 1
    return msgspec.structs.replace(
        found, standbys=tuple(standbys[stage] for stage in sorted(standbys)), snapshot_every=every
    )


def widened(
    plan: Plan, problem: Problem, candidates: Sequence[PeerProfile], *, steps_left: int, tolerant: bool
) -> Otherwise | None:
    """For a job that was cut anew because machines were missing: a new cut over all machines that are back, if the gain
    in the steps left is worth going back to a checkpoint; otherwise None. `tolerant`: the bits may change."""
    known = with_profiles(problem, candidates)
    posed = msgspec.structs.replace(offered(known, candidates), excluded=known.excluded, required=())
    try:
        found = planned_replicas(posed)
    except PlanError:
        return None
    now_s = predict(plan.stages, StageCosts(known, plan)).step_s
    then_s = predict(found.stages, StageCosts(known, found)).step_s
    exact = keeps_bits(plan, found, problem)
    if then_s > (1 - GAIN) * now_s or steps_left * (now_s - then_s) < MOVE_STEPS * now_s or not (exact or tolerant):
        return None
    takers = frozenset(stage.peer for stage in found.stages) - {found.feed}
    return Otherwise(found, exact=exact, recut=True, takers=takers)


def _same_numerics(one: StagePlacement, other: StagePlacement) -> bool:
    """Return whether both have equal fingerprints; an unknown one only equals that of the same peer."""
    return one.fingerprint == other.fingerprint and (one.fingerprint != "" or one.peer == other.peer)


REGROWN: Final = 1.2
"""Least predicted gain in speed, as a factor: the geometric mean over one session and over all of them together."""
IDLE_S: Final = 5.0
"""How long no session must have run, in seconds: clients that talk back and forth leave gaps of a second or two."""
STEADY_S: Final = 30.0
"""How long the same machines must have been there, in seconds: one that has just joined may leave at once."""
REST_S: Final = 300.0
"""Pause after a move, in seconds; doubles with each further move."""
LONGEST_REST_S: Final = 3600.0
"""Longest pause after a move, in seconds. After a further pause of this length without a move, pauses start at `REST_S`
again."""


@dataclass(frozen=True, slots=True)
class Regrowth:
    """Observations of a job and its pool so far. `seen` adds an observation, `moved` a plan change."""

    there: frozenset[str] = frozenset()
    """Machines that were usable at the last observation."""
    there_since_s: float = 0.0
    idle_since_s: float | None = None
    """Time since which no session has run; None while one runs."""
    moved_s: float | None = None
    moves: int = 0
    """Consecutive moves."""

    def seen(self, now_s: float, *, idle: bool, there: frozenset[str]) -> Regrowth:
        since_s = (now_s if self.idle_since_s is None else self.idle_since_s) if idle else None
        if there == self.there:
            return replace(self, idle_since_s=since_s)
        return replace(self, idle_since_s=since_s, there=there, there_since_s=now_s)

    def is_due(self, now_s: float) -> bool:
        """Return whether a new plan may be searched for and switched to now."""
        if self.idle_since_s is None or now_s - self.idle_since_s < IDLE_S or now_s - self.there_since_s < STEADY_S:
            return False
        return self.moved_s is None or now_s - self.moved_s >= self.rest_s

    @property
    def rest_s(self) -> float:
        """Pause after the last move, in seconds."""
        return min(LONGEST_REST_S, REST_S * 2.0 ** min(self.moves - 1, 16))

    def moved(self, now_s: float) -> Regrowth:
        calm = self.moved_s is not None and now_s - self.moved_s > self.rest_s + LONGEST_REST_S
        return replace(self, moved_s=now_s, moves=1 if calm else self.moves + 1)


def regrown(plan: Plan, problem: Problem, candidates: Sequence[PeerProfile]) -> Otherwise | None:
    """Return the plan (version 0) of a served model over all `candidates` if it is faster than `plan` by the factor
    `REGROWN`, else None. It has as many stages as the problem requests, if such a plan is fast enough. If `plan` itself
    has another number of stages, any number is allowed."""
    known = with_profiles(problem, candidates)
    least = REGROWN * _speed(plan, known)
    try:
        found = served_with(plan, offered(known, candidates))
    except PlanError:
        found = None
    if found is None or _speed(found, known) < least:
        asked = known.stages in (None, sum("stage" in stage.roles for stage in plan.stages))
        cut = None if asked else recut(plan, problem, candidates)
        found = cut.plan if isinstance(cut, Otherwise) else None
    if found is None or _speed(found, known) < least:
        return None
    kept = {(stage.blocks, stage.peer) for stage in plan.stages}
    takers = frozenset(stage.peer for stage in found.stages if (stage.blocks, stage.peer) not in kept) - {found.feed}
    same = [stage.blocks for stage in plan.stages] == [stage.blocks for stage in found.stages]
    return Otherwise(found, exact=keeps_bits(plan, found, problem), recut=not same, takers=takers)


def _speed(plan: Plan, known: Problem) -> float:
    """Return tokens per second: the geometric mean of one session's speed and the speed of all sessions together."""
    costs = StageCosts(known, plan)
    _, together_per_s = together(plan.stages, costs, known.needs)
    return sqrt(together_per_s / predict_serving(plan.stages, costs).step_s)
