"""Where a member of a serving job has its stages' weights from, and to whom it gives them.

A peer fetches into its store, from other members first and from the owner last, over the connection that the owner
made; it gives what it has to whoever holds a ticket for the job. The owner reads the model's files. Decides nothing.

Neighbours: `execution.serving_member` asks; `execution.weights`, `weight_desk` and `weight_inlet` do the work.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import AbstractContextManager, asynccontextmanager, nullcontext
from typing import Protocol

from fusionai.execution.host import Host
from fusionai.execution.weight_desk import WeightDesk
from fusionai.execution.weight_inlet import WeightInlet
from fusionai.execution.weights import dialled, fetch
from fusionai.primitives.errors import ExecutionError, TransportError
from fusionai.primitives.ids import PeerId
from fusionai.primitives.tensors import HostTensor
from fusionai.storage.weight_manifest import ModelWeights
from fusionai.storage.weight_store import WeightStore
from fusionai.transport.interface import Channel
from fusionai.wire import messages as wire
from fusionai.wire.messages import WeightSource, WeightSpec


class StageWeights(Protocol):
    """One job's, at one member."""

    async def fetch(
        self,
        load: wire.Load,
        opening: wire.OpenJob,
        on_progress: Callable[[int, int], None],
        on_refused: Callable[[PeerId, str], None],
    ) -> Mapping[PeerId, int]:
        """Have all weights of `load` at hand; gives the bytes that came, by source. `opening` is shown to others.
        Raises `ExecutionError`, `StorageError`."""
        ...

    def holding(self, specs: Sequence[WeightSpec]) -> AbstractContextManager[None]:
        """They stay at hand meanwhile."""
        ...

    def read(self, spec: WeightSpec) -> HostTensor:
        """Mapped. Raises `StorageError`."""
        ...

    async def from_owner(self, channel: Channel) -> None:
        """Ask on this connection, which the driver made, until it ends."""
        ...

    async def to_other(self, peer: PeerId, channel: Channel) -> None:
        """Give to another member, until its connection ends."""
        ...

    def close(self) -> None: ...


class OwnWeights:
    """The job owner's: nothing is fetched. Others are served by the driver, on the connections that it makes."""

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
        raise ExecutionError("the owner's own stages get nothing over a state connection.")

    async def to_other(self, peer: PeerId, channel: Channel) -> None:  # noqa: ARG002
        raise ExecutionError("the job's owner listens to nobody.")

    def close(self) -> None: ...


class FetchedWeights:
    """A peer's, in its store. `owner`: who can be asked over the connection it made."""

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
        """The newest connection that the owner made; waited for a moment: it may just be coming anew."""
        try:
            async with asyncio.timeout(3.0):
                while self._inlet is None or self._inlet.closed:
                    self._inlet_came.clear()
                    await self._inlet_came.wait()
        except TimeoutError:
            raise TransportError("the job's owner has no connection to this machine.") from None
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
