"""The connections of one listener: how long each may take to prove what it must, and how many may be there at once.

A connection passes three states. *Half open*: TLS and `Hello` are not over, or the other side is a stranger. *Guest*: a
member has proven its key and has shown nothing else. *Admitted*: the accept callback called `Channel.admit`, because it
saw a valid ticket, or because this is the broker and the caller is its member. Each state has caps and a deadline, so
that callers who prove nothing can't keep others out or fill the memory. `coordination.doorkeeping` decides who is
dropped; `channels.framed` holds the sizes of frames per state.
"""

from __future__ import annotations

import asyncio
import logging
import random
from collections import Counter
from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from typing import Final

from fusionai.coordination.doorkeeping import Caller, Crowd, CrowdCaps
from fusionai.primitives.errors import ChannelClosed, FusionError
from fusionai.primitives.ids import PeerId, short
from fusionai.transport.channels.framed import FramedChannel
from fusionai.transport.interface import Accept

_LOG: Final = logging.getLogger(__name__)
HALF_OPEN: Final = CrowdCaps(total=256, prefix=96, key=256)
"""Caps of half-open connections: of one prefix, as many as a large home, a class room or one computer with a pool of
tens of processes opens at the same moment."""
GUESTS: Final = CrowdCaps(total=128, prefix=64, key=8)
"""Caps of guests. Each may hold one probe in memory, 4 MiB, so that one key takes 32 MiB at most, one prefix 256 MiB.
An honest machine is a guest for one round trip, or for the seconds of a bandwidth measurement."""


@dataclass(frozen=True, slots=True, kw_only=True)
class AcceptLimits:
    """Limits of connections that are not admitted yet.

    `greeting_s`: time for TLS and `Hello` together. `stranger_s`: total time of a stranger. `guest_s`: time in which a
    member must be admitted, enough for a bandwidth measurement on a slow line. `half_open`, `guests`: caps of the two
    states. `of_key`: connections of one key, admitted or not, as many as a relay passes on for it; a job needs three at
    a time between two peers."""

    greeting_s: float = 5.0
    stranger_s: float = 20.0
    guest_s: float = 60.0
    half_open: CrowdCaps = HALF_OPEN
    guests: CrowdCaps = GUESTS
    of_key: int = 64


class AcceptedTasks:
    """Tasks of one listener, one for each connection. `errors`: exceptions by which a connection may fail besides the
    transport's own."""

    def __init__(self, accept: Accept, limits: AcceptLimits, errors: tuple[type[Exception], ...] = ()) -> None:
        self._accept = accept
        self._limits = limits
        self._errors = (OSError, FusionError, asyncio.CancelledError, *errors)
        draw = random.SystemRandom().random  # an attacker must not predict who is dropped
        self._half_open = Crowd[asyncio.Task[None]](limits.half_open, draw)
        self._guests = Crowd[asyncio.Task[None]](limits.guests, draw)
        self._channels: dict[asyncio.Task[None], FramedChannel | None] = {}
        """The channel of each task, None while it connects."""
        self._keys: Counter[PeerId] = Counter()

    @property
    def crowded(self) -> bool:
        """Whether the number of half-open connections is so high that some prefix may soon reach its cap."""
        return len(self._half_open) > self._limits.half_open.prefix // 2

    def start(self, work: Coroutine[None, None, None], prefix: str) -> None:
        """Start `serve`, or a coroutine that ends in it, as the task of a new connection. `prefix`: where it comes
        from (`coordination.doorkeeping.prefix_of`)."""
        task = asyncio.get_running_loop().create_task(work)
        self._channels[task] = None
        task.add_done_callback(self._ended)
        self._drop(self._half_open.enter(task, Caller(prefix)))

    def proven(self) -> None:
        """Stop counting the current task's connection as half open."""
        self._half_open.leave(_current())

    async def serve(self, connect: Callable[[], Coroutine[None, None, FramedChannel]], prefix: str) -> None:
        """Connect, wait for the handshake, then run the channel. Raises nothing but cancellation."""
        channel: FramedChannel | None = None
        try:
            async with asyncio.timeout(self._limits.greeting_s):
                channel = self._channels[_current()] = await connect()
                await channel.opened
        except self._errors as error:
            _LOG.debug("an incoming connection was rejected: %r", error)
            if channel is not None:
                if isinstance(error, FusionError):
                    # A refusal may still be in the send queue.
                    await channel.close()
                channel.abort()
            if isinstance(error, asyncio.CancelledError):
                raise
            return
        peer = channel.remote.peer
        if channel.remote.role == "stranger" or peer is None:
            await self._run(channel, self._limits.stranger_s)
            return
        if self._keys[peer] >= self._limits.of_key:
            _LOG.info("peer %s has %d connections; one more was dropped", short(peer), self._keys[peer])
            channel.abort()
            return
        self._keys[peer] += 1
        try:
            self.proven()
            self._drop(self._guests.enter(_current(), Caller(prefix, peer)))
            await self._run(channel, self._limits.guest_s)
        finally:
            self._keys[peer] -= 1
            if not self._keys[peer]:
                del self._keys[peer]

    async def close(self) -> None:
        """Cancel all tasks, which closes their channels."""
        tasks = [task for task in self._channels if task is not asyncio.current_task()]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _run(self, channel: FramedChannel, unadmitted_s: float) -> None:
        """Call `accept` and close the channel. It must be admitted within `unadmitted_s`."""
        task = _current()
        try:
            async with asyncio.timeout(unadmitted_s) as deadline:

                def admitted() -> None:
                    self._guests.leave(task)
                    deadline.reschedule(None)

                channel.on_admitted = admitted
                await self._accept(channel)
        except (ChannelClosed, TimeoutError) as error:
            _LOG.debug("a channel ended: %s", error)
        except FusionError as error:
            _LOG.info("a channel ended: %s", error)
        except Exception:  # noqa: BLE001 - one failing channel must not take the listener down
            _LOG.exception("a channel's task failed")
        finally:
            channel.on_admitted = None
            await channel.close()

    def _drop(self, task: asyncio.Task[None] | None) -> None:
        """End a connection that had to make room."""
        if task is None:
            return
        if (channel := self._channels.get(task)) is not None:
            channel.abort()
        task.cancel()

    def _ended(self, task: asyncio.Task[None]) -> None:
        del self._channels[task]
        self._half_open.leave(task)
        self._guests.leave(task)


def _current() -> asyncio.Task[None]:
    current = asyncio.current_task()
    assert current is not None, "a coroutine of this listener runs as a task"
    return current
