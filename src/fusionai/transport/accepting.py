"""Runs the `accept` callback of a listener, one task per channel.

A channel ends with its task. Used by all listeners.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Coroutine

from fusionai.primitives.errors import ChannelClosed, FusionError
from fusionai.transport.framed import FramedChannel
from fusionai.transport.interface import Accept

_LOG = logging.getLogger(__name__)


class AcceptedTasks:
    """Tasks of one listener. `stranger_lifetime_s`: how long a side without a certificate may stay connected."""

    def __init__(self, accept: Accept, *, stranger_lifetime_s: float | None = None) -> None:
        self._accept = accept
        self._stranger_lifetime_s = stranger_lifetime_s
        self._tasks: set[asyncio.Task[None]] = set()

    def start(self, work: Coroutine[None, None, None]) -> asyncio.Task[None]:
        """Start `run`, or a coroutine that ends in it, as a task of this listener."""
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    async def close(self) -> None:
        """Cancel all tasks, which closes their channels."""
        tasks = [task for task in self._tasks if task is not asyncio.current_task()]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def run(self, channel: FramedChannel) -> None:
        """Wait for the handshake, call `accept`, close the channel. Raises nothing but cancellation."""
        try:
            await channel.opened
            lifetime_s = self._stranger_lifetime_s if channel.remote.role == "stranger" else None
            async with asyncio.timeout(lifetime_s):
                await self._accept(channel)
        except (ChannelClosed, TimeoutError) as error:
            _LOG.debug("a channel ended: %s", error)
        except FusionError as error:
            _LOG.info("a channel ended: %s", error)
        except Exception:  # noqa: BLE001 - one failing channel must not take the listener down
            _LOG.exception("a channel's task failed")
        finally:
            await channel.close()
