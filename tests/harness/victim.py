"""A machine under attack: a daemon that lends little, and its worker, in a memory group of their own."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import AbstractAsyncContextManager, asynccontextmanager, contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

import psutil

from fusionai.transport.enrolment import load_membership
from harness.hostile_owner import HostileOwner
from harness.live_pool import LivePool, Process, fusion
from harness.memory_group import MemoryGroup, memory_group
from harness.patience import CEILING_S

log = logging.getLogger(__name__)

MIB = 2**20
LENT_BYTES = 128 * MIB
BESIDE_BYTES = 128 * MIB
"""What daemon and worker may take beyond what they had after an honest job and what is lent: buffers of connections,
the allocator's reserve."""


@dataclass(frozen=True)
class Victim:
    """A daemon that lends `LENT_BYTES`, and its worker. `honest`: an honest job of the kind `task`, which must work
    before and after each attack."""

    pool: LivePool
    daemon: psutil.Process
    worker: psutil.Process
    group: MemoryGroup | None
    task: Literal["train", "serve"]
    honest: Callable[[HostileOwner], Awaitable[None]]
    idle_bytes: int = 0

    def opened(self) -> AbstractAsyncContextManager[HostileOwner]:
        home = self.pool.directory / "attacker"
        return HostileOwner.opened(home, load_membership(home / "owner"), self.task)

    @asynccontextmanager
    async def attacked(self) -> AsyncIterator[HostileOwner]:
        """The attack is followed by an honest job on the same machine."""
        async with self.opened() as owner:
            if self.group is not None:
                self.group.begin()
            yield owner
            await self.honest(owner)
        self.lives()

    def lives(self) -> None:
        """Neither process was ended, and they never took more than they may."""
        assert self.daemon.is_running()
        assert self.daemon.children() == [self.worker], "the same worker"
        taken = (self.group.peak_bytes if self.group else self.resident_bytes()) - self.idle_bytes
        log.info(
            "%d MiB beyond the %d MiB of an idle daemon, with %d MiB lent",
            *(nbytes // MIB for nbytes in (taken, self.idle_bytes, LENT_BYTES)),
        )
        assert taken <= LENT_BYTES + BESIDE_BYTES

    def resident_bytes(self) -> int:
        return sum(one.memory_info().rss for one in (self.daemon, self.worker))


@contextmanager
def victim_of(
    directory: Path, task: Literal["train", "serve"], honest: Callable[[HostileOwner], Awaitable[None]]
) -> Iterator[Victim]:
    """A pool with the victim and a member that attacks it."""
    with LivePool(directory) as pool:
        attacker = fusion("join", pool.invite(), "--owner", "--home", directory / "attacker")
        assert attacker.code == 0, attacker.err
        with memory_group("fusionai-attacked") as group:
            if group is None:
                log.info("No memory group can be made here: the memory that is resident after each attack is compared.")
            daemon = Process(
                *("join", pool.invite(), "--home", directory / "victim", "--host", "127.0.0.1", "--threads", "1"),
                *("--name", "victim", "--max-memory", f"{LENT_BYTES // MIB}MiB", "--device", "cpu"),
                program=("-m", "fusionai") if group is None else group.fusion,
            )
            daemon.wait_for("In pool")
            process = psutil.Process(daemon.process.pid)
            (worker,) = process.children()
            victim = Victim(pool, process, worker, group, task, honest)
            asyncio.run(_once(victim))
            idle_bytes = victim.resident_bytes() if group is None else group.used_bytes
            if group is not None:
                group.hold(idle_bytes + LENT_BYTES + BESIDE_BYTES)
            yield replace(victim, idle_bytes=idle_bytes)
            daemon.end()
            psutil.wait_procs([worker], timeout=CEILING_S)


async def _once(victim: Victim) -> None:
    async with victim.opened() as owner:
        await victim.honest(owner)
