"""Loads a serving stage: validates a `Load` message, prepares the stage, and makes its weights available.

A peer fetches weights into its store, from other members first and from the owner last, over the connection that the
owner made. It serves what it has to members that the placement names. The owner reads the model's files.

`execution.serving.member` calls it, `ir.validate` checks graphs, `backends.serving` prepares programs,
`execution.weights` moves the weights.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import AbstractContextManager, asynccontextmanager, nullcontext
from typing import TYPE_CHECKING, cast

import msgspec

from fusionai.backends.interface import Backend
from fusionai.backends.serving.base import ServingProgram
from fusionai.backends.serving.whole_texts import EncoderServing, WholeServing
from fusionai.execution.host import Host
from fusionai.execution.serving.boundary import ServingBoundary
from fusionai.execution.serving.stage import ServingStage, StageIdentity, retained_bytes
from fusionai.execution.weights.fetching import WeightInlet, dialled, fetch
from fusionai.execution.weights.server import WeightServer
from fusionai.ir.schema import Graph, content_hash
from fusionai.ir.validate import parse
from fusionai.primitives.errors import ExecutionError, GraphError, TransportError
from fusionai.primitives.ids import PeerId
from fusionai.primitives.tensors import HostTensor
from fusionai.storage.weight_manifest import ModelWeights
from fusionai.storage.weight_store import WeightStore
from fusionai.transport.interface import Channel
from fusionai.wire import messages as wire
from fusionai.wire.messages import WeightSource, WeightSpec

if TYPE_CHECKING:
    from fusionai.execution.serving.member import ServingMember


def identity_of(load: wire.Load) -> StageIdentity:
    return StageIdentity(
        graph_hash=load.graph_hash,
        boundary=bytes(load.boundary),
        options=load.options,
        select=load.select,
        last=load.stage == load.stages - 1,
        weights=tuple(spec.digest for spec in load.weights),
    )


async def prepare_stage(
    host: Host,
    load: wire.Load,
    tensors: Mapping[str, HostTensor],
    *,
    member: ServingMember,
    most_bytes: int | None = None,
) -> tuple[ServingStage, ServingProgram]:
    """Validate and prepare one stage in the compute thread, for the memory that is left; where no limit is set, for
    `most_bytes`. Raises `GraphError` for a
    graph or boundary that is not valid, `ExecutionError` for a stage this machine can't run."""
    place, identity = f"stage {load.stage}", identity_of(load)
    graph_bytes = tensors.get("graph")
    if graph_bytes is None:
        raise GraphError(f"the load of {place} carries no graph.")
    try:
        boundary = msgspec.msgpack.decode(load.boundary, type=ServingBoundary)
    except msgspec.MsgspecError as error:
        raise GraphError(f"the boundary of {place} does not fit its schema: {error}.") from None
    if boundary.stage != load.stage or load.stage >= load.stages:
        raise GraphError(f"the load of {place} of {load.stages} carries the boundary of stage {boundary.stage}.")
    if not hasattr(host.backend, "serve"):
        raise ExecutionError(f"backend {host.backend.name} can't serve models.")
    backend = cast("Backend", host.backend)

    def read() -> Graph:
        graph = parse(graph_bytes.data, host.graph_limits)
        if content_hash(graph) != load.graph_hash:
            raise GraphError(f"the graph of {place} does not have the announced hash.")
        boundary.check(graph)
        if unsupported := host.backend.unsupported(node.op for node in graph.nodes):
            raise ExecutionError(f"backend {host.backend.name} can't run {', '.join(unsupported)} of {place}.")
        needed, given = {spec.key for spec in graph.params.values()}, {spec.key for spec in load.weights}
        if needed != given:
            some = ", ".join(sorted(needed ^ given)[:5])
            raise GraphError(
                f"the load of {place} does not list exactly the weights that the graph reads; differing: {some}."
            )
        return graph

    whole_texts = EncoderServing if load.options.at_once else WholeServing if load.options.whole else None
    # Two pieces of work, so that passes of other stages get their turns in between.
    graph, _ = await host.compute.run(read, rests=False)
    async with host.memory.loading() as left_bytes:
        limit_bytes = most_bytes if left_bytes is None else left_bytes - retained_bytes(boundary, identity)

        def build() -> ServingProgram:
            if whole_texts is None:
                return backend.serve(graph, options=load.options, memory_limit_bytes=limit_bytes)
            return whole_texts(graph, options=load.options, backend=host.backend, memory_limit_bytes=limit_bytes)

        program, _ = await host.compute.run(build, rests=False)
        host.memory.add(program)
    stage = ServingStage(
        identity=identity,
        boundary=boundary,
        graph=graph,
        program=program,
        compute=host.compute,
        memory=host.memory,
        member=member,
    )
    return stage, program


class OwnWeights:
    """Weights at the job owner, where nothing is fetched. The driver serves other members on the connections it
    makes."""

    def __init__(self, weights: ModelWeights) -> None:
        self._weights = weights

    async def fetch(
        self,
        load: wire.Load,  # noqa: ARG002
        opening: wire.OpenJob,  # noqa: ARG002
        on_progress: Callable[[int, int], None],  # noqa: ARG002
        on_refused: Callable[[PeerId, str], None],  # noqa: ARG002
    ) -> Mapping[PeerId, int]:
        return {}

    def holding(self, specs: Sequence[WeightSpec]) -> AbstractContextManager[None]:  # noqa: ARG002
        return nullcontext()

    def read(self, spec: WeightSpec) -> HostTensor:
        return self._weights.read(spec)

    async def from_owner(self, channel: Channel) -> None:
        await channel.receive()
        raise ExecutionError("the owner's own stages take no messages on a state connection.")

    async def to_other(self, peer: PeerId, channel: Channel) -> None:  # noqa: ARG002
        raise ExecutionError("the job's owner does not serve weights to members that dial it.")

    def close(self) -> None: ...


class FetchedWeights:
    """Weights of a peer, in its store. `owner` is reached only over the connection that it made."""

    def __init__(self, host: Host, owner: PeerId, store: WeightStore) -> None:
        self._host = host
        self._owner = owner
        self._store = store
        self._desk = WeightServer(store)
        self._inlet: WeightInlet | None = None
        self._inlet_came = asyncio.Event()

    async def fetch(
        self,
        load: wire.Load,
        opening: wire.OpenJob,
        on_progress: Callable[[int, int], None],
        on_refused: Callable[[PeerId, str], None],
    ) -> Mapping[PeerId, int]:
        """Make all weights of `load` available and return the bytes fetched, by source. `opening` is shown to other
        members. Raises `ExecutionError`, `StorageError`."""
        self._desk.allow(spec.digest for spec in load.weights)

        @asynccontextmanager
        async def reach(source: WeightSource) -> AsyncIterator[Channel | WeightInlet]:
            if source.peer == self._owner:
                yield await self._from_owner()
            else:
                async with dialled(self._host, source, opening) as channel:
                    yield channel

        return await fetch(
            load.weights,
            [source for source in load.sources if source.peer != self._host.peer],
            self._store,
            reach=reach,
            now_s=self._host.clock.now_s,
            me=self._host.peer,
            on_progress=on_progress,
            on_refused=on_refused,
        )

    async def _from_owner(self) -> WeightInlet:
        """Return the newest connection that the owner made. Waits 3 s, because the owner may be reconnecting."""
        try:
            async with asyncio.timeout(3.0):
                while self._inlet is None or self._inlet.closed:
                    self._inlet_came.clear()
                    await self._inlet_came.wait()
        except TimeoutError:
            raise TransportError(
                "the job's owner has no connection to this machine, so weights can't be fetched from it."
            ) from None
        return self._inlet

    def holding(self, specs: Sequence[WeightSpec]) -> AbstractContextManager[None]:
        """Keep these weights available inside the context."""
        return self._store.holding([spec.digest for spec in specs])

    def read(self, spec: WeightSpec) -> HostTensor:
        """Return the weight, memory-mapped. Raises `StorageError`."""
        return self._store.read(spec)

    async def from_owner(self, channel: Channel) -> None:
        """Fetch from the driver on this connection, which the driver made, until it ends."""
        inlet = self._inlet = WeightInlet(channel)
        self._inlet_came.set()
        await inlet.serve()

    async def to_other(self, peer: PeerId, channel: Channel) -> None:
        """Serve weights to another member until its connection ends."""
        await self._desk.answer(peer, channel)

    def close(self) -> None:
        self._desk.close()


StageWeights = OwnWeights | FetchedWeights
"""Source of one job's weights at one member."""
