"""What a peer's profile says of its link, whatever the broker does while it is measured."""

from __future__ import annotations

import asyncio
import re
from dataclasses import replace
from pathlib import Path

import pytest

from fusionai.backends.interface import DeviceReport
from fusionai.peer.lending import PeerOptions
from fusionai.peer.profile import UNMEASURED, lent_memory_bytes, make_profile, measured_links
from fusionai.primitives.clock import SystemClock
from fusionai.primitives.errors import UsageError
from fusionai.scheduling.problem.types import Link
from fusionai.transport.broker_addresses import BrokerAddresses
from fusionai.transport.channels.link import answer_probe
from fusionai.transport.interface import Channel
from harness.memory_transport import MemoryNetwork
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
        links = await measured_links(network.transport(peer_id(1)), BrokerAddresses(broker.addresses), SystemClock())
        assert links == (UNMEASURED, UNMEASURED)

    asyncio.run(body())
    assert re.search("could not be measured: the .* clos", caplog.text)


GB = 10**9
REPORT = DeviceReport(
    backend="torch",
    backend_version="2",
    device="cpu",
    device_name="a cpu",
    flops_per_s=1e11,
    memory_bandwidth_bytes_per_s=1e10,
    memory_bytes=8 * 10**9,
    free_bytes=8 * 10**9,
    threads=1,
    fingerprint="f",
)


@pytest.mark.parametrize(
    ("upload", "download", "expected"), [(None, None, (1e7, 9e7)), (2.5e6, None, (2.5e6, 9e7)), (5e7, 1e6, (1e7, 1e6))]
)
def test_a_link_is_no_faster_than_its_provider_allows(
    upload: float | None, download: float | None, expected: tuple[float, float], tmp_path: Path
):
    options = PeerOptions(home=tmp_path, upload_limit_bytes_per_s=upload, download_limit_bytes_per_s=download)
    up, down = (Link(bandwidth_bytes_per_s=speed, latency_s=0.02) for speed in (1e7, 9e7))
    profile = make_profile(options, peer_id(1), REPORT, up, down)
    assert (profile.uplink.bandwidth_bytes_per_s, profile.downlink.bandwidth_bytes_per_s) == expected
    assert profile.uplink.latency_s == profile.downlink.latency_s == 0.02


@pytest.mark.parametrize(
    ("free", "most", "parts", "lent"),
    [
        (80, None, 1, 65),
        (80, None, 2, 32),
        (80, 20, 1, 20),
        (40, 90, 1, 25),
        (10, None, 1, 5),
    ],
    ids=["less a reserve", "two members", "as much as allowed", "no more than is free", "half of little"],
)
def test_what_is_lent_is_free(free: int, most: int | None, parts: int, lent: int):
    report = replace(REPORT, memory_bytes=100 * GB, free_bytes=free * GB)
    assert lent_memory_bytes(report, None if most is None else most * GB, parts) // GB == lent


def test_more_than_the_device_has_can_not_be_lent():
    with pytest.raises(UsageError, match="--max-memory is 9 GB"):
        lent_memory_bytes(REPORT, 9 * GB)
