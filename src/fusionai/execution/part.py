"""Interface of one machine's part in one job, for training and serving alike.

`execution.training.member` implements it for training, `execution.serving.member` for serving. `peer.door` opens parts
for drivers that show a ticket; `execution.links.connections` holds the driver's own part."""

from __future__ import annotations

from typing import Literal, Protocol

from fusionai.primitives.ids import PeerId
from fusionai.transport.interface import Channel
from fusionai.wire import messages as wire
from fusionai.wire.messages import Fence

Task = Literal["train", "serve"]


class Part(Protocol):
    """A machine's part in one job. Every `serve_...` method returns when its channel has ended."""

    @property
    def task(self) -> Task: ...

    @property
    def owner(self) -> PeerId:
        """Peer id of the driver."""
        ...

    @property
    def fence(self) -> Fence:
        """Highest fence received from the driver; messages of lower fences are refused."""
        ...

    @property
    def driven(self) -> bool:
        """Whether a driver's connection is being served."""
        ...

    @property
    def stages(self) -> tuple[int, ...]:
        """Numbers of the stages loaded here, ascending."""
        ...

    @property
    def snapshots(self) -> tuple[wire.SnapshotAt, ...]:
        """Complete snapshots kept here."""
        ...

    def admit(self, opened: Fence) -> bool:
        """Return whether a driver that opens the job with this fence may take over; later, lower fences are refused."""
        ...

    def check(self, peer: PeerId, opening: wire.OpenJob) -> None:
        """Raise `TrustError` for a peer that the owner's signed placement does not name."""
        ...

    async def serve_control(self, channel: Channel) -> bool:
        """Follow the driver's messages. Return True if the job is over here, False if this part waits for its driver to
        come back."""
        ...

    async def serve_state(self, channel: Channel) -> None:
        """Serve the driver's state connection."""
        ...

    async def serve_link(self, peer: PeerId, channel: Channel) -> None:
        """Serve the tensor connection of a neighbour that dialled this machine and passed `check`."""
        ...

    async def serve_snapshots(self, peer: PeerId, channel: Channel) -> None:
        """Serve the state connection of another member that passed `check`."""
        ...

    async def close(self) -> None:
        """End all work of this part. Does nothing if it is closed already."""
        ...
