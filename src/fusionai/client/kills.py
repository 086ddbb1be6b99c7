"""Kills on the way of a demo: which process dies during which step, and what became of it, measured.

`Striker.see` takes the run's events; when a step with a kill has begun and some of its work is under way, the process
gets SIGKILL. A peer is started again once the job is past its loss, or waits for it, and joins as a spare; the broker
at once. Decides moments and what counts as noticed, recovered and lost; the job knows nothing of any of it.

Neighbours: `client.local_pool` owns the processes, `client.demo` puts the two together.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Callable, Coroutine, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final, Literal

from fusionai.client.local_pool import BROKER, LocalPool
from fusionai.client.pool_session import PoolSession
from fusionai.client.train import Planned, RunEvent
from fusionai.primitives.errors import FusionError, UsageError
from fusionai.scheduling.types import Plan
from fusionai.storage.commits import read_commits
from fusionai.storage.rundir import RunDirectory
from fusionai.training import progress
from fusionai.transport.enrolment import load_membership
from fusionai.wire.messages import CommitRecord

INTO_STEP: Final = 0.4
"""The part of a step that passes before its kill: forward and backward of several microbatches are under way."""
LONGEST_DELAY_S: Final = 5.0
SHORTEST_RUN: Final = 8
"""Steps below which nothing is killed unless asked for."""
ABSENCE_S: Final = 10.0
"""A killed peer stays away until the job is past it, but no longer than this."""
BROKER_PATIENCE_S: Final = 60.0
ASK_EVERY_S: Final = 0.05
PRESENT: Final = ("idle", "active", "draining")


@dataclass(frozen=True, slots=True)
class Kill:
    """During `step`, counted from 1 as the terminal does. `stage` counts from 0."""

    step: int
    stage: int | Literal["broker"]


@dataclass(frozen=True, slots=True)
class Killed:
    """`name` got SIGKILL. `peer` is empty for the broker."""

    kill: Kill
    name: str
    peer: str


@dataclass(frozen=True, slots=True)
class Returned:
    """A killed process runs again: a peer is in the pool, the broker keeps it."""

    name: str
    peer: str


StrikeEvent = Killed | Returned


@dataclass(slots=True)
class Outcome:
    """What became of a kill. Times count from the kill; None: it never came to that."""

    kill: Kill
    name: str
    peer: str
    at_s: float
    journal: tuple[CommitRecord, ...]
    """The official steps when it happened."""
    detected_s: float | None = None
    """Until the driver saw it; of the broker, until the job missed it."""
    recovered_s: float | None = None
    """Until the next step was committed; of the broker, until it answered with all its members registered."""
    takeover: str | None = None
    """Who holds the stage afterwards."""
    exact: bool | None = None
    first_commit_s: float | None = None
    """Of any step; the one that counts where the kill was never noticed."""
    past: asyncio.Event = field(default_factory=asyncio.Event)
    """The peer may come back."""


BROKER_STAGE: Final[Literal["broker"]] = "broker"


def parse_kill(text: str) -> Kill:
    """`STEP:STAGE` or `STEP:broker`. Raises `UsageError`."""
    found = re.fullmatch(r"\s*(\d{1,9})\s*:\s*(?:(\d{1,4})|(broker))\s*", text)
    if found is None:
        raise UsageError(
            f"expected STEP:STAGE, such as 7:2 or 7:broker, got {text!r}.", hint="`none` alone kills nobody."
        )
    step, stage, _ = found.groups()
    return Kill(int(step), BROKER_STAGE if stage is None else int(stage))


def check_kills(kills: Sequence[Kill], *, steps: int, peers: int) -> None:
    """Raises `UsageError` for a kill that can't happen."""
    for kill in kills:
        if not 1 <= kill.step <= steps:
            raise UsageError(f"--kill {kill.step}:{kill.stage}: steps are numbered from 1 to {steps} (--steps).")
        if kill.stage != BROKER_STAGE and kill.stage >= peers:
            raise UsageError(
                f"--kill {kill.step}:{kill.stage}: stages are numbered from 0 to {peers - 1} (--peers is {peers})."
            )
    if len(set(kills)) != len(kills):
        raise UsageError("the same --kill is given twice.")


def usual_kills(*, steps: int, peers: int, spares: int) -> tuple[Kill, ...]:
    """A stage, a second stage and the broker, at a quarter, half and three quarters of the way. Without spares only the
    broker, for the job would wait for the same peer to come back; in a short run nobody."""
    if steps < SHORTEST_RUN:
        return ()
    broker = Kill(3 * steps // 4, BROKER_STAGE)
    if not spares:
        return (broker,)
    return (Kill(steps // 4, peers // 2), Kill(steps // 2, 0), broker)


class Striker:
    """`see` every event of the run; `close` at its end. `directory` is the job's; `on_event` is told what is done to
    whom."""

    def __init__(
        self,
        kills: Sequence[Kill],
        pool: LocalPool,
        directory: Path,
        *,
        on_event: Callable[[StrikeEvent | progress.Warned], None],
        now_s: Callable[[], float],
    ) -> None:
        self._left = list(kills)
        self._pool = pool
        self._directory = directory
        self._on_event = on_event
        self._now_s = now_s
        self._plan: Plan | None = None
        self._usual_step_s = 0.0
        self._tasks: set[asyncio.Task[None]] = set()
        self.outcomes: list[Outcome] = []

    def see(self, event: RunEvent) -> None:
        match event:
            case Planned(plan=plan):
                self._plan = plan
            case progress.PlanChanged(plan=plan):
                self._taken_over(plan)
                self._plan = plan
            case progress.JobReady(base=base):
                self._arm(base + 1, 0.0 if self._plan is None else self._plan.step_time_s)
            case progress.StepDone(record=record, replayed=False, step_s=step_s):
                self._committed()
                # A step with a fault in it is long, so the shortest is the measure.
                self._usual_step_s = min(self._usual_step_s or step_s, step_s)
                self._arm(record.step + 2, self._usual_step_s)
            case progress.FaultSeen():
                self._detected(event)
            case progress.Waiting():
                for outcome in self.outcomes:
                    outcome.past.set()
            case progress.BrokerAway():
                for outcome in self.outcomes:
                    if outcome.kill.stage == BROKER_STAGE and outcome.detected_s is None:
                        outcome.detected_s = self._now_s() - outcome.at_s
            case _:
                pass

    async def close(self) -> None:
        """The run is over: nobody is killed any more; who was, comes back first."""
        self._left.clear()
        for outcome in self.outcomes:
            outcome.past.set()
        while self._tasks:
            await asyncio.wait(self._tasks)
        for outcome in self.outcomes:
            if outcome.recovered_s is None and outcome.kill.stage != BROKER_STAGE:
                outcome.recovered_s = outcome.first_commit_s

    async def drop(self) -> None:
        """End at once."""
        for task in self._tasks:
            task.cancel()
        if self._tasks:
            await asyncio.wait(self._tasks)

    def lost_steps(self) -> int:
        """Commits journalled at a kill that are missing or different now. Raises `StorageError`."""
        if not self.outcomes:
            return 0
        now = {record.step: record for record in read_commits(RunDirectory(self._directory).journal)}
        return len(
            {record.step for outcome in self.outcomes for record in outcome.journal if now.get(record.step) != record}
        )

    # ---------------------------------------------------------------------------------------------- what is seen

    def _committed(self) -> None:
        for outcome in self.outcomes:
            if outcome.kill.stage == BROKER_STAGE:
                continue
            after_s = self._now_s() - outcome.at_s
            if outcome.first_commit_s is None:
                outcome.first_commit_s = after_s
            if outcome.detected_s is not None and outcome.recovered_s is None:
                outcome.recovered_s = after_s
                outcome.past.set()

    def _detected(self, event: progress.FaultSeen) -> None:
        for outcome in self.outcomes:
            if outcome.detected_s is None and outcome.peer and outcome.peer == event.peer:
                outcome.detected_s = self._now_s() - outcome.at_s

    def _taken_over(self, plan: Plan) -> None:
        if self._plan is None:
            return
        for outcome in self.outcomes:
            stage = outcome.kill.stage
            if stage == BROKER_STAGE or outcome.recovered_s is not None:
                continue
            before, after = self._plan.stages[stage], plan.stages[stage]
            outcome.takeover = self._pool.names.get(after.peer, after.peer)
            outcome.exact = bool(after.fingerprint) and after.fingerprint == before.fingerprint

    # --------------------------------------------------------------------------------------------- what is done

    def _arm(self, step: int, step_s: float) -> None:
        """`step` has begun."""
        for kill in [kill for kill in self._left if kill.step == step]:
            self._left.remove(kill)
            self._start(self._strike(kill, min(INTO_STEP * step_s, LONGEST_DELAY_S)))

    def _start(self, work: Coroutine[object, object, None]) -> None:
        async def told() -> None:
            try:
                await work
            except FusionError as error:
                self._on_event(progress.Warned(f"demo: {error}"))

        task = asyncio.create_task(told())
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        task.add_done_callback(lambda _: work.close())  # of a task that was cancelled before it began

    async def _strike(self, kill: Kill, delay_s: float) -> None:
        await asyncio.sleep(delay_s)
        assert self._plan is not None, "a step has begun, so there is a plan"
        peer = "" if kill.stage == BROKER_STAGE else self._plan.stages[kill.stage].peer
        name = self._pool.names[peer] if peer else BROKER
        outcome = Outcome(kill, name, peer, self._now_s(), ())
        dead = not self._pool.lives(name)
        # Of one step: it may be back already where this task was late.
        together = any(other.peer == peer and (dead or other.kill.step == kill.step) for other in self.outcomes)
        self.outcomes.append(outcome)
        self._on_event(Killed(kill, name, peer))
        if not together:
            await self._pool.kill(name)
        outcome.journal = await asyncio.to_thread(read_commits, RunDirectory(self._directory).journal)
        if kill.stage == BROKER_STAGE:
            await self._bring_broker_back(outcome)
        elif not together:
            with suppress(TimeoutError):
                async with asyncio.timeout(ABSENCE_S):
                    await outcome.past.wait()
            await self._pool.start_again(name)
            self._on_event(Returned(name, peer))

    async def _bring_broker_back(self, outcome: Outcome) -> None:
        assert self._plan is not None
        holders = {stage.peer for stage in self._plan.stages} & set(self._pool.names)
        await self._pool.start_again(BROKER)
        membership = load_membership(self._pool.broker_home)
        try:
            async with asyncio.timeout(BROKER_PATIENCE_S), PoolSession(membership, trust=None) as session:
                while True:
                    if holders <= {m.view.peer for m in await session.pool() if m.view.state in PRESENT}:
                        break
                    await asyncio.sleep(ASK_EVERY_S)
        except TimeoutError:
            raise FusionError("the broker was started again, but its members did not come back to it.") from None
        outcome.recovered_s = self._now_s() - outcome.at_s
        self._on_event(Returned(BROKER, ""))
