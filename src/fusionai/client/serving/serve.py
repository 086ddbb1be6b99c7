"""Serves a model from the pool: the job owner's side of `fusion serve`.

`async with serving(request, on_event=...) as served:` connects to the pool (or starts one on this machine), captures
the model, hashes the weights, plans, has the broker adopt the plan, loads and probes. Then `served.engine` takes
generations until the block ends. At the end, everything that was started is stopped.

`ServingWatch` checks the pool meanwhile, like `client.pool.watch` for training, except that the engine is notified of a
leaving machine: it first moves sessions to the stage's warm standby and then requests a plan without the machine.
Machines that are back or new take stages while no session runs; `scheduling.standby.continuation` decides when another
cut is worth it. `client.serving.model` opens the model, `serving.engine` serves, `cli.serving.serve` adds the gateway.
"""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Final, TypeVar

import msgspec

from fusionai.capture.models.eagle import EagleFiles
from fusionai.client.pool.beginning import first_deployment, nobody
from fusionai.client.pool.job_process import Met, Noted, OwnerProcess, OwnMachine, beside, own_machine, owner_profile
from fusionai.client.pool.local_pool import REMEMBERED, LocalPool, local_threads, own_memory_bytes, serving_pool
from fusionai.client.pool.replanning import MachineHistory, PoolReplanner
from fusionai.client.pool.reporting import ServedNote, end_leftovers, report_state, report_tokens
from fusionai.client.pool.session import PoolMember, PoolSession, near_links, owner_membership
from fusionai.client.pool.watch import PoolWatch, watch_trust
from fusionai.client.serving.adapters import RunningAdapters
from fusionai.client.serving.encoders import close_encoders, encoder_notes
from fusionai.client.serving.guessing import (
    DraftModel,
    Guesser,
    HeadModel,
    find_draft,
    guesser_sentence,
    load_guesser,
    open_draft,
    open_head,
)
from fusionai.client.serving.job import ServeRequest, kept_blocks, serving_job
from fusionai.client.serving.model import (
    ServedFiles,
    ServedModel,
    find_adapters,
    find_model,
    hash_weights,
    job_name,
    open_model,
    rounding_words,
)
from fusionai.client.serving.planning import (
    can_stay_packed,
    checking_sentence,
    equalised,
    serving_problem,
    text_needs,
    whole_needs,
)
from fusionai.execution.connections import Deployment
from fusionai.ir.cost import balance_tokens
from fusionai.ir.serving import SEQUENCE
from fusionai.primitives.errors import GraphError, ModelError, UsageError
from fusionai.primitives.ids import JobId, PeerId
from fusionai.primitives.privacy import PrivacyLevel
from fusionai.primitives.process import in_background, set_aside_what_stays
from fusionai.scheduling.planner import plan as planned
from fusionai.scheduling.problem.types import PeerProfile, Plan, Problem, ServingNeeds
from fusionai.scheduling.standby.continuation import Regrowth, regrown
from fusionai.scheduling.standby.takeover import WaitingForMachines, reinforced, with_profiles
from fusionai.serving import job as progress
from fusionai.serving.engine import ServingEngine
from fusionai.serving.job import ServingJob
from fusionai.storage.weight_manifest import ModelWeights
from fusionai.storage.weight_store import WeightStore
from fusionai.wire.serving import StateOutput

T = TypeVar("T")

GRACE_S: Final = 10.0
"""Time to wait for a machine for a lost stage before the model is cut anew over the remaining machines, in seconds
(chosen). A new cut loads weights again, so a machine that returns at once is worth waiting for."""


@dataclass(frozen=True, slots=True)
class ServePlanned:
    """The first plan, with the names of the machines."""

    job: JobId
    plan: Plan
    names: dict[str, str]
    model: ServedModel


@dataclass(frozen=True, slots=True)
class Hashed:
    """Progress of hashing the weights."""

    done_bytes: int
    total_bytes: int


ServeEvent = Noted | ServePlanned | Met | Hashed | progress.Progress


@dataclass(frozen=True, slots=True, kw_only=True)
class Served:
    """A served model, ready for generations. `ended` is done when the engine has ended, with its error if it had one.
    `stopped` is set when the broker was asked to stop the job."""

    job: JobId
    model: ServedModel
    needs: ServingNeeds
    privacy: PrivacyLevel
    engine: ServingEngine
    names: dict[str, str]
    ended: asyncio.Future[None]
    stopped: asyncio.Event
    adapters: RunningAdapters | None
    """Loads and unloads adapters; None if the request has no room for any."""
    pool: LocalPool | None
    chunk_tokens: int
    """Tokens per piece in which prompts are processed."""
    problem: Callable[[], Problem]
    """Returns the planning problem, with all peers that have been in the pool so far."""


class ServingReplanner(PoolReplanner):
    def _replaced(self, plan: Plan, lost: frozenset[str], members: tuple[PoolMember, ...]) -> Plan | WaitingForMachines:
        found = super()._replaced(plan, lost, members)
        returned = self._returned(lost, members)
        if isinstance(found, WaitingForMachines) or not returned:
            return found
        return reinforced(found, self.problem, returned) or found


Priced = Callable[[tuple[PeerProfile, ...]], tuple[PeerProfile, ...]]
"""Profiles as plans should see them."""


@dataclass(kw_only=True)
class ServingWatch(PoolWatch[ServingEngine]):
    """Checks the pool for a serving job. `run` lasts until cancelled."""

    priced: Priced
    _announced: frozenset[str] = frozenset()
    _regrowth: Regrowth = field(default_factory=Regrowth)
    _served: tuple[int, int] = (0, 0)
    """Tokens emitted and read at the last look."""

    def _handed_over(self, members: tuple[PoolMember, ...]) -> tuple[Plan, str] | None:
        plan = self.driver.deployment.plan
        parts = {stage.peer for stage in plan.stages} | {standby.peer for standby in plan.standbys}
        leaving = {one.view.peer for one in members if one.view.state == "draining"} & parts
        for peer in sorted(leaving - self._announced):
            self.driver.leaving(peer)
        self._announced = frozenset(leaving)
        return None

    async def _widened(self, members: tuple[PoolMember, ...]) -> tuple[Plan, str] | None:
        """Another plan over all that are there, where it is faster and no session runs."""
        there = self._there(members)
        idle, names = self._is_idle(), frozenset(one.view.peer for one in there)
        now_s = self.clock.now_s()
        self._regrowth = self._regrowth.seen(now_s, idle=idle, there=names)
        if not self._regrowth.is_due(now_s) or self._announced:
            return None
        plan = self._plan()
        profiles = self.priced(tuple(one.profile for one in there))
        problem = msgspec.structs.replace(self.replanner.problem, links=near_links(there))
        seen = (plan.stages, profiles, problem.links)
        if self._widest == seen:
            return None
        self._widest = seen
        found = await in_background(partial(regrown, plan, problem, profiles))
        if found is None or not self._is_idle():
            return None
        self._regrowth = self._regrowth.moved(self.clock.now_s())
        what = found.words(with_profiles(problem, profiles)) if found.recut else "stages move to faster machines"
        return found.plan, f"no session runs: {what}"

    def _is_idle(self) -> bool:
        """Whether the job is ready, no session runs or waits, and none has since this was last asked."""
        status = self.driver.status
        before, self._served = self._served, (status.emitted_tokens, status.prompt_tokens)
        return status.state == "ready" and not status.running and not status.queued and before == self._served


@asynccontextmanager
async def serving(request: ServeRequest, *, on_event: Callable[[ServeEvent], None]) -> AsyncIterator[Served]:
    """Serve the model during the block and yield it once it is ready. Raises `ModelError`, `GraphError`, `PlanError`,
    `TransportError`, `RefusedError`, `StorageError`, `ExecutionError`, `UsageError`."""
    async with AsyncExitStack() as stack:
        yield await _Start(request, on_event, stack).run()


@dataclass(frozen=True, slots=True, kw_only=True)
class _Loaded:
    """What this machine contributes: the model with its weights, and the backend."""

    model: ServedModel
    weights: ModelWeights
    machine: OwnMachine
    guesser: Guesser | None
    """What guesses tokens; None: repetitions in the text, or nothing does."""


class _Start:
    """Starts a served job. `stack` ends everything that was started."""

    def __init__(self, request: ServeRequest, on_event: Callable[[ServeEvent], None], stack: AsyncExitStack) -> None:
        self._request = request
        self._on_event = on_event
        self._stack = stack
        self._local: LocalPool | None = None
        self._priced: Priced = (lambda profiles: profiles) if request.local is None else equalised

    async def run(self) -> Served:
        request = self._request
        # Names are checked before anything starts.
        files = await in_background(lambda: find_model(request.model))
        adapters = await in_background(lambda: find_adapters(request.adapters))
        if any(adapter.name == files.name for adapter in adapters):
            raise UsageError(
                f"an adapter has the same name as the model, {files.name!r}.", hint="Give it another name."
            )
        room = request.adapter_room
        ranks = () if room is None else room.ranks
        draft = None if request.draft is None else await in_background(lambda name=request.draft: find_draft(name))
        head = draft if isinstance(draft, EagleFiles) else None
        self._on_event(Noted(f"capturing {files.name}"))
        # The model is opened while processes start and the pool is contacted.
        opening = _task(self._stack, in_background(lambda: open_model(files, adapters, ranks, head=head)))
        hashing = _task(self._stack, self._hashed(opening))
        process, home = await self._connect()
        members = await process.pool.pool()
        if not members:
            raise nobody(process.pool.membership.pool, members, process.trust.barred)
        loaded = await self._load(opening, hashing, draft)
        needs = self._needs(loaded.model, members)
        replanner = self._replanner(process, loaded, needs, members)
        process.note("planning")
        self._stack.push_async_callback(_ended, process.pool, replanner.job, ServedNote(home, replanner.job))
        deployment = await self._begin(process, replanner)
        self._on_event(ServePlanned(replanner.job, deployment.plan, dict(process.known.names), loaded.model))
        process.note_trust(deployment.plan)
        return await self._serve(process, loaded, needs, replanner, deployment)

    async def _connect(self) -> tuple[OwnerProcess, Path]:
        """Connect to the pool, after starting it with `--local`, and end the jobs of killed servers. Also returns the
        job owner's home, which with `--local` is in the pool's directory."""
        request, note = self._request, lambda text: self._on_event(Noted(text))
        home, invitation = request.home, request.invitation
        if request.local is not None:
            spares = request.local_spares
            note(f"starting a pool of {request.local} peers and {spares} spares on this machine")
            starting = serving_pool(request.home, request.local, spares, say=note)
            self._local = await self._stack.enter_async_context(starting)
            home, invitation = self._local.directory / "owner", self._local.invitation
        membership = await owner_membership(home, invitation)
        confidential = request.confidential
        process = OwnerProcess(request.home, membership, request.privacy, self._on_event, confidential=confidential)
        if self._local is not None:
            process.trust.own = frozenset(PeerId(peer) for peer in self._local.names)
        await self._stack.enter_async_context(process.pool)
        for left in await end_leftovers(process.pool, home):
            note(f"the server of {left} was killed; its peers are free again")
        return process, home

    async def _load(
        self,
        opening: asyncio.Task[ServedModel],
        hashing: asyncio.Task[ModelWeights],
        draft: ServedFiles | EagleFiles | None,
    ) -> _Loaded:
        request, stack = self._request, self._stack
        # Capturing patches the framework and modules like `math` for all threads. Imports and computations in this
        # process must therefore come after it.
        model = await opening
        for text in (*(adapter.words for adapter in model.adapters), *model.captured.notes):
            self._on_event(Noted(text))
        stack.callback(close_encoders, model.texts)
        for text in encoder_notes(model.files.name, model.texts):
            self._on_event(Noted(text))
        threads = request.threads or (None if request.local is None else local_threads(request.local))
        machine = await stack.enter_async_context(
            own_machine(request.device, threads, request.home, lambda text: self._on_event(Noted(text)))
        )
        weights = await hashing
        stack.callback(weights.close)
        form = request.needs(model.positions, False).weights
        if (words := await in_background(lambda: rounding_words(model, form))) is not None:
            self._on_event(Noted(words))
        guesser = None if request.speculate == "off" else await self._guesser(model, weights, draft)
        if guesser is not None:
            self._on_event(Noted(guesser_sentence(guesser)))
        await in_background(set_aside_what_stays)  # capturing allocates many objects that stay
        return _Loaded(model=model, weights=weights, machine=machine, guesser=guesser)

    async def _guesser(
        self, model: ServedModel, weights: ModelWeights, draft: ServedFiles | EagleFiles | None
    ) -> Guesser | None:
        """Open what guesses: the draft model or head, if one is named, else the head in the model's own files."""
        note = lambda text: self._on_event(Noted(text))  # noqa: E731
        if model.states:
            note(f"{model.files.name} carries states, which can't drop a rejected guess: nothing is guessed")
            return None
        if isinstance(draft, ServedFiles):
            note(f"capturing the draft model {draft.name}")
            opened = _task(self._stack, in_background(lambda: open_draft(draft, model)))
            small = DraftModel(await opened, await self._hashed(opened))
            self._stack.callback(small.weights.close)
            return small
        try:
            head = await in_background(lambda: open_head(draft, model))
        except (ModelError, GraphError) as error:
            if draft is not None:
                raise
            note(f"{model.files.name} guesses without its own head: {error.message}")
            return None
        return None if head is None else HeadModel(head, model, weights)

    async def _hashed(self, opening: asyncio.Task[ServedModel]) -> ModelWeights:
        """Hash the model's weights and return their manifest, which the caller must close."""
        model, home = await asyncio.shield(opening), self._request.home
        store, memory = WeightStore(home / "weights"), home / REMEMBERED
        progress_of = lambda done, total: self._on_event(Hashed(done, total))  # noqa: E731
        return await in_background(lambda: hash_weights(model, store, memory, progress_of))

    def _needs(self, model: ServedModel, members: Sequence[PoolMember]) -> ServingNeeds:
        profiles = [member.profile for member in members]
        can_keep = not (model.whole or model.at_once) and can_stay_packed(model.graph, profiles)
        needs = self._request.needs(model.positions, can_keep)
        if model.at_once:
            return text_needs(needs, model.graph)
        if model.whole:
            needs = whole_needs(needs, model.files.name)
            why = f"{model.files.name} can't use caches: the whole text is recomputed for every token"
            self._on_event(Noted(why))
        longest = model.graph.symbols.get(SEQUENCE, (1, needs.pass_tokens))[1]
        return msgspec.structs.replace(needs, pass_tokens=min(needs.pass_tokens, longest))

    def _replanner(
        self, process: OwnerProcess, loaded: _Loaded, needs: ServingNeeds, members: tuple[PoolMember, ...]
    ) -> ServingReplanner:
        request, model, memory_bytes = self._request, loaded.model, loaded.machine.report.memory_bytes
        if request.local is not None:
            memory_bytes = own_memory_bytes(request.local + request.local_spares)
        if loaded.guesser is not None:
            memory_bytes = max(0, memory_bytes - loaded.guesser.weight_bytes)
        owner = owner_profile(process.peer, loaded.machine.report, memory_bytes)
        process.known.names[owner.peer] = owner.name
        return ServingReplanner(
            pool=process.pool,
            job=JobId(f"{job_name(model.files.name)}-{secrets.token_hex(4)}"),
            title=f"serve {model.files.name}",
            steps=0,
            problem=serving_problem(
                model.graph,
                [member.profile for member in members],
                owner,
                needs,
                ends=request.ends,
                stages=request.local or request.stages,
                spares=request.spares,
                kept=kept_blocks(request, model),
            ),
            policy="tolerant",
            grace_s=GRACE_S,
            excluded=lambda _members: frozenset(),
            barred=lambda: process.trust.barred,
            machines=MachineHistory(process.clock, process.note),
        )

    async def _begin(self, process: OwnerProcess, replanner: ServingReplanner) -> Deployment:
        async def plan_with(usable: tuple[PoolMember, ...]) -> Plan:
            peers = self._priced(tuple(member.profile for member in usable))
            links = near_links(usable) if self._local is None else {}
            problem = msgspec.structs.replace(replanner.problem, peers=peers, links=links)
            return await in_background(lambda: planned(problem))

        pool_name = process.pool.membership.pool
        deployment = await first_deployment(replanner, plan_with, pool_name=pool_name, note=process.note)
        needs, sizes = replanner.problem.serving, deployment.plan.serving
        assert needs is not None
        assert sizes is not None
        # Later plans must have room for the contexts that clients were promised.
        fixed = msgspec.structs.replace(needs, context_tokens=sizes.context_tokens, longest_tokens=0)
        replanner.problem = msgspec.structs.replace(replanner.problem, serving=fixed)
        return deployment

    async def _serve(
        self,
        process: OwnerProcess,
        loaded: _Loaded,
        needs: ServingNeeds,
        replanner: ServingReplanner,
        deployment: Deployment,
    ) -> Served:
        """Load and probe. Returns when the job is ready."""
        request, pool, job, model = self._request, process.pool, replanner.job, loaded.model
        engine, served_job = await self._engine(process, loaded, replanner, deployment)
        if (checked := checking_sentence(deployment.plan, engine.checkable, spot=request.checks)) is not None:
            process.note(checked)
        await report_state(pool, job, "running", "loading")
        running = asyncio.ensure_future(engine.run())
        self._stack.push_async_callback(_end, engine, running)
        await _ready_or_failed(engine, running)
        watch = ServingWatch(replanner, engine, process.peer, process.clock, priced=self._priced)
        reports = report_tokens(pool, job, lambda: (engine.status.state, engine.status.emitted_tokens))
        self._stack.enter_context(beside(watch.run(), watch_trust(process.trust, engine), reports))
        room = request.adapter_room
        return Served(
            job=job,
            model=model,
            needs=needs,
            privacy=request.privacy,
            engine=engine,
            names=process.known.names,
            ended=running,
            stopped=process.stopped,
            adapters=None if room is None else RunningAdapters(room.directory, model, loaded.weights, engine),
            pool=self._local,
            chunk_tokens=min(served_job.chunk_tokens, served_job.options.pass_tokens),
            problem=lambda: msgspec.structs.replace(
                replanner.problem, peers=self._priced(tuple(process.known.profiles.values()))
            ),
        )

    async def _engine(
        self, process: OwnerProcess, loaded: _Loaded, replanner: ServingReplanner, deployment: Deployment
    ) -> tuple[ServingEngine, ServingJob]:
        model, profiles = loaded.model, process.known.profiles.values()
        # Other backends compute all rows of a piece in one product, whose bits depend on the number of rows.
        tiled = not (model.whole or model.at_once) and all(profile.backend == "torch" for profile in profiles)
        job = serving_job(
            *(model, replanner.job, process.peer, deployment.plan, loaded.weights, self._request),
            tiled=tiled,
            balanced_at=balance_tokens(model.graph),
            states=_states_read(loaded.guesser),
        )
        proposer = None
        if loaded.guesser is not None:
            backend = loaded.machine.backend
            proposer = await load_guesser(loaded.guesser, backend, job.options, job.vocabulary, self._stack)
        engine = ServingEngine(
            *(job, process.host(loaded.machine), deployment),
            replanner=replanner,
            names=process.known.names,
            incarnation=1,
            on_progress=self._on_event,
            proposer=proposer,
        )
        return engine, job


def _states_read(guesser: Guesser | None) -> tuple[StateOutput, int]:
    return (guesser.head.reads, guesser.state_size) if isinstance(guesser, HeadModel) else ("hidden", 0)


def _task(stack: AsyncExitStack, work: Coroutine[object, object, T]) -> asyncio.Task[T]:
    """Start a task to be awaited later. It is cancelled with `stack` at the latest."""
    task = asyncio.create_task(work)
    task.add_done_callback(lambda done: done.cancelled() or done.exception())  # its awaiter gets the exception
    stack.callback(task.cancel)
    return task


async def _ready_or_failed(engine: ServingEngine, running: asyncio.Future[None]) -> None:
    """Wait until the engine is ready. Raises its error if it ends before."""
    waiting = asyncio.ensure_future(engine.ready())
    try:
        await asyncio.wait({waiting, running}, return_when=asyncio.FIRST_COMPLETED)
        if running.done():
            running.result()
        await waiting
    finally:
        waiting.cancel()
        await asyncio.wait({waiting})


async def _end(engine: ServingEngine, running: asyncio.Future[None]) -> None:
    engine.stop("the server is stopping")
    await asyncio.wait({running})
    await engine.close("done")
    if not running.cancelled() and (problem := running.exception()) is not None:
        raise problem


async def _ended(pool: PoolSession, job: JobId, note: ServedNote) -> None:
    note.close(reported=await report_state(pool, job, "done", "the server has ended"))
