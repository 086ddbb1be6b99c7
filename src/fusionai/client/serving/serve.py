"""Serves a model from the pool: the job owner's side of `fusion serve`.

`async with serving(request, on_event=...) as served:` connects to the pool (or starts one on this machine), captures
the model, hashes the weights, plans, has the broker adopt the plan, loads and probes. Then `served.engine` takes
generations until the block ends. At the end, everything that was started is stopped.

`client.serving.pipelines` opens the first pipeline and further ones, `client.serving.model` opens the model,
`serving.pipelines` serves, `cli.serving.serve` adds the gateway.
"""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Final, TypeVar

import msgspec

from fusionai.capture.models.eagle import EagleFiles
from fusionai.capture.models.source import stated_positions
from fusionai.client.pool.beginning import Waiting, first_deployment, nobody
from fusionai.client.pool.job_process import Met, Noted, OwnerProcess, own_machine, owner_profile
from fusionai.client.pool.local_pool import REMEMBERED, LocalPool, local_threads, own_memory_bytes, serving_pool
from fusionai.client.pool.replanning import MachineHistory
from fusionai.client.pool.reporting import end_leftovers
from fusionai.client.pool.session import PoolMember, near_links, owner_membership
from fusionai.client.serving.adapters import RunningAdapters
from fusionai.client.serving.guessing import (
    DraftModel,
    Guesser,
    HeadModel,
    find_draft,
    guesser_sentence,
    open_draft,
    open_head,
)
from fusionai.client.serving.job import ServeRequest, kept_blocks
from fusionai.client.serving.model import (
    ServedFiles,
    ServedModel,
    close_encoders,
    encoder_notes,
    find_adapters,
    find_model,
    hash_weights,
    job_name,
    open_model,
    rounding_words,
)
from fusionai.client.serving.pipelines import (
    LoadedModel,
    OpenPipeline,
    PipelineNews,
    PipelineOpened,
    Pipelines,
    without_standbys,
)
from fusionai.client.serving.planning import can_stay_packed, equalised, serving_problem, text_needs, whole_needs
from fusionai.client.serving.watch import Priced, ServingReplanner
from fusionai.execution.connections import Deployment
from fusionai.ir.serving import SEQUENCE
from fusionai.primitives.errors import GraphError, ModelError, UsageError
from fusionai.primitives.ids import JobId, PeerId
from fusionai.primitives.privacy import PrivacyLevel
from fusionai.primitives.process import in_background, set_aside_what_stays
from fusionai.scheduling.planner import plan as planned
from fusionai.scheduling.problem.types import Plan, Problem, ServingNeeds
from fusionai.scheduling.serving.parallel import throughput_plan
from fusionai.serving import job as progress
from fusionai.serving.pipelines import PipelinedEngine
from fusionai.serving.text import read_json
from fusionai.storage.weight_manifest import ModelWeights
from fusionai.storage.weight_store import WeightStore

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


ServeEvent = Noted | ServePlanned | Met | Hashed | PipelineNews | PipelineOpened | progress.Progress


@dataclass(frozen=True, slots=True, kw_only=True)
class Served:
    """A served model, ready for generations. `job`: of the first pipeline. `ended` is done when no pipeline is left,
    with the error of the last one if it had one. `stopped` is set when the broker asks a job of the model to
    stop, because of what `stop_reason` returns."""

    job: JobId
    model: ServedModel
    needs: ServingNeeds
    privacy: PrivacyLevel
    engine: PipelinedEngine
    names: dict[str, str]
    ended: asyncio.Future[None]
    stopped: asyncio.Event
    stop_reason: Callable[[], str]
    adapters: RunningAdapters | None
    """Loads and unloads adapters; None if the request has no room for any."""
    pool: LocalPool | None
    chunk_tokens: int
    """Tokens per piece in which prompts are processed."""
    problem: Callable[[], Problem]
    """Returns the planning problem, with all peers that have been in the pool so far."""


@asynccontextmanager
async def serving(request: ServeRequest, *, on_event: Callable[[ServeEvent], None]) -> AsyncIterator[Served]:
    """Serve the model during the block and yield it once it is ready. Raises `ModelError`, `GraphError`, `PlanError`,
    `TransportError`, `RefusedError`, `StorageError`, `ExecutionError`, `UsageError`."""
    async with AsyncExitStack() as stack:
        yield await _Start(request, on_event, stack).run()


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
        # Names and the context are checked before anything starts.
        files = await in_background(lambda: find_model(request.model))
        config = await in_background(lambda: read_json(files.directory / "config.json"))
        if not config.get("is_encoder_decoder"):  # the rows of an encoder count as well, which only capturing shows
            request.needs(stated_positions(config), False)
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
        # Raised before the model is loaded, which takes seconds. Members that only clear another job's data are
        # waited for.
        if all(member.view.job for member in members) and not request.wait:
            raise nobody(process.pool.membership.pool, members, process.trust.barred)
        loaded = await self._load(opening, hashing, draft)
        needs = self._needs(loaded.model, members)
        replanner = self._replanner(process, loaded, needs, members)
        process.note("planning")
        pipelines = Pipelines(
            request=request,
            process=process,
            loaded=loaded,
            home=home,
            priced=self._priced,
            on_event=self._on_event,
            stack=self._stack,
        )
        stack = await self._stack.enter_async_context(AsyncExitStack())
        pipelines.announce(replanner.job, stack)
        deployment = await self._begin(process, replanner)
        self._on_event(ServePlanned(replanner.job, deployment.plan, dict(process.known.names), loaded.model))
        process.note_trust(deployment.plan)
        first = await pipelines.open_first(replanner, deployment, stack)
        return self._served(process, loaded, needs, pipelines, first)

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
    ) -> LoadedModel:
        request, stack = self._request, self._stack
        # Capturing patches the framework and modules like `math` for all threads. Imports and computations in this
        # process must therefore come after it.
        model = await opening
        form = request.needs(model.positions, False).weights
        for text in (*(adapter.words for adapter in model.adapters), *model.captured.notes):
            self._on_event(Noted(text))
        stack.callback(close_encoders, model.texts)
        for text in encoder_notes(model.files.name, model.texts):
            self._on_event(Noted(text))
        threads = request.threads or (None if request.local is None else local_threads(request.local))
        machine = await stack.enter_async_context(
            own_machine(
                request.device,
                threads,
                request.home,
                lambda text: self._on_event(Noted(text)),
                shared=None if self._local is None else self._local.directory,
            )
        )
        weights = await hashing
        stack.callback(weights.close)
        if (words := await in_background(lambda: rounding_words(model, form))) is not None:
            self._on_event(Noted(words))
        guesser = None if request.speculate == "off" else await self._guesser(model, weights, draft)
        if guesser is not None:
            self._on_event(Noted(guesser_sentence(guesser)))
        await in_background(set_aside_what_stays)  # capturing allocates many objects that stay
        return LoadedModel(model=model, weights=weights, machine=machine, guesser=guesser)

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
        self, process: OwnerProcess, loaded: LoadedModel, needs: ServingNeeds, members: tuple[PoolMember, ...]
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
                stages=request.stages if request.local is None or request.goal != "latency" else request.local,
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
            if self._request.goal == "throughput":
                return without_standbys(await in_background(lambda: throughput_plan(problem)))
            return await in_background(lambda: planned(problem))

        pool_name = process.pool.membership.pool
        waiting = Waiting(self._request.priority, process.stopped) if self._request.wait else None
        deployment = await first_deployment(
            replanner, plan_with, pool_name=pool_name, note=process.note, waiting=waiting
        )
        needs, sizes = replanner.problem.serving, deployment.plan.serving
        assert needs is not None
        assert sizes is not None
        # Later plans must have room for the contexts that clients were promised.
        fixed = msgspec.structs.replace(needs, context_tokens=sizes.context_tokens, longest_tokens=0)
        replanner.problem = msgspec.structs.replace(replanner.problem, serving=fixed)
        return deployment

    def _served(
        self,
        process: OwnerProcess,
        loaded: LoadedModel,
        needs: ServingNeeds,
        pipelines: Pipelines,
        first: OpenPipeline,
    ) -> Served:
        request, model, engine = self._request, loaded.model, pipelines.engine
        room = request.adapter_room
        return Served(
            job=first.replanner.job,
            model=model,
            needs=needs,
            privacy=request.privacy,
            engine=engine,
            names=process.known.names,
            ended=engine.ended,
            stopped=process.stopped,
            stop_reason=lambda: process.stop_reason,
            adapters=None if room is None else RunningAdapters(room.directory, model, loaded.weights, engine),
            pool=self._local,
            chunk_tokens=min(first.job.chunk_tokens, first.job.options.pass_tokens),
            problem=lambda: msgspec.structs.replace(
                first.replanner.problem, peers=self._priced(tuple(process.known.profiles.values()))
            ),
        )


def _task(stack: AsyncExitStack, work: Coroutine[object, object, T]) -> asyncio.Task[T]:
    """Start a task to be awaited later. It is cancelled with `stack` at the latest."""
    task = asyncio.create_task(work)
    task.add_done_callback(lambda done: done.cancelled() or done.exception())  # its awaiter gets the exception
    stack.callback(task.cancel)
    return task
