"""Decides the rounds in which replicas exchange between their machines: who takes part, and who waits for what.

A round is decided when every stage of every replica that runs waits for it. It is journalled before any stage hears of
it, so a driver that starts again, and a stage that runs its steps again, find the same members in the same order with
the same shares. It is whole when every stage of every member has all means; that is journalled too, before any stage
adopts them. Until then a replica that ends, fails or is lost is left out by deciding the round again. A round stays
until no member can need it again (`needed_from`).

A replica may begin later: it takes part in the rounds from its first step on, and until its stages have the state after
the last earlier round (`newcomers`) none of those is decided. One that misses a round's deadline is late: when it comes
to the step that ended the round, its stages get the agreed state like a newcomer's, and what it trained counts in its
next round. It can't catch up any more when the others have decided another round.

The book holds no tensor and no connection. `training.joint_exchange` journals, and sends the rounds to the stages;
`twin_round` is a stage's part in one."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from msgspec import Struct

from fusionai.coordination.training.exchanges import NO_EXCHANGES, Exchanges


class ExchangingReplica(Struct, frozen=True, kw_only=True):
    """A replica in a round: its job, and the relative size of the share that it sums."""

    job: str
    weight: float


class JointRound(Struct, frozen=True, kw_only=True):
    """A decided round. `number` counts from 1. `step`: the step of the whole run that ended it. `members`: in the order
    in which differences are summed."""

    number: int
    step: int
    members: tuple[ExchangingReplica, ...]

    def has(self, job: str) -> bool:
        """Return whether a job takes part."""
        return any(member.job == job for member in self.members)


class Newcomer(Struct, frozen=True, kw_only=True):
    """A replica that begins at step `begun` of the whole run, or catches up there, and has stages without the state.
    `round`: number of the round that ended just before. `senders`: members of that round that still run; none if they
    have gone on."""

    job: str
    stages: frozenset[int]
    begun: int
    round: int
    senders: tuple[ExchangingReplica, ...]


@dataclass(slots=True)
class _Replica:
    """A replica that runs. `waiting`: stage -> step whose update it waits for. `joining`: stage that needs the agreed
    state -> steps of the whole run that it has applied when it has it."""

    stages: frozenset[int]
    weight: float
    waiting: dict[int, int] = field(default_factory=dict[int, int])
    joining: dict[int, int] = field(default_factory=dict[int, int])

    @property
    def step(self) -> int | None:
        """The step at which all stages wait, None if one does not."""
        steps = set(self.waiting.values())
        return next(iter(steps)) if self.waiting.keys() >= self.stages and len(steps) == 1 else None


@dataclass(slots=True)
class RoundBook:
    """`rounds`: decided rounds that may be needed again, by number. `last`: number of the last decided round.
    `exchanges`: of the whole run."""

    rounds: dict[int, JointRound] = field(default_factory=dict[int, JointRound])
    last: int = 0
    last_step: int = -1
    """Step that ended the last decided round."""
    whole: int = 0
    """Number of the last round that is whole."""
    expected: dict[str, int] = field(default_factory=dict[str, int])
    """Replica -> step of the whole run from which no round is decided without it."""
    exchanges: Exchanges = NO_EXCHANGES
    late: dict[str, int] = field(default_factory=dict[str, int])
    """Replica that missed the deadline of a round and has not come yet -> the step that ended the round."""
    caught_up: set[str] = field(default_factory=set[str])
    """Replicas whose next difference has also what they trained in a round that they missed."""
    _replicas: dict[str, _Replica] = field(default_factory=dict[str, _Replica])
    _agreed: set[tuple[str, int]] = field(default_factory=set[tuple[str, int]])
    """(job, stage) that have all means of the last round."""
    _saved: dict[str, int] = field(default_factory=dict[str, int])
    """Job -> steps of the whole run after which it saved its state last."""
    _needed: dict[str, int] = field(default_factory=dict[str, int])
    """Job -> first step that one of its stages may run again."""

    def place(self, job: str, stages: Iterable[int], weight: float) -> list[int]:
        """A replica begins a round of its driver with these stages: none of them waits any more. Return the numbers of
        rounds that its members must hear of again."""
        waited = self._rounds_of(job)
        self._agreed = {one for one in self._agreed if one[0] != job}
        self._replicas[job] = _Replica(frozenset(stages), weight)
        return waited

    def leave(self, job: str) -> list[int]:
        """A replica has ended. A round that it takes part in and that is not whole is taken back: the others decide it
        again without the replica. Return the numbers of earlier rounds that others wait for in vain."""
        self.expected.pop(job, None)
        self.late.pop(job, None)
        self._replicas.pop(job, None)
        self._take_back(job)
        return [
            one.number
            for one in self.rounds.values()
            if one.number != self.last and one.has(job) and self.is_awaited(one.number)
        ]

    def misses(self, job: str, step: int) -> None:
        """The round that `step` ends goes on without a replica, which can catch up until the next one is decided."""
        self.expected.pop(job, None)
        self.late[job] = step
        self._take_back(job)

    def _take_back(self, job: str) -> None:
        if (one := self.rounds.get(self.last)) is not None and one.has(job) and self.last > self.whole:
            del self.rounds[one.number]
            self.last_step = one.step - 1
            self._agreed.clear()

    def agrees(self, job: str, stage: int, number: int) -> bool:
        """A stage has all means of a round. Return whether that makes the round whole, or it was whole before."""
        if number == self.last:
            self._agreed.add((job, stage))
        if number in self.rounds and number <= self.whole:
            return True
        if number != self.last or (one := self.rounds.get(number)) is None:
            return False
        stages = {
            (member.job, stage)
            for member in one.members
            if (replica := self._replicas.get(member.job)) is not None
            for stage in replica.stages
        }
        if len({job for job, _ in stages}) < len(one.members) or not self._agreed >= stages:
            return False
        self.whole = number
        return True

    def waits(self, job: str, stage: int, step: int) -> list[int]:
        """A stage waits for the update of `step`. Return the decided round that it waits for, if there is one. In the
        last round without this replica, its stages get the agreed state (`newcomers`)."""
        replica = self._replicas.get(job)
        if replica is None or stage not in replica.stages:
            return []
        replica.waiting[stage] = step
        if step == self.last_step and not self._took_part(job, step):
            there = self.exchanges.adopted_at(step) + 1
            replica.joining |= {stage: there for stage, at in replica.waiting.items() if at == step}
            self.late.pop(job, None)
            self.expected[job] = step + 1
            self.caught_up.add(job)
        return [one.number for one in self.rounds.values() if one.step == step and one.has(job)]

    def is_lost(self, job: str, step: int) -> bool:
        """Return whether a replica waits for the update of a step that was decided without it, or forgotten, before the
        last one."""
        return step < self.last_step and not self._took_part(job, step)

    def _took_part(self, job: str, step: int) -> bool:
        return any(one.step == step and one.has(job) for one in self.rounds.values())

    def applied(self, job: str, stage: int, below: int) -> list[int]:
        """A stage has applied the first `below` steps. Return rounds of these steps that stages of other replicas wait
        for: the stage must serve them or say that it can't."""
        replica = self._replicas.get(job)
        if replica is None:
            return []
        if (step := replica.waiting.get(stage)) is not None and self.exchanges.adopted_at(step) < below:
            del replica.waiting[stage]
        if replica.joining.get(stage, below + 1) <= below:
            del replica.joining[stage]
        past = [one for one in self.rounds.values() if self.exchanges.adopted_at(one.step) < below and one.has(job)]
        return [one.number for one in past if self.is_awaited(one.number)]

    def decide(self) -> JointRound | None:
        """Return a new round if every replica that has begun waits for one, and count it as decided."""
        step = self.next_step()
        if step is None or self.missing(step):
            return None
        jobs = sorted(job for job, begun in self.expected.items() if begun <= step)
        members = tuple(ExchangingReplica(job=job, weight=self._replicas[job].weight) for job in jobs)
        self.last, self.last_step = self.last + 1, step
        self._agreed.clear()
        self.rounds[self.last] = JointRound(number=self.last, step=step, members=members)
        return self.rounds[self.last]

    def next_step(self) -> int | None:
        """Return the step of the whole run for whose update the first replica waits, None if none waits."""
        return min((step for job in self.expected if (step := self._open_step(job)) is not None), default=None)

    def missing(self, step: int) -> frozenset[str]:
        """Return the replicas that a round after this step waits for."""
        return frozenset(job for job, begun in self.expected.items() if begun <= step and self._open_step(job) != step)

    def waits_in_vain(self, jobs: Iterable[str]) -> bool:
        """Return whether all of these replicas wait for a round that another one is missing from."""
        named = set(jobs)
        steps = [step for job in named if (step := self._open_step(job)) is not None]
        if not steps or len(steps) < len(named):
            return False
        return any(begun <= min(steps) for job, begun in self.expected.items() if job not in named)

    def joins(self, job: str, stage: int) -> None:
        """A stage of a replica that begins later needs the agreed state."""
        if (replica := self._replicas.get(job)) is not None and stage in replica.stages:
            replica.joining[stage] = self.expected.get(job, 0)

    def is_joining(self, job: str) -> bool:
        """Return whether a replica needs the agreed state to begin, or to catch up."""
        return (replica := self._replicas.get(job)) is not None and bool(replica.joining)

    def newcomers(self) -> list[Newcomer]:
        """Return the replicas whose stages need the agreed state, and who can send it to them."""
        found: list[Newcomer] = []
        for job, replica in sorted(self._replicas.items()):
            begun = self.expected.get(job)
            if begun is None or not replica.joining or begun - 1 > self.last_step:
                continue
            last = self.rounds.get(self.last) if begun - 1 == self.last_step else None
            members = () if last is None else last.members
            senders = tuple(one for one in members if one.job in self._replicas and one.job != job)
            found.append(
                Newcomer(job=job, stages=frozenset(replica.joining), begun=begun, round=self.last, senders=senders)
            )
        return found

    def waiting(self, number: int) -> frozenset[tuple[str, int]]:
        """Return (job, stage) of the stages that wait for a decided round."""
        return frozenset(
            (member.job, stage)
            for member in self.rounds[number].members
            if (replica := self._replicas.get(member.job)) is not None
            for stage, step in replica.waiting.items()
            if step == self.rounds[number].step
        )

    def is_awaited(self, number: int) -> bool:
        """Return whether a stage waits for a decided round."""
        return bool(self.waiting(number))

    @property
    def is_open(self) -> bool:
        """Return whether a stage waits for means of the last decided round, or for others to get theirs."""
        return self.last in self.rounds and bool(self._lacking)

    @property
    def _lacking(self) -> frozenset[tuple[str, int]]:
        """(job, stage) that wait for the last decided round; not those that have only to adopt it."""
        having = self._agreed if self.last == self.whole else frozenset[tuple[str, int]]()
        return self.waiting(self.last) - having

    @property
    def awaited_step(self) -> int | None:
        """Return the step that ends the round which some replica waits for."""
        return self.last_step if self.is_open else self.next_step()

    def left_out(self, step: int, lost: frozenset[str]) -> frozenset[str]:
        """Return the replicas that the awaited round, which `step` ends, goes on without after the deadline. `lost`:
        those that have lost a machine."""
        return self.missing(step) if step > self.last_step else self.stuck(lost)

    def overtaken(self) -> frozenset[str]:
        """Return the late replicas that can't catch up, because the others have decided another round."""
        return frozenset(job for job, step in self.late.items() if step < self.last_step)

    def may_catch_up(self, job: str, step: int) -> bool:
        """Return whether a replica that the awaited round goes on without, which `step` ends, may come later."""
        is_whole = step == self.last_step and self.last == self.whole
        return not is_whole and not self.is_joining(job)

    def stuck(self, lost: frozenset[str]) -> frozenset[str]:
        """Return the replicas that the last decided round can't be completed with, if these have lost a machine. Before
        the round is whole it is decided again without those. Afterwards a stage that runs it again may wait for a
        member that has ended."""
        one = self.rounds[self.last]
        if self.last > self.whole:
            return frozenset(job for job in lost if one.has(job))
        if all(member.job in self._replicas for member in one.members):
            return frozenset()
        return frozenset(job for job, _ in self._lacking)

    def saved_by(self, job: str, steps: int) -> int:
        """A replica has saved its state after `steps` steps. Return the fewest that a replica has saved."""
        self._saved[job] = steps
        return min(self._saved.get(job, begun) for job, begun in ({job: steps} | self.expected).items())

    def is_settled(self, job: str) -> bool:
        """Return whether no stage of another replica waits for a round that this one takes part in."""
        return not any(
            other != job for one in self.rounds.values() if one.has(job) for other, _ in self.waiting(one.number)
        )

    def needed_from(self, job: str, step: int) -> None:
        """No stage of this replica runs steps before `step` again: drop rounds that no replica needs."""
        self._needed[job] = step
        self.rounds = {number: one for number, one in self.rounds.items() if self._is_needed(one, self._needed)}

    @property
    def kept_from(self) -> int:
        """Number of the first round that may be needed again."""
        return min(self.rounds, default=self.last + 1)

    def _is_needed(self, one: JointRound, needed: Mapping[str, int]) -> bool:
        jobs = {member.job for member in one.members} & (self.expected.keys() | self.late.keys())
        adopted_at = self.exchanges.adopted_at(one.step)
        return one.number == self.last or any(adopted_at >= needed.get(job, 0) for job in jobs)

    def _open_step(self, job: str) -> int | None:
        """Return the step that all stages of a replica wait at, if no round is decided for it yet."""
        step = None if (replica := self._replicas.get(job)) is None else replica.step
        return step if step is not None and step > self.last_step else None

    def _rounds_of(self, job: str) -> list[int]:
        return [number for number in self.rounds if any(waiting == job for waiting, _ in self.waiting(number))]
