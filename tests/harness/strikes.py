"""Blows that fall on messages, never on moments: a job in one process runs, and at a certain message somebody dies.

Neighbours: `harness.pool` runs the job; the tests of faults say at which messages, and what must be the same after.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from fusionai.backends.torch.backend import TorchBackend
from fusionai.capture.capture import Captured
from fusionai.primitives.ids import PeerId
from fusionai.storage.commits import CommitJournal
from fusionai.training import progress
from fusionai.wire import messages as wire
from harness.pool import Job, MemoryPool, Run, peer_id

Seen = Callable[[wire.Message], bool]
Act = Callable[[MemoryPool, Job], None]


@dataclass
class Strike:
    """At the first message that `at` recognises, after `after` others like it, `act` happens."""

    at: Seen
    act: Act
    after: int = 0
    struck: int = 0

    def see(self, pool: MemoryPool, job: Job, message: wire.Message) -> None:
        if self.struck <= self.after and self.at(message):
            self.struck += 1
            if self.struck > self.after:
                self.act(pool, job)


def kills(*peers: int) -> Act:
    return lambda pool, job: pool.kill(*(peer_id(number) for number in peers))


def dies(*peers: int) -> Act:
    """The driver, and with it these peers."""

    def act(pool: MemoryPool, job: Job) -> None:
        pool.kill(*(peer_id(number) for number in peers))
        job.die()

    return act


def backend() -> TorchBackend:
    return TorchBackend(device="cpu", threads=1)


def struck_run(
    directory: Path,
    captured: Captured,
    strikes: Sequence[Strike],
    *,
    peers: int,
    starts: int = 1,
    then: Callable[[MemoryPool, progress.Progress], None] = lambda pool, event: None,
    **fields: Any,
) -> list[Run]:
    """`starts`: of the driver, one after the other; a strike ends each but the last. `then` hears what is told.
    `fields`: of `harness.pool.Job`. Every strike must have fallen."""

    async def body() -> list[Run]:
        async with MemoryPool(peers, backend) as pool:
            job = Job(pool=pool, directory=directory, graph=captured.graph, state=captured.state, **fields)

            def see(sender: PeerId, receiver: PeerId, message: wire.Message) -> None:
                for strike in strikes:
                    strike.see(pool, job, message)

            pool.on_message = see
            return [await job.run(on_event=lambda event: then(pool, event)) for _ in range(starts)]

    done = asyncio.run(body())
    for strike in strikes:
        assert strike.struck > strike.after, "the strike never fell"
    return done


def events(done: Run, kind: type) -> list[progress.Progress]:
    return [event for event in done.events if isinstance(event, kind)]


def assert_same(done: Run, undisturbed: Run, directory: Path, steps: int) -> None:
    """0 lost steps, every loss and every weight the same."""
    assert done.end is not None
    assert (done.end.failed, done.end.stopped, done.end.steps) == (None, None, steps)
    with CommitJournal(directory / "commits.sqlite") as journal:
        assert [record.loss for record in journal.records()] == undisturbed.losses
    one, other = done.weights(steps), undisturbed.weights(steps)
    assert one.keys() == other.keys()
    for name, value in one.items():
        np.testing.assert_array_equal(value, other[name], err_msg=name)
