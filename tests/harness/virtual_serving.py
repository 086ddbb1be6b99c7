"""A whole serving job on the shipped machine, in virtual time and without a tensor, with faults where a course wants.

The shells do what the serving driver and `execution.serving` do. Every token a stream gets must be that of a loop
without pages, passes, machines or faults; each comes once and in order; every stream ends; at the end no page is lost.

Neighbours: `harness.virtual_serving_member` is a member, `harness.serving_course` makes up faults, `harness.network`
moves time; `tests/property` runs it.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace

from fusionai.coordination.round.interface import (
    AskPlan,
    Distrust,
    DriverEvent,
    EndJob,
    PeerLost,
    ReportCheck,
    ReportFault,
)
from fusionai.coordination.round.liveness import PING_S, Silence
from fusionai.coordination.round.verification import Inspector, Opinion
from fusionai.coordination.serving import interface
from fusionai.coordination.serving.admission import BatchLimits, QueueFull
from fusionai.coordination.serving.batching import Batcher
from fusionai.coordination.serving.checks import TextChecks
from fusionai.coordination.serving.driver import ServingMachine
from fusionai.coordination.serving.interface import ServingRoles
from fusionai.coordination.serving.sessions import SessionSpec
from fusionai.coordination.serving.stage_times import RoundLimits, StageTimes
from fusionai.coordination.serving.state import ServingPhase
from fusionai.wire.base import Fence
from fusionai.wire.serving import Segment
from harness.network import Network, Process, Stream
from harness.virtual_serving_member import Detach, Enlist, Load, Member, Pass, Rebuild, Result
from harness.virtual_serving_stage import PagedStage, reference, sent_on, token_of

OWNER = "owner"
EVENTS_AT_MOST = 400_000
LONGEST_S = 900.0
LOOK_S = 2.0
"""How often the pool is looked at for a better plan."""
RETRY_S = 1.0
PROBE = (3, 1, 4, 1, 5)
LIMITS = RoundLimits(enlist_s=6.0, load_s=12.0, rebuild_s=12.0, probe_s=12.0, pass_s=12.0)


@dataclass(slots=True)
class Answer:
    """One stream: what came, and what has to come."""

    spec: SessionSpec
    expected: list[int]
    got: list[int] = field(default_factory=list[int])
    rows: int = 0
    """Of the prompt, for those that want all."""
    ended: str = ""


@dataclass(slots=True, eq=False)
class Trigger:
    """An action at the n-th event in a phase of the driver, in a chain after another."""

    phase: ServingPhase
    countdown: int
    action: Callable[[], None]
    after: Trigger | None = None
    pulled: bool = False


class World:
    """`roles`: the first plan; all its members and `spares` are machines of the pool."""

    def __init__(
        self,
        roles: ServingRoles,
        limits: BatchLimits,
        seed: int,
        *,
        spares: tuple[str, ...] = (),
        retain: bool = True,
        any_order: bool = False,
    ) -> None:
        self.choose = random.Random(seed)
        self.opinions = random.Random(f"opinions {seed}")
        self.accuses = 0.0
        """Part of the checks in which a verifier takes exception; half the time rightly."""
        self.faulty_peers: set[str] = set()
        self.network = Network(self.choose, any_order=any_order)
        self.limits = limits
        self.any_order = any_order
        self.twice = 0
        """So many of the next messages arrive twice."""
        self.told: Counter[str] = Counter()
        self.triggers: list[Trigger] = []
        self.answers: dict[int, Answer] = {}
        self.answers_to_come = 0
        """Sessions that a course has planned."""
        self.gaps_s: list[float] = []
        """From each fault until passes went again."""
        self.version = roles.version
        self.draining: set[str] = set()
        self.proposed: dict[int, tuple[int, ...]] = {}
        self.lost_at_s: dict[str, float] = {}
        self._processes = 0
        self.members: dict[str, Member] = {}
        for peer in sorted({OWNER, *roles.members, *spares}):
            self.boot(peer)
        self.batcher = Batcher(limits, holds=True, times=StageTimes())
        checks = TextChecks(Inspector(b"s" * 32, OWNER, 1))
        self.machine = ServingMachine(
            self.batcher, PROBE, roles=roles, incarnation=1, retain=retain, limits=LIMITS, checks=checks
        )
        self.driver = Driver(self, self.members[OWNER].process)
        self.driver.start()

    @property
    def roles(self) -> ServingRoles:
        return self.machine.roles

    def new_stage(self, stage: int) -> PagedStage:
        caching = stage in self.roles.caching
        return PagedStage(stage, caching, self.limits.page_tokens, self.limits.sessions + 1)

    # ------------------------------------------------------------------------------------------------------ running

    def run(self) -> None:
        """Until every stream has ended. Raises `AssertionError` where anything goes wrong."""
        for _ in range(EVENTS_AT_MOST):
            if len(self.answers) == self.answers_to_come and all(one.ended for one in self.answers.values()):
                self._check_end()
                return
            assert self.machine.phase is not ServingPhase.ENDED, self.stories()
            assert self.network.advance(), f"nothing can happen any more: {self.stories()}"
            assert self.network.now_s < LONGEST_S, f"it hangs: {self.stories()}"
            self._pull()
        raise AssertionError(f"it did not come to an end: {self.stories()}")

    def _pull(self) -> None:
        for trigger in self.triggers:
            armed = trigger.after is None or trigger.after.pulled
            if trigger.phase is self.machine.phase and armed and not trigger.pulled:
                trigger.countdown -= 1
                if trigger.countdown <= 0:
                    trigger.pulled = True
                    trigger.action()

    def _check_end(self) -> None:
        for answer in self.answers.values():
            assert answer.got == answer.expected[: len(answer.got)]
            if answer.ended == "done":
                assert len(answer.got) == answer.spec.max_tokens, answer
                assert answer.rows == (len(answer.spec.prompt) if answer.spec.all_rows else 0), answer
        assert self.batcher.running == self.batcher.queued == 0
        for number in self.answers:
            self.batcher.let_go(number)
        pages = self.batcher.pages
        assert pages.room == pages.count - pages.pages_for(self.limits.probe_tokens), "pages were lost"

    def stories(self) -> str:
        machine, batcher = self.machine, self.batcher
        lines = [f"{self.network.now_s:.2f} s, {machine.phase} {machine.fence} {machine.roles}"]
        lines += [f"lost {machine.lost} leaving {machine.leaving} pending {machine.pending} {machine.roster}"]
        lines += [f"running {batcher.running} queued {batcher.queued} under way {batcher.under_way}"]
        lines += [f"  {line}" for line in machine.story[-16:]]
        for member in self.members.values():
            caches = {stage.number: stage.cached for stage in member.stages.values()}
            lines.append(f"{member.process} alive={member.process.alive} frozen={member.process.frozen} {member.fence}")
            lines.append(f"    {caches}")
        return "\n".join(lines)

    # ------------------------------------------------------------------------------------------------------ streams

    def submit(self, spec: SessionSpec) -> None:
        """Now; a full queue is asked again later."""
        if spec.number not in self.answers:
            expected = reference(spec.prompt, spec.max_tokens, self.roles.caching)
            self.answers[spec.number] = Answer(spec, expected)
        if self.answers[spec.number].ended:
            return
        try:
            self.batcher.submit(spec, self.network.now_s)
        except QueueFull as error:
            self.told["queue full"] += 1
            self.network.after(min(error.retry_after_s, 2.0), lambda: self.submit(spec))
        self.driver.pump()

    def cancel(self, number: int) -> None:
        answer = self.answers[number]
        if not answer.ended:
            self.batcher.cancel(number)
            answer.ended = "cancelled"

    def emit(self, number: int, tokens: tuple[int, ...]) -> None:
        answer = self.answers[number]
        assert not answer.ended, f"{tokens} for a stream that is over"
        answer.got += tokens
        assert answer.got == answer.expected[: len(answer.got)], f"session {number}: {self.stories()}"

    # ---------------------------------------------------------------------------------------------------- processes

    def boot(self, peer: str) -> None:
        self._processes += 1
        process = Process(peer, self._processes)
        member = self.members[peer] = Member(self, process)
        if peer == OWNER:
            process.lost_link = lambda far, stream: self.driver.lost_link(far, stream)
        else:
            process.lost_link = member.link_lost
        self.network.timer(process, 0.5, member.tick)

    def kill(self, peer: str, *, silently: bool = False, back_after_s: float | None = None) -> None:
        process = self.members[peer].process
        self.network.kill(process, silently=silently)

        def back() -> None:
            if self.members[peer].process is process:
                self.boot(peer)

        if back_after_s is not None:
            self.network.after(back_after_s, back)

    def freeze(self, process: Process, for_s: float) -> None:
        process.frozen = True
        self.network.after(for_s, lambda: self.network.wake(process))

    def post(self, sender: Process, peer: str, stream: Stream, message: object) -> None:
        """To whatever process of the machine is there now."""
        member = self.members[peer]
        self._send(sender, member.process, stream, lambda: member.receive(sender, message))

    def answer(self, sender: Process, message: object) -> None:
        """To the driver."""
        self._send(sender, self.driver.process, "control", lambda: self.driver.receive(sender, message))

    def _send(self, sender: Process, receiver: Process, stream: Stream, deliver: Callable[[], None]) -> None:
        self.network.send(sender, receiver, stream, deliver)
        if self.twice > 0:
            self.twice -= 1
            self.network.send(sender, receiver, stream, deliver)

    # --------------------------------------------------------------------------------------------------------- plans

    def present(self, peer: str) -> bool:
        """As the broker sees it: it beats."""
        process = self.members[peer].process
        return process.alive and not process.frozen and peer not in self.draining

    def replaced(self, roles: ServingRoles, without: frozenset[str]) -> ServingRoles | None:
        """Lost stages to standbys, to others that are there, at last to those that are back."""
        gone = (
            without | self.faulty_peers | {p for p in roles.members if not self.present(p) and p not in self.draining}
        )
        free = [p for p in sorted(self.members) if p != OWNER and self.present(p) and p not in gone]
        back = [p for p in sorted(without - self.faulty_peers) if self.present(p) and self._settled(p)]
        places = dict(roles.places)
        living = {p for p in places.values() if p not in gone}
        for stage, peer in sorted(places.items()):
            if peer in gone:
                standby = roles.standbys.get(stage)
                others = [standby] if standby in free else [p for p in [*free, *back] if p not in living]
                others = others or [p for p in [*free, *back] if list(places.values()).count(p) < 2]
                if not others:
                    return None
                places[stage] = others[0]
                living.add(others[0])
        return self._with_standbys(replace(roles, places=places), roles.standbys, free)

    def _with_standbys(self, roles: ServingRoles, before: Mapping[int, str], free: list[str]) -> ServingRoles:
        idle = [p for p in free if p not in roles.places.values()]
        standbys = {s: p for s, p in before.items() if p in idle}
        for stage, peer in sorted(roles.places.items()):
            unused = [p for p in idle if p not in standbys.values()] or idle
            if peer != OWNER and stage not in standbys and unused:
                standbys[stage] = unused[0]
        return replace(roles, standbys=standbys)

    def improved(self, roles: ServingRoles) -> ServingRoles | None:
        """With standbys where there are none."""
        free = [p for p in sorted(self.members) if p != OWNER and self.present(p) and p not in self.faulty_peers]
        better = self._with_standbys(roles, dict(roles.standbys), free)
        return better if len(better.standbys) > len(roles.standbys) else None

    def minted(self, roles: ServingRoles) -> ServingRoles:
        self.version += 1
        return replace(roles, version=self.version)

    def _settled(self, peer: str) -> bool:
        return self.network.now_s - self.lost_at_s.get(peer, -10.0) > 1.0


class Driver:
    """What the serving driver does: performs commands, samples, keeps watch over members and the pool."""

    def __init__(self, world: World, process: Process) -> None:
        self.world = world
        self.process = process
        self.connections: dict[str, Process] = {}
        self.silence = Silence()
        self.asked: AskPlan | None = None
        self.first_probe: int | None = None
        self.fault_at_s: float | None = None
        self.wanted: dict[int, tuple[int, ...]] = {}

    @property
    def machine(self) -> ServingMachine:
        return self.world.machine

    def start(self) -> None:
        self._perform_all(self.machine.start())
        self.world.network.timer(self.process, PING_S, self._tick)
        self.world.network.timer(self.process, LOOK_S, self._look)

    def handle(self, event: DriverEvent) -> None:
        if isinstance(event, PeerLost):
            self.world.lost_at_s[event.peer] = self.world.network.now_s
        if isinstance(event, interface.PassFailure):
            self.world.told["pass failed"] += 1
        self._perform_all(self.machine.handle(event))
        self.pump()

    def pump(self) -> None:
        """As many passes as fit."""
        world = self.world
        while (plan := self.machine.next_pass(world.network.now_s)) is not None:
            self.wanted[plan.number] = plan.wanted_sessions
            self._send_pass(
                Pass(self.machine.fence, plan.number, 0, plan.segments, plan.tokens, plan.wanted, plan.forget)
            )
            assert len(plan.tokens) <= world.limits.pass_tokens
        for begun in self.machine.next_checks():
            self._check(begun)

    def _check(self, begun: interface.BeginCheck) -> None:
        """After a while there is an opinion. As long as the text's pages are held, the stage before has of it what it
        sent, whatever else goes on."""
        world, fence = self.world, self.machine.fence
        world.told["check"] += 1

        def answered() -> None:
            text, stage = begun.text, begun.check.stage
            holder = world.members[self.machine.roles.places.get(stage - 1, OWNER)]
            before = holder.stages.get(stage - 1) if holder.fence == fence else None  # else it has just begun anew
            if fence == self.machine.fence and world.batcher.is_held(text.number) and before is not None:
                world.told["shown"] += 1
                segment = Segment(text.number, 0, len(text.tokens), 0, text.pages)
                assert before.recalled(segment) == sent_on(text.tokens, stage - 1, self.machine.roles.caching)
            self.handle(interface.TextChecked(begun.check, self._opinion(begun), fence=fence))

        world.network.timer(self.process, world.opinions.uniform(0.01, 2.0), answered)

    def _opinion(self, begun: interface.BeginCheck) -> Opinion:
        world = self.world
        if begun.check.verifier == OWNER:
            return Opinion() if world.opinions.random() < 0.5 else Opinion(own="wrong")
        if world.faulty_peers or world.opinions.random() >= world.accuses:
            return Opinion()
        return Opinion(own="wrong")

    def _send_pass(self, message: Pass) -> None:
        self.world.post(self.process, self.machine.roles.places[0], "tensors", message)

    # ---------------------------------------------------------------------------------------------------- arriving

    def receive(self, sender: Process, message: object) -> None:
        if self.connections.get(sender.name) is not sender:
            return
        self.silence.heard(sender.name, self.world.network.now_s)
        if isinstance(message, Result):
            self._result(message)
        else:
            self.handle(message)  # pyright: ignore[reportArgumentType]

    def _result(self, result: Result) -> None:
        if result.number in self.machine.rounds.probes:
            value = hash(result.values)
            self.first_probe = value if self.first_probe is None else self.first_probe
            distance = float(value != self.first_probe)
            self.handle(interface.ProbeReturned(result.number, str(value), distance, 0.5, fence=result.fence))
            return
        world = self.world
        is_current = result.fence == self.machine.fence
        sessions = self.machine.batcher.sessions_of(result.number) if is_current else ()
        owners = self.wanted.get(result.number, ())
        chosen: dict[int, tuple[int, ...]] = {}
        rows: Counter[int] = Counter()
        for session in sessions:
            values = [value for value, owner in zip(result.values, owners, strict=True) if owner == session]
            answer = world.answers[session]
            if answer.spec.all_rows and answer.rows < len(answer.spec.prompt):
                rows[session] = len(values)
                if answer.rows + len(values) < len(answer.spec.prompt):
                    continue
                values = values[-1:]
            if values and answer.spec.max_tokens:
                chosen[session] = self._sampled(session, values)
        counted = self.machine.returned(result.fence, result.number, chosen, (), world.network.now_s)
        for session in sorted(counted):
            answer = world.answers[session]
            answer.rows += rows[session]
            world.emit(session, chosen.get(session, ()))
            read = not answer.spec.max_tokens and answer.rows == len(answer.spec.prompt)
            if read or (answer.spec.max_tokens and len(answer.got) == answer.spec.max_tokens):
                answer.ended = "done"
            elif answer.got:
                self._propose(answer)
        self.pump()

    def _sampled(self, session: int, values: list[int]) -> tuple[int, ...]:
        """As many proposals as are right, and one more."""
        tokens = [token_of(value) for value in values]
        proposed = self.world.proposed.get(session, ()) if len(values) > 1 else ()
        count = 1
        while count < len(tokens) and tokens[count - 1] == proposed[count - 1]:
            count += 1
        return tuple(tokens[:count])

    def _propose(self, answer: Answer) -> None:
        """Often right, sometimes not."""
        choose = self.world.choose
        if choose.random() < 0.5:
            return
        coming = answer.expected[len(answer.got) : len(answer.got) + choose.randrange(1, 5)]
        guessed = tuple(token if choose.random() < 0.8 else token + 1 for token in coming)
        self.world.proposed[answer.spec.number] = guessed
        self.world.batcher.propose(answer.spec.number, guessed)

    def lost_link(self, far: Process, stream: Stream) -> None:
        if stream != "control":
            self.world.members[OWNER].link_lost(far, stream)
        elif self.connections.get(far.name) is far:
            self._lost(far.name, "its connection broke")

    def _lost(self, peer: str, reason: str) -> None:
        self.silence.forget(peer)
        self.connections.pop(peer, None)
        self.handle(PeerLost(peer, reason))

    def _tick(self) -> None:
        world = self.world
        now_s = world.network.now_s
        world.network.timer(self.process, PING_S, self._tick)
        for peer in self.silence.watched:
            if world.network.reaches(self.process, self.connections[peer]):
                self.silence.heard(peer, now_s)
        for peer in self.silence.tick(now_s):
            world.network.cut(self.process, self.connections[peer], members=False)
            self._lost(peer, "silent")
        for number in world.batcher.expire(now_s):
            world.answers[number].ended = "expired"
        self.handle(interface.Tick(now_s))

    # -------------------------------------------------------------------------------------------------- performing

    def _perform_all(self, given: list[interface.ServingCommand]) -> None:
        for command in given:
            self._perform(command)

    def _perform(self, command: interface.ServingCommand) -> None:
        world = self.world
        match command:
            case interface.BeginRound(fence, roles):
                world.told["round"] += 1
                for peer in sorted({OWNER, *roles.members}):
                    self._enlist(peer, fence, roles)
            case interface.EnlistStandby(fence, peer, roles):
                self._enlist(peer, fence, roles)
            case interface.SendLoad(fence, peer, stage, standby, fresh):
                self._tell(peer, Load(fence, stage, standby, fresh))
            case interface.SendRebuild(number, source, through, segments, tokens):
                world.told["rebuild"] += 1
                fence = self.machine.fence
                if source < 0:
                    self._rebuild_from_tokens(command)
                else:
                    self._tell(self.machine.roles.places[source], Rebuild(fence, number, source, through, segments))
                assert bool(tokens) == (source < 0)
            case interface.SendProbePass(number, segments, tokens, forget):
                wanted = (len(tokens) - 1,)
                self._send_pass(Pass(self.machine.fence, number, 0, segments, tokens, wanted, forget))
            case interface.BeginCheck():
                self._check(command)
            case ReportCheck(outcome=outcome):
                world.told[f"check: {outcome}"] += 1
            case Distrust(peer):
                world.faulty_peers.add(peer)
                self.first_probe = None
            case interface.ResumePasses():
                if self.fault_at_s is not None:
                    world.gaps_s.append(world.network.now_s - self.fault_at_s)
                    self.fault_at_s = None
            case AskPlan():
                self.asked = command
                roles = self.machine.roles
                self._later(lambda: self._request(command, roles))
            case interface.Dismiss(peer):
                if peer in self.connections:
                    self._tell(peer, Detach(Fence(2**40, 0, 0)))
                    del self.connections[peer]
                    self.silence.forget(peer)
                    world.told["dismissed"] += 1
            case interface.FailSessions(sessions):
                for session in sessions:
                    world.answers[session].ended = "failed"
            case ReportFault(kind=kind):
                world.told[f"fault: {kind}"] += 1
                self.fault_at_s = world.network.now_s
            case interface.ReportState(state=state):
                world.told[f"state: {state}"] += 1
            case interface.ReportRebuilding():
                pass
            case EndJob(stopped=stopped, failed=failed):
                world.told[f"ended: {stopped or failed}"] += 1

    def _rebuild_from_tokens(self, command: interface.SendRebuild) -> None:
        """A pass for each segment."""
        start = 0
        for segment in command.segments:
            tokens = command.tokens[start : start + segment.length]
            start += segment.length
            self._send_pass(Pass(self.machine.fence, command.number, 0, (segment,), tokens, rebuild=command.through))

    def _enlist(self, peer: str, fence: Fence, roles: ServingRoles) -> None:
        world = self.world
        process = world.members[peer].process
        known = self.connections.get(peer)
        if known is not process:
            if known is not None:
                # Another process of a machine it had: that one is lost, and a round over it void.
                self._later(
                    lambda: self._lost(peer, "another process") if self.connections.get(peer) is known else None
                )
                return
            self.connections[peer] = process
            world.network.connect(self.process, process)
            if peer != OWNER:
                self.silence.watch(peer, world.network.now_s)
        if not process.alive:
            self._later(lambda: self._unreachable(peer, process))
            return
        self._tell(peer, Enlist(fence, roles))

    def _unreachable(self, peer: str, process: Process) -> None:
        if self.connections.get(peer) is process:
            self._lost(peer, "can't be reached")

    def _tell(self, peer: str, message: object) -> None:
        process = self.connections.get(peer)
        member = self.world.members[peer]
        if process is not None and process is member.process:
            self.world._send(self.process, process, "control", lambda: member.receive(self.process, message))

    def _later(self, action: Callable[[], None]) -> None:
        self.world.network.work(self.process, action)

    # ------------------------------------------------------------------------------------------------------- plans

    def _request(self, asked: AskPlan, roles: ServingRoles) -> None:
        """Until there is one, or another was asked for."""
        world = self.world
        if self.asked is not asked:
            return
        found = world.replaced(roles, asked.without)
        if found is None:
            world.network.timer(self.process, RETRY_S, lambda: self._request(asked, roles))
            return
        self.asked = None
        self._give(world.minted(found), asked.without)

    def _give(self, roles: ServingRoles, knows: frozenset[str]) -> None:
        self._later(lambda: self.handle(interface.PlanGiven(roles, knows)))

    def _look(self) -> None:
        world = self.world
        world.network.timer(self.process, LOOK_S, self._look)
        for peer in sorted(world.draining & self.machine.roles.members):
            self.handle(interface.MemberLeaving(peer))
        if self.machine.phase is ServingPhase.RUNNING and self.asked is None:
            better = world.improved(self.machine.roles)
            if better is not None:
                self._give(world.minted(better), self.machine.lost)
