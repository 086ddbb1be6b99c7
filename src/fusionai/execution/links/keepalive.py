"""One open connection between members, kept alive with pings and pongs.

The owner of the line reports arrivals to `coordination.round.liveness`, which decides about silence. Part of a frame
counts as a sign of life too, so a large tensor on a slow link is never mistaken for a dead peer.

`execution.links.peer_links` has one line per neighbour, `execution.links.carrier` one per receiver of snapshots.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Final

from fusionai.execution.links.outbox import Outbox
from fusionai.primitives.tensors import HostTensor
from fusionai.transport.interface import Channel, Envelope
from fusionai.wire import messages as wire

MAX_UNSENT_ANSWERS: Final = 16
"""Pongs that may wait unsent. A peer that does not read gets no more of them, since liveness needs only one."""


class Line:
    """One connection. `on_lost` is called at most once, with the reason, and never after `drop`."""

    def __init__(self, channel: Channel, on_lost: Callable[[Line, str], None] | None = None) -> None:
        self.channel = channel
        self.posted = False
        """Whether anything but pings and pongs was sent since the flag was last cleared."""
        self._told = False
        self._on_lost = on_lost
        self._outbox = Outbox(channel, self.lost)
        self._arrived_bytes = -1

    @property
    def usable(self) -> bool:
        return not self._told and not self._outbox.lost and not self.channel.closed

    def post(self, message: wire.Message, tensors: Sequence[HostTensor] = ()) -> None:
        self.posted = True
        self._outbox.post(message, tensors)

    async def receive(self) -> Envelope:
        """Return the next message other than a ping or pong. Raises what `Channel.receive` raises."""
        while True:
            envelope = await self.channel.receive()
            match envelope.message:
                case wire.Ping(sequence=sequence, sent_at_s=sent_at_s):
                    if self._outbox.waiting < MAX_UNSENT_ANSWERS:
                        self._outbox.post(wire.Pong(sequence=sequence, sent_at_s=sent_at_s))
                case wire.Pong():
                    pass
                case _:
                    return envelope

    def beat(self, now_s: float) -> bool:
        """Send a ping unless other messages already wait. Return whether anything arrived since the last call."""
        if self._outbox.waiting == 0:
            self._outbox.post(wire.Ping(sequence=0, sent_at_s=now_s))
        before, self._arrived_bytes = self._arrived_bytes, self.channel.stats.arrived_bytes
        return self._arrived_bytes != before

    def lost(self, reason: str) -> None:
        """End the line and report the reason, unless it has ended already."""
        if not self._told:
            self.drop()
            if self._on_lost is not None:
                self._on_lost(self, reason)

    def drop(self) -> None:
        """End the line without a report and discard what is queued."""
        self._told = True
        self._outbox.abandon()
        self.channel.abort()
