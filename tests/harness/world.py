"""A whole training job on the shipped machines, in virtual time and without a tensor, with faults where a test wants.

The shells perform the machines' commands as `execution`, `training` and `broker` do. After every event the invariants
are checked: no stage ahead of the journal, each step applied once and on exactly its sums, every state that of a run
without faults, credit kept, nothing held, retained, with a standby or in transit beyond its bound; nobody goes back to
a checkpoint while a snapshot could do; and the job ends.

Neighbours: `harness.topology` says what a job computes, `harness.network` moves time, `harness.course` makes up faults;
`harness.virtual_*` are the processes; `tests/property` runs it.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass

from fusionai.coordination.broker.events import Fact
from fusionai.coordination.round.interface import EndJob, LinkBroken, PeerLost, StageFailure, StopAsked
from fusionai.coordination.training import interface
from fusionai.coordination.training.evaluations import Evaluation, standing
from fusionai.coordination.training.state import DriverPhase
from fusionai.wire.messages import CommitRecord
from harness import topology as model
from harness.network import Network, Process, Stream
from harness.topology import Layout, Topology
from harness.virtual_broker import BEAT_S, BROKER, OWNER, Broker
from harness.virtual_driver import Driver
from harness.virtual_member import Member

EVENTS_AT_MOST = 300_000
LONGEST_S = 800.0
"""Virtual. A job that takes longer hangs; longer than a member's rest and every lease."""
LEFT_S = 5.0
"""A process told to leave that still holds a part of a job goes after this long."""


@dataclass(slots=True, eq=False)
class Trigger:
    """An action at the n-th event of a phase of the driver, once it is at `step`; in a chain also after another."""

    phase: DriverPhase
    step: int
    countdown: int
    action: Callable[[], None]
    after: Trigger | None = None
    pulled: bool = False


class World:
    """Journal, checkpoints, plan and the broker's facts outlive processes. `peers`: machines that lend themselves."""

    def __init__(
        self, topology: Topology, layout: Layout, seed: int, *, spares: tuple[str, ...] = (), any_order: bool = False
    ) -> None:
        self.topology = topology
        self.expected = model.reference(topology)
        self.choose = random.Random(seed)
        self.network = Network(self.choose, any_order=any_order)
        self.snapshot_every = layout.snapshot_every
        self.improving = True
        """Whether the driver looks for better plans by itself."""
        self.journal: list[CommitRecord] = []
        self.evaluations: list[Evaluation] = []
        self.best: int | None = None
        """What was told to be the best."""
        self.checkpoints: dict[int, dict[int, str]] = {}
        self.facts: list[Fact] = []
        self.incarnation = 0
        self.stale = 0
        """Messages dropped for their fence."""
        self.told: Counter[str] = Counter()
        self.struck: Counter[tuple[str, str]] = Counter()
        """(fault, driver's phase)."""
        self.most_retained = 0
        self.twice = 0
        """So many tensors of training to come arrive twice: sent again by somebody who could not know."""
        self.triggers: list[Trigger] = []
        self.made_to_fail = False
        self._processes = 0
        self._trouble: list[PeerLost | LinkBroken | StageFailure] = []
        """Since the job ran undisturbed; the plan of then; stages whose standbys had a snapshot newer than the
        checkpoint."""
        self._before = layout
        self._ran = False
        """Whether this driver has run the job."""
        self._covered: dict[int, Process] = {}
        self.members: dict[str, Member] = {}
        self.broker = self._new_broker()
        self.broker.enrol(OWNER)
        self.peers = tuple(sorted((layout.members - {OWNER}) | set(spares)))
        for peer in self.peers:
            self.broker.enrol(peer)
            self.boot(peer)
            self.broker.register(self.members[peer].process)
        owner = self._new_process(OWNER)
        version = self.broker.mint(owner, layout)
        assert version is not None
        self.plan: tuple[int, Layout] = (version, layout)
        self.driver = self._new_driver()
        self.driver.start()

    # ------------------------------------------------------------------------------------------------------ running

    def run(self) -> EndJob:
        """Until the job is done, driver after driver. Raises `AssertionError` where anything goes wrong."""
        for _ in range(EVENTS_AT_MOST):
            ended = self.driver.ended
            if ended is not None:
                if ended.failed is None and ended.stopped is None:
                    self._check_result()
                    return ended
                assert ended.failed is None or self.made_to_fail, ended.failed
                self.restart_driver()
            assert self.network.advance(), f"nothing can happen any more: {self.stories()}"
            assert self.network.now_s < LONGEST_S, f"it hangs: {self.stories()}"
            self._check()
            self._pull()
        raise AssertionError(f"the job did not come to an end: {self.stories()}")

    def _pull(self) -> None:
        phase, step = self.driver.phase, len(self.journal)
        for trigger in self.triggers:
            armed = trigger.after is None or trigger.after.pulled
            if trigger.phase is phase and not trigger.pulled and armed and step >= trigger.step:
                trigger.countdown -= 1
                if trigger.countdown <= 0:
                    trigger.pulled = True
                    trigger.action()

    def _check(self) -> None:
        for member in self.members.values():
            member.check()
        topology = self.topology
        # A tensor per microbatch under way and direction, what a replay streams, a few words of control: never more.
        replayed = (2 * self.snapshot_every + 1) * topology.microbatches * 3
        bound = 2 * topology.feed_window + 2 * topology.evaluations + replayed + 30
        assert self.network.ever_in_transit <= bound, f"{self.network.ever_in_transit} on one channel, not {bound}"

    def _check_result(self) -> None:
        steps = [(record.loss, record.scale, record.norms_hash) for record in self.journal]
        number = self.expected.ends
        assert steps == [(step.loss, step.scale, step.norms_hash) for step in self.expected.steps[:number]]
        assert [record.step for record in self.journal] == list(range(number))
        final = self.expected.states[number]
        assert self.checkpoints[number] == dict(enumerate(final))
        if self.topology.evaluate_every:
            every = self.topology.evaluate_every
            assert [found.step for found in self.evaluations] == list(range(every, number + 1, every))
        best = standing(self.evaluations).best
        if self.topology.keep_best and best is not None:
            assert self.best == best.step
            assert self.checkpoints[best.step] == dict(enumerate(self.expected.states[best.step]))
        for member in self.members.values():
            for stage in member.stages.values():
                if stage.machine.accepts(self.driver.fence):
                    assert stage.value == final[stage.number]

    def stories(self) -> str:
        machine = self.driver.machine
        lines = [f"{self.network.now_s:.2f} s, driver {machine.phase} at {machine.step}, line {machine.watermark}:"]
        lines += [f"  {line}" for line in machine.story[-12:]]
        lines += [f"  {self.driver.layout}, {self.driver.fence}, without {self.driver.without}, {self.driver.ended}"]
        for member in self.members.values():
            lines.append(f"{member.process} alive={member.process.alive} {member.fence} {sorted(member.snapshots)}")
            for stage in member.stages.values():
                lines.append(f"  stage {stage.number} {stage.machine.phase} {stage.machine.fence}: {stage.step}")
                lines += [f"    {line}" for line in stage.machine.story[-6:]]
        return "\n".join(lines)

    # -------------------------------------------------------------------------------------------- what drivers tell

    def before_event(self, driver: Driver, event: object) -> None:
        running = driver.machine.phase is DriverPhase.RUNNING
        if running:
            self._trouble, self._ran = [], True
        if not isinstance(event, PeerLost | LinkBroken | StageFailure):
            return
        if running:
            self._before = driver.layout
            self._covered = {
                stage: self.members[standby].process
                for stage, standby in driver.layout.standbys.items()
                if any(
                    at == stage and max(driver.machine.saved, 0) < step <= driver.machine.step
                    for at, step in self.members[standby].snapshots
                )
            }
        self._trouble.append(event)

    def connected_anew(self, peer: str) -> None:
        """A driver found another process of this machine before it missed the first."""
        self._trouble.append(PeerLost(peer, "another process"))

    def check_line(self, driver: Driver) -> None:
        """It has risen: every living standby has a snapshot from which what is retained leads on."""
        line = driver.machine.watermark
        for stage, standby in driver.machine.standbys.items():
            member = self.members[standby]
            if driver.connections.get(standby) is member.process and member.process.alive and member.holds_anything:
                newest = max((step for at, step in member.snapshots if at == stage), default=-1)
                assert line <= newest, f"line {line}, but {standby} has stage {stage} of step {newest}"

    def check_ready(self, driver: Driver, base: int) -> None:
        for member in self.members.values():
            for stage in member.stages.values():
                if stage.machine.accepts(driver.fence):
                    assert stage.step == base, f"ready at {base} while stage {stage.number} is at {stage.step}"

    def check_restored(self, driver: Driver, told: interface.ReportRestored) -> None:
        kind = "kept all" if not told.restored else "rolled back" if told.rollback else "replayed"
        if told.rollback:
            assert self._trouble or not self._ran, f"back to {told.base} although nothing happened: {self.stories()}"
            assert not self._could_replay(driver), f"back to {told.base} although there are snapshots: {self.stories()}"
        if told.restored and not told.rollback and told.base == told.committed:
            kind = "loaded"
        self.told[f"restored: {kind}"] += 1

    def _could_replay(self, driver: Driver) -> bool:
        """Whether all that happened since the job ran is the loss of one peer whose standbys have what it lost."""
        lost = {event.peer for event in self._trouble if isinstance(event, PeerLost)}
        if len(lost) != 1 or any(isinstance(event, StageFailure) for event in self._trouble):
            return False
        links = [event for event in self._trouble if isinstance(event, LinkBroken)]
        if len(links) > 1 or any(not lost & {link.reporter, link.other} for link in links):
            return False
        before, now = self._before, driver.layout
        stages = {stage for stage, peer in before.places.items() if peer in lost}
        moved = {stage for stage, peer in before.places.items() if now.places[stage] != peer}
        stateful = stages - self.topology.stateless
        living = {stage for stage, process in self._covered.items() if process.alive and process.name in now.members}
        return bool(stateful) and moved <= stages and before.cut == now.cut and stateful <= living

    # ------------------------------------------------------------------------------------------------------- faults

    def restart_driver(self) -> None:
        """The driver's process dies (or has ended) and starts again with what is on its disk."""
        self.network.kill(self.driver.process, silently=False)
        self._trouble, self._covered, self._ran = [], {}, False
        self.driver = self._new_driver()
        self.driver.start()

    def stop(self, reason: str) -> None:
        self.driver.handle(StopAsked(reason))

    def kill(self, peer: str, *, silently: bool = False, back_after_s: float | None = None) -> None:
        """A member's process, with all it held; its machine may start another."""
        process = self.members[peer].process
        self.network.kill(process, silently=silently)
        if back_after_s is not None:
            self.network.after(back_after_s, lambda: self.boot(peer) if self._is(peer, process) else None)

    def _is(self, peer: str, process: Process) -> bool:
        return self.members[peer].process is process

    def restart_broker(self, away_s: float) -> None:
        self.network.kill(self.broker.process, silently=False)

        def start() -> None:
            if not self.broker.process.alive:
                self.broker = self._new_broker()

        self.network.after(away_s, start)

    def freeze(self, process: Process, for_s: float) -> None:
        process.frozen = True
        self.network.after(for_s, lambda: self.network.wake(process))

    def told_to_leave(self, connection: int) -> None:
        """It goes when it holds no part of a job any more, at the latest after a while."""
        member = next((m for m in self.members.values() if m.process.number == connection), None)
        if member is None:
            return
        process = member.process

        def leave(left_s: float) -> None:
            if process.alive and (left_s <= 0 or not member.holds_anything):
                self.network.kill(process, silently=False)
            elif process.alive:
                self.network.after(0.5, lambda: leave(left_s - 0.5))

        leave(LEFT_S)

    # ----------------------------------------------------------------------------------------------------- processes

    def boot(self, peer: str) -> None:
        """A new process of this machine, which registers and beats."""
        process = self._new_process(peer)
        member = self.members[peer] = Member(self, process)

        def lost_link(far: Process, stream: Stream) -> None:
            if stream != "control":
                member.link_lost(far)

        process.lost_link = lost_link
        self.network.timer(process, 0.5, member.tick)
        self._beat(member, registered=False)

    def _beat(self, member: Member, *, registered: bool) -> None:
        """Each answer sets the next beat; without one the broker is asked again."""
        broker, process, network = self.broker, member.process, self.network
        answered = [False]

        def ask() -> None:
            broker.process.lost_link = lambda far, stream: self.broker.disconnected(far)
            kept = broker.beat(process, holds=member.holds_anything) if registered else broker.register(process)
            network.send(broker.process, process, "control", lambda: answer(kept))

        def answer(kept: bool) -> None:
            answered[0] = True
            if not kept:
                member.dismiss()
            network.timer(process, BEAT_S if kept else 0.1, lambda: self._beat(member, registered=kept))

        def give_up() -> None:
            if not answered[0]:
                answered[0] = True
                self._beat(member, registered=registered)

        network.send(process, broker.process, "control", ask)
        network.timer(process, 2 * BEAT_S, give_up)

    def _new_process(self, name: str) -> Process:
        self._processes += 1
        return Process(name, self._processes)

    def _new_broker(self) -> Broker:
        broker = Broker(self, self._new_process(BROKER), self.facts)
        self.network.timer(broker.process, 1.0, broker.tick)
        return broker

    def _new_driver(self) -> Driver:
        self.incarnation += 1
        process = self._new_process(OWNER)
        member = self.members[OWNER] = Member(self, process)
        driver = Driver(self, process, member)
        process.lost_link = driver.lost_link
        self.network.timer(process, 0.5, member.tick)
        return driver
