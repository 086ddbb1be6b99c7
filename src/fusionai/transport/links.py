"""Measures round trip and bandwidth of a link between two machines.

The asking side sends pings, then probes that double in size until one takes long enough to be timed well. This way a
slow link is not blocked for minutes and a fast link is not judged by its first packets.

The first probe only opens the sender's congestion window, which takes several round trips on a long path: 256 KiB at
20 Mbit/s and 40 ms look like 10 Mbit/s. Its timing is used only on a link so slow that the window no longer matters. A
probe must also last several round trips, because a shorter one measures how fast the window grows.

Any side of a channel may call `answer_probe`; the planner uses bandwidth and latency from the result.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Final

from fusionai.primitives.clock import Clock
from fusionai.primitives.errors import WireError
from fusionai.primitives.tensors import HostTensor, host_tensor
from fusionai.transport.interface import Channel, Envelope
from fusionai.wire.frame import describe
from fusionai.wire.messages import MAX_BACK_BYTES, Message, Ping, Pong, Probe, TensorHeader

FIRST_PROBE_BYTES: Final = 256 * 2**10
"""Size of the first probe in bytes."""
ENOUGH_ROUND_TRIPS: Final = 4
"""Round trips that a probe must last to measure the bandwidth."""
SLOW: Final = 4
"""The first probe suffices if it takes this many times longer than a probe must take."""


@dataclass(frozen=True, slots=True)
class LinkMeasurement:
    """Result of a measurement.

    `latency_s` is one way: half the fastest round trip. `bandwidth_bytes_per_s` is from this side to the other,
    `back_bytes_per_s` the opposite direction, None if it was not requested.
    """

    round_trip_s: float
    latency_s: float
    bandwidth_bytes_per_s: float
    probed_bytes: int
    back_bytes_per_s: float | None = None


async def measure_link(
    channel: Channel,
    clock: Clock,
    *,
    pings: int = 8,
    largest_probe_bytes: int = 32 * 2**20,
    enough_s: float = 0.25,
    back: bool = False,
) -> LinkMeasurement:
    """Measure a link. No other task may use `channel` meanwhile, and its other side must call `answer_probe`.

    Raises `ChannelClosed` if the link breaks, `WireError` if the other side answers with anything else.
    """
    asking = _Asking(channel, clock)
    round_trip_s = min([await asking.pinged() for _ in range(pings)])
    there = await _bandwidth(asking.sent, round_trip_s, largest_probe_bytes, enough_s)
    if not back:
        return LinkMeasurement(round_trip_s, round_trip_s / 2, *there)
    returned, _ = await _bandwidth(asking.fetched, round_trip_s, min(largest_probe_bytes, MAX_BACK_BYTES), enough_s)
    return LinkMeasurement(round_trip_s, round_trip_s / 2, *there, back_bytes_per_s=returned)


async def _bandwidth(
    carried: Callable[[int], Awaitable[float]], round_trip_s: float, largest_bytes: int, enough_s: float
) -> tuple[float, int]:
    """Return bytes per second and the size of the probe that was timed."""
    enough_s = max(enough_s, ENOUGH_ROUND_TRIPS * round_trip_s)
    size, is_open = min(FIRST_PROBE_BYTES, largest_bytes), False
    while True:
        took_s = await carried(size)
        is_long = took_s >= enough_s
        if (is_long and (is_open or took_s >= SLOW * enough_s)) or size >= largest_bytes:
            # The answer's way back is not part of the transfer. At least a tenth is kept, so that noise can't make it
            # zero.
            return size / max(took_s - round_trip_s, took_s / 10, 1e-9), size
        size, is_open = size if is_long else min(size * 2, largest_bytes), True


async def answer_probe(channel: Channel, envelope: Envelope) -> bool:
    """Answer a `Ping` or `Probe` and return True; ignore any other message and return False."""
    match envelope.message:
        case Ping(sequence=sequence, sent_at_s=sent_at_s):
            await channel.send(Pong(sequence=sequence, sent_at_s=sent_at_s))
        case Probe(sequence=sequence, sent_at_s=sent_at_s, back_bytes=size):
            named = _payload(size)
            await channel.send(Pong(sequence=sequence, sent_at_s=sent_at_s, tensors=_described(named)), named)
        case _:
            return False
    return True


class _Asking:
    """The asking side of a measurement. Times every question."""

    def __init__(self, channel: Channel, clock: Clock) -> None:
        self._channel = channel
        self._clock = clock
        self._sequence = 0

    async def pinged(self) -> float:
        return await self._ask(Ping(sequence=self._sequence, sent_at_s=self._clock.now_s()), (), 0)

    async def sent(self, size: int) -> float:
        named = _payload(size)
        probe = Probe(sequence=self._sequence, sent_at_s=self._clock.now_s(), tensors=_described(named))
        return await self._ask(probe, named, 0)

    async def fetched(self, size: int) -> float:
        return await self._ask(Probe(sequence=self._sequence, sent_at_s=self._clock.now_s(), back_bytes=size), (), size)

    async def _ask(self, message: Ping | Probe, tensors: tuple[HostTensor, ...], back_bytes: int) -> float:
        """Return the seconds from sending to the answer."""
        self._sequence += 1
        started_s = self._clock.now_s()
        await self._channel.send(message, tensors)
        envelope = await self._channel.receive()
        answer: Message = envelope.message
        if not isinstance(answer, Pong) or answer.sequence != message.sequence:
            raise WireError(f"expected pong {message.sequence}, got {answer.__struct_config__.tag}.")
        came = sum(tensor.nbytes for tensor in envelope.tensors.values())
        if came != back_bytes:
            raise WireError(f"expected {back_bytes} bytes with pong {message.sequence}, got {came}.")
        return self._clock.now_s() - started_s


def _payload(size: int) -> tuple[HostTensor, ...]:
    return (host_tensor("uint8", (size,), bytes(size)),) if size else ()


def _described(tensors: tuple[HostTensor, ...]) -> tuple[TensorHeader, ...]:
    return tuple(describe("probe", tensor) for tensor in tensors)
