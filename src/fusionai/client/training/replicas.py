"""Runs a job of several replicas: pipelines that train one model, each on its own machines.

Every replica is a job as run by `client.training.train`, with its share of the machines and of the data and its own
directory. The replicas' machines exchange with each other (`training.joint_exchange`). `_Replicas.run` starts the
replicas that have machines, then handles those that end, those that may start, and a stop. It decides when a waiting
replica starts.
The job is over when one replica has taken all its steps; the work of replicas that are behind is included as far as
they took part in the synchronisation.

`client.training.replica_crews` assigns machines to replicas, `scheduling.training.replicated` divides them at the
start, `client.training.job_directory` starts a replica later."""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Final

from fusionai.backends.registry import open_backend
from fusionai.client.pool.beginning import PLAN_PAUSE_S, WAITED_FOR, nobody
from fusionai.client.pool.job_process import Noted, owner_profile
from fusionai.client.pool.job_trust import job_trust
from fusionai.client.pool.session import PoolMember, PoolSession, held_up, owner_membership
from fusionai.client.training.job_directory import (
    Past,
    ReplicaDirectories,
    check_resumable,
    encode_recipe,
    job_id,
    open_directory,
)
from fusionai.client.training.outcome import TrainingResult
from fusionai.client.training.preparation import PreparedJob, excluded_peers, prepare, problem_for
from fusionai.client.training.replica_crews import Crews, ReplicaPart, stands_by
from fusionai.client.training.replica_rounds import ReplicaRounds, seat_name
from fusionai.client.training.train import Planned, RunEvent, TrainOptions, train
from fusionai.corpus.order import Deal
from fusionai.corpus.recipe import Recipe
from fusionai.corpus.tables import Replicas
from fusionai.primitives.errors import ExecutionError, FusionError, PlanError, TransportError
from fusionai.primitives.process import in_background
from fusionai.scheduling.planner import plan as planned
from fusionai.scheduling.problem.types import PeerProfile, Plan, Problem
from fusionai.scheduling.training.replicated import Exchanging, Group, divide, fastest
from fusionai.storage.rundir import RunDirectory
from fusionai.training import progress
from fusionai.training.joint_exchange import RoundDone

MOST_BEHIND: Final = 3
"""How often a replica may be left behind by the others, after which it is not started again (chosen)."""
LOOK_S: Final = 2.0
"""Interval at which the pool is checked for machines for a waiting replica, in seconds (chosen)."""


@dataclass(frozen=True, slots=True)
class InReplica:
    """An event of the job of replica `number`."""

    number: int
    event: RunEvent


ReplicasEvent = Noted | InReplica | RoundDone


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplicasResult:
    """Result of a job. `replicas`: results of those that ran in this start. `checkpoint`: the last synchronised state
    if the job is done, else that of one replica. `rounds` and bytes: counts of this start (see `ReplicaRounds`)."""

    directory: Path
    stopped: str | None
    replicas: Mapping[int, TrainingResult] = field(default_factory=dict[int, TrainingResult])
    first_steps: Mapping[int, int] = field(default_factory=dict[int, int])
    """Steps of the job that were over when each replica started."""
    failed: Mapping[int, str] = field(default_factory=dict[int, str])
    checkpoint: Path | None = None
    rounds: int = 0
    exchanged_bytes: int = 0
    every_step_bytes: int = 0
    line_bytes: int = 0


async def train_replicas(
    recipe: Recipe,
    replicas: Replicas,
    options: TrainOptions,
    *,
    on_event: Callable[[ReplicasEvent], None],
    stop: asyncio.Event,
) -> ReplicasResult:
    """Run the job. `replicas`: the recipe's table. Raises the errors of `client.training.train` if they concern all
    replicas or the last one."""
    directory = open_directory(recipe)
    places = ReplicaDirectories(recipe)
    pasts = await in_background(lambda: [places.past(number) for number in range(replicas.most)])
    if any(pasts) and (kept := directory.kept_recipe()) is not None:
        check_resumable(kept, recipe)
    membership = await owner_membership(options.home, options.invitation)
    options = dataclasses.replace(options, invitation=None)
    trust = job_trust(options.home, membership, recipe.privacy.level, confidential=recipe.privacy.confidential)
    async with PoolSession(membership, trust=trust) as pool:
        opening = asyncio.create_task(_opened(recipe, replicas, options, pool, directory, places, on_event))
        asked = asyncio.create_task(stop.wait())
        try:  # until there is something to save, a stop cancels everything
            await asyncio.wait({opening, asked}, return_when=asyncio.FIRST_COMPLETED)
            if not opening.done():
                return ReplicasResult(stopped="Ctrl-C", directory=directory.root)
            job = opening.result()
        finally:
            opening.cancel()
            asked.cancel()
        try:
            await job.run(pasts, stop)
        finally:
            await job.close()
    return job.result(directory)


async def _opened(
    recipe: Recipe,
    replicas: Replicas,
    options: TrainOptions,
    pool: PoolSession,
    directory: RunDirectory,
    places: ReplicaDirectories,
    on_event: Callable[[ReplicasEvent], None],
) -> _Replicas:
    prepared = await in_background(lambda: prepare(recipe, directory, lambda text: on_event(Noted(text))))
    directory.keep_recipe(encode_recipe(recipe))
    rounds = ReplicaRounds(recipe, replicas, prepared.captured.graph, on_event)
    await in_background(lambda: rounds.open(places.outer))
    backend = await in_background(lambda: open_backend("torch", device=options.device, threads=options.threads))
    owner = owner_profile(pool.membership.peer, await in_background(backend.probe))
    return _Replicas(recipe, replicas, options, pool, prepared, places, owner, rounds, on_event)


@dataclass(slots=True)
class _Running:
    """A running replica. `steps`: its committed steps."""

    part: ReplicaPart
    stop: asyncio.Event
    task: asyncio.Task[TrainingResult]
    steps: int
    planned_s: float | None = None
    """Predicted time of a step in seconds; None until there is a plan."""


@dataclass
class _Replicas:
    """Runs the replicas, as the module's docstring says."""

    recipe: Recipe
    replicas: Replicas
    options: TrainOptions
    pool: PoolSession
    prepared: PreparedJob
    places: ReplicaDirectories
    owner: PeerProfile
    rounds: ReplicaRounds
    on_event: Callable[[ReplicasEvent], None]
    _crews: Crews = field(default_factory=Crews)
    _running: dict[int, _Running] = field(default_factory=dict[int, _Running])
    _waiting: dict[int, str] = field(default_factory=dict[int, str])
    """Reason why each waiting replica has not started."""
    _results: dict[int, TrainingResult] = field(default_factory=dict[int, TrainingResult])
    _failed: dict[int, FusionError] = field(default_factory=dict[int, FusionError])
    _behind: dict[int, int] = field(default_factory=dict[int, int])
    """How often each replica was left behind by the others."""
    _stopped: str | None = None
    _over: bool = False
    """Whether no further replica may start."""
    _tried: frozenset[str] = frozenset()
    """Free machines for which no plan was found."""

    # ------------------------------------------------------------------------------------------------- the loop

    async def run(self, pasts: list[Past | None], stop: asyncio.Event) -> None:
        await self._begin(pasts)
        asked = asyncio.create_task(stop.wait())
        try:
            while self._running:
                tasks = {running.task for running in self._running.values()}
                awaited = tasks if self._over else {*tasks, asked}
                await asyncio.wait(awaited, timeout=LOOK_S, return_when=asyncio.FIRST_COMPLETED)
                if asked.done() and not self._over:
                    self._stop_all("Ctrl-C")
                for number in [number for number, one in self._running.items() if one.task.done()]:
                    self._note_end(number, self._running.pop(number))
                self._drop_those_in_vain()
                self._drop_those_behind()
                if not self._over:
                    await self._begin_waiting()
        finally:
            asked.cancel()
        if not self._results:
            waited = PlanError(f"no replica could begin: {'; '.join(self._waiting.values())}.")
            raise next(iter(self._failed.values()), waited)

    async def close(self) -> None:
        for running in self._running.values():
            running.task.cancel()
        await asyncio.gather(*(running.task for running in self._running.values()), return_exceptions=True)
        await self.rounds.outer.close()

    def result(self, directory: RunDirectory) -> ReplicasResult:
        done = [one for _, one in sorted(self._results.items()) if one.stopped is None]
        some = done or sorted(self._results.values(), key=lambda one: one.steps, reverse=True)
        return ReplicasResult(
            replicas=dict(sorted(self._results.items())),
            first_steps=self.rounds.first_steps,
            failed={number: error.message for number, error in sorted(self._failed.items())},
            stopped=None if done else self._stopped or "its replicas failed",
            checkpoint=some[0].checkpoint if some else None,
            directory=directory.root,
            rounds=self.rounds.rounds,
            exchanged_bytes=self.rounds.exchanged_bytes,
            every_step_bytes=self.rounds.every_step_bytes,
            line_bytes=self.rounds.line_bytes,
        )

    # --------------------------------------------------------------------------------------------------- beginning

    async def _begin(self, pasts: list[Past | None]) -> None:
        """Start the first replicas. Raises `PlanError` if a new job does not fit even as one replica."""
        for number, past in enumerate(pasts):
            if past is not None and self.rounds.is_lost(past):
                await in_background(partial(self.places.forget, number))
                pasts[number] = None
        finished = [n for n, past in enumerate(pasts) if past is not None and self._is_finished(past)]
        if finished:  # these only return their results and need no peers
            for number in finished:
                await self._start(number, pasts[number])
            return
        if not any(pasts):
            problem = problem_for(self.prepared, await self._all_free(), self.owner, self._note)
            groups = await in_background(lambda: self._divided(problem))
            for number, group in enumerate(groups):
                self._crews.give(number, group.peers)
            for number in range(len(groups)):
                await in_background(partial(self.places.begin, number, 0))
                await self._start(number, None)
        else:
            back = await in_background(lambda: self.places.go_back(self.rounds.exchanges, self.replicas.most))
            for number, step in sorted(back.items()):
                self._note(f"replica {number} goes back to step {step}: another one was saved before an exchange")
            for number, past in enumerate(pasts):
                if past is not None:
                    self._crews.give(number, past.peers)
                    await self._start(number, past)
        self._wait_for_more()

    def _divided(self, problem: Problem) -> tuple[Group, ...]:
        if self.replicas.count == "auto":
            table = self.replicas
            return fastest(problem, self.replicas.most, Exchanging(table.every, table.codec, table.overlap))
        return divide(problem, self.replicas.count)

    def _wait_for_more(self) -> None:
        """Let further replicas wait: one if the number is `auto`, otherwise all that are missing."""
        self._add_waiting()
        self._crews.someone_waits = bool(self._waiting)

    def _add_waiting(self) -> None:
        known = {*self._running, *self._waiting, *self._results, *self._failed}
        absent = [number for number in range(self.replicas.most) if number not in known]
        if self.replicas.count == "auto":
            if absent and not self._waiting:
                self._waiting[absent[0]] = "no machines are free for another replica"
            return
        there = self.replicas.count - len(absent)
        for number in absent:
            self._wait(number, f"the pool has machines for {there} of {self.replicas.count} replicas")

    async def _all_free(self) -> tuple[PoolMember, ...]:
        """Return the free members. Members that may be free in a moment are waited for, because an additional replica
        may depend on them."""
        members = await self.pool.pool()
        for attempt in range(WAITED_FOR):
            held = held_up(members)
            if not held:
                break
            if attempt == 0:
                self._note(f"waiting for {held}")
            await asyncio.sleep(PLAN_PAUSE_S)
            members = await self.pool.pool()
        free = tuple(one for one in members if stands_by(one))
        if not free:
            raise nobody(self.pool.membership.pool, members, self.pool.barred)
        return free

    def _is_finished(self, past: Past) -> bool:
        return past.has_checkpoint and past.first_step + past.steps >= self.recipe.job.steps

    async def _start(self, number: int, past: Past | None, first_step: int = 0) -> None:
        """Start a replica. `first_step` applies only to one without a past."""
        first_step = first_step if past is None else past.first_step
        recipe = self.places.recipe_of(number, first_step)
        directory = await in_background(lambda: open_directory(recipe))
        self.rounds.first_steps[number] = first_step
        self._crews.know(number, job_id(recipe, self.pool.membership.peer, directory))
        deal = Deal(number, self.replicas.most, first_step)
        part = ReplicaPart(
            number=number,
            prepared=dataclasses.replace(self.prepared, source=self.prepared.source.dealt(deal)),
            exchange=self.rounds.seat(number, first_step),
            kept_out=lambda members, in_need: self._crews.kept_out(number, members, in_need=in_need),
            first_step=first_step,
            total_steps=self.recipe.job.steps,
        )
        stop = asyncio.Event()
        seen = lambda event: self._seen(number, event)  # noqa: E731
        task = asyncio.create_task(train(recipe, self.options, on_event=seen, stop=stop, part=part))
        self._running[number] = _Running(part, stop, task, 0 if past is None else past.steps)

    def _wait(self, number: int, why: str) -> None:
        self._waiting[number] = why
        self._note(f"replica {number} waits for machines: {why}")

    async def _begin_waiting(self) -> None:
        """Start a waiting replica if the free machines suffice for it."""
        self._crews.someone_waits = bool(self._waiting) and self._steps_over() < self.recipe.job.steps
        if not self._waiting or any(running.planned_s is None for running in self._running.values()):
            return
        try:
            members = await self.pool.pool()
        except TransportError:
            return  # running replicas report it
        kept_out = excluded_peers(self.recipe, members)
        idle = tuple(one for one in members if stands_by(one) and one.view.peer not in kept_out)
        there = frozenset(one.view.peer for one in idle)
        number, first_step = min(self._waiting), self._steps_over()
        if not idle or there == self._tried or first_step >= self.recipe.job.steps:
            return
        self._tried = there
        made = await in_background(lambda: self._plan_among(idle))
        if made is None or not self._pays(made):
            self._crews.see(members, share_out=True)
            return
        past = await in_background(partial(self.places.past, number))
        if past is not None and (number in self._behind or self.rounds.is_lost(past)):
            await in_background(partial(self.places.forget, number))
            past = None
        if past is None:
            await in_background(partial(self.places.begin, number, first_step))
        del self._waiting[number]
        at = first_step if past is None else past.first_step + past.steps
        self._note(f"replica {number} starts" + (f" at step {at}" if at else ""))
        self._crews.give(number, [one.peer for one in (*made.stages, *made.standbys) if one.peer != made.feed])
        await self._start(number, past, first_step)
        self._wait_for_more()

    def _pays(self, made: Plan) -> bool:
        """Return whether another replica would make the job faster. With `auto`, one that is much slower than the
        others would only delay them."""
        steps_s = [one.planned_s for one in self._running.values() if one.planned_s is not None]
        if self.replicas.count != "auto" or not steps_s:
            return True
        return (len(steps_s) + 1) / max(*steps_s, made.step_time_s) > len(steps_s) / max(steps_s)

    def _plan_among(self, members: tuple[PoolMember, ...]) -> Plan | None:
        try:
            return planned(problem_for(self.prepared, members, self.owner, lambda _text: None))
        except PlanError:
            return None

    def _steps_over(self) -> int:
        """Return the steps of the job that a new replica can't take part in: the complete rounds of the replica that is
        farthest, and the present one, in which the new replica gets its state."""
        farthest = max((one.part.first_step + one.steps for one in self._running.values()), default=0)
        return self.rounds.exchanges.next_end(farthest) if farthest else 0

    # ------------------------------------------------------------------------------------------------------ events

    def _note(self, text: str) -> None:
        self.on_event(Noted(text))

    def _seen(self, number: int, event: RunEvent) -> None:
        running = self._running.get(number)
        match event:
            case progress.StepDone(record=record) if running is not None:
                running.steps = max(running.steps, record.step + 1)
            case Planned(plan=plan) if running is not None:
                running.planned_s = plan.step_time_s
            case _:
                pass
        self.on_event(InReplica(number, event))

    def _note_end(self, number: int, running: _Running) -> None:
        """Handle the end of a replica and its consequences for the others."""
        if self._stopped is None:  # after a stop, a round must not complete without the replica
            self.rounds.outer.leave(seat_name(number))
        self._crews.forget(number)
        try:
            result = running.task.result()
        except PlanError as error:  # tried again when other machines are free
            self._wait(number, error.message.rstrip("."))
        except FusionError as error:
            self._failed[number] = error
            self._tried = frozenset()
            self._note(f"warning: replica {number} failed, the others continue: {error.message}")
        else:
            if self._stopped is None and (reason := running.part.dropped) is not None:
                self._begin_anew(number, reason)
                return
            self._results[number] = result
            if result.stopped is None:
                self._end_those_behind()
            elif not self._over:
                self._stop_all(result.stopped)

    def _begin_anew(self, number: int, reason: str) -> None:
        """Let a replica that was left behind wait for its next beginning."""
        self._tried = frozenset()
        if self._behind[number] < MOST_BEHIND:
            self._wait(number, reason)
            return
        self._failed[number] = ExecutionError(f"it was left behind {MOST_BEHIND} times; the last time {reason}.")
        self._note(f"warning: replica {number} ends, the others continue: it was left behind {MOST_BEHIND} times")

    def _end_those_behind(self) -> None:
        """End the job after one replica has taken all its steps. Replicas of its last round are done too and only
        save."""
        self._over = True
        for number, running in self._running.items():
            left = self.recipe.job.steps - running.part.first_step - running.steps
            if left > 0:
                self._note(f"replica {number} is {left} steps behind and ends, because another replica is done")
                self._stop(running, "another replica is done")

    def _stop_all(self, reason: str) -> None:
        self._over, self._stopped = True, reason
        self.rounds.outer.hold()
        for running in self._running.values():
            self._stop(running, reason)

    def _drop_those_in_vain(self) -> None:
        """After a stop, cancel replicas that wait for a round with others that have already stopped, or that have not
        begun."""
        if self._stopped is None:
            return
        outer = self.rounds.outer
        in_vain = outer.waits_in_vain(seat_name(number) for number in self._running)
        for number, running in self._running.items():
            if in_vain or outer.is_joining(seat_name(number)):
                running.part.dropped = self._stopped
                running.task.cancel()

    def _drop_those_behind(self) -> None:
        """Cut off replicas that the others went on without. They begin again, from the others' state."""
        outer = self.rounds.outer
        for number, running in self._running.items():
            reason = outer.behind.get(seat_name(number))
            if reason is not None and running.part.dropped is None:
                self._behind[number] = self._behind.get(number, 0) + 1
                self._note(f"warning: replica {number} is left behind: {reason}")
                running.part.dropped = reason
                running.task.cancel()

    def _stop(self, running: _Running, reason: str) -> None:
        if running.part.driver is not None:
            running.part.driver.stop(reason)
        running.stop.set()
