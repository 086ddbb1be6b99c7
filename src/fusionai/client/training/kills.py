"""Kills processes during a demo and measures how the job recovers.

`Striker.see` takes the run's events. When a step with a kill is partly done, the process gets SIGKILL. A peer is
restarted, and rejoins as a spare, once the job has recovered from its loss or waits for it; the broker is restarted at
once. The job itself does not know of the kills.

`client.pool.local_pool` owns the processes, `client.training.demo` combines the two.
"""

from __future__ import annotations

import asyncio
import re
from collections.abc import Callable, Coroutine, Sequence
from contextlib import suppress
from dataclasses import KW_ONLY, InitVar, dataclass, field
from pathlib import Path
from typing import Final, Literal

from fusionai.client.pool.local_pool import BROKER, LocalPool
from fusionai.client.pool.session import PoolSession
from fusionai.client.training.train import Planned, RunEvent
from fusionai.primitives.errors import FusionError, UsageError
from fusionai.scheduling.problem.types import Plan
from fusionai.storage.commits import read_commits
from fusionai.storage.rundir import RunDirectory
from fusionai.training import progress
from fusionai.transport.enrolment import load_membership
from fusionai.wire.messages import CommitRecord

INTO_STEP: Final = 0.4
"""Fraction of a step that passes before its kill (chosen), so that forward and backward passes are under way."""
LONGEST_DELAY_S: Final = 5.0
SHORTEST_RUN: Final = 8
"""Shortest run, in steps, in which the default kills happen (chosen)."""
ABSENCE_S: Final = 10.0
"""Longest time until a killed peer is restarted, in seconds (chosen), even if the job has not recovered."""
BROKER_PATIENCE_S: Final = 60.0
ASK_EVERY_S: Final = 0.05


@dataclass(frozen=True, slots=True)
class Kill:
    """A kill during `step` (counted from 1) of the peer of `stage` (counted from 0) or of the broker."""

    step: int
    stage: int | Literal["broker"]


@dataclass(frozen=True, slots=True)
class Killed:
    """Event: the process `name` got SIGKILL. `peer` is empty for the broker."""

    kill: Kill
    name: str
    peer: str


@dataclass(frozen=True, slots=True)
class PeerReturned:
    """Event: a killed process runs again. A peer is back in the pool, or the broker has its members back."""

    name: str
    peer: str


StrikeEvent = Killed | PeerReturned


@dataclass(slots=True)
class KillOutcome:
    """Result of a kill. Times are seconds since the kill; None if the event did not happen."""

    kill: Kill
    name: str
    peer: str
    at_s: float
    journal: tuple[CommitRecord, ...]
    """The steps committed at the time of the kill."""
    detected_s: float | None = None
    """Until the driver detected it; for the broker, until the job noticed its absence."""
    recovered_s: float | None = None
    """Until the next step was committed; for the broker, until all its members were registered again."""
    takeover: str | None = None
    """Name of the peer that holds the stage afterwards."""
    exact: bool | None = None
    """Whether that peer's fingerprint promises the same bits."""
    first_commit_s: float | None = None
    """Until the first commit of any step. Counts as recovery if the kill was never detected."""
    past: asyncio.Event = field(default_factory=asyncio.Event)
    """Set when the peer may be restarted."""


BROKER_STAGE: Final[Literal["broker"]] = "broker"


def parse_kill(text: str) -> Kill:
    """Parse `STEP:STAGE` or `STEP:broker`. Raises `UsageError`."""
    found = re.fullmatch(r"\s*(\d{1,9})\s*:\s*(?:(\d{1,4})|(broker))\s*", text)
    if found is None:
        raise UsageError(
            f"--kill: expected STEP:STAGE, such as 7:2 or 7:broker, got {text!r}.", hint="`none` kills nothing."
        )
    step, stage, _ = found.groups()
    return Kill(int(step), BROKER_STAGE if stage is None else int(stage))


def check_kills(kills: Sequence[Kill], *, steps: int, peers: int) -> None:
    """Raise `UsageError` for a kill that can't happen."""
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
    """Return the default kills: a stage, a second stage and the broker, after a quarter, half and three quarters of the
    steps. Without spares only the broker, because the job would wait for the killed peer; none in a short run."""
    if steps < SHORTEST_RUN:
        return ()
    broker = Kill(3 * steps // 4, BROKER_STAGE)
    if not spares:
        return (broker,)
    return (Kill(steps // 4, peers // 2), Kill(steps // 2, 0), broker)


@dataclass
class Striker:
    """Executes kills. `see` must get every event of the run; `close` ends it. `directory`: the job's. `on_event`
    receives the kills and restarts."""

    kills: InitVar[Sequence[Kill]]
    pool: LocalPool
    directory: Path
    _: KW_ONLY
    on_event: Callable[[StrikeEvent | progress.Warned], None]
    now_s: Callable[[], float]
    outcomes: list[KillOutcome] = field(default_factory=list[KillOutcome])
    _plan: Plan | None = None
    _usual_step_s: float = 0.0
    _tasks: set[asyncio.Task[None]] = field(default_factory=set[asyncio.Task[None]])

    def __post_init__(self, kills: Sequence[Kill]) -> None:
        self._left = list(kills)

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
                # The shortest step is taken as typical, because a step with a fault is longer.
                self._usual_step_s = min(self._usual_step_s or step_s, step_s)
                self._arm(record.step + 2, self._usual_step_s)
            case progress.FaultSeen():
                self._detected(event)
            case progress.JobWaiting():
                for outcome in self.outcomes:
                    outcome.past.set()
            case progress.BrokerAway():
                for outcome in self.outcomes:
                    if outcome.kill.stage == BROKER_STAGE and outcome.detected_s is None:
                        outcome.detected_s = self.now_s() - outcome.at_s
            case _:
                pass

    async def close(self) -> None:
        """End the kills after the run, and wait until all killed processes run again."""
        self._left.clear()
        for outcome in self.outcomes:
            outcome.past.set()
        while self._tasks:
            await asyncio.wait(self._tasks)
        for outcome in self.outcomes:
            if outcome.recovered_s is None and outcome.kill.stage != BROKER_STAGE:
                outcome.recovered_s = outcome.first_commit_s

    async def drop(self) -> None:
        """Cancel all kills and restarts at once."""
        for task in self._tasks:
            task.cancel()
        if self._tasks:
            await asyncio.wait(self._tasks)

    def lost_steps(self) -> int:
        """Return how many commits journalled at a kill are missing or different now. Raises `StorageError`."""
        if not self.outcomes:
            return 0
        now = {record.step: record for record in read_commits(RunDirectory(self.directory).journal)}
        return len(
            {record.step for outcome in self.outcomes for record in outcome.journal if now.get(record.step) != record}
        )

    def _committed(self) -> None:
        for outcome in self.outcomes:
            if outcome.kill.stage == BROKER_STAGE:
                continue
            after_s = self.now_s() - outcome.at_s
            if outcome.first_commit_s is None:
                outcome.first_commit_s = after_s
            if outcome.detected_s is not None and outcome.recovered_s is None:
                outcome.recovered_s = after_s
                outcome.past.set()

    def _detected(self, event: progress.FaultSeen) -> None:
        for outcome in self.outcomes:
            if outcome.detected_s is None and outcome.peer and outcome.peer == event.peer:
                outcome.detected_s = self.now_s() - outcome.at_s

    def _taken_over(self, plan: Plan) -> None:
        if self._plan is None:
            return
        for outcome in self.outcomes:
            stage = outcome.kill.stage
            if stage == BROKER_STAGE or outcome.recovered_s is not None:
                continue
            before, after = self._plan.stages[stage], plan.stages[stage]
            outcome.takeover = self.pool.names.get(after.peer, after.peer)
            outcome.exact = bool(after.fingerprint) and after.fingerprint == before.fingerprint

    def _arm(self, step: int, step_s: float) -> None:
        """Schedule the kills of `step`, which has begun."""
        for kill in [kill for kill in self._left if kill.step == step]:
            self._left.remove(kill)
            self._start(self._strike(kill, min(INTO_STEP * step_s, LONGEST_DELAY_S)))

    def _start(self, work: Coroutine[object, object, None]) -> None:
        async def strike() -> None:
            try:
                await work
            except FusionError as error:
                self.on_event(progress.Warned(f"demo: {error}"))

        task = asyncio.create_task(strike())
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        task.add_done_callback(lambda _: work.close())  # for a task that was cancelled before it began

    async def _strike(self, kill: Kill, delay_s: float) -> None:
        await asyncio.sleep(delay_s)
        assert self._plan is not None, "a step has begun, so there is a plan"
        peer = "" if kill.stage == BROKER_STAGE else self._plan.stages[kill.stage].peer
        name = self.pool.names[peer] if peer else BROKER
        outcome = KillOutcome(kill, name, peer, self.now_s(), ())
        dead = not self.pool.lives(name)
        # Two kills of one peer in the same step count as one, even if it was restarted before this task ran.
        together = any(other.peer == peer and (dead or other.kill.step == kill.step) for other in self.outcomes)
        self.outcomes.append(outcome)
        self.on_event(Killed(kill, name, peer))
        if not together:
            await self.pool.kill(name)
        outcome.journal = await asyncio.to_thread(read_commits, RunDirectory(self.directory).journal)
        if kill.stage == BROKER_STAGE:
            await self._bring_broker_back(outcome)
        elif not together:
            with suppress(TimeoutError):
                async with asyncio.timeout(ABSENCE_S):
                    await outcome.past.wait()
            await self.pool.start_again(name)
            self.on_event(PeerReturned(name, peer))

    async def _bring_broker_back(self, outcome: KillOutcome) -> None:
        assert self._plan is not None
        holders = {stage.peer for stage in self._plan.stages} & set(self.pool.names)
        await self.pool.start_again(BROKER)
        membership = load_membership(self.pool.broker_home)
        try:
            async with asyncio.timeout(BROKER_PATIENCE_S), PoolSession(membership, trust=None) as session:
                while True:
                    if holders <= {member.view.peer for member in await session.pool() if member.is_present}:
                        break
                    await asyncio.sleep(ASK_EVERY_S)
        except TimeoutError:
            raise FusionError("the broker was restarted, but its members did not reconnect to it.") from None
        outcome.recovered_s = self.now_s() - outcome.at_s
        self.on_event(PeerReturned(BROKER, ""))
