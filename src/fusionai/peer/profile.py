"""The device profile with which a peer registers: measured speeds, lent memory, and links.

If the provider sets no memory limit, the peer lends what the device has free, less a reserve. Links to peers at the
same address are probed once, soon after registration, because two machines of one network do not need its uplink.
`execution.measurement` measures the device, `transport.channels.link` measures the link to the broker.
"""

from __future__ import annotations

import asyncio
import logging
import socket
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Final

import msgspec

from fusionai.backends.interface import DeviceReport
from fusionai.peer.lending import PeerOptions
from fusionai.primitives.clock import Clock
from fusionai.primitives.errors import FusionError, UsageError
from fusionai.primitives.ids import PeerId, short
from fusionai.primitives.units import format_bytes
from fusionai.scheduling.problem.types import Link, PeerProfile
from fusionai.transport.broker_addresses import BrokerAddresses
from fusionai.transport.channels.link import LinkMeasurement, measure_link
from fusionai.transport.interface import Channel, Transport
from fusionai.transport.peer_transport import PeerTransport
from fusionai.wire.messages import MAX_LINKS, LinkView, Near

log = logging.getLogger(__name__)

RESERVE_FRACTION: Final = 0.15
"""Fraction of the memory that stays free for the system, unless that is more than half of what is free."""
MEASURED: Final = (
    *(
        "backend",
        "backend_version",
        "device",
        "device_name",
        "threads",
        "fingerprint",
        "flops_per_s",
        "pace",
        "serving",
    ),
    *("memory_bandwidth_bytes_per_s", "attention_flops_per_s", "scratch_bytes_per_s"),
    *("host_copy_bytes_per_s", "launch_s"),
    *("unsupported_ops", "tasks", "weight_formats", "savings"),
)
"""Fields of a profile as the device's report has them."""
UNMEASURED: Final = Link(bandwidth_bytes_per_s=125e6, latency_s=0.0)


def lent_memory_bytes(report: DeviceReport, limit_bytes: int | None, parts: int = 1) -> int:
    """Return the memory to lend, where `parts` members lend equal parts of one device: what is free, less a reserve for
    the system, and at most the limit. Raises `UsageError` if the limit exceeds the device's memory."""
    spare_bytes = max(report.free_bytes - int(report.memory_bytes * RESERVE_FRACTION), report.free_bytes // 2)
    if limit_bytes is None:
        return spare_bytes // parts
    if limit_bytes > report.memory_bytes:
        raise UsageError(
            f"--max-memory is {format_bytes(limit_bytes)}, but {report.device} has {format_bytes(report.memory_bytes)}."
        )
    return min(limit_bytes, spare_bytes) // parts


async def measured_links(transport: Transport, broker: BrokerAddresses, clock: Clock) -> tuple[Link, Link]:
    """Return uplink and downlink, measured towards the broker, because many access links are asymmetric. If they can't
    be measured, `UNMEASURED` (1 Gbit/s)."""
    try:
        channel = await broker.dial(transport, stream="tensors")
        try:
            found = await measure_link(channel, clock, back=True)
        finally:
            await channel.close()
    except FusionError as error:  # registration waits for the broker
        log.warning("the link to the broker could not be measured: %s", error)
        return UNMEASURED, UNMEASURED
    back = found.bandwidth_bytes_per_s if found.back_bytes_per_s is None else found.back_bytes_per_s
    return (
        Link(bandwidth_bytes_per_s=found.bandwidth_bytes_per_s, latency_s=found.latency_s),
        Link(bandwidth_bytes_per_s=back, latency_s=found.latency_s),
    )


def make_profile(
    options: PeerOptions,
    peer: PeerId,
    report: DeviceReport,
    up: Link,
    down: Link,
    endorsements: tuple[bytes, ...] = (),
    isolation: tuple[str, ...] = (),
) -> PeerProfile:
    """Return the profile. `endorsements`: statements about this machine's key, signed by others. `isolation`: what
    protects this machine from the jobs."""
    measured = {name: getattr(report, name) for name in MEASURED}
    return PeerProfile(
        **measured,
        peer=peer,
        name=options.name or socket.gethostname(),
        parts=options.parts,
        memory_bytes=lent_memory_bytes(report, options.memory_limit_bytes, options.parts),
        share=options.share,
        uplink=_within(up, options.upload_limit_bytes_per_s),
        downlink=_within(down, options.download_limit_bytes_per_s),
        endorsements=endorsements,
        isolation=isolation,
    )


def _within(link: Link, limit_bytes_per_s: float | None) -> Link:
    """Return the link with at most the provider's limit."""
    if limit_bytes_per_s is None or link.bandwidth_bytes_per_s <= limit_bytes_per_s:
        return link
    return Link(bandwidth_bytes_per_s=limit_bytes_per_s, latency_s=link.latency_s)


SETTLING_S: Final = 1.0
"""Delay before probing, in seconds: machines that start together measure their speed first."""
TIMEOUT_S: Final = 5.0
"""Timeout for dialling a neighbour, in seconds. Routes within a network answer at once."""


@dataclass(kw_only=True)
class NearLinks:
    """Links to peers at the same address. `is_busy`: this machine works for a job, which a probe would disturb."""

    transport: PeerTransport
    clock: Clock
    is_busy: Callable[[], bool]
    _found: dict[str, LinkMeasurement] = field(default_factory=dict[str, LinkMeasurement])
    _looking: asyncio.Task[None] | None = None

    def look(self, near: Sequence[Near]) -> None:
        """Probe new peers in the background."""
        if self._looking is not None:
            self._looking.cancel()
        unknown = [one for one in near if one.peer not in self._found]
        self._looking = asyncio.create_task(self._look(unknown)) if unknown else None

    def among(self, links: Sequence[LinkView]) -> tuple[LinkView, ...]:
        """Return the open `links` with their probed bandwidths, then links that were only probed."""
        merged = [
            msgspec.structs.replace(link, probed_bytes_per_s=self._found[link.peer].bandwidth_bytes_per_s)
            if link.route == "lan" and link.peer in self._found
            else link
            for link in links
        ]
        open_now = {link.peer for link in links if link.route == "lan"}
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
                return  # probed after the next registration, or by the other peer
            try:
                found = await self._probed(one)
            except FusionError as error:
                log.info("%s is seen at the same address and can't be reached: %s", short(PeerId(one.peer)), error)
                continue
            if found is not None:
                self._found[one.peer] = found

    async def _probed(self, one: Near) -> LinkMeasurement | None:
        """Return the measurement; None if the route leaves the network."""
        channel: Channel = await self.transport.dial(
            one.addresses, expect=PeerId(one.peer), stream="tensors", timeout_s=TIMEOUT_S
        )
        try:
            if channel.route != "lan":
                return None
            return await measure_link(channel, self.clock)
        finally:
            await channel.close()
