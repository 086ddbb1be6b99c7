"""One process that runs and standbys serving stages: what `execution.serving` does, with numbers for tensors.

Work is done in the order it came. Neighbours: `harness.virtual_serving_stage` computes, `harness.virtual_serving`
drives.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from fusionai.coordination.round.interface import LinkBroken, MemberEnlisted, StageFailure
from fusionai.coordination.serving import interface
from fusionai.coordination.serving.interface import ServingRoles
from fusionai.wire.base import Fence
from fusionai.wire.serving import Segment
from harness.network import Process, Stream
from harness.virtual_serving_stage import Missing, PagedStage, embedded

if TYPE_CHECKING:
    from harness.virtual_serving import World

TICK_S = 0.5
LINK_S = 4.0
"""A neighbour that can't be reached for so long is complained of."""


@dataclass(frozen=True, slots=True)
class Enlist:
    fence: Fence
    roles: ServingRoles


@dataclass(frozen=True, slots=True)
class Load:
    fence: Fence
    stage: int
    standby: bool
    fresh: bool


@dataclass(frozen=True, slots=True)
class Pass:
    """Of `hidden` kind are rebuilds: they end at stage `rebuild`."""

    fence: Fence
    number: int
    consumer: int
    segments: tuple[Segment, ...]
    values: tuple[int, ...]
    wanted: tuple[int, ...] = ()
    forget: tuple[int, ...] = ()
    rebuild: int = -1


@dataclass(frozen=True, slots=True)
class Rebuild:
    fence: Fence
    number: int
    source: int
    through: int
    segments: tuple[Segment, ...]


@dataclass(frozen=True, slots=True)
class Result:
    fence: Fence
    number: int
    values: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Detach:
    fence: Fence


class Member:
    """`loads_s`: how long weights take to get here. `fails`: so many of the next passes can't be computed."""

    def __init__(self, world: World, process: Process) -> None:
        self.world = world
        self.process = process
        self.fence: Fence | None = None
        self.roles: ServingRoles | None = None
        self.stages: dict[int, PagedStage] = {}
        self.weights: set[int] = set()
        self.fails = 0
        self.skewed = False
        """It computes other values than everybody else."""
        self._spoilt: tuple[Fence, int] | None = None
        """A rebuild of which a part failed: whatever else comes of it may go on from what is not there."""
        self.row_s = 0.0
        """A slow one: what each position of a pass takes, and whether it says meanwhile that it works."""
        self.says = True
        self._work: deque[tuple[Callable[[], None], Pass | None]] = deque()
        self._busy = False
        self._since_s = 0.0
        self._silent: dict[Process, float] = {}

    @property
    def name(self) -> str:
        return self.process.name

    # ---------------------------------------------------------------------------------------------------- messages

    def receive(self, sender: Process, message: object) -> None:
        match message:
            case Enlist():
                self._enlist(message)
            case Detach(fence):
                if self.fence is not None and fence >= self.fence:
                    self.fence = self.roles = None
                    self.stages.clear()
            case Load() | Pass() | Rebuild():
                if message.fence == self.fence:
                    self._queue(lambda: self._do(message), message if isinstance(message, Pass) else None)
            case _:
                raise AssertionError(message)

    def _enlist(self, message: Enlist) -> None:
        if self.fence is not None and message.fence <= self.fence:
            return
        self.fence, self.roles = message.fence, message.roles
        mine = set(self.roles.stages_of(self.name))
        for stage in [stage for stage in self.stages if stage not in mine]:
            del self.stages[stage]
        self._tell(MemberEnlisted(self.name, fence=message.fence))

    def _queue(self, action: Callable[[], None], computed: Pass | None) -> None:
        self._work.append((action, computed))
        if not self._busy:
            self._next()

    def _next(self) -> None:
        self._busy = bool(self._work)
        if not self._busy:
            return
        self._since_s = self.world.network.now_s
        computed = self._work[0][1]
        if self.row_s and computed is not None and computed.fence == self.fence:
            rows = sum(segment.length for segment in computed.segments)
            self.world.network.timer(self.process, self.row_s * rows, self._one)
        else:
            self.world.network.work(self.process, self._one)

    def _one(self) -> None:
        action, computed = self._work.popleft()
        if computed is not None and computed.fence == self.fence:
            taken_s = self.world.network.now_s - self._since_s
            self.world.machine.measured(computed.fence, computed.number, computed.consumer, taken_s)
        action()
        self._next()

    def _say(self) -> None:
        """As `execution.serving.member` does."""
        computed = self._work[0][1] if self._busy else None
        if self.says and computed is not None and self.fence is not None and self.roles is not None:
            busy_s = self.world.network.now_s - self._since_s
            number = computed.number
            if self.roles.places.get(computed.consumer) == self.name:
                self._tell(interface.StageWorking(self.name, computed.consumer, number, busy_s, fence=self.fence))

    def _do(self, message: Load | Pass | Rebuild) -> None:
        if message.fence != self.fence:
            return
        match message:
            case Load():
                self._load(message)
            case Pass():
                self._compute(message)
            case Rebuild():
                self._rebuild(message)

    # -------------------------------------------------------------------------------------------------------- work

    def _load(self, message: Load) -> None:
        assert self.roles is not None
        places = self.roles.standbys if message.standby else self.roles.places
        if places.get(message.stage) != self.name:
            why = "the round does not place it here"
            self._tell(StageFailure(message.stage, why, peer=self.name, fence=message.fence))
            self.world.told["misplaced"] += 1
            return
        if message.stage not in self.weights:
            loads_s = self.world.choose.choice((0.05, 0.3, 2.0))
            self.world.network.timer(self.process, loads_s, lambda: self._loaded(message))
        else:
            self._loaded(message)

    def _loaded(self, message: Load) -> None:
        if message.fence != self.fence or self.roles is None:
            return
        self.weights.add(message.stage)
        if message.standby:
            self._tell(interface.StandbyLoaded(self.name, message.stage, fence=message.fence))
            return
        if message.stage not in self.stages:
            self.stages[message.stage] = self.world.new_stage(message.stage)
        stage = self.stages[message.stage]
        if message.fresh and stage.fresh_in != message.fence:
            stage.fresh_in = message.fence
            stage.forget_all()
        cached = tuple(stage.cached.items())
        self._tell(interface.StageLoaded(self.name, message.stage, cached, fence=message.fence))

    def _compute(self, message: Pass) -> None:
        stage = self.stages[message.consumer]
        stage.forget(message.forget)
        if self._spoilt == (message.fence, message.number):
            return
        if self.fails > 0:
            self.fails -= 1
            failed = f"stage {message.consumer} was made to fail"
            if message.rebuild >= 0:
                self._spoilt = message.fence, message.number
            self._tell(interface.PassFailure(message.number, message.consumer, failed, fence=message.fence))
            return
        if stage.lacks(message.segments):
            assert self.world.triggers, f"{message} goes on from nothing, though nothing was struck"
            self._tell(
                interface.PassFailure(message.number, message.consumer, "what comes before failed", fence=message.fence)
            )
            return
        values = [embedded(value) for value in message.values] if message.consumer == 0 else list(message.values)
        if self.skewed:
            values = [value + 1 for value in values]
        outputs = tuple(stage.run(message.segments, values))
        if message.rebuild == message.consumer:
            for segment in message.segments:
                self._tell(
                    interface.CacheRebuilt(
                        message.number, segment.session, segment.start + segment.length, fence=message.fence
                    )
                )
        elif message.consumer == len(self.world.roles.places) - 1:
            self._tell(Result(message.fence, message.number, tuple(outputs[row] for row in message.wanted)))
        else:
            self.send_on(message, message.consumer + 1, outputs)

    def send_on(self, message: Pass, consumer: int, values: tuple[int, ...]) -> None:
        assert self.roles is not None
        onward = Pass(
            message.fence,
            message.number,
            consumer,
            message.segments,
            values,
            message.wanted,
            message.forget,
            message.rebuild,
        )
        self.world.post(self.process, self.roles.places[consumer], "tensors", onward)

    def _rebuild(self, message: Rebuild) -> None:
        """One pass for each segment."""
        stage = self.stages[message.source]
        for segment in message.segments:
            try:
                values = tuple(stage.recalled(segment))
            except Missing as error:
                self._tell(interface.PassFailure(message.number, message.source, str(error), fence=message.fence))
                return
            onward = Pass(message.fence, message.number, 0, (segment,), (), rebuild=message.through)
            self.send_on(onward, message.source + 1, values)

    # -------------------------------------------------------------------------------------------------------- links

    def link_lost(self, far: Process, stream: Stream) -> None:
        if stream == "control" or self.fence is None or self.roles is None:
            return
        if far.name in self.roles.places.values():
            self._tell(LinkBroken(self.name, far.name, "broke", fence=self.fence))

    def tick(self) -> None:
        """Complain of neighbours that can't be reached, for as long as they can't."""
        world = self.world
        world.network.timer(self.process, TICK_S, self.tick)
        self._say()
        if self.fence is None or self.roles is None:
            return
        mine = self.roles.stages_of(self.name)
        beside = {self.roles.places[s + d] for s in mine for d in (-1, 1) if s + d in self.roles.places} - {self.name}
        for peer in sorted(beside):
            far = world.members[peer].process
            if world.network.reaches(self.process, far):
                self._silent.pop(far, None)
            elif world.network.now_s - self._silent.setdefault(far, world.network.now_s) >= LINK_S:
                self._silent[far] = world.network.now_s
                self._tell(LinkBroken(self.name, peer, "silent", fence=self.fence))

    def _tell(self, message: object) -> None:
        self.world.answer(self.process, message)
