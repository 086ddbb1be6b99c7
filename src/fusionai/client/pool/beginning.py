"""Gets the deployment with which a driver starts: the previous plan if it is still valid, otherwise a new plan.

With the previous plan, running stages keep their state. The broker renews the tickets; while it is away, the tickets on
disk are used. In exact jobs a new plan uses only machines with the numeric fingerprints of the steps so far.

A job that waits has a place in the pool's queue: `QueuedJob` asks for it, shows it, waits for the job's turn, and gives
it up. The broker decides (`coordination.broker.turns`). The owner asks every few seconds, which also shows the broker
that it is there. An owner that was killed finds its place again under the job's id; while the broker is away, the place
is in its journal.

`client.training.train` and `client.serving.serve` call this; `client.pool.replanning` has plans adopted,
`scheduling.planner` makes them."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Final

import msgspec

from fusionai.client.pool.replanning import PoolReplanner, TrainingReplanner, kept_deployment
from fusionai.client.pool.session import PoolMember, one_part_each
from fusionai.client.training.preparation import PreparedJob, problem_for
from fusionai.execution.connections import Deployment
from fusionai.primitives.errors import FusionError, PlanError, RecipeError, RefusedError, TransportError
from fusionai.primitives.ids import PeerId, short
from fusionai.primitives.process import in_background
from fusionai.primitives.units import format_seconds
from fusionai.scheduling.problem.embedding_and_head import embedding_and_head_stay, middle
from fusionai.scheduling.problem.types import Excluded, PeerProfile, Plan, Problem
from fusionai.scheduling.training.replicated import plan as planned
from fusionai.scheduling.training.replicated import with_replicas
from fusionai.wire import messages as wire

PLAN_ATTEMPTS: Final = 15
"""Attempts to plan and assign peers (chosen). Between listing the pool and the request, a peer may be taken or lost."""
WAITED_FOR: Final = 8
"""Attempts during which peers that may be free in a moment are waited for (chosen): those that still clear another
job's data, and those without a connection to the broker. Then the others are used."""
PLANNED_AGAIN: Final = ("busy", "unknown_peer", "untrusted", "leaving")
"""Codes of refusals after which the first plan is made again."""
WAIT_HINT: Final = "Give --wait: the job takes a place in the queue then; `fusion jobs` lists it."
PLAN_PAUSE_S: Final = 1.0
"""Pause between attempts, in seconds. A peer reports that it is free with its next heartbeat, after at most 3 s; one
that slept when its job ended, with the one after."""


async def begin(
    replanner: TrainingReplanner,
    prepared: PreparedJob,
    owner: PeerProfile,
    members: tuple[PoolMember, ...] | None,
    *,
    pool_name: str,
    driving: asyncio.Event,
    note: Callable[[str], None],
    waiting: Waiting | None = None,
) -> Deployment:
    """Return the deployment for a training job. `members`: the pool's members, None while its broker is away. `driving`
    is set before the broker is asked to start the job. `waiting`: the job waits in the queue for machines. Raises
    `PlanError`, `RecipeError`, `RefusedError`, `TransportError`, `LeftQueue`."""

    async def anew() -> Deployment:
        return await first_deployment(
            replanner,
            lambda usable: _plan(replanner, prepared, owner, usable, note),
            pool_name=pool_name,
            note=note,
            fitting=lambda members: _equal_numerics(replanner, members),
            driving=driving,
            waiting=waiting,
        )

    known = _known(replanner, prepared)
    if known is None:
        if members is None:
            raise TransportError("the pool's broker can't be reached, and a new job needs it.", hint="Try again later.")
        return await anew()
    driving.set()
    try:
        return await replanner.renewed(Deployment(plan=known))
    except RefusedError as error:
        if error.code == "unknown_job":  # the job has ended for the pool: no peer holds its state
            driving.clear()
            return await anew()
        if error.code not in ("stale_fence", "untrusted"):
            raise
        return await replanner.replacement(Deployment(plan=known), frozenset(), note)
    except TransportError:
        kept = await in_background(lambda: kept_deployment(replanner.directory))
        if kept is None or kept.plan != known:
            raise
        note("warning: the broker can't be reached; the job continues with its previous plan and tickets")
        return kept


def _known(replanner: TrainingReplanner, prepared: PreparedJob) -> Plan | None:
    """Return the plan of the job's last start, if it is for the same model and the recipe still allows it."""
    plan = replanner.adopted
    if plan is None or plan.graph_hash != prepared.graph_hash:
        return None
    wanted = prepared.recipe.placement.stages
    pool_stages = sum("stage" in stage.roles for stage in plan.stages)
    fits = wanted is None or wanted * plan.replicas == pool_stages
    is_believed = not replanner.faulty_peers & {one.peer for one in (*plan.stages, *plan.standbys)}
    return plan if fits and is_believed and embedding_and_head_stay(plan, replanner.problem) else None


async def _plan(
    replanner: TrainingReplanner,
    prepared: PreparedJob,
    owner: PeerProfile,
    usable: tuple[PoolMember, ...],
    note: Callable[[str], None],
) -> Plan:
    problem = _as_begun(replanner, problem_for(prepared, _equal_numerics(replanner, usable), owner, note))
    return await in_background(lambda: planned(problem))


async def first_deployment(
    replanner: PoolReplanner,
    plan_with: Callable[[tuple[PoolMember, ...]], Awaitable[Plan]],
    *,
    pool_name: str,
    note: Callable[[str], None],
    fitting: Callable[[tuple[PoolMember, ...]], tuple[PoolMember, ...]] = lambda members: members,
    driving: asyncio.Event | None = None,
    waiting: Waiting | None = None,
) -> Deployment:
    """List the pool, plan, and ask the broker to adopt the plan; repeat if a peer was taken meanwhile. `driving` is set
    before the broker is asked. `waiting`: take a place in the queue first and plan with the machines of the job's turn,
    which are among those that `fitting` returns. Raises `PlanError`, `RefusedError`, `TransportError`, `LeftQueue`."""
    driving = driving or asyncio.Event()
    if waiting is not None:
        waited = await _in_turn(replanner, plan_with, fitting, driving, note, waiting)
        if waited is not None:
            return waited
    for attempt in range(PLAN_ATTEMPTS):
        members = await replanner.pool.pool()
        usable = replanner.spare(members)
        held = replanner.held_up(members)
        if held and attempt < (WAITED_FOR if usable else PLAN_ATTEMPTS - 1):
            if attempt == 0:
                note(f"waiting for {held}")
            await asyncio.sleep(PLAN_PAUSE_S)
            continue
        if not usable:
            raise nobody(pool_name, members, replanner.barred())
        made = await _planned(plan_with, usable, note)
        driving.set()
        try:
            return await replanner.make_real(_with_barred(made, replanner))
        except RefusedError as error:
            if error.code == "queued":
                raise RefusedError(error.message, code=error.code, hint=WAIT_HINT) from error
            if error.code not in PLANNED_AGAIN or attempt + 1 == PLAN_ATTEMPTS:
                raise
            note(f"planning again: {error.message}")
            await asyncio.sleep(PLAN_PAUSE_S)
    raise AssertionError("unreachable: the last attempt returns or raises")


async def _planned(
    plan_with: Callable[[tuple[PoolMember, ...]], Awaitable[Plan]],
    usable: tuple[PoolMember, ...],
    note: Callable[[str], None],
) -> Plan:
    """Plan with one part of each device, which leaves the others to other jobs; with all if that does not suffice."""
    parts = one_part_each(usable)
    if len(parts) < len(usable):
        try:
            return await plan_with(parts)
        except (PlanError, RecipeError) as error:
            note(f"taking several parts of a device, because one part of each does not suffice: {error.message}")
    return await plan_with(usable)


async def _in_turn(
    replanner: PoolReplanner,
    plan_with: Callable[[tuple[PoolMember, ...]], Awaitable[Plan]],
    fitting: Callable[[tuple[PoolMember, ...]], tuple[PoolMember, ...]],
    driving: asyncio.Event,
    note: Callable[[str], None],
    waiting: Waiting,
) -> Deployment | None:
    """Wait in the queue for the job's turn, plan with its machines, and have the plan adopted; if no plan fits on them,
    wait for more. None: the job has machines already. The place is given up on every error and when the task is
    cancelled."""
    place = QueuedJob(replanner, waiting, note, *least_machines(replanner.problem))
    try:
        place.excluded = _kept_out(replanner, await replanner.pool.pool(), fitting)
        while (kept := await place.turn()) is not None:
            members = await replanner.pool.pool()
            place.excluded = _kept_out(replanner, members, fitting)
            usable = tuple(one for one in replanner.usable(members) if one.view.peer in kept - set(place.excluded))
            if len(usable) < place.machines:
                await asyncio.sleep(PLAN_PAUSE_S)
                continue
            try:
                made = await _planned(plan_with, usable, note)
            except PlanError as error:
                if len(usable) >= sum(one.is_present and one.view.peer not in place.excluded for one in members):
                    raise  # on all machines of the pool that the job may use
                place.machines = len(usable) + 1
                note(f"queue: {len(usable)} machines don't suffice: {error.message}")
                continue
            driving.set()
            try:
                return await replanner.make_real(_with_barred(made, replanner))
            except RefusedError as error:
                driving.clear()
                if error.code not in (*PLANNED_AGAIN, "queued"):
                    raise
                if waiting.interrupted.is_set():
                    raise asyncio.CancelledError from error
                note(f"planning again: {error.message}")
                await asyncio.sleep(PLAN_PAUSE_S)
    except BaseException:
        await place.leave()
        raise
    return None


def _kept_out(
    replanner: PoolReplanner,
    members: tuple[PoolMember, ...],
    fitting: Callable[[tuple[PoolMember, ...]], tuple[PoolMember, ...]],
) -> tuple[str, ...]:
    """Return the members that the job may not use, even if they were free."""
    excluded = replanner.excluded(members) | replanner.faulty_peers
    candidates = tuple(one for one in members if one.view.peer not in excluded)
    fit = {one.view.peer for one in fitting(candidates)} if candidates else set[str]()
    barred = (one.peer for one in replanner.barred())
    return tuple(sorted({*barred, *(one.view.peer for one in members if one.view.peer not in fit)}))


def _with_barred(made: Plan, replanner: PoolReplanner) -> Plan:
    return msgspec.structs.replace(made, excluded=(*made.excluded, *replanner.barred()))


def _as_begun(replanner: TrainingReplanner, problem: Problem) -> Problem:
    """Return `problem` with the number of replicas fixed once steps are committed: the order of sums depends on it."""
    plan = replanner.adopted if problem.replicas == "auto" and replanner.journal.committed else None
    return problem if plan is None else with_replicas(problem, plan.replicas)


def _equal_numerics(replanner: TrainingReplanner, usable: tuple[PoolMember, ...]) -> tuple[PoolMember, ...]:
    """Return the members that may continue the job once steps are committed. An exact job needs machines that compute
    the same bits; a job with takeover = "any" prefers them if there are as many as it had. Raises `PlanError` if an
    exact job finds none."""
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
            f"{replanner.journal.committed} steps are committed, and none of the machines in the pool ({names}) "
            "computes the same bits as those that computed them.",
            hint='Wait for such a machine to join, or set takeover = "any" in [faults].',
        )
    return equal or usable


def nobody(pool_name: str, members: tuple[PoolMember, ...], barred: tuple[Excluded, ...] = ()) -> PlanError:
    """Return the error for a pool without a usable peer. `barred`: members that the job may not use."""
    present = [f"{member.profile.name} {_occupation(member)}" for member in members]
    present += [f"{short(PeerId(one.peer))} is {one.reason.rstrip('.')}" for one in barred]
    if barred:
        return PlanError(
            f"no trusted peer is free in pool {pool_name!r}: {'; '.join(present)}.",
            hint="This job runs only on trusted peers: have them endorsed (`fusion trust sign`) or wait for one.",
        )
    return PlanError(
        f"no peer is free in pool {pool_name!r}: {'; '.join(present) or 'it has no members'}.",
        hint="Let a machine join (`fusion invite`, `fusion join`), or give --wait to take a place in the queue; "
        "`fusion pool` lists the members.",
    )


def _occupation(member: PoolMember) -> str:
    if member.view.job:
        return f"works on {member.view.job}"
    return f"is kept for {member.view.kept_for}" if member.view.kept_for else f"is {member.view.state}"


ASK_S: Final = 3.0
"""Time between two questions for the job's place, in seconds (chosen)."""
LEAVE_S: Final = 5.0
"""Timeout for giving up the place, in seconds (chosen). Without an answer, the broker gives it up after a while."""


class LeftQueue(FusionError):
    """The job was taken out of the queue with `fusion stop`."""


@dataclass(frozen=True, slots=True)
class Waiting:
    """How a job waits if it finds no machines. `priority`: its priority class, empty: the pool's usual one. `stopped`
    is set when the job was asked to stop, `interrupted` when its owner's process was."""

    priority: str
    stopped: asyncio.Event
    interrupted: asyncio.Event = field(default_factory=asyncio.Event)


def least_machines(problem: Problem) -> tuple[int, int]:
    """Return the number of machines that a job needs at least, and the memory in bytes that they must lend together: no
    plan needs less. Whether a plan exists for given machines, the planner finds out."""
    chains = problem.replicas if isinstance(problem.replicas, int) else 1
    machines = max(1, (problem.stages or 1) * chains)
    if problem.offload_weights != "never":
        return machines, 0
    return machines, chains * sum(block.parameter_bytes for block in middle(problem))


@dataclass
class QueuedJob:
    """The place of one job. `note` receives a line when the place or what is waited for has changed."""

    replanner: PoolReplanner
    waiting: Waiting
    note: Callable[[str], None]
    machines: int
    memory_bytes: int
    excluded: tuple[str, ...] = ()
    _asked: bool = False
    _shown: str = ""

    async def turn(self) -> frozenset[str] | None:
        """Wait until it is the job's turn and return the machines that are kept for it; None if the job has machines
        already. Raises `LeftQueue`, `RefusedError`."""
        while True:
            try:
                found = await self._ask()
            except TransportError as error:
                self._show(f"queue: the broker can't be reached ({error.message.rstrip('.')}); it keeps the place")
            else:
                if found.place == 0:
                    return None
                if found.members:
                    self._show("queue: it is this job's turn")
                    return frozenset(found.members)
                self._show(sentence(found))
            with suppress(TimeoutError):
                async with asyncio.timeout(ASK_S):
                    await self.waiting.stopped.wait()
            if self.waiting.stopped.is_set():
                raise LeftQueue("the job was taken out of the queue with `fusion stop`.")

    async def leave(self) -> None:
        """Give the place up, if the job has one."""
        if not self._asked:
            return
        with suppress(FusionError, TimeoutError):
            async with asyncio.timeout(LEAVE_S):
                await self.replanner.pool.stop(self.replanner.job)

    async def _ask(self) -> wire.QueuePlace:
        job = self.replanner
        question = wire.QueueRequest(
            job=job.job,
            title=job.title,
            steps=job.steps,
            machines=self.machines,
            memory_bytes=self.memory_bytes,
            excluded=self.excluded[: wire.MAX_EXCLUDED],
            priority=self.waiting.priority,
            again=self._asked,
        )
        try:
            found = await job.pool.place(question)
        except RefusedError as error:
            if error.code == "unknown_job":
                raise LeftQueue("the job was taken out of the queue.") from error
            raise
        self._asked = True
        return found

    def _show(self, text: str) -> None:
        if text != self._shown:
            self._shown = text
            self.note(text)


def sentence(found: wire.QueuePlace) -> str:
    """Return the line about a job's place."""
    when = f"in about {format_seconds(found.expected_s)}" if found.expected_s else "not known"
    return f"queue: place {found.place} of {found.waiting}; {found.why}; its turn comes: {when}"
