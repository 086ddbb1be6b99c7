"""A job's place in the pool's queue, on its owner's side: asks for it, shows it, waits for the job's turn, gives it up.

The broker decides (`coordination.broker.turns`). The owner asks every few seconds, which also shows the broker that it
is there. An owner that was killed finds its place again under the job's id; while the broker is away, the place is in
its journal. `client.pool.beginning` plans with the machines of a turn."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Final

from fusionai.client.pool.replanning import PoolReplanner
from fusionai.primitives.errors import FusionError, RefusedError, TransportError
from fusionai.primitives.units import format_seconds
from fusionai.scheduling.problem.embedding_and_head import middle
from fusionai.scheduling.problem.types import Problem
from fusionai.wire import messages as wire

ASK_S: Final = 3.0
"""Time between two questions for the job's place, in seconds (chosen)."""
LEAVE_S: Final = 5.0
"""Timeout for giving up the place, in seconds (chosen). Without an answer, the broker gives it up after a while."""


class LeftQueue(FusionError):
    """The job was taken out of the queue with `fusion stop`."""


@dataclass(frozen=True, slots=True)
class Waiting:
    """How a job waits if it finds no machines. `priority`: its priority class, empty: the pool's usual one. `stopped`
    is set when the job was asked to stop, `interrupted` when its owner's process was."""

    priority: str
    stopped: asyncio.Event
    interrupted: asyncio.Event = field(default_factory=asyncio.Event)


def least_machines(problem: Problem) -> tuple[int, int]:
    """Return the number of machines that a job needs at least, and the memory in bytes that they must lend together: no
    plan needs less. Whether a plan exists for given machines, the planner finds out."""
    chains = problem.replicas if isinstance(problem.replicas, int) else 1
    machines = max(1, (problem.stages or 1) * chains)
    if problem.offload_weights != "never":
        return machines, 0
    return machines, chains * sum(block.parameter_bytes for block in middle(problem))


@dataclass
class QueuedJob:
    """The place of one job. `note` receives a line when the place or what is waited for has changed."""

    replanner: PoolReplanner
    waiting: Waiting
    note: Callable[[str], None]
    machines: int
    memory_bytes: int
    excluded: tuple[str, ...] = ()
    _asked: bool = False
    _shown: str = ""

    async def turn(self) -> frozenset[str] | None:
        """Wait until it is the job's turn and return the machines that are kept for it; None if the job has machines
        already. Raises `LeftQueue`, `RefusedError`."""
        while True:
            try:
                found = await self._ask()
            except TransportError as error:
                self._show(f"queue: the broker can't be reached ({error.message.rstrip('.')}); it keeps the place")
            else:
                if found.place == 0:
                    return None
                if found.members:
                    self._show("queue: it is this job's turn")
                    return frozenset(found.members)
                self._show(sentence(found))
            with suppress(TimeoutError):
                async with asyncio.timeout(ASK_S):
                    await self.waiting.stopped.wait()
            if self.waiting.stopped.is_set():
                raise LeftQueue("the job was taken out of the queue with `fusion stop`.")

    async def leave(self) -> None:
        """Give the place up, if the job has one."""
        if not self._asked:
            return
        with suppress(FusionError, TimeoutError):
            async with asyncio.timeout(LEAVE_S):
                await self.replanner.pool.stop(self.replanner.job)

    async def _ask(self) -> wire.QueuePlace:
        job = self.replanner
        question = wire.QueueRequest(
            job=job.job,
            title=job.title,
            steps=job.steps,
            machines=self.machines,
            memory_bytes=self.memory_bytes,
            excluded=self.excluded[: wire.MAX_EXCLUDED],
            priority=self.waiting.priority,
            again=self._asked,
        )
        try:
            found = await job.pool.place(question)
        except RefusedError as error:
            if error.code == "unknown_job":
                raise LeftQueue("the job was taken out of the queue.") from error
            raise
        self._asked = True
        return found

    def _show(self, text: str) -> None:
        if text != self._shown:
            self._shown = text
            self.note(text)


def sentence(found: wire.QueuePlace) -> str:
    """Return the line about a job's place."""
    when = f"in about {format_seconds(found.expected_s)}" if found.expected_s else "not known"
    return f"queue: place {found.place} of {found.waiting}; {found.why}; its turn comes: {when}"
