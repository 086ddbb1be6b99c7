"""Measures a link between two machines: round trip and bandwidth. Decides how much to send to be sure enough.

The asking side sends pings, then probes that double in size until one takes long enough to be timed well, so that a
slow link is not blocked for minutes and a fast one is not judged by its first packets.
Neighbours: any side of a channel may `answer_probe`; the planner takes bandwidth and latency from the result.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from fusionai.primitives.clock import Clock
from fusionai.primitives.errors import WireError
from fusionai.primitives.tensors import host_tensor
from fusionai.transport.interface import Channel, Envelope
from fusionai.wire.frame import describe
from fusionai.wire.messages import Message, Ping, Pong, Probe

FIRST_PROBE_BYTES: Final = 256 * 2**10


@dataclass(frozen=True, slots=True)
class LinkMeasurement:
    """`latency_s` is one way: half the fastest round trip. `bandwidth_bytes_per_s` is from us to the other side."""

    round_trip_s: float
    latency_s: float
    bandwidth_bytes_per_s: float
    probed_bytes: int


async def measure_link(
    channel: Channel, clock: Clock, *, pings: int = 8, largest_probe_bytes: int = 32 * 2**20, enough_s: float = 0.25
) -> LinkMeasurement:
    """Over a channel nobody else uses meanwhile, whose other side calls `answer_probe`.

    Raises `ChannelClosed` when the link breaks, `WireError` when the other side answers something else.
    """
    round_trips_s = [
        await _ask(channel, clock, Ping(sequence=number, sent_at_s=clock.now_s()), b"") for number in range(pings)
    ]
    round_trip_s = min(round_trips_s)
    size, sequence = min(FIRST_PROBE_BYTES, largest_probe_bytes), pings
    while True:
        payload = bytes(size)
        header = describe("probe", host_tensor("uint8", (size,), payload))
        probe = Probe(sequence=sequence, sent_at_s=clock.now_s(), tensors=(header,))
        took_s = await _ask(channel, clock, probe, payload)
        if took_s >= enough_s or size >= largest_probe_bytes:
            # The answer's way back is no part of the transfer, but never let noise make it vanish.
            transfer_s = max(took_s - round_trip_s, took_s / 10, 1e-9)
            return LinkMeasurement(round_trip_s, round_trip_s / 2, size / transfer_s, size)
        size, sequence = min(size * 2, largest_probe_bytes), sequence + 1


async def answer_probe(channel: Channel, envelope: Envelope) -> bool:
    """Answer a `Ping` or `Probe`; False, and nothing done, for any other message."""
    match envelope.message:
        case Ping(sequence=sequence, sent_at_s=sent_at_s) | Probe(sequence=sequence, sent_at_s=sent_at_s):
            await channel.send(Pong(sequence=sequence, sent_at_s=sent_at_s))
            return True
        case _:
            return False


async def _ask(channel: Channel, clock: Clock, message: Ping | Probe, payload: bytes) -> float:
    """Seconds from sending to the answer."""
    started_s = clock.now_s()
    tensors = (host_tensor("uint8", (len(payload),), payload),) if isinstance(message, Probe) else ()
    await channel.send(message, tensors)
    answer: Message = (await channel.receive()).message
    if not isinstance(answer, Pong) or answer.sequence != message.sequence:
        raise WireError(f"expected pong {message.sequence}, got {answer.__struct_config__.tag}.")
    return clock.now_s() - started_s
