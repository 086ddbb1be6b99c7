"""A serving job in one process: shipped doors, members, engine and torch, over the memory network.

Decides which machine runs what; plans are made by hand as the broker's pool would. Neighbours: `harness.pool` has the
machines; tests of whole serving jobs and of hostile peers.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path

import msgspec

from fusionai.backends.interface import Backend
from fusionai.backends.torch.backend import TorchBackend
from fusionai.capture.capture import Captured
from fusionai.execution.connections import Deployment
from fusionai.execution.host import Host
from fusionai.ir.schema import Graph
from fusionai.primitives.ids import PeerId
from fusionai.scheduling.problem.types import Certificate, Plan, StagePlacement, Standby
from fusionai.serving import job as progress
from fusionai.serving.engine import ServingEngine
from fusionai.serving.interface import Emitted, Finished, Generation, StreamEvent, TokenStream
from fusionai.serving.job import ServingJob, weight_keys
from fusionai.serving.speculating import Proposer
from fusionai.storage.weight_manifest import ModelWeights, manifest
from fusionai.storage.weight_store import WeightStore
from fusionai.wire.messages import ServeOptions
from harness.patience import CEILING_S
from harness.pool import JOB, OWNER, MemoryPool, Observer, peer_id


def backend() -> TorchBackend:
    return TorchBackend(device="cpu", threads=1)


class ServingPool(MemoryPool):
    """Every peer keeps weights below `directory`, also over `revive`."""

    def __init__(
        self,
        peers: int,
        directory: Path,
        *,
        backends: Callable[[], Backend] = backend,
        on_message: Observer = lambda sender, receiver, message: None,
    ) -> None:
        """`backends`: the owner's, then the peers'."""
        self._directory = directory
        super().__init__(peers, backends, on_message=on_message)

    def _host(self, peer: PeerId, share: float) -> Host:
        host = super()._host(peer, share)
        return host if peer == OWNER else replace(host, weights=WeightStore(self._directory / peer[:4]))


def serving_plan(ranges: Sequence[tuple[int, int]], peers: Sequence[str], standbys: Sequence[Standby] = ()) -> Plan:
    return Plan(
        version=1,
        task="serve",
        graph_hash="",
        stages=tuple(
            StagePlacement(stage=number, peer=peer, blocks=blocks)
            for number, (blocks, peer) in enumerate(zip(ranges, peers, strict=True))
        ),
        feed=OWNER,
        standbys=tuple(standbys),
        microbatches=1,
        step_time_s=0.0,
        tokens_per_s=0.0,
        certificate=Certificate(method="by hand", exact=False, bound_tokens_per_s=0.0, optimality_gap=0.0),
    )


@dataclass
class Replanner:
    """Puts whoever lives and has nothing to do in a lost one's place, and lets it stand by for what has no standby.
    With nobody left the model is cut anew as `recut` has it: blocks and places."""

    pool: ServingPool
    spares: list[PeerId]
    asked: list[frozenset[str]] = field(default_factory=list)
    distrusted: dict[str, str] = field(default_factory=dict)
    recut: Sequence[tuple[tuple[int, int], str]] = ()

    def distrust(self, peer: str, reason: str) -> None:
        self.distrusted[peer] = reason

    async def replacement(
        self, present: Deployment, lost: frozenset[str], waiting: Callable[[str], None]
    ) -> Deployment:
        self.asked.append(lost)
        while True:
            plan = self._replaced(present.plan, lost | self.pool.dead | set(self.distrusted))
            if plan is not None:
                return self.pool.deployment(plan)
            waiting(f"for a peer in the place of {', '.join(peer[:8] for peer in sorted(lost))}")
            self.pool.changed.clear()
            await self.pool.changed.wait()

    def _replaced(self, plan: Plan, gone: frozenset[str] | set[PeerId]) -> Plan | None:
        used = {stage.peer for stage in plan.stages} | {standby.peer for standby in plan.standbys}
        # Whoever was lost and is back may serve again, after all others.
        living = [peer for peer in self.spares if peer not in self.pool.dead and peer not in self.distrusted]
        idle = [peer for peer in living if peer not in used and peer not in gone]
        idle += [peer for peer in living if peer in gone]
        stages: list[StagePlacement] = []
        for stage in plan.stages:
            if stage.peer in gone:
                if not idle:
                    return self._cut_anew(plan)
                stages.append(msgspec.structs.replace(stage, peer=idle.pop(0)))
            else:
                stages.append(stage)
        standbys = [standby for standby in plan.standbys if standby.peer not in gone]
        if idle:
            guarded = {standby.stage for standby in standbys}
            standbys += [
                Standby(stage=stage.stage, peer=idle[0])
                for stage in stages
                if stage.peer != OWNER and stage.stage not in guarded
            ]
        version = max(self.pool.newest_version, plan.version) + 1
        return msgspec.structs.replace(plan, version=version, stages=tuple(stages), standbys=tuple(standbys))

    def _cut_anew(self, plan: Plan) -> Plan | None:
        if not self.recut:
            return None
        ranges, peers = zip(*self.recut, strict=True)
        version = max(self.pool.newest_version, plan.version) + 1
        return msgspec.structs.replace(serving_plan(ranges, peers), version=version)


def model_weights(captured: Captured, directory: Path) -> ModelWeights:
    return manifest(weight_keys(captured.graph), captured.state, WeightStore(directory))


@dataclass
class Served:
    """A running engine and what it told."""

    engine: ServingEngine
    pool: ServingPool
    replanner: Replanner
    told: list[progress.Progress]


@asynccontextmanager
async def served(
    captured: Captured,
    directory: Path,
    ranges: Sequence[tuple[int, int]],
    *,
    weights: ModelWeights | None = None,
    peers: Sequence[PeerId] | None = None,
    standbys: Sequence[Standby] = (),
    spares: int = 0,
    options: ServeOptions | None = None,
    vocabulary: int,
    proposer: Proposer | None = None,
    backends: Callable[[], Backend] = backend,
    on_message: Observer = lambda sender, receiver, message: None,
    **job: object,
) -> AsyncIterator[Served]:
    """`peers`: who runs each stage; by default the owner the first and last, a peer each of the others."""
    count = len(ranges) - 2 if peers is None else len({peer for peer in peers if peer != OWNER})
    places = peers or [OWNER, *(peer_id(number) for number in range(count)), OWNER]
    async with ServingPool(count + spares, directory, backends=backends, on_message=on_message) as pool:
        told: list[progress.Progress] = []
        replanner = Replanner(pool, [host.peer for host in pool.hosts])
        engine = ServingEngine(
            ServingJob(
                job=JOB,
                owner=OWNER,
                model="test",
                graph=captured.graph,
                options=options or ServeOptions(page_tokens=4, pages=64, sessions=9, pass_tokens=32),
                weights=weights or model_weights(captured, directory / "owner"),
                vocabulary=vocabulary,
                **{"context_tokens": 128, "chunk_tokens": 8, **job},  # pyright: ignore[reportArgumentType]
            ),
            pool.owner,
            pool.deployment(serving_plan(ranges, places, standbys)),
            replanner=replanner,
            names={host.peer: f"peer {host.peer[0]}" for host in pool.hosts},
            incarnation=1,
            on_progress=told.append,
            proposer=proposer,
        )
        running = asyncio.create_task(engine.run())
        try:
            async with asyncio.timeout(CEILING_S):
                await engine.ready()
            yield Served(engine, pool, replanner, told)
            engine.stop("the test is over")
            await running
        finally:
            await engine.close()
            running.cancel()
            await asyncio.gather(running, return_exceptions=True)


def three_stages(graph: Graph) -> list[tuple[int, int]]:
    """The owner's embedding; one layer, one layer, the others; the owner's norm and head."""
    last = max(node.block for node in graph.nodes)
    return [(0, 1), (1, 2), (2, 3), (3, last), (last, last + 1)]


async def answered(engine: ServingEngine, generation: Generation) -> list[Emitted]:
    """The tokens of a text that ends by itself or at its length."""
    events = await collect(engine.submit(generation))
    end = events[-1]
    assert isinstance(end, Finished), events
    assert end.reason in ("stop", "length"), end
    return [event for event in events if isinstance(event, Emitted)]


async def collect(stream: TokenStream) -> list[StreamEvent]:
    return [event async for event in stream]


async def tokens_of(engine: ServingEngine, generation: Generation) -> list[int]:
    """Its tokens; fails the test where it does not end well."""
    events = await collect(engine.submit(generation))
    end = events[-1]
    assert isinstance(end, Finished), events
    assert end.reason in ("stop", "length"), end
    emitted = [event for event in events if isinstance(event, Emitted)]
    assert [event.index for event in emitted] == list(range(len(emitted)))
    return [event.token for event in emitted]
