"""Fetching weights over channels within the process: resumed, checked, from peers before the owner, and told clearly."""

from __future__ import annotations

import asyncio
import hashlib
import os
import random
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from fusionai.execution.weight_desk import WeightDesk
from fusionai.execution.weights import FetchLimits, fetch
from fusionai.primitives.errors import ExecutionError, StorageError, TransportError
from fusionai.primitives.ids import PeerId
from fusionai.primitives.tensors import host_tensor
from fusionai.storage.weight_pieces import make_spec
from fusionai.storage.weight_store import WeightStore
from fusionai.transport.interface import Channel
from fusionai.transport.memory import MemoryNetwork
from fusionai.wire import messages as wire
from fusionai.wire.frame import describe
from fusionai.wire.serving import PIECE_BYTES, WeightSource, WeightSpec

MIB = 2**20
OWNER, FIRST, SECOND, THIRD = (PeerId(letter * 52) for letter in "oabc")
QUICK = FetchLimits(silence_s=0.2, slow_s=0.1, retry_s=0.05, redial_s=0.01, give_up_s=0.5)
Serve = Callable[[Channel], Awaitable[None]]


def content(key: str, nbytes: int) -> bytes:
    return random.Random(key).randbytes(nbytes)


def described(key: str, nbytes: int) -> WeightSpec:
    data = content(key, nbytes)
    return make_spec(key, "uint8", (nbytes,), [data[at : at + PIECE_BYTES] for at in range(0, nbytes, PIECE_BYTES)])


SPECS = (described("embed", 9 * MIB + 17), described("norm", 300), described("mlp", 3 * MIB), described("none", 0))
TOTAL_BYTES = sum(spec.shape[0] for spec in SPECS)


def filled(directory: Path, specs: Sequence[WeightSpec] = SPECS) -> WeightStore:
    store = WeightStore(directory)
    for spec in specs:
        store.add(spec, memoryview(content(spec.key, spec.shape[0])))
    return store


class Members:
    """Who answers at which address; what each served."""

    def __init__(self, directory: Path) -> None:
        self.network = MemoryNetwork()
        self.directory = directory
        self.desks: dict[PeerId, WeightDesk] = {}
        self.refused: list[tuple[PeerId, str]] = []
        self.dials: list[str] = []

    async def serve(self, peer: PeerId, serve: Serve, digests: tuple[bytes, ...] = ()) -> WeightSource:
        listener = await self.network.transport(peer).listen(serve, host=peer, port=0)
        return WeightSource(peer=peer, addresses=listener.addresses, digests=digests)

    async def desk(self, peer: PeerId, store: WeightStore, digests: tuple[bytes, ...] = ()) -> WeightSource:
        desk = self.desks[peer] = WeightDesk(store, [spec.digest for spec in SPECS])

        async def serve(channel: Channel) -> None:
            assert channel.remote.peer is not None
            await desk.answer(channel.remote.peer, channel)

        return await self.serve(peer, serve, digests)

    async def fetch(
        self,
        me: PeerId,
        store: WeightStore,
        *sources: WeightSource,
        limits: FetchLimits = QUICK,
        specs: Sequence[WeightSpec] = SPECS,
        on_progress: Callable[[int, int], None] = lambda _done, _total: None,
    ) -> dict[PeerId, int]:
        transport = self.network.transport(me)

        @asynccontextmanager
        async def reach(source: WeightSource) -> AsyncIterator[Channel]:
            self.dials.append(source.peer)
            channel = await transport.dial(source.addresses, expect=PeerId(source.peer), stream="state")
            try:
                yield channel
            finally:
                channel.abort()

        return await fetch(
            specs,
            sources,
            store,
            reach=reach,
            now_s=time.monotonic,
            me=me,
            on_progress=on_progress,
            on_refused=lambda peer, key: self.refused.append((peer, key)),
            limits=limits,
        )


def with_members(tmp_path: Path, body: Callable[[Members], Awaitable[None]]) -> None:
    async def run() -> None:
        await body(Members(tmp_path))
        left = [task for task in asyncio.all_tasks() if task is not asyncio.current_task()]
        for task in left:
            if "fetch" in repr(task.get_coro()).lower():
                pytest.fail(f"{task} is left")

    asyncio.run(run())


def assert_whole(store: WeightStore, specs: Sequence[WeightSpec] = SPECS) -> None:
    for spec in specs:
        assert store.read(spec).data == content(spec.key, spec.shape[0])
    assert not list(store.directory.glob("*.part"))


def test_everything_comes_from_one_source(tmp_path: Path) -> None:
    async def body(members: Members) -> None:
        owner = await members.desk(OWNER, filled(tmp_path / "owner"))
        store, told = WeightStore(tmp_path / "a"), list[tuple[int, int]]()
        counted = await members.fetch(FIRST, store, owner, on_progress=lambda *progress: told.append(progress))
        assert counted == {OWNER: TOTAL_BYTES}
        assert members.desks[OWNER].sent_bytes == {FIRST: TOTAL_BYTES}
        assert_whole(store)
        assert told[0] == (0, TOTAL_BYTES)
        assert told[-1] == (TOTAL_BYTES, TOTAL_BYTES)
        assert told == sorted(told)
        assert await members.fetch(FIRST, WeightStore(tmp_path / "a"), owner) == {}

    with_members(tmp_path, body)
