"""What this machine can do, measured: the profile a peer registers with.

Decides how much memory is lent when the provider named no limit: what the device has free, less a reserve that keeps
the machine usable. Neighbours: `backends` measure the device, `transport.links` the way to the broker.
"""

from __future__ import annotations

import logging
import socket
from collections.abc import Sequence
from typing import Final

from fusionai.backends.interface import DeviceReport
from fusionai.peer.options import PeerOptions
from fusionai.primitives.clock import Clock
from fusionai.primitives.errors import FusionError, UsageError
from fusionai.primitives.ids import PeerId
from fusionai.primitives.units import format_bytes
from fusionai.scheduling.problem.types import Link, PeerProfile
from fusionai.transport.interface import Transport
from fusionai.transport.links import measure_link

log = logging.getLogger(__name__)

RESERVE_FRACTION: Final = 0.15
"""Kept for the machine's owner when no `--max-memory` is given."""
LARGEST_PROBE_BYTES: Final = 4 * 2**20
UNMEASURED: Final = Link(bandwidth_bytes_per_s=125e6, latency_s=0.0)


def lent_memory_bytes(report: DeviceReport, limit_bytes: int | None) -> int:
    """Raises `UsageError` when the provider wants to lend more than there is."""
    if limit_bytes is None:
        return int(report.memory_bytes * (1 - RESERVE_FRACTION))
    if limit_bytes > report.memory_bytes:
        raise UsageError(
            f"--max-memory is {format_bytes(limit_bytes)}, but {report.device} has {format_bytes(report.memory_bytes)}."
        )
    return limit_bytes


async def measured_links(transport: Transport, brokers: Sequence[str], clock: Clock) -> tuple[Link, Link]:
    """The access link as seen towards the broker, up and down: many homes have far more of one than of the other.
    Unmeasured links count as 1 Gbit/s and are said to be."""
    try:
        channel = await transport.dial(brokers, expect=None, stream="tensors")
        try:
            found = await measure_link(channel, clock, largest_probe_bytes=LARGEST_PROBE_BYTES, back=True)
        finally:
            await channel.close()
    except FusionError as error:  # a broker that goes away meanwhile is waited for when it comes to registering
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
) -> PeerProfile:
    """`endorsements`: what others have signed about this machine's key."""
    return PeerProfile(
        peer=peer,
        name=options.name or socket.gethostname(),
        backend=report.backend,
        backend_version=report.backend_version,
        device=report.device,
        device_name=report.device_name,
        flops_per_s=report.flops_per_s,
        memory_bandwidth_bytes_per_s=report.memory_bandwidth_bytes_per_s,
        pace=report.pace,
        serving=report.serving,
        attention_flops_per_s=report.attention_flops_per_s,
        scratch_bytes_per_s=report.scratch_bytes_per_s,
        unsupported_ops=report.unsupported_ops,
        tasks=report.tasks,
        weight_formats=report.weight_formats,
        savings=report.savings,
        memory_bytes=lent_memory_bytes(report, options.memory_limit_bytes),
        threads=report.threads,
        share=options.share,
        fingerprint=report.fingerprint,
        uplink=_within(up, options.upload_limit_bytes_per_s),
        downlink=_within(down, options.download_limit_bytes_per_s),
        endorsements=endorsements,
    )


def _within(link: Link, limit_bytes_per_s: float | None) -> Link:
    """What was measured may be a burst: a provider's limit is a limit."""
    if limit_bytes_per_s is None or link.bandwidth_bytes_per_s <= limit_bytes_per_s:
        return link
    return Link(bandwidth_bytes_per_s=limit_bytes_per_s, latency_s=link.latency_s)
