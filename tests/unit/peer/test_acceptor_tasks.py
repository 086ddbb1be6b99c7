"""A door opens either kind of part, keeps to the one it opened, and serves only where weights may be kept."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from pathlib import Path

from fusionai.execution.links import open_job
from fusionai.primitives.errors import RefusedError
from fusionai.storage.weight_store import WeightStore
from fusionai.transport.interface import Channel
from fusionai.wire import messages as wire
from fusionai.wire.messages import Fence
from harness.memory_transport import MemoryChannel
from harness.null_backend import NullBackend
from harness.pool import JOB, OWNER, MemoryPool

FENCE = Fence(1, 0, 0)


class Pool(MemoryPool):
    """One peer; `directory`: where it keeps weights."""

    def __init__(self, directory: Path | None) -> None:
        super().__init__(1, NullBackend)
        if directory is not None:
            self.hosts = [replace(host, weights=WeightStore(directory)) for host in self.hosts]

    async def opened(self, task: str, stream: wire.Stream = "control") -> Channel | str:
        """The code of the refusal, if it is one."""
        host = self.hosts[0]
        opening = wire.OpenJob(job=JOB, fence=FENCE, ticket=self.ticket(OWNER, driver=True), task=task)  # pyright: ignore[reportArgumentType]
        try:
            return await open_job(self.owner.transport, self.addresses[host.peer], host.peer, stream, opening)
        except RefusedError as error:
            return error.code


def test_a_part_keeps_to_its_task(tmp_path: Path):
    async def story() -> None:
        async with (pool := Pool(tmp_path)):
            assert isinstance(await pool.opened("serve"), MemoryChannel)
            assert await pool.opened("train") == "bad_message"
            assert await pool.opened("train", "state") == "bad_message"
            assert isinstance(await pool.opened("serve", "state"), MemoryChannel)

    asyncio.run(story())


def test_whoever_keeps_no_weights_serves_nobody():
    async def story() -> None:
        async with (pool := Pool(None)):
            assert await pool.opened("serve") == "not_authorised"
            assert isinstance(await pool.opened("train"), MemoryChannel)

    asyncio.run(story())
