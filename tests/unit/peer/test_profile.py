"""What a peer's profile says of its link, whatever the broker does while it is measured."""

from __future__ import annotations

import asyncio
import re

import pytest

from fusionai.peer.profile import measured_link
from fusionai.primitives.clock import SystemClock
from fusionai.transport.interface import Channel
from fusionai.transport.links import answer_probe
from fusionai.transport.memory import MemoryNetwork
from harness.pool import peer_id


@pytest.mark.parametrize("answers", [0, 3, 8])
def test_a_broker_that_goes_away_while_the_link_is_measured_costs_no_more_than_the_figure(
    answers: int, caplog: pytest.LogCaptureFixture
):
    async def body() -> None:
        network = MemoryNetwork()

        async def leave(channel: Channel) -> None:
            for _ in range(answers):
                await answer_probe(channel, await channel.receive())
            await channel.close()

        broker = await network.transport(peer_id(0), "broker").listen(leave, host="broker", port=0)
        link = await measured_link(network.transport(peer_id(1)), broker.addresses, SystemClock())
        assert (link.bandwidth_bytes_per_s, link.latency_s) == (125e6, 0.0)

    asyncio.run(body())
    assert re.search("could not be measured: the .* clos", caplog.text)
