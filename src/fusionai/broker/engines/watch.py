"""Keeps the lease of a broker whose journal is in an engine, and ends outages of the engine.

Every `RENEW_S` the lease is renewed. During an outage the engine is tried every `RETRY_S` in a thread, so that the
broker goes on answering what needs no journal, and refuses the rest. The append that was in doubt is completed or
refused first when the engine answers again.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Final, Protocol

from fusionai.broker.engines.engine_journal import RENEW_S, EngineJournal
from fusionai.broker.engines.interface import JournalTaken
from fusionai.primitives.errors import FusionError, StorageError

RETRY_S: Final = 0.5


class Recovering(Protocol):
    """The broker, which goes on after an outage."""

    def resume(self, written: bool | None) -> None:
        """Complete what was in doubt: `written`, or not, or nothing was (None)."""
        ...

    def superseded(self, error: JournalTaken) -> None: ...


@dataclass
class EngineWatch:
    """Run `run` beside the broker, in its event loop."""

    journal: EngineJournal
    broker: Recovering
    notice: Callable[[str], None]
    _out: asyncio.Event = field(default_factory=asyncio.Event)

    async def run(self) -> None:
        loop = asyncio.get_running_loop()
        self.journal.on_outage = lambda: loop.call_soon_threadsafe(self._out.set)
        try:
            while True:
                try:
                    async with asyncio.timeout(RENEW_S):
                        await self._out.wait()
                except TimeoutError:
                    await self._renew()
                self._out.clear()
                if self.journal.outage:
                    await self._recover()
        except JournalTaken as error:
            self.broker.superseded(error)

    async def _renew(self) -> None:
        try:
            await asyncio.to_thread(self.journal.renew)
        except JournalTaken:
            raise
        except StorageError:
            pass  # the journal is in an outage now

    async def _recover(self) -> None:
        self.notice(
            f"The pool's journal can't be used: {self.journal.outage}. Requests that need it are refused; the broker "
            "tries again."
        )
        while True:
            try:
                written = await asyncio.to_thread(self.journal.recover)
            except JournalTaken:
                raise
            except FusionError:
                await asyncio.sleep(RETRY_S)
                continue
            self.broker.resume(written)
            self.notice(f"The pool's journal at {self.journal.name} is back.")
            return
