"""One process of a simulated machine: its stages, each on the shipped `StageMachine`, and the snapshots it holds.

In a round, stages get every event: attach, resume, states, every replayed step with its inputs, gradients and update.
In steady steps a stage gets only the commits after which it may take a snapshot or stream its state, and the last
commit before a round; its own forwards and backwards are fast-forwarded.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Final

from fusionai.coordination.round.interface import DriverEvent, MemberEnlisted
from fusionai.coordination.training import interface
from fusionai.coordination.training import stage_interface as staging
from fusionai.coordination.training.interface import Roles
from fusionai.coordination.training.stage import EVERY_STEP, StageMachine, StagePhase
from fusionai.coordination.training.stage_interface import StageWork
from fusionai.scheduling.problem.types import Plan
from fusionai.simulator.step import FEED, SimulationError
from fusionai.simulator.world import World, shape_of
from fusionai.wire.messages import Fence

KEPT_SNAPSHOTS: Final = 2
"""Snapshots kept per stage."""


def norms_of(stage: int) -> Mapping[str, float]:
    """Return a stage's gradient norms. All norms together are the same for every cut."""
    return {"all": 1.0} if stage == 0 else {}


@dataclass(frozen=True, slots=True, kw_only=True)
class Attachment:
    """What the driver tells a member at the beginning of a round. `standbys`: those still connected. `committed`: the
    last commit of the round before and its fence."""

    fence: Fence
    plan: Plan
    roles: Roles
    standbys: Mapping[int, str]
    committed: tuple[Fence, staging.Committed] | None
    connected: Mapping[str, SimulatedMember]


@dataclass(slots=True, eq=False)
class SimulatedMember:
    """One start of a machine's process."""

    world: World
    name: str
    alive: bool = True
    frozen: bool = False
    stages: dict[int, SimulatedStage] = field(default_factory=lambda: dict[int, SimulatedStage]())
    snapshots: set[tuple[int, int]] = field(default_factory=set[tuple[int, int]])
    """(stage, step) of complete snapshots."""
    attachment: Attachment | None = None
    _backlog: list[Callable[[], None]] = field(default_factory=list[Callable[[], None]])

    @property
    def responds(self) -> bool:
        return self.alive and not self.frozen

    def run(self, action: Callable[[], None]) -> None:
        """Run what happens to this process: at once, when it wakes, or never if it has ended."""
        if self.frozen:
            self._backlog.append(action)
        elif self.alive:
            action()

    def wake(self) -> None:
        self.frozen = False
        backlog, self._backlog = self._backlog, []
        for action in backlog:
            self.run(action)

    def end(self) -> None:
        self.alive = self.frozen = False
        self._backlog.clear()
        self.clear()

    def clear(self) -> None:
        self.stages.clear()
        self.snapshots.clear()
        self.attachment = None

    def attach(self, attachment: Attachment) -> None:
        """Begin a round: drop stages that are elsewhere now, report snapshots, attach all stages."""
        before, roles = self.attachment, attachment.roles
        if before is not None and attachment.fence <= before.fence:
            return
        if before is not None and before.roles.partition != roles.partition:
            self.clear()
        self.attachment = attachment
        mine = roles.stages_of(self.name)
        for number in [number for number in self.stages if number not in mine]:
            if attachment.standbys.get(number) != self.name:  # a standby keeps the state until it has a snapshot
                del self.stages[number]
        enlisted = MemberEnlisted(self.name, frozenset(self.snapshots))
        self.world.report(self.name, attachment.fence, enlisted)
        for number in mine:
            if number not in self.stages:
                self.stages[number] = SimulatedStage(self, number, StageMachine(shape_of(attachment.plan, number)))
            has_standby = number in attachment.standbys
            every = attachment.plan.snapshot_every if has_standby else 0
            stage = self.stages[number]
            if attachment.committed is not None:
                stage.catch_up(*attachment.committed)
            stage.handle(staging.Attached(attachment.fence, retain=bool(attachment.standbys), snapshot_every=every))

    def pass_snapshot(self, fence: Fence, stage: int, step: int, peer: str) -> None:
        if self._at(fence) is not None:
            self._send_snapshot(stage, step, peer)

    def give_snapshot(self, stage: int, step: int) -> None:
        """Send the present state of a stage to its standby, beside other work."""
        attachment = self.attachment
        if attachment is not None and (standby := attachment.standbys.get(stage)) is not None:
            self._send_snapshot(stage, step, standby)

    def _send_snapshot(self, stage: int, step: int, peer: str) -> None:
        attachment = self.attachment
        assert attachment is not None, "a snapshot belongs to a round"
        receiver, placement = attachment.connected[peer], attachment.plan.stages[stage]
        costs = self.world.costs
        first = all(held != stage for held, _ in receiver.snapshots)
        size = costs.state_bytes(placement) if first else costs.snapshot_bytes(placement)

        def arrived() -> None:
            if self.alive:
                receiver.run(partial(receiver.keep_snapshot, attachment.fence, stage, step))

        self.world.send(self.name, peer, size, arrived)

    def keep_snapshot(self, fence: Fence, stage: int, step: int) -> None:
        attachment = self._at(fence)
        if attachment is None:
            return
        self.snapshots.add((stage, step))
        held = sorted(at for number, at in self.snapshots if number == stage)
        self.snapshots -= {(stage, at) for at in held[:-KEPT_SNAPSHOTS]}
        self.world.report(self.name, fence, interface.SnapshotStored(stage, step, self.name))
        if attachment.roles.places[stage] != self.name:
            self.stages.pop(stage, None)
        elif stage in self.stages:
            self.stages[stage].offer_state()

    def drop_own_snapshots(self, stage: int, watermark: int) -> None:
        """Drop the snapshot that a stage here was promoted from, once its standby has a newer one."""
        attachment = self.attachment
        if watermark < EVERY_STEP and attachment is not None and attachment.standbys.get(stage) != self.name:
            self.snapshots = {held for held in self.snapshots if held[0] != stage or held[1] >= watermark}

    def to_stage(self, fence: Fence, stage: int, event: staging.StageEvent) -> None:
        if self._at(fence) is not None:
            self.stages[stage].handle(event)

    def import_state(self, fence: Fence, stage: int, step: int) -> None:
        if self._at(fence) is not None and self.stages[stage].machine.expects_state:
            self.stages[stage].handle(staging.StateArrived(step))

    def _at(self, fence: Fence) -> Attachment | None:
        return self.attachment if self.attachment is not None and self.attachment.fence == fence else None


@dataclass(slots=True, eq=False)
class SimulatedStage:
    """One stage in a member's process."""

    member: SimulatedMember
    number: int
    machine: StageMachine
    replayed_s: float = 0.0
    """Seconds of replay since the last round began."""
    _awaited: int | None = None
    """Step of the snapshot to load."""

    def catch_up(self, fence: Fence, committed: staging.Committed) -> None:
        """Fast-forward a running stage to the end of a step whose work was not simulated, and commit the step."""
        machine, step = self.machine, committed.record.step
        if machine.phase is StagePhase.RUNNING and machine.accepts(fence) and machine.applied <= step:
            machine.applied = machine.prepared = step
            self.handle(committed)

    def handle(self, event: staging.StageEvent) -> None:
        if isinstance(event, staging.Attached):
            self.replayed_s, self._awaited = 0.0, None
        for command in self.machine.handle(event):
            self._perform(command)

    def offer_state(self) -> None:
        if self._awaited is not None and (self.number, self._awaited) in self.member.snapshots:
            step, self._awaited = self._awaited, None
            self.handle(staging.StateArrived(step))

    def _perform(self, command: staging.StageCommand) -> None:
        match command:
            case staging.Compute(work=work):
                self._compute(work)
            case staging.ReportStatus(applied=applied, prepared=prepared, retained_from=retained_from):
                self._report(interface.StageReported(self.number, applied, prepared, retained_from))
            case staging.ReportReady(applied=applied):
                self._report(interface.StageReady(self.number, applied))
            case staging.ReportPrepared(step=step):
                self._report(interface.StagePrepared(self.number, step, norms_of(self.number)))
            case staging.DropRetained(watermark=watermark):
                self.member.drop_own_snapshots(self.number, watermark)
            case staging.SendRetained(to=to, first=first, below=below):
                for step in range(first, below):
                    for stage in sorted(to):
                        self._to_stage(stage, step)
            case staging.LoadSnapshot(step=step):
                self._awaited = step
                self.offer_state()
            case staging.TakeSnapshot(step=step):
                self.member.give_snapshot(self.number, step)
            case staging.Refuse(reason=reason):
                raise SimulationError(f"a simulated stage refused an event: {reason}.")
            case staging.ReportApplied() | staging.DropSums() | staging.DropHeld():
                pass  # nothing of a tensor is kept here

    def _compute(self, work: StageWork) -> None:
        """Perform a piece of work. The compute time of a replayed step is that of its last piece, because neighbours
        that replay too work at the same time."""
        seconds = 0.0
        if work.kind == "norms" and self.machine.phase is StagePhase.REPLAYING:
            seconds = self.member.world.replay_s(self._attachment.plan, self.number)
            self.replayed_s += seconds
        if seconds > 0:
            self.member.world.agenda.after(seconds, partial(self.member.run, partial(self._finish, work)))
        else:
            self._finish(work)

    def _finish(self, work: StageWork) -> None:
        if self.member.stages.get(self.number) is not self:
            return
        machine, world = self.machine, self.member.world
        if work.kind == "forward" and machine.sends_to(self.number + 1, work.step):
            self._to_stage(self.number + 1, work.step)
        elif work.kind == "backward" and machine.sends_to(self.number - 1, work.step):
            self._to_stage(self.number - 1, work.step)
        elif work.kind == "export":
            placement = self._attachment.plan.stages[self.number]
            collected = partial(world.collect, self._fence, self.number, work.step)
            world.send(self.member.name, world.owner, world.costs.state_bytes(placement), collected)
        self.handle(staging.WorkDone(work))

    def _to_stage(self, stage: int, step: int) -> None:
        """Send a neighbour what it needs of this stage to replay a step."""
        attachment, fence = self._attachment, self._fence
        if stage not in attachment.roles.places or stage == FEED:
            return
        receiver = attachment.connected[attachment.roles.places[stage]]
        event = (
            staging.ForwardArrived("train", step, 0, self.number)
            if stage > self.number
            else staging.BackwardArrived(step, 0, self.number)
        )
        arrive = partial(receiver.run, partial(receiver.to_stage, fence, stage, event))
        self.member.world.send(self.member.name, receiver.name, 0.0, arrive)

    def _report(self, event: DriverEvent) -> None:
        self.member.world.report(self.member.name, self._fence, event)

    @property
    def _attachment(self) -> Attachment:
        assert self.member.attachment is not None, "an attached stage belongs to a round"
        return self.member.attachment

    @property
    def _fence(self) -> Fence:
        assert self.machine.fence is not None, "a stage works only under a fence"
        return self.machine.fence
