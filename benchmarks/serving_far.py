"""A pool whose machines are far away: peers on this one, each behind a proxy that delays every way.

With seven of them a token crosses eight ways: from the job owner through the peers and back. Part `hops` of
`serving.py`. Neighbours: `serving_speculation` and `serving_heads` guess over such ways.
"""

from __future__ import annotations

import sys
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, ExitStack, asynccontextmanager
from pathlib import Path
from typing import Final

from fusionai.client.pool.local_pool import LocalPeer, LocalPool
from fusionai.client.serving.serve import serving
from serving_streams import Figures, Say, one_stream, prompt, request, shown, streams

HARNESS: Final = Path(__file__).resolve().parent.parent / "tests"
HOP_S: Final = 0.025
HOP_PEERS: Final = 7
DELAYS_S: Final = (HOP_PEERS + 1) * HOP_S
STREAMS: Final = 8


@asynccontextmanager
async def far_pool(directory: Path, name: str, count: int = HOP_PEERS) -> AsyncIterator[LocalPool]:
    sys.path.insert(0, str(HARNESS))
    from harness.fault_proxy import FaultProxy, free_port

    with ExitStack() as proxies:
        peers: list[LocalPeer] = []
        for number in range(count):
            proxy = proxies.enter_context(FaultProxy())
            proxy.aim(port := free_port())
            proxy.delay(HOP_S)
            peers.append(LocalPeer(f"{name}{number}", port=port, address=proxy.address, memory_bytes=2_000_000_000))
        async with LocalPool(directory, peers, name=name) as pool:
            yield pool


async def hops_part(model: Path, home: Path, rounds: int, tokens: int, figures: Figures, say: Say) -> None:
    figures.goals |= {"eight_streams_to_one": ">= 6"}
    figures.facts |= {"ways": HOP_PEERS + 1, "way_s": HOP_S}
    async with AsyncExitStack() as stack:
        pool = await stack.enter_async_context(far_pool(home / "hops", "far"))
        asked = request(
            model, home / "hops-owner", weights="fp32", sessions=STREAMS, stages=HOP_PEERS, invitation=pool.invitation
        )
        served = await stack.enter_async_context(serving(asked, on_event=shown(say)))
        await streams(served, STREAMS, 4, 7)
        for number in range(1, rounds + 1):
            one = await one_stream(served, prompt(number, served.model.vocabulary), tokens)
            eight, _ = await streams(served, STREAMS, tokens, number)
            figures.note("eight_streams_to_one", eight / one.tokens_per_s)
            figures.note("token_time_to_delays", 1 / one.tokens_per_s / DELAYS_S)
            figures.end_round(number)
