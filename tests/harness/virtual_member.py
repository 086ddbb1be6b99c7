"""One process of a member: its stages, the snapshots it keeps, whom it hears. What `execution.training.member` does.

Neighbours: `harness.virtual_stage` is a stage in it, `harness.virtual_driver` commands it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from fusionai.coordination.round.interface import LinkBroken, MemberEnlisted
from fusionai.coordination.round.liveness import PING_S, Silence
from fusionai.coordination.training import interface
from fusionai.coordination.training import stage_interface as staging
from fusionai.coordination.training.stage import EVERY_STEP, StageMachine
from fusionai.wire.messages import Fence
from harness.network import Process, Stream
from harness.virtual_stage import Stage, Tensor

if TYPE_CHECKING:
    from harness.virtual_driver import Driver
    from harness.world import World

MOST_WHOLE = 2
"""Snapshots kept per stage."""


@dataclass(frozen=True, slots=True)
class Enlist:
    fence: Fence
    places: Mapping[int, str]
    guarding: frozenset[int]
    cut: str


@dataclass(frozen=True, slots=True)
class Attach:
    stage: int
    attached: staging.Attached
    standby: str | None


@dataclass(frozen=True, slots=True)
class Snapshot:
    stage: int
    step: int
    watermark: int
    value: str


@dataclass(frozen=True, slots=True)
class Pass:
    """A holder is to send its snapshot to `peer`."""

    stage: int
    step: int
    peer: str


@dataclass(frozen=True, slots=True)
class Detach:
    fence: Fence


@dataclass(slots=True, eq=False)
class Member:
    """`clear` is for the broker's word, everything else comes from drivers."""

    world: World
    process: Process
    fence: Fence | None = None
    cut: str = ""
    places: Mapping[int, str] = field(default_factory=dict[int, str])
    guarding: frozenset[int] = frozenset()
    standbys: dict[int, str] = field(default_factory=dict[int, str])
    """Stage here -> who keeps its snapshots."""
    stages: dict[int, Stage] = field(default_factory=dict[int, Stage])
    snapshots: dict[tuple[int, int], str] = field(default_factory=dict[tuple[int, int], str])
    driver: Driver | None = None
    linked: dict[str, Process] = field(default_factory=dict[str, Process])
    """The other ends of open connections with members."""
    silence: Silence = field(default_factory=Silence)

    @property
    def name(self) -> str:
        return self.process.name

    @property
    def holds_anything(self) -> bool:
        return bool(self.stages or self.snapshots)

    # ---------------------------------------------------------------------------------------------------- arriving

    def receive(self, driver: Driver, fence: Fence, message: object) -> None:
        """From a driver."""
        match message:
            case Enlist():
                self._enlist(driver, message)
            case Detach():
                if self.fence is None or fence >= self.fence:
                    self.clear()
                    self.fence = fence
            case _ if fence != self.fence:
                self.world.stale += 1
            case Attach(stage=stage, attached=attached, standby=standby):
                if stage not in self.stages:
                    machine = StageMachine(self.world.topology.stage_shape(stage))
                    self.stages[stage] = Stage(self, stage, machine)
                self.standbys.pop(stage, None)
                if standby is not None:
                    self.standbys[stage] = standby
                self.stages[stage].receive(fence, attached)
            case Pass(stage=stage, step=step, peer=peer):
                value = self.snapshots[stage, step]
                self._to_member(peer, "snapshots", fence, Snapshot(stage, step, 0, value))
            case _:
                raise AssertionError(f"no message for a member: {message}")

    def _enlist(self, driver: Driver, message: Enlist) -> None:
        if self.fence is not None and message.fence <= self.fence:
            self.world.stale += 1
            return
        self.fence, self.places, self.guarding = message.fence, message.places, message.guarding
        self.driver = driver
        self.linked.clear()
        if message.cut != self.cut:
            self.cut = message.cut
            self.stages.clear()
            self.snapshots.clear()
        for number in [number for number in self.stages if message.places.get(number) != self.name]:
            if number in message.guarding:
                self.standbys.pop(number, None)  # at hand until there is a snapshot of it
            else:
                del self.stages[number]
        self._watch()
        self.to_driver(message.fence, "control", MemberEnlisted(self.name, frozenset(self.snapshots)))

    def from_member(self, sender: Process, fence: Fence, message: object) -> None:
        self.linked[sender.name] = sender
        match message:
            case Tensor(receiver=receiver):
                if receiver in self.stages:
                    self.stages[receiver].receive(fence, message)
            case Snapshot() if fence == self.fence and (message.stage in self.guarding or message.stage in self.stages):
                self._keep(message)
            case _:
                self.world.stale += 1

    def _keep(self, message: Snapshot) -> None:
        assert message.value == self.world.expected.states[message.step][message.stage], "not that state"
        self.snapshots[message.stage, message.step] = message.value
        mine = sorted(step for stage, step in self.snapshots if stage == message.stage)
        kept = [step for step in mine if message.watermark <= step <= message.step][-MOST_WHOLE:]
        for step in mine:
            if step not in kept:
                del self.snapshots[message.stage, step]
        assert self.fence is not None
        self.to_driver(self.fence, "control", interface.SnapshotStored(message.stage, message.step, self.name))
        if self.places[message.stage] != self.name:
            self.stages.pop(message.stage, None)
        elif message.stage in self.stages:
            self.stages[message.stage].offer_state()

    def dismiss(self) -> None:
        """The broker says that its part in the job has ended; a driver that knows nothing of it loses a member."""
        if self.driver is not None:
            self.world.network.cut(self.process, self.driver.process, members=False)
        self.clear()

    def clear(self) -> None:
        self.stages.clear()
        self.snapshots.clear()
        self.standbys.clear()
        self.linked.clear()
        self.places, self.guarding, self.driver = {}, frozenset(), None
        self._watch()

    # ----------------------------------------------------------------------------------------------------- sending

    def to_driver(self, fence: Fence, stream: Stream, message: object) -> None:
        driver = self.driver
        if driver is not None:
            if stream == "feed":
                self.linked[driver.process.name] = driver.process
            self.world.network.send(
                self.process, driver.process, stream, lambda: driver.receive(self.process, fence, message)
            )

    def to_stage(self, fence: Fence, tensor: Tensor) -> None:
        again = self.world.twice > 0 and tensor.mode == "train"
        self.world.twice -= again
        for _ in range(1 + again):
            self._to_member(self.places[tensor.receiver], "tensors", fence, tensor)

    def give_snapshot(self, stage: int, step: int, watermark: int, value: str) -> None:
        """In the background: a newer one may be under way to the same standby."""
        fence, standby = self.stages[stage].fence, self.standbys.get(stage)
        if standby is not None:
            self._to_member(standby, "snapshots", fence, Snapshot(stage, step, watermark, value))

    def _to_member(self, peer: str, stream: Stream, fence: Fence, message: object) -> None:
        target = self.world.members[peer]
        self.linked[peer] = target.process
        if not target.process.alive:
            self.world.network.work(self.process, lambda: self.link_lost(target.process))
        self.world.network.send(
            self.process, target.process, stream, lambda: target.from_member(self.process, fence, message)
        )

    def drop_own_snapshots(self, stage: int, watermark: int) -> None:
        """What a stage was promoted from, once its standby has something newer."""
        if watermark < EVERY_STEP and stage not in self.guarding:
            for key in [key for key in self.snapshots if key[0] == stage and key[1] < watermark]:
                del self.snapshots[key]

    # ---------------------------------------------------------------------------------------------------- watching

    def _watch(self) -> None:
        now_s = self.world.network.now_s
        neighbours = {
            self.places[other]
            for stage in self.stages
            if self.places[stage] == self.name
            for other in self.world.topology.neighbours(stage)
        } | set(self.standbys.values())
        for peer in self.silence.watched - neighbours:
            self.silence.forget(peer)
        for peer in sorted(neighbours - self.silence.watched - {self.name}):
            self.silence.watch(peer, now_s)

    def tick(self) -> None:
        """Pings go out and are answered, in virtual time."""
        now_s = self.world.network.now_s
        for peer in self.silence.watched:
            if self.world.network.reaches(self.process, self.world.members[peer].process):
                self.silence.heard(peer, now_s)
        for peer in self.silence.tick(now_s):
            target = self.world.members[peer].process
            self.linked[peer] = target
            self.world.network.cut(self.process, target, members=True)
        self._watch()
        self.world.network.timer(self.process, PING_S, self.tick)

    def link_lost(self, far: Process) -> None:
        if self.linked.get(far.name) is not far or self.fence is None:
            return
        del self.linked[far.name]
        if self.stages or self.guarding:
            self.to_driver(self.fence, "control", LinkBroken(self.name, far.name, "broke"))

    def check(self) -> None:
        for stage in self.stages.values():
            stage.check()
        if len(self.snapshots) <= MOST_WHOLE:
            return
        counts: dict[int, int] = {}
        for stage, _ in self.snapshots:
            counts[stage] = counts.get(stage, 0) + 1
        assert all(count <= MOST_WHOLE for count in counts.values()), f"{self.process} keeps {counts}"
