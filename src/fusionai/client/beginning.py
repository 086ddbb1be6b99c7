"""How a driver's start gets its deployment: the plan it had, if that is still in force, otherwise a new one.

With the plan it had, stages that live keep their state. The broker renews the tickets; while it is away, those kept on
the disk must do. In exact jobs a new plan takes only machines of the numerics that the steps so far were made with.

Neighbours: `client.train` calls it, `client.replanning` makes plans real, `scheduling.planner` plans.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Final

import msgspec

from fusionai.client.background import in_background
from fusionai.client.deployments import kept_deployment
from fusionai.client.pool_session import Member
from fusionai.client.preparation import Prepared, problem_for
from fusionai.client.replanning import PoolReplanner, Replanner
from fusionai.execution.deployment import Deployment
from fusionai.primitives.errors import PlanError, RefusedError, TransportError
from fusionai.primitives.ids import PeerId, short
from fusionai.scheduling.ends import ends_stay
from fusionai.scheduling.replicated import plan as planned
from fusionai.scheduling.replicated import with_replicas
from fusionai.scheduling.types import Excluded, PeerProfile, Plan, Problem

PLAN_ATTEMPTS: Final = 15
"""A peer may be taken or gone between looking at the pool and asking for it."""
WAITED_FOR: Final = 8
"""In so many of them who still clears what it had of another job is waited for; then the others will do."""
PLAN_PAUSE_S: Final = 1.0
"""Between two attempts: a peer that another job has just let go says so with its next heartbeat, 3 s at most; one that
slept when that job ended is told with the heartbeat after."""


async def begin(
    replanner: Replanner,
    prepared: Prepared,
    owner: PeerProfile,
    members: tuple[Member, ...] | None,
    *,
    pool_name: str,
    driving: asyncio.Event,
    note: Callable[[str], None],
) -> Deployment:
    """`members`: who is in the pool, None while its broker is away. `driving` is set before anything becomes the
    pool's. Raises `PlanError`, `RecipeError`, `RefusedError`, `TransportError`."""
    known = _known(replanner, prepared)
    if known is None:
        if members is None:
            raise TransportError("the pool's broker can't be reached.", hint="A new job needs it; try again later.")
        return await _anew(replanner, prepared, owner, pool_name=pool_name, driving=driving, note=note)
    driving.set()
    try:
        return await replanner.renewed(Deployment(plan=known))
    except RefusedError as error:
        if error.code == "unknown_job":  # it has ended for the pool: nobody holds anything of it
            return await _anew(replanner, prepared, owner, pool_name=pool_name, driving=driving, note=note)
        if error.code not in ("stale_fence", "untrusted"):
            raise
        return await replanner.replacement(Deployment(plan=known), frozenset(), note)
    except TransportError:
        kept = await in_background(lambda: kept_deployment(replanner.directory))
        if kept is None or kept.plan != known:
            raise
        note("warning: the broker can't be reached; the job goes on with the plan and the tickets it had")
        return kept


def _known(replanner: Replanner, prepared: Prepared) -> Plan | None:
    """The plan this job's last start obeyed, if it is one of this model and the recipe still allows it."""
    adopted = replanner.journal.plan
    if adopted is None:
        return None
    try:
        plan = msgspec.json.decode(adopted.plan, type=Plan)
    except msgspec.DecodeError:
        return None  # of another version of this program
    wanted = prepared.recipe.placement.stages
    pool_stages = sum("stage" in stage.roles for stage in plan.stages)
    fits = (wanted is None or wanted * plan.replicas == pool_stages) and ends_stay(plan, replanner.problem)
    believed = not replanner.liars & {one.peer for one in (*plan.stages, *plan.guards)}
    return plan if plan.graph_hash == prepared.graph_hash and fits and believed else None


async def _anew(
    replanner: Replanner,
    prepared: Prepared,
    owner: PeerProfile,
    *,
    pool_name: str,
    driving: asyncio.Event,
    note: Callable[[str], None],
) -> Deployment:
    async def plan_with(usable: tuple[Member, ...]) -> Plan:
        problem = _as_begun(replanner, problem_for(prepared, _equal_numerics(replanner, usable), owner, note))
        made = await in_background(lambda: planned(problem))
        driving.set()
        return made

    return await first_deployment(replanner, plan_with, pool_name=pool_name, note=note)


async def first_deployment(
    replanner: PoolReplanner,
    plan_with: Callable[[tuple[Member, ...]], Awaitable[Plan]],
    *,
    pool_name: str,
    note: Callable[[str], None],
) -> Deployment:
    """Look, plan, ask; look again when a peer was taken meanwhile. Raises `PlanError`, `RefusedError`,
    `TransportError`."""
    for attempt in range(PLAN_ATTEMPTS):
        members = await replanner.pool.pool()
        usable = replanner.usable(members)
        clearing = [one.profile.name for one in members if replanner.clears(one)]
        if clearing and attempt < (WAITED_FOR if usable else PLAN_ATTEMPTS - 1):
            if attempt == 0:
                note(f"waiting for {', '.join(clearing)}: still clearing what another job left there")
            await asyncio.sleep(PLAN_PAUSE_S)
            continue
        if not usable:
            raise nobody(pool_name, members, replanner.barred())
        made = await plan_with(usable)
        made = msgspec.structs.replace(made, excluded=(*made.excluded, *replanner.barred()))
        try:
            return await replanner.make_real(made)
        except RefusedError as error:
            if error.code not in ("busy", "unknown_peer", "untrusted", "leaving") or attempt + 1 == PLAN_ATTEMPTS:
                raise
            note(f"looking at the pool again: {error.message}")
            await asyncio.sleep(PLAN_PAUSE_S)
    raise AssertionError("unreachable: the last attempt returns or raises")


def _as_begun(replanner: Replanner, problem: Problem) -> Problem:
    """Once steps are official, the number of replicas stays: the order of sums depends on it."""
    adopted = replanner.journal.plan
    if problem.replicas != "auto" or adopted is None or not replanner.journal.committed:
        return problem
    try:
        return with_replicas(problem, msgspec.json.decode(adopted.plan, type=Plan).replicas)
    except msgspec.DecodeError:
        return problem  # of another version of this program


def _equal_numerics(replanner: Replanner, usable: tuple[Member, ...]) -> tuple[Member, ...]:
    """Once steps are official, an exact job goes on only where they come out the same; one that takes any numerics does
    where there are as many such machines as it had."""
    plan = replanner.adopted
    if replanner.is_tolerant or plan is None or not replanner.journal.committed:
        return usable
    made_with = {stage.fingerprint for stage in plan.stages if stage.peer != plan.feed} - {""}
    equal = tuple(one for one in usable if one.profile.fingerprint in made_with)
    if replanner.policy == "any":
        had = {stage.peer for stage in plan.stages if stage.peer != plan.feed}
        return equal if len(equal) >= len(had) else usable
    if made_with and not equal:
        names = ", ".join(sorted(one.profile.name for one in usable))
        raise PlanError(
            f"{replanner.journal.committed} steps are official, and none of the machines in the pool ({names}) "
            "computes the same bits as those that made them.",
            hint='Wait for such a machine, or set takeover = "any" in [faults].',
        )
    return equal or usable


def nobody(pool_name: str, members: tuple[Member, ...], barred: tuple[Excluded, ...] = ()) -> PlanError:
    """`barred`: those that are kept from the job whatever they do."""
    present = [
        f"{member.profile.name} {'works on ' + member.view.job if member.view.job else 'is ' + member.view.state}"
        for member in members
    ]
    present += [f"{short(PeerId(one.peer))} is {one.reason.rstrip('.')}" for one in barred]
    if barred:
        return PlanError(
            f"no trusted peer stands by in pool {pool_name!r}: {'; '.join(present)}.",
            hint="This job runs on trusted peers alone: have them endorsed (`fusion trust sign`) or wait for such.",
        )
    return PlanError(
        f"no peer stands by in pool {pool_name!r}: {'; '.join(present) or 'nobody lends a machine there'}.",
        hint="Let a machine join (`fusion invite`, `fusion join`) or wait; `fusion pool` shows who is there.",
    )
