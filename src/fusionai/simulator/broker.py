"""A broker for one job in virtual time, which decides with the shipped code (`coordination.broker.decisions`).

Heartbeats that change nothing are skipped: before each decision, the leases of all live machines are renewed to their
last heartbeat with the shipped lease table. `every_beat` simulates each heartbeat instead, with the same outcome.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from math import floor

import msgspec

from fusionai.coordination.broker import decisions, requests
from fusionai.coordination.broker.events import MemberPlacement
from fusionai.coordination.broker.pool import Pool
from fusionai.coordination.broker.state import PRESENT, BrokerRules, BrokerState
from fusionai.primitives.errors import FusionError
from fusionai.primitives.ids import JobId, PeerId
from fusionai.scheduling.problem.types import Plan
from fusionai.simulator.agenda import Agenda
from fusionai.wire.messages import LeaveNotice, Refused

JOB = JobId("simulated")
BROKER = PeerId("broker")
_LIFETIME_S = 1e12


@dataclass(frozen=True, slots=True)
class Process:
    """One start of a machine's peer process, with the number of its connection to the broker."""

    boot: int
    connection: int
    since_s: float


class SimulatedBroker:
    """The broker. `released(peer)` must be set before the first event; it is called when the pool releases a peer that
    asked to leave."""

    released: Callable[[str], None]

    def __init__(self, agenda: Agenda, owner: str, *, every_beat: bool) -> None:
        self.rules = BrokerRules(pool="simulated", broker=BROKER)
        self.every_beat = every_beat
        self._agenda = agenda
        self._owner = PeerId(owner)
        self._desk = BrokerState(rules=self.rules, pool=Pool())
        self._processes: dict[str, Process] = {}
        """Processes of all machines that currently send heartbeats."""
        self._numbers = 0
        self._enrolled: set[str] = set()
        self._ticking = False
        self._enrol(owner)
        self._driver = self._number()

    # ------------------------------------------------------------------------------------------------- machines

    def come(self, peer: str) -> Process:
        """Start a new process of this machine."""
        if peer not in self._enrolled:
            self._enrol(peer)
        process = Process(self._number(), self._number(), self._agenda.now_s)
        self._processes[peer] = process
        self._ask(requests.RegisterMember(PeerId(peer), process.connection, process.boot, b"", ()))
        self._keep_beating(peer, process)
        return process

    def unheard(self, peer: str, *, closed: bool) -> None:
        """Stop the heartbeats of a machine. `closed`: the broker sees its connection end."""
        self._renew()
        process = self._processes.pop(peer)
        if closed:
            self._ask(requests.Disconnected(process.connection))
        self._watch()

    def heard_again(self, peer: str, frozen: Process) -> Process:
        """Resume a frozen process: it sends heartbeats and registers again if told to. State of a job that continued
        without it was already dropped on the job driver's request."""
        process = replace(frozen, since_s=self._agenda.now_s)
        self._processes[peer] = process
        jobs = self._jobs(peer)
        answers = self._ask(requests.Beat(PeerId(peer), process.connection, process.boot, jobs))
        if any(isinstance(one, requests.Answer) and isinstance(one.message, Refused) for one in answers):
            self._ask(requests.RegisterMember(PeerId(peer), process.connection, process.boot, b"", ()))
        self._keep_beating(peer, process)
        return process

    def leave(self, peer: str, *, drain: bool) -> None:
        self._ask(requests.AskLeave(PeerId(peer), self._processes[peer].connection, drain))

    # ------------------------------------------------------------------------------------------------- the driver

    def phase(self, peer: str) -> str:
        member = self._desk.pool.members.get(PeerId(peer))
        return "unknown" if member is None else member.phase

    def present(self) -> frozenset[str]:
        return frozenset(str(peer) for peer, member in self._desk.pool.members.items() if member.phase in PRESENT)

    def usable(self) -> tuple[str, ...]:
        """Return the idle machines that may work for the job now, and those that already do."""
        wall_s = self._agenda.now_s
        return tuple(
            sorted(
                str(member.peer)
                for member in self._desk.pool.members.values()
                if (member.phase == "idle" and not self._desk.rest_left_s(member, wall_s))
                or (member.phase == "active" and member.job == JOB)
            )
        )

    def last_heard_s(self, peer: str) -> float:
        lease, process = self._desk.leases.get(PeerId(peer)), self._processes.get(peer)
        if lease is None:
            return -1.0
        return lease.heard_s if process is None else max(lease.heard_s, self._beat_s(process))

    def mint(self, plan: Plan, steps: int) -> Plan | Refused:
        """Request the plan from the broker and return it with its version, or the refusal."""
        parts: dict[str, tuple[list[int], list[int]]] = {}
        for stage in plan.stages:
            parts.setdefault(stage.peer, ([], []))[0].append(stage.stage)
        for standby in plan.standbys:
            parts.setdefault(standby.peer, ([], []))[1].append(standby.stage)
        members = tuple(
            MemberPlacement(peer, tuple(stages), tuple(standbys))
            for peer, (stages, standbys) in sorted(parts.items())
            if peer != self._owner
        )
        encoded = msgspec.json.encode(plan)
        request = requests.RequestJob(self._owner, self._driver, JOB, "simulated", steps, encoded, 0, members)
        for command in self._ask(request):
            match command:
                case requests.IssueTickets(version=version):
                    return msgspec.structs.replace(plan, version=version)
                case requests.Answer(message=Refused() as refused):
                    return refused
                case _:
                    pass
        raise FusionError("the simulated broker did not answer a request for a plan.")

    # ------------------------------------------------------------------------------------------------- inside

    def _enrol(self, peer: str) -> None:
        digest = f"invitation of {peer}"
        (handed,) = self._ask(requests.Invite(BROKER, digest, 1, _LIFETIME_S))
        purpose = "owner" if peer == self._owner else "provider"
        (certified,) = self._ask(requests.Enrol(digest, PeerId(peer), purpose))
        if not isinstance(handed, requests.HandOut) or not isinstance(certified, requests.Certify):
            raise FusionError(f"the simulated broker refused to enrol a machine: {handed}, {certified}.")
        self._enrolled.add(peer)

    def _number(self) -> int:
        self._numbers += 1
        return self._numbers

    def _ask(self, request: requests.Request) -> tuple[requests.Command, ...]:
        self._renew()
        now_s = self._agenda.now_s
        decision = decisions.handle(self._desk, request, now_s=now_s, wall_s=now_s)
        self._desk = decision.desk
        for command in decision.commands:
            match command:
                case requests.Notify(connection, LeaveNotice(drain=False)):
                    for peer, process in self._processes.items():
                        if process.connection == connection:
                            self._agenda.after(0.0, partial(self.released, peer))
                case _:
                    pass
        return decision.commands

    def _renew(self) -> None:
        """Renew leases as the skipped heartbeats would have done, so that no live machine's lease expires."""
        if self.every_beat:
            return
        leases = dict(self._desk.leases)
        for peer, process in self._processes.items():
            lease, beat_s = leases.get(PeerId(peer)), self._beat_s(process)
            if lease is not None and beat_s > lease.heard_s:
                leases[PeerId(peer)] = lease.renewed(beat_s)
        self._desk = replace(self._desk, leases=leases)

    def _beat_s(self, process: Process) -> float:
        """Return the time of the last heartbeat that was skipped."""
        every_s = self.rules.heartbeat_s
        beats = 0 if self.every_beat else floor((self._agenda.now_s - process.since_s) / every_s)
        return process.since_s + beats * every_s

    def _keep_beating(self, peer: str, process: Process) -> None:
        if self.every_beat:
            self._agenda.after(self.rules.heartbeat_s, partial(self._beat, peer, process))

    def _beat(self, peer: str, process: Process) -> None:
        if self._processes.get(peer) == process:
            self._ask(requests.Beat(PeerId(peer), process.connection, process.boot, self._jobs(peer)))
            self._keep_beating(peer, process)

    def _jobs(self, peer: str) -> tuple[str, ...]:
        job = self._desk.pool.members[PeerId(peer)].job
        return () if job is None else (job,)

    def _watch(self) -> None:
        """Schedule a tick for the time at which the first lease of a silent machine expires."""
        unheard = [lease.expires_at_s for peer, lease in self._desk.leases.items() if str(peer) not in self._processes]
        if unheard and not self._ticking:
            self._ticking = True
            self._agenda.at(min(unheard), self._tick)

    def _tick(self) -> None:
        self._ticking = False
        self._ask(requests.DeadlinePassed())
        self._watch()
