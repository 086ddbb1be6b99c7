"""A serving job under attack: `client.serving.serve` in the test's own process on a pool of real peers, streams that go
on and on, and what blows against the peers did to them.

Knows who runs what and who is the standby of what (from the engine's status), when every token came, and which standby
was warm when a blow fell. Decides nothing about whom to strike, and when: that is for `harness.killer` and the test.

    async with besieging(pool, model, seed) as siege, siege.streams(8):
        await siege.recover(siege.strike(killer))
    print(siege.figures())

Neighbours: `harness.live_pool` has the processes, `harness.serving_siege_streams` the requests and what they should
have said, `harness.killer` the blows.
"""

from __future__ import annotations

import asyncio
import itertools
import statistics
import time
from collections.abc import AsyncIterator, Callable, Iterable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from fusionai.client.serving.job import ServeRequest
from fusionai.client.serving.serve import Served, ServeEvent, serving
from fusionai.scheduling.problem.types import Plan, ServingNeeds
from fusionai.serving import job as progress
from fusionai.serving.interface import Emitted, Finished, Generation, GenerationPaused, PromptRead, StageStatus
from harness.killer import Killer, Role, Target
from harness.live_pool import LivePool, Process
from harness.patience import CEILING_S
from harness.serving_siege_streams import CONTEXT, Ask, asked

PATIENCE_S: Final = CEILING_S
START_S: Final = 180.0
"""For a killed peer's next start: on a machine where everybody computes, torch alone takes a minute to load."""
LOOK_S: Final = 0.02
SESSIONS: Final = 12
NEEDS: Final = ServingNeeds(context_tokens=CONTEXT, sessions=SESSIONS, cache_tokens=SESSIONS * CONTEXT, pass_tokens=128)
TAIL_LINES: Final = 30
OWNER: Final = "job owner"


@dataclass(slots=True)
class Answer:
    """What one request was told. Times: seconds of `time.monotonic`."""

    ask: Ask
    tokens: list[int] = field(default_factory=list[int])
    came_at_s: list[float] = field(default_factory=list[float])
    held: list[tuple[float, GenerationPaused]] = field(default_factory=list[tuple[float, GenerationPaused]])
    end: Finished | None = None

    def gaps_s(self, since_s: float, until_s: float) -> list[float]:
        """Between two tokens, of the gaps that reach into this time."""
        times = self.came_at_s
        return [
            later - earlier for earlier, later in itertools.pairwise(times) if later > since_s and earlier < until_s
        ]


@dataclass(slots=True)
class Fall:
    """A blow against one peer and what it led to. Seconds count from the blow."""

    what: str
    name: str
    stages: tuple[int, ...]
    warm: bool
    """Whether each of its stages had a standby with the weights at hand."""
    hurried: bool
    """Whether it fell while the job was not yet past another."""
    at_s: float
    noticed_s: float | None = None
    """Until the streams were told."""
    flowing_s: float | None = None
    """Until every stream had a token again."""
    longest_gap_s: float = 0.0
    """Between two tokens of one stream."""


class ServingSiege:
    """Made by `besieging`. `answers`: of all requests so far, in the order they were made."""

    def __init__(self, pool: LivePool, seed: int) -> None:
        self.pool = pool
        self.seed = seed
        self.answers: list[Answer] = []
        self.falls: list[Fall] = []
        self.told: list[tuple[float, ServeEvent]] = []
        self.served: Served
        self._running: dict[int, Answer] = {}
        """By slot."""
        self._warm: set[tuple[int, str]] = set()
        self._listeners: list[asyncio.Task[None]] = []
        self._fallen: list[tuple[str, Process]] = []

    def hear(self, event: ServeEvent) -> None:
        self.told.append((time.monotonic(), event))
        match event:
            case progress.WeightsLoaded(stage=stage, peer=peer, standby=True):
                self._warm.add((stage, peer))
            case _:
                pass

    # ------------------------------------------------------------------------------------------------- the streams

    @asynccontextmanager
    async def streams(self, count: int) -> AsyncIterator[None]:
        """So many at a time: where one ends the next begins. At the end those under way may finish."""
        over = asyncio.Event()
        slots = [asyncio.create_task(self._slot(slot, over)) for slot in range(count)]
        watching = asyncio.create_task(_first_failure(slots))
        try:
            await self.until(lambda: len(self._running) == count, "streams begin")
            yield
            over.set()
            async with asyncio.timeout(PATIENCE_S):
                await asyncio.gather(*slots)
        finally:
            watching.cancel()
            for slot in slots:
                slot.cancel()
            await asyncio.gather(watching, *slots, return_exceptions=True)
            self._running.clear()

    async def _slot(self, slot: int, over: asyncio.Event) -> None:
        while not over.is_set():
            self._running[slot] = answer = Answer(asked(self.seed, len(self.answers)))
            self.answers.append(answer)
            await self.listen(answer)
            self._running.pop(slot)

    async def listen(self, answer: Answer, scope: str = "") -> None:
        ask = answer.ask
        generation = Generation(prompt=ask.prompt, max_tokens=ask.max_tokens, sampling=ask.sampling, scope=scope)
        async for event in self.served.engine.submit(generation):
            match event:
                case Emitted(index=index, token=token):
                    assert index == len(answer.tokens), f"token {index} came after {len(answer.tokens)} others"
                    answer.tokens.append(token)
                    answer.came_at_s.append(time.monotonic())
                case GenerationPaused():
                    answer.held.append((time.monotonic(), event))
                case Finished():
                    answer.end = event
                case PromptRead():
                    pass

    # ---------------------------------------------------------------------------------------------- who does what

    def stages(self) -> tuple[StageStatus, ...]:
        """Those that peers run."""
        return tuple(stage for stage in self.served.engine.status.stages if stage.name != OWNER)

    def is_warm(self, stage: StageStatus) -> bool:
        """Whether its standby has the weights."""
        ids = {name: peer for peer, name in self.served.names.items()}
        return bool(stage.spare) and (stage.stage, ids[stage.spare]) in self._warm

    def plans_since(self, since_s: float) -> list[Plan]:
        """That the job went over to."""
        return [
            event.plan for at_s, event in self.told if at_s > since_s and isinstance(event, progress.ServingPlanChanged)
        ]

    def census(self, *roles: Role) -> tuple[Target, ...]:
        """Peers that may be struck: those that run stages, those that stand by."""
        running: dict[str, int] = {stage.name: stage.stage for stage in reversed(self.stages())}
        found = [
            Target(Role.STAGE if name in running else Role.SPARE, process.process.pid, running.get(name, number))
            for number, (name, process) in enumerate(sorted(self.pool.members.items()))
            if process.lives
        ]
        return tuple(target for target in found if not roles or target.role in roles)

    async def until(self, condition: Callable[[], object], what: str, patience_s: float = PATIENCE_S) -> None:
        deadline_s = time.monotonic() + patience_s
        while not condition():
            if self.served.ended.done():
                self.served.ended.result()
            problems = [answer.end for answer in self.answers if answer.end and answer.end.reason == "failed"]
            assert not problems, problems
            assert time.monotonic() < deadline_s, f"not within {patience_s:g} s: {what}; {self.served.engine.status}"
            await asyncio.sleep(LOOK_S)

    async def guarded(self) -> None:
        """Until every stage has a warm standby."""
        await self.until(
            lambda: self.served.engine.status.state == "ready" and all(self.is_warm(one) for one in self.stages()),
            "every stage has a warm standby",
        )

    # ------------------------------------------------------------------------------------------------ blows and after

    def strike(self, killer: Killer, *roles: Role, name: str | None = None) -> Fall:
        """Whom of these, the killer's seed says, unless it shall be a certain one."""
        stages, at_s = self.stages(), time.monotonic()
        hurried = any(fall.flowing_s is None for fall in self.falls)
        there = self.census(*(roles or (Role.STAGE,)))
        if name is not None:
            there = tuple(one for one in there if one.pid == self.pool.members[name].process.pid)
        (blow,) = killer.strike(there)
        name = next(name for name, process in self.pool.members.items() if process.process.pid == blow.target.pid)
        mine = [stage for stage in stages if stage.name == name]
        warm = all(self.is_warm(one) for one in mine)
        fall = Fall(str(blow), name, tuple(one.stage for one in mine), warm, hurried, at_s)
        self.falls.append(fall)
        if blow.kind == "kill":
            self._fallen.append((name, self.pool.members.pop(name)))  # reaped later: that takes a while
        self._forget(name)
        return fall

    def _forget(self, name: str) -> None:
        """Whoever comes back standbys anew."""
        gone = {peer for peer, known in self.served.names.items() if known == name}
        self._warm = {(stage, peer) for stage, peer in self._warm if peer not in gone}

    async def recover(self, *falls: Fall) -> None:
        """Until somebody has their stages and every stream goes on. Where the job waits for a machine, the killed are
        started again at once, else when streams go on: nobody takes the takeover's cores away."""
        dead = {fall.name for fall in falls} - set(self.pool.members)
        await self.until(lambda: self._is_past(falls) or self._waits(falls), f"somebody takes the place of {dead}")
        if self._waits(falls):
            await self._revive_all(dead)
            dead = set()
            await self.until(lambda: self._is_past(falls), "the job goes on")
        past_s = time.monotonic()
        await self.until(lambda: self.flows_since(past_s), "every stream goes on")
        for fall in falls:
            self.judge(fall)
        await self._revive_all(dead)

    def _is_past(self, falls: Sequence[Fall]) -> bool:
        return self.served.engine.status.state == "ready" and all(self._is_noticed(fall) for fall in falls)

    def _waits(self, falls: Sequence[Fall]) -> bool:
        return self.served.engine.status.state == "waiting" and all(self._is_noticed(fall) for fall in falls)

    def _is_noticed(self, fall: Fall) -> bool:
        """Whether the engine told a fault of it since."""
        return any(
            isinstance(event, progress.Fault) and at_s > fall.at_s and fall.name in event.note.text.partition(":")[0]
            for at_s, event in reversed(self.told)
        )

    def flows_since(self, since_s: float) -> bool:
        """A stream that began since then counts when it has a token, too."""
        return all(answer.came_at_s and answer.came_at_s[-1] > since_s for answer in self._running.values())

    def judge(self, fall: Fall) -> None:
        """Now that every stream has gone on."""
        now_s = time.monotonic()
        met = [answer for answer in self.answers if answer.came_at_s and answer.came_at_s[-1] > fall.at_s]
        told = [at_s for answer in self.answers for at_s, _ in answer.held if at_s > fall.at_s]
        gaps = [(gap_s, answer) for answer in met for gap_s in answer.gaps_s(fall.at_s, now_s)]
        fall.noticed_s = min(told) - fall.at_s if told else None
        fall.flowing_s = now_s - fall.at_s
        fall.longest_gap_s = max((gap_s for gap_s, _ in gaps), default=0.0)

    async def _revive_all(self, names: Iterable[str]) -> None:
        await asyncio.gather(*(self.revive(name) for name in sorted(names)))

    async def revive(self, name: str) -> None:
        """The same peer again."""
        for fallen, process in self._fallen:
            if fallen == name:
                await asyncio.to_thread(process.end)
        process = self.pool.start(name)
        is_in = lambda: next((line for line in process.lines if "In pool" in line), None)  # noqa: E731
        said = await asyncio.to_thread(process.wait_until, is_in, START_S)
        assert said is not None, f"{name} did not come back within {START_S:g} s: {process.text}"

    # ---------------------------------------------------------------------------------------------------- the end

    def figures(self) -> dict[str, Any]:
        """Of all falls, seconds."""
        return {
            "falls": len(self.falls),
            "longest_gap_s": spread(fall.longest_gap_s for fall in self.falls),
            "longest_gap_with_warm_guard_s": spread(
                fall.longest_gap_s for fall in self.falls if fall.warm and not fall.hurried
            ),
            "longest_gap_of_others_s": spread(
                fall.longest_gap_s for fall in self.falls if not fall.warm or fall.hurried
            ),
            "noticed_s": spread(fall.noticed_s for fall in self.falls if fall.noticed_s is not None),
        }

    def tails(self) -> str:
        """The last lines of everybody's."""
        told = [f"{at_s:.3f} {event!r}"[:300] for at_s, event in self.told[-TAIL_LINES:]]
        for name, process in [*self._fallen, ("broker", self.pool.broker), *self.pool.members.items()]:
            told += [
                f"----- {name} (pid {process.process.pid})",
                *(line.rstrip() for line in process.lines[-TAIL_LINES:]),
            ]
        return "\n".join(told)

    def complaints(self) -> list[str]:
        """Lines that no peer should ever have to say."""
        everybody = [*self._fallen, ("broker", self.pool.broker), *self.pool.members.items()]
        return [
            f"{name}: {''.join(process.lines[number : number + 30])}"
            for name, process in everybody
            for number, line in enumerate(process.lines)
            if "Traceback" in line
        ]


@asynccontextmanager
async def besieging(
    pool: LivePool, model: Path, seed: int, *, stages: int, on_event: Callable[[ServeEvent], None] = lambda _: None
) -> AsyncIterator[ServingSiege]:
    """As a context: `model` is served and ready; a failure shows everybody's last words."""
    siege = ServingSiege(pool, seed)
    request = ServeRequest(
        model=str(model), needs=lambda _: NEEDS, home=pool.owner, device="cpu", threads=1, stages=stages
    )

    def hear(event: ServeEvent) -> None:
        siege.hear(event)
        on_event(event)

    try:
        async with asyncio.timeout(PATIENCE_S) as starting, serving(request, on_event=hear) as served:
            starting.reschedule(None)
            siege.served = served
            yield siege
        assert siege.complaints() == []
    except BaseException:
        print(siege.tails())  # noqa: T201 - what a failure is understood by
        raise


def spread(values: Iterable[float]) -> dict[str, float] | None:
    known = sorted(values)
    if not known:
        return None
    return {"count": len(known), "median": round(statistics.median(known), 3), "worst": round(known[-1], 3)}


async def _first_failure(slots: list[asyncio.Task[None]]) -> None:
    await asyncio.wait(slots, return_when=asyncio.FIRST_EXCEPTION)
