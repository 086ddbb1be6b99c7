"""Where a member of a serving job gets its stages' weights, and which members it serves them to.

A peer fetches weights into its store, from other members first and from the owner last, over the connection that the
owner made. It serves what it has to members that hold a ticket for the job. The owner reads the model's files.

Used by `execution.serving.member`; `execution.weights.fetching`, `weight_desk` and `weight_inlet` do the work.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import AbstractContextManager, asynccontextmanager, nullcontext
from typing import Protocol

from fusionai.execution.host import Host
from fusionai.execution.weights.fetching import dialled, fetch
from fusionai.execution.weights.inlet import WeightInlet
from fusionai.execution.weights.server import WeightDesk
from fusionai.primitives.errors import ExecutionError, TransportError
from fusionai.primitives.ids import PeerId
from fusionai.primitives.tensors import HostTensor
from fusionai.storage.weight_manifest import ModelWeights
from fusionai.storage.weight_store import WeightStore
from fusionai.transport.interface import Channel
from fusionai.wire import messages as wire
from fusionai.wire.messages import WeightSource, WeightSpec


class StageWeights(Protocol):
    """Source of one job's weights at one member."""

    async def fetch(
        self,
        load: wire.Load,
        opening: wire.OpenJob,
        on_progress: Callable[[int, int], None],
        on_refused: Callable[[PeerId, str], None],
    ) -> Mapping[PeerId, int]:
        """Make all weights of `load` available and return the bytes fetched, by source. `opening` is shown to other
        members. Raises `ExecutionError`, `StorageError`."""
        ...

    def holding(self, specs: Sequence[WeightSpec]) -> AbstractContextManager[None]:
        """Keep these weights available inside the context."""
        ...

    def read(self, spec: WeightSpec) -> HostTensor:
        """Return the weight, memory-mapped. Raises `StorageError`."""
        ...

    async def from_owner(self, channel: Channel) -> None:
        """Fetch from the driver on this connection, which the driver made, until it ends."""
        ...

    async def to_other(self, peer: PeerId, channel: Channel) -> None:
        """Serve weights to another member until its connection ends."""
        ...

    def close(self) -> None: ...


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
        self._desk = WeightDesk(store)
        self._inlet: WeightInlet | None = None
        self._inlet_came = asyncio.Event()

    async def fetch(
        self,
        load: wire.Load,
        opening: wire.OpenJob,
        on_progress: Callable[[int, int], None],
        on_refused: Callable[[PeerId, str], None],
    ) -> Mapping[PeerId, int]:
        self._desk.allow(spec.digest for spec in load.weights)

        @asynccontextmanager
        async def reach(source: WeightSource) -> AsyncIterator[Channel]:
            if source.peer == self._owner:
                yield await self._from_owner()
            else:
                async with dialled(self._host.transport, source, opening) as channel:
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

    async def _from_owner(self) -> Channel:
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
        return self._store.holding([spec.digest for spec in specs])

    def read(self, spec: WeightSpec) -> HostTensor:
        return self._store.read(spec)

    async def from_owner(self, channel: Channel) -> None:
        inlet = self._inlet = WeightInlet(channel)
        self._inlet_came.set()
        await inlet.serve()

    async def to_other(self, peer: PeerId, channel: Channel) -> None:
        await self._desk.answer(peer, channel)

    def close(self) -> None:
        self._desk.close()
