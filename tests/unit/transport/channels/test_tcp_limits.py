"""A machine's upload and download limits on real connections: every byte is counted, and nothing goes unpaid."""

from __future__ import annotations

import asyncio
from typing import Any

import numpy as np
import pytest

from fusionai.primitives.tensors import HostTensor, host_tensor
from fusionai.transport.channels.tcp import SMALL_BODY_BYTES
from fusionai.transport.channels.uplink import RateLimit, TransferLimits
from fusionai.transport.interface import Channel
from fusionai.transport.routes.tcp import TcpTransport
from fusionai.wire.frame import describe
from fusionai.wire.messages import Fence, Ping, StateChunk
from harness.patience import CEILING_S

MIB = 2**20


class Ledger(RateLimit):
    """Notes what was asked for; `due_s` is what everybody is told to wait, `open` whether small frames may pass."""

    def __init__(self, due_s: float = 0.0, *, admits: bool = True) -> None:
        super().__init__(5e6)
        self.taken: list[int] = []
        self.asked = asyncio.Event()
        self.due_s = due_s
        self.admits = admits

    def take(self, nbytes: int, now_s: float) -> float:
        self.taken.append(nbytes)
        self.asked.set()
        return self.due_s

    def admits_small(self, now_s: float) -> bool:
        return self.admits


def limits(upload: RateLimit | None = None, download: RateLimit | None = None) -> TransferLimits:
    made = TransferLimits()
    made.upload, made.download = upload, download
    return made


def chunk(tensor: HostTensor, step: int = 0) -> StateChunk:
    return StateChunk(fence=Fence(1, 0, 0), stage=0, step=step, last=False, tensors=(describe("t", tensor),))


def noise(count: int) -> HostTensor:
    return host_tensor("uint8", (count,), np.random.default_rng(count).integers(0, 256, count, np.uint8).data)


async def joined(pool: Any, sending: TransferLimits, receiving: TransferLimits) -> tuple[Channel, Channel, Any]:
    """(who dialled, who listened, the listener)."""
    arrived: asyncio.Queue[Channel] = asyncio.Queue()
    ended = asyncio.Event()

    async def accept(channel: Channel) -> None:
        channel.admit()
        arrived.put_nowait(channel)
        await ended.wait()

    door = TcpTransport(pool.credentials("broker", "broker"), rates=receiving)
    listener = await door.listen(accept, host="127.0.0.1", port=0)
    mine = await TcpTransport(pool.credentials("a"), rates=sending).dial(
        listener.addresses, expect=None, stream="tensors"
    )
    return mine, await arrived.get(), listener


def bounded(main: Any) -> None:
    async def run() -> None:
        async with asyncio.timeout(CEILING_S):
            await main

    asyncio.run(run())


def test_every_byte_is_counted_on_both_sides(pool: Any) -> None:
    async def main() -> None:
        up, down = Ledger(), Ledger()
        mine, theirs, listener = await joined(pool, limits(upload=up), limits(download=down))
        up.taken.clear()
        down.taken.clear()
        before_bytes = theirs.stats.received_bytes
        small, large = noise(1000), noise(3 * MIB + 17)
        await mine.send(chunk(small), [small])
        await mine.send(chunk(large), [large])
        assert mine.send_at_once(Ping(sequence=0, sent_at_s=0.0))
        for tensor in (small, large):
            assert bytes((await theirs.receive()).tensors["t"].data) == bytes(tensor.data)
        assert isinstance((await theirs.receive()).message, Ping)
        arrived_bytes = theirs.stats.received_bytes - before_bytes
        assert sum(down.taken) == arrived_bytes
        assert sum(up.taken) == arrived_bytes
        assert max(up.taken) <= up.slice_bytes(MIB), "a large frame goes in slices"
        mine.abort()
        await listener.close()

    bounded(main())


def test_nothing_large_goes_before_it_is_paid_for(pool: Any) -> None:
    async def main() -> None:
        up = Ledger(due_s=3600.0)
        mine, theirs, listener = await joined(pool, limits(upload=up), limits())
        up.asked.clear()
        large = noise(2 * SMALL_BODY_BYTES)
        sending = asyncio.create_task(mine.send(chunk(large), [large]))
        await asked(up)
        assert not sending.done()
        assert not mine.send_at_once(Ping(sequence=0, sent_at_s=0.0)), "half a frame is out"
        assert theirs.stats.received_frames == 0
        sending.cancel()
        mine.abort()
        await listener.close()

    bounded(main())


def test_small_frames_pass_by_until_the_debt_is_large(pool: Any) -> None:
    async def main() -> None:
        up = Ledger(due_s=3600.0)
        mine, theirs, listener = await joined(pool, limits(upload=up), limits())
        await mine.send(Ping(sequence=1, sent_at_s=0.0))
        assert mine.send_at_once(Ping(sequence=2, sent_at_s=0.0))
        assert [(await theirs.receive()).message.sequence for _ in range(2)] == [1, 2]  # pyright: ignore
        up.admits = False
        up.asked.clear()
        assert not mine.send_at_once(Ping(sequence=3, sent_at_s=0.0))
        up.taken.clear()
        sending = asyncio.create_task(mine.send(Ping(sequence=4, sent_at_s=0.0)))
        await asked(up)
        assert not sending.done()
        sending.cancel()
        mine.abort()
        await listener.close()

    bounded(main())


@pytest.mark.slow
def test_who_receives_too_fast_holds_the_sender_back(pool: Any) -> None:
    async def main() -> None:
        down = Ledger(due_s=3600.0)
        mine, theirs, listener = await joined(pool, limits(), limits(download=down))
        down.asked.clear()
        large = noise(64 * MIB)
        sending = asyncio.create_task(mine.send(chunk(large), [large]))
        await asked(down)
        done, _ = await asyncio.wait([sending], timeout=0.2)
        assert not done
        assert theirs.stats.arrived_bytes < 16 * MIB
        sending.cancel()
        mine.abort()
        await listener.close()

    bounded(main())


async def asked(ledger: Ledger) -> None:
    """Until somebody waits for the ledger."""
    await ledger.asked.wait()
    for _ in range(10):
        await asyncio.sleep(0)
