"""Several brokers on one engine that loses, delays and refuses what it is asked: a deterministic course with a judge.

The shipped `EngineJournal` and `BrokerService` run on a virtual clock. Between any two operations of the engine another
broker may act, time may pass, or a delayed write may arrive. Brokers are killed, suspended and cut off. The judge knows
what each broker acknowledged and refused, and what the engine has. Neighbours: `harness.memory_engine` is the engine,
`broker.engines.watch` is what `Machine.watch` does in real time.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final, Literal, TypeVar

import msgspec

from fusionai.broker.engines.engine_journal import RENEW_S, EngineJournal
from fusionai.broker.engines.interface import (
    OPERATION_S,
    AnswerLost,
    EngineHead,
    EngineLease,
    EngineUnreachable,
    JournalHeld,
    JournalInDoubt,
    JournalTaken,
)
from fusionai.broker.engines.watch import RETRY_S
from fusionai.broker.history import Base, PoolHistory, Row
from fusionai.broker.service import BrokerService, remembered
from fusionai.coordination.broker import pool
from fusionai.coordination.broker.events import Fact, decode, encode
from fusionai.coordination.broker.state import BrokerRules
from fusionai.primitives.errors import StorageError
from fusionai.primitives.ids import PeerId
from fusionai.scheduling.problem.types import Certificate, PeerProfile, Plan, StagePlacement
from fusionai.transport.enrolment import parse_invitation
from fusionai.transport.interface import Remote
from fusionai.transport.security.certificates import load_authority
from fusionai.transport.security.identity import peer_of
from fusionai.wire import messages as wire
from harness.memory_engine import MemoryEngine, Store
from harness.virtual_clock import VirtualClock

T = TypeVar("T")
Fate = Literal["done and answered", "answer lost", "request lost", "late", "unreachable"]
FATES: Final[tuple[Fate, ...]] = ("answer lost", "request lost", "late", "unreachable")
BROKERS: Final = ("one", "two", "three")
TAKEOVER_S: Final = 10.0
"""Limit from the end of all faults until a broker decides again."""


class Violation(AssertionError):
    """What must never happen has happened."""


@dataclass
class SharedStore(Store):
    """The server's content: its lease ends by the clock, and rows that were ever written are kept for the judge."""

    lease_until_s: float = 0.0
    archive: dict[int, bytes] = field(default_factory=dict[int, bytes])
    late: list[Callable[[], object]] = field(default_factory=list[Callable[[], object]])
    """Writes that are still on their way."""
    down: bool = False


class Judge:
    """What brokers said. `claimed`: rows that a broker counts as written."""

    def __init__(self, store: SharedStore) -> None:
        self.store = store
        self.claimed: dict[int, bytes] = {}
        self.refused: set[bytes] = set()
        self.versions: set[int] = set()

    @property
    def newest(self) -> int:
        return max(self.claimed, default=0)

    def claim(self, before: int, facts: Sequence[Fact]) -> None:
        for number, fact in enumerate(facts, start=before + 1):
            data = encode(fact)
            if self.claimed.setdefault(number, data) != data:
                raise Violation(f"two brokers acknowledged different rows {number}.")
            if self.store.archive.get(number) != data:
                raise Violation(f"row {number} was acknowledged and is not in the engine.")

    def refuse(self, facts: Sequence[Fact]) -> None:
        self.refused |= {encode(fact) for fact in facts}
        self.check_refused()

    def check_refused(self) -> None:
        if found := self.refused & set(self.store.archive.values()):
            raise Violation(f"{[decode(data) for data in found]} was refused as not done, and is in the engine.")

    def minted(self, version: int) -> None:
        if version in self.versions:
            raise Violation(f"plan version {version} was given out twice.")
        self.versions.add(version)


class SharedEngine(MemoryEngine):
    """One broker's connection to the engine. `decide` says what becomes of each operation."""

    def __init__(self, store: SharedStore, clock: VirtualClock, decide: Callable[[], Fate]) -> None:
        super().__init__(store)
        self.shared = store
        self.cut = False
        """Whether this broker can't reach the engine."""
        self._clock = clock
        self._decide = decide
        self._connected = False

    def connect(self) -> None:
        fate = self._decide()
        if self.cut or self.shared.down or fate != "done and answered":
            raise EngineUnreachable("memory can't be reached.")
        self._connected = True

    def head(self) -> EngineHead | None:
        return self._asked(super().head)

    def lease(self) -> EngineLease | None:
        left_s = self.shared.lease_until_s - self._clock.now_s()
        return self._asked(lambda: EngineLease(self.shared.lease, left_s) if left_s > 0 else None)

    def create(self, head: EngineHead, history: PoolHistory) -> bool:
        return self._asked(lambda: MemoryEngine.create(self, head, history), writes=True)

    def take(self, old: EngineHead, new: EngineHead, lease_s: float) -> bool:
        def do() -> bool:
            if self._clock.now_s() >= self.shared.lease_until_s:
                self.shared.lease = ""
            if done := MemoryEngine.take(self, old, new, lease_s):
                self.shared.lease_until_s = self._clock.now_s() + lease_s
            return done

        return self._asked(do, writes=True)

    def append(self, old: EngineHead, new: EngineHead, rows: Sequence[Row]) -> bool:
        def do() -> bool:
            if done := MemoryEngine.append(self, old, new, rows):
                self.shared.archive |= {row.sequence: row.fact for row in rows}
            return done

        return self._asked(do, writes=True)

    def rebase(self, head: EngineHead, base: Base) -> bool:
        return self._asked(lambda: MemoryEngine.rebase(self, head, base), writes=True)

    def renew(self, head: EngineHead, lease_s: float) -> bool:
        def do() -> bool:
            if done := MemoryEngine.renew(self, head, lease_s) and self.shared.lease == head.owner:
                self.shared.lease_until_s = self._clock.now_s() + lease_s
            return done

        return self._asked(do, writes=True)

    def release(self, head: EngineHead) -> None:
        def do() -> None:
            if self.shared.head == head:
                self.shared.lease_until_s = 0.0

        self._asked(do, writes=True)

    def _asked(self, do: Callable[[], T], *, writes: bool = False) -> T:
        if not self._connected:
            raise EngineUnreachable("memory: there is no connection.")
        fate = self._decide()
        if self.cut or self.shared.down:
            fate = "request lost"
        match fate:
            case "done and answered":
                return do()
            case "unreachable":
                self._connected = False
                raise EngineUnreachable("memory: the connection has ended.")
            case "answer lost":
                do()
            case "late" if writes:
                self.shared.late.append(do)
            case "late" | "request lost":
                pass
        self._connected = False
        raise AnswerLost("memory gave no answer.")


class WatchedJournal(EngineJournal):
    """Reports to the judge what it says."""

    judge: Judge
    _asked_for: tuple[int, tuple[Fact, ...]] | None = None

    def append(self, expected_sequence: int, facts: Sequence[Fact]) -> int:
        try:
            last = super().append(expected_sequence, facts)
        except JournalInDoubt:
            self._asked_for = (expected_sequence, tuple(facts))
            raise
        except JournalTaken:
            raise  # it does not say whether this was written
        except StorageError:
            self.judge.refuse(facts)
            raise
        self.judge.claim(expected_sequence, facts)
        return last

    def recover(self) -> bool | None:
        written = super().recover()
        asked, self._asked_for = self._asked_for, None
        if asked is not None and written:
            self.judge.claim(*asked)
        elif asked is not None:
            self.judge.refuse(asked[1])
        return written


@dataclass(eq=False)
class Machine:
    """A broker's machine, on which its process runs or does not."""

    course: Course
    name: str
    engine: SharedEngine | None = None
    journal: WatchedJournal | None = None
    service: BrokerService | None = None
    frozen: bool = False
    cut: bool = False
    busy: bool = False
    renewed_s: float = 0.0
    tried_s: float = 0.0

    @property
    def peer(self) -> PeerId:
        return PeerId(self.name)

    @contextmanager
    def acting(self) -> Iterator[None]:
        self.busy = True
        try:
            yield
        except JournalTaken:
            self.kill()
        finally:
            self.busy = False

    def start(self) -> None:
        """Open the journal and the service, unless another broker keeps the pool or the engine does not answer."""
        course = self.course
        with self.acting():
            self.engine = SharedEngine(course.store, course.clock, course.fate)
            self.engine.cut = self.cut
            try:
                journal = WatchedJournal.open(
                    self.engine,
                    "home",
                    self.peer,
                    lambda _: course.authority.public_key,
                    now_s=course.clock.now_s,
                )
            except (JournalHeld, StorageError):
                return
            journal.judge = course.judge
            try:
                self.service = BrokerService(
                    rules=BrokerRules(pool="home", broker=self.peer),
                    journal=journal,
                    authority=course.authority,
                    clock=course.clock,
                    draw_token=lambda: course.dice.randbytes(32),
                    addresses=("tcp://127.0.0.1:1",),
                )
            except StorageError:
                return
            self.journal = journal
            self.renewed_s = self.tried_s = course.clock.now_s()

    def be_cut(self, cut: bool) -> None:
        """Cut the machine off from the engine, or connect it again."""
        self.cut = cut
        if self.engine is not None:
            self.engine.cut = cut

    def kill(self) -> None:
        self.journal, self.service = None, None

    def stop(self) -> None:
        """End as the program does, which gives the lease back."""
        with self.acting():
            if self.journal is not None:
                self.journal.close()
        self.kill()

    def ask(self, sender: PeerId, message: wire.Message) -> wire.Message | None:
        """Return the answer; None where there is none, or where it is in doubt."""
        if self.service is None:
            return None
        known = self.course.judge.newest
        service, role = self.service, "broker" if sender == self.peer else "member"
        with self.acting():
            try:
                answer = service.receive(Remote(sender, role), 1, message).answer
            except JournalInDoubt:
                return None
            if not isinstance(answer, wire.Refused) and service.sequence < known:
                raise Violation(f"{self.name} answered from row {service.sequence} when row {known} was acknowledged.")
            return answer
        return None

    def watch(self) -> None:
        """Renew the lease, end an outage, and handle deadlines, each when it is due."""
        if self.journal is None or self.service is None:
            return
        journal, service, now_s = self.journal, self.service, self.course.clock.now_s()
        with self.acting():
            try:
                if journal.outage and now_s >= self.tried_s + RETRY_S:
                    self.tried_s = now_s
                    written = journal.recover()
                    if written is not None:
                        service.settle(written)
                    service.stalled()
                elif not journal.outage and now_s >= self.renewed_s + RENEW_S:
                    self.renewed_s = now_s
                    journal.renew()
                if service.next_deadline_s is not None and now_s >= service.next_deadline_s:
                    service.tick()
            except (JournalInDoubt, JournalTaken) as error:
                if isinstance(error, JournalTaken):
                    raise
            except StorageError:
                pass  # the broker tries again


class Course:
    """One seeded course, with more or fewer faults by its seed. `calm` makes the engine answer everything at once."""

    def __init__(self, directory: Path, seed: int) -> None:
        self.dice = random.Random(seed)
        self.clock = VirtualClock(1000.0)
        self.store = SharedStore()
        self.judge = Judge(self.store)
        self.authority = load_authority(directory, "home", now_wall_s=self.clock.wall_s())
        self.machines = [Machine(self, name) for name in BROKERS]
        self.calm = True
        self.faults = self.dice.choice((0.02, 0.1, 0.3))
        """Share of operations and of steps that go wrong."""
        self.boots: dict[PeerId, int] = {}
        self.keys = [bytes([number]) * 32 for number in range(1, 6)]
        self.members = [peer_of(key) for key in self.keys]

    def fate(self) -> Fate:
        """What becomes of the next operation, and what happens before it is done."""
        if self.calm:
            return "done and answered"
        if self.dice.random() < self.faults:
            self._meanwhile()
        if self.dice.random() > self.faults:
            return "done and answered"
        if self.dice.random() < 0.3:
            self.clock.advance(self.dice.random() * OPERATION_S)
        return self.dice.choice(FATES)

    def _meanwhile(self) -> None:
        match self.dice.randrange(3):
            case 0:
                self.deliver()
            case 1:
                self.clock.advance(self.dice.random() * 2 * OPERATION_S)
            case _:
                self.act()

    def deliver(self) -> None:
        """A delayed write arrives at the engine."""
        if self.store.late:
            self.store.late.pop(self.dice.randrange(len(self.store.late)))()
            self.judge.check_refused()

    def run(self, steps: int) -> None:
        self._found_pool()
        self.calm = False
        for _ in range(steps):
            self.clock.advance(0.001 + self.dice.random() ** 4)
            self._step()
        self._heal()
        self.check()

    def _found_pool(self) -> None:
        first = self.machines[0]
        first.start()
        invited = first.ask(first.peer, wire.InviteRequest(uses=len(self.keys), lifetime_s=1e6))
        assert isinstance(invited, wire.Invited)
        token = parse_invitation(invited.invitation).token
        assert first.service is not None
        for key in self.keys:
            joined = wire.JoinRequest(token=token, public_key=key, purpose="provider")
            granted = first.service.receive(Remote(None, "stranger"), 1, joined).answer
            assert isinstance(granted, wire.JoinGranted), granted

    def _step(self) -> None:
        if self.dice.random() > self.faults:
            self.act()
            return
        machine = self.dice.choice(self.machines)
        match self.dice.randrange(8):
            case 0:
                machine.kill()
            case 1:
                machine.stop()
            case 2:
                machine.frozen = True
            case 3:
                machine.frozen = False
            case 4:
                machine.be_cut(True)
            case 5:
                machine.be_cut(False)
            case 6:
                self.store.down = not self.store.down
            case _:
                self.deliver()

    def act(self) -> None:
        """A broker that is free does something."""
        free = [machine for machine in self.machines if not machine.busy and not machine.frozen]
        for machine in free:
            if machine.service is not None and self.dice.random() < 0.5:
                machine.watch()
        if free:
            machine = self.dice.choice(free)
            deciding = [one for one in free if one.service is not None]
            if machine.service is None and (not deciding or self.dice.random() < 0.3):
                machine.start()
            elif deciding:
                self.ask(self.dice.choice(deciding))

    def ask(self, machine: Machine) -> None:
        dice, member = self.dice, self.dice.choice(self.members)
        owner, job = self.members[0], f"job-{dice.randrange(2)}"
        match dice.randrange(8):
            case 0:
                machine.ask(machine.peer, wire.InviteRequest(uses=1, lifetime_s=3600.0))
            case 1 | 2:
                self.boots[member] = self.boots.get(member, 0) + 1
                profile = msgspec.Raw(
                    msgspec.msgpack.encode(PeerProfile(peer=member, flops_per_s=1e9, memory_bytes=10**9))
                )
                address = ("tcp://127.0.0.1:9",)
                machine.ask(member, wire.Register(boot=self.boots[member], profile=profile, addresses=address))
            case 3:
                machine.ask(member, wire.Heartbeat(boot=self.boots.get(member, 0)))
            case 4:
                granted = machine.ask(owner, self._request(job, owner))
                if isinstance(granted, wire.JobGranted):
                    self.judge.minted(msgspec.msgpack.decode(granted.plan, type=Plan).version)
            case 5:
                state: Literal["running", "done"] = "done" if dice.random() < 0.1 else "running"
                machine.ask(owner, wire.JobReport(job=job, state=state, step=0, detail=str(dice.random())))
            case 6:
                machine.ask(member, wire.PoolQuery())
            case _:
                machine.ask(owner, wire.JobQuery(job=""))

    def _request(self, job: str, owner: PeerId) -> wire.JobRequest:
        plan = Plan(
            graph_hash=str(self.dice.random()),
            stages=(StagePlacement(stage=0, peer=self.dice.choice(self.members[1:]), blocks=(0, 1)),),
            feed=owner,
            standbys=(),
            snapshot_every=0,
            microbatches=1,
            step_time_s=1.0,
            tokens_per_s=1.0,
            certificate=Certificate(method="test", exact=True, bound_tokens_per_s=1.0, optimality_gap=0.0),
        )
        return wire.JobRequest(job=job, title="t", plan=msgspec.Raw(msgspec.msgpack.encode(plan)), steps=10)

    def _heal(self) -> None:
        """End all faults; a broker must decide soon."""
        self.calm, self.store.down = True, False
        while self.store.late:
            self.deliver()
        for machine in self.machines:
            machine.frozen = False
            machine.be_cut(False)
        healed_s = self.clock.now_s()
        while not any(
            isinstance(machine.ask(machine.peer, wire.InviteRequest(uses=1, lifetime_s=60.0)), wire.Invited)
            for machine in self.machines
        ):
            self.clock.advance(0.25)
            for machine in self.machines:
                machine.watch()
                if machine.service is None:
                    machine.start()
            if self.clock.now_s() - healed_s > TAKEOVER_S:
                raise Violation(f"no broker decides {TAKEOVER_S:g} s after the last fault.")

    def check(self) -> None:
        """What was acknowledged is there, and the pool is what its facts make of it."""
        judge, archive = self.judge, self.store.archive
        judge.check_refused()
        for number, data in judge.claimed.items():
            if archive.get(number) != data:
                raise Violation(f"row {number} was acknowledged and is not in the engine.")
        if sorted(archive) != list(range(1, len(archive) + 1)):
            raise Violation(f"rows are missing: {sorted(archive)}.")
        deciding = [one.journal for one in self.machines if one.journal is not None and not one.journal.lapsed]
        if len(deciding) != 1:
            raise Violation(f"{len(deciding)} brokers decide.")
        sequence, found = remembered(deciding[0])
        if sequence != len(archive):
            raise Violation(f"the journal ends at row {sequence}, the engine has had {len(archive)}.")
        if found != pool.replay([decode(archive[number]) for number in sorted(archive)], pool.Pool()):
            raise Violation("the folded pool is not that of its facts.")
