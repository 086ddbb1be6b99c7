"""What a machine brings to every job it takes part in: backend, compute thread, transport and limits.

The compute thread runs one piece of work at a time, within the share of the machine that the provider lends: with a
share of 50 % it rests as long as the last piece used the machine. Measuring and loading, which happen once, are not
followed by rests. Results are delivered before the rest.

`peer.daemon` and `client` build hosts; `execution.training.member` and `execution.serving.member` use them.
"""

from __future__ import annotations

import asyncio
import sys
import time
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field
from typing import TypeVar

from fusionai.backends.interface import Backend, WorksIn
from fusionai.backends.memory import keep_freed_memory, numpy_computes_alone
from fusionai.execution.memory_budget import MemoryBudget
from fusionai.ir.validate import GraphLimits
from fusionai.primitives.clock import Clock
from fusionai.primitives.errors import TrustError
from fusionai.primitives.ids import JobId, PeerId, short
from fusionai.storage.weight_store import WeightStore
from fusionai.transport.interface import Transport
from fusionai.transport.security.signed import Seal, verify_ticket


@dataclass(frozen=True, slots=True, kw_only=True)
class Host:
    """Resources of one machine. `memory_limit_bytes`: what the provider lends, for everything that jobs keep here; None
    on the job owner's own machine. `weights`: cache of served models' weights; None on a machine that does not serve
    other owners' models. `seal`: signs the placements of this machine's own jobs; None if it has no jobs."""

    peer: PeerId
    backend: Backend
    compute: ComputeThread
    transport: Transport
    fingerprint: str
    clock: Clock
    memory_limit_bytes: int | None = None
    host_memory_limit_bytes: int | None = None
    """Limit on tensors outside the device's memory; None if the device computes in the machine's own."""
    weights: WeightStore | None = None
    seal: Seal | None = None
    authority_key: bytes | None = None
    """Public key of the pool's broker, which signs tickets; None on a machine that is in no pool."""
    memory: MemoryBudget = field(init=False)
    """What all jobs' programs, tensors and snapshots draw on."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "memory", MemoryBudget(self.memory_limit_bytes, self.host_memory_limit_bytes))

    @property
    def graph_limits(self) -> GraphLimits:
        """Limits on the graphs of other owners' jobs; on the job owner's own machine the usual ones."""
        return GraphLimits() if self.memory_limit_bytes is None else GraphLimits.for_memory(self.memory_limit_bytes)

    def addresses_of(self, peer: PeerId, job: str, ticket: bytes) -> tuple[str, ...]:
        """Return where the broker says that another member of a job listens. A job's owner, who names the member, can
        choose no address. Raises `TrustError` for a ticket that the broker did not sign for `peer` and `job`."""
        if self.authority_key is None:
            raise TrustError(
                f"expected to dial members of a pool, got peer {short(peer)} on a machine that is in none."
            )
        return verify_ticket(
            ticket, self.authority_key, now_wall_s=self.clock.wall_s(), job=JobId(job), peer=peer
        ).addresses


T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Timed:
    """When a piece of work ran, on this machine's monotonic clock, in seconds. `end_s` includes the rest after the
    work, although that rest is still to come. `busy_s` is the work alone."""

    start_s: float
    end_s: float
    busy_s: float


Outcome = tuple[T, Timed] | Exception
"""Result of a piece of work, or the exception it raised."""


def _used_clock(works_in: WorksIn) -> Callable[[], float]:
    """Return the clock that measures how long a piece of work used the machine. On a processor it is CPU time: time
    taken by other programs is no reason to rest. On other devices and on Windows it is wall time, on Windows because
    CPU time has a resolution of only about 1/60 s there."""
    if sys.platform == "win32":
        return time.monotonic
    clocks: Mapping[WorksIn, Callable[[], float]] = {
        "caller": time.thread_time,
        "threads": time.process_time,
        "device": time.monotonic,
    }
    return clocks[works_in]


class ComputeThread:
    """Runs work in one thread. `share` in (0, 1]: the fraction of time that the provider lends."""

    def __init__(self, share: float = 1.0) -> None:
        self.share = share
        self.busy_s = 0.0
        """Seconds that pieces of work have taken so far, without rests."""
        self._used_s: Callable[[], float] = _used_clock("device")
        self._free_at_s = 0.0
        keep_freed_memory()
        numpy_computes_alone()
        self._executor = ThreadPoolExecutor(max_workers=1, thread_name_prefix="compute")

    def works_in(self, where: WorksIn, used_s: Callable[[], float] | None = None) -> None:
        """Set what does the work, from the next piece on. Until this is called, the whole duration of a piece counts.
        `used_s`: clock of the processor time that a worker process took; None: the work is done in this process."""
        self._used_s = _used_clock(where)
        if used_s is not None and where != "device" and sys.platform != "win32":
            self._used_s = used_s

    def run(self, work: Callable[[], T], *, rests: bool = True) -> asyncio.Future[tuple[T, Timed]]:
        """Run `work` in the compute thread after everything submitted earlier. It is submitted now, not when awaited.
        `rests`: False for what prepares and happens once, such as loading a stage. Rests after it would last minutes,
        and the job would wait for them."""
        return asyncio.get_running_loop().run_in_executor(self._executor, self._timed, work, rests)

    def submit(self, work: Callable[[], T], done: Callable[[Outcome[T]], None]) -> None:
        """Like `run`, with less overhead for callers that submit hundreds of times a second. `done` is called on the
        event loop, in its first turn after the work. It is not called for work that `close` cancelled."""
        loop = asyncio.get_running_loop()

        def piece() -> None:
            try:
                outcome: Outcome[T] = self._timed(work)
            except Exception as problem:  # noqa: BLE001 - the submitter gets the exception, as with `run`
                outcome = problem
            with suppress(RuntimeError):  # the event loop has ended meanwhile
                loop.call_soon_threadsafe(done, outcome)

        self._executor.submit(piece)

    def _timed(self, work: Callable[[], T], rests: bool = True) -> tuple[T, Timed]:
        rest_s = self._free_at_s - time.monotonic()
        if rest_s > 0:
            time.sleep(rest_s)
        start_s, used_s = time.monotonic(), self._used_s()
        try:
            result = work()
        finally:
            ran_until_s = time.monotonic()
            self.busy_s += ran_until_s - start_s
            used_s = min(ran_until_s - start_s, self._used_s() - used_s)
            self._free_at_s = ran_until_s + (used_s * (1 / self.share - 1) if rests else 0.0)
        return result, Timed(start_s, self._free_at_s, ran_until_s - start_s)

    def close(self) -> None:
        """Let the current piece finish and run no further ones."""
        self._executor.shutdown(wait=True, cancel_futures=True)
