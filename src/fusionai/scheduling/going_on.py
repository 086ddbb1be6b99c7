"""How a job goes on where nobody can stand in for a lost peer as it was: on unlike machines, or cut anew.

`stand_in` is asked first: whoever computes the same bits, at once. Where it has nobody, `otherwise` says what there is
besides: a stage on a machine of other numerics, its cut kept, or another cut over the machines that remain, which
begins at the newest checkpoint. The first is taken unless the second is faster by `FASTER`, or keeps the bits where the
state is gone in any case. A job that demands bits (`exact`, `refuse`) gets another cut alone, over machines that all
compute its bits. When the grace period begins and ends, the caller decides.

Neighbours: `takeover` places lost stages, `replicated` and `planner` cut anew; `client.replanning` and `simulator.job`
ask.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final, Literal

import msgspec

from fusionai.primitives.errors import PlanError
from fusionai.scheduling.cut_bits import same_sums
from fusionai.scheduling.guards import may_guard, with_guards
from fusionai.scheduling.planner import plan as planned
from fusionai.scheduling.prediction import predict
from fusionai.scheduling.replicated import plan as planned_replicas
from fusionai.scheduling.replicated import with_replicas
from fusionai.scheduling.stage_costs import StageCosts
from fusionai.scheduling.straggling import GAIN
from fusionai.scheduling.takeover import Waiting, handed_over, replaced, told
from fusionai.scheduling.types import Guard, PeerProfile, Plan, Problem, StagePlacement, TolerantTakeover

Takeover = Literal["any", "exact", "tolerant", "refuse"]
"""Who may go on in a lost peer's place: `any`, whoever computes the same bits, and after a grace period anybody;
`exact`, only the same bits, and the job waits; `tolerant`, anybody at once; `refuse`, as `exact`, but the job ends."""
GRACE_S: Final = 30.0
"""How long a machine that computes the same bits is waited for, unless the recipe says otherwise: a process started
anew is back in 10 s, a machine in a minute."""
MOST_TAKEOVERS: Final = 64
"""That a plan lists: of more, the first and the newest."""
MOVE_STEPS: Final = 10
"""What another cut costs, in steps: a checkpoint written, read and sent."""
FASTER: Final = 1.25
"""So many times the tokens per second: then another cut over other machines is worth going back to the checkpoint."""


@dataclass(frozen=True, slots=True)
class Otherwise:
    """A plan (version 0) that keeps less than a stand-in of the same numerics would."""

    plan: Plan
    exact: bool
    """Whether all machines of both plans compute the same bits."""
    recut: bool
    """Whether stages are others than before."""
    takers: frozenset[str]
    """Peers that get stages."""

    def words(self, problem: Problem) -> str:
        """`going on with bob, of other numerics (tolerant, not bit-exact)`."""
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
    """Nobody who is there can go on; `reason`: why not, for people."""

    reason: str


def numerics(takeover: Takeover) -> Literal["exact", "tolerant"]:
    """Of guards and plans: whether a machine of other numerics may be in them at all."""
    return "tolerant" if takeover in ("any", "tolerant") else "exact"


def stand_in(
    plan: Plan, problem: Problem, lost: frozenset[str], candidates: Sequence[PeerProfile], takeover: Takeover
) -> Plan | Waiting:
    """See `takeover.replaced`: at once, and with the same bits unless the job takes any."""
    strict: Literal["exact", "tolerant"] = "tolerant" if takeover == "tolerant" else "exact"
    found = replaced(plan, msgspec.structs.replace(problem, takeover=strict), lost, candidates)
    return found if isinstance(found, Waiting) else _guarded_as(found, problem)


def otherwise(
    plan: Plan, problem: Problem, lost: frozenset[str], candidates: Sequence[PeerProfile], takeover: Takeover
) -> Otherwise | Nothing:
    """What there is where `stand_in` waits. `candidates`: all that may be used, those that run stages among them."""
    there = [peer for peer in candidates if peer.peer not in lost]
    alike = recut(plan, problem, _alike(plan, there))
    if takeover in ("exact", "refuse"):
        bits = isinstance(alike, Nothing) or alike.exact
        return alike if bits else Nothing("another cut over those that remain gives other bits")
    cut = _faster(alike, recut(plan, problem, there)) if len(_alike(plan, there)) < len(there) else alike
    kept = replaced(plan, msgspec.structs.replace(problem, takeover="tolerant"), lost, candidates)
    if isinstance(kept, Waiting):
        return cut
    if isinstance(cut, Otherwise):
        kept_per_s, cut_per_s = kept.tokens_per_s, cut.plan.tokens_per_s
        # Without a snapshot both begin at the checkpoint: then bits are for nothing.
        if cut_per_s > FASTER * kept_per_s or (
            cut.exact and cut_per_s * FASTER >= kept_per_s and not _is_guarded(plan, lost)
        ):
            return cut
    takers = frozenset(stage.peer for stage in kept.stages) - {stage.peer for stage in plan.stages}
    return Otherwise(kept, exact=keeps_bits(plan, kept, problem), recut=False, takers=takers)


def _alike(plan: Plan, there: Sequence[PeerProfile]) -> list[PeerProfile]:
    """Those with which a plan of any cut computes the bits of `plan`; none where that has unlike machines itself."""
    prints = {stage.fingerprint for stage in plan.stages if stage.peer != plan.feed}
    return [peer for peer in there if prints == {peer.fingerprint} != {""}]


def _faster(alike: Otherwise | Nothing, cut: Otherwise | Nothing) -> Otherwise | Nothing:
    """Bits are worth a little speed."""
    if isinstance(alike, Nothing) or isinstance(cut, Nothing):
        return cut if isinstance(alike, Nothing) else alike
    return cut if cut.plan.tokens_per_s > FASTER * alike.plan.tokens_per_s else alike


def keeps_bits(before: Plan, after: Plan, problem: Problem) -> bool:
    """Whether every stage of `after` computes what `before` promised: stages that stay by their own numerics, stages of
    another cut where all machines are alike and add gradients in the same order."""
    if not same_sums(before, after, problem):
        return False
    if _ranges(before) == _ranges(after):
        pairs = zip(before.stages, after.stages, strict=True)
        return all(_same_numerics(one, other) for one, other in pairs)
    prints = {stage.fingerprint for one in (before, after) for stage in one.stages if stage.peer != one.feed}
    return before.replicas == after.replicas and len(prints) == 1 and "" not in prints


def recorded(before: Plan, after: Plan, problem: Problem, step: int, tolerance: float) -> Plan:
    """`after` with what `before` lists of tolerant takeovers, and with itself where it is one: `step` steps are
    official when it follows `before`. Before the first step there is nothing that could differ."""
    listed = before.tolerant_takeovers
    if step and not keeps_bits(before, after, problem):
        same = _ranges(before) == _ranges(after)
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
    """Return the best plan over `candidates`, with any number of stages, or why they can't hold the model.

    The recipe's stages, spares, required and pinned machines are dropped: they were chosen for a pool that has changed.
    """
    if not candidates:
        return Nothing("none of those that remain computes the same bits")
    known = told(problem, candidates)
    there = {peer.peer for peer in candidates}
    posed = msgspec.structs.replace(
        known,
        peers=tuple(peer for peer in known.peers if peer.peer in there),
        links={
            key: link
            for key, link in known.links.items()
            if {*key.split(">")} <= there | ({known.owner.peer} if known.owner else set[str]())
        },
        stages=None,
        spares_wanted=None,
        required=(),
        excluded=tuple(peer for peer in known.excluded if peer in there),
        pinned={},
        incumbent=None,
    )
    try:
        found = served_with(plan, posed) if plan.task == "serve" else _trained(posed)
    except PlanError as error:
        return Nothing(f"those that remain can't hold the model: {error.message.rstrip('.')}")
    if found is None:
        return Nothing("those that remain have no room for the caches that were promised")
    same = _ranges(plan) == _ranges(found)
    kept = {(stage.stage, stage.peer) for stage in plan.stages} if same else set[tuple[int, str]]()
    takers = frozenset(stage.peer for stage in found.stages if (stage.stage, stage.peer) not in kept) - {found.feed}
    return Otherwise(found, exact=keeps_bits(plan, found, problem), recut=not same, takers=takers)


def _trained(posed: Problem) -> Plan:
    """With as many replicas as before, for the order of sums; with fewer machines than these need, with one."""
    try:
        return planned_replicas(posed)
    except PlanError:
        if posed.replicas == 1:
            raise
    return planned_replicas(with_replicas(posed, 1))


def served_with(plan: Plan, posed: Problem) -> Plan | None:
    """Another plan with the sizes of the running job: sessions count on its pages. None: there is no room for them."""
    sizes, needs = plan.serving, posed.serving
    assert sizes is not None, "a serving plan has its sizes"
    assert needs is not None, "a serving problem has its needs"
    wanted = msgspec.structs.replace(needs, cache_tokens=(sizes.pages - 1) * sizes.page_tokens)
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


def _is_guarded(plan: Plan, lost: frozenset[str]) -> bool:
    """Whether somebody who is there has snapshots of all that is lost."""
    kept = {guard.stage for guard in plan.guards if guard.peer not in lost}
    return all(stage.stage in kept for stage in plan.stages if stage.peer in lost)


def handed_on(
    plan: Plan, problem: Problem, leaving: frozenset[str], candidates: Sequence[PeerProfile], takeover: Takeover
) -> Plan | None:
    """Where nobody of the same numerics takes the work of those who leave in order: as `otherwise`, but they stay in
    the plan as guards until the state is elsewhere. None: nobody else will do, or they have no room for that."""
    if takeover in ("any", "tolerant"):
        found = handed_over(plan, msgspec.structs.replace(problem, takeover="tolerant"), leaving, candidates)
        if found is not None:
            return found
    cut = otherwise(plan, problem, leaving, candidates, takeover)
    if isinstance(cut, Nothing):
        return None
    found, known = cut.plan, told(problem, candidates)
    guards = {guard.stage: guard for guard in found.guards}
    pool = [stage for stage in found.stages if stage.peer != found.feed]
    for peer in sorted(leaving & {stage.peer for stage in plan.stages}):
        free = [stage for stage in pool if stage.stage not in guards] or pool
        place = next((stage for stage in free if may_guard(found, known, stage, peer)), None)
        if place is None:
            return None
        guards[place.stage] = Guard(stage=place.stage, peer=peer, exact=False)
    every = found.snapshot_every or plan.snapshot_every or 1
    return msgspec.structs.replace(found, guards=tuple(guards[stage] for stage in sorted(guards)), snapshot_every=every)


def widened(
    plan: Plan, problem: Problem, candidates: Sequence[PeerProfile], *, steps_left: int, tolerant: bool
) -> Otherwise | None:
    """For a job whose model was cut anew for want of machines: another cut over all that are there again, if it is
    worth the way by a checkpoint. `tolerant`: bits are others already."""
    known = told(problem, candidates)
    there = {peer.peer for peer in candidates}
    posed = msgspec.structs.replace(
        known, peers=tuple(peer for peer in known.peers if peer.peer in there), required=(), incumbent=None
    )
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


def _guarded_as(found: Plan, problem: Problem) -> Plan:
    """With the guards that the job's own word on numerics allows: an unlike one is better than none."""
    return found if problem.takeover == "exact" else with_guards(found, problem)


def _same_numerics(one: StagePlacement, other: StagePlacement) -> bool:
    """What is not known of a peer is at least what it was."""
    return one.fingerprint == other.fingerprint and (one.fingerprint != "" or one.peer == other.peer)


def _ranges(plan: Plan) -> tuple[tuple[int, tuple[int, int]], ...]:
    return tuple((stage.replica, stage.blocks) for stage in plan.stages)
