"""How fast the way is to peers on the same network: two machines of one home do not need the home's line.

Decides when a neighbour is probed: once, soon after this peer was taken in, one after the other, unless it works; and
that what goes another way than within the network is nobody's neighbour. Never decides who is asked: the broker
says who is seen at the same address, which behind a provider's router may be half a town.

Neighbours: `peer.registration` brings the broker's word and reports what was found; `client.pool.session` plans with
it."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Final

import msgspec

from fusionai.primitives.clock import Clock
from fusionai.primitives.errors import FusionError
from fusionai.primitives.ids import PeerId, short
from fusionai.transport.interface import Channel
from fusionai.transport.links import LinkMeasurement, measure_link
from fusionai.transport.peer_transport import PeerTransport
from fusionai.wire.messages import MAX_LINKS, LinkView, Near

log = logging.getLogger(__name__)

SETTLING_S: Final = 1.0
"""Machines that start together measure their speed first."""
TIMEOUT_S: Final = 5.0
"""To reach a neighbour; a way within a network answers at once."""
LARGEST_PROBE_BYTES: Final = 16 * 2**20


@dataclass(kw_only=True)
class NearLinks:
    """`is_busy`: whether this machine works for a job, which is not to be disturbed."""

    transport: PeerTransport
    clock: Clock
    is_busy: Callable[[], bool]
    _found: dict[str, LinkMeasurement] = field(default_factory=dict[str, LinkMeasurement])
    _looking: asyncio.Task[None] | None = None

    def look(self, near: Sequence[Near]) -> None:
        """Probe those who are new, in the background."""
        if self._looking is not None:
            self._looking.cancel()
        unknown = [one for one in near if one.peer not in self._found]
        self._looking = asyncio.create_task(self._look(unknown)) if unknown else None

    def among(self, links: Sequence[LinkView]) -> tuple[LinkView, ...]:
        """`links`, which there are now, with what was found of them; then those that were only probed."""
        merged = [
            msgspec.structs.replace(link, probed_bytes_per_s=self._found[link.peer].bandwidth_bytes_per_s)
            if link.way == "lan" and link.peer in self._found
            else link
            for link in links
        ]
        open_now = {link.peer for link in links if link.way == "lan"}
        merged += [
            LinkView(peer, "lan", 0, found.round_trip_s, probed_bytes_per_s=found.bandwidth_bytes_per_s)
            for peer, found in self._found.items()
            if peer not in open_now
        ]
        return tuple(merged[:MAX_LINKS])

    async def close(self) -> None:
        if self._looking is not None:
            self._looking.cancel()
            await asyncio.gather(self._looking, return_exceptions=True)

    async def _look(self, unknown: Sequence[Near]) -> None:
        await asyncio.sleep(SETTLING_S)
        for one in unknown:
            if self.is_busy():
                return  # when it is taken in again, or somebody else looks at it
            try:
                found = await self._probed(one)
            except FusionError as error:
                log.info("%s is seen at the same address and can't be reached: %s", short(PeerId(one.peer)), error)
                continue
            if found is not None:
                self._found[one.peer] = found

    async def _probed(self, one: Near) -> LinkMeasurement | None:
        """None where the way leaves the network."""
        channel: Channel = await self.transport.dial(
            one.addresses, expect=PeerId(one.peer), stream="tensors", timeout_s=TIMEOUT_S
        )
        try:
            if channel.way != "lan":
                return None
            return await measure_link(channel, self.clock, largest_probe_bytes=LARGEST_PROBE_BYTES)
        finally:
            await channel.close()
