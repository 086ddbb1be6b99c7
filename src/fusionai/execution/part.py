"""One machine's part in one job, whatever the job does: what a door admits to and a driver's connections end in.

Names only. Implementations: `execution.member` trains, `execution.serving_member` serves. Neighbours: `peer.door` opens
parts for drivers that come with a ticket, `execution.connections` has the driver's own.
"""

from __future__ import annotations

from typing import Literal, Protocol

from fusionai.primitives.ids import PeerId
from fusionai.transport.interface import Channel
from fusionai.wire import messages as wire
from fusionai.wire.messages import Fence

Task = Literal["train", "serve"]


class Part(Protocol):
    """Every `serve_...` returns when its channel has ended."""

    @property
    def task(self) -> Task: ...

    @property
    def owner(self) -> PeerId:
        """The driver."""
        ...

    @property
    def fence(self) -> Fence:
        """The highest heard of from the driver; nothing below it is let in."""
        ...

    @property
    def driven(self) -> bool:
        """Whether a driver's connection is being served."""
        ...

    @property
    def stages(self) -> tuple[int, ...]:
        """Those at hand, ascending."""
        ...

    @property
    def snapshots(self) -> tuple[wire.SnapshotAt, ...]:
        """Whole ones kept here."""
        ...

    def admit(self, opened: Fence) -> bool:
        """Whether a driver that opens the job with this fence may take over; older ones may not from then on."""
        ...

    def check(self, peer: PeerId, opening: wire.OpenJob) -> None:
        """Raises `TrustError` for a peer that the owner's signed placement does not name."""
        ...

    async def serve_control(self, channel: Channel) -> bool:
        """Obey the driver. True if the job is over here; False if this part waits for its driver to come back."""
        ...

    async def serve_state(self, channel: Channel) -> None:
        """The driver's other connection."""
        ...

    async def serve_link(self, peer: PeerId, channel: Channel) -> None:
        """A neighbour dialled this machine, and passed `check`."""
        ...

    async def serve_snapshots(self, peer: PeerId, channel: Channel) -> None:
        """Another member's state connection; it passed `check`."""
        ...

    async def close(self) -> None:
        """End everything that works for this part. Harmless when done before."""
        ...
