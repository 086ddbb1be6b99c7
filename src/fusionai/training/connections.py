"""The driver's connections: control and state to every member, tensors through its own member.

Decides nothing. Dials, shows tickets, reads; whatever arrives goes to the driver's sink with the peer it came from.

Neighbours: `training.driver` uses it, `execution` provides links and the owner's own member.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Coroutine, Sequence
from contextlib import suppress

from fusionai.execution.links import open_job
from fusionai.execution.local import LocalChannel
from fusionai.execution.member import Host, JobMember
from fusionai.execution.outbox import Outbox
from fusionai.primitives.errors import FusionError, TransportError
from fusionai.primitives.ids import PeerId, short
from fusionai.primitives.tensors import HostTensor
from fusionai.training.job import TrainingJob
from fusionai.transport.interface import Channel
from fusionai.wire import messages as wire
from fusionai.wire.messages import Fence

log = logging.getLogger(__name__)

ControlSink = Callable[[PeerId, wire.Message], None]
LostSink = Callable[[PeerId, str], None]


class Connections:
    """Open with `open`, then `tell` stages; `close` detaches everybody."""

    def __init__(
        self, job: TrainingJob, host: Host, member: JobMember, *, on_message: ControlSink, on_lost: LostSink
    ) -> None:
        self._job = job
        self._host = host
        self._member = member
        self._on_message = on_message
        self._on_lost = on_lost
        self._control: dict[PeerId, Outbox] = {}
        self._state: dict[PeerId, Channel] = {}
        self._tasks: list[asyncio.Task[None]] = []
        self._closing = False

    @property
    def peers(self) -> tuple[PeerId, ...]:
        """Everybody who holds a stage, the owner included if it does."""
        return tuple(sorted({PeerId(placement.peer) for placement in self._job.plan.stages}))

    async def open(self, fence: Fence) -> None:
        """Raises what the first failing member raised."""
        opening = wire.OpenJob(job=self._job.job, fence=fence, ticket=self._job.tickets.get(self._host.peer, b""))
        neighbours = self._job.neighbours()
        self._member.know(neighbours)
        await asyncio.gather(*(self._open(peer, opening) for peer in self.peers))
        for neighbour in neighbours:
            self._member.dial(neighbour, opening)

    async def _open(self, peer: PeerId, opening: wire.OpenJob) -> None:
        if peer == self._host.peer:
            control, theirs = LocalChannel.pair(peer, "control")
            state, their_state = LocalChannel.pair(peer, "state")
            self._start(self._member.serve_control(theirs))
            self._start(self._member.serve_state(their_state))
        else:
            addresses = self._job.members[peer]
            control = await open_job(self._host.transport, addresses, peer, "control", opening)
            state = await open_job(self._host.transport, addresses, peer, "state", opening)
        self._control[peer] = Outbox(control, lambda reason: self._lost(peer, reason))
        self._state[peer] = state
        self._start(self._read(peer, control))

    async def _read(self, peer: PeerId, channel: Channel) -> None:
        try:
            while True:
                self._on_message(peer, (await channel.receive()).message)
        except FusionError as error:
            self._lost(peer, str(error))
        except Exception as error:  # whatever was received, the job must not wait for what nobody reads any more
            log.exception("the control connection to peer %s failed", short(peer))
            self._lost(peer, f"{type(error).__name__}: {error}")

    def tell(self, peer: PeerId, message: wire.Message, tensors: Sequence[HostTensor] = ()) -> None:
        self._control[peer].post(message, tensors)

    def state_channel(self, peer: PeerId) -> Channel:
        return self._state[peer]

    def _lost(self, peer: PeerId, reason: str) -> None:
        if not self._closing:
            self._on_lost(peer, reason)

    def _start(self, coroutine: Coroutine[object, object, None]) -> None:
        self._tasks.append(asyncio.create_task(coroutine))

    async def close(self, fence: Fence, reason: str) -> None:
        """Tell everybody to forget the job, flush, close."""
        self._closing = True
        for outbox in self._control.values():
            outbox.post(wire.Detach(fence=fence, reason=reason))
        for outbox in self._control.values():
            await outbox.close()
        for channel in self._state.values():
            with suppress(TransportError):
                await channel.close()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        await self._member.close()
