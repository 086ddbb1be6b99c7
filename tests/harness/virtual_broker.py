"""The broker on its shipped decisions: a desk, and facts that outlive it. What `broker.service` does for one job.

Neighbours: `harness.virtual_driver` asks it for plans, the members' processes beat; `coordination.broker.decisions`
decides."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from fusionai.coordination.broker import decisions
from fusionai.coordination.broker.events import Fact, MemberPlacement
from fusionai.coordination.broker.pool import Pool, replay
from fusionai.coordination.broker.requests import (
    Answer,
    AskLeave,
    Beat,
    Certify,
    Command,
    DeadlinePassed,
    Disconnected,
    Enrol,
    HandOut,
    Invite,
    IssueTickets,
    Notify,
    RegisterMember,
    ReportJob,
    Request,
    RequestJob,
    Stalled,
)
from fusionai.coordination.broker.state import BrokerRules, BrokerState, recovered
from fusionai.primitives.ids import JobId, PeerId
from fusionai.wire.messages import LeaveNotice, Refused
from harness.network import Process
from harness.topology import Layout

if TYPE_CHECKING:
    from harness.world import World

JOB = JobId("job")
OWNER = "owner"
BROKER = "broker"
BEAT_S = 3.0
STALLED_S = 2.0


@dataclass(frozen=True, slots=True)
class Candidates:
    """Machines that a plan of this job may have; those that are to leave had better not."""

    known: frozenset[str]
    draining: frozenset[str]


@dataclass(slots=True, eq=False)
class Broker:
    """One start of the broker's process. `facts` are on its disk."""

    world: World
    process: Process
    facts: list[Fact]
    desk: BrokerState = field(init=False)
    at_s: float = 0.0
    """When it last did something."""

    def __post_init__(self) -> None:
        # Short rests, or courses would take long for machines that flap.
        rules = BrokerRules(pool="pool", broker=PeerId(BROKER), rest_s=20.0)
        pool = replay(self.facts, Pool())
        self.desk = recovered(rules, pool, self.world.network.now_s)
        self.at_s = self.world.network.now_s

    def ask(self, request: Request) -> tuple[Command, ...]:
        """What it commands. Nothing is answered before its facts are on the disk."""
        now_s = self.world.network.now_s
        if now_s - self.at_s > STALLED_S:
            self._decide(Stalled())
        self.at_s = now_s
        commands = self._decide(request)
        for command in commands:
            if isinstance(command, Notify) and isinstance(command.message, LeaveNotice):
                self.world.told_to_leave(command.connection)
        return commands

    def _decide(self, request: Request) -> tuple[Command, ...]:
        now_s = self.world.network.now_s
        decision = decisions.handle(self.desk, request, now_s=now_s, wall_s=now_s)
        self.facts += decision.facts
        self.desk = decision.desk
        return decision.commands

    def tick(self) -> None:
        self.ask(DeadlinePassed())
        self.world.network.timer(self.process, 1.0, self.tick)

    # -------------------------------------------------------------------------------------------------- requests

    def enrol(self, peer: str) -> None:
        digest = f"invitation {len(self.facts)} of {peer}"  # a peer that was not answered asks with another one
        (handed,) = self.ask(Invite(PeerId(BROKER), digest, 1, 1e6))
        assert isinstance(handed, HandOut), handed
        purpose = "owner" if peer == OWNER else "provider"
        (certified,) = self.ask(Enrol(digest, PeerId(peer), purpose))
        assert isinstance(certified, Certify), certified

    def register(self, process: Process) -> bool:
        self.ask(RegisterMember(PeerId(process.name), process.number, process.number, b"", ()))
        return True

    def beat(self, process: Process, *, holds: bool) -> bool:
        """False: clear and register again."""
        jobs = (JOB,) if holds else ()
        answers = self.ask(Beat(PeerId(process.name), process.number, process.number, jobs))
        return not any(isinstance(one, Answer) and isinstance(one.message, Refused) for one in answers)

    def leave(self, process: Process) -> None:
        self.ask(AskLeave(PeerId(process.name), process.number, drain=True))

    def disconnected(self, process: Process) -> None:
        self.ask(Disconnected(process.number))

    def report(self, process: Process, step: int, *, done: bool) -> None:
        self.ask(ReportJob(PeerId(OWNER), process.number, JOB, "done" if done else "running", step, ""))

    def candidates(self) -> Candidates:
        wall_s = self.world.network.now_s
        members = self.desk.pool.members.values()
        known = frozenset(
            str(member.peer)
            for member in members
            if self.desk.reachable(member)
            and (member.job == JOB or (member.phase == "idle" and not self.desk.rest_left_s(member, wall_s)))
        )
        return Candidates(known, frozenset(str(member.peer) for member in members if member.phase == "draining"))

    def mint(self, process: Process, layout: Layout) -> int | None:
        """The new plan's version; None when the broker refuses it."""
        members = tuple(
            MemberPlacement(
                peer,
                tuple(stage for stage, at in sorted(layout.places.items()) if at == peer),
                tuple(stage for stage, at in sorted(layout.standbys.items()) if at == peer),
            )
            for peer in sorted(layout.members - {OWNER})
        )
        request = RequestJob(PeerId(OWNER), process.number, JOB, "a job", 0, layout.encoded(), 0, members)
        for command in self.ask(request):
            if isinstance(command, IssueTickets):
                return command.version
        return None


def stand_in(
    layout: Layout, lost: frozenset[str], pool: Candidates, stateless: frozenset[int], pick: Callable[[int], int]
) -> Layout | None:
    """The plan without `lost`, as `scheduling.standby.takeover` makes it less memory and speed: a standby first, then
    an idle machine, then one that works already, then one that is back or was to leave. None: nobody can be found."""
    unwanted = lost | (pool.draining & layout.members)
    there = pool.known - pool.draining
    places = dict(layout.places)
    standbys = {stage: standby for stage, standby in layout.standbys.items() if standby not in unwanted}
    for stage, peer in sorted(layout.places.items()):
        if peer not in unwanted:
            continue
        working = set(places.values()) - unwanted - {OWNER}
        guarding = set(standbys.values())
        choices = (
            ([standbys[stage]] if stage in standbys else [])
            or sorted(there - unwanted - working - guarding)
            or sorted((there - unwanted) & guarding)
            or sorted((there & working) - unwanted)
            or ([peer] if peer not in lost else [])
            or sorted(pool.known & unwanted)
        )
        if not choices:
            return None
        places[stage] = choices[pick(len(choices))]
    working = set(places.values())
    standbys = {stage: standby for stage, standby in standbys.items() if standby not in working}
    spares = sorted((there - working - unwanted) | set(standbys.values()))
    for stage in sorted(places):
        if spares and stage not in standbys and stage not in stateless and places[stage] != OWNER:
            standbys[stage] = spares[pick(len(spares))]
    return Layout(places=places, standbys=standbys, snapshot_every=layout.snapshot_every, cut=layout.cut)
