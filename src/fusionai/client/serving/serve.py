"""Serves a model from the pool: the job owner's side of `fusion serve`.

`async with serving(request, on_event=...) as served:` connects to the pool (or starts one on this machine), captures
the model, hashes the weights, plans, has the broker adopt the plan, loads and probes. Then `served.engine` takes
generations until the block ends. At the end, everything that was started is stopped.

`client.serving.model` opens the model, `serving.engine` serves, `client.serving.watch` looks for better plans,
`cli.serving.serve` adds the gateway.
"""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Final, TypeVar

import msgspec

from fusionai.backends.interface import DeviceReport
from fusionai.client.pool.background import in_background
from fusionai.client.pool.beginning import first_deployment, nobody
from fusionai.client.pool.job_process import KnownMembers, Met, Noted, OwnMachine, beside, own_machine
from fusionai.client.pool.job_trust import JobTrust, job_trust, watch_trust
from fusionai.client.pool.local_pool import LocalPool
from fusionai.client.pool.replanning import PoolReplanner
from fusionai.client.pool.reporting import ServedNote, end_leftovers, report_state, report_tokens
from fusionai.client.pool.session import PoolMember, PoolSession, near_links, owner_membership
from fusionai.client.serving.job import ServeRequest, kept_blocks, serving_job, whole_needs
from fusionai.client.serving.local import equalised, local_pool, local_threads, own_memory_bytes
from fusionai.client.serving.model import (
    DraftModel,
    ServedFiles,
    ServedModel,
    draft_proposer,
    find_adapters,
    find_model,
    hash_weights,
    job_name,
    open_draft,
    open_model,
)
from fusionai.client.serving.planning import checking_sentence, serving_problem
from fusionai.client.serving.watch import ServingReplanner, ServingWatch
from fusionai.execution.connections import Deployment
from fusionai.ir.cost import balance_tokens
from fusionai.ir.serving import SEQUENCE
from fusionai.primitives.clock import SystemClock
from fusionai.primitives.errors import UsageError
from fusionai.primitives.ids import JobId, PeerId
from fusionai.primitives.privacy import PrivacyLevel
from fusionai.primitives.process import set_aside_what_stays
from fusionai.scheduling.planner import plan as planned
from fusionai.scheduling.problem.types import PeerProfile, Plan, Problem, ServingNeeds
from fusionai.serving import job as progress
from fusionai.serving.engine import ServingEngine
from fusionai.serving.job import ServingJob
from fusionai.storage.weight_manifest import ModelWeights
from fusionai.storage.weight_store import WeightStore

T = TypeVar("T")

GRACE_S: Final = 10.0
"""Time to wait for a machine for a lost stage before the model is cut anew over the remaining machines, in seconds
(chosen). A new cut loads weights again, so a machine that returns at once is worth waiting for."""
REMEMBERED: Final = "weights.json"
"""File with the hashes of model files, in this machine's home."""


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


@dataclass(frozen=True, slots=True, kw_only=True)
class _Connection:
    """The session with the pool. `home`: of the job owner; with `--local` in the pool's directory."""

    pool: PoolSession
    trust: JobTrust
    home: Path
    local: LocalPool | None


@dataclass(frozen=True, slots=True, kw_only=True)
class _Loaded:
    """What this machine contributes: the model with its weights, and the backend."""

    model: ServedModel
    weights: ModelWeights
    machine: OwnMachine
    draft: DraftModel | None


class _Start:
    """Starts a served job. `stack` ends everything that was started."""

    def __init__(self, request: ServeRequest, on_event: Callable[[ServeEvent], None], stack: AsyncExitStack) -> None:
        self._request = request
        self._on_event = on_event
        self._stack = stack
        self._clock = SystemClock()
        self._stopped = asyncio.Event()
        self._known = KnownMembers(on_event)

    def _note(self, text: str) -> None:
        self._on_event(Noted(text))

    async def run(self) -> Served:
        request = self._request
        # Names are checked before anything starts.
        files = await in_background(lambda: find_model(request.model))
        adapters = await in_background(lambda: find_adapters(request.adapters))
        if any(adapter.name == files.name for adapter in adapters):
            raise UsageError(
                f"an adapter has the same name as the model, {files.name!r}.", hint="Give it another name."
            )
        small = None if request.draft is None else await in_background(lambda name=request.draft: find_model(name))
        self._note(f"capturing {files.name}")
        # The model is opened while processes start and the pool is contacted.
        opening = _task(self._stack, in_background(lambda: open_model(files, adapters)))
        hashing = _task(self._stack, _hashed(opening, request, self._on_event))
        connection = await self._connect()
        members = await connection.pool.pool()
        if not members:
            raise nobody(connection.pool.membership.pool, members, connection.trust.barred)
        loaded = await self._load(opening, hashing, small)
        needs = self._needs(loaded.model)
        replanner = self._replanner(connection, loaded, needs, members)
        self._note("planning")
        self._stack.push_async_callback(
            _ended, connection.pool, replanner.job, ServedNote(connection.home, replanner.job)
        )
        deployment = await _begin(
            replanner, connection.pool.membership.pool, self._on_event, is_local=request.local is not None
        )
        self._on_event(ServePlanned(replanner.job, deployment.plan, dict(self._known.names), loaded.model))
        if (sentence := connection.trust.sentence(deployment.plan)) is not None:
            self._note(sentence)
        return await self._serve(connection, loaded, needs, replanner, deployment)

    async def _connect(self) -> _Connection:
        """Connect to the pool, after starting it with `--local`, and end the jobs of killed servers."""
        request, local = self._request, None
        home, invitation = request.home, request.invitation
        if request.local is not None:
            spares = request.local_spares
            self._note(f"starting a pool of {request.local} peers and {spares} spares on this machine")
            starting = local_pool(request.home, request.local, spares, hashes=request.home / REMEMBERED, say=self._note)
            local = await self._stack.enter_async_context(starting)
            home, invitation = local.directory / "owner", local.invitation
        membership = await owner_membership(home, invitation)
        trust = job_trust(request.home, membership, request.privacy, confidential=request.confidential)
        if local is not None:
            trust.own = frozenset(PeerId(peer) for peer in local.names)
        session = PoolSession(
            membership, trust=trust, on_stop=lambda _job: self._stopped.set(), on_members=self._known.see
        )
        pool = await self._stack.enter_async_context(session)
        for left in await end_leftovers(pool, home):
            self._note(f"the server of {left} was killed; its peers are free again")
        return _Connection(pool=pool, trust=trust, home=home, local=local)

    async def _load(
        self, opening: asyncio.Task[ServedModel], hashing: asyncio.Task[ModelWeights], small: ServedFiles | None
    ) -> _Loaded:
        request, stack = self._request, self._stack
        # Capturing patches the framework and modules like `math` for all threads. Imports and computations in this
        # process must therefore come after it.
        model = await opening
        for text in (*(adapter.words for adapter in model.adapters), *model.captured.notes):
            self._note(text)
        threads = request.threads or (None if request.local is None else local_threads(request.local))
        machine = await stack.enter_async_context(own_machine(request.device, threads))
        weights = await hashing
        stack.callback(weights.close)
        draft: DraftModel | None = None
        if small is not None and request.speculate != "off":
            self._note(f"capturing the draft model {small.name}")
            opened = await in_background(lambda: open_draft(small, model))
            draft_weights = await _hashed(opened, request, self._on_event)
            stack.callback(draft_weights.close)
            draft = DraftModel(opened, draft_weights)
        await in_background(set_aside_what_stays)  # capturing allocates many objects that stay
        return _Loaded(model=model, weights=weights, machine=machine, draft=draft)

    def _needs(self, model: ServedModel) -> ServingNeeds:
        needs = self._request.needs(model.positions)
        if model.whole:
            needs = whole_needs(needs, model)
            self._note(f"{model.files.name} can't use a KV cache: the whole text is recomputed for every token")
        longest = model.graph.symbols.get(SEQUENCE, (1, needs.pass_tokens))[1]
        return msgspec.structs.replace(needs, pass_tokens=min(needs.pass_tokens, longest))

    def _replanner(
        self, connection: _Connection, loaded: _Loaded, needs: ServingNeeds, members: tuple[PoolMember, ...]
    ) -> ServingReplanner:
        request, model = self._request, loaded.model
        taken_bytes = 0 if loaded.draft is None else loaded.draft.weight_bytes
        owner = _owner_profile(connection.pool.membership.peer, loaded.machine.report, request, taken_bytes)
        self._known.names[owner.peer] = owner.name
        return ServingReplanner(
            pool=connection.pool,
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
            barred=lambda: connection.trust.barred,
            clock=self._clock,
            say=self._note,
        )

    async def _serve(
        self,
        connection: _Connection,
        loaded: _Loaded,
        needs: ServingNeeds,
        replanner: ServingReplanner,
        deployment: Deployment,
    ) -> Served:
        """Load and probe. Returns when the job is ready."""
        request, pool, job, model = self._request, connection.pool, replanner.job, loaded.model
        engine, served_job = await self._engine(connection, loaded, replanner, deployment)
        if (checked := checking_sentence(deployment.plan, engine.checkable, spot=request.checks)) is not None:
            self._note(checked)
        await report_state(pool, job, "running", "loading")
        running = asyncio.ensure_future(engine.run())
        self._stack.push_async_callback(_end, engine, running)
        await _ready_or_failed(engine, running)
        priced = _measured if request.local is None else equalised
        watch = ServingWatch(replanner, engine, pool.membership.peer, self._clock, priced=priced)
        reports = report_tokens(pool, job, lambda: (engine.status.state, engine.status.emitted_tokens))
        self._stack.enter_context(beside(watch.run(), watch_trust(connection.trust, engine), reports))
        return Served(
            job=job,
            model=model,
            needs=needs,
            privacy=request.privacy,
            engine=engine,
            names=self._known.names,
            ended=running,
            stopped=self._stopped,
            pool=connection.local,
            chunk_tokens=min(served_job.chunk_tokens, served_job.options.pass_tokens),
            problem=lambda: msgspec.structs.replace(
                replanner.problem, peers=priced(tuple(self._known.profiles.values()))
            ),
        )

    async def _engine(
        self, connection: _Connection, loaded: _Loaded, replanner: ServingReplanner, deployment: Deployment
    ) -> tuple[ServingEngine, ServingJob]:
        model, profiles = loaded.model, self._known.profiles.values()
        job = serving_job(
            model,
            replanner.job,
            connection.pool.membership.peer,
            deployment.plan,
            loaded.weights,
            self._request,
            # Other backends compute all rows of a piece in one product, whose bits depend on the number of rows.
            tiled=not model.whole and all(profile.backend == "torch" for profile in profiles),
            balanced_at=balance_tokens(model.graph),
        )
        proposer = None
        if loaded.draft is not None:
            backend = loaded.machine.backend
            proposer = await draft_proposer(loaded.draft, backend, job.options, job.vocabulary, self._stack)
        engine = ServingEngine(
            job,
            loaded.machine.host(connection.pool, connection.trust, self._clock),
            deployment,
            replanner=replanner,
            names=self._known.names,
            incarnation=1,
            on_progress=self._on_event,
            proposer=proposer,
        )
        return engine, job


async def _begin(
    replanner: PoolReplanner, pool_name: str, on_event: Callable[[ServeEvent], None], *, is_local: bool
) -> Deployment:
    async def plan_with(usable: tuple[PoolMember, ...]) -> Plan:
        profiles = tuple(member.profile for member in usable)
        peers, links = (equalised(profiles), {}) if is_local else (profiles, near_links(usable))
        problem = msgspec.structs.replace(replanner.problem, peers=peers, links=links)
        return await in_background(lambda: planned(problem))

    return await first_deployment(replanner, plan_with, pool_name=pool_name, note=lambda text: on_event(Noted(text)))


def _measured(profiles: tuple[PeerProfile, ...]) -> tuple[PeerProfile, ...]:
    """Return measured profiles unchanged."""
    return profiles


def _task(stack: AsyncExitStack, work: Coroutine[object, object, T]) -> asyncio.Task[T]:
    """Start a task to be awaited later. It is cancelled with `stack` at the latest."""
    task = asyncio.create_task(work)
    task.add_done_callback(lambda done: done.cancelled() or done.exception())  # its awaiter gets the exception
    stack.callback(task.cancel)
    return task


async def _hashed(
    model: ServedModel | asyncio.Task[ServedModel], request: ServeRequest, on_event: Callable[[ServeEvent], None]
) -> ModelWeights:
    """Hash the model's weights and return their manifest, which the caller must close."""
    opened = model if isinstance(model, ServedModel) else await asyncio.shield(model)
    return await in_background(
        lambda: hash_weights(
            opened,
            WeightStore(request.home / "weights"),
            request.home / REMEMBERED,
            lambda done, total: on_event(Hashed(done, total)),
        )
    )


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


def _owner_profile(peer: PeerId, report: DeviceReport, request: ServeRequest, taken_bytes: int) -> PeerProfile:
    """Return the profile of this machine as job owner. `taken_bytes`: memory used by things outside the plan."""
    memory_bytes = report.memory_bytes
    if request.local is not None:
        memory_bytes = own_memory_bytes(request.local + request.local_spares)
    return PeerProfile(
        peer=peer,
        name="job owner",
        backend=report.backend,
        device=report.device,
        flops_per_s=report.flops_per_s,
        memory_bandwidth_bytes_per_s=report.memory_bandwidth_bytes_per_s,
        serving=report.serving,
        attention_flops_per_s=report.attention_flops_per_s,
        memory_bytes=max(0, memory_bytes - taken_bytes),
        threads=report.threads,
        fingerprint=report.fingerprint,
        roles=("owner",),
    )
