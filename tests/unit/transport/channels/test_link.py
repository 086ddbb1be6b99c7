"""Link measurement on a simulated link whose truth is known: latency and bandwidth on a virtual clock."""

from __future__ import annotations

import asyncio

import pytest

from fusionai.primitives.errors import WireError
from fusionai.primitives.ids import PeerId
from fusionai.transport.channels.link import LinkMeasurement, answer_probe, measure_link
from fusionai.transport.interface import Channel, Remote
from fusionai.wire.messages import MAX_PROBE_BYTES, Done, Hello
from harness.memory_transport import MemoryNetwork
from harness.virtual_clock import VirtualClock


async def answering(channel: Channel) -> None:
    while True:
        assert await answer_probe(channel, await channel.receive())


def measured(bandwidth_bytes_per_s: float, latency_s: float, *, opening_s: float = 0.0) -> LinkMeasurement:
    """`opening_s`: what the first large message takes besides."""
    clock = VirtualClock()
    left_s = [opening_s]

    async def delay(sender: Remote, receiver: Remote, nbytes: int) -> None:
        clock.advance(latency_s + nbytes / bandwidth_bytes_per_s + (left_s.pop() if left_s and nbytes > 10_000 else 0))

    async def main() -> LinkMeasurement:
        network = MemoryNetwork(delay=delay)
        listener = await network.transport(PeerId("b" * 52)).listen(answering, host="b", port=1)
        channel = await network.transport(PeerId("a" * 52)).dial(
            listener.addresses, expect=PeerId("b" * 52), stream="control"
        )
        result = await measure_link(channel, clock)
        await channel.close()
        await listener.close()
        return result

    return asyncio.run(main())


@pytest.mark.parametrize(
    ("bandwidth_bytes_per_s", "latency_s"), [(12.5e6, 0.01), (125e6, 0.0025), (1e6, 0.04), (1e9, 0.0001)]
)
def test_a_known_link_is_measured_right(bandwidth_bytes_per_s: float, latency_s: float):
    link = measured(bandwidth_bytes_per_s, latency_s)
    assert link.bandwidth_bytes_per_s == pytest.approx(bandwidth_bytes_per_s, rel=0.02)
    assert link.latency_s == pytest.approx(latency_s, rel=0.05, abs=1e-4)
    assert link.round_trip_s == 2 * link.latency_s


def test_a_slow_link_is_probed_briefly_and_a_fast_one_long_enough():
    assert measured(0.1e6, 0.1).probed_bytes == 256 * 2**10
    assert measured(1e10, 0.0).probed_bytes == MAX_PROBE_BYTES


def test_both_directions_are_measured():
    """A home's line: 20 Mbit/s up, 200 down."""
    clock = VirtualClock()

    async def delay(sender: Remote, receiver: Remote, nbytes: int) -> None:
        clock.advance(0.01 + nbytes / (2.5e6 if sender.peer == PeerId("a" * 52) else 25e6))

    async def main() -> LinkMeasurement:
        network = MemoryNetwork(delay=delay)
        listener = await network.transport(PeerId("b" * 52)).listen(answering, host="b", port=1)
        channel = await network.transport(PeerId("a" * 52)).dial(
            listener.addresses, expect=PeerId("b" * 52), stream="control"
        )
        return await measure_link(channel, clock, largest_probe_bytes=4 * 2**20, back=True)

    link = asyncio.run(main())
    assert link.bandwidth_bytes_per_s == pytest.approx(2.5e6, rel=0.05)
    assert link.back_bytes_per_s == pytest.approx(25e6, rel=0.1)
    assert measured(2.5e6, 0.01).back_bytes_per_s is None


def test_opening_the_window_is_not_taken_for_the_link():
    link = measured(2.5e6, 0.02, opening_s=0.15)
    assert link.bandwidth_bytes_per_s == pytest.approx(2.5e6, rel=0.02)


def test_another_answer_is_a_wire_error():
    async def main() -> None:
        async def wrong(channel: Channel) -> None:
            envelope = await channel.receive()
            await channel.send(Done())
            assert not await answer_probe(channel, envelope.__class__(Hello(), {}))
            await channel.receive()

        network = MemoryNetwork()
        listener = await network.transport(PeerId("b" * 52)).listen(wrong, host="b", port=1)
        channel = await network.transport(PeerId("a" * 52)).dial(
            listener.addresses, expect=PeerId("b" * 52), stream="control"
        )
        with pytest.raises(WireError, match="expected pong 0, got done"):
            await measure_link(channel, VirtualClock())
        await channel.close()
        await listener.close()

    asyncio.run(main())
