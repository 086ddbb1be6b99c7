"""Copies the state of one step from a stage to its guard (the standby that keeps its snapshots) while other work goes
on.

The bytes are copied one chunk at a time as the network takes them; whatever remains is copied right before the state
changes (copy on apply). At most two snapshots wait; a third replaces the one that has not begun. A snapshot that can't
be sent is dropped, since the next follows after `snapshot_every` steps. Entries that never change (frozen weights,
constants) are in the first snapshot that a guard gets, and again only after a failure.

`execution.training.runtime` says when to copy, `execution.training.member` sends, and `execution.training.snapshots`
stores at the guard."""

from __future__ import annotations

import asyncio
import itertools
import logging
from collections import deque
from collections.abc import Awaitable, Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Final

from fusionai.backends.interface import StageProgram
from fusionai.execution.compute import ComputeThread
from fusionai.execution.state import chunks
from fusionai.primitives.errors import ExecutionError, FusionError
from fusionai.primitives.tensors import HostTensor

log = logging.getLogger(__name__)

Chunk = list[tuple[str, HostTensor]]
MAX_WAITING: Final = 2
"""Snapshots that may wait to be sent, the one being sent included."""
FAILURES_TOLD: Final = 2
"""Consecutive failed snapshots after which `on_failures` is called, because the retention line can't advance."""


@dataclass(frozen=True, slots=True)
class Entries:
    """Names of a state's entries. `fixed` ones never change, `moving` ones change with each step."""

    fixed: Sequence[str]
    moving: Sequence[str]


class StateCopy:
    """The state after `step`. `take` and `complete` run in the compute thread, so never while the state changes."""

    def __init__(self, step: int, program: StageProgram, entries: Entries) -> None:
        self.step = step
        self.rest_of: int | None = None
        """Step of the earlier snapshot that has the entries that never change."""
        self._program = program
        self._fixed = tuple(entries.fixed)
        self._pending: Iterator[Chunk] = chunks(self._named(entries.moving))
        self._copied: deque[Chunk] = deque()
        self._failure: str | None = None

    def take(self) -> Chunk | None:
        """Return the next chunk, None at the end. Raises `ExecutionError` if the state changed before it could be
        copied."""
        if self._failure is not None:
            raise ExecutionError(self._failure)
        found = self._copied.popleft() if self._copied else next(self._pending, None)
        if found is None and self.rest_of is None and self._fixed:
            fixed, self._fixed = self._fixed, ()
            self._pending = chunks(self._named(fixed))
            found = next(self._pending, None)
        return found

    def _named(self, names: Sequence[str]) -> Iterator[tuple[str, HostTensor]]:
        return (entry for name in names for entry in self._program.export_entries([name]))

    def complete(self) -> None:
        """Copy everything not yet taken, because the state is about to change. A failure (no memory) must not fail the
        step; `take` reports it instead."""
        try:
            self._copied.extend(self._pending)
        except Exception as error:
            log.exception("the state of step %d could not be copied", self.step)
            self._failure = f"the state of step {self.step} could not be copied: {type(error).__name__}: {error}"
            self._copied.clear()


SendChunk = Callable[[StateCopy, int, Chunk | None], Awaitable[None]]
"""Called with (copy, part, chunk); chunk None marks the end. Raises `FusionError` if the guard can't be reached."""


class SnapshotCopier:
    """Sends a stage's snapshots to its guard. `on_failures` is called with the reason after `FAILURES_TOLD` consecutive
    snapshots failed."""

    def __init__(
        self,
        stage: int,
        program: StageProgram,
        entries: Entries,
        compute: ComputeThread,
        send: SendChunk,
        on_failures: Callable[[str], None],
    ) -> None:
        self._entries = entries
        self._whole: int | None = None
        """Step of the last snapshot that was sent whole under this fence, if none has failed since."""
        self._stage = stage
        self._program = program
        self._compute = compute
        self._send = send
        self._on_failures = on_failures
        self._waiting: deque[StateCopy] = deque()
        self._failures = 0
        self._sender: asyncio.Task[None] | None = None

    def begin(self, step: int) -> None:
        """Queue a snapshot of the present state, which is the state after `step`."""
        while len(self._waiting) >= MAX_WAITING:
            log.warning(
                "stage %d: skipped the snapshot of step %d, earlier ones wait", self._stage, self._waiting.pop().step
            )
        self._waiting.append(StateCopy(step, self._program, self._entries))
        if self._sender is None or self._sender.done():
            self._sender = asyncio.create_task(self._run())

    def complete(self) -> None:
        """Copy what still waits. Runs in the compute thread, before the state changes."""
        for copy in list(self._waiting):
            copy.complete()

    def abandon(self) -> None:
        """Drop the waiting snapshots, because their fence is no longer valid and no member would accept the rest."""
        self._waiting.clear()
        self._failures = 0
        self._whole = None

    async def _run(self) -> None:
        while self._waiting:
            copy = self._waiting[0]
            copy.rest_of, self._whole = self._whole, None
            try:
                if await self._send_all(copy):
                    self._whole = copy.step
                self._failures = 0
            except FusionError as error:
                self._count(copy, str(error))
            except Exception as error:  # not awaited: a failure must be counted to be noticed
                log.exception("stage %d: the snapshot of step %d failed", self._stage, copy.step)
                self._count(copy, f"{type(error).__name__}: {error}")
            if self._waiting and self._waiting[0] is copy:
                self._waiting.popleft()

    def _count(self, copy: StateCopy, reason: str) -> None:
        self._failures += 1
        level = logging.WARNING if self._failures <= FAILURES_TOLD else logging.DEBUG  # known by then
        log.log(level, "stage %d: the snapshot of step %d did not arrive: %s", self._stage, copy.step, reason)
        if self._failures == FAILURES_TOLD:
            self._on_failures(reason)

    async def _send_all(self, copy: StateCopy) -> bool:
        """Return whether the snapshot was sent whole."""
        for part in itertools.count():
            chunk, _ = await self._compute.run(copy.take)
            if not self._waiting or self._waiting[0] is not copy:
                return False
            await self._send(copy, part, chunk)
            if chunk is None:
                return bool(self._waiting) and self._waiting[0] is copy
        return False

    async def close(self) -> None:
        self.abandon()
        if self._sender is not None:
            self._sender.cancel()
            await asyncio.gather(self._sender, return_exceptions=True)
