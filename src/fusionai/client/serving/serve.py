"""Serves a model from the pool: the job owner's side of `fusion serve`.

`async with serving(request, on_event=...) as served:` connects to the pool (or starts one on this machine), captures
the model, hashes the weights, plans, has the broker adopt the plan, loads and probes. Then `served.engine` takes
generations until the block ends. At the end, everything that was started is stopped.

`client.serving.model` opens the model, `serving.engine` serves, `client.serving.watch` looks for better plans,
`cli.serve` adds the gateway.
"""

from __future__ import annotations

import asyncio
import os
import secrets
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from dataclasses import dataclass
from math import inf
from pathlib import Path
from statistics import median
from typing import Final, Literal, TypeVar

import msgspec

from fusionai.backends.interface import TILE_POSITIONS, DeviceReport
from fusionai.backends.registry import open_backend
from fusionai.client.pool.background import in_background
from fusionai.client.pool.beginning import first_deployment, nobody
from fusionai.client.pool.job_trust import job_trust
from fusionai.client.pool.local_homes import local_home
from fusionai.client.pool.local_pool import LocalPeer, LocalPool
from fusionai.client.pool.near_links import near_links
from fusionai.client.pool.owner import owner_membership
from fusionai.client.pool.replanning import PoolReplanner
from fusionai.client.pool.session import Member, PoolSession
from fusionai.client.pool.trust_watch import watch_circle
from fusionai.client.serving.adapters import find_adapters
from fusionai.client.serving.checks import checking_sentence
from fusionai.client.serving.draft import DraftModel, draft_proposer, open_draft
from fusionai.client.serving.leftovers import ServedNote, end_leftovers
from fusionai.client.serving.model import ServedModel, find_model, hash_weights, job_name, open_model
from fusionai.client.serving.problem import Ends, serving_problem
from fusionai.client.serving.replanning import ServingReplanner
from fusionai.client.serving.watch import ServingWatch
from fusionai.execution.compute import ComputeThread
from fusionai.execution.deployment import Deployment
from fusionai.execution.host import Host
from fusionai.ir.cost import balance_tokens
from fusionai.ir.partition import ends
from fusionai.ir.serving import SEQUENCE
from fusionai.primitives.clock import SystemClock
from fusionai.primitives.errors import FusionError, PlanError, RefusedError, UsageError
from fusionai.primitives.ids import JobId, PeerId
from fusionai.primitives.privacy import PrivacyLevel, keeps_ends
from fusionai.primitives.process import set_aside_what_stays
from fusionai.scheduling.planner import plan as planned
from fusionai.scheduling.problem.calibration import typical_serving
from fusionai.scheduling.problem.types import PeerProfile, Plan, Problem, ServingNeeds
from fusionai.serving import progress
from fusionai.serving.engine import ServingEngine
from fusionai.serving.job import ServingJob
from fusionai.serving.speculating import Speculate
from fusionai.storage.weight_manifest import ModelWeights
from fusionai.storage.weight_store import WeightStore
from fusionai.wire import messages as wire
from fusionai.wire.messages import ServeOptions

T = TypeVar("T")

MOST_LOCAL: Final = 16
LOCAL_NAMES: Final = ("tower", "desktop", "laptop", "workshop", "bedroom", "attic")
OWNERS_SHARE: Final = 2
"""Share of the free memory for this machine's own process with `--local`, in shares of a local peer (chosen)."""
GRACE_S: Final = 10.0
"""Time to wait for a machine for a lost stage before the model is cut anew over the remaining machines, in seconds
(chosen). A new cut loads weights again, so a machine that returns at once is worth waiting for."""
REMEMBERED: Final = "weights.json"
"""File with the hashes of model files, in this machine's home."""
LAST_WORD_S: Final = 5.0
REPORT_S: Final = 5.0


@dataclass(frozen=True, slots=True, kw_only=True)
class ServeRequest:
    """What to serve and how. `local`: start a pool of this many active peers, and `local_spares` further ones, on this
    machine. `stages`: exact number of stages, None: the planner chooses. `needs`: returns what sessions need, given the
    model's longest context."""

    model: str
    needs: Callable[[int | None], ServingNeeds]
    home: Path
    local: int | None = None
    local_spares: int = 1
    ends: Ends = "owner"
    privacy: PrivacyLevel = "split"
    first_layers: int = 0
    last_layers: int = 0
    invitation: str | None = None
    device: str = "auto"
    threads: int | None = None
    stages: int | None = None
    spares: int | None = None
    speculate: Speculate = "off"
    draft: str | None = None
    """Small model with the same tokenizer that guesses tokens; None: guess from repetitions in the text."""
    confidential: bool = False
    """Refuse privacy levels other than `trusted`."""
    adapters: tuple[tuple[str, Path], ...] = ()
    """Adapters to serve beside the model, as (name for clients, directory)."""
    checks: bool = True
    """Whether warm standbys recompute part of the texts to check the peers."""


@dataclass(frozen=True, slots=True)
class Noted:
    """A line for the user about the progress."""

    text: str


@dataclass(frozen=True, slots=True)
class ServePlanned:
    """The first plan, with the names of the machines."""

    job: JobId
    plan: Plan
    names: dict[str, str]
    model: ServedModel


@dataclass(frozen=True, slots=True)
class Met:
    """Names of machines that were not known before, by peer id."""

    names: dict[str, str]


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
        # Names are checked before anything starts.
        files = await in_background(lambda: find_model(request.model))
        adapters = await in_background(lambda: find_adapters(request.adapters))
        if any(adapter.name == files.name for adapter in adapters):
            raise UsageError(
                f"an adapter has the same name as the model, {files.name!r}.", hint="Give it another name."
            )
        small = None if request.draft is None else await in_background(lambda name=request.draft: find_model(name))
        clock = SystemClock()
        home, invitation, local = request.home, request.invitation, None
        on_event(Noted(f"capturing {files.name}"))
        # The model is opened while processes start and the pool is contacted.
        opening = _beside(stack, in_background(lambda: open_model(files, adapters)))
        hashing = _beside(stack, _hashed(opening, request, on_event))
        if request.local is not None:
            on_event(
                Noted(f"starting a pool of {request.local} peers and {request.local_spares} spares on this machine")
            )
            local = await stack.enter_async_context(_local_pool(request, lambda text: on_event(Noted(text))))
            home, invitation = local.directory / "owner", local.invitation
        membership = await owner_membership(home, invitation)
        trust = job_trust(request.home, membership, request.privacy, confidential=request.confidential)
        if local is not None:
            trust.own = frozenset(PeerId(peer) for peer in local.names)
        stopped = asyncio.Event()
        names: dict[str, str] = {}
        profiles: dict[str, PeerProfile] = {}

        def met(members: tuple[Member, ...]) -> None:
            profiles.update((one.view.peer, one.profile) for one in members)
            new = {one.view.peer: one.profile.name for one in members if one.profile.name != names.get(one.view.peer)}
            if new:
                names.update(new)
                on_event(Met(new))

        pool = await stack.enter_async_context(
            PoolSession(membership, trust=trust, on_stop=lambda _job: stopped.set(), on_members=met)
        )
        for left in await end_leftovers(pool, home):
            on_event(Noted(f"the server of {left} was killed; its peers are free again"))
        if not (members := await pool.pool()):
            raise nobody(membership.pool, members, trust.barred)
        # Capturing patches the framework and modules like `math` for all threads. Imports and computations in this
        # process must therefore come after it.
        model = await opening
        for adapter in adapters:
            on_event(Noted(adapter.words))
        for note in model.captured.notes:
            on_event(Noted(note))
        compute = ComputeThread()
        stack.callback(compute.close)
        backend, _ = await compute.run(
            lambda: open_backend("torch", device=request.device, threads=_owner_threads(request))
        )
        report, _ = await compute.run(backend.probe)
        weights = await hashing
        stack.callback(weights.close)
        draft: DraftModel | None = None
        if small is not None and request.speculate != "off":
            on_event(Noted(f"capturing the draft model {small.name}"))
            opened = await in_background(lambda: open_draft(small, model))
            draft_weights = await _hashed(opened, request, on_event)
            stack.callback(draft_weights.close)
            draft = DraftModel(opened, draft_weights)
        await in_background(set_aside_what_stays)  # capturing allocates many objects that stay
        owner = _owner_profile(membership.peer, report, request, 0 if draft is None else draft.weight_bytes)
        names[membership.peer] = owner.name
        needs = request.needs(model.positions)
        if model.whole:
            needs = _whole_needs(needs, model)
            on_event(Noted(f"{files.name} can't use a KV cache: the whole text is recomputed for every token"))
        longest = model.graph.symbols.get(SEQUENCE, (1, needs.pass_tokens))[1]
        needs = msgspec.structs.replace(needs, pass_tokens=min(needs.pass_tokens, longest))
        job = JobId(f"{job_name(files.name)}-{secrets.token_hex(4)}")
        replanner = ServingReplanner(
            pool=pool,
            job=job,
            title=f"serve {files.name}",
            steps=0,
            problem=serving_problem(
                model.graph,
                [member.profile for member in members],
                owner,
                needs,
                ends=request.ends,
                stages=request.local or request.stages,
                spares=request.spares,
                kept=_kept(request, model),
            ),
            policy="tolerant",
            grace_s=GRACE_S,
            excluded=lambda _members: frozenset(),
            barred=lambda: trust.barred,
            clock=clock,
            say=lambda text: on_event(Noted(text)),
        )
        on_event(Noted("planning"))
        stack.push_async_callback(_ended, pool, job, ServedNote(home, job))
        deployment = await _begin(replanner, membership.pool, on_event, is_local=request.local is not None)
        on_event(ServePlanned(job, deployment.plan, dict(names), model))
        if (sentence := trust.sentence(deployment.plan)) is not None:
            on_event(Noted(sentence))
        served_job = _serving_job(
            model,
            job,
            membership.peer,
            deployment.plan,
            weights,
            request,
            # Other backends compute all rows of a piece in one product, whose bits depend on the number of rows.
            tiled=not model.whole and all(profile.backend == "torch" for profile in profiles.values()),
            balanced_at=balance_tokens(model.graph),
        )
        engine = ServingEngine(
            served_job,
            Host(
                peer=membership.peer,
                backend=backend,
                compute=compute,
                transport=pool.transport,
                fingerprint=report.fingerprint,
                clock=clock,
                seal=trust.seal,
            ),
            deployment,
            replanner=replanner,
            names=names,
            incarnation=1,
            on_progress=on_event,
            proposer=None
            if draft is None
            else await draft_proposer(draft, backend, served_job.options, served_job.vocabulary, stack),
        )
        if (checked := checking_sentence(deployment.plan, engine.checkable, spot=request.checks)) is not None:
            on_event(Noted(checked))
        await _report(pool, job, "running", "loading")
        running = asyncio.ensure_future(engine.run())
        stack.push_async_callback(_end, engine, running)
        await _ready_or_failed(engine, running)

        def problem() -> Problem:
            everyone = tuple(profiles.values())
            peers = everyone if request.local is None else _equal(everyone)
            return msgspec.structs.replace(replanner.problem, peers=peers)

        priced = _measured if request.local is None else _equal
        watch = asyncio.create_task(ServingWatch(replanner, engine, membership.peer, clock, priced=priced).run())
        telling = asyncio.create_task(_tell(engine, pool, job))
        stack.callback(watch.cancel)
        guarding = asyncio.create_task(watch_circle(trust, engine))
        stack.callback(guarding.cancel)
        stack.callback(telling.cancel)
        yield Served(
            job=job,
            model=model,
            needs=needs,
            privacy=request.privacy,
            engine=engine,
            names=names,
            ended=running,
            stopped=stopped,
            pool=local,
            chunk_tokens=min(served_job.chunk_tokens, served_job.options.pass_tokens),
            problem=problem,
        )


@asynccontextmanager
async def _local_pool(request: ServeRequest, say: Callable[[str], None]) -> AsyncIterator[LocalPool]:
    """Run a pool of local processes during the block. Their homes are in a directory of this machine's home, which is
    removed afterwards."""
    count = request.local or 0
    if not 1 <= count <= MOST_LOCAL:
        raise UsageError(f"expected --local from 1 to {MOST_LOCAL}, got {count}.")
    import psutil

    machines = count + request.local_spares
    lent = psutil.virtual_memory().available // (machines + OWNERS_SHARE)
    peers = [
        LocalPeer(
            LOCAL_NAMES[number] if number < len(LOCAL_NAMES) else f"peer{number}",
            threads=_local_threads(count),
            memory_bytes=lent,
            weights_beside=request.home / REMEMBERED,
        )
        for number in range(machines)
    ]
    with local_home(request.home / "local") as directory:
        async with LocalPool(directory, peers, name="local", say=say) as pool:
            yield pool


def _local_threads(peers: int) -> int:
    """Return the threads per local process: its share of the cores, because stages of several sessions work at once."""
    return max(1, (os.cpu_count() or 1) // peers)


def _owner_threads(request: ServeRequest) -> int | None:
    return request.threads or (None if request.local is None else _local_threads(request.local))


async def _begin(
    replanner: PoolReplanner, pool_name: str, on_event: Callable[[ServeEvent], None], *, is_local: bool
) -> Deployment:
    async def plan_with(usable: tuple[Member, ...]) -> Plan:
        profiles = tuple(member.profile for member in usable)
        peers, links = (_equal(profiles), {}) if is_local else (profiles, near_links(usable))
        problem = msgspec.structs.replace(replanner.problem, peers=peers, links=links)
        return await in_background(lambda: planned(problem))

    return await first_deployment(replanner, plan_with, pool_name=pool_name, note=lambda text: on_event(Noted(text)))


def _measured(profiles: tuple[PeerProfile, ...]) -> tuple[PeerProfile, ...]:
    """As they are."""
    return profiles


def _equal(profiles: tuple[PeerProfile, ...]) -> tuple[PeerProfile, ...]:
    """Return the profiles with median speeds. Local processes are equal, but measured their speed under each other's
    load."""
    flops_per_s = median(profile.flops_per_s for profile in profiles)
    bandwidth = median(profile.memory_bandwidth_bytes_per_s for profile in profiles)
    serving = typical_serving(profiles)
    attention_flops_per_s = median(profile.attention_flops_per_s for profile in profiles)
    return tuple(
        msgspec.structs.replace(
            profile,
            flops_per_s=flops_per_s,
            memory_bandwidth_bytes_per_s=bandwidth,
            serving=serving,
            attention_flops_per_s=attention_flops_per_s,
        )
        for profile in profiles
    )


def _beside(stack: AsyncExitStack, work: Coroutine[object, object, T]) -> asyncio.Task[T]:
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


def _kept(request: ServeRequest, model: ServedModel) -> tuple[int, int]:
    """Return the numbers of first and last blocks that stay on this machine. Raises `GraphError` if the model can't be
    split like that, `UsageError` if `ends` contradicts the privacy level."""
    if not keeps_ends(request.privacy):
        return 0, 0
    if request.ends == "pool":
        raise UsageError(f"the privacy level {request.privacy} keeps embedding and head here, so --ends can't be pool.")
    return ends(model.graph, first_layers=request.first_layers, last_layers=request.last_layers, training=False)


def _whole_needs(needs: ServingNeeds, model: ServedModel) -> ServingNeeds:
    if (needs.weights, needs.cache) != ("fp32", "fp32"):
        raise UsageError(
            f"{model.files.name} can't use a KV cache and needs --weights fp32 and --cache fp32; got "
            f"{needs.weights} and {needs.cache}.",
            hint="Leave --weights and --cache out.",
        )
    return msgspec.structs.replace(needs, whole=True)


def _serving_job(
    model: ServedModel,
    job: JobId,
    owner: PeerId,
    plan: Plan,
    weights: ModelWeights,
    request: ServeRequest,
    *,
    tiled: bool = False,
    balanced_at: float = inf,
) -> ServingJob:
    """Return the job for the engine. `tiled`: pieces of prompts may have any length in tiles without changing bits, at
    all stages. `balanced_at`: see `ServingJob.balance_tokens`."""
    sizes = plan.serving
    if sizes is None:
        raise PlanError("expected a plan for serving, got one without serving sizes.")
    return ServingJob(
        job=job,
        owner=owner,
        model=model.files.name,
        graph=model.captured.graph,
        options=ServeOptions(
            weights=sizes.weights,
            cache=sizes.cache,
            page_tokens=sizes.page_tokens,
            pages=sizes.pages,
            sessions=sizes.sessions + 1,  # one for the probe
            pass_tokens=sizes.pass_tokens,
            whole=model.whole,
            adapter_ranks=tuple(adapter.files.rank for adapter in model.adapters),
        ),
        weights=weights,
        vocabulary=model.vocabulary,
        context_tokens=sizes.context_tokens,
        stop_tokens=model.texts.stop_tokens,
        adapters=tuple(adapter.name for adapter in model.adapters),
        prefix_cache=not model.windows,
        tile_tokens=TILE_POSITIONS if tiled else None,
        balance_tokens=balanced_at,
        in_flight=max(sizes.passes_in_flight, len(plan.stages)),
        speculate=request.speculate,
        secret=secrets.token_bytes(32) if request.checks else b"",
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


async def _tell(engine: ServingEngine, pool: PoolSession, job: JobId) -> None:
    """Report the job's progress to the broker every `REPORT_S` seconds if it changed. While the broker is away, the
    next interval tries again."""
    told = ""
    while True:
        status = engine.status
        detail = f"{status.state}, {status.emitted_tokens} tokens"
        if detail != told:
            with suppress(FusionError):
                await pool.report(wire.JobReport(job=job, state="running", step=status.emitted_tokens, detail=""))
                told = detail
        await asyncio.sleep(REPORT_S)


async def _ended(pool: PoolSession, job: JobId, note: ServedNote) -> None:
    note.close(told=await _report(pool, job, "done", "the server has ended"))


async def _report(pool: PoolSession, job: JobId, state: Literal["running", "done", "failed"], detail: str) -> bool:
    """Report the job's state. Returns False if the broker does not answer; it then learns of an end from the members'
    leases."""
    try:
        async with asyncio.timeout(LAST_WORD_S):
            await pool.report(wire.JobReport(job=job, state=state, step=0, detail=detail))
    except RefusedError:
        pass  # the broker does not know the job, or knows that it is over
    except (FusionError, TimeoutError):
        return False
    return True


def _owner_profile(peer: PeerId, report: DeviceReport, request: ServeRequest, taken_bytes: int) -> PeerProfile:
    """Return the profile of this machine as job owner. `taken_bytes`: memory used by things outside the plan."""
    memory_bytes = report.memory_bytes
    if request.local is not None:
        import psutil

        machines = request.local + request.local_spares
        memory_bytes = psutil.virtual_memory().available * OWNERS_SHARE // (machines + OWNERS_SHARE)
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
